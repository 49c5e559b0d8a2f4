"""The caller's trace, for those who use OpenTelemetry; others pay one look into a dictionary."""

import sys

from rara.v1 import common_pb2


def current_trace() -> common_pb2.TraceContext | None:
    """The context of the span that is current here; None: there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return None  # who has not imported it has no span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return common_pb2.TraceContext(**carrier) if carrier else None
