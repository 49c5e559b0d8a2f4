"""Executors as the database knows them: sessions that replace each other, inventories, drains, cancels."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import CancelReceipt
from rara_scheduler.domain.routing import Capability, Offer
from rara_scheduler.domain.tokens import Role, Token
from rara_scheduler.store.sessions import DrainOrder, Seen
from rara_scheduler.store.tokens import TokenStore
from support.store_world import (
    StoreWorld,
    accepted,
    ending,
    new_id,
    progress,
    running,
    store_world,
    succeeded,
)

OFFER = Offer("python", (Capability("work.do", ("1.0.0", "1.1.0"), 4),), {"zone": "a"})


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def open_session(
    world: StoreWorld, executor_id: str, scheduler_id: str | None = None
) -> tuple[str, DrainOrder | None]:
    session_id = new_id()
    draining = await world.sessions.open(
        executor_id=executor_id,
        executor_name="host-1",
        sdk="rara-python/1",
        offer=OFFER,
        schemas={"work.do": "ab" * 32},
        session_id=session_id,
        scheduler_id=scheduler_id or new_id(),
    )
    return session_id, draining


async def test_the_newest_session_of_an_executor_is_the_one_that_lives(world: StoreWorld) -> None:
    executor_id = new_id()
    old, _ = await open_session(world, executor_id)
    new, _ = await open_session(world, executor_id)
    assert await world.sessions.seen([(executor_id, old, 0, 1)]) == {executor_id: Seen(False, None)}
    assert await world.sessions.seen([(executor_id, new, 2, 3)]) == {executor_id: Seen(True, None)}
    await world.sessions.close(executor_id, old, for_good=True)
    (row,) = await world.raw.fetch("select in_flight, free_credit, ended_at from rara.executor")
    assert tuple(row) == (2, 3, None)
    await world.sessions.close(executor_id, new, for_good=True)
    (row,) = await world.raw.fetch("select in_flight, free_credit, ended_at is null from rara.executor")
    assert tuple(row) == (0, 0, False)


async def test_a_drain_is_remembered_over_a_reconnect(world: StoreWorld) -> None:
    executor_id = new_id()
    _, draining = await open_session(world, executor_id)
    assert not draining
    assert await world.sessions.drain(executor_id)
    session_id, draining = await open_session(world, executor_id)
    assert draining == DrainOrder()
    order = Seen(True, DrainOrder())
    assert await world.sessions.seen([(executor_id, session_id, 0, 0)]) == {executor_id: order}
    assert await world.sessions.drain(new_id()) is None
    _, fresh = await open_session(world, new_id())  # a new process under the same name is another executor
    assert not fresh


async def test_a_drains_bound_is_an_instant_that_a_repeat_without_one_does_not_move(
    world: StoreWorld,
) -> None:
    executor_id = new_id()
    session_id, _ = await open_session(world, executor_id)
    first = await world.sessions.drain(executor_id, within_s=60)
    assert first is not None
    assert first.within_s == pytest.approx(60, abs=1)
    again = await world.sessions.drain(executor_id)
    seen = (await world.sessions.seen([(executor_id, session_id, 0, 0)]))[executor_id].drain
    _, reopened = await open_session(world, executor_id)
    for later in (again, seen, reopened):
        assert later is not None
        assert later.by == first.by
        assert later.within_s == pytest.approx(60, abs=10)
    sooner = await world.sessions.drain(executor_id, within_s=0)
    assert sooner is not None
    assert sooner.within_s == 0
    assert sooner.by != first.by


async def test_what_connected_executors_offer_is_known_to_every_scheduler(world: StoreWorld) -> None:
    executor_id = new_id()
    session_id, _ = await open_session(world, executor_id)
    assert await world.sweeps.live_offers(15.0) == [OFFER]
    assert (await world.sweeps.look_around()).others_known
    await world.raw.execute("update rara.executor set last_seen_at = now() - interval '16 s'")
    assert await world.sweeps.live_offers(15.0) == []
    await world.sessions.seen([(executor_id, session_id, 0, 0)])
    assert await world.sweeps.live_offers(15.0) == [OFFER]
    await world.sessions.close(executor_id, session_id, for_good=True)
    assert await world.sweeps.live_offers(15.0) == []


async def test_the_inventory_names_leases_their_newest_event_and_what_is_missing(world: StoreWorld) -> None:
    await world.define("two", {"a": {}, "b": {}})
    await world.start("two")
    executor_id = new_id()
    first, second = await world.lease(2, executor_id)
    await world.report(first, accepted(), running(), progress(5), progress(7))
    leases = {lease.lease_token: lease for lease in await world.sessions.leases(executor_id)}
    assert set(leases) == {first.lease_token, second.lease_token}
    held = leases[first.lease_token]
    assert (held.accepted, held.last_sequence, held.missing, held.kind) == (True, 7, (3, 4, 6), "work.do")
    held = leases[second.lease_token]
    assert (held.accepted, held.last_sequence, held.missing) == (False, 0, ())
    assert await world.sessions.leases(new_id()) == []


async def test_only_an_attempt_that_the_executor_ended_itself_is_told_as_closed(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    first = await world.lease_one()
    await world.report(first, accepted(), running(), progress(3))
    await world.expire(first)
    for found in await world.sweeps.reclaimable("00000000-0000-0000-0000-000000000000"):
        assert found.lease_token == first.lease_token
    await world.say(first, ending("LEASE_EXPIRED"))
    await world.make_due()
    second = await world.lease_one()
    await world.report(second, accepted(), running(), succeeded(3))
    step = first.step_run_id
    closed = await world.sessions.closed(
        [(step, first.lease_token), (step, second.lease_token), (step, 10_000), (new_id(), first.lease_token)]
    )
    assert closed == {second.lease_token: 3}  # the first was taken from it
    assert await world.sessions.closed([]) == {}


async def test_a_cancel_is_undelivered_until_its_receipt(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    assert await world.sessions.undelivered_cancels([grant.executor_id]) == []
    await world.cancel(run_id)
    (order,) = await world.sessions.undelivered_cancels([grant.executor_id])
    assert (order.lease_token, order.reason) == (grant.lease_token, "CANCELLED")
    assert await world.sessions.undelivered_cancels([new_id()]) == []
    await world.report(grant, CancelReceipt())
    assert await world.sessions.undelivered_cancels([grant.executor_id]) == []
    (held,) = await world.sessions.leases(grant.executor_id)
    assert held.cancel_reason == "CANCELLED"


async def test_the_lease_of_a_dialled_executor_is_that_of_a_token_for_its_kind(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    [grant] = await world.lease(1)
    tokens = TokenStore(world.database)

    async def holds(*kinds: str, name: str = "dialled", executor_kind: str | None = None) -> bool:
        token = Token("id", name, Role.EXECUTOR, kinds, executor_kind)
        return await tokens.holds_lease(grant.step_run_id, grant.lease_token, token)

    await open_session(world, await world.raw.fetchval("select executor_id::text from rara.lease"))
    change = "update rara.executor set direct = $1, token_name = $2"
    await world.raw.execute(change, True, None)
    kind, language = "work.do", OFFER.executor_kind
    assert await holds(kind)
    assert await holds("*", executor_kind=language)
    assert not await holds("other.only")
    assert not await holds()
    assert not await holds(kind, executor_kind=f"not-{language}")
    assert not await tokens.holds_lease(
        grant.step_run_id, grant.lease_token + 1, Token("id", "dialled", Role.EXECUTOR, (kind,))
    )
    # Of one that came by itself it is the name that counts.
    await world.raw.execute(change, False, None)
    assert not await holds("*")
    await world.raw.execute(change, False, "farm")
    assert await holds("other.only", name="farm")
    assert not await holds("*")
