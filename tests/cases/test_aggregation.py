"""A run closes once, with its last step, in the state that its steps give: however many of them end at once."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import job_pb2
from rara_scheduler.domain.attempt import Item
from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import LockTimeout
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.retry_run import RunRetrier
from rara_scheduler.store.sweeps import BEFORE_ALL, OverdueStep
from rara_testing import job_events
from rara_testing.scripted_executor import ScriptedExecutor
from support.kept_promises import assert_promises_kept
from support.run_trail import CLOSED, assert_closed_once, keep_trail
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    new_id,
    reports,
    running,
    store_world,
    succeeded,
)

ROUNDS = 50
SOAK_ROUNDS = 500
STEPS = 1000
SUBMIT_S = 0.3
BUSY_S = 60.0  # for a thousand steps, on a machine that does other things

Work = Callable[[], Awaitable[object]]

BY_STATES = {"SS": "succeeded", "SF": "failed", "FS": "failed", "FF": "failed"}
ENDS: dict[str, Item] = {"S": succeeded(3), "F": failed(3, retryable=False)}


@pytest_asyncio.fixture
async def worlds(database_url: str) -> AsyncIterator[list[StoreWorld]]:
    """The stores of two schedulers over one database."""
    async with AsyncExitStack() as stack:
        worlds = [
            await stack.enter_async_context(store_world(database_url, check_history=index == 0))
            for index in range(2)
        ]
        await keep_trail(worlds[0].raw)
        for mode in ("CONTINUE", "FAIL_FAST"):
            await worlds[0].define(
                mode.lower().replace("_", "-"), {"a": {}, "b": {}}, on_failure=f"ON_FAILURE_{mode}"
            )
        yield worlds


async def leased_pair(world: StoreWorld, definition: str) -> tuple[str, Grant, Grant]:
    """A run whose two steps run, on an executor each."""
    run_id = await world.start(definition)
    first, second = await world.lease_one(), await world.lease_one()
    for grant in (first, second):
        await world.report(grant, accepted(), running())
    return run_id, first, second


async def waiting_for_locks(raw: "asyncpg.Connection[asyncpg.Record]", count: int) -> None:
    """Until so many transactions of this database wait for a lock."""
    async with asyncio.timeout(10):
        while True:
            await raw.execute("select pg_stat_clear_snapshot()")
            waiting = await raw.fetchval(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and wait_event_type = 'Lock' and state = 'active'"
            )
            if waiting >= count:
                return
            await asyncio.sleep(0.002)


async def patiently(work: Work) -> object:
    """As the committer does: a run that is held for too long is asked for again."""
    while True:
        with contextlib.suppress(LockTimeout):
            return await work()


async def at_once(
    worlds: list[StoreWorld], side: "asyncpg.Connection[asyncpg.Record]", run_id: str, *works: Work
) -> None:
    """Both have begun and wait for the run; then it is theirs, one right after the other."""
    transaction = side.transaction()
    await transaction.start()
    await side.execute("select from rara.workflow_run where workflow_run_id = $1::uuid for update", run_id)
    tasks = [asyncio.create_task(patiently(work), name="rival") for work in works]
    await waiting_for_locks(worlds[0].raw, len(tasks))
    await transaction.rollback()
    await asyncio.gather(*tasks)


async def _last_two(worlds: list[StoreWorld], database_url: str, rounds: int) -> None:
    side = await asyncpg.connect(database_url)
    runs: dict[str, str] = {}
    try:
        for turn, ends in zip(range(rounds), itertools.cycle(BY_STATES), strict=False):
            run_id, *grants = await leased_pair(worlds[0], "continue")
            runs[run_id] = BY_STATES[ends]
            works = [
                partial(world.report, g, ENDS[end])
                for world, g, end in zip(worlds, grants, ends, strict=True)
            ]
            if turn % 2:
                await at_once(worlds, side, run_id, *works)
            else:
                await asyncio.gather(*(work() for work in works))
            assert await worlds[0].run_state(run_id) == runs[run_id]
    finally:
        await side.close()
    await assert_closed_once(worlds[0].raw, list(runs))


@pytest.mark.case("AGG-1")
async def test_the_last_two_steps_end_at_the_same_moment_and_close_the_run_once(
    worlds: list[StoreWorld], database_url: str
) -> None:
    await _last_two(worlds, database_url, ROUNDS)


@pytest.mark.soak
@pytest.mark.case("AGG-1")
async def test_the_last_two_steps_end_at_the_same_moment_many_times(
    worlds: list[StoreWorld], database_url: str
) -> None:
    await _last_two(worlds, database_url, SOAK_ROUNDS)


# ---------------------------------------------------------------- the last step, and something else at that moment

Rival = Callable[[StoreWorld, str, Grant], Awaitable[object]]


async def cancel_run(world: StoreWorld, run_id: str, grant: Grant) -> object:
    return await world.cancel(run_id)


async def cancel_confirmed(world: StoreWorld, run_id: str, grant: Grant) -> object:
    await world.cancel(run_id)
    return await world.report(grant, cancelled(3))


async def reclaim(world: StoreWorld, run_id: str, grant: Grant) -> object:
    return await world.say(grant, ending("LEASE_EXPIRED"))


async def pass_deadline(world: StoreWorld, run_id: str, grant: Grant) -> object:
    return await world.cancels.cancel_run(run_id, reason="DEADLINE_EXCEEDED", message="", grace_s=None)


async def fail(world: StoreWorld, run_id: str, grant: Grant) -> object:
    return await world.report(grant, failed(3, retryable=False))


async def hand_back(world: StoreWorld, run_id: str, grant: Grant) -> object:
    return await world.report(grant, cancelled(3, "EXECUTOR_SHUTDOWN"))


@pytest.mark.case("AGG-1")
@pytest.mark.parametrize("definition", ["continue", "fail-fast"])
@pytest.mark.parametrize(
    "rival",
    [cancel_run, cancel_confirmed, reclaim, pass_deadline, fail, hand_back],
    ids=lambda rival: rival.__name__,
)
async def test_a_step_ends_while_the_run_is_changed_by_somebody_else(
    worlds: list[StoreWorld], database_url: str, rival: Rival, definition: str
) -> None:
    side = await asyncpg.connect(database_url)
    runs = []
    try:
        for turn in range(6):
            run_id, first, second = await leased_pair(worlds[0], definition)
            runs.append(run_id)
            works = [
                partial(worlds[0].report, first, succeeded(3)),
                partial(rival, worlds[1], run_id, second),
            ]
            await at_once(worlds, side, run_id, *(works if turn % 2 else reversed(works)))
            # A success that comes in time counts, whatever comes beside it; the rest ends as it can.
            await finish_rest(worlds[0], run_id, second)
            states = {name: state for name, (state, _) in (await worlds[0].steps(run_id)).items()}
            assert all(state in ("succeeded", "terminal_failed", "cancelled") for state in states.values())
    finally:
        await side.close()
    await assert_closed_once(worlds[0].raw, runs)


async def finish_rest(world: StoreWorld, run_id: str, grant: Grant) -> None:
    """Executors that do their work, and time, close what is open."""
    for _ in range(3):
        if await world.run_state(run_id) in CLOSED:
            return
        await world.say(grant, ending("LEASE_EXPIRED"))
        await world.make_due()
        for again in await world.lease():
            await world.run_to_success(again)
    raise AssertionError(f"run {run_id} is {await world.run_state(run_id)}")


@pytest.mark.case("AGG-1")
async def test_the_last_step_beside_one_that_waits_beyond_its_deadline(
    worlds: list[StoreWorld], database_url: str
) -> None:
    first, second = worlds
    await first.define("late", {"a": {}, "b": {"kind": "other.do"}}, on_failure="ON_FAILURE_CONTINUE")
    route = next(
        route.route_id for route in await first.definitions.routes_after(0) if route.kind == "work.do"
    )
    runs = []
    for _ in range(20):
        run_id = await first.start("late")
        runs.append(run_id)
        (grant,) = await first.leases.grant([(route, 1, BEFORE_ALL, "1.0.0")], [new_id()])
        await first.report(grant, accepted(), running())
        await first.raw.execute("update rara.ready set deadline = now() - interval '1 s'")
        found = await second.sweeps.overdue_steps(NIL)

        async def close(found: list[OverdueStep] = found) -> None:
            while await second.raw.fetchval("select count(*) from rara.ready"):
                await second.cancels.close_overdue(found)  # a run that is held is left for the next turn

        await asyncio.gather(first.report(grant, succeeded(3)), close())
        assert await first.run_state(run_id) == "failed"
    await assert_closed_once(first.raw, runs)


@pytest.mark.case("AGG-1")
async def test_last_steps_of_two_runs_in_opposite_order_close_both(worlds: list[StoreWorld]) -> None:
    runs: list[str] = []
    for _ in range(20):
        pairs = [await leased_pair(worlds[0], "continue") for _ in range(2)]
        runs += [run_id for run_id, _, _ in pairs]
        (_, a1, a2), (_, b1, b2) = pairs
        batches = [[a1, b2], [b1, a2]]
        await asyncio.gather(
            *(
                world.commits.commit([reports(g, succeeded(3), executor_id=g.executor_id) for g in batch])
                for world, batch in zip(worlds, batches, strict=True)
            )
        )
    for run_id in runs:
        assert await worlds[0].run_state(run_id) == "succeeded"
    await assert_closed_once(worlds[0].raw, runs)


@pytest.mark.case("AGG-1")
async def test_two_last_dependencies_that_end_together_release_the_next_step_once(
    worlds: list[StoreWorld], database_url: str
) -> None:
    await worlds[0].define("join", {"a": {}, "b": {}, "c": {"depends_on": ["a", "b"]}})
    side = await asyncpg.connect(database_url)
    runs = []
    try:
        for _ in range(10):
            run_id, first, second = await leased_pair(worlds[0], "join")
            runs.append(run_id)
            works = (
                partial(world.report, g, succeeded(3))
                for world, g in zip(worlds, (first, second), strict=True)
            )
            await at_once(worlds, side, run_id, *works)
            await worlds[0].run_to_success(await worlds[0].lease_one())
            assert await worlds[0].run_state(run_id) == "succeeded"
    finally:
        await side.close()
    await assert_closed_once(worlds[0].raw, runs)


@pytest.mark.case("AGG-1")
async def test_a_retry_that_meets_the_close_sees_an_open_run_or_a_closed_one(
    worlds: list[StoreWorld],
) -> None:
    first, second = worlds
    retrier = RunRetrier(second.database, second.definitions, on_ready=lambda: None)
    seen: set[str] = set()
    runs = []
    for turn in range(20):
        run_id, a, b = await leased_pair(first, "continue")
        runs.append(run_id)
        await first.report(a, succeeded(3))

        async def retry(source: str, wait_s: float) -> str:
            await asyncio.sleep(wait_s)
            try:
                return (await retrier.retry(source))[0]
            except Fault as fault:
                return str(fault.code)

        _, outcome = await asyncio.gather(
            first.report(b, failed(3, retryable=False)), retry(run_id, 0.001 * (turn % 8))
        )
        assert await first.run_state(run_id) == "failed"
        if outcome == "RUN_NOT_RETRYABLE":
            seen.add(outcome)
            continue
        seen.add("retried")
        runs.append(outcome)
        (again,) = await first.lease()
        await first.run_to_success(again)
        assert await first.run_state(outcome) == "succeeded"
    await assert_closed_once(first.raw, runs)
    assert "retried" in seen


# ---------------------------------------------------------------- AGG-2: everything twice, and at once


async def answer_twice(executor: ScriptedExecutor, count: list[int]) -> None:
    """Answer every job the moment it comes, each event two times."""
    async for frame in executor.frames():
        if frame.WhichOneof("frame") != "jobs":
            continue
        events: list[job_pb2.ProgressEvent] = []
        for job in frame.jobs.jobs:
            end = job_events.succeeded(job.lease, 3)
            events += [job_events.accepted(job.lease), job_events.running(job.lease), end, end]
        await executor.events(*events)
        await executor.events(*events)
        count[0] += len(frame.jobs.jobs)
        await executor.credit(count[0] + 200)


async def answered(world: RunningScheduler, executor: ScriptedExecutor) -> None:
    """Until what was sent so far has arrived, is committed, and its answers have come."""
    await beat_answered(executor)
    async with asyncio.timeout(BUSY_S):
        await world.scheduler._committer.drained()
    await beat_answered(executor)


async def beat_answered(executor: ScriptedExecutor) -> None:
    """A round trip in the order of the stream."""
    beat = await executor.heartbeat()
    await executor.expect("heartbeat_ack", lambda ack: ack.number >= beat)


@pytest.mark.case("AGG-2")
async def test_a_thousand_steps_answered_at_once_and_twice_are_each_counted_once(
    database_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        schedulers: list[RunningScheduler] = [
            await stack.enter_async_context(
                running_scheduler(database_url, tmp_path, lease_s=30.0, accept_timeout_s=15.0, silence_s=20.0)
            )
            for _ in range(2)
        ]
        world = schedulers[0]
        await keep_trail(world.raw)
        await world.define("wide", {f"s{number}": {} for number in range(STEPS)})
        await world.raw.execute(
            f"create function pause() returns trigger language plpgsql as"
            f" 'begin perform pg_sleep({SUBMIT_S}); return null; end';"
            " create trigger pause after insert on rara.ready for each statement execute function pause()"
        )
        executors = [
            await stack.enter_async_context(scheduler.executor((KIND,), credit=200))
            for scheduler in schedulers
        ]
        group = await stack.enter_async_context(asyncio.TaskGroup())
        tasks = [group.create_task(answer_twice(executor, [0])) for executor in executors]
        run_id = await world.start("wide")

        async def ended() -> str | None:
            state = await world.run_state(run_id)
            return state if state in CLOSED else None

        assert await until(ended, "end of the run", BUSY_S) == "succeeded"
        # The answers to the last repeats.
        leases = await world.raw.fetch("select step_run_id::text, lease_token, attempt from rara.result")
        for scheduler, executor in zip(schedulers, executors, strict=True):
            await answered(scheduler, executor)
            assert not [refused for acks in executor.all("acks") for refused in acks.refusals]
        for task in tasks:
            task.cancel()
    assert len(leases) == STEPS
    assert {row["attempt"] for row in leases} == {1}
    raw = await asyncpg.connect(database_url)
    try:
        row = await raw.fetchrow(
            "select min(x.granted_at) - w.created_at as first_grant, w.steps_succeeded, count(*) as results"
            " from rara.workflow_run w join rara.result x using (workflow_run_id) group by w.workflow_run_id"
        )
        assert row is not None
        assert (row["steps_succeeded"], row["results"]) == (STEPS, STEPS)
        assert row["first_grant"].total_seconds() >= SUBMIT_S
        assert await raw.fetchval("select count(*) from rara.step_event") == 3 * STEPS
        await assert_closed_once(raw, [run_id])
    finally:
        await raw.close()
    await assert_promises_kept(database_url)
