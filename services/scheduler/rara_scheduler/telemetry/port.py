"""What the parts of the scheduler tell about their work; here nobody listens."""

# ruff: noqa: ARG002
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Protocol

from google.protobuf.message import Message

from rara_scheduler.domain.attempt import Decision


@dataclass(frozen=True, slots=True)
class Queues:
    """What waits in the database. By kind: counts, and seconds since the oldest could have been leased."""

    ready: Mapping[str, int] = field(default_factory=dict)
    oldest_ready_s: Mapping[str, float] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    oldest_transaction_s: float = 0.0
    held: int = 0  # steps that stand aside, since their definition is paused
    pauses: Mapping[str, int] = field(default_factory=dict)  # by sort: kind or definition


@dataclass(frozen=True, slots=True)
class Outlook:
    """This scheduler as it is now. queues: None while the database does not answer."""

    queues: Queues | None
    in_flight: Mapping[str, int]
    sessions: int
    commit_queue: int
    loop_lag_s: float


class Metrics:
    """Ignores all it is told. Callers leave out even a look at the clock while `is_on` is false.

    kinds are as definitions spell them: a listener folds what are too many.
    """

    is_on = False

    def dispatched(self, waited: Iterable[tuple[str, float]]) -> None:
        """Jobs were sent: the kind of each, and seconds since its step was ready."""

    def renewed(self, leases: int) -> None:
        """A heartbeat's leases were renewed."""

    def committed(self, events: int, took_s: float) -> None:
        """One transaction of events."""

    def attempts_ended(self, decisions: Iterable[Decision]) -> None:
        """A commit decided so; decisions that end nothing are among them."""

    def steps_cancelled(self, count: int) -> None:
        """Steps that nobody held were closed."""

    def run_started(self) -> None:
        """A run or a retry was stored."""

    def runs_ended(self, outcomes: Iterable[str]) -> None:
        """Runs closed."""

    def waited_for_connection(self, lane: str, took_s: float) -> None:
        """A connection of a pool was taken."""

    def pool_timed_out(self, lane: str) -> None:
        """None was free in time."""

    def looks(self, outlook: Outlook) -> None:
        """As things are now, until told again."""

    def call_ended(self, method: str, code: str, took_s: float | None) -> None:
        """A gRPC call ended. took_s: None for one that streams."""

    def trace_dropped(self, attempts: int) -> None:
        """Too many attempts ended at once to write spans of all."""

    def transferred(self, direction: str, size_bytes: int) -> None:
        """Bytes of an artifact passed. direction: up, down."""


SILENT = Metrics()


class CallSpan:
    """The span of a call that is being served."""

    def failed(self, code: str) -> None:
        """The call ends with this gRPC code."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A job that was handed to its session. granted_ns, sent_ns: epoch nanoseconds, of this scheduler's clock."""

    traceparent: str
    tracestate: str
    lease_token: int
    kind: str
    granting_ns: int
    granted_ns: int
    sent_ns: int


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """An attempt whose span is still to be made. began_ns, ended_ns: of the commit, epoch nanoseconds."""

    step_run_id: str
    lease_token: int
    attempt: int
    granted_on: date
    outcome: str
    code: str
    began_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class AttemptFacts:
    """What the database knows of it. The instants are the database's."""

    traceparent: str
    tracestate: str
    workflow_run_id: str
    definition: str
    step_name: str
    kind: str
    executor_id: str
    granted_at: datetime
    accepted_at: datetime | None
    started_at: datetime | None
    ended_at: datetime


class Tracing:
    """Makes no spans, and hands on what it is given.

    A trace context is a pair of `traceparent` and `tracestate`; empty: none.
    """

    is_on = False

    def call(
        self, method: str, request: Message, metadata: Iterable[tuple[str, str | bytes]]
    ) -> AbstractContextManager[CallSpan]:
        """Hold the span of a call that is served in this context."""
        return nullcontext(_NO_SPAN)

    def run_context(self, traceparent: str, tracestate: str) -> tuple[str, str]:
        """What to store with a new run, of which the caller has said this."""
        return traceparent, tracestate

    def retries(self, traceparent: str, tracestate: str) -> tuple[str, str]:
        """What to store with the retry of a run that has this stored."""
        return traceparent, tracestate

    def attempt_context(self, traceparent: str, tracestate: str, lease_token: int) -> tuple[str, str]:
        """What the executor of an attempt is told; the run has this stored."""
        return traceparent, tracestate

    def sent(self, jobs: Iterable[Sent]) -> None:
        """Jobs went out."""

    def attempts_ended(self, decisions: Iterable[Decision], began_ns: int, ended_ns: int) -> None:
        """A commit decided so, between these epoch nanoseconds; decisions that end nothing are among them."""


class SpanMaker(Protocol):
    """Makes the span of an attempt once it is over. ended: those that wait for it, in bounded number."""

    ended: deque[EndedAttempt]

    def attempt_span(self, ended: EndedAttempt, facts: AttemptFacts) -> None: ...


_NO_SPAN = CallSpan()
UNTRACED = Tracing()
