"""S04: on cancel or deadline the process tree and the row of a job are both closed, whatever the handler does."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_testing.processes import Process, Processes
from support import stubborn
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor
from support.stubborn_runs import BOUND_S, all_run, both_close, seconds

pytestmark = pytest.mark.case("S04")

ONCE = workflow_pb2.RetryPolicy(max_attempts=1)


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as started:
        yield started


@pytest_asyncio.fixture
async def executor(world: RunningScheduler, processes: Processes, tmp_path: Path) -> Process:
    return await spawn_executor(
        processes,
        world.address,
        tmp_path,
        module="support.stubborn",
        prestart=5,
        env={"RARA_TEST_HOLD": str(tmp_path / "hold")},
    )


async def test_a_cancel_ends_every_kind_of_running_handler(
    world: RunningScheduler, executor: Process, tmp_path: Path
) -> None:
    await world.define("all", stubborn.steps())
    run_id = await world.start("all", value={"folder": str(tmp_path)})
    pids = await all_run(world, run_id, tmp_path, stubborn.KINDS)
    await world.cancel(run_id)
    assert await both_close(world, run_id, pids, BOUND_S) == "cancelled"
    assert set((await world.steps(run_id)).values()) == {("cancelled", "CANCELLED")}
    confirmed = await world.raw.fetch("select step_name, cancel_confirmed_at from rara.step_state")
    assert all(row["cancel_confirmed_at"] for row in confirmed), confirmed
    assert all(len(stubborn.starts(tmp_path, name)) == 1 for name in stubborn.KINDS)


TIMEOUTS = {
    "timeout": ("terminal_failed", "DEADLINE_EXCEEDED"),
    "attempt_timeout": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
    "progress_timeout": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
}


@pytest.mark.parametrize("timeout", TIMEOUTS)
async def test_a_steps_own_timeout_ends_every_kind_of_running_handler(
    world: RunningScheduler, executor: Process, tmp_path: Path, timeout: str
) -> None:
    limit_s = 5 if timeout == "timeout" else 2  # the others count from each handler's start
    fields = {timeout: seconds(limit_s), "retry": ONCE}
    await world.define("all", stubborn.steps(**fields), on_failure="CONTINUE")
    run_id = await world.start("all", value={"folder": str(tmp_path)})
    pids = await all_run(world, run_id, tmp_path, stubborn.KINDS)
    assert await both_close(world, run_id, pids, limit_s + BOUND_S) == "failed"
    assert set((await world.steps(run_id)).values()) == {TIMEOUTS[timeout]}
    assert all(len(stubborn.starts(tmp_path, name)) == 1 for name in stubborn.KINDS)


async def test_the_runs_deadline_ends_every_kind_of_running_handler(
    world: RunningScheduler, executor: Process, tmp_path: Path
) -> None:
    await world.define("all", stubborn.steps(), on_failure="CONTINUE")
    run_id = await world.start("all", value={"folder": str(tmp_path)}, run_timeout=seconds(5))
    pids = await all_run(world, run_id, tmp_path, stubborn.KINDS)
    assert await both_close(world, run_id, pids, 5 + BOUND_S) == "failed"
    assert set((await world.steps(run_id)).values()) == {("terminal_failed", "DEADLINE_EXCEEDED")}


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_what_is_leased_and_has_no_runner_yet_ends_without_a_start(
    world: RunningScheduler, executor: Process, tmp_path: Path, how: str
) -> None:
    hold = tmp_path / "hold"
    await world.define("busy", {f"b{number}": {"kind": "stubborn.blocking"} for number in range(5)})
    busy = await world.start("busy", value={"folder": str(tmp_path)})
    pids = await all_run(world, busy, tmp_path, tuple(f"b{number}" for number in range(5)))
    hold.touch()  # the next runner does not get beyond its imports
    await world.define("late", {"late": {"kind": "stubborn.blocking"}})
    run_timeout = {"run_timeout": seconds(1)} if how == "deadline" else {}
    late = await world.start("late", value={"folder": str(tmp_path)}, **run_timeout)

    async def accepted() -> bool:
        row = await world.raw.fetchrow(
            "select l.accepted_at, s.state from rara.lease l join rara.step_state s using (step_run_id)"
            " where s.workflow_run_id = $1::uuid",
            late,
        )
        return row is not None and row["accepted_at"] is not None and row["state"] == "leased"

    await until(accepted, "an accepted lease")
    if how == "cancel":
        await world.cancel(late)
    await world.until_run(late, "cancelled", "failed")
    state = {"cancel": ("cancelled", "CANCELLED"), "deadline": ("terminal_failed", "DEADLINE_EXCEEDED")}[how]
    assert await world.steps(late) == {"late": state}
    hold.unlink()
    await world.cancel(busy)
    assert await both_close(world, busy, pids, BOUND_S) == "cancelled"
    assert not stubborn.starts(tmp_path, "late")


async def test_a_dead_executor_leaves_no_process_of_any_handler(
    world: RunningScheduler, executor: Process, tmp_path: Path
) -> None:
    """The cancel that nobody is there to carry out: the warden ends the processes, the lease's end the rows."""
    await world.define("all", stubborn.steps())
    run_id = await world.start("all", value={"folder": str(tmp_path)})
    pids = await all_run(world, run_id, tmp_path, stubborn.KINDS)
    await world.cancel(run_id)
    executor.kill()
    assert await both_close(world, run_id, pids, BOUND_S) == "cancelled"
