"""The state table of a step run, pair by pair."""

import itertools

import pytest
from rara_scheduler.domain.step import (
    TERMINAL,
    TRANSITIONS,
    IllegalTransition,
    StepEvent,
    StepState,
    sources,
    transition,
)

# The table of the documentation, written down once more by hand: state, event, what follows.
TABLE = """
pending           lease    leased
pending           cancel   cancelled
leased            start    running
leased            retry    retryable_failed
leased            fail     terminal_failed
leased            cancel   cancelled
running           succeed  succeeded
running           retry    retryable_failed
running           fail     terminal_failed
running           cancel   cancelled
retryable_failed  lease    leased
retryable_failed  cancel   cancelled
"""
LEGAL = {
    (StepState(state), StepEvent(event)): StepState(to)
    for state, event, to in (line.split() for line in TABLE.strip().splitlines())
}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(StepState, StepEvent)))
def test_each_pair_is_legal_as_documented_or_raises(state: StepState, event: StepEvent) -> None:
    if (state, event) in LEGAL:
        assert transition(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(IllegalTransition) as raised:
            transition(state, event)
        assert (raised.value.state, raised.value.event) == (state, event)


def test_the_table_is_the_documented_one() -> None:
    assert TRANSITIONS == LEGAL


def test_exactly_three_states_are_terminal() -> None:
    assert {StepState.SUCCEEDED, StepState.TERMINAL_FAILED, StepState.CANCELLED} == TERMINAL


@pytest.mark.parametrize("event", list(StepEvent))
def test_sources_are_the_states_in_which_the_event_is_legal(event: StepEvent) -> None:
    assert sources(event) == {state for state, legal in LEGAL if legal is event}
    assert not sources(event) & TERMINAL


def test_every_state_can_be_reached_from_pending_and_leads_to_an_end() -> None:
    def closure(start: StepState) -> set[StepState]:
        found = {start}
        while more := {to for (state, _), to in LEGAL.items() if state in found} - found:
            found |= more
        return found

    assert closure(StepState.PENDING) == set(StepState)
    assert all(closure(state) & TERMINAL for state in StepState)
