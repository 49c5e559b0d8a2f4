"""The trace that a handler works for, where its own spans find it."""

import contextlib
from collections.abc import Iterator

from rara_executor.runner_protocol import StartJob


@contextlib.contextmanager
def attached(start: StartJob) -> Iterator[None]:
    """Make the job's span the current one of OpenTelemetry's context, for as long as the block lasts.

    Without a trace, or where OpenTelemetry is not installed, nothing is done; it is imported for the first job that
    has a trace.
    """
    if not start.traceparent:
        yield
        return
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        yield
        return
    given = {"traceparent": start.traceparent, "tracestate": start.tracestate}
    token = context.attach(TraceContextTextMapPropagator().extract(given))
    try:
        yield
    finally:
        context.detach(token)
