"""Retention: a backlog goes in small pieces, and nothing goes that somebody still needs."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rara_scheduler.app import RETENTION_HEALTH
from rara_scheduler.loops.retention import Pruner
from rara_scheduler.store.check import check
from rara_scheduler.store.database import Database, StoreUnavailable
from rara_scheduler.store.history import HistoryStore
from rara_scheduler.store.retention import ExpiredRun, RetentionStore
from rara_scheduler.store.retry_run import RunRetrier
from support.command_line import rara
from support.running_scheduler import running_scheduler, until
from support.store_world import StoreWorld, accepted, failed, new_id, progress, reports, running, store_world

KEEP_DAYS = 30
STEPS_A_RUN = 10
BATCH_STEPS = 1000

# What a past run leaves behind, ended `age_days` ago: ten steps, each with a result and events of its day.
PAST = """
with run as (
    insert into rara.workflow_run (workflow_run_id, definition, definition_version, state, steps_total,
                                   steps_succeeded, on_failure, created_at, started_at, ended_at)
    select gen_random_uuid(), 'past', 1, 'succeeded', $2::int, $2::int, 'fail_fast',
           now() - make_interval(days => $3::int, secs => n), now() - make_interval(days => $3::int, secs => n),
           now() - make_interval(days => $3::int, secs => n)
      from generate_series(1, $1::int) n
    returning workflow_run_id, ended_at
), step as (
    insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)
    select gen_random_uuid(), run.workflow_run_id, 's' || n, 1, run.workflow_run_id || '/s' || n
      from run, generate_series(1, $2::int) n
    returning step_run_id, workflow_run_id, idempotency_key
), result as (
    insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, lease_token,
                             executor_id, granted_at, granted_on, started_at, output, ended_at)
    select step_run_id, workflow_run_id, 'succeeded', '', 2, 1, 0, nextval('rara.lease_token_seq'),
           gen_random_uuid(), ended_at, (ended_at at time zone 'UTC')::date, ended_at, '{}', ended_at
      from step join run using (workflow_run_id)
), effect as (
    insert into rara.effect (idempotency_key, name, result, step_run_id, attempt, lease_token)
    select idempotency_key, 'charge', '1', step_run_id, 1, 1 from step
), key as (
    insert into rara.start_key (idempotency_key, request_sha256, workflow_run_id, created_at)
    select workflow_run_id::text, '', workflow_run_id, ended_at from run
)
insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)
select (ended_at at time zone 'UTC')::date, step_run_id, 1, n, 'progress', 'e'
  from step join run using (workflow_run_id), generate_series(1, 2) n
"""
TABLES = (
    "workflow_run", "step_run", "result", "step_event", "step_attempt", "effect", "checkpoint", "start_key",
    "step_dependency", "reused_step", "artifact", "lineage", "ready", "waiting", "lease",
)  # fmt: skip


@dataclass
class Timed(RetentionStore):
    """The store, with a note of how long each removal took."""

    database: Database
    took_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.database)

    async def remove(self, page: list[ExpiredRun], before: Any) -> tuple[int, int]:
        began_at = time.monotonic()
        removed = await super().remove(page, before)
        self.took_s.append(time.monotonic() - began_at)
        return removed


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        await opened.define("past", {f"s{n}": {} for n in range(1, STEPS_A_RUN + 1)})
        yield opened


def pruner_of(world: StoreWorld, store: RetentionStore, *, keep_days: int | None = KEEP_DAYS) -> Pruner:
    return Pruner(HistoryStore(world.database), store, days_ahead=1, keep_days=keep_days)


async def cleanup(world: StoreWorld, store: RetentionStore | None = None) -> tuple[int, int]:
    pruned = await pruner_of(world, store or RetentionStore(world.database)).prune()
    return pruned.runs, pruned.steps


async def counts(world: StoreWorld) -> dict[str, int]:
    return {name: await world.raw.fetchval(f"select count(*) from rara.{name}") for name in TABLES}


async def make_day(world: StoreWorld, days_ago: int) -> None:
    """A partition of history for a day of the past, as it was made when that day came."""
    day = await world.raw.fetchval("select (now() at time zone 'UTC')::date - $1::int", days_ago)
    for parent in ("step_event", "step_attempt"):
        await world.raw.execute(
            f"create table if not exists rara.{parent}_{day:%Y%m%d} partition of rara.{parent}"
            f" for values from ('{day}') to (date '{day}' + 1)"
        )


async def partitions(world: StoreWorld) -> set[str]:
    rows = await world.raw.fetch(
        "select relname as name from pg_inherits join pg_class c on c.oid = inhrelid"
        " where inhparent in ('rara.step_event'::regclass, 'rara.step_attempt'::regclass)"
    )
    return {row["name"] for row in rows}


async def age(world: StoreWorld, run_id: str, days: int, *, key_days: int | None = None) -> None:
    """Let a closed run have ended so many days ago."""
    async with world.raw.transaction():
        await world.raw.execute("set local session_replication_role = replica")  # past the guards
        await world.raw.execute(
            "update rara.workflow_run set created_at = created_at - make_interval(days => $2),"
            " ended_at = ended_at - make_interval(days => $2) where workflow_run_id = $1::uuid",
            run_id,
            days,
        )
        await world.raw.execute(
            "update rara.start_key set created_at = now() - make_interval(days => $2) where workflow_run_id = $1::uuid",
            run_id,
            days if key_days is None else key_days,
        )


async def fail_run(world: StoreWorld) -> str:
    """A run whose first step has succeeded, with an effect's key and a checkpoint, and whose second has failed."""
    run_id = await world.start("pair", idempotency_key=new_id())
    (first,) = await world.lease(1)
    await world.run_to_success(first)
    (second,) = await world.lease(1)
    await world.report(
        second, accepted(), running(), progress(3, checkpoint=b'"half"'), failed(4, retryable=False)
    )
    assert await world.run_state(run_id) == "failed"
    return run_id


# ---------------------------------------------------------------- a backlog


async def remove_backlog(world: StoreWorld, steps: int, live: int, *, always_fast_s: float) -> None:
    past_runs = steps // STEPS_A_RUN
    for days in (KEEP_DAYS + 12, KEEP_DAYS + 10):
        await make_day(world, days)
        await world.raw.execute(PAST, past_runs // 2, STEPS_A_RUN, days)
    past = await counts(world)
    assert past["step_run"] == steps
    for _ in range(live // STEPS_A_RUN):
        await world.start("past", idempotency_key=new_id())
    held = await world.lease(live // 4)
    await world.commits.commit(
        [reports(g, accepted(), running(), progress(3), executor_id=g.executor_id) for g in held]
    )
    before = await counts(world)
    await world.raw.execute("analyze")

    quiet = await lease_times(world, asyncio.create_task(asyncio.sleep(0.7)))
    store = Timed(world.database)
    cycle = asyncio.create_task(cleanup(world, store))
    busy = await lease_times(world, cycle)
    assert await cycle == (past_runs, steps)

    after = await counts(world)
    # Leasing went on meanwhile, so that what stood ready may be leased now.
    for name in ("workflow_run", "step_run", "effect", "start_key", "result"):
        assert after[name] == before[name] - past[name], name
    assert after["step_event"] == before["step_event"] - past["step_event"]
    assert after["ready"] + after["lease"] == before["ready"] + before["lease"]
    assert math.ceil(steps / BATCH_STEPS) <= len(store.took_s) <= math.ceil(steps / BATCH_STEPS) + 2
    assert max(store.took_s) < 1.0
    left = await partitions(world)
    assert not [name for name in left for day in await old_days(world) if name.endswith(day)]
    assert p99(busy) <= max(2 * p99(quiet), always_fast_s)


async def old_days(world: StoreWorld) -> list[str]:
    rows = await world.raw.fetch(
        "select to_char((now() at time zone 'UTC')::date - d, 'YYYYMMDD') as day from unnest(array[40, 42]) d"
    )
    return [row["day"] for row in rows]


async def lease_times(world: StoreWorld, until_done: "asyncio.Task[Any]") -> list[float]:
    """How long a lease of one step takes, again and again until the task is done."""
    times = []
    while not until_done.done():
        began_at = time.monotonic()
        await world.lease(1)
        times.append(time.monotonic() - began_at)
        await asyncio.sleep(0.005)
    return times


def p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


@pytest.mark.case("DBL-4")
async def test_a_backlog_goes_in_small_pieces_while_work_goes_on(world: StoreWorld) -> None:
    await remove_backlog(world, 10_000, 1_000, always_fast_s=0.25)  # others use the machine


@pytest.mark.case("DBL-4")
@pytest.mark.soak
async def test_a_large_backlog_goes_in_small_pieces_while_work_goes_on(world: StoreWorld) -> None:
    await remove_backlog(world, 200_000, 1_000, always_fast_s=0.05)


# ---------------------------------------------------------------- what stays


@pytest.mark.case("DBL-4")
async def test_what_a_retry_a_key_or_time_still_needs_stays(world: StoreWorld) -> None:
    await world.define("pair", {"a": {}, "b": {"depends_on": ["a"]}})
    retried, fresh_key, young, old = [await fail_run(world) for _ in range(4)]
    live, _ = await RunRetrier(world.database, world.definitions, on_ready=lambda: None).retry(retried)
    await age(world, retried, KEEP_DAYS + 1)
    await age(world, fresh_key, KEEP_DAYS + 1, key_days=6)
    await age(world, young, KEEP_DAYS - 1)
    await age(world, old, KEEP_DAYS + 1)
    before = await counts(world)

    faults = (await check(world.raw)).counts
    assert set(faults.values()) == {0}

    assert await cleanup(world) == (1, 2)
    assert (await check(world.raw)).counts == faults  # events of what is gone wait for the end of their day
    rows = await world.raw.fetch("select workflow_run_id::text as id from rara.workflow_run")
    assert {row["id"] for row in rows} == {retried, fresh_key, young, live}
    after = await counts(world)
    assert {name: before[name] - after[name] for name in TABLES if before[name] != after[name]} == {
        "workflow_run": 1, "step_run": 2, "result": 2, "checkpoint": 1, "start_key": 1, "step_dependency": 1,
    }  # fmt: skip

    # The retry goes on from what was kept for it, and when all of it is past, all of it goes at once.
    (grant,) = await world.lease(1)
    assert (grant.workflow_run_id, grant.carries_over) == (live, True)
    checkpoints = await world.raw.fetch("select idempotency_key from rara.checkpoint")
    assert grant.idempotency_key in {row["idempotency_key"] for row in checkpoints}
    await world.run_to_success(grant)
    assert await world.run_state(live) == "succeeded"
    assert await cleanup(world) == (0, 0)
    await age(world, live, KEEP_DAYS + 1)
    assert await cleanup(world) == (2, 3)
    assert await cleanup(world) == (0, 0)


@pytest.mark.case("DBL-4")
async def test_without_a_setting_nothing_goes(world: StoreWorld) -> None:
    await world.raw.execute(PAST, 3, STEPS_A_RUN, 4000)
    pruned = await pruner_of(world, RetentionStore(world.database), keep_days=None).prune()
    assert (pruned.runs, pruned.steps, pruned.dropped) == (0, 0, ())
    assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 3


@pytest.mark.case("DBL-4")
async def test_a_day_of_history_stays_while_a_run_that_is_left_was_at_work_in_it(world: StoreWorld) -> None:
    await make_day(world, 40)
    await make_day(world, 41)
    await world.raw.execute(PAST, 1, 1, 40)
    await world.raw.execute(PAST, 1, 1, 41)
    kept = await world.raw.fetchval("select workflow_run_id from rara.workflow_run order by ended_at limit 1")
    await world.raw.execute("update rara.start_key set created_at = now() where workflow_run_id = $1", kept)
    before = await partitions(world)
    assert await cleanup(world) == (1, 1)
    dropped = before - await partitions(world)
    day = await world.raw.fetchval("select to_char((now() at time zone 'UTC')::date - 40, 'YYYYMMDD')")
    other = await world.raw.fetchval("select to_char((now() at time zone 'UTC')::date - 41, 'YYYYMMDD')")
    # The attempts of the other day had no row: what nobody needs goes, table by table.
    assert dropped == {f"step_event_{day}", f"step_attempt_{day}", f"step_attempt_{other}"}
    assert await world.raw.fetchval("select count(*) from rara.step_event") == 2


@pytest.mark.case("DBL-4")
async def test_a_reader_of_history_is_never_in_the_way_of_the_rest(
    world: StoreWorld, database_url: str
) -> None:
    await make_day(world, 40)
    await world.raw.execute(PAST, 2, STEPS_A_RUN, 40)
    reader = await asyncpg.connect(database_url)
    try:
        transaction = reader.transaction(isolation="repeatable_read")
        await transaction.start()
        await reader.fetchval("select count(*) from rara.step_event")
        assert await cleanup(world) == (2, 20)
        assert await reader.fetchval("select count(*) from rara.step_event") == 40
        await transaction.rollback()
    finally:
        await reader.close()
    before = await partitions(world)
    assert await cleanup(world) == (0, 0)
    assert len(before - await partitions(world)) >= 1
    assert await world.raw.fetchval("select count(*) from rara.step_event") == 0


@pytest.mark.case("DBL-4")
async def test_history_without_a_day_of_its_own_goes_too(world: StoreWorld) -> None:
    await world.raw.execute(PAST, 2, STEPS_A_RUN, 50)
    await world.raw.execute(PAST, 1, STEPS_A_RUN, 5)
    assert await world.raw.fetchval("select count(*) from rara.step_event_default") == 60
    assert await cleanup(world) == (2, 20)
    assert await world.raw.fetchval("select count(*) from rara.step_event_default") == 20


@pytest.mark.case("DBL-4")
async def test_only_the_removal_may_delete_what_is_closed(world: StoreWorld) -> None:
    await world.raw.execute(PAST, 1, 1, 40)
    for table in ("workflow_run", "step_run", "result", "definition"):
        with pytest.raises(asyncpg.RestrictViolationError):
            await world.raw.execute(f"delete from rara.{table}")
    run_id = await world.raw.fetchval("select workflow_run_id from rara.workflow_run")
    question = "select runs from rara.remove_runs(array[$1::uuid], now() - make_interval(days => $2))"
    assert await world.raw.fetchval(question, run_id, 41) == 0
    assert await world.raw.fetchval(question, run_id, 39) == 1
    await world.raw.execute(PAST, 1, 1, 40)
    with pytest.raises(asyncpg.RestrictViolationError):  # the permission ended with the function
        await world.raw.execute("delete from rara.result")


@pytest.mark.case("DBL-4")
async def test_a_retry_that_races_with_the_removal_has_its_run_or_learns_that_it_is_gone(
    database_url: str, world: StoreWorld
) -> None:
    await world.define("pair", {"a": {}, "b": {"depends_on": ["a"]}})
    retrier = RunRetrier(world.database, world.definitions, on_ready=lambda: None)
    outcomes = set()
    for _ in range(15):
        run_id = await fail_run(world)
        await age(world, run_id, KEEP_DAYS + 1)
        removed, retried = await asyncio.gather(cleanup(world), retrier.retry(run_id), return_exceptions=True)
        is_there = await world.raw.fetchval(
            "select exists (select from rara.workflow_run where workflow_run_id = $1::uuid)", run_id
        )
        outcomes.add(is_there)
        if is_there:
            assert (removed, isinstance(retried, tuple)) == ((0, 0), True)
        else:
            assert removed == (1, 2)
            assert getattr(retried, "code", None) == "RUN_NOT_FOUND", retried
        for grant in await world.lease(10):
            await world.run_to_success(grant)
    assert outcomes


# ---------------------------------------------------------------- a cleanup that fails shows it


@pytest.mark.case("DBL-4")
async def test_a_cleanup_that_fails_shows_in_health_and_goes_on_when_it_can(
    database_url: str, tmp_path: Path
) -> None:
    raw = await asyncpg.connect(database_url)
    await raw.execute("set timezone to 'UTC'")
    await raw.execute(PAST, 4, STEPS_A_RUN, 40)
    await raw.execute(
        "create function rara.wait() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(5); return old; end $$;"
        "create trigger slow before delete on rara.step_run for each statement execute function rara.wait()"
    )
    settings: dict[str, Any] = {
        "retention_days": KEEP_DAYS,
        "retention_every_s": 0.2,
        "statement_timeout_s": 0.3,
    }
    async with running_scheduler(database_url, tmp_path, **settings) as world:
        async with grpc.aio.insecure_channel(world.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)

            async def health(service: str) -> int:
                try:
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
                except grpc.aio.AioRpcError:
                    return 0  # it has not looked yet
                return int(answer.status)

            async def failing() -> bool:
                return await health(RETENTION_HEALTH) == int(health_pb2.HealthCheckResponse.NOT_SERVING)

            await until(failing, "health of a failing cleanup")
            failed = await until(
                lambda: raw.fetchrow("select * from rara.retention where failed_cycles > 0"), "noted failure"
            )
            assert failed["error"]
            assert failed["last_failure_at"] is not None
            assert await health("") == health_pb2.HealthCheckResponse.SERVING
            await raw.execute("drop trigger slow on rara.step_run")

            async def well() -> bool:
                return await health(RETENTION_HEALTH) == int(health_pb2.HealthCheckResponse.SERVING)

            await until(well, "health after a cleanup")
        row = await raw.fetchrow("select * from rara.retention")
        assert row is not None
        assert (row["failed_cycles"], row["error"]) == (0, None)
        assert row["last_success_at"] > failed["last_failure_at"]
        assert await raw.fetchval("select count(*) from rara.workflow_run") == 0
    await raw.close()


@pytest.mark.case("DBL-4")
async def test_a_piece_that_is_too_much_for_one_statement_is_tried_smaller(
    world: StoreWorld, database_url: str
) -> None:
    await world.raw.execute(PAST, 30, STEPS_A_RUN, 40)
    await world.raw.execute(
        "create function rara.wait() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.002); return old; end $$;"
        "create trigger slow before delete on rara.step_run for each row execute function rara.wait()"
    )
    database = Database(database_url, statement_timeout_s=0.25)  # 300 steps take 0.6 s
    await database.open()
    try:
        assert await cleanup(world, RetentionStore(database)) == (30, 300)
    finally:
        await database.close()


@pytest.mark.case("DBL-4")
async def test_a_run_that_is_too_much_for_any_statement_hides_none_behind_it(
    world: StoreWorld, database_url: str
) -> None:
    await world.raw.execute(PAST, 3, STEPS_A_RUN, 40)
    await world.raw.execute(PAST, 1, 400, 39)  # the newest, so that it comes first
    await world.raw.execute(
        "create function rara.wait() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.002); return old; end $$;"
        "create trigger slow before delete on rara.step_run for each row execute function rara.wait()"
    )
    database = Database(database_url, statement_timeout_s=0.25)  # 400 steps take 0.8 s
    await database.open()
    try:
        pruned = await pruner_of(world, RetentionStore(database)).prune()
        assert pruned.runs == 3
        assert pruned.left is not None
        assert isinstance(pruned.left[1], StoreUnavailable)
    finally:
        await database.close()
    assert await world.raw.fetchval("select array_agg(steps_total) from rara.workflow_run") == [400]


async def test_pruning_by_hand_says_what_would_go_asks_and_removes_it(
    world: StoreWorld, database_url: str
) -> None:
    for days_ago in (40, 41):  # a run that ended seconds earlier may have done so on the day before
        await make_day(world, days_ago)
    await world.raw.execute(PAST, 4, STEPS_A_RUN, 40)
    await world.raw.execute(PAST, 1, STEPS_A_RUN, 5)
    env = {"RARA_DATABASE_URL": database_url, "RARA_RETENTION_DAYS": str(KEEP_DAYS)}

    preview = (await rara("db", "prune", "--dry-run", "-o", "json", env=env)).json
    assert (preview["runs"], preview["steps"], preview["partitions"]) == (4, 40, 4)
    assert preview["partition_bytes"] > 0
    unasked = await rara("db", "prune", env=env)
    assert (unasked.code, "remove up to 4 runs with 40 steps and 4 partitions" in unasked.err) == (2, True)
    assert (await counts(world))["workflow_run"] == 5

    done = await rara("db", "prune", "--yes", "-o", "json", "--days-ahead", "2", env=env)
    assert done.code == 0
    assert (done.json["runs"], done.json["steps"], done.json["left"]) == (4, 40, None)
    assert len(done.json["partitions_dropped"]) == 4
    assert not set(done.json["partitions_dropped"]) & await partitions(world)
    assert (await counts(world))["workflow_run"] == 1
    again = await rara("db", "prune", "--yes", env=env)
    assert again.lines[0] == "removed 0 runs with 0 steps"
    assert (await rara("db", "prune", "--keep-days", "0", env=env)).code == 2
