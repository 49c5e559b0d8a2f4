"""Healthy work is never taken for dead, and work that may be dead to others stops by itself."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_testing.fault_proxy import FaultProxy
from rara_testing.processes import Processes
from support import faulty
from support.database_paths import proxied
from support.running_executor import running
from support.running_scheduler import (
    LEASE_S,
    TEST_VALUES,
    RunningScheduler,
    running_scheduler,
    until,
)
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

MODULE = "support.faulty"
OUTAGE_S = 4.0


def default_timings(lease_s: float) -> dict[str, Any]:
    """Those of the defaults, in their ratios to the lease."""
    return {
        "lease_s": lease_s,
        "heartbeat_s": lease_s / 6,
        "silence_s": lease_s / 2,
        "accept_timeout_s": lease_s / 3,
        "settle_s": lease_s / 2,
    }


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path / "processes") as started:
        yield started


async def until_noted(folder: Path, step: str, name: str, count: int = 1) -> None:
    async def look() -> bool:
        return len(faulty.notes(folder, step, name)) >= count

    await until(look, f"{count} {name} of {step}")


async def first_attempts_only(world: RunningScheduler, folder: Path) -> None:
    """Every step has succeeded at its first attempt, and started once."""
    rows = await world.raw.fetch("select step_name, state, attempt, failures from rara.step_state")
    assert {(row["state"], row["attempt"], row["failures"]) for row in rows} == {("succeeded", 1, 0)}, rows
    assert await world.raw.fetchval("select count(*) from rara.step_attempt") == 0
    starts = {row["step_name"]: len(faulty.notes(folder, row["step_name"], "starts")) for row in rows}
    assert set(starts.values()) == {1}, starts


@contextlib.asynccontextmanager
async def busy_machine(processes: Processes) -> AsyncIterator[None]:
    loops = [await processes.python(f"busy-{number}", "while True: pass") for number in range(2)]
    try:
        yield
    finally:
        for loop in loops:
            await loop.kill_and_wait()


@pytest.mark.case("DEAD-1")
@pytest.mark.parametrize("seconds", [3 * LEASE_S, pytest.param(20.0, marks=pytest.mark.soak)])
async def test_work_that_outlasts_its_lease_many_times_is_renewed_all_the_while(
    database_url: str, tmp_path: Path, processes: Processes, seconds: float
) -> None:
    renewals: set[object] = set()
    async with (
        running_scheduler(database_url, tmp_path) as world,
        running(world.address, tmp_path, modules=MODULE),
    ):
        await world.define("long", {"long": {"kind": "faulty.sleeps"}})
        async with busy_machine(processes):
            run_id = await world.start("long", value={"folder": str(tmp_path), "seconds": seconds})

            async def ended() -> bool:
                left = await world.raw.fetchrow(
                    "select expires_at, expires_at > now() as holds from rara.lease"
                )
                if left is not None:
                    assert left["holds"]
                    renewals.add(left["expires_at"])
                return await world.run_state(run_id) == "succeeded"

            await until(ended, "end of the run", seconds + 10)
        await first_attempts_only(world, tmp_path)
    assert len(renewals) >= 3 * seconds / LEASE_S


@pytest.mark.case("DEAD-1")
@pytest.mark.parametrize(
    "values",
    [
        {"heartbeat_s": 2.0, "lease_s": 2.0},
        {"heartbeat_s": 0.7, "lease_s": 2.0},
        {"silence_s": 1.2, "heartbeat_s": 0.5},
        {"silence_s": 2.0, "lease_s": 2.0},
        {"max_frame_bytes": 2 << 20, "max_payload_bytes": 1 << 20},
        {"retry_max_backoff_s": 0.5, "retry_initial_backoff_s": 1.0},
    ],
    ids=lambda values: " ".join(values),
)
async def test_timings_that_contradict_each_other_are_refused_at_start(
    tmp_path: Path, processes: Processes, values: dict[str, float]
) -> None:
    given = TEST_VALUES | {"database_url": "postgresql://nobody@127.0.0.1:1/none", "blob_store": "file:///b"}
    env = {f"RARA_{key.upper()}": str(value) for key, value in (given | values).items()}
    scheduler = await processes.start("scheduler", ["rara-scheduler"], env=env)
    assert await scheduler.wait() == 2
    said = scheduler.stderr.read_text()
    for name, value in values.items():
        assert f"RARA_{name.upper()}={value:g}" in said, said
    assert "Traceback" not in said


async def work_through_an_outage(world: RunningScheduler, folder: Path) -> str:
    """Steps that end before, in and after the outage that is to come now."""
    await world.define(
        "long", {name: {"kind": f"faulty.{name}"} for name in ("sleeps", "counts_on", "blocks")}
    )
    run_id = await world.start("long", value={"folder": str(folder), "seconds": OUTAGE_S / 2})
    await world.define("longer", {"longer": {"kind": "faulty.sleeps"}})
    longer = await world.start("longer", value={"folder": str(folder), "seconds": OUTAGE_S + 3})
    for step in ("sleeps", "counts_on", "blocks", "longer"):
        await until_noted(folder, step, "starts")
    return f"{run_id} {longer}"


async def costs_no_work(world: RunningScheduler, folder: Path, run_ids: str) -> None:
    for run_id in run_ids.split():
        assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "succeeded"
    await first_attempts_only(world, folder)


@pytest.mark.case("DEAD-1")
async def test_a_scheduler_that_is_gone_for_less_than_half_the_lease_costs_no_work(
    database_url: str, tmp_path: Path, processes: Processes
) -> None:
    settings = default_timings(lease_s=15.0)  # on a busy machine a start alone can take five seconds
    async with (
        spawned_scheduler(processes, database_url, tmp_path, **settings) as scheduler,
        running(scheduler.address, tmp_path, modules=MODULE),
    ):
        run_ids = await work_through_an_outage(scheduler.world, tmp_path)
        gone_at = time.monotonic()
        await scheduler.kill()
        await asyncio.sleep(OUTAGE_S - 1.5)  # the outage; the start takes the rest of it
        await scheduler.start()
        assert time.monotonic() - gone_at < 15.0 * 5 / 6, "too busy a machine to say anything"
        await costs_no_work(scheduler.world, tmp_path, run_ids)


@pytest.mark.case("DEAD-1")
@pytest.mark.parametrize("how", ["stall", "cut"])
async def test_a_database_that_is_away_for_less_than_half_the_lease_costs_no_work(
    database_url: str, tmp_path: Path, how: str
) -> None:
    direct = await asyncpg.connect(database_url)
    async with proxied(database_url) as (proxy, away):
        settings = default_timings(lease_s=2 * OUTAGE_S + 2)
        async with (
            running_scheduler(away, tmp_path, **settings) as world,
            running(world.address, tmp_path, modules=MODULE),
        ):
            through_proxy, world.raw = world.raw, direct  # ours stays
            await through_proxy.close()
            run_ids = await work_through_an_outage(world, tmp_path)
            if how == "stall":
                proxy.stall()
            else:
                proxy.refuse()
                proxy.reset()
            await asyncio.sleep(OUTAGE_S)
            proxy.resume()
            await costs_no_work(world, tmp_path, run_ids)
    await direct.close()


@pytest.mark.case("DEAD-2")
async def test_handlers_that_block_for_three_leases_keep_theirs_and_their_neighbours(
    database_url: str, tmp_path: Path
) -> None:
    """The loop blocked, C code with the interpreter lock, and a computation that never lets go of it."""
    async with (
        running_scheduler(database_url, tmp_path) as world,
        running(world.address, tmp_path, modules=MODULE, slots=10),
    ):
        blocking = {kind: {"kind": f"faulty.{kind}"} for kind in ("blocks", "blocks_loop", "computes")}
        others = {f"beside{number}": {"kind": "faulty.sleeps"} for number in range(2)}
        await world.define("block", blocking | others)
        run_id = await world.start("block", value={"folder": str(tmp_path), "seconds": 3 * LEASE_S})
        assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "succeeded"
        await first_attempts_only(world, tmp_path)


@pytest.mark.case("DEAD-3")
async def test_an_executor_that_is_cut_off_stops_before_its_work_begins_again_elsewhere(
    database_url: str, tmp_path: Path, processes: Processes
) -> None:
    steps = {
        "ticks": {"kind": "faulty.counts_on"},  # at work when the link heals, if nothing stops it
        "ends": {"kind": "faulty.sleeps"},  # its result waits for the link
    }
    async with running_scheduler(database_url, tmp_path) as world:
        host, _, port = world.address.rpartition(":")
        async with FaultProxy(host, int(port)) as proxy:
            cut_off = await spawn_executor(processes, proxy.address, tmp_path, module=MODULE, name="cut-off")
            for name, fields in steps.items():
                await world.define(name, {name: fields})
            run_ids = [
                await world.start(name, value={"folder": str(tmp_path), "seconds": seconds})
                for name, seconds in (("ticks", 3 * LEASE_S), ("ends", 1.0))
            ]
            for name in steps:
                await until_noted(tmp_path, name, "starts")
            proxy.stall()
            stalled_at = time.monotonic()
            other = await spawn_executor(processes, world.address, tmp_path, module=MODULE, name="other")
            for name in steps:
                await until_noted(tmp_path, name, "starts", 2)
            await asyncio.sleep(max(0.0, stalled_at + 3 * LEASE_S - time.monotonic()))
            proxy.resume()
            for run_id in run_ids:
                assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "succeeded"

            async def lost() -> bool:
                lines = [
                    json.loads(line) for line in cut_off.stderr.read_text().splitlines() if line[:1] == "{"
                ]
                return len({line["step_run_id"] for line in lines if line["event"] == "job.lost"}) == 2

            await until(lost, "word of the lost leases")
        rows = await world.raw.fetch(
            "select step_name, attempt, failures, lease_token, output from rara.step_state"
        )
        for row in rows:
            assert (row["attempt"], row["failures"]) == (2, 1)
            assert json.loads(row["output"]) == 2
        ticks = [(int(note[1]), float(note[3])) for note in faulty.notes(tmp_path, "ticks", "ticks")]
        first, second = sorted({token for token, _ in ticks})
        last_of_first = max(at for token, at in ticks if token == first)
        assert last_of_first < stalled_at + LEASE_S
        assert last_of_first < min(at for token, at in ticks if token == second)
        assert cut_off.returncode is other.returncode is None
