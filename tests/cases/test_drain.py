"""A drain ends with one line that says what became of the jobs: the same in Python, Go and the scheduler."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio
from rara_testing.ports import free_port
from rara_testing.processes import Process, Processes
from support.database_paths import frozen, sessions
from support.drain_line import drained, events_of
from support.go_executor import spawn_go_executor
from support.running_executor import TESTS
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor

STOP_S = 3.0
LONG_LEASE: Final[dict[str, Any]] = {"lease_s": 20.0, "silence_s": 5.0, "heartbeat_s": 0.5}
# By language: what waits for a file, what then fails, and what takes no notice of its cancel.
KINDS: Final = {
    "python": ("timed.steady", "timed.fails", "timed.ignores"),
    "go": ("probe.await", "probe.await", "probe.ignore_cancel"),
}
LANGUAGES = pytest.mark.parametrize("language", ["python", pytest.param("go", marks=pytest.mark.needs("go"))])


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as opened:
        yield opened


async def spawn(language: str, processes: Processes, address: str, folder: Path, **settings: Any) -> Process:
    if language == "go":
        return await spawn_go_executor(processes, address, folder, **settings)
    return await spawn_executor(
        processes, address, folder, module="support.timed_handlers", prestart=0, **settings
    )


async def until_running(world: RunningScheduler, count: int) -> None:
    await until(
        lambda: world.raw.fetchval(
            "select count(*) = $1 from rara.lease where started_at is not null", count
        ),
        f"{count} running steps",
    )


async def attempts(world: RunningScheduler) -> dict[str, tuple[str, bool]]:
    """Reason and cost of each ended attempt by its step's name."""
    rows = await world.raw.fetch(
        "select step_name, reason, spent from rara.step_attempt join rara.step_run using (step_run_id)"
    )
    return {row["step_name"]: (row["reason"], row["spent"]) for row in rows}


@LANGUAGES
async def test_the_line_tells_what_ended_what_was_handed_back_and_what_it_cost(
    database_url: str, tmp_path: Path, processes: Processes, language: str
) -> None:
    waits, fails, ignores = KINDS[language]
    held, ending = {"file": str(tmp_path / "never")}, {"file": str(tmp_path / "end")}
    async with running_scheduler(database_url, tmp_path, **LONG_LEASE) as world:
        executor = await spawn(language, processes, world.address, tmp_path, slots=4, stop_s=STOP_S)
        inputs = {
            "ends": (waits, ending),
            "fails": (fails, ending | {"code": "TOOL_FAILED"}),
            "obeys": (waits, held),
            "ignores": (ignores, {"seconds": 600}),
        }
        for name, (kind, given) in inputs.items():
            await world.define(name, {name: {"kind": kind}})
            await world.start(name, value=given)
        await until_running(world, 4)
        executor.terminate()
        await until(lambda: logged(executor, "executor.draining"), "begun drain")
        (tmp_path / "end").touch()
        assert await executor.wait(STOP_S + 10) == 0
        assert drained(executor) == (2, 2, 0, 1)
        assert (await attempts(world)) == {
            "fails": ("TOOL_FAILED", True),
            "obeys": ("EXECUTOR_SHUTDOWN", False),
            "ignores": ("EXECUTOR_SHUTDOWN", False),
        }
        assert await world.raw.fetchval("select count(*) from rara.result") == 1  # "ends"


async def logged(process: Process, event: str) -> bool:
    return bool(events_of(process, event))


@LANGUAGES
async def test_what_nobody_could_be_told_is_lost_and_the_line_says_so(
    database_url: str, tmp_path: Path, processes: Processes, language: str
) -> None:
    """The scheduler ends, and with it whoever could hear of the job."""
    async with contextlib.AsyncExitStack() as stack:
        world = await stack.enter_async_context(running_scheduler(database_url, tmp_path, **LONG_LEASE))
        executor = await spawn(language, processes, world.address, tmp_path, slots=1, stop_s=1)
        await world.define("hold", {"a": {"kind": KINDS[language][0]}})
        await world.start("hold", value={"file": str(tmp_path / "never")})
        await until_running(world, 1)
        await stack.aclose()
        assert await executor.stop(10) == 0
        assert drained(executor) == (0, 0, 1, 1)


async def test_a_stop_while_postgresql_stands_still_claims_nothing_that_is_not_stored(
    database_url: str, tmp_path: Path, processes: Processes
) -> None:
    """Nobody had confirmed the result, which the scheduler stores when it can: the line is not too good."""
    async with running_scheduler(database_url, tmp_path, **LONG_LEASE) as world:
        executor = await spawn("python", processes, world.address, tmp_path, slots=1, stop_s=1)
        await world.define("hold", {"a": {"kind": "timed.steady"}})
        run_id = await world.start("hold", value={"file": str(tmp_path / "end")})
        await until_running(world, 1)
        with frozen(await sessions(world.raw, "rara-scheduler")):
            executor.terminate()
            await until(lambda: logged(executor, "executor.draining"), "begun drain")
            (tmp_path / "end").touch()
            assert await executor.wait(20) == 0
            assert drained(executor) == (0, 0, 1, 1)
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert await world.raw.fetchval("select failures from rara.result") == 0


async def test_an_operators_drain_ends_with_the_line_too(
    database_url: str, tmp_path: Path, processes: Processes
) -> None:
    async with running_scheduler(database_url, tmp_path, **LONG_LEASE) as world:
        executor = await spawn("python", processes, world.address, tmp_path, slots=1, stop_s=STOP_S)
        executor_id = str(await world.raw.fetchval("select executor_id from rara.executor"))
        await world.drain(executor_id)
        assert await executor.wait(20) == 0
        assert drained(executor) == (0, 0, 0, 0)


@LANGUAGES
@pytest.mark.parametrize(("within_s", "line"), [(None, (1, 0, 0, 0)), (0.2, (0, 1, 0, 0))])
async def test_an_operators_drain_reaches_a_process_that_was_dialled(
    database_url: str,
    tmp_path: Path,
    processes: Processes,
    language: str,
    within_s: float | None,
    line: tuple[int, int, int, int],
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with running_scheduler(database_url, tmp_path, direct_executors=(listen,), **LONG_LEASE) as world:
        executor = await spawn(
            language, processes, world.address, tmp_path, slots=1, stop_s=STOP_S, listen=listen
        )
        await world.define("hold", {"a": {"kind": KINDS[language][0]}})
        await world.start("hold", value={"file": str(tmp_path / "end")})
        await until_running(world, 1)
        executor_id = str(await world.raw.fetchval("select executor_id from rara.executor"))
        await world.drain(executor_id, within_s=within_s)
        await until(lambda: logged(executor, "executor.draining"), "begun drain")
        if within_s is None:
            (tmp_path / "end").touch()
        assert await executor.wait(20) == 0
        assert drained(executor) == line
        assert await attempts(world) == ({"a": ("EXECUTOR_SHUTDOWN", False)} if within_s else {})


async def test_a_drain_and_its_bound_reach_an_executor_of_another_scheduler(
    database_url: str, tmp_path: Path, processes: Processes
) -> None:
    async with (
        running_scheduler(database_url, tmp_path, **LONG_LEASE) as world,
        running_scheduler(database_url, tmp_path, check_history=False, **LONG_LEASE) as other,
    ):
        executor = await spawn("python", processes, world.address, tmp_path, slots=1, stop_s=STOP_S)
        await world.define("hold", {"a": {"kind": "timed.steady"}})
        await world.start("hold", value={"file": str(tmp_path / "never")})
        await until_running(world, 1)
        executor_id = str(await world.raw.fetchval("select executor_id from rara.executor"))
        await other.drain(executor_id)  # as long as it needs
        await until(lambda: logged(executor, "executor.draining"), "begun drain")
        assert executor.returncode is None
        await other.drain(executor_id, within_s=0.2)
        assert await executor.wait(20) == 0
        assert drained(executor) == (0, 1, 0, 0)


# ---------------------------------------------------------------- stops that are not waited for, or come early


@LANGUAGES
async def test_a_second_signal_says_what_it_leaves_behind(
    database_url: str, tmp_path: Path, processes: Processes, language: str
) -> None:
    async with running_scheduler(database_url, tmp_path, **LONG_LEASE) as world:
        executor = await spawn(language, processes, world.address, tmp_path, slots=1, stop_s=30)
        await world.define("hold", {"a": {"kind": KINDS[language][0]}})
        await world.start("hold", value={"file": str(tmp_path / "never")})
        await until_running(world, 1)
        executor.terminate()
        await until(lambda: logged(executor, "executor.draining"), "begun drain")
        assert await executor.stop(10) == 1
        assert drained(executor) == (0, 0, 1, 1)


async def test_an_executor_that_is_stopped_while_it_starts_ends_in_order(
    tmp_path: Path, processes: Processes
) -> None:
    """Its operations are still being imported."""
    (tmp_path / "hold").touch()
    executor = await processes.start(
        "early",
        ["rara-executor", "--module", "support.stubborn", "--dir", str(tmp_path / "w")],
        env={"PYTHONPATH": str(TESTS), "RARA_TEST_HOLD": str(tmp_path / "hold"), "RARA_LOG_FORMAT": "json"},
    )
    await until(lambda: has_runner(executor), "runner that imports")
    assert await executor.stop(15) == 0
    assert drained(executor) == (0, 0, 0, 0)


async def has_runner(executor: Process) -> bool:
    """Beside the warden, which comes first."""
    await asyncio.sleep(0)
    return len(executor.children()) > 1
