"""The state table of a workflow run, and how its end follows from its steps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_scheduler.domain.run import (
    TERMINAL,
    TRANSITIONS,
    RunEvent,
    RunState,
    Tally,
    closing_event,
    sources,
    transition,
)
from rara_scheduler.domain.step import IllegalTransition

TABLE = """
pending     start           running
pending     request_cancel  cancelling
pending     fail            failed
pending     cancel          cancelled
running     request_cancel  cancelling
running     succeed         succeeded
running     fail            failed
running     cancel          cancelled
cancelling  succeed         succeeded
cancelling  fail            failed
cancelling  cancel          cancelled
"""
LEGAL = {
    (RunState(state), RunEvent(event)): RunState(to)
    for state, event, to in (line.split() for line in TABLE.strip().splitlines())
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(RunState, RunEvent)))
def test_each_pair_is_legal_as_documented_or_raises(state: RunState, event: RunEvent) -> None:
    if (state, event) in LEGAL:
        assert transition(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition):
            transition(state, event)


def test_the_table_is_the_documented_one_and_three_states_are_terminal() -> None:
    assert TRANSITIONS == LEGAL
    assert {RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED} == TERMINAL


@pytest.mark.parametrize("event", list(RunEvent))
def test_sources_are_the_states_in_which_the_event_is_legal(event: RunEvent) -> None:
    assert sources(event) == {state for state, legal in LEGAL if legal is event}
    assert not sources(event) & TERMINAL


COUNTS = st.integers(0, 20)


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 20))
def test_a_run_with_an_open_step_does_not_close(
    succeeded: int, failed: int, cancelled: int, more: int
) -> None:
    tally = Tally(succeeded + failed + cancelled + more, succeeded, failed, cancelled)
    assert tally.open == more
    assert closing_event(tally) is None


@given(COUNTS, COUNTS, COUNTS)
def test_failed_outranks_cancelled_and_cancelled_outranks_succeeded(
    succeeded: int, failed: int, cancelled: int
) -> None:
    event = closing_event(Tally(succeeded + failed + cancelled, succeeded, failed, cancelled))
    if failed:
        assert event is RunEvent.FAIL
    elif cancelled:
        assert event is RunEvent.CANCEL
    else:
        assert event is RunEvent.SUCCEED


@given(st.integers(1, 20))
def test_a_run_closes_as_succeeded_only_when_all_steps_did(total: int) -> None:
    assert closing_event(Tally(total, total, 0, 0)) is RunEvent.SUCCEED
    assert closing_event(Tally(total, total - 1, 0, 1)) is RunEvent.CANCEL
    assert closing_event(Tally(total, total - 1, 1, 0)) is RunEvent.FAIL
