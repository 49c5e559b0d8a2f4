"""The history checker finds each kind of broken promise, says where, and is silent on history that is whole."""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.errors import FAILS_THE_RUN, FREE
from rara_scheduler.store.check import RULES, Needs, Report, check
from rara_scheduler.store.queries import query
from support.mixed_history import MixedHistory, mixed_history
from support.postgres import PostgresServer
from support.store_world import store_world

STRANGER = "00000000-0000-4000-8000-000000000001"


@dataclass(frozen=True, slots=True)
class Plant:
    """A violation of `rule` at the run or step `at`; also: rules that the same damage breaks by itself."""

    rule: str
    at: str
    statements: tuple[str, ...]
    also: tuple[str, ...] = ()


def plant(rule: str, at: str, *statements: str, also: tuple[str, ...] = ()) -> Plant:
    return Plant(rule, at, statements, also)


# In the statements {a.b} is the id of the run or step, {spare} a token that was granted to nobody.
UNCHECKED_RUNS = """
do $$ declare name text; begin
    for name in select conname from pg_constraint where conrelid = 'rara.workflow_run'::regclass and contype = 'c'
    loop execute format('alter table rara.workflow_run drop constraint %I', name); end loop;
end $$"""
LEAVE = "insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)"
AS_READY = (
    LEAVE
    + " select route_id, now(), step_run_id, workflow_run_id, now(), 1 from rara.{} where step_run_id = "
)
EVENT = "insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)"
NEXT_EVENT = (
    EVENT
    + " select granted_on, step_run_id, attempt, last_sequence + 1, '{}', '' from rara.{} where step_run_id = "
)
ATTEMPT = (
    "insert into rara.step_attempt (granted_on, step_run_id, attempt, lease_token, executor_id, reason, spent,"
    " last_sequence, gaps, granted_at, ended_at)"
)
EDGE = "insert into rara.step_dependency values"

PLANTS = (
    # ------------------------------------------------------------ one owner finishes
    plant("step_in_two_places", "open.leased", AS_READY.format("lease") + "'{open.leased}'"),
    plant("step_nowhere", "fresh.a", "delete from rara.ready where step_run_id = '{fresh.a}'"),
    plant("step_blocked_for_ever", "open.blocked", EDGE + " ('{open.blocked}', '{open.failed}')"),
    plant(
        "step_blocked_for_ever",
        "cancelling.b",
        "delete from rara.lease where step_run_id = '{cancelling.b}'",
        EDGE + " ('{cancelling.b}', '{cancelling.a}')",
    ),
    plant(
        "row_of_unknown_step",
        "open.leased",
        "update rara.lease set route_id = route_id + 1000 where step_run_id = '{open.leased}'",
    ),
    plant("row_of_unknown_step", STRANGER, LEAVE + f" values (1, now(), '{STRANGER}', '{{open}}', now(), 1)"),
    plant(
        "token_granted_twice",
        "open.leased",
        "update rara.lease l set lease_token = x.lease_token from rara.result x"
        " where l.step_run_id = '{open.leased}' and x.step_run_id = '{done.c}'",
    ),
    plant(
        "token_went_back",
        "retried.a",
        "update rara.step_attempt set lease_token = {spare} where step_run_id = '{retried.a}'",
    ),
    plant(
        "token_beyond_sequence",
        "open.leased",
        "update rara.lease set lease_token = 1000000000000 where step_run_id = '{open.leased}'",
    ),
    plant(
        "two_commits",
        "done.b",
        ATTEMPT
        + " select granted_on - 1, step_run_id, attempt, {spare}, executor_id, 'DISPATCH_LOST', false, 0, 0,"
        " granted_at, ended_at from rara.result where step_run_id = '{done.b}'",
    ),
    plant(
        "two_commits",
        "done.b",
        "alter table rara.result drop constraint result_pkey",
        "insert into rara.result select * from rara.result where step_run_id = '{done.b}'",
        also=("token_granted_twice", "run_counters"),
    ),
    plant(
        "two_commits",
        "open.running",
        ATTEMPT
        + " select granted_on - 1, step_run_id, attempt, {spare}, executor_id, 'DISPATCH_LOST', false, 0, 0,"
        " granted_at, now() from rara.lease where step_run_id = '{open.running}'",
    ),
    plant(
        "lease_without_end",
        "open.leased",
        "alter table rara.lease alter expires_at drop not null",
        "update rara.lease set expires_at = null where step_run_id = '{open.leased}'",
    ),
    plant(
        "lease_without_end",
        "open.leased",
        "update rara.lease set expires_at = 'infinity' where step_run_id = '{open.leased}'",
    ),
    # ------------------------------------------------------------ terminal is final
    plant(
        "left_terminal_state",
        "done.c",
        LEAVE + " select route_id, now(), step_run_id, workflow_run_id, now(), 1 from rara.step_run"
        " where step_run_id = '{done.c}'",
    ),
    plant(
        "run_changed_after_close",
        "done",
        "update rara.workflow_run set revision = revision + 1 where workflow_run_id = '{done}'",
    ),
    plant("guard_missing", "result_is_final", "alter table rara.result disable trigger result_is_final"),
    plant("guard_missing", "closed_run_is_final", "drop trigger closed_run_is_final on rara.workflow_run"),
    # ------------------------------------------------------------ attempts and the budget
    plant(
        "attempt_missing",
        "retried.b",
        "delete from rara.step_attempt where step_run_id = '{retried.b}' and attempt = 2",
    ),
    plant(
        "failures_miscounted",
        "open.waiting",
        "update rara.waiting set failures = 0 where step_run_id = '{open.waiting}'",
    ),
    plant(
        "budget_misjudged",
        "retried.b",
        "update rara.step_attempt set reason = 'HANDLER_FAILED' where step_run_id = '{retried.b}' and attempt = 2",
    ),
    plant(
        "budget_misjudged",
        "retried.b",
        "update rara.step_attempt set reason = 'DISPATCH_LOST' where step_run_id = '{retried.b}' and attempt = 1",
    ),
    plant(
        "budget_overrun",
        "open.waiting",
        ATTEMPT
        + " select granted_on, step_run_id, 2, {spare}, executor_id, reason, true, 0, 0, granted_at, ended_at"
        " from rara.step_attempt where step_run_id = '{open.waiting}'",
        "update rara.waiting set attempt = 2, failures = 2 where step_run_id = '{open.waiting}'",
    ),
    # ------------------------------------------------------------ events
    plant(
        "event_of_unknown_attempt",
        "done.a",
        EVENT + " select granted_on, step_run_id, 7, 1, 'progress', '' from rara.result"
        " where step_run_id = '{done.a}'",
    ),
    plant(
        "event_of_unknown_attempt",  # the same event again on another day
        "done.a",
        EVENT + " select granted_on + 1, step_run_id, attempt, sequence, type, body from rara.step_event"
        " where step_run_id = '{done.a}' and type = 'succeeded'",
    ),
    plant(
        "event_count",
        "done.b",
        "delete from rara.step_event where step_run_id = '{done.b}' and type = 'progress'",
    ),
    plant("event_count", "open.running", NEXT_EVENT.format("progress", "lease") + "'{open.running}'"),
    plant(
        "event_after_terminal",
        "done.b",
        NEXT_EVENT.format("progress", "result") + "'{done.b}'",
        "update rara.result set last_sequence = last_sequence + 1 where step_run_id = '{done.b}'",
    ),
    plant(
        "two_terminal_events",
        "done.b",
        NEXT_EVENT.format("failed", "result") + "'{done.b}'",
        "update rara.result set last_sequence = last_sequence + 1 where step_run_id = '{done.b}'",
    ),
    plant(
        "outcome_disagrees",  # a success that no executor reported
        "done.b",
        "update rara.step_event set type = 'progress' where step_run_id = '{done.b}' and type = 'succeeded'",
    ),
    plant(
        "outcome_disagrees",
        "done.b",
        "update rara.step_event set type = 'failed' where step_run_id = '{done.b}' and type = 'succeeded'",
    ),
    plant(
        "outcome_disagrees",  # a success that was retried
        "retried.a",
        "update rara.step_event set type = 'succeeded' where step_run_id = '{retried.a}' and type = 'failed'",
    ),
    plant(
        "outcome_disagrees",  # an end that was stored and had no effect
        "open.running",
        NEXT_EVENT.format("failed", "lease") + "'{open.running}'",
        "update rara.lease set last_sequence = last_sequence + 1 where step_run_id = '{open.running}'",
    ),
    plant(
        "marks_without_events",
        "open.leased",
        "update rara.lease set accepted_at = now() where step_run_id = '{open.leased}'",
    ),
    plant(
        "marks_without_events",
        "open.failed",
        "update rara.result set started_at = null where step_run_id = '{open.failed}'",
    ),
    # ------------------------------------------------------------ runs
    plant(
        "run_counters",
        "open",
        "update rara.workflow_run set steps_failed = steps_failed + 1 where workflow_run_id = '{open}'",
    ),
    plant(
        "run_total",
        "open",
        "update rara.workflow_run set steps_total = steps_total + 1 where workflow_run_id = '{open}'",
    ),
    plant(
        "run_closed_early",
        STRANGER,
        UNCHECKED_RUNS,
        "insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)"
        f" values ('{STRANGER}', '{{done}}', 'late', 1, 'late')",
        "update rara.workflow_run set steps_total = 4 where workflow_run_id = '{done}'",
    ),
    plant(
        "run_closed_early",
        "cancelling.b",
        UNCHECKED_RUNS,
        "update rara.workflow_run set state = 'cancelled', ended_at = now() where workflow_run_id = '{cancelling}'",
        "delete from rara.lease where step_run_id = '{cancelling.a}'",
        "insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, ended_at)"
        " select step_run_id, workflow_run_id, 'cancelled', 'CANCELLED', revision, 0, 0, now() from rara.workflow_run"
        " join rara.step_run using (workflow_run_id) where step_run_id = '{cancelling.a}'",
        "update rara.workflow_run set steps_cancelled = 1 where workflow_run_id = '{cancelling}'",
        "delete from rara.step_event where step_run_id = '{cancelling.a}'",
    ),
    plant(
        "run_closed_late",
        "done",
        UNCHECKED_RUNS,
        "update rara.workflow_run set state = 'running', ended_at = null where workflow_run_id = '{done}'",
    ),
    plant(
        "run_wrong_end",
        "done",
        UNCHECKED_RUNS,
        "update rara.workflow_run set state = 'failed' where workflow_run_id = '{done}'",
        also=("failed_step_wrong",),
    ),
    plant(
        "run_wrong_end",
        "failed",
        UNCHECKED_RUNS,
        "update rara.workflow_run set state = 'cancelled' where workflow_run_id = '{failed}'",
    ),
    plant(
        "failed_step_wrong",
        "failed.b",
        "update rara.workflow_run set failed_step_run_id = '{failed.b}' where workflow_run_id = '{failed}'",
    ),
    plant(
        "failed_step_wrong",
        "failed",
        "update rara.workflow_run set failed_step_run_id = null where workflow_run_id = '{failed}'",
    ),
    plant(
        "run_state_behind",
        "open",
        "update rara.workflow_run set state = 'pending', started_at = null where workflow_run_id = '{open}'",
    ),
    plant(
        "revision_ahead",
        "fresh.a",
        "update rara.ready set revision = revision + 50 where step_run_id = '{fresh.a}'",
    ),
    # ------------------------------------------------------------ cancel
    plant(
        "wait_after_cancel",
        "cancelling.b",
        AS_READY.format("lease") + "'{cancelling.b}'",
        "delete from rara.lease where step_run_id = '{cancelling.b}'",
    ),
    plant(
        "lease_not_asked_to_stop",
        "cancelling.b",
        "update rara.lease set cancel_requested_at = null, cancel_reason = null, cancel_grace = null"
        " where step_run_id = '{cancelling.b}'",
    ),
    plant(
        "run_not_cancelling",
        "cancelling",
        "update rara.workflow_run set state = 'running' where workflow_run_id = '{cancelling}'",
    ),
    plant(
        "granted_after_cancel",
        "cancelling.b",
        "update rara.lease set granted_at = now() + interval '1 min', expires_at = now() + interval '2 min'"
        " where step_run_id = '{cancelling.b}'",
    ),
    plant(
        "cancelled_without_cause",
        "upstream.b",
        "update rara.result set reason = 'CANCELLED' where step_run_id = '{upstream.b}'",
    ),
    plant(
        "cancelled_without_cause",
        "cancelled.b",
        "update rara.result set reason = 'UPSTREAM_FAILED' where step_run_id = '{cancelled.b}'",
    ),
    # ------------------------------------------------------------ dependencies and retries
    plant("released_early", "open.ready", EDGE + " ('{open.ready}', '{open.running}')"),
    plant("released_early", "done.a", EDGE + " ('{done.a}', '{done.c}')"),
    plant("dependency_unknown", "done.a", EDGE + " ('{done.a}', '{retried.a}')"),
    plant(
        "reused_without_success",
        "failed.a",
        "update rara.reused_step set step_run_id = '{failed.a}' where step_run_id = '{first.b}'",
    ),
    plant(
        "retry_of_open_run",
        "fresh",
        "update rara.workflow_run set retry_of_workflow_run_id = '{open}' where workflow_run_id = '{fresh}'",
    ),
    # ------------------------------------------------------------ artifacts and lineage
    plant(
        "manifest_without_blob",
        "done.a",
        "delete from rara.artifact where step_run_id = '{retried.a}' and name = 'big'",
        "delete from rara.lineage where step_run_id = '{retried.a}' and name = 'big'",
        "delete from rara.blob b using rara.artifact a where a.sha256 = b.sha256",
    ),
    plant(
        "manifest_without_blob",
        "done.a",
        "update rara.artifact set inline = '', sha256 = encode(sha256(''), 'hex'), size_bytes = 0"
        " where step_run_id = '{retried.a}' and name = 'big'",
        "update rara.lineage set sha256 = encode(sha256(''), 'hex'), size_bytes = 0"
        " where step_run_id = '{retried.a}' and name = 'big'",
        "update rara.blob b set marked_at = now() from rara.artifact a where a.sha256 = b.sha256",
    ),
    plant(
        "manifest_without_blob",
        "fresh",
        "insert into rara.run_artifact (workflow_run_id, name, sha256, size_bytes, media_type, type)"
        " select '{fresh}', 'given', sha256, size_bytes + 1, '', '' from rara.artifact where inline is null limit 1",
    ),
    plant(
        "inline_mismatch",
        "done.a",
        "update rara.artifact set inline = 'other bytes' where step_run_id = '{done.a}' and name = 'small'",
    ),
    plant(
        "manifest_of_unknown_token",
        "done.a",
        "update rara.artifact set lease_token = {spare} where step_run_id = '{done.a}' and name = 'small'",
    ),
    plant(
        "lineage_without_artifact",
        "done.b",
        "insert into rara.lineage (sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared, name)"
        " select sha256, size_bytes, '{done.b}', '{done}', 1, true, true, 'ghost'"
        "   from rara.artifact where inline is null limit 1",
    ),
    plant(
        "lineage_without_artifact",
        "done.b",
        "insert into rara.lineage (sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared, name)"
        " values (repeat('0', 64), 1, '{done.b}', '{done}', 1, false, true, 'from nowhere')",
    ),
    plant(
        "manifest_without_lineage",
        "done.a",
        "delete from rara.lineage where step_run_id = '{done.a}' and produced and name = 'small'",
    ),
    # ------------------------------------------------------------ effects and checkpoints
    plant(
        "effect_twice",
        "done.a",
        "alter table rara.effect drop constraint effect_pkey",
        "insert into rara.effect select * from rara.effect",
    ),
    plant("effect_of_unknown_token", "done.a", "update rara.effect set lease_token = {spare}"),
    plant(
        "checkpoint_of_unknown_token",
        "open.running",
        "update rara.checkpoint set lease_token = {spare} where step_run_id = '{open.running}'",
        also=("checkpoint_of_two_tokens",),
    ),
    plant(
        "checkpoint_without_blob",
        "open.running",
        "delete from rara.blob b using rara.checkpoint_artifact a where a.sha256 = b.sha256",
    ),
    plant(
        "checkpoint_without_blob",
        "open.running",
        "update rara.blob b set size_bytes = b.size_bytes + 1 from rara.checkpoint_artifact a"
        " where a.sha256 = b.sha256",
    ),
    plant(
        "checkpoint_of_two_tokens",
        "open.running",
        "update rara.checkpoint_artifact set sequence = sequence - 1",
    ),
    plant(
        "key_of_two_steps",
        "fresh.b",
        "update rara.step_run set idempotency_key = (select idempotency_key from rara.step_run"
        " where step_run_id = '{open.ready}') where step_run_id = '{fresh.b}'",
    ),
    # ------------------------------------------------------------ recovery
    plant(
        "lease_not_reclaimed",
        "open.leased",
        "update rara.lease set granted_at = now() - interval '3 h', expires_at = now() - interval '2 h'"
        " where step_run_id = '{open.leased}'",
    ),
    plant(
        "wait_not_ended",
        "open.waiting",
        "update rara.waiting set available_at = now() - interval '2 h' where step_run_id = '{open.waiting}'",
    ),
    plant(
        "deadline_not_kept",
        "fresh.a",
        "update rara.ready set deadline = now() - interval '2 h' where step_run_id = '{fresh.a}'",
    ),
)


@pytest_asyncio.fixture(scope="module")
async def history(postgres_server: PostgresServer) -> AsyncIterator[MixedHistory]:
    async with postgres_server.database() as url, store_world(url) as world:
        yield await mixed_history(world)


async def check_all(connection: "asyncpg.Connection[asyncpg.Record]") -> Report:
    return await check(connection, overdue_s=3600.0, max_attempts=3)


async def test_history_that_is_whole_breaks_no_rule(history: MixedHistory) -> None:
    report = await check_all(history.world.raw)
    assert report.broken == {}
    assert report.is_clean
    assert report.counts.keys() == {rule.name for rule in RULES}
    states = await history.world.raw.fetch("select distinct state from rara.step_state")
    assert len(states) == 7  # else the history shows less than it should


async def test_an_empty_database_breaks_no_rule(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        assert (await check_all(connection)).broken == {}
    finally:
        await connection.close()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: f"{p.rule}-{p.at}")
async def test_a_planted_violation_is_found_where_it_is(history: MixedHistory, plant: Plant) -> None:
    raw = history.world.raw
    spare = await raw.fetchval("select last_value from rara.lease_token_seq")
    ids = history.ids
    transaction = raw.transaction(isolation="repeatable_read")
    await transaction.start()
    try:
        await raw.execute(
            "set local session_replication_role = replica"
        )  # as if no trigger and no key refused
        for statement in plant.statements:
            for name, value in {**ids, "spare": str(spare)}.items():
                statement = statement.replace(f"{{{name}}}", value)
            await raw.execute(statement)
        report = await check_all(raw)
    finally:
        await transaction.rollback()
    assert report.broken.keys() == {plant.rule, *plant.also}, report.violations
    found = [violation for violation in report.violations if violation.rule == plant.rule]
    assert len(found) == 1
    place = json.dumps([found[0].workflow_run_id, found[0].step_run_id, found[0].facts])
    assert ids.get(plant.at, plant.at) in place


def test_every_rule_has_a_planted_violation() -> None:
    assert {plant.rule for plant in PLANTS} == {rule.name for rule in RULES}


def test_the_queries_know_the_codes_that_the_domain_knows() -> None:
    text = " ".join(query(f"check_{rule.name}") for rule in RULES)
    listed = {
        frozenset(re.findall(r"'(\w+)'", codes))
        for codes in re.findall(r"reason (?:not )?in \(([^)]*)\)", text)
    }
    assert listed == {FREE, FAILS_THE_RUN, frozenset({"CANCELLED", "SIBLING_FAILED"})}


async def test_all_are_counted_and_the_first_are_listed(history: MixedHistory) -> None:
    raw = history.world.raw
    transaction = raw.transaction(isolation="repeatable_read")
    await transaction.start()
    try:
        await raw.execute("update rara.ready set revision = revision + 50")
        report = await check(raw, limit=1)
    finally:
        await transaction.rollback()
    assert report.broken == {"revision_ahead": report.total}
    assert report.total > 1
    assert len(report.violations) == 1


async def test_a_live_database_is_not_asked_what_is_overdue(history: MixedHistory) -> None:
    report = await check(history.world.raw)
    left_out = {rule.name for rule in RULES if rule.needs is Needs.OVERDUE}
    assert report.counts.keys() == {rule.name for rule in RULES} - left_out


async def test_what_lies_about_of_removed_runs_breaks_no_rule(history: MixedHistory) -> None:
    raw = history.world.raw
    transaction = raw.transaction(isolation="repeatable_read")
    await transaction.start()
    try:
        removed = await raw.fetchval(
            "select runs from rara.remove_runs(array(select workflow_run_id from rara.workflow_run),"
            " now() + interval '1 day')"
        )
        left = await raw.fetchval(
            "select count(*) from rara.step_event e left join rara.step_run s using (step_run_id)"
            " where s.step_run_id is null"
        )
        report = await check_all(raw)
    finally:
        await transaction.rollback()
    assert removed == await raw.fetchval("select count(*) from rara.workflow_run where ended_at is not null")
    assert left > 0
    assert report.broken == {}
