"""Steps reach their ends in every order: step and run move along their tables alone, and a run closes once."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from rara_scheduler.domain import run as runs
from rara_scheduler.domain import step as steps
from rara_scheduler.domain.attempt import Guard
from rara_scheduler.domain.run import RunEvent, RunState
from rara_scheduler.domain.step import IllegalTransition, StepEvent, StepState
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.sweeps import BEFORE_ALL
from support.postgres import PostgresServer
from support.run_trail import assert_closed_once, keep_trail
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    new_id,
    reports,
    running,
    store_world,
    succeeded,
)

pytestmark = pytest.mark.case("S01")

# What may follow what, as the documents have it: the code's own tables are held against these.
STEP_NEXT = {
    "pending": {"leased", "cancelled"},
    "leased": {"running", "retryable_failed", "terminal_failed", "cancelled"},
    "running": {"succeeded", "retryable_failed", "terminal_failed", "cancelled"},
    "retryable_failed": {"leased", "cancelled"},
    "succeeded": set(),
    "terminal_failed": set(),
    "cancelled": set(),
}
RUN_NEXT = {
    "pending": {"running", "cancelling", "failed", "cancelled"},
    "running": {"cancelling", "succeeded", "failed", "cancelled"},
    "cancelling": {"succeeded", "failed", "cancelled"},
    "succeeded": set(),
    "failed": set(),
    "cancelled": set(),
}
CLOSED_RUNS = {state for state, after in RUN_NEXT.items() if not after}


@pytest_asyncio.fixture(scope="module")
async def world(postgres_server: PostgresServer) -> AsyncIterator[StoreWorld]:
    """One world for all: each test plays with runs of its own."""
    async with postgres_server.database() as url, store_world(url, check_history=True) as world:
        await keep_trail(world.raw)
        await world.define(
            "single", {"a": {}, "rest": {"kind": "other.do"}}, on_failure="ON_FAILURE_CONTINUE"
        )
        await world.define("alone", {"a": {"retry": {"max_attempts": 2}}})
        yield world


# ---------------------------------------------------------------- the tables


@pytest.mark.parametrize(("state", "event"), list(itertools.product(StepState, StepEvent)))
def test_every_event_at_a_step_in_every_state_is_legal_as_documented_or_refused(
    state: StepState, event: StepEvent
) -> None:
    try:
        assert steps.transition(state, event) in STEP_NEXT[state]
    except IllegalTransition:
        assert (state, event) not in steps.TRANSITIONS


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RunState, RunEvent)))
def test_every_event_at_a_run_in_every_state_is_legal_as_documented_or_refused(
    state: RunState, event: RunEvent
) -> None:
    try:
        assert runs.transition(state, event) in RUN_NEXT[state]
    except IllegalTransition:
        assert (state, event) not in runs.TRANSITIONS


def test_the_tables_leave_no_documented_change_out() -> None:
    for table, documented in ((steps.TRANSITIONS, STEP_NEXT), (runs.TRANSITIONS, RUN_NEXT)):
        found: dict[str, set[str]] = {state: set() for state in documented}
        for (state, _), after in table.items():
            found[state].add(after)
        assert found == documented


# ---------------------------------------------------------------- every event at a step in every state


@dataclass(slots=True)
class Subject:
    """A step under test, in an open run. grant: its newest, whether it is current, past or was never made."""

    world: StoreWorld
    run_id: str
    step_run_id: str
    grant: Grant
    sequence: int = 1

    def number(self) -> int:
        self.sequence += 1
        return self.sequence

    async def row(self) -> dict[str, Any]:
        return dict(await self.world.step(self.step_run_id))


async def lease_all(world: StoreWorld) -> dict[str, Grant]:
    route = next(r for r in await world.definitions.routes_after(0) if r.kind == "work.do")
    probes = [(route.route_id, 2000, BEFORE_ALL, "1.0.0")]
    grants = await world.leases.grant(probes, [new_id()] * 2000)
    return {grant.step_run_id: grant for grant in grants}


async def step_in(world: StoreWorld, state: StepState) -> Subject:
    run_id = await world.start("single")
    row = await world.raw.fetchrow(
        "select step_run_id::text, route_id from rara.step_run where workflow_run_id = $1::uuid and step_name = 'a'",
        run_id,
    )
    assert row is not None
    step_run_id = row["step_run_id"]
    nobody = Grant(
        step_run_id, run_id, row["route_id"], 2**40, 1, 0, 0, new_id(), BEFORE_ALL[0].date(), None, None,
        BEFORE_ALL[0], "a", "", False, "", 1, None, "", "",
    )  # fmt: skip
    subject = Subject(world, run_id, step_run_id, nobody)
    if state is StepState.PENDING:
        return subject
    if state is StepState.CANCELLED:
        await overdue(subject)
        return subject
    grant = subject.grant = (await lease_all(world))[step_run_id]
    if state is StepState.LEASED:
        await world.report(grant, accepted())
        return subject
    await world.report(grant, accepted(), running(subject.number()))
    if state is StepState.RETRYABLE_FAILED:
        await world.report(grant, failed(subject.number()))
        await world.make_due()
    elif state is StepState.SUCCEEDED:
        await world.report(grant, succeeded(subject.number()))
    elif state is StepState.TERMINAL_FAILED:
        await world.report(grant, failed(subject.number(), retryable=False))
    return subject


async def overdue(subject: Subject) -> None:
    """Its deadline passes while it waits."""
    world = subject.world
    await world.raw.execute(
        "update rara.ready set deadline = now() - interval '1 s' where step_run_id = $1::uuid",
        subject.step_run_id,
    )
    mine = [step for step in await world.sweeps.overdue_steps(NIL) if step.step_run_id == subject.step_run_id]
    await world.cancels.close_overdue(mine)


async def lease(subject: Subject) -> None:
    await lease_all(subject.world)


async def report_running(subject: Subject) -> None:
    await subject.world.report(subject.grant, running(subject.number()))


async def report_success(subject: Subject) -> None:
    await subject.world.report(subject.grant, succeeded(subject.number(), b'"late"'))


async def report_failure(subject: Subject) -> None:
    await subject.world.report(subject.grant, failed(subject.number()))


async def report_final_failure(subject: Subject) -> None:
    await subject.world.report(subject.grant, failed(subject.number(), retryable=False))


async def report_shutdown(subject: Subject) -> None:
    await subject.world.report(subject.grant, cancelled(subject.number(), "EXECUTOR_SHUTDOWN"))


async def reject(subject: Subject) -> None:
    await subject.world.report(subject.grant, ending("NO_CAPACITY", Guard.NOT_RUNNING))


async def expire(subject: Subject) -> None:
    await subject.world.expire(subject.grant)
    await subject.world.say(subject.grant, ending("LEASE_EXPIRED", Guard.EXPIRED))


async def pass_deadline(subject: Subject) -> None:
    await subject.world.say(subject.grant, ending("DEADLINE_EXCEEDED"))


async def cancel(subject: Subject) -> None:
    await subject.world.cancel(subject.run_id)
    await subject.world.report(subject.grant, cancelled(subject.number()))


async def cancel_and_fail(subject: Subject) -> None:
    await subject.world.cancel(subject.run_id)
    await subject.world.report(subject.grant, failed(subject.number()))


async def cancel_and_expire(subject: Subject) -> None:
    await subject.world.cancel(subject.run_id)
    await expire(subject)


Throw = Callable[[Subject], Awaitable[None]]
LEASED, RUNNING, SUCCEEDED = StepState.LEASED, StepState.RUNNING, StepState.SUCCEEDED

# Every way by which an event comes; where: its states, if they are fewer than the table's.
WAYS: tuple[tuple[StepEvent, Throw, frozenset[StepState]], ...] = (
    (StepEvent.LEASE, lease, steps.sources(StepEvent.LEASE)),
    (StepEvent.START, report_running, steps.sources(StepEvent.START)),
    (StepEvent.SUCCEED, report_success, steps.sources(StepEvent.SUCCEED)),
    (StepEvent.RETRY, report_failure, steps.sources(StepEvent.RETRY)),
    (StepEvent.RETRY, report_shutdown, steps.sources(StepEvent.RETRY)),
    (StepEvent.RETRY, reject, frozenset({LEASED})),  # until it runs
    (StepEvent.RETRY, expire, steps.sources(StepEvent.RETRY)),
    (StepEvent.FAIL, report_final_failure, steps.sources(StepEvent.FAIL)),
    (StepEvent.FAIL, pass_deadline, steps.sources(StepEvent.FAIL)),
    (StepEvent.CANCEL, cancel, steps.sources(StepEvent.CANCEL)),
    (StepEvent.CANCEL, cancel_and_fail, steps.sources(StepEvent.CANCEL)),
    (StepEvent.CANCEL, cancel_and_expire, steps.sources(StepEvent.CANCEL)),
    (StepEvent.CANCEL, overdue, frozenset({StepState.PENDING, StepState.RETRYABLE_FAILED})),  # where it waits
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[1].__name__)
@pytest.mark.parametrize("state", StepState)
async def test_an_event_changes_a_stored_step_as_the_table_says_or_not_at_all(
    world: StoreWorld, state: StepState, way: tuple[StepEvent, Throw, frozenset[StepState]]
) -> None:
    event, throw, where = way
    subject = await step_in(world, state)
    before = await subject.row()
    assert before["state"] == state
    await throw(subject)
    after = await subject.row()
    if state in where:
        assert after["state"] == steps.transition(state, event)
    elif (state, event) == (LEASED, StepEvent.SUCCEED):  # what overtakes `running` is applied through it
        assert after["state"] == SUCCEEDED
        assert after["started_at"] is not None
    elif state in (LEASED, RUNNING):  # the event is history, and changes nothing
        kept = ("state", "reason", "attempt", "failures", "lease_token", "executor_id", "started_at")
        assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    else:
        assert after == before


# ---------------------------------------------------------------- every event at a run in every state


async def run_in(world: StoreWorld, state: RunState, *, is_held: bool, reason: str = "CANCELLED") -> Subject:
    """A run of one step in this state. is_held: an executor has the step, else it waits."""
    run_id = await world.start("alone")
    step_run_id = str(
        await world.raw.fetchval(
            "select step_run_id from rara.step_run where workflow_run_id = $1::uuid", run_id
        )
    )
    if state is RunState.PENDING and not is_held:
        none: Any = None
        return Subject(world, run_id, step_run_id, none)
    subject = Subject(world, run_id, step_run_id, (await lease_all(world))[step_run_id])
    if state is RunState.PENDING:
        return subject
    await world.report(subject.grant, accepted(), running(subject.number()))
    match state:
        case RunState.RUNNING if not is_held:
            await world.report(subject.grant, failed(subject.number()))
        case RunState.CANCELLING:
            await world.cancels.cancel_run(run_id, reason=reason, message="", grace_s=None)
        case RunState.SUCCEEDED:
            await report_success(subject)
        case RunState.FAILED:
            await report_final_failure(subject)
        case RunState.CANCELLED:
            await cancel(subject)
    return subject


async def throw_run(subject: Subject, state: RunState, event: RunEvent) -> None:
    match event:
        case RunEvent.START:
            await subject.world.report(subject.grant, accepted(subject.number()))
        case RunEvent.REQUEST_CANCEL:
            await subject.world.cancel(subject.run_id)
        case RunEvent.SUCCEED:
            await report_success(subject)
        case RunEvent.FAIL if state is RunState.PENDING:
            await overdue(subject)
        case RunEvent.FAIL:
            await report_final_failure(subject)
        case RunEvent.CANCEL if state is RunState.CANCELLING:
            await subject.world.report(subject.grant, cancelled(subject.number()))
        case RunEvent.CANCEL:
            await subject.world.cancel(subject.run_id)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RunState, RunEvent)))
async def test_an_event_changes_a_stored_run_as_the_table_says_or_not_at_all(
    world: StoreWorld, state: RunState, event: RunEvent
) -> None:
    waits = event is RunEvent.CANCEL or (state, event) == (RunState.PENDING, RunEvent.FAIL)
    reason = (
        "DEADLINE_EXCEEDED" if event is RunEvent.FAIL else "CANCELLED"
    )  # a deadline's cancel ends in `failed`
    subject = await run_in(world, state, is_held=state is RunState.CANCELLING or not waits, reason=reason)
    before = dict(await world.run(subject.run_id))
    assert before["state"] == state
    await throw_run(subject, state, event)
    after = dict(await world.run(subject.run_id))
    if (state, event) in runs.TRANSITIONS:
        assert after["state"] == runs.transition(state, event)
    elif (state, event) == (RunState.PENDING, RunEvent.SUCCEED):  # through `running`, in one transaction
        assert after["state"] == RunState.SUCCEEDED
        assert after["started_at"] is not None
    elif state in CLOSED_RUNS:
        assert after == before
    else:
        assert after["state"] == state
    await settle(world, subject.run_id)


async def settle(world: StoreWorld, run_id: str) -> None:
    """Let what is left of a run end, and look back at all its changes."""
    if await world.run_state(run_id) not in CLOSED_RUNS:
        await world.cancel(run_id)
        held = await world.raw.fetch(
            "select step_run_id::text, lease_token from rara.lease where workflow_run_id = $1::uuid", run_id
        )
        for row in held:
            nobody: Any = None
            grant = Grant(
                row["step_run_id"], run_id, 0, row["lease_token"], 0, 0, 0, "", nobody, None, None, nobody, "", "",
                False, "", 0, None, "", "",
            )  # fmt: skip
            await world.say(grant, ending("LEASE_EXPIRED"))
    await assert_closed_once(world.raw, [run_id])


# ---------------------------------------------------------------- every order of ends


@dataclass(slots=True)
class Played:
    """One run: how its steps end, in their order, and what has to come of it.

    Each end is S (succeeds), F (fails for good) or D (its deadline passes before an executor takes it). cancel_at:
    before which end the run is cancelled; None: it is not.
    """

    ends: str
    is_fail_fast: bool
    cancel_at: int | None
    run_id: str = ""

    @property
    def definition(self) -> str:
        return f"{'fast' if self.is_fail_fast else 'all'}-{self.ends.lower()}"

    def expected(self) -> dict[str, tuple[str, str]]:
        """State and reason of every step by name."""
        results: dict[str, tuple[str, str]] = {}
        reason = ""

        def stop(why: str) -> None:
            nonlocal reason
            if not reason and len(results) < len(self.ends):
                reason = why
                waiting = [
                    f"s{i}" for i, end in enumerate(self.ends) if end == "D" and f"s{i}" not in results
                ]
                results.update(dict.fromkeys(waiting, ("cancelled", why)))

        for position, end in enumerate(self.ends):
            if position == self.cancel_at:
                stop("CANCELLED")
            name = f"s{position}"
            if name in results:
                continue
            if end == "S":
                results[name] = ("succeeded", "")
            elif end == "D":
                results[name] = ("cancelled", "DEADLINE_EXCEEDED")
            elif reason:
                results[name] = ("cancelled", reason)
            else:
                results[name] = ("terminal_failed", "HANDLER_FAILED")
            fails = results[name][0] == "terminal_failed" or results[name][1] == "DEADLINE_EXCEEDED"
            if self.is_fail_fast and fails:
                stop("SIBLING_FAILED")
        return results

    def expected_run(self) -> str:
        results = self.expected().values()
        if any(state == "terminal_failed" or reason == "DEADLINE_EXCEEDED" for state, reason in results):
            return "failed"
        return "cancelled" if any(state == "cancelled" for state, _ in results) else "succeeded"


async def play(world: StoreWorld, plays: list[Played]) -> None:
    """All runs at once, end by end: what one statement does for many must be right for each."""
    for one in {one.definition: one for one in plays}.values():
        await world.define(
            one.definition,
            {f"s{i}": {"kind": "late.do" if end == "D" else "work.do"} for i, end in enumerate(one.ends)},
            on_failure=f"ON_FAILURE_{'FAIL_FAST' if one.is_fail_fast else 'CONTINUE'}",
        )
    for one in plays:
        one.run_id = await world.start(one.definition)
    grants = {(g.workflow_run_id, g.step_name): g for g in (await lease_all(world)).values()}
    for position in range(len(plays[0].ends)):
        for one in plays:
            if one.cancel_at == position:
                await world.cancel(one.run_id)
        await end_all(world, plays, position, grants)


async def end_all(
    world: StoreWorld, plays: list[Played], position: int, grants: dict[tuple[str, str], Grant]
) -> None:
    batch = []
    for one in plays:
        if one.ends[position] != "D":
            grant = grants[one.run_id, f"s{position}"]
            end = succeeded(3) if one.ends[position] == "S" else failed(3, retryable=False)
            batch.append(reports(grant, accepted(), running(), end, executor_id=grant.executor_id))
    await world.commits.commit(batch)
    await world.raw.execute(
        "update rara.ready r set deadline = now() - interval '1 s' from rara.step_run s"
        " where s.step_run_id = r.step_run_id and s.step_name = $1 and s.workflow_run_id = any($2::uuid[])",
        f"s{position}",
        [one.run_id for one in plays if one.ends[position] == "D"],
    )
    if found := await world.sweeps.overdue_steps(NIL):
        await world.cancels.close_overdue(found)


async def assert_played(world: StoreWorld, plays: list[Played]) -> None:
    for one in plays:
        assert await world.steps(one.run_id) == one.expected(), one
        assert await world.run_state(one.run_id) == one.expected_run(), one
    await assert_closed_once(world.raw, [one.run_id for one in plays])


@pytest.mark.parametrize("is_fail_fast", [True, False], ids=["fail_fast", "continue"])
async def test_steps_end_in_every_order_with_a_cancel_between_any_two(
    world: StoreWorld, is_fail_fast: bool
) -> None:
    plays = [
        Played("".join(ends), is_fail_fast, cancel_at)
        for ends in itertools.product("SFD", repeat=3)
        for cancel_at in (None, 0, 1, 2)
    ]
    await play(world, plays)
    await assert_played(world, plays)


@pytest.mark.parametrize("is_fail_fast", [True, False], ids=["fail_fast", "continue"])
async def test_four_steps_end_in_every_order(world: StoreWorld, is_fail_fast: bool) -> None:
    plays = [Played("".join(ends), is_fail_fast, None) for ends in itertools.product("SFD", repeat=4)]
    await play(world, plays)
    await assert_played(world, plays)
