"""The states of a workflow run, and how they follow from its steps."""

from dataclasses import dataclass
from enum import StrEnum

from rara_scheduler.domain.step import IllegalTransition


class RunState(StrEnum):
    PENDING = "pending"  # no step leased yet
    RUNNING = "running"
    CANCELLING = "cancelling"  # a cancel is being confirmed
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class RunEvent(StrEnum):
    START = "start"  # the first lease was accepted
    REQUEST_CANCEL = "request_cancel"  # and steps are left that an executor holds
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"


_S, _E = RunState, RunEvent

# The one copy of the table.
TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (_S.PENDING, _E.START): _S.RUNNING,
    (_S.PENDING, _E.REQUEST_CANCEL): _S.CANCELLING,  # leased, and not accepted yet
    (_S.PENDING, _E.FAIL): _S.FAILED,  # its deadline passed while it waited
    (_S.PENDING, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.REQUEST_CANCEL): _S.CANCELLING,
    (_S.RUNNING, _E.SUCCEED): _S.SUCCEEDED,
    (_S.RUNNING, _E.FAIL): _S.FAILED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
    (_S.CANCELLING, _E.SUCCEED): _S.SUCCEEDED,  # every success committed before its cancel took effect
    (_S.CANCELLING, _E.FAIL): _S.FAILED,
    (_S.CANCELLING, _E.CANCEL): _S.CANCELLED,
}

TERMINAL = frozenset(RunState) - {state for state, _ in TRANSITIONS}


def transition(state: RunState, event: RunEvent) -> RunState:
    """Return the state that follows, or raise IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def sources(event: RunEvent) -> frozenset[RunState]:
    """States in which the event is legal."""
    return frozenset(state for state, trigger in TRANSITIONS if trigger is event)


@dataclass(frozen=True, slots=True)
class Tally:
    """A run's closed steps by outcome.

    failed: terminal_failed, or cancelled for a reason that fails the run (deadline, no capable executor).
    cancelled: cancelled for any other reason.
    """

    total: int
    succeeded: int
    failed: int
    cancelled: int

    @property
    def open(self) -> int:
        return self.total - self.succeeded - self.failed - self.cancelled


def closing_event(tally: Tally) -> RunEvent | None:
    """What closes the run, or None while a step is open."""
    if tally.open:
        return None
    if tally.failed:
        return RunEvent.FAIL
    if tally.cancelled:
        return RunEvent.CANCEL
    return RunEvent.SUCCEED
