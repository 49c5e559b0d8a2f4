"""Spans of handlers, sent by OTLP. Imported only when traces are wanted."""

from typing import Final

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from rara.v1 import job_pb2
from rara_client import otlp

from rara_executor.tracing import JobSpan, JobTracing

log = structlog.get_logger(__name__)

_PROPAGATOR: Final = TraceContextTextMapPropagator()


class SentTracing(JobTracing):
    """A span `process <kind>` for each job of a traced run; a run that nobody traces gets none."""

    def __init__(self, executor_id: str, executor_name: str) -> None:
        otlp.take_complaints(
            lambda error, unsaid: log.warning("telemetry.export_failed", error=error, unsaid=unsaid)
        )
        self._provider = TracerProvider(
            resource=otlp.resource("rara-executor", executor_id), shutdown_on_exit=False
        )
        self._provider.add_span_processor(otlp.span_sender())
        self._tracer = self._provider.get_tracer("rara.executor")
        self._executor_name = executor_name

    def begin(self, request: job_pb2.JobRequest) -> JobSpan:
        if not request.trace.traceparent:
            return JobSpan("", "")
        given = {"traceparent": request.trace.traceparent, "tracestate": request.trace.tracestate}
        span = self._tracer.start_span(
            f"process {request.kind}",
            _PROPAGATOR.extract(given, Context()),
            kind=SpanKind.CONSUMER,
            attributes={
                "rara.workflow_run_id": request.workflow_run_id,
                "rara.step_run_id": request.lease.step_run_id,
                "rara.attempt": request.lease.attempt,
                "rara.lease_token": request.lease.lease_token,
                "rara.step_name": request.step_name,
                "rara.kind": request.kind,
                "rara.kind_version": request.kind_version,
                "rara.executor_name": self._executor_name,
            },
        )
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
        return _SentSpan(span, carrier.get("traceparent", ""), carrier.get("tracestate", ""))

    def close(self, *, timeout_s: float) -> None:
        otlp.shut_down(self._provider.shutdown, timeout_s=timeout_s)


class _SentSpan(JobSpan):
    def __init__(self, span: trace.Span, traceparent: str, tracestate: str) -> None:
        super().__init__(traceparent, tracestate)
        self._span = span

    def started(self) -> None:
        self._span.add_event("started")

    def ended(self, event: job_pb2.ProgressEvent | None) -> None:
        outcome = "lost" if event is None else event.WhichOneof("event") or ""
        self._span.set_attribute("rara.outcome", outcome)
        if event is not None and event.HasField("failed"):
            # The code alone: a message may hold what only those may read who may read the run.
            self._span.set_attribute("error.type", event.failed.code)
            self._span.set_status(Status(StatusCode.ERROR, event.failed.code))
        elif event is not None and event.HasField("cancelled"):
            self._span.set_attribute("error.type", event.cancelled.reason)
        self._span.end()
