"""Granted leases as JobRequests, each built alone: what is wrong with one step touches that step only."""

from collections.abc import Mapping
from functools import cache

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, job_pb2

from rara_scheduler.domain.attempt import ArtifactFacts
from rara_scheduler.domain.definition import StepSpec
from rara_scheduler.domain.errors import Code, Fault, StepError
from rara_scheduler.domain.payload import check_payload
from rara_scheduler.domain.template import TemplateError, resolve_bytes
from rara_scheduler.store.leases import Grant, Materials

_EXTRAS_BYTES = 1024 * 1024  # everything beside input and checkpoint
_MAX_EFFECTS = 64


class UnfitJob(Exception):
    """The step cannot be put into a JobRequest; `error` closes it."""

    def __init__(self, error: StepError) -> None:
        super().__init__(error.message)
        self.error = error


def duration(value_s: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(value_s * 1e9))
    return message


@cache
def _lease_duration(lease_s: float) -> Duration:
    """Copied into each job."""
    return duration(lease_s)


def artifact_message(facts: ArtifactFacts) -> common_pb2.Artifact:
    message = common_pb2.Artifact(
        name=facts.name,
        digest=common_pb2.Digest(sha256=facts.sha256, size_bytes=facts.size_bytes),
        media_type=facts.media_type,
        type=facts.type,
        inline=facts.inline or b"",
    )
    if facts.metadata is not None:
        message.metadata.data = facts.metadata
    return message


def build_job(
    grant: Grant,
    spec: StepSpec,
    materials: Materials,
    *,
    executor_kind: str,
    kind_version: str,
    lease_s: float,
    max_payload_bytes: int,
    trace: tuple[str, str] = ("", ""),
) -> job_pb2.JobRequest:
    """The request for one granted step. Raises UnfitJob when its input or artifacts do not come together."""
    missing = materials.missing.get(grant.step_run_id)
    if missing is not None:
        raise UnfitJob(StepError(Code.ARTIFACT_MISSING, str(missing), retryable=False))
    job = job_pb2.JobRequest(
        lease=job_pb2.Lease(
            step_run_id=grant.step_run_id, lease_token=grant.lease_token, attempt=grant.attempt
        ),
        workflow_run_id=grant.workflow_run_id,
        idempotency_key=grant.idempotency_key,
        executor_kind=executor_kind,
        kind=spec.kind,
        kind_version=kind_version,
        lease_duration=_lease_duration(lease_s),
        definition=grant.definition,
        definition_version=grant.definition_version,
        step_name=grant.step_name,
        failures=grant.failures,
        max_attempts=spec.retry.max_attempts,
    )
    data = _input(grant, spec, materials.outputs.get(grant.step_run_id, {}), max_payload_bytes)
    if data is not None:
        job.input.data = data
    if grant.time_remaining_s is not None:
        job.time_remaining.CopyFrom(duration(max(0.0, grant.time_remaining_s)))
    if grant.deadline is not None:
        stamp = Timestamp()
        stamp.FromDatetime(grant.deadline)
        job.deadline.CopyFrom(stamp)
    if spec.attempt_timeout_s is not None:
        job.attempt_timeout.CopyFrom(duration(spec.attempt_timeout_s))
    if spec.progress_timeout_s is not None:
        job.progress_timeout.CopyFrom(duration(spec.progress_timeout_s))
    for name, secret in spec.secrets.items():
        job.secrets[name].provider = secret.provider
        job.secrets[name].name = secret.name
        job.secrets[name].version = secret.version
    if trace[0]:
        job.trace.traceparent, job.trace.tracestate = trace
    job.input_artifacts.extend(artifact_message(a) for a in materials.artifacts.get(grant.step_run_id, ()))
    for name, result in materials.effects.get(grant.idempotency_key, [])[:_MAX_EFFECTS]:
        job.effects.add(name=name, result=common_pb2.Payload(data=result))
    checkpoint = materials.checkpoints.get(grant.idempotency_key)
    if checkpoint is not None:
        if len(checkpoint.data) > max_payload_bytes:
            raise UnfitJob(_too_large("checkpoint", len(checkpoint.data), max_payload_bytes))
        job.checkpoint_artifacts.extend(artifact_message(a) for a in checkpoint.artifacts)
    extras = job.ByteSize() - len(data or b"")
    if extras > _EXTRAS_BYTES:
        raise UnfitJob(
            StepError(
                Code.PAYLOAD_TOO_LARGE,
                f"effects, inline artifacts and the rest have {extras} bytes, over the limit of {_EXTRAS_BYTES}",
                retryable=False,
            )
        )
    if checkpoint is not None:
        job.checkpoint.data = checkpoint.data
    return job


def _too_large(what: str, size: int, limit: int) -> StepError:
    message = f"{what}: has {size} bytes, over the limit of {limit}"
    return StepError(Code.PAYLOAD_TOO_LARGE, message, retryable=False)


def _input(
    grant: Grant, spec: StepSpec, outputs: Mapping[str, bytes | None], max_payload_bytes: int
) -> bytes | None:
    if not spec.template_data:
        # What a step of a short workflow wants, and nobody has to spell. Checked at the edge; a limit that was
        # lowered since, or a row changed by hand, must not end the session with a frame that is too large.
        data = grant.run_input
        if data is not None and len(data) > max_payload_bytes:
            raise UnfitJob(_too_large("input", len(data), max_payload_bytes))
        return data
    if not spec.template_references:
        return spec.template_data
    try:
        data = resolve_bytes(spec.template, grant.run_input, outputs)
    except TemplateError as error:
        raise UnfitJob(StepError(Code.INPUT_INVALID, f"input_template: {error}", retryable=False)) from error
    try:
        check_payload(data, "", "input", max_payload_bytes)
    except Fault as fault:
        raise UnfitJob(StepError(fault.code, fault.message, retryable=False)) from fault
    return data
