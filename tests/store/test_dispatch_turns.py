"""Turns of leasing: how many statements they take, and that nobody's free slot stands behind another's lack of work."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest
import pytest_asyncio
from rara_scheduler.domain.routing import Capability, Offer
from rara_scheduler.loops import dispatch
from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.loops.committer import Committer
from rara_scheduler.loops.dispatch import DispatchLoop, RouteTable
from rara_scheduler.pauses import Pauses
from rara_scheduler.sessions import Session, SessionRegistry
from rara_scheduler.store.leases import Grant, LeaseStore
from support.store_world import StoreWorld, new_id, store_world

LONG_S = 3600.0


class CountedLeases(LeaseStore):
    """meanwhile: what happens while a statement is under way."""

    statements = 0
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    async def grant(self, *arguments: Any, **more: Any) -> list[Grant]:
        self.statements += 1
        self.meanwhile()
        return await super().grant(*arguments, **more)


class Leasing:
    """A dispatch loop over the world's database, with sessions that nobody reads."""

    def __init__(self, world: StoreWorld) -> None:
        self.sessions = SessionRegistry(max_sessions=10)
        self.routes = RouteTable()
        self.leases = CountedLeases(world.database, lease_s=30.0, heartbeat_s=5.0)
        pauses = Pauses(stale_s=LONG_S)
        pauses.looked([], time.monotonic())
        self.loop = DispatchLoop(
            self.leases,
            world.definitions,
            self.sessions,
            self.routes,
            Committer(world.commits, cast("Aftermath", None), batch=500),  # nothing is given back
            pauses,
            lease_s=30.0,
            poll_s=LONG_S,
            lease_batch=500,
            max_payload_bytes=1 << 20,
            tell_others=lambda: None,
        )

    def session(self, kinds: Sequence[str], credit: int) -> Session:
        offer = Offer("python", tuple(Capability(kind, ("1.0.0",), 0) for kind in kinds), {})
        session = Session(new_id(), new_id(), "test", offer, LONG_S)
        session.credit_limit = credit
        self.sessions.add(session)
        return session


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def until_held(session: Session, count: int) -> None:
    async with asyncio.timeout(20):
        while len(session.held) < count:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("routes", [1, 4, 10, 40])
async def test_a_backlog_of_one_of_many_routes_is_leased_by_few_statements(
    world: StoreWorld, routes: int
) -> None:
    kinds = [f"work.k{n}" for n in range(routes)]
    await world.define("all", {f"s{n}": {"kind": kind} for n, kind in enumerate(kinds)})
    await world.define("busy", {f"s{n}": {"kind": kinds[0]} for n in range(300)})
    await world.start("busy")
    leasing = Leasing(world)
    leasing.routes.add(await world.definitions.routes_after(0))
    assert len(leasing.routes.routes) == routes
    session = leasing.session(kinds, credit=1000)
    running = asyncio.create_task(leasing.loop.run())
    leasing.loop.wake()
    await until_held(session, 300)
    running.cancel()
    assert leasing.leases.statements <= 8 + routes  # with a few slots a statement it would take hundreds


async def test_a_freed_slot_does_not_wait_for_another_sessions_lack_of_work(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_NO_HURRY_S", LONG_S)
    await world.define("x", {"a": {"kind": "work.x"}})
    await world.define("y", {f"s{n}": {"kind": "work.y"} for n in range(5)})
    await world.start("y")
    leasing = Leasing(world)
    leasing.routes.add(await world.definitions.routes_after(0))
    idle = leasing.session(["work.x"], credit=5)
    full = leasing.session(["work.y"], credit=2)
    running = asyncio.create_task(leasing.loop.run())
    leasing.loop.wake()
    await until_held(full, 2)
    idle.credit_limit += 1
    leasing.loop.credit_freed()
    await asyncio.sleep(0.05)  # nothing was left for it: it is told to wait
    for held in (3, 4, 5):
        full.credit_limit += 1
        leasing.loop.credit_freed()
        await until_held(full, held)
    running.cancel()
    assert not idle.held


@pytest.mark.parametrize("change", ["drains", "ends", "has no room left"])
async def test_who_drains_while_others_are_served_is_given_nothing(world: StoreWorld, change: str) -> None:
    await world.define("x", {"a": {"kind": "work.x"}})
    await world.define("y", {f"s{n}": {"kind": "work.y"} for n in range(40)})
    await world.start("x")
    await world.start("y")
    leasing = Leasing(world)
    leasing.routes.add(await world.definitions.routes_after(0))
    served = leasing.session(["work.x"], credit=5)
    later = leasing.session(["work.y"], credit=5)

    def meanwhile() -> None:
        if change == "drains":
            later.draining = True
        elif change == "ends":
            later.closing = True
        else:
            later.jobs_sent = later.credit_limit

    leasing.leases.meanwhile = meanwhile
    running = asyncio.create_task(leasing.loop.run())
    leasing.loop.wake()
    await until_held(served, 1)
    await leasing.loop.turn_over()
    running.cancel()
    assert not later.held
    assert await world.raw.fetchval("select count(*) from rara.ready") == 40
