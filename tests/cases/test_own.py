"""Nobody but the owner of the current lease changes a step, whatever was read before and however late it comes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest
import pytest_asyncio
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2
from rara_scheduler.domain.attempt import Guard
from rara_scheduler.store.commit import LeaseReports
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.queries import query
from rara_scheduler.store.sweeps import BEFORE_ALL
from rara_testing import job_events
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor
from support.api_errors import refusal
from support.run_trail import assert_closed_once, keep_trail
from support.running_scheduler import RunningScheduler, beating, running_scheduler
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    progress,
    running,
    store_world,
    succeeded,
)

RECLAIM = (ending("DISPATCH_LOST", Guard.UNACCEPTED), ending("LEASE_EXPIRED", Guard.EXPIRED))


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url, check_history=True) as world:
        await keep_trail(world.raw)
        yield world


@pytest_asyncio.fixture
async def two(database_url: str, tmp_path: Path) -> AsyncIterator[list[RunningScheduler]]:
    """Two schedulers over one database, whose leases outlast what a busy machine may hold up."""
    async with AsyncExitStack() as stack:
        schedulers = [
            await stack.enter_async_context(running_scheduler(database_url, tmp_path, lease_s=3.0))
            for _ in range(2)
        ]
        await keep_trail(schedulers[0].raw)
        yield schedulers


async def everything(raw: "asyncpg.Connection[asyncpg.Record]", run_id: str) -> list[str]:
    """All rows of a run's state with the transactions that wrote them: equal means that no row was touched."""
    rows = await raw.fetch(
        "select 'result' as place, xmin::text, row(x.*)::text from rara.result x where workflow_run_id = $1::uuid"
        " union all select 'lease', xmin::text, row(x.*)::text from rara.lease x where workflow_run_id = $1::uuid"
        " union all select 'ready', xmin::text, row(x.*)::text from rara.ready x where workflow_run_id = $1::uuid"
        " union all select 'waiting', xmin::text, row(x.*)::text from rara.waiting x where workflow_run_id = $1::uuid"
        " union all select 'run', xmin::text, row(x.*)::text from rara.workflow_run x where workflow_run_id = $1::uuid"
        " union all select 'attempt', a.xmin::text, row(a.*)::text from rara.step_attempt a"
        " join rara.step_run s using (step_run_id) where s.workflow_run_id = $1::uuid"
        " union all select 'event', e.xmin::text, row(e.*)::text from rara.step_event e"
        " join rara.step_run s using (step_run_id) where s.workflow_run_id = $1::uuid"
        " order by 1, 3",
        run_id,
    )
    return [" ".join(row) for row in rows]


# ---------------------------------------------------------------- OWN-1: a sweep's write comes late


@dataclass(slots=True)
class Paused:
    """A sweep that has read, and whose write is still to come."""

    write: Callable[[], Awaitable[object]]


async def read_expired(world: StoreWorld, grant: Grant) -> Paused:
    await world.report(grant, accepted(), running())
    await world.expire(grant)
    (found,) = await world.sweeps.reclaimable(NIL)
    words = LeaseReports(found.step_run_id, found.workflow_run_id, found.lease_token, None, RECLAIM)
    return Paused(lambda: world.commits.commit([words], skip_locked=True))


async def read_unaccepted(world: StoreWorld, grant: Grant) -> Paused:
    await world.raw.execute("update rara.lease set granted_at = now() - interval '1 min'")
    (found,) = await world.sweeps.reclaimable(NIL)
    assert found.unaccepted
    words = LeaseReports(found.step_run_id, found.workflow_run_id, found.lease_token, None, RECLAIM)
    return Paused(lambda: world.commits.commit([words], skip_locked=True))


async def _read_overdue_lease(world: StoreWorld, change: str) -> Paused:
    await world.raw.execute(f"update rara.lease set {change}")
    (found,) = await world.sweeps.overdue_leases()

    async def mark() -> None:
        assert await world.sweeps.mark_leases([(found, 0.0)]) == []

    return Paused(mark)


async def read_past_attempt_timeout(world: StoreWorld, grant: Grant) -> Paused:
    await world.report(grant, accepted(), running())
    return await _read_overdue_lease(world, "attempt_deadline = now() - interval '1 s'")


async def read_past_progress_timeout(world: StoreWorld, grant: Grant) -> Paused:
    await world.report(grant, accepted(), running())
    return await _read_overdue_lease(world, "progress_timeout = '0 s', progress_at = now() - interval '1 s'")


async def read_past_deadline(world: StoreWorld, grant: Grant) -> Paused:
    await world.report(grant, accepted(), running())
    found = await _read_overdue_lease(world, "deadline = now() - interval '1 s'")
    await world.raw.execute("update rara.lease set deadline = null")
    return found


async def read_late_heartbeat(world: StoreWorld, grant: Grant) -> Paused:
    await world.report(grant, accepted(), running())

    async def renew() -> None:
        _, lost, _ = await world.leases.renew([(grant.step_run_id, grant.lease_token, grant.executor_id)])
        assert lost == {grant.lease_token}

    return Paused(renew)


async def read_run_past_deadline(world: StoreWorld, grant: Grant) -> Paused:
    await world.report(grant, accepted(), running())
    await world.raw.execute("update rara.workflow_run set deadline = now() - interval '1 s'")
    (found,) = await world.sweeps.overdue_runs()
    return Paused(
        lambda: world.cancels.cancel_run(
            found.workflow_run_id, reason="DEADLINE_EXCEEDED", message="", grace_s=None, skip_locked=True
        )
    )


SWEEPS = (
    read_expired,
    read_unaccepted,
    read_past_attempt_timeout,
    read_past_progress_timeout,
    read_past_deadline,
    read_late_heartbeat,
    read_run_past_deadline,
)


@pytest.mark.case("OWN-1")
@pytest.mark.parametrize(
    ("read", "has_ended"),
    # A run past its deadline is rightly cancelled while its step is open.
    [
        (read, ended)
        for read in SWEEPS
        for ended in (False, True)
        if ended or read is not read_run_past_deadline
    ],
    ids=lambda value: ("leased again", "succeeded")[value] if isinstance(value, bool) else value.__name__,
)
async def test_a_sweep_whose_write_comes_late_touches_no_row(
    world: StoreWorld, read: Callable[[StoreWorld, Grant], Awaitable[Paused]], has_ended: bool
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    paused = await read(world, await world.lease_one())
    first = await world.raw.fetchrow("select step_run_id::text, lease_token from rara.lease")
    assert first is not None
    # The other sweeper reclaims, and the step is leased again.
    reclaim = LeaseReports(
        first["step_run_id"], run_id, first["lease_token"], None, (ending("LEASE_EXPIRED"),)
    )
    await world.commits.commit([reclaim])
    await world.make_due()
    second = await world.lease_one()
    await world.report(second, accepted(), running())
    if has_ended:
        await world.report(second, succeeded(3))
    before = await everything(world.raw, run_id)
    await paused.write()
    assert await everything(world.raw, run_id) == before
    step = await world.step(second.step_run_id)
    assert (step["state"], step["attempt"]) == ("succeeded" if has_ended else "running", 2)
    if not has_ended:
        await world.report(second, succeeded(3))
    assert await world.raw.fetchval("select count(*) from rara.result") == 1
    assert await world.raw.fetchval(
        "select bool_and(a.ended_at <= x.ended_at) from rara.step_attempt a join rara.result x using (step_run_id)"
    )
    await assert_closed_once(world.raw, [run_id])


@pytest.mark.case("OWN-1")
@pytest.mark.parametrize("has_ended", [False, True], ids=["leased", "succeeded"])
async def test_a_step_that_was_read_as_waiting_too_long_and_then_taken_is_left_alone(
    world: StoreWorld, has_ended: bool
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    await world.raw.execute("update rara.ready set schedule_deadline = now() - interval '1 s'")
    routes = [route.route_id for route in await world.definitions.routes_after(0)]
    found = await world.sweeps.overdue_steps(NIL, routes)
    assert len(found) == 1
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    if has_ended:
        await world.report(grant, succeeded(3))
    before = await everything(world.raw, run_id)
    assert (await world.cancels.close_overdue(found)).orders == []
    assert await everything(world.raw, run_id) == before


@pytest.mark.case("OWN-1")
async def test_a_backoff_that_two_sweeps_see_end_makes_the_step_leasable_once(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running(), failed(3))
    await world.raw.execute("update rara.waiting set available_at = now()")
    slow = await asyncpg.connect(database_url)
    try:
        async with slow.transaction():
            due = await slow.fetch(query("due_steps"), *BEFORE_ALL, 100)
            assert len(due) == 1
            # Another sweeper is faster, and the next attempt succeeds.
            assert await world.sweeps.promote_due() == 1
            second = await world.lease_one()
            await world.run_to_success(second)
            before = await everything(world.raw, run_id)
            assert await slow.fetch(query("promote_steps"), [row["step_run_id"] for row in due]) == []
        assert await everything(world.raw, run_id) == before
    finally:
        await slow.close()
    assert second.attempt == 2


@pytest.mark.case("OWN-1")
async def test_a_scheduler_that_stood_still_between_read_and_write_overwrites_nothing(
    two: list[RunningScheduler],
) -> None:
    slow, fast = two
    slow_has_read, slow_may_write = asyncio.Event(), asyncio.Event()
    slow_committer, fast_committer = slow.scheduler._committer, fast.scheduler._committer
    slow_write, fast_write = slow_committer.commit_found, fast_committer.commit_found
    late: list[Any] = []

    async def write_late(batch: list[LeaseReports]) -> Any:
        if not batch:
            return await slow_write(batch)
        slow_has_read.set()
        await slow_may_write.wait()
        late.append(await slow_write(batch))
        return late[-1]

    async def write_second(batch: list[LeaseReports]) -> Any:
        if batch:
            await slow_has_read.wait()
        return await fast_write(batch)

    slow_committer.commit_found = write_late  # type: ignore[method-assign]
    fast_committer.commit_found = write_second  # type: ignore[method-assign]
    await slow.define("one", {"a": {}})
    async with slow.executor() as first, fast.executor(credit=0) as second:
        run_id = await slow.start("one")
        job = await first.expect_job()
        await first.events(job_events.accepted(job.lease), job_events.running(job.lease))
        await first.expect_ack(job.lease, 2)
        await asyncio.wait_for(slow_has_read.wait(), WAIT_S)
        await second.credit(1)
        again = await second.expect_job()
        assert again.lease.attempt == 2
        await finish(second, again)
        await fast.until_run(run_id, "succeeded")
        before = await everything(fast.raw, run_id)
        slow_may_write.set()
        async with asyncio.timeout(WAIT_S):
            while not late:
                await asyncio.sleep(0.01)
        assert late[0].decisions == {}
        assert await everything(fast.raw, run_id) == before
        step = await fast.step(job.lease.step_run_id)
        assert (step["state"], step["attempt"]) == ("succeeded", 2)
    await assert_closed_once(fast.raw, [run_id])


# ---------------------------------------------------------------- OWN-2: an old attempt speaks


async def finish(executor: ScriptedExecutor, job: Any, output: object = "done") -> None:
    await executor.events(
        job_events.accepted(job.lease),
        job_events.running(job.lease),
        job_events.succeeded(job.lease, output=output),
    )
    await executor.expect_ack(job.lease, 3)


@pytest.mark.case("OWN-2")
@pytest.mark.parametrize("elsewhere", [False, True], ids=["same scheduler", "another scheduler"])
async def test_an_old_attempt_that_speaks_again_is_answered_lost_and_changes_nothing(
    two: list[RunningScheduler], elsewhere: bool
) -> None:
    here, there = two[0], two[1 if elsewhere else 0]
    await here.define("one", {"a": {}})
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(here.executor())
        run_id = await here.start("one")
        job = await old.expect_job()
        await old.events(
            job_events.accepted(job.lease),
            job_events.running(job.lease),
            job_events.progress(job.lease, checkpoint=job_events.json_payload({"at": 1})),
        )
        await old.expect_ack(job.lease, 3)
        # It freezes: no renewal, until another one runs attempt 2.
        new = await stack.enter_async_context(there.executor())
        again = await new.expect_job()
        tokens = [again.lease.lease_token]
        await stack.enter_async_context(beating(new, lambda: tokens))
        await new.events(
            job_events.accepted(again.lease),
            job_events.running(again.lease),
            job_events.effect(again.lease, 3, "mail", "from the second"),
            job_events.progress(again.lease, 4, checkpoint=job_events.json_payload({"at": 2})),
        )
        await new.expect_ack(again.lease, 4)
        assert (again.lease.attempt, again.lease.lease_token > job.lease.lease_token) == (2, True)

        rest = [
            job_events.progress(job.lease, 4, checkpoint=job_events.json_payload({"at": 9})),
            job_events.effect(job.lease, 5, "mail", "from the first"),
            job_events.succeeded(job.lease, 6, output="stale"),
        ]
        forged = with_attempt(job.lease, attempt=2)
        rest.append(job_events.succeeded(forged, 7, output="forged"))
        await old.events(*rest)
        assert [await old.outcome_of(job.lease, n) for n in (4, 5, 6, 7)] == ["refused:LEASE_LOST"] * 4
        beat = await old.heartbeat([job.lease.lease_token])
        answer = await old.expect("heartbeat_ack", lambda ack: ack.renewed >= beat)
        assert list(answer.lost_lease_tokens) == [job.lease.lease_token]
        await old.reject(job.lease, "NO_CAPACITY")
        await old.cancel_receipts(job.lease.lease_token)
        # Another executor's token is no better than none.
        await old.events(job_events.succeeded(again.lease, 8, output="stolen"))
        assert await old.outcome_of(again.lease, 8) == "refused:LEASE_LOST"
        assert await refused_upload(here, job.lease) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")

        step = await here.step(job.lease.step_run_id)
        assert (step["state"], step["attempt"], step["output"]) == ("running", 2, None)
        await new.events(job_events.succeeded(again.lease, 5, output="fresh"))
        await new.expect_ack(again.lease, 5)
        await here.until_run(run_id, "succeeded")
    step = await here.step(job.lease.step_run_id)
    assert (step["state"], step["attempt"], step["output"]) == ("succeeded", 2, b'"fresh"')
    effects = await here.raw.fetch("select result, attempt from rara.effect")
    assert [(row["result"], row["attempt"]) for row in effects] == [(b'"from the second"', 2)]
    assert await here.raw.fetchval("select data from rara.checkpoint") == b'{"at":2}'
    await assert_closed_once(here.raw, [run_id])


def with_attempt(lease: Any, *, attempt: int) -> Any:
    changed = type(lease)()
    changed.CopyFrom(lease)
    changed.attempt = attempt
    return changed


async def refused_upload(world: RunningScheduler, lease: Any) -> tuple[grpc.StatusCode, str]:
    """What a unary call under this lease is answered."""
    async with grpc.aio.insecure_channel(world.address) as channel:
        stub: Any = artifact_pb2_grpc.ArtifactServiceStub(channel)
        refused = await refusal(
            stub.CreateUpload(
                artifact_pb2.CreateUploadRequest(
                    digest=common_pb2.Digest(sha256="0" * 64, size_bytes=1), lease=lease
                ),
                timeout=WAIT_S,
            )
        )
    return refused.status, refused.reason


# ---------------------------------------------------------------- OWN-3: after the end


ENDS = {
    "succeeded": succeeded(3),
    "terminal_failed": failed(3, retryable=False),
    "cancelled": cancelled(3),
}


async def sweep_everything(world: StoreWorld) -> None:
    """What a sweep does, with nothing left out."""
    after = NIL
    while page := await world.sweeps.reclaimable(after):
        for found in page:
            words = LeaseReports(found.step_run_id, found.workflow_run_id, found.lease_token, None, RECLAIM)
            await world.commits.commit([words], skip_locked=True)
        after = page[-1].step_run_id
    await world.sweeps.promote_due()
    await world.sweeps.mark_leases([(lease, 0.0) for lease in await world.sweeps.overdue_leases()])
    for run in await world.sweeps.overdue_runs():
        await world.cancels.cancel_run(
            run.workflow_run_id, reason="DEADLINE_EXCEEDED", message="", grace_s=None, skip_locked=True
        )
    if found_steps := await world.sweeps.overdue_steps(NIL):
        await world.cancels.close_overdue(found_steps)


@pytest.mark.case("OWN-3")
@pytest.mark.parametrize("end", ENDS)
async def test_after_its_end_nothing_brings_a_step_or_its_lease_back(world: StoreWorld, end: str) -> None:
    await world.define("one", {"a": {}}, run_timeout={"seconds": 3600})
    run_id = await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    if end == "cancelled":
        await world.cancel(run_id)
    # Whatever could be read before the end is written after it.
    await world.raw.execute("update rara.workflow_run set deadline = now() - interval '1 s'")
    overdue = await world.sweeps.overdue_runs()
    await world.report(grant, ENDS[end])
    assert await world.state(grant.step_run_id) == end
    before = await everything(world.raw, run_id)

    _, lost, _ = await world.leases.renew([(grant.step_run_id, grant.lease_token, grant.executor_id)])
    assert lost == {grant.lease_token}
    for late in (failed(4), cancelled(5), succeeded(6, b'"again"'), progress(7, b"{}")):
        result = await world.report(grant, late)
        assert result.decisions == {}
        assert result.late[grant.lease_token].lost == (late.sequence,)
    await world.report(grant, ending("NO_CAPACITY", Guard.NOT_RUNNING))
    await world.say(grant, *RECLAIM)
    for run in overdue:
        await world.cancels.cancel_run(
            run.workflow_run_id, reason="DEADLINE_EXCEEDED", message="", grace_s=None, skip_locked=True
        )
    await world.cancel(run_id)
    for _ in range(10):
        await sweep_everything(world)
    assert await everything(world.raw, run_id) == before
    step = await world.step(grant.step_run_id)
    assert (step["state"], step["lease_expires_at"]) == (end, None)
    assert await world.raw.fetchval("select count(*) from rara.lease") == 0
    await assert_closed_once(world.raw, [run_id])


@pytest.mark.case("OWN-3")
async def test_a_heartbeat_that_meets_the_end_leaves_no_lease_behind(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("one", {"a": {}})
    async with store_world(database_url) as other:
        for _ in range(20):
            run_id = await world.start("one")
            grant = await world.lease_one()
            await world.report(grant, accepted(), running())
            beat = [(grant.step_run_id, grant.lease_token, grant.executor_id)]
            (renewed, lost, busy), *_ = await asyncio.gather(
                other.leases.renew(beat), world.report(grant, succeeded(3)), other.leases.renew(beat)
            )
            assert renewed.keys() | lost | busy == {grant.lease_token}
            assert await world.run_state(run_id) == "succeeded"
            assert await world.raw.fetchval("select count(*) from rara.lease") == 0
            _, lost, _ = await other.leases.renew(beat)
            assert lost == {grant.lease_token}


@pytest.mark.case("OWN-3")
async def test_a_late_heartbeat_over_the_wire_is_answered_lost_and_ten_sweeps_touch_nothing(
    database_url: str, tmp_path: Path
) -> None:
    async with running_scheduler(database_url, tmp_path, sweep_s=0.1) as world:
        await keep_trail(world.raw)
        sweeps = world.scheduler._sweep
        turns, sweep = 0, sweeps.sweep

        async def counted() -> float | None:
            nonlocal turns
            turns += 1
            return await sweep()

        sweeps.sweep = counted  # type: ignore[method-assign]
        await world.define("one", {"a": {}})
        async with world.executor() as executor:
            run_id = await world.start("one")
            job = await executor.expect_job()
            await finish(executor, job)
            await world.until_run(run_id, "succeeded")
            before = await everything(world.raw, run_id)
            beat = await executor.heartbeat([job.lease.lease_token])
            answer = await executor.expect("heartbeat_ack", lambda ack: ack.renewed >= beat)
            assert list(answer.lost_lease_tokens) == [job.lease.lease_token]
            begun = turns
            async with asyncio.timeout(WAIT_S):
                while turns < begun + 11:
                    await asyncio.sleep(0.02)
            assert await everything(world.raw, run_id) == before
            step = await world.step(job.lease.step_run_id)
            assert (step["state"], step["lease_expires_at"], step["attempt"]) == ("succeeded", None, 1)
        # Its session ends, another scheduler's sweeps begin: a closed step is nobody's to reclaim.
        async with running_scheduler(database_url, tmp_path, sweep_s=0.1, settle_s=0.1) as other:
            outlook = await other.scheduler._sweep.sweep()
            assert outlook is None
            assert await everything(world.raw, run_id) == before
        await assert_closed_once(world.raw, [run_id])
