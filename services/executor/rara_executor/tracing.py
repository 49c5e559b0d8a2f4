"""Spans of handlers: what the supervisor tells of a job; here nobody listens."""

from rara.v1 import job_pb2


class JobSpan:
    """From the moment a job goes to its runner to the handler's end. Makes nothing, and hands on what came.

    traceparent, tracestate: what the handler's own spans are children of; empty: no trace.
    """

    def __init__(self, traceparent: str, tracestate: str) -> None:
        self.traceparent = traceparent
        self.tracestate = tracestate

    def started(self) -> None:
        """The handler has begun."""

    def ended(self, event: job_pb2.ProgressEvent | None) -> None:
        """It runs no more, and this is said of it; None: nothing, the lease was lost."""


class JobTracing:
    """Makes no spans."""

    def begin(self, request: job_pb2.JobRequest) -> JobSpan:
        return JobSpan(request.trace.traceparent, request.trace.tracestate)

    def close(self, *, timeout_s: float) -> None:
        """Send what is left, within the bound. May block for so long."""


UNTRACED = JobTracing()


def trace_id(traceparent: str) -> str:
    """Of a trace context; empty: it has none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else ""
