"""The plans of hot statements on full tables, and that every statement of db/queries fits the schema."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.store.database import ENGINE_PLANNER, Lane
from rara_scheduler.store.queries import load_queries, query
from rara_scheduler.store.reads import Reads
from support.store_world import LEASE_S, StoreWorld, new_id, store_world

READY = 100_000
SERVED = [1, 2, 3]


@pytest_asyncio.fixture
async def connection(database_url: str) -> "AsyncIterator[asyncpg.Connection[asyncpg.Record]]":
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close(timeout=10)


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def fill_ready(connection: "asyncpg.Connection[asyncpg.Record]", count: int = READY) -> None:
    """Ready steps of which one in a hundred belongs to a served route; the oldest belong to others."""
    await connection.execute(
        """insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)
           select case when n % 100 = 0 then 1 + n / 100 % 3 else 10 + n % 40 end,
                  now() - make_interval(secs => 100000 - n), gen_random_uuid(), gen_random_uuid(), now(), 1
             from generate_series(1, $1::int) n""",
        count,
    )
    await connection.execute("analyze rara.ready")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_leasing_probes_the_index_per_route_and_sorts_no_ready_step(
    connection: "asyncpg.Connection[asyncpg.Record]", mode: str
) -> None:
    await fill_ready(connection)
    await connection.execute(f"set plan_cache_mode = {mode}")
    await connection.execute("set jit = off")
    await connection.execute(f"prepare lease as {query('grant_leases')}")
    executor_id = new_id()
    slots = "array[" + ", ".join([f"'{executor_id}'"] * 50) + "]::uuid[]"
    routes = "array[1, 2, 3]"
    transaction = connection.transaction()
    await transaction.start()
    explained = await connection.fetchval(
        f"explain (analyze, timing off, format json) execute lease({routes}, array[50, 50, 50],"
        " array['1970-01-01', '1970-01-01', '1970-01-01']::timestamptz[],"
        " array_fill('00000000-0000-0000-0000-000000000000'::uuid, array[3]),"
        f" 50, {slots}, 30, array['1.0.0', '1.0.0', '2.1'])"
    )
    await transaction.rollback()
    everything = list(nodes(json.loads(explained)[0]["Plan"]))
    on_ready = [node for node in everything if node.get("Relation Name") == "ready"]
    assert on_ready
    scans = [node for node in on_ready if node["Node Type"] != "ModifyTable"]
    assert {node["Node Type"] for node in scans} <= {"Index Scan", "Index Only Scan", "Tid Scan"}
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in scans)
    assert read <= 150 + 50 + 10  # what the probes may return, and the rows that are taken
    for node in everything:
        if node["Node Type"] == "Sort":
            assert node["Actual Rows"] * node["Actual Loops"] <= 150


async def test_leasing_stays_flat_when_nothing_of_the_route_is_ready(
    connection: "asyncpg.Connection[asyncpg.Record]",
) -> None:
    await fill_ready(connection)
    await connection.execute("set plan_cache_mode = force_generic_plan")
    await connection.execute(f"prepare lease as {query('grant_leases')}")
    explained = await connection.fetchval(
        "explain (analyze, buffers, timing off, format json) execute lease(array[9], array[50],"
        " array['1970-01-01']::timestamptz[], array['00000000-0000-0000-0000-000000000000']::uuid[], 50,"
        f" array['{new_id()}']::uuid[], 30, array['1.0.0'])"
    )
    plan = json.loads(explained)[0]["Plan"]
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 50


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("read_leases", 3),
        ("lock_runs_and_read_leases", 3),
        ("lock_leases", 3),
        ("apply_batch", 45),
        ("go_on_as_known", 19),
        ("succeed_as_known", 19),
        ("grant_leases", 8),
        ("renew_leases", 5),
        ("current_tokens", 2),
    ],
)
async def test_hot_rows_are_found_by_their_keys_when_statistics_say_that_there_are_none(
    connection: "asyncpg.Connection[asyncpg.Record]", name: str, parameters: int
) -> None:
    """Else each row of a set is compared with each row of the table: ten times the work at a thousand leases."""
    for table in ("ready", "lease"):  # a vacuum would give back the pages of what is deleted here
        await connection.execute(f"alter table rara.{table} set (autovacuum_enabled = off)")
    await fill_ready(connection, 1000)
    await connection.execute(
        """insert into rara.lease (step_run_id, workflow_run_id, route_id, lease_token, attempt, failures, free_endings,
                                   executor_id, released_at, granted_at, granted_on, expires_at, revision)
           select gen_random_uuid(), gen_random_uuid(), 1, n, 1, 0, 0, gen_random_uuid(), now(), now(), now()::date,
                  now() + interval '1 minute', 1
             from generate_series(1, 5000) n"""
    )
    await connection.execute("delete from rara.lease")
    await connection.execute("delete from rara.ready")
    await connection.execute("analyze rara.lease, rara.ready")
    known = await connection.fetch(
        "select reltuples, relpages > 0 as has_pages from pg_class"
        " where oid in ('rara.lease'::regclass, 'rara.ready'::regclass)"
    )
    assert [tuple(row) for row in known] == [(0, True), (0, True)]  # what the planner goes by
    for setting, value in ENGINE_PLANNER.items():
        await connection.execute(f"set {setting} = {value}")
    await connection.execute(f"prepare hot as {query(name)}")
    nothing = ", ".join(["null"] * parameters)
    explained = json.loads(await connection.fetchval(f"explain (format json) execute hot({nothing})"))
    scans = [
        node
        for node in nodes(explained[0]["Plan"])
        if node.get("Relation Name") in ("lease", "ready") and node["Node Type"] != "ModifyTable"
    ]
    assert scans
    for scan in scans:
        assert "TID Cond" in scan or re.search("(step_run_id|route_id) = ", scan.get("Index Cond", ""))


async def test_renewals_are_heap_only_updates(world: StoreWorld) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(200)})
    await world.start("wide")
    grants = await world.lease(200)
    assert len(grants) == 200
    # A worker of autovacuum has a snapshot while it counts rows, and until it ends, no old row of its database gives
    # its place to a new one.
    for (table,) in await world.raw.fetch(
        "select oid::regclass::text from pg_class where relnamespace = 'rara'::regnamespace and relkind = 'r'"
    ):
        await world.raw.execute(f"alter table {table} set (autovacuum_enabled = off)")
    beats = [(g.step_run_id, g.lease_token, g.executor_id) for g in grants]

    async def updates() -> tuple[int, int]:
        await world.raw.execute("select pg_stat_clear_snapshot()")
        row = await world.raw.fetchrow(
            "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables"
            " where schemaname = 'rara' and relname = 'lease'"
        )
        assert row is not None
        return row["n_tup_upd"], row["n_tup_hot_upd"]

    # Counted in one session, so that its statistics can be flushed and read in order.
    statement = query("renew_leases")
    columns = [list(column) for column in zip(*beats, strict=True)]
    await world.raw.execute("select pg_stat_force_next_flush()")
    before = await updates()
    for _ in range(10):
        rows = await world.raw.fetch(statement, *columns, LEASE_S, 5.0)
        assert len(rows) == 200
    await world.raw.execute("select pg_stat_force_next_flush()")
    after = await updates()
    renewed, hot = after[0] - before[0], after[1] - before[1]
    assert renewed == 2000
    assert hot >= 0.95 * renewed


async def test_what_a_lease_uploads_is_counted_by_an_index(
    connection: "asyncpg.Connection[asyncpg.Record]",
) -> None:
    await connection.execute(
        "insert into rara.upload (upload_id, sha256, size_bytes, step_run_id, lease_token, expires_at)"
        " select gen_random_uuid(), encode(sha256(n::text::bytea), 'hex'), 1, gen_random_uuid(), n, now()"
        " from generate_series(1, 5000) n"
    )
    await connection.execute("analyze rara.upload")
    explained = await connection.fetchval(f"explain (format json) {query('lease_load')}", 7)
    used = {node.get("Index Name") for node in nodes(json.loads(explained)[0]["Plan"])}
    assert "upload_lease" in used


async def test_every_statement_fits_the_schema(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    refused = {}
    for name in load_queries():
        try:
            await connection.prepare(query(name))
        except asyncpg.PostgresError as error:
            refused[name] = str(error)
    assert refused == {}


@pytest.mark.parametrize(("lane", "mode"), [(Lane.ENGINE, "force_generic_plan"), (Lane.CALLS, "auto")])
async def test_each_lane_plans_as_it_should(world: StoreWorld, lane: Lane, mode: str) -> None:
    async with world.database.connection(lane) as connection:
        assert await connection.fetchval("show enable_seqscan") == "off"
        assert await connection.fetchval("show plan_cache_mode") == mode


async def test_runs_and_steps_are_read_by_one_plan_whatever_their_number(world: StoreWorld) -> None:
    """Planning takes ten times what reading does."""
    await world.define("pair", {"a": {}, "b": {}})
    run_id = await world.start("pair")
    reads = Reads(world.database, world.definitions, silent_after_s=10.0)
    async with world.database.connection() as connection:
        ids = await reads.step_ids_of_run(connection, run_id)
        for n in range(12):
            await connection.fetch(query("read_steps"), ids[: 1 + n % 2], 4096, None, None)
            await connection.fetch(query("read_runs"), [run_id] * (1 + n % 3), 4096)
        rows = await connection.fetch(
            "select custom_plans, generic_plans from pg_prepared_statements"
            " where statement ~ 'ordinality as i' and custom_plans > 0"
        )
    assert [tuple(row) for row in rows] == [(5, 7), (5, 7)]
