"""What reports about one leased attempt mean: which are stored, which refused, and how the attempt goes on or ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum
from typing import TypeAlias

from rara_scheduler.domain.errors import Code, StepError
from rara_scheduler.domain.retry import Ending, RetryPolicy, judge
from rara_scheduler.domain.step import StepEvent, StepState, transition

# Classes of which each step makes some are not frozen, though hardly anybody changes them: to set each field of a
# frozen one takes three times as long.

MAX_MISSING = 1000  # numbers named in one acknowledgement
MAX_JUMP = 200_000  # numbers that one event may skip: twice the largest event_window


class EventType(StrEnum):
    ACCEPTED = "accepted"
    RUNNING = "running"
    PROGRESS = "progress"
    EFFECT = "effect"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_EVENTS = frozenset({EventType.SUCCEEDED, EventType.FAILED, EventType.CANCELLED})
_BEFORE_RUNNING = frozenset(
    {EventType.ACCEPTED, EventType.FAILED, EventType.CANCELLED}
)  # may come without it


@dataclass(frozen=True, slots=True)
class ArtifactFacts:
    """One artifact of a manifest. inline: its bytes, already checked against the digest; None: in the blob store."""

    name: str
    sha256: str
    size_bytes: int
    media_type: str
    type: str
    inline: bytes | None = None
    metadata: bytes | None = None
    derived_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a later attempt goes on from. artifacts: blobs that it needs."""

    data: bytes
    artifacts: tuple[ArtifactFacts, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What a `succeeded` event brings. consumed: (sha256, size_bytes) of what was really used."""

    output: bytes | None = None
    artifacts: tuple[ArtifactFacts, ...] = ()
    consumed: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Report:
    """One event of an executor. body: the event as history keeps it, serialised."""

    sequence: int
    type: EventType
    body: bytes
    outcome: Outcome | None = None  # succeeded
    error: StepError | None = None  # failed
    partial: tuple[ArtifactFacts, ...] = ()  # failed: artifacts kept with the attempt
    reason: str = ""  # cancelled
    checkpoint: Checkpoint | None = None  # progress, cancelled
    effect: tuple[str, bytes] | None = None  # effect
    secret: str = ""  # where what a later attempt would be given holds a raw secret, and by which rule

    @property
    def artifacts(self) -> tuple[ArtifactFacts, ...]:
        """All that the event names."""
        kept = self.checkpoint.artifacts if self.checkpoint else ()
        return kept + (self.outcome.artifacts if self.outcome else self.partial)


class Guard(StrEnum):
    """What must still hold, under the commit's locks, for an ending that no event brought."""

    NONE = "none"
    EXPIRED = "expired"
    UNACCEPTED = "unaccepted"  # not accepted in time
    NOT_RUNNING = "not_running"  # a rejection: legal until `running`


@dataclass(frozen=True, slots=True)
class AttemptEnding:
    """The scheduler's own word, or a rejection: the attempt is over."""

    error: StepError
    guard: Guard = Guard.NONE


@dataclass(frozen=True, slots=True)
class CancelReceipt:
    """The executor has received the request to stop."""


Item: TypeAlias = Report | AttemptEnding | CancelReceipt


@dataclass(slots=True, unsafe_hash=True)  # the protocol model keeps its states in sets
class LeaseFacts:
    """A lease row, as it stays while its run does. cancel_reason: the run's or the lease's own; None: nobody asked."""

    step_run_id: str
    workflow_run_id: str
    lease_token: int
    attempt: int
    failures: int
    free_endings: int
    executor_id: str
    granted_on: date
    accepted: bool
    started: bool
    last_sequence: int
    gaps: int
    cancel_reason: str | None
    expired: bool
    accept_overdue: bool
    step_name: str
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Not stored, and why. digests: (sha256, size_bytes) of the blobs at fault."""

    sequence: int
    code: Code
    message: str
    digests: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True)
class Closing:
    """How the attempt ended. to: the state that its step enters."""

    to: StepState
    reason: str
    at_once: bool  # retryable_failed alone: leasable now
    spent: bool
    failures: int
    free_endings: int
    delay_s: float
    error: StepError | None
    confirmed: bool  # by the executor's own word
    outcome: Outcome | None = None
    partial: tuple[ArtifactFacts, ...] = ()


@dataclass(slots=True)
class Decision:
    """What to write for one lease. `missing` lists numbers that a new gap skipped, to be asked for once.

    kind: of its step, for those who count.
    """

    lease: LeaseFacts
    stored: list[Report] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    accept: bool = False
    start: bool = False
    moved: bool = False
    receipt: bool = False
    last_sequence: int = 0
    gaps: int = 0
    missing: list[int] = field(default_factory=list)
    closing: Closing | None = None
    kind: str = ""

    @property
    def changed(self) -> bool:
        return bool(self.stored) or self.closing is not None or self.receipt


def missing_blobs(
    artifacts: Sequence[ArtifactFacts], blobs: Mapping[str, int]
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]:
    """Of a manifest, what is not in the store, and what is there with another size. blobs: size by sha256."""
    missing = []
    mismatched = []
    for artifact in artifacts:
        if artifact.inline is not None:
            continue
        size = blobs.get(artifact.sha256)
        if size is None:
            missing.append((artifact.sha256, artifact.size_bytes))
        elif size != artifact.size_bytes:
            mismatched.append((artifact.sha256, artifact.size_bytes))
    return tuple(missing), tuple(mismatched)


def decide(
    lease: LeaseFacts,
    items: Sequence[Item],
    policy: RetryPolicy,
    *,
    known: frozenset[int],
    blobs: Mapping[str, int],
    jitter: float,
    allows_secrets: bool = False,
) -> Decision:
    """Fold the items, in the order given, into one decision.

    known: which of the events' numbers up to `lease.last_sequence` are stored already.
    blobs: size by sha256 of the blobs that exist, at least of those that the items name.
    jitter: a draw from [0, 1). allows_secrets: the definition says that its payloads may hold raw secrets.
    """
    decision = Decision(lease, last_sequence=lease.last_sequence, gaps=lease.gaps)
    state = StepState.RUNNING if lease.started else StepState.LEASED
    seen = set(known)
    for item in items:
        if decision.closing is not None:
            if isinstance(item, Report) and item.sequence not in seen:
                decision.refused.append(Refusal(item.sequence, Code.LEASE_LOST, "the attempt has ended"))
            continue
        if isinstance(item, Report):
            if item.sequence in seen:
                continue
            refusal = _refuse(item, decision.last_sequence, blobs, allows_secrets=allows_secrets)
            if refusal is not None:
                decision.refused.append(refusal)
                continue
            seen.add(item.sequence)
            _count(decision, item.sequence)
            decision.stored.append(item)
            decision.accept = True  # any event of the owner shows that it took the lease up
            if item.type not in _BEFORE_RUNNING:
                # What overtakes `running` is applied through it.
                if state is StepState.LEASED:
                    state = transition(state, StepEvent.START)
                decision.start = decision.moved = True
            if item.type in TERMINAL_EVENTS:
                _apply_terminal(decision, state, item, policy, jitter)
        elif isinstance(item, AttemptEnding):
            if _holds(item.guard, lease, decision):
                _end(decision, state, item.error, policy, jitter, confirmed=False)
        else:
            decision.receipt = True
    return decision


def overrule_retry(decision: Decision, cancel_reason: str) -> bool:
    """Close as cancelled what was to be tried again: its run is cancelled by another step of the same batch.

    False: the decision is no retry, and stays as it is.
    """
    closing = decision.closing
    if closing is None or closing.to is not StepState.RETRYABLE_FAILED:
        return False
    state = StepState.RUNNING if decision.lease.started or decision.start else StepState.LEASED
    decision.closing = replace(
        closing,
        to=transition(state, StepEvent.CANCEL),
        reason=cancel_reason,
        at_once=False,
        spent=False,
        failures=decision.lease.failures,
        free_endings=decision.lease.free_endings,
        delay_s=0.0,
    )
    return True


def _refuse(
    report: Report, last_sequence: int, blobs: Mapping[str, int], *, allows_secrets: bool
) -> Refusal | None:
    if report.sequence > last_sequence + MAX_JUMP:
        return Refusal(
            report.sequence,
            Code.FIELD_INVALID,
            f"sequence: {report.sequence} is more than {MAX_JUMP} beyond {last_sequence}, the newest that is stored",
        )
    if report.secret and not allows_secrets:
        # Redacted it would be another value, and the next attempt would go on with that.
        return Refusal(report.sequence, Code.SECRET_IN_PAYLOAD, report.secret)
    if not report.artifacts:
        return None
    missing, mismatched = missing_blobs(report.artifacts, blobs)
    if mismatched:
        return Refusal(
            report.sequence,
            Code.ARTIFACT_MISMATCH,
            "stored with another size than is named",
            mismatched,
        )
    if missing:
        return Refusal(report.sequence, Code.BLOBS_MISSING, "upload the blobs, then send again", missing)
    return None


def _count(decision: Decision, sequence: int) -> None:
    """Move the newest number and the count of gaps. A gap is recorded and asked for, never waited for."""
    if sequence > decision.last_sequence:
        skipped = sequence - decision.last_sequence - 1
        if skipped:
            room = MAX_MISSING - len(decision.missing)
            decision.missing.extend(range(decision.last_sequence + 1, sequence)[:room])
        decision.gaps += skipped
        decision.last_sequence = sequence
    else:
        decision.gaps = max(0, decision.gaps - 1)
        if sequence in decision.missing:
            decision.missing.remove(sequence)


def _holds(guard: Guard, lease: LeaseFacts, decision: Decision) -> bool:
    accepted = lease.accepted or decision.accept
    started = lease.started or decision.start
    match guard:
        case Guard.NONE:
            return True
        case Guard.EXPIRED:
            return lease.expired and not decision.stored
        case Guard.UNACCEPTED:
            return lease.accept_overdue and not accepted
        case Guard.NOT_RUNNING:
            return not started


def _apply_terminal(
    decision: Decision, state: StepState, report: Report, policy: RetryPolicy, jitter: float
) -> None:
    match report.type:
        case EventType.SUCCEEDED:
            lease = decision.lease
            decision.closing = Closing(
                to=transition(state, StepEvent.SUCCEED),
                reason="",
                at_once=False,
                spent=False,
                failures=lease.failures,
                free_endings=lease.free_endings,
                delay_s=0.0,
                error=None,
                confirmed=True,
                outcome=report.outcome,
            )
        case EventType.FAILED:
            error = report.error or StepError(Code.HANDLER_FAILED)
            _end(decision, state, error, policy, jitter, confirmed=True, partial=report.partial)
        case EventType.CANCELLED:
            _end(
                decision,
                state,
                _cancelled_error(report.reason, decision.lease),
                policy,
                jitter,
                confirmed=True,
            )
        case EventType.ACCEPTED | EventType.RUNNING | EventType.PROGRESS | EventType.EFFECT:
            pass


# Reasons that an executor may end an attempt with by itself, its own timers being the second line.
_OWN_REASONS = frozenset(
    {Code.EXECUTOR_SHUTDOWN, Code.ATTEMPT_TIMEOUT, Code.PROGRESS_TIMEOUT, Code.DEADLINE_EXCEEDED}
)


def _cancelled_error(reason: str, lease: LeaseFacts) -> StepError:
    if reason in _OWN_REASONS:
        return StepError(reason, retryable=None)
    if lease.cancel_reason is not None:
        return StepError(lease.cancel_reason)
    return StepError(
        Code.HANDLER_FAILED, f"the executor reported {reason or 'CANCELLED'} although nobody had asked"
    )


def _end(
    decision: Decision,
    state: StepState,
    error: StepError,
    policy: RetryPolicy,
    jitter: float,
    *,
    confirmed: bool,
    partial: tuple[ArtifactFacts, ...] = (),
) -> None:
    lease = decision.lease
    cancel_reason = lease.cancel_reason
    if cancel_reason is None and error.code == Code.DEADLINE_EXCEEDED:
        cancel_reason = Code.DEADLINE_EXCEEDED
    verdict = judge(
        error,
        policy,
        failures=lease.failures,
        free_endings=lease.free_endings,
        cancel_reason=cancel_reason,
        jitter=jitter,
    )
    match verdict.ending:
        case Ending.AVAILABLE | Ending.BACKOFF:
            to = transition(state, StepEvent.RETRY)
        case Ending.FAILED:
            to = transition(state, StepEvent.FAIL)
        case Ending.CANCELLED:
            to = transition(state, StepEvent.CANCEL)
    decision.closing = Closing(
        to=to,
        reason=verdict.reason,
        at_once=verdict.ending is Ending.AVAILABLE,
        spent=verdict.spent,
        failures=verdict.failures,
        free_endings=verdict.free_endings,
        delay_s=verdict.delay_s,
        error=error,
        confirmed=confirmed,
        partial=partial,
    )
