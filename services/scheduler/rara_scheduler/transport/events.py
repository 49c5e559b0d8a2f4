"""Executors' events, from the wire into what the engine decides on; and what history keeps of them."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration
from rara.v1 import common_pb2, job_pb2

from rara_scheduler.domain import names
from rara_scheduler.domain.attempt import ArtifactFacts, Checkpoint, EventType, Outcome, Refusal, Report
from rara_scheduler.domain.errors import Code, Fault, StepError
from rara_scheduler.domain.payload import check_payload, clean_text, pointer
from rara_scheduler.domain.secrets import find_value, redact_json, redact_text, value_rule

MESSAGE_BYTES = 16 * 1024
PROGRESS_BYTES = 4 * 1024
STACK_BYTES = 64 * 1024
EFFECT_BYTES = 16 * 1024
_REASON_BYTES = 128
KEPT_BYTES = 4 * 1024  # larger payloads are left out of history; they live in result, checkpoint and artifact
MAX_RETRY_AFTER_S = 31 * 86_400.0
MAX_ARTIFACTS = 1000
_MAX_CHECKPOINT_ARTIFACTS = 64
_MAX_METRICS = 256
_MAX_DIGESTS = 2000  # of one list: consumed, derived_from
_MAX_ORIGINS = 16_000  # of all derived_from in a manifest: what the SDKs' bound on its bytes has room for

_CODE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,255}")


@dataclass(frozen=True, slots=True)
class PayloadLimits:
    max_payload_bytes: int
    max_inline_bytes: int
    max_attempt_bytes: int = 1 << 40


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def read_event(event: job_pb2.ProgressEvent, limits: PayloadLimits) -> Report | Refusal:
    """What an event says, or why it cannot be stored. The message is consumed: it becomes what history keeps."""
    sequence = event.sequence
    try:
        return _read(event, limits)
    except Fault as fault:
        code = fault.code if fault.code in _ANSWERS else Code.FIELD_INVALID
        return Refusal(sequence, code, fault.message)


_ANSWERS = frozenset(
    {
        Code.PAYLOAD_INVALID,
        Code.PAYLOAD_TOO_LARGE,
        Code.ARTIFACT_MISMATCH,
        Code.ARTIFACT_TOO_LARGE,
        Code.FIELD_INVALID,
    }
)


def _read(event: job_pb2.ProgressEvent, limits: PayloadLimits) -> Report:
    sequence = event.sequence
    if sequence < 1:
        raise Fault(Code.FIELD_INVALID, "sequence: must be 1 or more")
    which = event.WhichOneof("event")
    # Not stored, since rows beside it tell: the lease, the number, and who accepted, in whatever words.
    event.ClearField("lease")
    event.ClearField("sequence")
    match which:
        case "accepted":
            event.accepted.Clear()
            return Report(sequence, EventType.ACCEPTED, event.SerializeToString())
        case "running":
            return Report(sequence, EventType.RUNNING, event.SerializeToString())
        case "progress":
            checkpoint = _tidy_progress(event.progress, limits)
            secret = _secret_in("progress.checkpoint", None if checkpoint is None else checkpoint.data)
            return Report(
                sequence,
                EventType.PROGRESS,
                event.SerializeToString(),
                checkpoint=checkpoint,
                secret=secret,
            )
        case "effect":
            name = event.effect.name
            if not _NAME.fullmatch(name):
                raise Fault(Code.FIELD_INVALID, "effect.name: must have 1 to 255 printable characters")
            if rule := value_rule(name):
                raise Fault(Code.FIELD_INVALID, f"effect.name: holds a raw secret (rule {rule})")
            result = event.effect.result
            check_payload(result.data, result.media_type, "effect.result", EFFECT_BYTES)
            data = result.data
            _lean(result)
            return Report(
                sequence,
                EventType.EFFECT,
                event.SerializeToString(),
                effect=(name, data),
                secret=_secret_in("effect.result", data),
            )
        case "succeeded":
            outcome = _read_outcome(event.succeeded, limits)
            _lean(event.succeeded.output)
            _lean_manifest(event.succeeded)
            return Report(sequence, EventType.SUCCEEDED, event.SerializeToString(), outcome=outcome)
        case "failed":
            error, partial = _read_error(event.failed, limits)
            _lean(event.failed.details)
            _lean_manifest(event.failed)
            return Report(sequence, EventType.FAILED, event.SerializeToString(), error=error, partial=partial)
        case "cancelled":
            stopped = event.cancelled
            kept = _read_checkpoint(stopped, "cancelled", limits)
            reason = stopped.reason = clean_text(redact_text(stopped.reason), _REASON_BYTES)
            return Report(
                sequence,
                EventType.CANCELLED,
                event.SerializeToString(),
                reason=reason,
                checkpoint=kept,
                secret=_secret_in("cancelled.checkpoint", None if kept is None else kept.data),
            )
        case _:
            raise Fault(Code.FIELD_INVALID, "event: is not one this scheduler knows")


def _secret_in(path: str, data: bytes | None) -> str:
    """Where a raw secret stands in what later attempts get as it is; empty: nowhere."""
    found = None if data is None else find_value(data)
    if found is None:
        return ""
    return (
        f"{pointer(path, found.parts)}: holds a raw secret (rule {found.rule}); leave it out, or label the "
        f"definition {names.ALLOW_SECRETS}=true"
    )


def _checked(payload: common_pb2.Payload, path: str, limits: PayloadLimits) -> bytes:
    check_payload(payload.data, payload.media_type, path, limits.max_payload_bytes)
    return payload.data


def _lean(payload: common_pb2.Payload) -> None:
    if len(payload.data) > KEPT_BYTES:
        payload.omitted_bytes = len(payload.data)
        payload.ClearField("data")


def _lean_manifest(event: job_pb2.JobResult | job_pb2.JobError) -> None:
    if not event.HasField("manifest"):
        return
    for artifact in event.manifest.artifacts:
        artifact.ClearField("inline")
        _lean(artifact.metadata)


def _tidy_progress(progress: job_pb2.JobProgress, limits: PayloadLimits) -> Checkpoint | None:
    if progress.message:
        progress.message = clean_text(redact_text(progress.message), PROGRESS_BYTES)
    if progress.HasField("fraction"):
        fraction = progress.fraction
        if fraction != fraction:  # not a number
            progress.ClearField("fraction")
        else:
            progress.fraction = min(1.0, max(0.0, fraction))
    if len(progress.metrics) > _MAX_METRICS:
        raise Fault(Code.FIELD_INVALID, f"progress.metrics: at most {_MAX_METRICS}")
    if progress.metrics and (rule := value_rule("\n".join(progress.metrics))):
        raise Fault(Code.FIELD_INVALID, f"progress.metrics: a name holds a raw secret (rule {rule})")
    return _read_checkpoint(progress, "progress", limits)


def _read_checkpoint(
    event: job_pb2.JobProgress | job_pb2.JobCancelled, path: str, limits: PayloadLimits
) -> Checkpoint | None:
    if not event.HasField("checkpoint"):
        event.ClearField("checkpoint_artifacts")
        return None
    data = _checked(event.checkpoint, f"{path}.checkpoint", limits)
    path = f"{path}.checkpoint_artifacts"
    for index, artifact in enumerate(event.checkpoint_artifacts):
        if artifact.inline:
            # The next attempt's request has room for names, not for bytes.
            raise Fault(Code.FIELD_INVALID, f"{path}[{index}].inline: upload the bytes")
        artifact.ClearField("metadata")
        artifact.ClearField("derived_from")
    artifacts = _read_artifacts(event.checkpoint_artifacts, path, _MAX_CHECKPOINT_ARTIFACTS, limits)
    _lean(event.checkpoint)
    return Checkpoint(data, artifacts)


def _read_outcome(result: job_pb2.JobResult, limits: PayloadLimits) -> Outcome:
    output = None
    if result.HasField("output"):
        # A result is not refused for a secret in it: that would lose the work. It is redacted. What an attempt keeps
        # for the next one is refused: that one would go on from another value than was kept.
        output = redact_json(_checked(result.output, "succeeded.output", limits))
        result.output.data = output
    if not (result.HasField("manifest") or result.consumed):
        return Outcome(output=output, artifacts=(), consumed=())  # as most are
    artifacts = _read_manifest(result.manifest, limits)
    # What an output was made from was used, whether or not that is said as well: else a walk would end there.
    origins = {
        digest.sha256: digest.size_bytes for each in result.manifest.artifacts for digest in each.derived_from
    }
    consumed = dict(_digests(result.consumed, "succeeded.consumed"))
    return Outcome(output=output, artifacts=artifacts, consumed=tuple((origins | consumed).items()))


def _digest(digest: common_pb2.Digest, path: str) -> tuple[str, int]:
    if not _SHA256.fullmatch(digest.sha256):
        raise Fault(Code.FIELD_INVALID, f"{path}.sha256: must be 64 lower-case hex digits")
    if digest.size_bytes < 0:
        raise Fault(Code.FIELD_INVALID, f"{path}.size_bytes: must not be negative")
    return digest.sha256, digest.size_bytes


def _read_manifest(manifest: common_pb2.ArtifactManifest, limits: PayloadLimits) -> tuple[ArtifactFacts, ...]:
    return _read_artifacts(manifest.artifacts, "manifest.artifacts", MAX_ARTIFACTS, limits)


def _read_artifacts(
    given: Sequence[common_pb2.Artifact], path: str, most: int, limits: PayloadLimits
) -> tuple[ArtifactFacts, ...]:
    if len(given) > most:
        raise Fault(Code.FIELD_INVALID, f"{path}: there are {len(given)}, and at most {most} are taken")
    origins = sum(len(artifact.derived_from) for artifact in given)
    if origins > _MAX_ORIGINS:
        raise Fault(
            Code.FIELD_INVALID,
            f"{path}: they name {origins} digests in derived_from, and at most {_MAX_ORIGINS} are taken",
        )
    artifacts: dict[str, ArtifactFacts] = {}
    for index, artifact in enumerate(given):
        facts = _read_artifact(artifact, f"{path}[{index}]", limits)
        if facts.name in artifacts:
            raise Fault(Code.FIELD_INVALID, f"{path}[{index}].name: {facts.name} is there twice")
        artifacts[facts.name] = facts
    total_bytes = sum(facts.size_bytes for facts in artifacts.values())
    if total_bytes > limits.max_attempt_bytes:
        raise Fault(
            Code.ARTIFACT_TOO_LARGE,
            f"{path}: there are {total_bytes} bytes, and at most {limits.max_attempt_bytes} are taken",
        )
    return tuple(artifacts.values())


def _read_artifact(artifact: common_pb2.Artifact, path: str, limits: PayloadLimits) -> ArtifactFacts:
    for field, said in (
        ("name", names.ARTIFACT.refuses(artifact.name)),
        ("media_type", artifact.media_type and names.MEDIA_TYPE.refuses(artifact.media_type)),
        ("type", artifact.type and names.ARTIFACT_TYPE.refuses(artifact.type)),
    ):
        if said:
            raise Fault(Code.FIELD_INVALID, f"{path}.{field}: {said}")
    if rule := value_rule(artifact.name):
        raise Fault(Code.FIELD_INVALID, f"{path}.name: holds a raw secret (rule {rule})")
    sha256, size_bytes = _digest(artifact.digest, f"{path}.digest")
    inline = None
    if artifact.inline or size_bytes == 0:
        inline = artifact.inline
        if len(inline) > limits.max_inline_bytes:
            raise Fault(
                Code.FIELD_INVALID, f"{path}.inline: {len(inline)} bytes, at most {limits.max_inline_bytes}"
            )
        if len(inline) != size_bytes or hashlib.sha256(inline).hexdigest() != sha256:
            raise Fault(
                Code.ARTIFACT_MISMATCH, f"{path}.inline: the bytes do not have the digest or size named"
            )
    metadata = None
    if artifact.HasField("metadata"):
        metadata = redact_json(_checked(artifact.metadata, f"{path}.metadata", limits))
        artifact.metadata.data = metadata
    return ArtifactFacts(
        name=artifact.name,
        sha256=sha256,
        size_bytes=size_bytes,
        media_type=artifact.media_type or "application/octet-stream",
        type=artifact.type or "blob",
        inline=inline,
        metadata=metadata,
        derived_from=tuple(dict(_digests(artifact.derived_from, f"{path}.derived_from"))),
    )


def _digests(digests: Sequence[common_pb2.Digest], path: str) -> tuple[tuple[str, int], ...]:
    if len(digests) > _MAX_DIGESTS:
        raise Fault(
            Code.FIELD_INVALID, f"{path}: there are {len(digests)}, and at most {_MAX_DIGESTS} are taken"
        )
    return tuple(_digest(digest, f"{path}[{i}]") for i, digest in enumerate(digests))


def _read_error(
    error: job_pb2.JobError, limits: PayloadLimits
) -> tuple[StepError, tuple[ArtifactFacts, ...]]:
    code = error.code
    message = error.message
    if len(code) > 63 or not _CODE.fullmatch(code):
        message = f"{clean_text(code, 128)!r} is no code: {message}"
        code = error.code = Code.HANDLER_FAILED
    error.message = clean_text(redact_text(message), MESSAGE_BYTES)
    error.stack_trace = clean_text(redact_text(error.stack_trace), STACK_BYTES)
    details = None
    if error.HasField("details"):
        try:
            details = redact_json(_checked(error.details, "failed.details", limits)).decode()
            error.details.data = details.encode()
        except Fault as fault:
            # An error can always be reported: bad details are named, not a reason to refuse it.
            error.ClearField("details")
            error.message = clean_text(f"{error.message} (details left out: {fault.code})", MESSAGE_BYTES)
    runner_exit: dict[str, int | bool] = {}
    if error.HasField("runner_exit"):
        ended = error.runner_exit
        for name in ("exit_code", "signal", "peak_memory_bytes"):
            if ended.HasField(name):
                runner_exit[name] = getattr(ended, name)
        if ended.out_of_memory:
            runner_exit["out_of_memory"] = True
    stored = StepError(
        code=code,
        message=error.message,
        retryable=error.retryable if error.HasField("retryable") else None,
        details=details,
        retry_after_s=min(MAX_RETRY_AFTER_S, max(0.0, seconds(error.retry_after)))
        if error.HasField("retry_after")
        else None,
        stack_trace=error.stack_trace,
        runner_exit=runner_exit,
    )
    return stored, _read_manifest(error.manifest, limits)
