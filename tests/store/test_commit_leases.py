"""Commits read leases without locks, or remember them: whoever changes one meanwhile comes either before the commit or
after it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import Guard, Item, Report
from rara_scheduler.store.commit import BatchResult, LeaseReports
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.queries import query
from support.stepped_database import Interleaver, SteppedDatabase
from support.store_world import StoreWorld, accepted, ending, failed, reports, running, store_world, succeeded

LONG_S = 1000.0
STATEMENTS = 10  # more than any of these commits has; at the last ones it is over
RETRIED: dict[str, Any] = {"retry": {"max_attempts": 5}}
DEFINITIONS: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {"a": RETRIED},
    "in front": {"a": RETRIED, "b": {"depends_on": ["a"]}},
}
# Who remembers a step that stands alone ends it by one statement; one in front of others is read at its end, and by who
# does not remember it always.
WAYS = [("alone", True), ("in front", True), ("in front", False)]
ENDS: dict[str, Callable[[], tuple[Item, ...]]] = {
    "goes on": lambda: (running(),),
    "succeeded": lambda: (running(), succeeded(3)),
    "failed": lambda: (running(), failed(3)),
    "failed for good": lambda: (running(), failed(3, retryable=False)),
    "taken back": lambda: (ending("EXECUTOR_SHUTDOWN"),),
}


@dataclass(frozen=True, slots=True)
class Standing:
    """What a commit has made of a lease; two that are equal came about in the same order."""

    state: str
    reason: str | None
    asked: bool
    spent: bool | None


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with AsyncExitStack() as stack:
        yield await stack.enter_async_context(store_world(database_url, SteppedDatabase))


@pytest_asyncio.fixture
async def elsewhere(database_url: str) -> AsyncIterator[StoreWorld]:
    """Another scheduler, which remembers nothing of what the first has done."""
    async with store_world(database_url, SteppedDatabase) as world:
        yield world


@pytest_asyncio.fixture
async def other(database_url: str) -> "AsyncIterator[asyncpg.Connection[asyncpg.Record]]":
    connection = await asyncpg.connect(database_url)
    await connection.execute("set lock_timeout = '50ms'")  # whoever waits for the commit comes after it
    yield connection
    await connection.close()


async def begun(world: StoreWorld, steps: int = 1) -> list[Grant]:
    """Leases that were taken up, of steps of one run each."""
    for _ in range(steps):
        await world.start("one")
    grants = await world.lease(steps)
    await world.commits.commit([reports(g, accepted(), executor_id=g.executor_id) for g in grants])
    return grants


async def renew(connection: "asyncpg.Connection[asyncpg.Record]", grant: Grant) -> bool:
    who = [grant.step_run_id], [grant.lease_token], [grant.executor_id]
    return bool(await connection.fetch(query("renew_leases"), *who, LONG_S, 5.0))


async def renew_held(connection: "asyncpg.Connection[asyncpg.Record]", grant: Grant) -> bool:
    who = grant.step_run_id, grant.lease_token, grant.executor_id
    return bool(await connection.fetch(query("renew_held_lease"), *who, LONG_S))


async def ask_to_end(connection: "asyncpg.Connection[asyncpg.Record]", grant: Grant) -> bool:
    wish = [grant.step_run_id], [grant.lease_token], ["ATTEMPT_TIMEOUT"], [5.0]
    return bool(await connection.fetch(query("mark_leases"), *wish))


async def renew_and_ask(connection: "asyncpg.Connection[asyncpg.Record]", grant: Grant) -> bool:
    return await renew(connection, grant) and await ask_to_end(connection, grant)


WRITERS = {"renew": renew, "renew held": renew_held, "ask to end": ask_to_end, "both": renew_and_ask}


async def standing(world: StoreWorld, grant: Grant) -> Standing:
    row = await world.raw.fetchrow(
        """select state, reason, asked, spent from (
               select 'leased' as state, l.cancel_reason as reason, l.cancel_requested_at is not null as asked,
                      null::bool as spent
                 from rara.lease l where l.step_run_id = $1::uuid and l.lease_token = $2
               union all
               select x.state, x.reason, x.cancel_requested_at is not null, x.spent
                 from rara.result x where x.step_run_id = $1::uuid and x.lease_token = $2
               union all
               select 'again', a.reason, a.cancel_requested_at is not null, a.spent
                 from rara.step_attempt a where a.step_run_id = $1::uuid and a.lease_token = $2) t""",
        grant.step_run_id,
        grant.lease_token,
    )
    assert row is not None
    return Standing(*row)


async def expected(world: StoreWorld, end: str, *, asked_first: bool) -> Standing:
    """The same without anything at the same time."""
    (grant,) = await begun(world)
    if asked_first:
        assert await ask_to_end(world.raw, grant)
    await world.commits.commit([reports(grant, *ENDS[end](), executor_id=grant.executor_id)])
    return await standing(world, grant)


async def committed(
    world: StoreWorld, batch: list[LeaseReports], told: list[BatchResult], **more: bool
) -> None:
    told.append(await world.commits.commit(batch, **more))


@pytest.mark.parametrize(("definition", "remembers"), WAYS)
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("end", ENDS)
async def test_a_lease_that_changes_beside_its_commit_changed_before_or_after_it(
    world: StoreWorld,
    elsewhere: StoreWorld,
    other: "asyncpg.Connection[asyncpg.Record]",
    writer: str,
    end: str,
    definition: str,
    *,
    remembers: bool,
) -> None:
    await world.define("one", DEFINITIONS[definition])
    serial = {asked: await expected(world, end, asked_first=asked) for asked in (False, True)}
    seen = set()
    for at, waits in product(range(STATEMENTS), (False, True)):
        grant, neighbour = await begun(world, 2)
        batch = [
            reports(grant, *ENDS[end](), executor_id=grant.executor_id),
            reports(neighbour, running(), succeeded(3), executor_id=neighbour.executor_id),
        ]
        acts = Interleaver(world.raw)
        told: list[BatchResult] = []
        await acts.begin("commit", committed(world if remembers else elsewhere, batch, told))
        for _ in range(at):
            for act in acts.ready():
                await acts.step(act)
        change = other.transaction()
        await change.start()
        try:
            has_changed = await WRITERS[writer](other, grant)
        except asyncpg.LockNotAvailableError:
            has_changed = False
            await change.rollback()
        else:
            if waits:
                for act in acts.ready():
                    await acts.step(act)  # it waits for the change, where it wants the lease
            await change.commit()
        await acts.finish()

        (result,) = told
        assert set(result.decisions) == {grant.lease_token, neighbour.lease_token}
        asks = has_changed and writer in ("ask to end", "both")
        now = await standing(world, grant)
        assert now.asked == asks
        before = serial[now.asked]
        if end == "goes on":
            assert (now.state, now.asked) == ("leased", asks)
            assert await world.raw.fetchval(
                "select started_at is not null and last_sequence = 2"
                " and (not $2 or expires_at > now() + interval '900 s') from rara.lease where lease_token = $1",
                grant.lease_token,
                has_changed and writer != "ask to end",
            )
        else:
            assert now == before
        assert (await standing(world, neighbour)).state == "succeeded"
        assert await world.raw.fetchval(
            "select count(*) from rara.step_event where step_run_id = $1::uuid", grant.step_run_id
        ) == 1 + sum(1 for item in ENDS[end]() if hasattr(item, "sequence"))
        seen.add((has_changed, asks))
        await world.raw.execute("delete from rara.ready")
        await world.raw.execute("delete from rara.waiting")
    assert {changed for changed, _ in seen} == {False, True} or end == "goes on"


@pytest.mark.parametrize("definition", DEFINITIONS)
@pytest.mark.parametrize("end", ENDS)
async def test_who_waits_for_the_run_decides_by_what_the_one_before_has_made_of_the_lease(
    world: StoreWorld, elsewhere: StoreWorld, end: str, definition: str
) -> None:
    """An executor that says everything again through another scheduler: each event is stored once."""
    await world.define("one", DEFINITIONS[definition])
    serial = await expected(world, end, asked_first=False)
    have_waited = 0
    for at in range(STATEMENTS):
        await world.raw.execute("delete from rara.ready")
        await world.raw.execute("delete from rara.waiting")
        (grant,) = await begun(world)
        batch = [reports(grant, *ENDS[end](), executor_id=grant.executor_id)]
        acts = Interleaver(world.raw)
        told: list[BatchResult] = []
        await acts.begin("one", committed(elsewhere, batch, told))
        for _ in range(at):
            for act in acts.ready():
                await acts.step(act)
        await acts.begin("the other", committed(world, batch, told))
        for act in acts.ready():
            if act.name == "the other":
                await acts.step(act)
        have_waited += sum(not act.at_gate for act in acts.acts)
        await acts.finish()
        assert len(told) == 2
        assert await standing(world, grant) == serial
        numbers = [item.sequence for item in ENDS[end]() if isinstance(item, Report)]
        assert await world.raw.fetchval(
            "select count(*) from rara.step_event where step_run_id = $1::uuid", grant.step_run_id
        ) == 1 + len(numbers)
        for result in told:
            late = result.late.get(grant.lease_token)
            assert late is None or (list(late.stored), late.lost) == (numbers, ())
            assert not any(decision.refused for decision in result.decisions.values())
    assert have_waited


async def test_renewals_do_not_wait_for_a_commit_that_has_only_read(
    world: StoreWorld, elsewhere: StoreWorld, other: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    await world.define("one", DEFINITIONS["in front"])
    await elsewhere.definitions.load("one", 0)
    (grant,) = await begun(world)
    acts = Interleaver(world.raw)
    batch = [reports(grant, running(), succeeded(3), executor_id=grant.executor_id)]
    await acts.begin("commit", committed(elsewhere, batch, []))
    await acts.step(acts.ready()[0])
    assert await renew(other, grant)
    await acts.finish()
    assert (await standing(world, grant)).state == "succeeded"


async def test_whether_a_lease_has_expired_is_decided_under_its_lock(
    world: StoreWorld, other: "asyncpg.Connection[asyncpg.Record]"
) -> None:
    await world.define("one", {"a": {}})
    (grant,) = await begun(world)
    await world.raw.execute(
        "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
    )
    acts = Interleaver(world.raw)
    found = LeaseReports(
        grant.step_run_id,
        grant.workflow_run_id,
        grant.lease_token,
        None,
        (ending("LEASE_EXPIRED", Guard.EXPIRED),),
    )
    await acts.begin("commit", committed(world, [found], []))
    for _ in range(2):
        await acts.step(acts.ready()[0])
    assert not await renew(other, grant)  # it is held
    await acts.finish()
    assert (await standing(world, grant)).reason == "LEASE_EXPIRED"


async def test_a_failure_that_asks_its_neighbours_in_the_batch_to_end_is_stored_with_them(
    world: StoreWorld,
) -> None:
    await world.define("pair", {"a": {}, "b": {}})
    run_id = await world.start("pair")
    grants = await world.lease(2)
    await world.commits.commit([reports(g, accepted(), executor_id=g.executor_id) for g in grants])
    fails, goes_on = grants
    await world.commits.commit(
        [
            reports(fails, running(), failed(3, retryable=False), executor_id=fails.executor_id),
            reports(goes_on, running(), executor_id=goes_on.executor_id),
        ]
    )
    assert await standing(world, goes_on) == Standing("leased", "SIBLING_FAILED", True, None)
    assert (await standing(world, fails)).state == "terminal_failed"
    assert await world.run_state(run_id) == "cancelling"


async def test_many_renewals_and_wishes_beside_many_commits_lose_nothing(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("one", {"a": {"retry": {"max_attempts": 1000}}})
    grants = await begun(world, 200)
    done = asyncio.Event()
    wished: set[int] = set()

    async def change(writer: str) -> None:
        connection = await asyncpg.connect(database_url)
        try:
            while not done.is_set():
                who = [g.step_run_id for g in grants], [g.lease_token for g in grants]
                if writer == "renew":
                    await connection.fetch(
                        query("renew_leases"), *who, [g.executor_id for g in grants], LONG_S, 5.0
                    )
                else:
                    rows = await connection.fetch(
                        query("mark_leases"),
                        *([part[::7] for part in who]),
                        ["ATTEMPT_TIMEOUT"] * len(who[0][::7]),
                        [5.0] * len(who[0][::7]),
                    )
                    wished.update(row["lease_token"] for row in rows)
                    await asyncio.sleep(0.001)
        finally:
            await connection.close()

    async def commit(mine: list[Grant]) -> None:
        for items in ((running(),), (succeeded(3),)):
            for start in range(0, len(mine), 20):
                some = mine[start : start + 20]
                result = await world.commits.commit(
                    [reports(g, *items, executor_id=g.executor_id) for g in some]
                )
                assert len(result.decisions) == len(some)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for writer in ("renew", "renew", "ask"):
            group.create_task(change(writer))
        await asyncio.gather(commit(grants[:100]), commit(grants[100:]))
        done.set()
    rows = await world.raw.fetch("select lease_token, state, cancel_requested_at from rara.result")
    assert len(rows) == 200
    assert {row["state"] for row in rows} == {"succeeded"}
    assert {row["lease_token"] for row in rows if row["cancel_requested_at"] is not None} == wished
    events = await world.raw.fetch("select step_run_id, count(*) as n from rara.step_event group by 1")
    assert {row["n"] for row in events} == {3}
