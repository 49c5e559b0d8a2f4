"""What telemetry asks of the database is right, and stays cheap whatever the tables hold."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.loops.spans import SpanLoop
from rara_scheduler.store.queries import query
from rara_scheduler.store.telemetry import MOST_COUNTED, TelemetryStore
from rara_scheduler.telemetry.port import AttemptFacts, EndedAttempt
from support.running_scheduler import until
from support.store_world import StoreWorld, accepted, failed, running, store_world

MANY = 2 * MOST_COUNTED
LOCK_WAITS = "select count(*) > 0 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def test_queues_are_told_by_kind_and_counted_up_to_a_bound(world: StoreWorld) -> None:
    store = TelemetryStore(world.database)
    nothing = await store.queues()
    assert (nothing.ready, nothing.oldest_ready_s, nothing.waiting) == ({}, {}, {})
    await world.define("two", {"a": {}, "b": {"kind": "other.kind"}})
    await world.start("two")
    await world.raw.execute(
        "update rara.ready set available_at = now() - interval '5 s'"
        " where route_id = (select min(route_id) from rara.ready)"
    )
    few = await store.queues()
    assert few.ready == {"work.do": 1, "other.kind": 1}
    assert 5 <= max(few.oldest_ready_s.values()) < 60
    await world.raw.execute(
        "insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)"
        " select r.route_id, now() - make_interval(secs => n), gen_random_uuid(), gen_random_uuid(), now(), 1"
        " from rara.route r, generate_series(1, $1::int) n where r.kind = 'work.do'",
        MANY,
    )
    try:
        many = await store.queues()
        assert many.ready == {"work.do": MOST_COUNTED, "other.kind": 1}
        assert MANY <= many.oldest_ready_s["work.do"] < MANY + 60
    finally:  # they belong to no run, which the history checker would find
        await world.raw.execute(
            "delete from rara.ready r where not exists"
            " (select from rara.step_run s where s.step_run_id = r.step_run_id)"
        )


@pytest.mark.parametrize(("routes", "counted"), [(5, 210), (20, 125), (40, 100)])
async def test_all_together_are_counted_up_to_a_bound(world: StoreWorld, routes: int, counted: int) -> None:
    await world.raw.execute(
        "with made as (insert into rara.route (executor_kind, kind, kind_version, required_labels)"
        " select '', 'many.' || n, '', '{}' from generate_series(1, $1::int) n returning route_id)"
        " insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)"
        " select m.route_id, now(), gen_random_uuid(), gen_random_uuid(), now(), 1"
        " from made m, generate_series(1, 210)",
        routes,
    )
    found = await world.raw.fetch(query("queues_by_kind"), 250)
    await world.raw.execute("delete from rara.ready")
    assert [row["ready"] for row in found] == [counted] * routes


async def test_the_oldest_transaction_of_somebody_else_is_told(world: StoreWorld, database_url: str) -> None:
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("select 1")
            began = await other.fetchval("select now()")
            told_s = (await TelemetryStore(world.database).queues()).oldest_transaction_s
            age_s = await world.raw.fetchval(
                "select extract(epoch from clock_timestamp() - $1::timestamptz)::float8", began
            )
            assert 0 < told_s <= age_s
    finally:
        await other.close()


async def test_waiting_steps_are_counted(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.say(grant, accepted(), running(), failed(3))
    found = await TelemetryStore(world.database).queues()
    assert (found.ready, found.waiting) == ({}, {"work.do": 1})


@dataclass
class Made:
    """Makes no span, but remembers which it should make."""

    ended: deque[EndedAttempt]
    tokens: list[int] = field(default_factory=list)

    def attempt_span(self, ended: EndedAttempt, facts: AttemptFacts) -> None:
        self.tokens.append(ended.lease_token)


async def test_a_stop_in_the_middle_of_a_look_leaves_the_spans_to_the_last_one(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    grant = await world.lease_one()
    await world.run_to_success(grant)
    today = await world.raw.fetchval("select granted_at::date from rara.result")
    made = Made(deque([EndedAttempt(grant.step_run_id, grant.lease_token, 1, today, "succeeded", "", 0, 1)]))
    loop = SpanLoop(TelemetryStore(world.database), made)
    watcher = await asyncpg.connect(database_url)

    async def is_looking() -> bool:
        return bool(await watcher.fetchval(LOCK_WAITS))

    async with world.raw.transaction():
        await world.raw.execute("lock table rara.workflow_run in access exclusive mode")
        look = asyncio.create_task(loop.run())
        await until(is_looking, "the look")
        look.cancel()
        await asyncio.wait([look])
    await watcher.close()
    assert made.tokens == []
    await loop.finish(timeout_s=10)
    assert (made.tokens, list(made.ended)) == ([grant.lease_token], [])
