"""Spans by OpenTelemetry: of calls, of each attempt, and of what was done for it."""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Final, TypeAlias

import structlog
from google.protobuf.message import Message
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from rara.v1 import workflow_pb2

from rara_scheduler.domain.attempt import Decision
from rara_scheduler.domain.start_command import clean_trace
from rara_scheduler.telemetry.port import AttemptFacts, CallSpan, EndedAttempt, Metrics, Sent, Tracing
from rara_scheduler.telemetry.span_ids import attempt_span_id, planned

MOST_WAITING: Final = 10_000
_SERVICE: Final = workflow_pb2.DESCRIPTOR.services_by_name["WorkflowService"].full_name
# Calls that act. Others, which watchers and polls make by the thousand, only when their caller traces.
_ACTING: Final = frozenset(
    f"{_SERVICE}/{name}" for name in ("StartRun", "BatchStartRuns", "RetryRun", "CancelRun")
)
_OUR_FAULT: Final = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
_PROPAGATOR: Final = TraceContextTextMapPropagator()
_SPAN_ID_AT: Final = slice(36, 52)  # in `00-<trace id>-<span id>-<flags>`
Facts: TypeAlias = Mapping[str, str | int]
_SAMPLED: Final = "13579bdf"  # the last digit of the flags


class OtelTracing(Tracing):
    is_on = True

    def __init__(self, tracer: Tracer, metrics: Metrics) -> None:
        self._tracer = tracer
        self._metrics = metrics
        self.ended: deque[EndedAttempt] = deque()

    # Calls.

    @contextlib.contextmanager
    def call(
        self, method: str, request: Message, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Iterator[CallSpan]:
        carrier = _carrier(request, metadata)
        if not carrier and method not in _ACTING:
            yield CallSpan()
            return
        with self._tracer.start_as_current_span(
            method,
            context=_PROPAGATOR.extract(carrier, Context()),
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": method},
            record_exception=False,  # its text may hold what nobody should read here
            set_status_on_exception=False,
        ) as span:
            trace_id = trace.format_trace_id(span.get_span_context().trace_id)
            with structlog.contextvars.bound_contextvars(trace_id=trace_id):
                yield _OtelCallSpan(span)

    def run_context(self, traceparent: str, tracestate: str) -> tuple[str, str]:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier)
        if not carrier:
            return traceparent, tracestate
        # The call's own headers are bounded by nobody else.
        return clean_trace(carrier["traceparent"], carrier.get("tracestate", ""))

    def retries(self, traceparent: str, tracestate: str) -> tuple[str, str]:
        first = trace.get_current_span(_parent(traceparent, tracestate)).get_span_context()
        span = trace.get_current_span()
        if first.is_valid and span.is_recording():
            span.add_link(first, {"rara.link": "retry_of"})
        return self.run_context(traceparent, tracestate)

    # Attempts.

    def attempt_context(self, traceparent: str, tracestate: str, lease_token: int) -> tuple[str, str]:
        if not traceparent:
            return "", ""
        before, after = traceparent[: _SPAN_ID_AT.start], traceparent[_SPAN_ID_AT.stop :]
        return f"{before}{attempt_span_id(lease_token):016x}{after}", tracestate

    def sent(self, jobs: Iterable[Sent]) -> None:
        for job in jobs:
            if not job.traceparent or job.traceparent[-1] not in _SAMPLED:
                continue
            parent = _parent(job.traceparent, job.tracestate)
            facts: Facts = {"rara.kind": job.kind, "rara.lease_token": job.lease_token}
            self._span("lease", parent, job.granting_ns, job.granted_ns, facts)
            self._span("dispatch", parent, job.granted_ns, job.sent_ns, facts)

    def attempts_ended(self, decisions: Iterable[Decision], began_ns: int, ended_ns: int) -> None:
        dropped = 0
        for decision in decisions:
            closing, lease = decision.closing, decision.lease
            if closing is None:
                continue
            if len(self.ended) >= MOST_WAITING:
                dropped += 1
                continue
            code = str(closing.error.code) if closing.error else str(closing.reason)
            self.ended.append(
                EndedAttempt(
                    lease.step_run_id,
                    lease.lease_token,
                    lease.attempt,
                    lease.granted_on,
                    closing.to.value,
                    code,
                    began_ns,
                    ended_ns,
                )
            )
        if dropped:
            self._metrics.trace_dropped(dropped)

    def attempt_span(self, ended: EndedAttempt, facts: AttemptFacts) -> None:
        """The span of an attempt, and that of the commit that ended it."""
        with planned(attempt_span_id(ended.lease_token)):
            span = self._tracer.start_span(
                f"attempt {facts.kind}",
                _parent(facts.traceparent, facts.tracestate),
                start_time=_ns(facts.granted_at),
                attributes={
                    "rara.workflow_run_id": facts.workflow_run_id,
                    "rara.step_run_id": ended.step_run_id,
                    "rara.definition": facts.definition,
                    "rara.step_name": facts.step_name,
                    "rara.kind": facts.kind,
                    "rara.attempt": ended.attempt,
                    "rara.lease_token": ended.lease_token,
                    "rara.executor_id": facts.executor_id,
                    "rara.outcome": ended.outcome,
                },
            )
        for name, at in (("accepted", facts.accepted_at), ("started", facts.started_at)):
            if at is not None:
                span.add_event(name, timestamp=_ns(at))
        if ended.code:
            span.set_attribute("error.type", ended.code)
        if ended.outcome in ("retryable_failed", "terminal_failed"):
            span.set_status(Status(StatusCode.ERROR, ended.code))
        own = trace.set_span_in_context(span, Context())
        committed: Facts = {"rara.kind": facts.kind, "rara.lease_token": ended.lease_token}
        self._span("commit", own, ended.began_ns, ended.ended_ns, committed)
        span.end(_ns(facts.ended_at))

    def _span(self, name: str, parent: Context, began_ns: int, ended_ns: int, facts: Facts) -> None:
        self._tracer.start_span(name, parent, start_time=began_ns, attributes=facts).end(ended_ns)


class _OtelCallSpan(CallSpan):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def failed(self, code: str) -> None:
        self._span.set_attribute("rpc.response.status_code", code)
        self._span.set_attribute("error.type", code)
        if code in _OUR_FAULT:
            self._span.set_status(Status(StatusCode.ERROR, code))


def _carrier(request: Message, metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """The caller's trace context: of the request itself where it has one, else of the call's metadata."""
    given = getattr(request, "trace", None)
    if given is not None and given.traceparent:
        return {"traceparent": given.traceparent, "tracestate": given.tracestate}
    return {
        key: value
        for key, value in metadata
        if key in ("traceparent", "tracestate") and isinstance(value, str)
    }


def _parent(traceparent: str, tracestate: str) -> Context:
    return _PROPAGATOR.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


def _ns(at: datetime) -> int:
    return int(at.timestamp() * 1e6) * 1000
