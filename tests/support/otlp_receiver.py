"""A real OTLP receiver: the collector's gRPC service, which keeps what it gets.

async with OtlpReceiver() as receiver:
    ...  # OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint
    spans = await receiver.until(lambda spans: len(spans) == 3)
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from support.running_scheduler import until


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came. service: the sender's service.name."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]
    events: tuple[str, ...]
    start_ns: int
    end_ns: int
    failed: bool


class OtlpReceiver(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metrics: set[str] = set()
        self.received = bytearray()  # every request, as it came
        self._server = grpc.aio.server()
        # Generated without types.
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self, self._server
        )
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def env(self) -> dict[str, str]:
        """For a process that is to send spans and metrics here, soon."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
        }

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - both services call it so
        self.received += request.SerializeToString()
        if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
            for of_resource in request.resource_spans:
                service = _values(of_resource.resource.attributes).get("service.name", "")
                for of_scope in of_resource.scope_spans:
                    self.spans.extend(_received(service, span) for span in of_scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()
        self.metrics |= {
            metric.name
            for of_resource in request.resource_metrics
            for of_scope in of_resource.scope_metrics
            for metric in of_scope.metrics
        }
        return metrics_service_pb2.ExportMetricsServiceResponse()

    async def until(self, enough: Callable[[list[ReceivedSpan]], bool], what: str) -> list[ReceivedSpan]:
        """Wait until what came is enough."""

        async def look() -> list[ReceivedSpan] | None:
            return self.spans if enough(self.spans) else None

        try:
            return await until(look, what)
        except AssertionError as error:
            names = sorted(f"{span.service} {span.name}" for span in self.spans)
            raise AssertionError(f"{error}; here: {names}") from None


def _received(service: str, span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        _values(span.attributes),
        tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        tuple(event.name for event in span.events),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _values(attributes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for attribute in attributes:
        value: common_pb2.AnyValue = attribute.value
        found[attribute.key] = getattr(value, value.WhichOneof("value") or "string_value")
    return found
