"""How long a step is without an owner: seconds after a kill, nothing after an orderly stop, never early."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from rara_testing.auto_executor import AutoExecutor
from rara_testing.fault_proxy import End, FaultProxy
from rara_testing.processes import Processes
from support.executor_process import notes, start_executor
from support.running_scheduler import (
    HEARTBEAT_S,
    LEASE_S,
    SWEEP_S,
    RunningScheduler,
    running_scheduler,
    until,
)

WORK = "case.work"
BUSY_S = 2.0  # what a machine with other work adds


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path / "processes") as opened:
        yield opened


async def running_lease(world: RunningScheduler, attempt: int) -> asyncpg.Record:
    async def look() -> asyncpg.Record | None:
        return await world.raw.fetchrow(
            "select * from rara.lease where attempt = $1 and last_sequence >= 3", attempt
        )

    return await until(look, f"attempt {attempt} at work")


async def database_now(world: RunningScheduler) -> float:
    now: float = await world.raw.fetchval("select extract(epoch from clock_timestamp())::float8")
    return now


@pytest.mark.case("STR-1")
async def test_the_next_attempt_of_a_killed_executor_runs_within_lease_sweep_and_a_second(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    await world.define("one", {"a": {"kind": WORK}})
    run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 1})
    first = await start_executor(processes, world.address, tmp_path)
    before = await running_lease(world, 1)
    async with AutoExecutor(world.address, {WORK: lambda _: {}}):  # stands by
        killed_at = await database_now(world)
        await first.kill_and_wait()
        await world.until_run(run_id, "succeeded")
    row = await world.raw.fetchrow("select granted_at, started_at, attempt, lease_token from rara.result")
    assert row is not None
    assert row["attempt"] == 2
    assert row["lease_token"] > before["lease_token"]
    assert row["started_at"].timestamp() - killed_at <= LEASE_S + SWEEP_S + 1.0 + BUSY_S
    assert row["granted_at"] > before["expires_at"]  # the socket that closed with the process proved nothing


@pytest.mark.case("STR-1", "STR-2")
async def test_an_orderly_stop_hands_back_at_once_and_free(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    await world.define("one", {"a": {"kind": WORK}})
    run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 1})
    first = await start_executor(processes, world.address, tmp_path, stop_s=1.0)
    before = await running_lease(world, 1)
    async with AutoExecutor(world.address, {WORK: lambda _: {}}):
        stopped_at = await database_now(world)
        first.terminate()
        await world.until_run(run_id, "succeeded")
    assert await first.wait() == 0
    row = await world.raw.fetchrow("select started_at, attempt, failures from rara.result")
    assert row is not None
    assert (row["attempt"], row["failures"]) == (2, 0)
    # Its last second is for the handler to finish. Then nobody waits for a lease to run out.
    assert row["started_at"].timestamp() - stopped_at < 1.0 + BUSY_S
    (ended,) = await world.raw.fetch("select reason, spent, ended_at, lease_token from rara.step_attempt")
    assert (ended["reason"], ended["spent"]) == ("EXECUTOR_SHUTDOWN", False)
    assert ended["lease_token"] == before["lease_token"]
    assert (row["started_at"] - ended["ended_at"]).total_seconds() < BUSY_S
    assert await world.raw.fetchval("select count(*) from rara.executor where draining") == 1


@pytest.mark.case("STR-1", "S06")
@pytest.mark.parametrize("how", End)
async def test_a_link_that_is_cut_costs_no_attempt_when_the_executor_is_back_within_the_lease(
    database_url: str, processes: Processes, tmp_path: Path, how: End
) -> None:
    # Nothing here waits for a lease: a long one leaves room for what else the machine does.
    async with running_scheduler(database_url, tmp_path, lease_s=10.0) as world:
        await cut_three_times(world, processes, tmp_path, how)


async def cut_three_times(world: RunningScheduler, processes: Processes, tmp_path: Path, how: End) -> None:
    await world.define("one", {"a": {"kind": WORK}})
    run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 1})
    host, _, port = world.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        await start_executor(processes, proxy.address, tmp_path)
        lease = await running_lease(world, 1)
        for turn in range(3):
            session_id = await world.raw.fetchval("select session_id from rara.executor")
            if turn == 2:
                proxy.refuse()  # for a while, at the last time: nobody gets through
            proxy.cut(how)

            async def session_ended() -> bool:
                return bool(await world.raw.fetchval("select ended_at is not null from rara.executor"))

            if turn == 2:
                await until(session_ended, "the end of the session")
                await asyncio.sleep(1.0)  # away for a while, which is the fault and not a wait
                proxy.resume()

            async def new_session(old: object = session_id) -> bool:
                found = "select session_id <> $1 and ended_at is null from rara.executor"
                return bool(await world.raw.fetchval(found, old))

            await until(new_session, "a new session")
        renewed = await world.raw.fetchval("select expires_at from rara.lease")

        async def renewed_again() -> bool:
            return bool(await world.raw.fetchval("select expires_at > $1 from rara.lease", renewed))

        await until(renewed_again, "a heartbeat over the new link", 2 * HEARTBEAT_S + BUSY_S)
        (tmp_path / "gate-1").touch()
        await world.until_run(run_id, "succeeded")
    (row,) = await world.raw.fetch("select attempt, failures, lease_token from rara.result")
    assert tuple(row) == (1, 0, lease["lease_token"])
    assert len(notes(tmp_path, "starts")) == len(notes(tmp_path, "effects")) == 1
    assert await world.raw.fetchval("select count(*) from rara.step_attempt") == 0


@pytest.mark.case("STR-1")
async def test_a_link_that_stays_cut_frees_the_step_when_the_lease_has_run_out_and_not_before(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    await world.define("one", {"a": {"kind": WORK}})
    run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 1})
    host, _, port = world.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        await start_executor(processes, proxy.address, tmp_path)
        await running_lease(world, 1)
        async with AutoExecutor(world.address, {WORK: lambda _: {}}):  # free all the time
            proxy.refuse()
            proxy.reset()
            cut_at = time.monotonic()
            expires_at = await world.raw.fetchval("select expires_at from rara.lease")
            await world.until_run(run_id, "succeeded")
            assert time.monotonic() - cut_at < LEASE_S + SWEEP_S + 1.0 + BUSY_S
    (first,) = await world.raw.fetch("select reason, ended_at from rara.step_attempt")
    assert first["reason"] == "LEASE_EXPIRED"
    assert first["ended_at"] >= expires_at
    # The handler of the executor that was cut off had been stopped by itself before that.
    assert [note.attempt for note in notes(tmp_path, "effects")] == []
