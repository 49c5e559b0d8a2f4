"""What one lease reports is decided from memory, and written only where that is still so (ADR 0026)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import Decision, EventType, Item, LeaseFacts, Report
from rara_scheduler.domain.run import RunState
from rara_scheduler.store.commit import BatchResult
from rara_scheduler.store.database import StoreUnavailable
from rara_scheduler.store.known_runs import MAX_STEPS, KnownRuns
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.run_ledger import LockedRun
from support.stepped_database import Interleaver, SteppedDatabase
from support.store_world import (
    StoreWorld,
    accepted,
    cancelled,
    failed,
    progress,
    reports,
    running,
    store_world,
    stored_artifact,
    succeeded,
)

EFFECT = Report(3, EventType.EFFECT, b"", effect=("sent", b"1"))
READ = 3  # statements of a commit that reads: lock and read, write, commit


@dataclass(slots=True)
class Pair:
    """Two schedulers; each remembers for itself."""

    one: StoreWorld
    other: StoreWorld


@pytest_asyncio.fixture
async def pair(database_url: str) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(store_world(database_url, SteppedDatabase))
        other = await stack.enter_async_context(
            store_world(database_url, SteppedDatabase, check_history=True)
        )
        await one.define("one", {"a": {"retry": {"max_attempts": 5}}})
        await one.define("two", {"a": {}, "b": {}})
        await one.define("chain", {"a": {}, "b": {"depends_on": ["a"]}})
        for name in ("one", "two", "chain"):
            await other.definitions.load(name, 0)
        yield Pair(one, other)


async def statements(world: StoreWorld, grant: Grant, *items: Item) -> tuple[int, BatchResult]:
    """How many a commit takes, its end included, and what came of it."""
    told: list[BatchResult] = []

    async def commit() -> None:
        told.append(await world.commits.commit([reports(grant, *items, executor_id=grant.executor_id)]))

    acts = Interleaver(world.raw)
    await acts.begin("commit", commit())
    await acts.finish()
    return acts.steps, told[0]


async def test_a_step_is_taken_up_and_ended_by_one_statement_each(pair: Pair) -> None:
    run_id = await pair.one.start("one")
    (grant,) = await pair.one.lease(1)
    assert (await statements(pair.one, grant, accepted()))[0] == 1
    assert await pair.one.run_state(run_id) == "running"
    assert (await statements(pair.one, grant, running(), progress(3)))[0] == 1
    count, result = await statements(pair.one, grant, succeeded(4, b'{"a": 1}'))
    assert count == 1
    assert result.ended_runs == {run_id: "succeeded"}
    step = await pair.one.step(grant.step_run_id)
    assert (step["state"], step["last_sequence"], step["output"]) == ("succeeded", 4, b'{"a": 1}')
    assert (await pair.one.run(run_id))["revision"] == 4


async def test_what_follows_from_it_is_written_with_it(pair: Pair) -> None:
    await pair.one.start("chain")
    (grant,) = await pair.one.lease(1)
    assert (await statements(pair.one, grant, accepted()))[0] == 1
    count, result = await statements(pair.one, grant, running(), EFFECT, succeeded(4))
    assert count == READ + 2  # the effect to record, the next step to make ready
    assert result.made_ready
    (grant,) = await pair.one.lease(1)
    assert grant.step_name == "b"
    assert (await statements(pair.one, grant, accepted()))[0] == 1


async def test_what_needs_other_rows_is_read(pair: Pair) -> None:
    await pair.one.start("one")
    (grant,) = await pair.one.lease(1)
    assert (await statements(pair.one, grant, accepted(), running()))[0] == 1
    again, _ = await statements(pair.one, grant, running())
    assert again == READ  # nothing to write, but the numbers that are stored to look up
    blob = stored_artifact("out", b"x" * 100)
    await pair.one.put_blobs(blob)
    count, result = await statements(pair.one, grant, succeeded(3, artifacts=[blob]))
    assert count == READ + 3  # the blob to lock, the artifact and its lineage to record
    assert list(result.ended_runs.values()) == ["succeeded"]


async def test_what_ends_other_steps_is_read(pair: Pair) -> None:
    run_id = await pair.one.start("chain")
    (grant,) = await pair.one.lease(1)
    assert (await statements(pair.one, grant, accepted()))[0] == 1
    count, result = await statements(pair.one, grant, failed(2, retryable=False))
    assert count > READ
    assert result.ended_runs == {run_id: "failed"}


async def test_a_grant_of_another_scheduler_is_read_once(pair: Pair) -> None:
    await pair.one.start("one")
    (grant,) = await pair.other.lease(1)
    assert (await statements(pair.other, grant, accepted()))[0] == READ
    assert (await statements(pair.other, grant, running(), succeeded(3)))[0] == 1


async def other_ends_its_step(pair: Pair, run_id: str, theirs: Grant) -> None:
    await pair.other.report(theirs, accepted(), running(), succeeded(3))


async def other_fails_for_good(pair: Pair, run_id: str, theirs: Grant) -> None:
    await pair.other.report(theirs, accepted(), running(), failed(3, retryable=False))


async def other_cancels(pair: Pair, run_id: str, theirs: Grant) -> None:
    await pair.other.cancel(run_id)


@pytest.mark.parametrize(
    ("change", "run_state", "reason"),
    [
        (other_ends_its_step, "succeeded", None),
        (other_fails_for_good, "failed", "SIBLING_FAILED"),
        (other_cancels, "cancelling", "CANCELLED"),
    ],
)
async def test_what_another_scheduler_has_made_of_the_run_is_found(
    pair: Pair, change: Callable[[Pair, str, Grant], Awaitable[None]], run_state: str, reason: str | None
) -> None:
    run_id = await pair.one.start("two")
    mine, theirs = await pair.one.lease(2)
    await pair.one.report(mine, accepted())
    await change(pair, run_id, theirs)
    count, result = await statements(pair.one, mine, running(), succeeded(3))
    assert count == 1 + READ
    assert result.decisions[mine.lease_token].closing is not None
    step = await pair.one.step(mine.step_run_id)
    assert (step["state"], step["cancel_reason"]) == ("succeeded", reason)
    assert await pair.one.run_state(run_id) == run_state


async def test_a_lease_that_another_scheduler_took_back_is_lost(pair: Pair) -> None:
    await pair.one.start("one")
    (grant,) = await pair.one.lease(1)
    await pair.one.report(grant, accepted())
    await pair.other.report(grant, cancelled(2, "EXECUTOR_SHUTDOWN"), executor_id=grant.executor_id)
    (again,) = await pair.other.lease(1)
    assert again.step_run_id == grant.step_run_id
    _, result = await statements(pair.one, grant, running(), succeeded(3))
    assert result.late[grant.lease_token].lost == (2, 3) or result.late[grant.lease_token].lost == (3,)
    assert await pair.one.state(grant.step_run_id) == "leased"


async def test_a_statement_whose_answer_is_lost_is_said_again(pair: Pair) -> None:
    """Its connection ends while it waits for the run; whether it was stored, the run's revision tells."""
    await pair.one.start("one")
    (grant,) = await pair.one.lease(1)
    await pair.one.report(grant, accepted())

    async def commit() -> None:
        await pair.one.report(grant, running())

    acts = Interleaver(pair.one.raw)
    await acts.begin("commit", commit())
    (act,) = acts.ready()
    await pair.one.raw.execute("select pg_terminate_backend($1)", act.pid)
    await acts.finish()
    assert isinstance(act.refused, StoreUnavailable)
    assert (await statements(pair.one, grant, running(), succeeded(3)))[0] == 1
    assert (await pair.one.step(grant.step_run_id))["last_sequence"] == 3


async def test_what_another_server_told_is_not_believed(pair: Pair) -> None:
    """A copy that took over may be behind, and its revisions mean other things."""
    await pair.one.start("one")
    await pair.one.start("one")
    mine, other = await pair.one.lease(2)
    await pair.one.report(mine, accepted())
    here = pair.one.known.server
    assert here is not None
    pair.one.known.server = here - timedelta(seconds=1)
    assert (await statements(pair.one, mine, running()))[0] == 1 + READ
    assert pair.one.known.server == here
    assert (await statements(pair.one, other, accepted()))[0] == READ
    assert (await statements(pair.one, mine, succeeded(3)))[0] == 1  # read since


async def test_a_scheduler_asks_once_which_server_it_is(database_url: str) -> None:
    async with store_world(database_url, SteppedDatabase) as world:
        world.known.server = None
        await world.define("one", {"a": {}})
        await world.start("one")
        (grant,) = await world.lease(1)
        assert (await statements(world, grant, accepted()))[0] == 1 + READ
        assert (await statements(world, grant, running(), succeeded(3)))[0] == 1


async def test_a_run_that_others_move_as_well_is_not_remembered_again(pair: Pair) -> None:
    await pair.one.start("two")
    mine, theirs = await pair.one.lease(2)
    await pair.one.report(mine, accepted())
    await pair.other.report(theirs, accepted(), executor_id=theirs.executor_id)
    assert (await statements(pair.one, mine, running()))[0] == 1 + READ
    assert (await statements(pair.one, mine, progress(3)))[0] == READ
    assert (await statements(pair.one, mine, succeeded(4)))[0] == READ


async def test_many_events_of_one_lease_are_copied(pair: Pair) -> None:
    await pair.one.start("one")
    (grant,) = await pair.one.lease(1)
    await pair.one.report(grant, accepted(), running())
    few, many = [progress(n) for n in range(3, 34)], [progress(n) for n in range(34, 66)]
    assert (await statements(pair.one, grant, *reversed(few)))[0] == 1
    assert (await statements(pair.one, grant, *many))[0] == READ
    stored = await pair.one.raw.fetch("select sequence from rara.step_event order by sequence")
    assert [row["sequence"] for row in stored] == list(range(1, 66))


async def test_two_schedulers_that_end_steps_of_one_run_at_once_close_it_once(pair: Pair) -> None:
    for _ in range(20):
        run_id = await pair.one.start("two")
        mine, theirs = await pair.one.lease(2)
        ended = await asyncio.gather(
            pair.one.report(mine, accepted(), running(), succeeded(3)),
            pair.other.report(theirs, accepted(), running(), succeeded(3)),
        )
        assert [run_id in each.ended_runs for each in ended].count(True) == 1
        run = await pair.one.run(run_id)
        assert (run["state"], run["steps_succeeded"], run["revision"]) == ("succeeded", 2, 3)


# ---------------------------------------------------------------- what is remembered


def run(run_id: str, **more: object) -> LockedRun:
    facts = LockedRun(run_id, RunState.RUNNING, 3, 2, 0, 0, 0, "fail_fast", None, "d", 1, None)
    return replace(facts, **more)  # type: ignore[arg-type]


def lease(run_id: str, step_run_id: str = "s", token: int = 1) -> LeaseFacts:
    return LeaseFacts(
        step_run_id, run_id, token, 1, 0, 0, "e", None, False, False, 0, 0, None, False, False, "a", "k"  # type: ignore[arg-type]
    )  # fmt: skip


def test_an_epoch_ends_with_its_server() -> None:
    known = KnownRuns()
    known.told_by(datetime(2026, 1, 1, tzinfo=UTC))
    known.started([run("1")])
    before = known.epoch
    known.told_by(datetime(2026, 1, 1, tzinfo=UTC))
    assert (known.has("1"), known.epoch == before) == (True, True)
    known.told_by(datetime(2026, 1, 2, tzinfo=UTC))
    assert (known.has("1"), known.epoch == before) == (False, False)
    known.started([run("1")])
    known.granted([lease("1")], before)
    assert known.of("1", "s", 1) is None
    known.committed([run("2", touched=True)], [], before)
    assert not known.has("2")


def test_only_who_others_have_moved_is_contested() -> None:
    known = KnownRuns()
    known.started([run("1"), run("2")])
    known.contested("1", 2)  # decided before it moved here
    known.contested("2", 3)
    known.committed([run("1", touched=True), run("2", touched=True)], [], 0)
    assert [known.has(each) for each in "12"] == [True, False]


def test_the_runs_that_were_of_use_least_lately_are_forgotten() -> None:
    known = KnownRuns(max_runs=2)
    known.started([run("1"), run("2")])
    known.committed([run("1", touched=True)], [], 0)
    known.started([run("3")])
    assert [known.has(each) for each in "123"] == [True, False, True]
    assert len(known) == 2


def test_large_runs_and_those_that_end_are_not_remembered() -> None:
    known = KnownRuns()
    known.started([run("large", total=MAX_STEPS + 1), run("small", total=MAX_STEPS)])
    assert [known.has(each) for each in ("large", "small")] == [False, True]
    for ending in ({"state": RunState.SUCCEEDED}, {"cancel_reason": "CANCELLED"}):
        known.started([run("small")])
        known.committed([run("small", **ending)], [], 0)
        assert not known.has("small")


def test_a_run_is_known_at_the_revision_that_was_written() -> None:
    known = KnownRuns()
    known.started([run("1")])
    known.granted([lease("1"), lease("nobody's")], 0)
    found = known.of("1", "s", 1)
    assert found is not None
    facts, held = found
    assert (facts.revision, held.last_sequence) == (3, 0)
    facts.touched = True
    facts.succeeded = 1
    known.committed([facts], [Decision(held, accept=True, last_sequence=1)], 0)
    found = known.of("1", "s", 1)
    assert found is not None
    facts, held = found
    assert (facts.revision, facts.succeeded, facts.touched) == (4, 1, False)
    assert (held.accepted, held.last_sequence) == (True, 1)
    assert known.of("1", "s", 2) is None
    assert known.of("1", "another", 1) is None
    assert known.of("another", "s", 1) is None


def test_leases_of_a_run_that_moved_elsewhere_are_forgotten() -> None:
    known = KnownRuns()
    known.started([run("1")])
    known.granted([lease("1"), lease("1", "t", 2)], 0)
    read = lease("1", "t", 2)
    known.committed([run("1", revision=5, touched=True)], [Decision(read, accept=True, last_sequence=1)], 0)
    assert known.of("1", "s", 1) is None
    found = known.of("1", "t", 2)
    assert found is not None
    assert found[0].revision == 6
