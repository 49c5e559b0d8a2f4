"""Builders for the events that an executor reports about one lease."""

import json
from collections.abc import Iterable, Mapping

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, job_pb2

# Fixed: the executor's clock is only shown, and equal events must be equal bytes.
_EVENT_TIME = Timestamp(seconds=1_700_000_000)


def json_payload(value: object) -> common_pb2.Payload:
    """The value as compact JSON; its media type is left empty, which means JSON."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return common_pb2.Payload(data=text.encode())


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1_000_000_000))
    return message


def accepted(lease: job_pb2.Lease, sequence: int = 1, *, executor_id: str = "") -> job_pb2.ProgressEvent:
    """First event of a job: a slot is reserved, no user code has run."""
    event = job_pb2.JobAccepted(executor_id=executor_id, executor_name="scripted")
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, accepted=event)


def running(lease: job_pb2.Lease, sequence: int = 2) -> job_pb2.ProgressEvent:
    event = job_pb2.JobRunning(runner_id="scripted-runner")
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, running=event)


def progress(
    lease: job_pb2.Lease,
    sequence: int = 3,
    *,
    fraction: float | None = None,
    message: str = "",
    metrics: Mapping[str, float] | None = None,
    checkpoint: common_pb2.Payload | None = None,
) -> job_pb2.ProgressEvent:
    event = job_pb2.JobProgress(
        fraction=fraction, message=message, metrics=dict(metrics or {}), checkpoint=checkpoint
    )
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, progress=event)


def effect(lease: job_pb2.Lease, sequence: int, name: str, result: object) -> job_pb2.ProgressEvent:
    event = job_pb2.Effect(name=name, result=json_payload(result))
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, effect=event)


def succeeded(
    lease: job_pb2.Lease,
    sequence: int = 3,
    *,
    output: object | common_pb2.Payload = None,
    artifacts: Iterable[common_pb2.Artifact] = (),
    consumed: Iterable[common_pb2.Digest] = (),
) -> job_pb2.ProgressEvent:
    """output: any JSON value, or a Payload to send as it is (invalid bytes, for instance)."""
    payload = output if isinstance(output, common_pb2.Payload) else json_payload(output)
    event = job_pb2.JobResult(
        output=payload,
        manifest=common_pb2.ArtifactManifest(artifacts=list(artifacts)),
        consumed=list(consumed),
    )
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, succeeded=event)


def failed(
    lease: job_pb2.Lease,
    sequence: int = 3,
    *,
    code: str = "HANDLER_FAILED",
    message: str = "failed on purpose",
    retryable: bool | None = None,
    details: object | None = None,
    retry_after_s: float | None = None,
    stack_trace: str = "",
) -> job_pb2.ProgressEvent:
    event = job_pb2.JobError(
        code=code,
        message=message,
        retryable=retryable,
        details=None if details is None else json_payload(details),
        retry_after=None if retry_after_s is None else duration(retry_after_s),
        stack_trace=stack_trace,
    )
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, failed=event)


def cancelled(
    lease: job_pb2.Lease,
    sequence: int = 3,
    *,
    reason: str = "CANCELLED",
    checkpoint: common_pb2.Payload | None = None,
) -> job_pb2.ProgressEvent:
    event = job_pb2.JobCancelled(
        reason=reason, checkpoint=checkpoint, runner_exit=job_pb2.RunnerExit(exit_code=0)
    )
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, event_time=_EVENT_TIME, cancelled=event)
