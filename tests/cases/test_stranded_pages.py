"""Rows that must wait hide none behind them: full pages of held rows, and full batches of reports about them."""

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import job_pb2
from rara_scheduler.store import sweeps
from rara_scheduler.store.database import ENGINE_LOCK_TIMEOUT_S
from rara_testing.auto_executor import AutoExecutor
from rara_testing.job_events import accepted, failed, progress, running, succeeded
from rara_testing.scripted_executor import ScriptedExecutor
from support.running_scheduler import (
    KIND,
    LEASE_S,
    SWEEP_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)

SLACK_S = 3.0  # what a busy machine adds to a bound of the case


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def stale_leases(world: RunningScheduler) -> int:
    count: int = await world.raw.fetchval(
        "select count(*) from rara.lease where expires_at < now() - make_interval(secs => $1)", 2 * SWEEP_S
    )
    return count


async def hold(executor: ScriptedExecutor, count: int, *events: Any) -> list[job_pb2.Lease]:
    """Take that many jobs and report the events of each; their leases by step."""
    leases: list[job_pb2.Lease] = []
    while len(leases) < count:
        leases += [job.lease for job in (await executor.expect("jobs")).jobs]
    for lease in leases:
        if events:
            await executor.events(*(event(lease) for event in events))
    for lease in leases:
        if events:
            await executor.expect_ack(lease, len(events))
    return sorted(leases, key=lambda lease: lease.step_run_id)


@contextlib.asynccontextmanager
async def locked(database_url: str, query: str, *arguments: object) -> AsyncIterator[None]:
    """A session of somebody else that holds the rows that the query selects for update."""
    side = await asyncpg.connect(database_url)
    transaction = side.transaction()
    await transaction.start()
    try:
        assert await side.fetch(query, *arguments)
        yield
    finally:
        await transaction.rollback()
        await side.close(timeout=10)


LOCK_LEASES = "select from rara.lease where step_run_id = any($1::uuid[]) for update"
LOCK_RUNS = (
    "select from rara.workflow_run where workflow_run_id in"
    " (select workflow_run_id from rara.step_run where step_run_id = any($1::uuid[])) for update"
)


@pytest.mark.case("STR-4")
@pytest.mark.parametrize("lock", [LOCK_LEASES, LOCK_RUNS], ids=["leases", "runs"])
@pytest.mark.parametrize("events", [(), (accepted, running)], ids=["not accepted in time", "expired"])
async def test_an_expired_lease_behind_a_page_of_held_ones_is_taken_back(
    world: RunningScheduler,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    lock: str,
    events: Sequence[Any],
) -> None:
    monkeypatch.setattr(sweeps, "_PAGE", 100)
    front = 150
    if lock == LOCK_LEASES:
        await world.define("wide", {f"s{n:03}": {} for n in range(front + 1)}, on_failure="CONTINUE")
        await world.start("wide")
    else:
        await world.define("one", {"a": {}})
        for _ in range(front + 1):
            await world.start("one")
    async with world.executor(credit=front + 1) as silent:  # it heartbeats, and lists no lease
        leases = await hold(silent, front + 1, *events)
        last = leases.pop()
        async with locked(database_url, lock, [lease.step_run_id for lease in leases]):
            locked_at = time.monotonic()
            async with AutoExecutor(world.address, {KIND: lambda _: {}}, slots=front + 1):
                row = await world.until_step(last.step_run_id, "succeeded")
                assert time.monotonic() - locked_at < LEASE_S + 2 * SWEEP_S + SLACK_S
                assert row["attempt"] == 2
                assert await world.raw.fetchval("select count(*) from rara.result") == 1
        released_at = time.monotonic()
        count = "select count(*) from rara.step_attempt where reason = $1"
        reason = "LEASE_EXPIRED" if events else "DISPATCH_LOST"

        async def recovered() -> bool:
            return bool(await world.raw.fetchval(count, reason) == front + 1)

        await until(recovered, f"recovery of all {front}")
        assert time.monotonic() - released_at < 2 * SWEEP_S + SLACK_S
        assert await stale_leases(world) == 0


PAGE = 4
FRONT = 10

# What falls due in a moment, of the steps $1; what holds the front; how many of $1 have been looked after.
SOON_S = 1.2
SOON = f"now() + interval '{SOON_S} s'"
CANCELLED = "select count(*) from rara.result where step_run_id = any($1::uuid[]) and state = 'cancelled'"
PROMOTED = "select count(*) from rara.ready where step_run_id = any($1::uuid[])"
STAGES = {
    "leases beyond their deadline": (
        f"update rara.lease set deadline = {SOON} where step_run_id = any($1::uuid[])",
        LOCK_LEASES,
        (
            "select count(*) from rara.lease where step_run_id = any($1::uuid[])"
            " and cancel_reason = 'DEADLINE_EXCEEDED'"
        ),
    ),
    "runs beyond their deadline": (
        (
            f"update rara.workflow_run r set deadline = {SOON} from rara.step_run s"
            " where r.workflow_run_id = s.workflow_run_id and s.step_run_id = any($1::uuid[])"
        ),
        LOCK_RUNS,
        CANCELLED,
    ),
    "ready steps beyond their deadline, rows held": (
        f"update rara.ready set deadline = {SOON} where step_run_id = any($1::uuid[])",
        "select from rara.ready where step_run_id = any($1::uuid[]) for update",
        CANCELLED,
    ),
    "ready steps beyond their deadline, runs held": (
        f"update rara.ready set deadline = {SOON} where step_run_id = any($1::uuid[])",
        LOCK_RUNS,
        CANCELLED,
    ),
    "waits that are over, rows held": (
        f"update rara.waiting set available_at = {SOON} where step_run_id = any($1::uuid[])",
        "select from rara.waiting where step_run_id = any($1::uuid[]) for update",
        PROMOTED,
    ),
    "waits that are over, runs held": (
        f"update rara.waiting set available_at = {SOON} where step_run_id = any($1::uuid[])",
        LOCK_RUNS,
        PROMOTED,
    ),
}


@pytest.mark.case("STR-4")
@pytest.mark.parametrize("stage", STAGES)
async def test_every_sweep_looks_behind_a_page_of_rows_that_somebody_holds(
    world: RunningScheduler, database_url: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(sweeps, "_PAGE", PAGE)
    make_due, lock, looked_after = STAGES[stage]
    backoff = {"initial_backoff": {"seconds": 600}, "max_backoff": {"seconds": 600}}
    await world.define("one", {"a": {"retry": backoff}})
    for _ in range(FRONT + 1):
        await world.start("one")
    rows = await world.raw.fetch("select step_run_id::text from rara.step_run order by step_run_id")
    steps = [row["step_run_id"] for row in rows]
    async with contextlib.AsyncExitStack() as stack:
        if stage.startswith(("leases", "waits")):
            executor = await stack.enter_async_context(world.executor(credit=FRONT + 1, beat=False))
            tokens: list[int] = []
            await stack.enter_async_context(beating(executor, lambda: tokens))
            leases = await hold(executor, FRONT + 1, accepted, running)
            tokens += [lease.lease_token for lease in leases]
            if stage.startswith("waits"):
                await executor.events(*(failed(lease) for lease in leases))
                for lease in leases:
                    await executor.expect_ack(lease, 3)

        async def all_of(wanted: list[str]) -> bool:
            return bool(await world.raw.fetchval(looked_after, wanted) == len(wanted))

        assert await world.raw.execute(make_due, steps) == f"UPDATE {FRONT + 1}"
        async with locked(database_url, lock, steps[:-1]):
            await until(lambda: all_of(steps[-1:]), f"{stage}: the last", SOON_S + 3 * SWEEP_S + SLACK_S)
            assert await world.raw.fetchval(looked_after, steps[:-1]) == 0
        await until(lambda: all_of(steps), f"{stage}: the front", 2 * SWEEP_S + SLACK_S)


@pytest.mark.case("STR-4", "ROUTE-2")
async def test_steps_that_wait_for_a_busy_executor_hide_none_that_nobody_can_run(
    world: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond their schedule_timeout, all of them; only where no executor is capable is that an end."""
    monkeypatch.setattr(sweeps, "_PAGE", PAGE)
    for name, kind in (("busy", KIND), ("hopeless", "nobody.can")):
        await world.define(name, {"a": {"kind": kind, "schedule_timeout": {"nanos": 500_000_000}}})
    async with world.executor(credit=1) as executor:
        busy = [await world.start("busy") for _ in range(FRONT + 1)]
        await executor.expect_job()
        hopeless = await world.start("hopeless")
        assert await world.until_run(hopeless, "failed") == "failed"
        assert await world.steps(hopeless) == {"a": ("cancelled", "NO_CAPABLE_EXECUTOR")}
        overdue = await world.raw.fetchval("select count(*) from rara.ready where schedule_deadline < now()")
        assert overdue == FRONT
        states = [await world.run_state(run_id) for run_id in busy]
        assert set(states) <= {"pending", "running"}


@pytest.mark.case("STR-4", "STR-3")
async def test_reports_about_runs_that_somebody_holds_keep_no_others_waiting(
    database_url: str, tmp_path: Path
) -> None:
    """As many as fit into a batch are held up: what others report is stored all the same, theirs in order later."""
    async with running_scheduler(database_url, tmp_path, commit_batch=PAGE) as world:
        await world.define("one", {"a": {}})
        for _ in range(FRONT + 2):
            await world.start("one")
        async with world.executor(credit=FRONT + 2, beat=False) as executor:
            tokens: list[int] = []
            async with beating(executor, lambda: tokens):
                leases = await hold(executor, FRONT + 2, accepted, running)
                tokens += [lease.lease_token for lease in leases]
                *front, first, second = leases
                async with locked(database_url, LOCK_RUNS, [lease.step_run_id for lease in front]):
                    for lease in front:
                        await executor.events(progress(lease, 3), progress(lease, 4))
                    await executor.events(succeeded(first))
                    await executor.expect_ack(first, 3, timeout_s=3 * ENGINE_LOCK_TIMEOUT_S + SLACK_S)
                    sent_at = time.monotonic()
                    await executor.events(succeeded(second))
                    await executor.expect_ack(second, 3)
                    assert (
                        time.monotonic() - sent_at < 2 * ENGINE_LOCK_TIMEOUT_S
                    )  # not behind the lock any more
                    for lease in front:
                        await executor.events(succeeded(lease, 5))
                for lease in front:
                    await executor.expect_ack(lease, 5)
                stored = await world.raw.fetch("select last_sequence, gaps, state from rara.result")
                assert [tuple(row) for row in stored if row["last_sequence"] == 5] == [
                    (5, 0, "succeeded")
                ] * FRONT
                assert len(stored) == FRONT + 2
