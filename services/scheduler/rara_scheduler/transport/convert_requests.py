"""Requests of the API as values of the domain, every field checked."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Final, TypeVar

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, workflow_pb2

from rara_scheduler.domain import names
from rara_scheduler.domain.definition import MAX_GRACE_S, check_labels, read_duration
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.payload import check_payload, clean_text
from rara_scheduler.domain.secrets import redact_text
from rara_scheduler.domain.start_command import RunArtifact, StartCommand, check_key, clean_trace
from rara_scheduler.domain.views import ExecutorFilter, RunFilter, StepFilter
from rara_scheduler.domain.violations import Violations
from rara_scheduler.transport.convert import EXECUTOR_STATES, RUN_STATES, STEP_STATES

MAX_ARTIFACTS: Final = 256
MAX_INLINE_TOTAL_BYTES: Final = 1024 * 1024
MAX_STEP_NAMES: Final = 10_000
MAX_MESSAGE_BYTES: Final = 4096
MAX_SIZE_BYTES: Final = 2**62

_State = TypeVar("_State")


def _finish(violations: Violations, subject: str) -> None:
    if violations:
        raise violations.fault(Code.FIELD_INVALID, subject)


def _check_definition(name: str, version: int, violations: Violations) -> None:
    said = names.DEFINITION.refuses(name)
    if said is not None:
        violations.add("definition", said)
    if version < 0:
        violations.add("definition_version", "must not be negative; 0 takes the newest")


def start_command(request: workflow_pb2.StartRunRequest, max_payload_bytes: int) -> StartCommand:
    """Raises FIELD_INVALID listing the fields, or the input's own PAYLOAD_INVALID or PAYLOAD_TOO_LARGE."""
    violations = Violations()
    _check_definition(request.definition, request.definition_version, violations)
    key = check_key(request.idempotency_key, violations)
    check_labels(request.labels, "labels", violations)
    timeout_s = read_duration(request, "run_timeout", "run_timeout", violations)
    artifacts = _artifacts(request.input_artifacts, max_payload_bytes, violations)
    _finish(violations, "the run cannot be started")
    traceparent, tracestate = clean_trace(request.trace.traceparent, request.trace.tracestate)
    return StartCommand(
        definition=request.definition,
        version=request.definition_version,
        idempotency_key=key,
        input=_payload(request, "input", "input", max_payload_bytes),
        artifacts=artifacts,
        run_timeout_s=timeout_s,
        labels=dict(request.labels),
        traceparent=traceparent,
        tracestate=tracestate,
    )


def _payload(message: Message, name: str, path: str, max_bytes: int) -> bytes | None:
    if not message.HasField(name):
        return None
    payload: common_pb2.Payload = getattr(message, name)
    if payload.omitted_bytes and not payload.data:
        violations = Violations()
        violations.add(path, "was left out of a list: fetch the whole value first")
        raise violations.fault(Code.PAYLOAD_INVALID, "the value is not there")
    check_payload(payload.data, payload.media_type, path, max_bytes)
    return payload.data


def _artifacts(
    given: Iterable[common_pb2.Artifact], max_payload_bytes: int, violations: Violations
) -> tuple[RunArtifact, ...]:
    found: list[RunArtifact] = []
    seen: set[str] = set()
    inline_bytes = 0
    for index, artifact in enumerate(given):
        path = f"input_artifacts[{index}]"
        if index == MAX_ARTIFACTS:
            violations.add("input_artifacts", f"must not be more than {MAX_ARTIFACTS}")
            break
        checks = [
            (f"{path}.name", names.ARTIFACT.refuses(artifact.name)),
            (f"{path}.digest.sha256", names.SHA256.refuses(artifact.digest.sha256)),
            (f"{path}.media_type", artifact.media_type and names.MEDIA_TYPE.refuses(artifact.media_type)),
            (f"{path}.type", artifact.type and names.ARTIFACT_TYPE.refuses(artifact.type)),
        ]
        for at, said in checks:
            if said:
                violations.add(at, said)
        if not 0 <= artifact.digest.size_bytes <= MAX_SIZE_BYTES:
            violations.add(f"{path}.digest.size_bytes", "must be 0 or more")
        if artifact.name in seen:
            violations.add(f"{path}.name", "is given twice")
        seen.add(artifact.name)
        inline_bytes += len(artifact.inline)
        metadata: bytes | None = None
        try:
            metadata = _payload(artifact, "metadata", f"{path}.metadata", max_payload_bytes)
        except Fault as fault:
            violations.add_fault(fault)
        # proto3 cannot tell empty bytes from none: nothing is what zero bytes are.
        inline = artifact.inline if artifact.inline or not artifact.digest.size_bytes else None
        found.append(
            RunArtifact(
                name=artifact.name,
                sha256=artifact.digest.sha256,
                size_bytes=artifact.digest.size_bytes,
                media_type=artifact.media_type or "application/octet-stream",
                type=artifact.type or "blob",
                inline=inline,
                metadata=metadata,
            )
        )
    if inline_bytes > MAX_INLINE_TOTAL_BYTES:
        violations.add(
            "input_artifacts", f"hold {inline_bytes} inline bytes, over the limit of {MAX_INLINE_TOTAL_BYTES}"
        )
    return tuple(found)


def retry_key(request: workflow_pb2.RetryRunRequest) -> str | None:
    """The key of a retry, its step names counted. Raises FIELD_INVALID."""
    violations = Violations()
    key = check_key(request.idempotency_key, violations)
    if len(request.step_names) > MAX_STEP_NAMES:
        violations.add("step_names", f"must not be more than {MAX_STEP_NAMES}")
    _finish(violations, "the run cannot be retried so")
    return key


def cancel_terms(
    request: workflow_pb2.CancelRunRequest | workflow_pb2.CancelRunsRequest,
) -> tuple[str, float | None]:
    """Message and grace in seconds of a cancel; the text is made storable, redacted and cut. Raises FIELD_INVALID."""
    violations = Violations()
    grace_s = read_duration(request, "grace", "grace", violations, least_s=0.0, most_s=MAX_GRACE_S)
    _finish(violations, "the run cannot be cancelled so")
    return clean_text(redact_text(request.message), MAX_MESSAGE_BYTES), grace_s


def drain_bound(request: workflow_pb2.DrainExecutorRequest) -> float | None:
    violations = Violations()
    within_s = read_duration(request, "finish_within", "finish_within", violations, least_s=0.0)
    _finish(violations, "the executor cannot be drained so")
    return within_s


def _states(wanted: Iterable[int], known: Mapping[_State, int], violations: Violations) -> tuple[_State, ...]:
    by_number = {number: state for state, number in known.items()}
    found: list[_State] = []
    for index, number in enumerate(wanted):
        if number not in by_number:
            violations.add(f"states[{index}]", "is not a state that this scheduler knows")
        elif by_number[number] not in found:
            found.append(by_number[number])
    return tuple(found)


def _instant(message: Message, name: str, violations: Violations) -> datetime | None:
    if not message.HasField(name):
        return None
    value: Timestamp = getattr(message, name)
    try:
        return value.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        violations.add(name, "is not a valid timestamp")
        return None


def _kind(kind: str, violations: Violations) -> None:
    said = names.KIND.refuses(kind) if kind else None
    if said is not None:
        violations.add("kind", said)


def run_filter(request: workflow_pb2.ListRunsRequest) -> RunFilter:
    violations = Violations()
    if request.definition:
        _check_definition(request.definition, 0, violations)
    check_labels(request.labels, "labels", violations)
    made = RunFilter(
        definition=request.definition,
        states=_states(request.states, RUN_STATES, violations),
        labels=dict(request.labels),
        created_from=_instant(request, "created_from", violations),
        created_before=_instant(request, "created_before", violations),
    )
    _finish(violations, "the filter cannot be taken")
    return made


def step_filter(request: workflow_pb2.ListStepRunsRequest, workflow_run_id: str | None) -> StepFilter:
    violations = Violations()
    _kind(request.kind, violations)
    made = StepFilter(workflow_run_id, _states(request.states, STEP_STATES, violations), request.kind)
    _finish(violations, "the filter cannot be taken")
    return made


def executor_filter(request: workflow_pb2.ListExecutorsRequest) -> ExecutorFilter:
    violations = Violations()
    _kind(request.kind, violations)
    made = ExecutorFilter(_states(request.states, EXECUTOR_STATES, violations), request.kind)
    _finish(violations, "the filter cannot be taken")
    return made


def definition_name(name: str, *, optional: bool = False) -> str:
    """The name in a request to read a definition. Raises FIELD_INVALID."""
    violations = Violations()
    if name or not optional:
        _check_definition(name, 0, violations)
    _finish(violations, "the definition cannot be read")
    return name
