"""Retrying, cancelling and requeueing by filter: what a filter means, and that a repeat does nothing twice."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.bulk import Bulk
from rara_scheduler.domain.bulk import Outcome, RunSelection, StepSelection
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.run import RunState
from rara_scheduler.store.bulk import BulkStore, Place
from rara_scheduler.store.queries import query
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.retry_run import RunRetrier
from support.store_world import StoreWorld, accepted, failed, running, store_world

DAY = RunSelection(definition="day")
BOTH = (RunState.FAILED, RunState.CANCELLED)


class Cancels:
    def __init__(self, world: StoreWorld) -> None:
        self._world = world

    async def cancel_run(self, workflow_run_id: str, *, message: str, grace_s: float | None) -> None:
        await self._world.cancels.cancel_run(
            workflow_run_id, reason="CANCELLED", message=message, grace_s=grace_s
        )


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url, check_history=True) as opened:
        await opened.define("day", {"a": {}})
        await opened.define("night", {"a": {"kind": "night.do"}})
        yield opened


def bulk(world: StoreWorld) -> Bulk:
    retrier = RunRetrier(world.database, world.definitions, on_ready=lambda: None)
    return Bulk(
        BulkStore(world.database),
        retrier,
        Cancels(world),
        on_requeued=lambda: None,
        on_retried=lambda: None,
    )


async def failed_runs(world: StoreWorld, name: str, *codes: str, **fields: object) -> list[str]:
    """Runs that ended with these codes, in this order."""
    runs = []
    for code in codes:
        runs.append(await world.start(name, **fields))
        (grant,) = await world.lease()
        await world.report(grant, accepted(1), running(2), failed(3, code, retryable=False))
    return runs


async def sample(world: StoreWorld, wanted: RunSelection) -> list[str]:
    seen = await bulk(world).preview_retries(wanted)
    assert (seen.count, seen.more) == (len(seen.sample), False)
    return list(seen.sample)


async def all_pages(world: StoreWorld, wanted: RunSelection, most: int) -> list[Outcome]:
    operator = bulk(world)
    as_of = (await operator.preview_retries(wanted)).as_of
    done: list[Outcome] = []
    place: Place | None = None
    while True:
        outcomes, place = await operator.retry_runs(wanted, as_of, place, most, by="ops")
        assert len(outcomes) <= most
        done += outcomes
        if place is None:
            return done


async def test_a_filter_means_what_holds_of_a_run_and_of_the_step_that_failed(world: StoreWorld) -> None:
    first, second = await failed_runs(world, "day", "BAD_DATA", "RATE_LIMITED", labels={"team": "a"})
    (third,) = await failed_runs(world, "night", "BAD_DATA")
    cancelled = await world.start("day")
    await world.cancel(cancelled)
    await world.start("day")
    await world.run_to_success(await world.lease_one())
    ended = (await world.run(second))["ended_at"]
    for wanted, expected in (
        (RunSelection(), [first, second, third]),
        (RunSelection(states=BOTH), [first, second, third, cancelled]),
        (RunSelection(states=(RunState.CANCELLED,)), [cancelled]),
        (replace(DAY, states=BOTH), [first, second, cancelled]),
        (replace(DAY, version=1), [first, second]),
        (replace(DAY, version=2), []),
        (RunSelection(definition="none"), []),
        (RunSelection(reasons=("BAD_DATA", "NOTHING")), [first, third]),
        (RunSelection(states=BOTH, reasons=("CANCELLED",)), [cancelled]),
        (RunSelection(kind="night.do"), [third]),
        (RunSelection(labels={"team": "a"}), [first, second]),
        (RunSelection(labels={"team": "b"}), []),
        (RunSelection(states=BOTH, ended_from=ended), [second, third, cancelled]),
        (RunSelection(ended_before=ended), [first]),
        (RunSelection(ended_from=ended, ended_before=ended + timedelta(microseconds=1)), [second]),
        (RunSelection(created_before=(await world.run(second))["created_at"]), [first]),
        (replace(DAY, created_from=(await world.run(second))["created_at"]), [second]),
    ):
        assert await sample(world, wanted) == expected, wanted


async def test_a_run_whose_budget_is_spent_is_found_by_its_reason_and_by_the_code_that_is_shown(
    world: StoreWorld,
) -> None:
    await world.define("twice", {"a": {"retry": {"max_attempts": 2}}})
    run_id = await world.start("twice")
    for _ in range(2):
        await world.make_due()
        (grant,) = await world.lease()
        await world.report(grant, accepted(1), running(2), failed(3, "HANDLER_FAILED"))
    assert await world.steps(run_id) == {"a": ("terminal_failed", "ATTEMPTS_EXHAUSTED")}
    (shown,) = await Reads(world.database, world.definitions, silent_after_s=1.0).lean_runs([run_id])
    assert shown.error is not None
    assert shown.error.code == "HANDLER_FAILED"
    for codes, expected in (
        (("HANDLER_FAILED",), [run_id]),
        (("ATTEMPTS_EXHAUSTED",), [run_id]),
        (("BAD_DATA", "HANDLER_FAILED"), [run_id]),
        (("BAD_DATA",), []),
    ):
        assert await sample(world, RunSelection(reasons=codes)) == expected, codes


async def test_each_run_is_retried_once_whoever_asks_and_however_often(world: StoreWorld) -> None:
    runs = await failed_runs(world, "day", *["BAD_DATA"] * 5)
    await failed_runs(world, "day", "OTHER")
    wanted = replace(DAY, reasons=("BAD_DATA",))
    operators = bulk(world), bulk(world)
    as_of = (await operators[0].preview_retries(wanted)).as_of
    answers = await asyncio.gather(
        *(operators[n % 2].retry_runs(wanted, as_of, None, 100, by="ops") for n in range(6))
    )
    retried = {one.id: one.new_run_id for outcomes, _ in answers for one in outcomes}
    assert [one for outcomes, _ in answers for one in outcomes if one.code] == []
    assert set(retried) == set(runs)
    stored = await world.raw.fetch(
        "select retry_of_workflow_run_id::text as source, workflow_run_id::text as id from rara.workflow_run"
        " where retry_of_workflow_run_id is not null"
    )
    assert {row["source"]: row["id"] for row in stored} == retried
    assert len(stored) == 5
    # Also when the retries have failed, and with the same instant: what was retried is done with.
    for grant in await world.lease():
        await world.report(grant, accepted(1), running(2), failed(3, "BAD_DATA", retryable=False))
    assert await operators[0].retry_runs(wanted, as_of, None, 100, by="ops") == ([], None)
    # A later preview finds the retries, which are runs of their own.
    assert set(await sample(world, wanted)) == set(retried.values())


async def test_a_key_keeps_a_page_that_was_read_before_from_a_second_retry(world: StoreWorld) -> None:
    (run_id,) = await failed_runs(world, "day", "BAD_DATA")
    retrier = RunRetrier(world.database, world.definitions, on_ready=lambda: None)
    as_of = (await bulk(world).preview_retries(DAY)).as_of
    (first,), _ = await bulk(world).retry_runs(DAY, as_of, None, 1, by="one")
    (grant,) = await world.lease()
    await world.report(grant, accepted(1), running(2), failed(3, "BAD_DATA", retryable=False))
    late = await retrier.retry(run_id, idempotency_key=f"rara.retry-runs/{run_id}")
    assert late == (first.new_run_id, True)


async def test_pages_go_on_where_the_one_before_ended(world: StoreWorld) -> None:
    runs = await failed_runs(world, "day", *["BAD_DATA"] * 5)
    done = await all_pages(world, DAY, 2)
    assert [one.id for one in done] == runs
    assert all(one.new_run_id and not one.code for one in done)


async def test_windows_bound_what_a_call_looks_at(world: StoreWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rara_scheduler.store.bulk._WINDOW", 2)
    runs = await failed_runs(world, "day", "X", "X", "X", "BAD_DATA", "X", "BAD_DATA", "X")
    wanted = replace(DAY, reasons=("BAD_DATA",))
    assert await sample(world, wanted) == [runs[3], runs[5]]
    assert [one.id for one in await all_pages(world, wanted, 1)] == [runs[3], runs[5]]
    monkeypatch.setattr("rara_scheduler.store.bulk.MAX_WALKED", 2)
    seen = await bulk(world).preview_retries(RunSelection(reasons=("X",)))
    assert (seen.count, seen.more) == (2, True)
    as_of = seen.as_of
    assert await bulk(world).retry_runs(RunSelection(kind="none"), as_of, None, 5, by="") == (
        [],
        ((await world.run(runs[1]))["ended_at"], runs[1]),
    )


async def test_what_ended_after_the_preview_is_left_out(world: StoreWorld) -> None:
    (before,) = await failed_runs(world, "day", "BAD_DATA")
    as_of = (await bulk(world).preview_retries(DAY)).as_of
    (after,) = await failed_runs(world, "day", "BAD_DATA")
    outcomes, _ = await bulk(world).retry_runs(DAY, as_of, None, 10, by="ops")
    assert [one.id for one in outcomes] == [before]
    assert await sample(world, DAY) == [after]


async def test_what_somebody_cancelled_is_counted_and_left_alone_unless_it_is_asked_for(
    world: StoreWorld,
) -> None:
    runs = await failed_runs(world, "day", "BAD_DATA", "BAD_DATA")
    cancelled = await world.start("day")
    await world.cancel(cancelled)
    seen = await bulk(world).preview_retries(DAY)
    assert (seen.count, seen.states) == (2, {RunState.FAILED: 2, RunState.CANCELLED: 1})
    outcomes, _ = await bulk(world).retry_runs(DAY, seen.as_of, None, 10, by="ops")
    assert [one.id for one in outcomes] == runs
    wanted = replace(DAY, states=(RunState.CANCELLED,))
    outcomes, _ = await bulk(world).retry_runs(wanted, seen.as_of, None, 10, by="ops")
    assert [one.id for one in outcomes] == [cancelled]


async def test_a_preview_as_of_an_instant_counts_what_the_call_will_do(world: StoreWorld) -> None:
    await failed_runs(world, "day", "BAD_DATA", "BAD_DATA")
    as_of = (await bulk(world).preview_retries(DAY)).as_of
    await failed_runs(world, "day", "BAD_DATA")
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    for at, count in ((long_ago, 0), (as_of, 2), (None, 3)):
        seen = await bulk(world).preview_retries(DAY, at)
        assert (seen.count, at in (None, seen.as_of)) == (count, True)
    assert (await bulk(world).preview_cancels(RunSelection(), long_ago)).count == 0
    assert (await bulk(world).preview_requeues(StepSelection(), long_ago)).as_of == long_ago


async def test_an_instant_that_is_yet_to_come_is_refused(world: StoreWorld) -> None:
    await failed_runs(world, "day", "BAD_DATA")
    operator = bulk(world)
    future = (await operator.preview_retries(DAY)).as_of + timedelta(minutes=1)
    for call in (
        operator.preview_retries(DAY, future),
        operator.preview_cancels(DAY, future),
        operator.preview_requeues(StepSelection(), future),
        operator.retry_runs(DAY, future, None, 10, by="ops"),
        operator.cancel_runs(DAY, future, None, 10, message="", grace_s=None, by="ops"),
        operator.requeue_steps(StepSelection(), future, None, 10, by="ops"),
    ):
        with pytest.raises(Fault) as caught:
            await call
        assert (caught.value.code, [one.field for one in caught.value.fields]) == (
            Code.FIELD_INVALID,
            ["as_of"],
        )
    assert await sample(world, DAY) != []


async def test_a_call_never_retries_a_retry_of_its_own(world: StoreWorld) -> None:
    runs = await failed_runs(world, "day", *["BAD_DATA"] * 3)
    operator = bulk(world)
    as_of = (await operator.preview_retries(DAY)).as_of
    done: list[str] = []
    place: Place | None = None
    while True:
        outcomes, place = await operator.retry_runs(DAY, as_of, place, 1, by="ops")
        done += [one.id for one in outcomes]
        for grant in await world.lease():  # each retry fails at once, before the next page
            await world.report(grant, accepted(1), running(2), failed(3, "BAD_DATA", retryable=False))
        if place is None:
            break
    assert done == runs


async def test_what_is_wrong_with_one_run_stops_no_other(world: StoreWorld) -> None:
    runs = await failed_runs(world, "day", "BAD_DATA", "BAD_DATA")
    await world.start("day", idempotency_key=f"rara.retry-runs/{runs[0]}")  # somebody took its key
    as_of = (await bulk(world).preview_retries(DAY)).as_of
    outcomes, end = await bulk(world).retry_runs(DAY, as_of, None, 10, by="ops")
    assert [(one.id, one.code) for one in outcomes] == [(runs[0], Code.IDEMPOTENCY_CONFLICT), (runs[1], "")]
    assert end is None


async def test_a_database_that_goes_away_ends_the_call(world: StoreWorld) -> None:
    class Away:
        async def retry(self, *_: object, **__: object) -> tuple[str, bool]:
            raise Fault(Code.STORE_UNAVAILABLE, "away")

    await failed_runs(world, "day", "BAD_DATA")
    operator = Bulk(
        BulkStore(world.database),
        Away(),
        Cancels(world),
        on_requeued=lambda: None,
        on_retried=lambda: None,
    )
    as_of = (await operator.preview_retries(DAY)).as_of
    with pytest.raises(Fault):
        await operator.retry_runs(DAY, as_of, None, 10, by="ops")


async def test_open_runs_are_cancelled_by_filter_once(world: StoreWorld) -> None:
    runs = [await world.start("day", labels={"n": str(n)}) for n in range(3)]
    other = await world.start("night")
    as_of = (await bulk(world).preview_cancels(DAY)).as_of
    later = await world.start("day")
    seen = await bulk(world).preview_cancels(replace(DAY, labels={"n": "1"}))
    assert list(seen.sample) == [runs[1]]
    for expected in ([*runs], []):
        outcomes, _ = await bulk(world).cancel_runs(
            DAY, as_of, None, 10, message="bad day", grace_s=None, by="ops"
        )
        assert [one.id for one in outcomes] == expected
    states = {run_id: await world.run_state(run_id) for run_id in (*runs, other, later)}
    assert states == dict.fromkeys(runs, "cancelled") | {other: "pending", later: "pending"}
    message = await world.raw.fetchval(
        "select cancel_message from rara.workflow_run where labels->>'n' = '0'"
    )
    assert message == "bad day"


async def test_waits_end_by_filter_and_once(world: StoreWorld) -> None:
    grants = {}
    for name, code in (("day", "RATE_LIMITED"), ("day", "BROKEN"), ("night", "RATE_LIMITED")):
        run_id = await world.start(name)
        (grant,) = await world.lease()
        grants[run_id] = grant
        await world.report(grant, accepted(1), running(2), failed(3, code))
    limited, broken, night = grants
    await world.raw.execute("update rara.waiting set available_at = now() + interval '1 hour'")
    operator = bulk(world)
    for wanted, count in (
        (StepSelection(), 3),
        (StepSelection(definition="day"), 2),
        (StepSelection(definition="day", version=2), 0),
        (StepSelection(kind="night.do"), 1),
        (StepSelection(reasons=("RATE_LIMITED",)), 2),
        (StepSelection(labels={"a": "b"}), 0),
    ):
        assert (await operator.preview_requeues(wanted)).count == count, wanted
    wanted = StepSelection(reasons=("RATE_LIMITED",))
    as_of = (await operator.preview_requeues(wanted)).as_of
    answers = await asyncio.gather(
        *(operator.requeue_steps(wanted, as_of, None, 10, by="ops") for _ in range(3))
    )
    moved = [one.id for outcomes, _ in answers for one in outcomes if not one.code]
    assert sorted(moved) == sorted([grants[limited].step_run_id, grants[night].step_run_id])
    again = await world.lease()
    assert {(g.workflow_run_id, g.attempt, g.failures) for g in again} == {(limited, 2, 1), (night, 2, 1)}
    # They fail again after the preview: its instant ends no later wait.
    for grant in again:
        await world.report(grant, accepted(1), running(2), failed(3, "RATE_LIMITED"))
    assert await operator.requeue_steps(wanted, as_of, None, 10, by="ops") == ([], None)
    assert (await world.steps(broken))["a"] == ("retryable_failed", "BROKEN")


async def test_no_wait_of_a_run_that_is_to_be_cancelled_ends(world: StoreWorld) -> None:
    run_id = await world.start("day")
    grant = await world.lease_one()
    await world.report(grant, accepted(1), running(2), failed(3, "BROKEN"))
    await world.cancel(run_id)
    assert await BulkStore(world.database).requeue([grant.step_run_id]) == set()
    assert await world.run_state(run_id) == "cancelled"


@pytest_asyncio.fixture
async def crowd(database_url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    """Many runs that went well, one in 500 that failed, and one that is open."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        """insert into rara.workflow_run (workflow_run_id, definition, definition_version, on_failure, steps_total,
                                          state, steps_succeeded, steps_failed, ended_at, failed_step_run_id)
           select gen_random_uuid(), 'busy', 1, 'fail_fast', 1,
                  case when n % 500 = 0 then 'failed' else 'succeeded' end,
                  case when n % 500 = 0 then 0 else 1 end, case when n % 500 = 0 then 1 else 0 end,
                  now() - make_interval(secs => n), case when n % 500 = 0 then gen_random_uuid() end
             from generate_series(1, 20000) n"""
    )
    await connection.execute(
        "insert into rara.workflow_run (workflow_run_id, definition, definition_version, on_failure, steps_total)"
        " values (gen_random_uuid(), 'day', 1, 'fail_fast', 1)"
    )
    await connection.execute("vacuum analyze rara.workflow_run")
    yield connection
    await connection.close()


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_window_is_found_by_its_index_among_many_runs_that_went_well(
    crowd: "asyncpg.Connection[asyncpg.Record]", mode: str
) -> None:
    await crowd.execute(f"set plan_cache_mode = {mode}")
    for name, filters, index in (
        ("unsuccessful_runs", "null, null, null, null, null, null, null, null, null", "unsuccessful"),
        ("unsuccessful_runs", "'busy', null, null, '{X}', null, null, null, null, null", "unsuccessful_of"),
        ("open_runs", "'day', null, null, null, null", "open"),
    ):
        await crowd.execute(f"prepare looked as {query(name)}")
        told = await crowd.fetchval(
            "explain (analyze, buffers, timing off, format json) execute looked('1970-01-01',"
            f" '00000000-0000-0000-0000-000000000000', now(), 5000, 10, {filters})"
        )
        await crowd.execute("deallocate looked")
        plan = json.loads(told)[0]["Plan"]
        assert f'"workflow_run_{index}"' in told
        assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 400  # of some 600 that all runs have
