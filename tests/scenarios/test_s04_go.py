"""S04 with Go and Python at work together: cancel, timeouts and a dead executor close rows and process trees."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_testing.processes import Process, Processes
from support import stubborn
from support.go_executor import program, spawn_go_executor
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor
from support.stubborn_runs import BOUND_S, all_run, asked, both_close, seconds

pytestmark = [pytest.mark.needs("go"), pytest.mark.case("S04")]

GO = ("cooperates", "leaks", "process", "children")  # the last two in processes of their own
PYTHON = ("swallows", "blocking", "children")
ONCE = workflow_pb2.RetryPolicy(max_attempts=1)
STEPS = {f"{kind}_{name}": (kind, name) for kind, names in (("go", GO), ("python", PYTHON)) for name in names}
NAMES = tuple(STEPS)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The build is nobody's test."""
    program("rara-go-chaos")


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def executors(world: RunningScheduler, tmp_path: Path) -> AsyncIterator[tuple[Process, Process]]:
    """The Go and the Python one."""
    async with Processes(tmp_path) as processes:
        go, python = await asyncio.gather(
            spawn_go_executor(processes, world.address, tmp_path, command="rara-go-chaos"),
            spawn_executor(processes, world.address, tmp_path, module="support.stubborn", prestart=3),
        )
        yield go, python


async def at_work(
    world: RunningScheduler, folder: Path, run_timeout_s: float = 0, **fields: object
) -> tuple[str, set[int]]:
    """A run of all steps, each in its handler; the processes that are to end with it."""
    steps = {
        step: {"kind": f"stubborn.{name}", "executor_kind": kind} | fields
        for step, (kind, name) in STEPS.items()
    }
    await world.define("all", steps, on_failure="CONTINUE")
    more = {"run_timeout": seconds(run_timeout_s)} if run_timeout_s else {}
    run_id = await world.start("all", value={"folder": str(folder)}, **more)
    return run_id, await all_run(world, run_id, folder, NAMES)


async def facts(world: RunningScheduler) -> list[tuple[object, ...]]:
    """What is stored of each step, with the numbers of its events, artifacts and effects."""
    rows = await world.raw.fetch(
        "select s.step_name, s.state, s.reason, s.attempt, s.failures, s.output,"
        " (select count(*) from rara.step_event v where v.step_run_id = s.step_run_id),"
        " (select count(*) from rara.artifact a where a.step_run_id = s.step_run_id),"
        " (select count(*) from rara.effect e join rara.step_run r using (idempotency_key)"
        " where r.step_run_id = s.step_run_id) from rara.step_state s order by 1"
    )
    return [tuple(row) for row in rows]


def logged(executor: Process) -> set[str]:
    lines = executor.stderr.read_text().splitlines()
    return {json.loads(line)["event"] for line in lines if line[:1] == "{"}


async def nothing_late_is_heard(
    world: RunningScheduler, go: Process, folder: Path, before: list[tuple[object, ...]]
) -> None:
    """The handler that ignores its context goes on in the end, and whatever it says changes nothing."""
    await asked(lambda: "handler.leaked" in logged(go), "report of the leak", 10)
    (folder / "go_leaks.go").touch()
    said = folder / "go_leaks.said"
    await asked(said.exists, "late words", 10)
    await asked(lambda: "handler.returned_late" in logged(go), "late return", 10)
    words = dict(line.split(" ", 1) for line in said.read_text().splitlines())
    assert "the job is to stop" in words["progress"]
    assert "the job is to stop" in words["once"]
    assert words["reason"]
    assert await facts(world) == before


ENDS = {
    "cancel": ("cancelled", "cancelled", "CANCELLED"),
    "run_timeout": ("failed", "terminal_failed", "DEADLINE_EXCEEDED"),
    "attempt_timeout": ("failed", "terminal_failed", "ATTEMPTS_EXHAUSTED"),
}


@pytest.mark.parametrize(
    "how", ["cancel", "run_timeout", pytest.param("attempt_timeout", marks=pytest.mark.soak)]
)
async def test_handlers_of_both_languages_end_with_their_processes(
    world: RunningScheduler, executors: tuple[Process, Process], tmp_path: Path, how: str
) -> None:
    go, _ = executors
    limit_s = {"run_timeout": 5, "attempt_timeout": 3}.get(how, 0)  # before it all of them have to be at work
    fields = {"attempt_timeout": seconds(limit_s), "retry": ONCE} if how == "attempt_timeout" else {}
    run_id, pids = await at_work(world, tmp_path, limit_s if how == "run_timeout" else 0, **fields)
    if how == "cancel":
        await world.cancel(run_id)
    run_state, *step_end = ENDS[how]
    assert await both_close(world, run_id, pids, BOUND_S + limit_s) == run_state
    assert await world.steps(run_id) == dict.fromkeys(NAMES, tuple(step_end))
    if how == "cancel":
        confirmed = await world.raw.fetch("select cancel_confirmed_at from rara.step_state")
        assert all(row["cancel_confirmed_at"] for row in confirmed)
    assert all(len(stubborn.starts(tmp_path, name)) == 1 for name in NAMES)
    await nothing_late_is_heard(world, go, tmp_path, await facts(world))
    assert go.returncode is None


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_go_executor_that_is_gone_leaves_no_process_of_its_handlers(
    world: RunningScheduler, executors: tuple[Process, Process], tmp_path: Path, how: str
) -> None:
    """Killed: they end at once. Frozen: they end by themselves when the lease is over, before anybody has it next."""
    go, python = executors
    run_id, _ = await at_work(world, tmp_path, retry=ONCE)
    pids = stubborn.pids_of(tmp_path, *(f"go_{name}" for name in GO))
    others = stubborn.pids_of(tmp_path, *(f"python_{name}" for name in PYTHON))
    go.kill() if how == "killed" else go.freeze()
    await asked(lambda: not stubborn.living(pids), f"end of {pids}", BOUND_S)

    async def expired() -> bool:
        found = await world.steps(run_id)
        return {found[f"go_{name}"] for name in GO} == {("terminal_failed", "ATTEMPTS_EXHAUSTED")}

    await until(expired, "end of all Go steps")
    assert stubborn.living(others) == others
    assert python.returncode is None
    if how == "frozen":
        before = await facts(world)
        go.thaw()
        await nothing_late_is_heard(world, go, tmp_path, before)
    await world.cancel(run_id)
    assert await both_close(world, run_id, others, BOUND_S) in ("failed", "cancelled")
    assert all(len(stubborn.starts(tmp_path, name)) == 1 for name in NAMES)
