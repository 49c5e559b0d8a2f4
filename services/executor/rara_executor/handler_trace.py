"""The trace that a handler works for, where its own spans find it."""

import contextlib
from collections.abc import Iterator
from typing import Final

from rara_executor.runner_protocol import StartJob

_NOTHING: Final = contextlib.nullcontext()


def attached(start: StartJob) -> contextlib.AbstractContextManager[None]:
    """Make the job's span the current one of OpenTelemetry's context, for as long as the block lasts.

    Without a trace, or where OpenTelemetry is not installed, nothing is done; it is imported for the first job that
    has a trace.
    """
    return _attached(start) if start.traceparent else _NOTHING


@contextlib.contextmanager
def _attached(start: StartJob) -> Iterator[None]:
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
