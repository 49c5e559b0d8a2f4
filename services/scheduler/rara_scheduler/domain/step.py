"""The states of a step run, and the only ways between them."""

from enum import StrEnum


class StepState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    RUNNING = "running"
    RETRYABLE_FAILED = "retryable_failed"
    SUCCEEDED = "succeeded"
    TERMINAL_FAILED = "terminal_failed"
    CANCELLED = "cancelled"


class StepEvent(StrEnum):
    LEASE = "lease"  # a lease was granted
    START = "start"  # the owner reported that execution began
    SUCCEED = "succeed"  # result and manifest are durable
    RETRY = "retry"  # the attempt ended, and another one is allowed
    FAIL = "fail"  # not retryable, or the budget is spent
    CANCEL = "cancel"  # cancel confirmed, or no executor can commit any more


class IllegalTransition(Exception):
    def __init__(self, state: StrEnum, event: StrEnum) -> None:
        super().__init__(f"{event} is not legal in {state}")
        self.state = state
        self.event = event


_S, _E = StepState, StepEvent

# The one copy of the table: guards, constraints, documentation and tests derive from it.
TRANSITIONS: dict[tuple[StepState, StepEvent], StepState] = {
    (_S.PENDING, _E.LEASE): _S.LEASED,
    (_S.PENDING, _E.CANCEL): _S.CANCELLED,
    (_S.LEASED, _E.START): _S.RUNNING,
    (_S.LEASED, _E.RETRY): _S.RETRYABLE_FAILED,
    (_S.LEASED, _E.FAIL): _S.TERMINAL_FAILED,
    (_S.LEASED, _E.CANCEL): _S.CANCELLED,
    (_S.RUNNING, _E.SUCCEED): _S.SUCCEEDED,
    (_S.RUNNING, _E.RETRY): _S.RETRYABLE_FAILED,
    (_S.RUNNING, _E.FAIL): _S.TERMINAL_FAILED,
    (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
    (_S.RETRYABLE_FAILED, _E.LEASE): _S.LEASED,
    (_S.RETRYABLE_FAILED, _E.CANCEL): _S.CANCELLED,
}

TERMINAL = frozenset(StepState) - {state for state, _ in TRANSITIONS}


def transition(state: StepState, event: StepEvent) -> StepState:
    """Return the state that follows, or raise IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(state, event) from None


def sources(event: StepEvent) -> frozenset[StepState]:
    """States in which the event is legal: what a guarded statement may match."""
    return frozenset(state for state, trigger in TRANSITIONS if trigger is event)
