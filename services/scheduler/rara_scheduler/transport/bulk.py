"""Requests that act by filter as values of the domain, and their answers."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from google.protobuf.message import Message
from rara.v1 import workflow_pb2

from rara_scheduler.domain import names
from rara_scheduler.domain.bulk import MAX_REASONS, Outcome, RunSelection, StepSelection
from rara_scheduler.domain.definition import check_labels
from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.domain.ids import step_id
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.violations import Violations
from rara_scheduler.store.bulk import Place
from rara_scheduler.transport.convert import RUN_STATES
from rara_scheduler.transport.page_token import MAX_PAGE_SIZE, decode_token, encode_token, invalid_token

_DEFAULT_PAGE = 100
_RUN_BOUNDS = ("created_from", "created_before", "ended_from", "ended_before")
_OF_ENDED_RUNS = ("reasons", "kind", "ended_from", "ended_before")

Request = workflow_pb2.RetryRunsRequest | workflow_pb2.CancelRunsRequest | workflow_pb2.RequeueStepsRequest


def run_selection(wanted: workflow_pb2.RunFilter, states: Sequence[RunState]) -> RunSelection:
    """states: those that the call can act on. Raises FIELD_INVALID."""
    violations = Violations()
    _check(wanted, violations)
    by_number = {RUN_STATES[state]: state for state in states}
    found: list[RunState] = []
    for index, number in enumerate(wanted.states):
        if number not in by_number:
            allowed = ", ".join(states)
            violations.add(f"filter.states[{index}]", f"is not a state that this call acts on: {allowed}")
        elif by_number[number] not in found:
            found.append(by_number[number])
    if RunState.FAILED not in states:
        for name in _OF_ENDED_RUNS:
            if wanted.HasField(name) if name in _RUN_BOUNDS else getattr(wanted, name):  # type: ignore[arg-type]
                violations.add(f"filter.{name}", "cannot be asked of runs that have not ended")
    bounds = {name: _instant(wanted, name, f"filter.{name}", violations) for name in _RUN_BOUNDS}
    _finish(violations)
    return RunSelection(
        definition=wanted.definition,
        version=wanted.definition_version,
        states=tuple(found),
        reasons=tuple(wanted.reasons),
        kind=wanted.kind,
        labels=dict(wanted.labels),
        **bounds,
    )


def step_selection(wanted: workflow_pb2.WaitingStepFilter) -> StepSelection:
    """Raises FIELD_INVALID."""
    violations = Violations()
    _check(wanted, violations)
    _finish(violations)
    return StepSelection(
        wanted.definition,
        wanted.definition_version,
        wanted.kind,
        tuple(wanted.reasons),
        dict(wanted.labels),
    )


def as_of(request: Request) -> datetime | None:
    """None: none is given. Raises FIELD_INVALID."""
    violations = Violations()
    found = _instant(request, "as_of", "as_of", violations)
    _finish(violations)
    return found


def bulk_size(asked: int) -> int:
    if asked < 0:
        raise field_invalid("page_size", "must not be negative")
    return min(asked or _DEFAULT_PAGE, MAX_PAGE_SIZE)


def place_of(request: Request) -> Place | None:
    """Where to go on; None: from the first. Raises PAGE_TOKEN_INVALID."""
    position = decode_token(request, request.page_token, 2)
    if position is None:
        return None
    try:
        at = datetime.fromisoformat(position[0]) if position[0] else None
        return at, step_id(position[1])
    except (ValueError, Fault):
        raise invalid_token() from None


def token_of(request: Request, end: Place | None) -> str:
    if end is None:
        return ""
    at, id_ = end
    return encode_token(request, ("" if at is None else at.isoformat(), id_))


def outcomes(done: Iterable[Outcome]) -> list[workflow_pb2.BulkOutcome]:
    return [
        workflow_pb2.BulkOutcome(id=one.id, new_workflow_run_id=one.new_run_id, code=one.code) for one in done
    ]


def state_counts(counts: Mapping[RunState, int]) -> list[workflow_pb2.RunStateCount]:
    return [workflow_pb2.RunStateCount(state=RUN_STATES[state], count=n) for state, n in counts.items() if n]


def _check(wanted: workflow_pb2.RunFilter | workflow_pb2.WaitingStepFilter, violations: Violations) -> None:
    """What both filters have."""
    checks = [
        ("filter.definition", wanted.definition and names.DEFINITION.refuses(wanted.definition)),
        ("filter.kind", wanted.kind and names.KIND.refuses(wanted.kind)),
        *(
            (f"filter.reasons[{index}]", names.ERROR_CODE.refuses(reason))
            for index, reason in enumerate(wanted.reasons[: MAX_REASONS + 1])
        ),
    ]
    for at, said in checks:
        if said:
            violations.add(at, said)
    if len(wanted.reasons) > MAX_REASONS:
        violations.add("filter.reasons", f"must not be more than {MAX_REASONS}")
    if wanted.definition_version < 0:
        violations.add("filter.definition_version", "must not be negative; 0 takes any")
    elif wanted.definition_version and not wanted.definition:
        violations.add("filter.definition_version", "needs a definition")
    check_labels(wanted.labels, "filter.labels", violations)


def _instant(message: Message, name: str, path: str, violations: Violations) -> datetime | None:
    if not message.HasField(name):
        return None
    try:
        found: datetime = getattr(message, name).ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        violations.add(path, "is not a valid timestamp")
        return None
    return found


def _finish(violations: Violations) -> None:
    if violations:
        raise violations.fault(Code.FIELD_INVALID, "the filter cannot be taken")
