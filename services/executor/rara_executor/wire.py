"""Events as the contract has them, with every text made valid, redacted and cut to size."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rara.v1 import common_pb2, job_pb2

from rara_executor import text
from rara_executor.child_process import ProcessExit
from rara_executor.codes import Code
from rara_executor.redaction import Redactor
from rara_executor.runner_protocol import Failed, Progress, RecordEffect, StartJob
from rara_executor.runner_protocol import InputInfo as Input
from rara_executor.tracing import JobSpan


class EventFactory:
    """Makes events of one executor. What users wrote passes the redactor, but for what the next attempt gets."""

    def __init__(self, redactor: Redactor, *, executor_id: str, executor_name: str) -> None:
        self._redactor = redactor
        self._accepted = job_pb2.JobAccepted(executor_id=executor_id, executor_name=executor_name)

    def accepted(self, lease: job_pb2.Lease) -> job_pb2.ProgressEvent:
        event = _event(lease)
        event.accepted.CopyFrom(self._accepted)
        return event

    def running(self, lease: job_pb2.Lease, runner_id: str) -> job_pb2.ProgressEvent:
        event = _event(lease)
        event.running.runner_id = runner_id
        return event

    def progress(
        self, lease: job_pb2.Lease, progress: Progress, artifacts: Iterable[common_pb2.Artifact] = ()
    ) -> job_pb2.ProgressEvent:
        event = _event(lease)
        message = event.progress
        message.message = text.cut(self._redactor.text(progress.message), text.MAX_PROGRESS_BYTES)
        if progress.metrics:
            message.metrics.update(
                {self._redactor.text(name): value for name, value in progress.metrics.items()}
            )
        if progress.fraction is not None:
            message.fraction = progress.fraction
        if progress.checkpoint is not None:
            message.checkpoint.data = progress.checkpoint
            message.checkpoint_artifacts.extend(artifacts)
        return event

    def effect(self, lease: job_pb2.Lease, effect: RecordEffect) -> job_pb2.ProgressEvent:
        event = _event(lease)
        event.effect.name = effect.name
        event.effect.result.data = effect.result
        return event

    def succeeded(
        self,
        lease: job_pb2.Lease,
        output: bytes,
        manifest: list[common_pb2.Artifact],
        consumed: list[common_pb2.Digest],
    ) -> job_pb2.ProgressEvent:
        event = _event(lease)
        result = event.succeeded
        result.output.data = self._redactor.json(output)
        if manifest:
            result.manifest.artifacts.extend(manifest)
            for artifact in result.manifest.artifacts:
                if artifact.metadata.data:
                    artifact.metadata.data = self._redactor.json(artifact.metadata.data)
        if consumed:
            result.consumed.extend(consumed)
        return event

    def failed(self, lease: job_pb2.Lease, failed: Failed, end: ProcessExit | None) -> job_pb2.ProgressEvent:
        error = job_pb2.JobError(
            code=failed.code,
            message=text.cut(self._redactor.text(failed.message), text.MAX_MESSAGE_BYTES),
            stack_trace=text.cut_middle(self._redactor.text(failed.stack_trace), text.MAX_STACK_BYTES),
        )
        if failed.retryable is not None:
            error.retryable = failed.retryable
        if failed.retry_after_s is not None:
            error.retry_after.FromNanoseconds(int(failed.retry_after_s * 1e9))
        if failed.details is not None:
            error.details.data = self._redactor.json(failed.details)
        if end is not None:
            error.runner_exit.CopyFrom(_exit(end))
        event = _event(lease)
        event.failed.CopyFrom(error)
        return event

    def cancelled(
        self,
        lease: job_pb2.Lease,
        reason: str,
        checkpoint: job_pb2.JobProgress | None,
        end: ProcessExit | None,
    ) -> job_pb2.ProgressEvent:
        """checkpoint: the newest report that had one."""
        cancelled = job_pb2.JobCancelled(reason=reason)
        if checkpoint is not None:
            cancelled.checkpoint.CopyFrom(checkpoint.checkpoint)
            cancelled.checkpoint_artifacts.extend(checkpoint.checkpoint_artifacts)
        if end is not None:
            cancelled.runner_exit.CopyFrom(_exit(end))
        event = _event(lease)
        event.cancelled.CopyFrom(cancelled)
        return event


def failed_by_executor(lease: job_pb2.Lease, code: str, message: str) -> Failed:
    """A failure that the executor itself finds."""
    return Failed(
        lease_token=lease.lease_token,
        code=str(code),
        message=text.valid(message),
        # The handler would name the same thing in the same way again.
        retryable=False if code == Code.FIELD_INVALID else None,
        retry_after_s=None,
        stack_trace="",
        details=None,
    )


def start_message(
    request: job_pb2.JobRequest,
    *,
    secrets: dict[str, str],
    scratch: str,
    max_payload_bytes: int,
    time_left_s: float | None,
    span: JobSpan,
) -> StartJob:
    """What a runner is told of a job."""
    return StartJob(
        lease_token=request.lease.lease_token,
        step_run_id=request.lease.step_run_id,
        workflow_run_id=request.workflow_run_id,
        step_name=request.step_name,
        definition=request.definition,
        attempt=request.lease.attempt,
        idempotency_key=request.idempotency_key,
        failures=request.failures,
        max_attempts=request.max_attempts,
        kind=request.kind,
        kind_version=request.kind_version,
        time_left_s=time_left_s,
        inputs=_inputs(request.input_artifacts),
        secrets=secrets,
        effects=_effects(request.effects),
        scratch=scratch,
        max_payload_bytes=max_payload_bytes,
        input=request.input.data,
        checkpoint=request.checkpoint.data if request.HasField("checkpoint") else None,
        checkpoint_artifacts=_inputs(request.checkpoint_artifacts),
        traceparent=span.traceparent,
        tracestate=span.tracestate,
    )


def _effects(effects: Sequence[job_pb2.Effect]) -> dict[str, str]:
    if not effects:  # nearly always, and asking is cheaper than going through them
        return {}
    return {effect.name: effect.result.data.decode("utf-8", "replace") for effect in effects}


def _inputs(artifacts: Sequence[common_pb2.Artifact]) -> list[Input]:
    return [_input(artifact) for artifact in artifacts] if artifacts else []


def _input(artifact: common_pb2.Artifact) -> Input:
    return Input(
        name=artifact.name,
        sha256=artifact.digest.sha256,
        size_bytes=artifact.digest.size_bytes,
        media_type=artifact.media_type,
        type=artifact.type,
        metadata=artifact.metadata.data.decode("utf-8", "replace"),
    )


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """The durations that a request gives its job. None: it gives none."""

    time_remaining_s: float | None = None
    attempt_timeout_s: float | None = None
    progress_timeout_s: float | None = None


_UNLIMITED = TimeLimits()


def time_limits(request: job_pb2.JobRequest) -> TimeLimits:
    limits = [seconds(request, name) for name in ("time_remaining", "attempt_timeout", "progress_timeout")]
    return _UNLIMITED if limits == [None, None, None] else TimeLimits(*limits)


def seconds(request: job_pb2.JobRequest, field: str) -> float | None:
    """A duration of the request; None: it has none."""
    if not request.HasField(field):  # type: ignore[arg-type]  # the names are literals at every call
        return None
    value: float = getattr(request, field).ToNanoseconds() / 1e9
    return value


def _exit(end: ProcessExit) -> job_pb2.RunnerExit:
    message = job_pb2.RunnerExit(out_of_memory=end.out_of_memory)
    if end.exit_code is not None:
        message.exit_code = end.exit_code
    if end.signal is not None:
        message.signal = end.signal
    if end.peak_memory_bytes is not None:
        message.peak_memory_bytes = end.peak_memory_bytes
    return message


def _event(lease: job_pb2.Lease) -> job_pb2.ProgressEvent:
    """An event of which only what has happened is to be said. Filled in place: made apart it would be copied."""
    event = job_pb2.ProgressEvent()
    event.lease.CopyFrom(lease)
    event_time = event.event_time
    event_time.seconds, event_time.nanos = divmod(time.time_ns(), 1_000_000_000)
    return event
