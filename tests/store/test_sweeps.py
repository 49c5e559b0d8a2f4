"""What falls due by itself: each look, each page, each guard looked at again."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import Guard
from rara_scheduler.store.commit import LeaseReports
from rara_scheduler.store.sweeps import Outlook
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
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
    async with store_world(database_url) as opened:
        yield opened


async def reclaim(world: StoreWorld) -> int:
    """One whole sweep; how many attempts it ended."""
    ended = 0
    after = NIL
    while page := await world.sweeps.reclaimable(after):
        result = await world.commits.commit(
            [LeaseReports(x.step_run_id, x.workflow_run_id, x.lease_token, None, RECLAIM) for x in page],
            skip_locked=True,
        )
        ended += sum(1 for decision in result.decisions.values() if decision.closing)
        after = page[-1].step_run_id
    return ended


async def test_a_quiet_database_shows_nothing_due(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    outlook = await world.sweeps.look_around()
    assert outlook == Outlook(
        next_due_s=None,
        reclaimable=False,
        leases_overdue=False,
        runs_overdue=False,
        ready_overdue=False,
        waiting_overdue=False,
        any_ready=True,
        others_known=False,
        newest_route_id=outlook.newest_route_id,
        pauses="",
    )
    assert outlook.newest_route_id > 0


async def test_an_expired_lease_is_reclaimed_once_and_a_renewed_one_is_not(world: StoreWorld) -> None:
    await world.define("two", {"a": {}, "b": {}})
    await world.start("two")
    lost, alive = await world.lease()
    for grant in (lost, alive):
        await world.report(grant, accepted(), running())
    await world.expire(lost)
    assert (await world.sweeps.look_around()).reclaimable
    assert await reclaim(world) == 1
    assert await reclaim(world) == 0
    row = await world.step(lost.step_run_id)
    assert (row["state"], row["reason"], row["failures"]) == ("retryable_failed", "LEASE_EXPIRED", 1)
    assert await world.state(alive.step_run_id) == "running"


async def test_a_sweep_that_read_an_old_state_changes_nothing(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    first = await world.lease_one()
    await world.report(first, accepted(), running())
    await world.expire(first)
    (seen,) = await world.sweeps.reclaimable(NIL)  # and here the sweep stops for a while
    assert await reclaim(world) == 1
    await world.make_due()
    second = await world.lease_one()
    await world.run_to_success(second)
    late = LeaseReports(seen.step_run_id, seen.workflow_run_id, seen.lease_token, None, RECLAIM)
    result = await world.commits.commit([late], skip_locked=True)
    assert result.decisions == {}
    row = await world.step(first.step_run_id)
    assert (row["state"], row["attempt"]) == ("succeeded", 2)
    assert await world.run_state(run_id) == "succeeded"


async def test_a_late_result_that_comes_before_the_reclaim_counts(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.expire(grant)
    await world.report(grant, succeeded(3))
    assert await reclaim(world) == 0
    assert await world.state(grant.step_run_id) == "succeeded"


async def test_a_lease_renewed_between_the_look_and_the_commit_stays(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.expire(grant)
    (seen,) = await world.sweeps.reclaimable(NIL)
    renewed, lost, _ = await world.leases.renew([(grant.step_run_id, grant.lease_token, grant.executor_id)])
    assert (set(renewed), lost) == ({grant.lease_token}, frozenset())
    await world.commits.commit(
        [LeaseReports(seen.step_run_id, seen.workflow_run_id, seen.lease_token, None, RECLAIM)],
        skip_locked=True,
    )
    assert await world.state(grant.step_run_id) == "running"


async def test_rows_that_must_wait_do_not_hide_the_rows_behind_them(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("one", {"a": {}})
    await world.define("wide", {f"s{i}": {} for i in range(700)})
    locked = await world.start("wide")
    await world.start("one")
    grants = await world.lease(1000)
    assert len(grants) == 701
    await world.raw.execute(
        "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
    )
    side = await asyncpg.connect(database_url)
    try:
        transaction = side.transaction()
        await transaction.start()
        await side.execute(
            "select from rara.workflow_run where workflow_run_id = $1::uuid for update", locked
        )
        async with asyncio.timeout(10):
            assert await reclaim(world) == 1
        await transaction.rollback()
        assert await reclaim(world) == 700
    finally:
        await side.close()


async def test_waiting_steps_are_promoted_when_due_and_not_before(world: StoreWorld) -> None:
    await world.define("one", {"a": {"retry": {"initial_backoff": {"seconds": 40}}}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running(), failed(3))
    outlook = await world.sweeps.look_around()
    assert outlook.next_due_s == pytest.approx(20.0, abs=3.0)  # full jitter of one half
    assert await world.sweeps.promote_due() == 0
    await world.raw.execute("update rara.waiting set available_at = now()")
    assert await world.sweeps.promote_due() == 1
    assert (await world.lease_one()).failures == 1


async def test_a_locked_run_does_not_keep_others_from_being_promoted(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("one", {"a": {}})
    locked, _ = await world.start("one"), await world.start("one")
    for grant in await world.lease():
        await world.report(grant, accepted(), running(), failed(3))
    await world.raw.execute("update rara.waiting set available_at = now()")
    side = await asyncpg.connect(database_url)
    try:
        transaction = side.transaction()
        await transaction.start()
        await side.execute(
            "select from rara.workflow_run where workflow_run_id = $1::uuid for update", locked
        )
        assert await world.sweeps.promote_due() == 1
        await transaction.rollback()
        assert await world.sweeps.promote_due() == 1
    finally:
        await side.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("deadline = now() - interval '1 s'", "DEADLINE_EXCEEDED"),
        ("attempt_deadline = now() - interval '1 s'", "ATTEMPT_TIMEOUT"),
        (
            "progress_timeout = interval '5 s', progress_at = now() - interval '6 s'",
            "PROGRESS_TIMEOUT",
        ),
    ],
)
async def test_each_limit_of_a_lease_marks_it_once_with_its_reason(
    world: StoreWorld, change: str, reason: str
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.raw.execute(f"update rara.lease set {change}")
    assert (await world.sweeps.look_around()).leases_overdue
    (late,) = await world.sweeps.overdue_leases()
    assert late.reason == reason
    assert len(await world.sweeps.mark_leases([(late, 2.0)])) == 1
    assert await world.sweeps.mark_leases([(late, 2.0)]) == []
    assert await world.sweeps.overdue_leases() == []
    assert not (await world.sweeps.look_around()).leases_overdue


async def test_progress_moves_the_progress_timeout(world: StoreWorld) -> None:
    await world.define("one", {"a": {"progress_timeout": {"seconds": 5}}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.raw.execute("update rara.lease set progress_at = now() - interval '6 s'")
    assert len(await world.sweeps.overdue_leases()) == 1
    await world.report(grant, progress(3))
    assert await world.sweeps.overdue_leases() == []


async def test_steps_beyond_their_schedule_timeout_are_told_from_those_beyond_their_deadline(
    world: StoreWorld,
) -> None:
    await world.define("two", {"a": {"schedule_timeout": {"seconds": 60}}, "b": {"timeout": {"seconds": 60}}})
    run_id = await world.start("two")
    assert await world.sweeps.overdue_steps(NIL) == []
    await world.raw.execute(
        "update rara.ready set deadline = deadline - interval '61 s',"
        " schedule_deadline = schedule_deadline - interval '61 s'"
    )
    (late,) = await world.sweeps.overdue_steps(NIL)
    assert late.past_deadline  # the other one waits on, for a capable executor to be free
    unserved = [route.route_id for route in await world.definitions.routes_after(0)]
    found = await world.sweeps.overdue_steps(NIL, unserved)
    assert sorted(step.past_deadline for step in found) == [False, True]
    assert await world.sweeps.overdue_steps(max(step.step_run_id for step in found), unserved) == []
    await world.cancels.close_overdue(found)
    assert await world.steps(run_id) == {
        "a": ("cancelled", "NO_CAPABLE_EXECUTOR"),
        "b": ("cancelled", "DEADLINE_EXCEEDED"),
    }
    assert await world.run_state(run_id) == "failed"
