"""Pausing kinds and definitions: what steps aside, what comes back, and what holds while it happens."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest
import pytest_asyncio
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.pause import Target
from rara_scheduler.loops.pauses import PauseLoop
from rara_scheduler.pauses import Pauses
from rara_scheduler.store.leases import Grant, HeldElsewhere, HeldInFront
from rara_scheduler.store.pauses import FRONT, PauseStore, Restarted, front_of
from rara_scheduler.store.sweeps import BEFORE_ALL
from rara_scheduler.store.telemetry import TelemetryStore
from support.store_world import StoreWorld, accepted, failed, new_id, running, store_world

PAUSED = Target(definition="held")
BARRED = frozenset({"held"})


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url, check_history=True) as opened:
        yield opened


@pytest_asyncio.fixture
async def store(world: StoreWorld) -> PauseStore:
    for name in ("held", "free"):
        await world.define(name, {"a": {}, "b": {"depends_on": ["a"]}})
    return PauseStore(world.database)


async def lease_around(world: StoreWorld, most: int = 10) -> list[Grant]:
    """As a scheduler does that knows of the pause."""
    routes = [r.route_id for r in await world.definitions.routes_after(0)]
    probes = [(route_id, most, BEFORE_ALL, "1.0.0") for route_id in routes]
    return await world.leases.grant(probes, [new_id()] * most, barred=BARRED)


async def aside(world: StoreWorld) -> int:
    return int(await world.raw.fetchval("select count(*) from rara.ready where route_id < 0"))


async def test_ready_steps_of_a_paused_definition_step_aside_and_come_back_in_their_order(
    world: StoreWorld, store: PauseStore
) -> None:
    await world.start("held")
    free = await world.start("free")
    await world.start("held")
    before = await world.raw.fetch("select * from rara.ready order by available_at, step_run_id")
    pause, already = await store.pause(PAUSED, reason="bad input", paused_by="ops")
    assert (already, pause.reason, pause.paused_by) == (False, "bad input", "ops")
    (grant,) = await lease_around(world)
    assert grant.workflow_run_id == free
    assert (await aside(world), await lease_around(world)) == (2, [])
    assert (await store.loads([pause.pause_id]))[pause.pause_id].held == 2
    queues = await TelemetryStore(world.database).queues()
    assert (queues.held, queues.pauses) == (2, {"kind": 0, "definition": 1})
    assert await store.release(pause.pause_id, 10) == 0  # it is not over
    ended = await store.resume(PAUSED)
    assert ended is not None
    assert not await store.remove(pause.pause_id)
    assert await store.release(pause.pause_id, 1) == 1
    assert await store.release(pause.pause_id, 10) == 1
    assert await store.remove(pause.pause_id)
    after = await world.raw.fetch("select * from rara.ready order by available_at, step_run_id")
    assert after == [row for row in before if str(row["workflow_run_id"]) != free]
    assert [(g.attempt, g.failures) for g in await world.lease()] == [(1, 0), (1, 0)]


async def test_a_repeat_keeps_the_first_reason_and_a_resume_of_nothing_changes_nothing(
    world: StoreWorld, store: PauseStore
) -> None:
    first, _ = await store.pause(PAUSED, reason="one", paused_by="a")
    assert await store.pause(PAUSED, reason="two", paused_by="b") == (first, True)
    answers = await asyncio.gather(
        *(store.pause(Target(kind="work.do"), reason=str(n), paused_by="") for n in range(20))
    )
    assert sum(not already for _, already in answers) == 1
    assert len({pause.pause_id for pause, _ in answers}) == 1
    assert await store.resume(Target(kind="none")) is None
    ended = await store.resume(PAUSED)
    assert ended is not None
    assert (ended.pause_id, await store.resume(PAUSED)) == (first.pause_id, None)
    again, already = await store.pause(PAUSED, reason="three", paused_by="c")
    assert (already, again.pause_id > first.pause_id) == (False, True)


async def test_no_more_than_a_thousand_are_paused(
    world: StoreWorld, store: PauseStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rara_scheduler.store.pauses.MAX_PAUSES", 2)
    for kind in ("x", "y"):
        await store.pause(Target(kind=kind), reason="", paused_by="")
    with pytest.raises(Fault) as caught:
        await store.pause(PAUSED, reason="", paused_by="")
    assert (caught.value.code, caught.value.metadata) == (Code.QUOTA_EXCEEDED, {"limit": "2"})
    assert (await store.pause(Target(kind="x"), reason="", paused_by=""))[1]


async def test_what_is_released_promoted_or_handed_back_while_paused_steps_aside_too(
    world: StoreWorld, store: PauseStore
) -> None:
    runs = [await world.start("held") for _ in range(3)]
    grants = {g.workflow_run_id: g for g in await world.lease()}
    await store.pause(PAUSED, reason="", paused_by="")
    await world.run_to_success(grants[runs[0]])  # b becomes ready
    await world.report(grants[runs[1]], accepted(1), running(2), failed(3))  # backs off
    await world.make_due()
    assert await lease_around(world) == []
    assert await aside(world) == 2
    assert await world.steps(runs[0]) == {"a": ("succeeded", ""), "b": ("pending", "")}
    assert await world.steps(runs[1]) == {"a": ("retryable_failed", "HANDLER_FAILED"), "b": ("pending", "")}
    await world.run_to_success(grants[runs[2]])  # what runs goes on, and commits
    assert (await world.steps(runs[2]))["a"] == ("succeeded", "")


async def test_cancel_and_deadlines_close_what_stands_aside(world: StoreWorld, store: PauseStore) -> None:
    await world.define("held", {"a": {"timeout": {"seconds": 60}, "schedule_timeout": {"seconds": 1}}})
    cancelled = await world.start("held")
    overdue, waits = await world.start("held"), await world.start("held")
    await store.pause(PAUSED, reason="", paused_by="")
    assert (await store.hold(FRONT, 100)).held == 3
    await world.cancel(cancelled)
    assert await world.run_state(cancelled) == "cancelled"
    await world.raw.execute(
        "update rara.ready set deadline = now() - interval '1 s' where workflow_run_id = $1::uuid", overdue
    )
    await world.raw.execute("update rara.ready set schedule_deadline = now() - interval '1 s'")
    routes = [r.route_id for r in await world.definitions.routes_after(0)]
    page = await world.sweeps.overdue_steps("00000000-0000-0000-0000-000000000000", routes)
    assert [step.workflow_run_id for step in page] == [overdue]
    await world.cancels.close_overdue(page)
    assert await world.steps(overdue) == {"a": ("cancelled", "DEADLINE_EXCEEDED")}
    assert await world.steps(waits) == {"a": ("pending", "")}
    ended = await store.resume(PAUSED)
    assert ended is not None
    await store.release(ended.pause_id, 10)
    left = await world.raw.fetchrow("select schedule_deadline > now() as anew, deadline from rara.ready")
    assert left is not None
    assert left["anew"]  # it waits for an executor from now on


async def test_steps_of_a_paused_definition_that_have_not_stepped_aside_yet_are_spared(
    world: StoreWorld, store: PauseStore
) -> None:
    await world.define("held", {"a": {"schedule_timeout": {"seconds": 1}}})
    run_id = await world.start("held")
    await world.raw.execute("update rara.ready set schedule_deadline = now() - interval '1 s'")
    routes = [r.route_id for r in await world.definitions.routes_after(0)]
    page = await world.sweeps.overdue_steps("00000000-0000-0000-0000-000000000000", routes)
    assert (await world.cancels.close_overdue(page, spared=BARRED)).closed_unheld == 0
    assert await world.run_state(run_id) == "pending"
    assert (await world.cancels.close_overdue(page)).closed_unheld == 1


async def test_a_resumed_kind_waits_anew_for_an_executor(world: StoreWorld, store: PauseStore) -> None:
    await world.define("slow", {"a": {"kind": "slow.do", "schedule_timeout": {"seconds": 300}}})
    await world.start("slow")
    await world.raw.execute("update rara.ready set schedule_deadline = now() - interval '1 hour'")
    (route_id,) = await store.routes_of("slow.do")
    await store.pause(Target(kind="slow.do"), reason="", paused_by="")
    resumed_at = await resumed(store, Target(kind="slow.do"))
    for renewed in (1, 0):
        assert await store.restart_waits(route_id, front_of(route_id), resumed_at, 10) == Restarted(
            renewed, 0, None
        )
    assert await wait_of_a_step(world) == resumed_at + timedelta(seconds=300)
    await world.raw.execute("update rara.ready set schedule_deadline = schedule_deadline + interval '1 s'")
    await store.restart_waits(route_id, front_of(route_id), resumed_at, 10)
    assert await wait_of_a_step(world) == resumed_at + timedelta(seconds=301)  # no wait is cut short


async def resumed(store: PauseStore, target: Target) -> datetime:
    ended = await store.resume(target)
    assert ended is not None
    assert ended.resumed_at is not None
    return ended.resumed_at


async def wait_of_a_step(world: StoreWorld) -> datetime:
    until: datetime = await world.raw.fetchval("select schedule_deadline from rara.ready")
    return until


def pause_loop(store: PauseStore, wakes: list[None]) -> PauseLoop:
    """Of a scheduler that has just started: it knows of no route and of no pause yet."""
    return PauseLoop(store, Pauses(stale_s=60.0), every_s=1.0, wake_dispatch=lambda: wakes.append(None))


async def test_a_scheduler_that_has_just_started_restarts_the_waits_of_a_resumed_kind(
    world: StoreWorld, store: PauseStore
) -> None:
    await world.define("slow", {"a": {"kind": "slow.do", "schedule_timeout": {"seconds": 300}}})
    await world.start("slow")
    await store.pause(Target(kind="slow.do"), reason="", paused_by="")
    await world.raw.execute("update rara.ready set schedule_deadline = now() - interval '1 s'")
    resumed_at = await resumed(store, Target(kind="slow.do"))
    wakes: list[None] = []
    await pause_loop(store, wakes).turn()
    assert await wait_of_a_step(world) == resumed_at + timedelta(seconds=300)
    assert wakes
    assert await store.all() == []


async def test_waits_of_steps_that_somebody_holds_are_restarted_later_without_waiting_for_them(
    world: StoreWorld, store: PauseStore
) -> None:
    await world.define(
        "slow", {name: {"kind": "slow.do", "schedule_timeout": {"seconds": 300}} for name in "ab"}
    )
    await world.start("slow")
    await store.pause(Target(kind="slow.do"), reason="", paused_by="")
    resumed_at = await resumed(store, Target(kind="slow.do"))
    (route_id,) = await store.routes_of("slow.do")
    loop = pause_loop(store, [])
    async with world.database.transaction() as connection:
        await connection.fetch("select from rara.ready order by step_run_id limit 1 for update")
        done = await store.restart_waits(route_id, front_of(route_id), resumed_at, 10)
        assert (done.renewed, done.left_out) == (1, 1)
        assert not await loop.turn()
        assert [pause.target.kind for pause in await store.all()] == ["slow.do"]
    assert not await loop.turn()
    untils = await world.raw.fetch("select distinct schedule_deadline from rara.ready")
    assert [row["schedule_deadline"] for row in untils] == [resumed_at + timedelta(seconds=300)]
    assert await store.all() == []


async def test_a_resume_waits_for_a_look_under_way_and_nothing_steps_aside_after_it(
    world: StoreWorld, store: PauseStore
) -> None:
    await world.start("held")
    pause, _ = await store.pause(PAUSED, reason="", paused_by="")
    async with world.database.transaction() as connection:
        await connection.fetch("select from rara.pause for share")  # as a look does, before it moves anything
        resuming = asyncio.create_task(store.resume(PAUSED))
        done, _ = await asyncio.wait({resuming}, timeout=0.2)
        assert not done
    assert await resuming is not None
    assert (await store.hold(FRONT, 10)).held == 0
    assert await store.remove(pause.pause_id)
    assert len(await lease_around_unpaused(world)) == 1


async def lease_around_unpaused(world: StoreWorld) -> list[Grant]:
    """As a scheduler does that has not heard of the resume: it gets nothing, and does not turn in circles."""
    with pytest.raises(HeldElsewhere):
        await lease_around(world)
    return await world.lease()


async def test_two_schedulers_that_lease_around_a_pause_lease_each_other_step_once(
    world: StoreWorld, store: PauseStore
) -> None:
    for n in range(60):
        await world.start("held" if n % 3 else "free")
    await store.pause(PAUSED, reason="", paused_by="")

    async def scheduler() -> list[Grant]:
        mine: list[Grant] = []
        for _ in range(20):
            try:
                mine += await lease_around(world, 3)
            except (HeldInFront, HeldElsewhere):
                continue
        return mine

    both = await asyncio.gather(scheduler(), scheduler(), store.hold(FRONT, 50), store.hold(FRONT, 50))
    grants = both[0] + both[1]
    assert {grant.definition for grant in grants} == {"free"}
    assert len({grant.step_run_id for grant in grants}) == len(grants) == 20
    assert await aside(world) == 40
