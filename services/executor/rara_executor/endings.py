"""The last event of a job, by what its handler said, why it was stopped, and how its runner ended. Pure."""

from rara.v1 import job_pb2

from rara_executor.child_process import ProcessExit
from rara_executor.codes import Code
from rara_executor.held_job import HeldJob, Outcome, StopKind
from rara_executor.runner_protocol import Failed, Stopped, Succeeded
from rara_executor.wire import EventFactory, failed_by_executor

_KILLED = 9
_ENVELOPE_BYTES = 1 << 10


def last_event(
    events: EventFactory, job: HeldJob, outcome: Outcome | None, end: ProcessExit | None, now: float
) -> job_pb2.ProgressEvent:
    """outcome: None if the runner ended before the handler did. now: on the lease clock."""
    stop = job.stop
    # Refused by the scheduler, or by ourselves: what it went on to do rests on what is not stored.
    if stop is not None and (job.refused_sequence or stop.reason == Code.SECRET_IN_PAYLOAD):
        return _failed(events, job, stop.reason, stop.message, end)
    if isinstance(outcome, Succeeded):  # what is done is done, also if it was asked to stop
        return events.succeeded(job.lease, outcome.output, *job.outputs())
    if stop is not None and stop.kind is StopKind.FAIL:
        return _failed(events, job, stop.reason, stop.message, end)
    if stop is not None:
        return events.cancelled(job.lease, stop.reason, job.checkpoint, end)
    if isinstance(outcome, Failed):
        return events.failed(job.lease, outcome, None)  # a runner that ends afterwards is no part of it
    if isinstance(outcome, Stopped):
        return _failed(events, job, Code.HANDLER_FAILED, "the handler cancelled itself", end)
    if end is None or (job.runner is not None and job.runner.killed_for is not None):
        # A neighbour in the same process had to be killed: this one has done nothing wrong.
        return events.cancelled(job.lease, Code.EXECUTOR_SHUTDOWN, job.checkpoint, end)
    if end.signal == _KILLED and now >= job.clock.over_at:
        # The supervisor was frozen past the lease, and the warden did what it could not.
        return _failed(events, job, Code.LEASE_EXPIRED, "the executor stood still past its lease", end)
    return _failed(events, job, _crash(end), f"the runner ended: {end.describe()}", end)


def fitting(
    events: EventFactory, job: HeldJob, event: job_pb2.ProgressEvent, *, max_frame_bytes: int
) -> job_pb2.ProgressEvent:
    """The event, or another one if it fits into no frame: sent, it would end the session with all its jobs."""
    size = event.ByteSize()
    if size + _ENVELOPE_BYTES <= max_frame_bytes:
        return event
    message = (
        f"result and manifest have {size} bytes, a frame holds {max_frame_bytes}: "
        "use fewer or smaller artifacts and metadata"
    )
    return _failed(events, job, Code.PAYLOAD_TOO_LARGE, message, None)


def _crash(end: ProcessExit) -> Code:
    return Code.OUT_OF_MEMORY if end.out_of_memory else Code.RUNNER_CRASHED


def _failed(
    events: EventFactory, job: HeldJob, code: str, message: str, end: ProcessExit | None
) -> job_pb2.ProgressEvent:
    return events.failed(job.lease, failed_by_executor(job.lease, code, message), end)
