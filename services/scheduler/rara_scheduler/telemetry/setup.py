"""Which telemetry is wanted, and what it takes: nothing of it is imported, made or asked for where none is."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
from rara_client import otlp

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.telemetry.port import SILENT, UNTRACED, Metrics, SpanMaker, Tracing

log = structlog.get_logger(__name__)

_SCOPE: Final = "rara.scheduler"


@dataclass(frozen=True, slots=True)
class Wanted:
    """metrics_listen: HOST:PORT of a Prometheus endpoint; empty: none."""

    metrics_listen: str = ""
    push_metrics: bool = False
    push_traces: bool = False

    def __bool__(self) -> bool:
        return bool(self.metrics_listen) or self.push_metrics or self.push_traces


def wanted(metrics_listen: str, environ: Mapping[str, str] = os.environ) -> Wanted:
    """OTLP is on for a signal that OpenTelemetry's variables name an endpoint for. Raises Fault."""
    try:
        return Wanted(
            metrics_listen,
            push_metrics=otlp.is_sent("METRICS", environ),
            push_traces=otlp.is_sent("TRACES", environ),
        )
    except ValueError as error:
        raise Fault(Code.FIELD_INVALID, str(error)) from None


@dataclass(slots=True)
class Telemetry:
    """What a scheduler tells its work to. metrics_address: where metrics are served; empty: nowhere."""

    metrics: Metrics = SILENT
    tracing: Tracing = UNTRACED
    spans: SpanMaker | None = None
    interceptors: tuple[Any, ...] = ()
    metrics_address: str = ""
    endings: list[Callable[[], None]] = field(default_factory=list)

    def close(self, *, timeout_s: float) -> None:
        """Send what is left, within the bound. May block for so long."""
        if self.endings:
            otlp.shut_down(*self.endings, timeout_s=timeout_s)
            self.endings.clear()


def begin(what: Wanted, *, scheduler_id: str) -> Telemetry:
    """Raises Fault where the extra `observability` is missing, or the address of the metrics cannot be had."""
    if not what:
        return Telemetry()
    try:
        return _begin(what, scheduler_id)
    except ImportError as error:
        raise Fault(
            Code.FEATURE_DISABLED,
            f"telemetry needs the extra `observability`: install rara[observability] ({error})",
        ) from error
    except OSError as error:
        raise Fault(
            Code.INTERNAL, f"cannot listen on RARA_METRICS_LISTEN={what.metrics_listen}: {error}"
        ) from error


def _begin(what: Wanted, scheduler_id: str) -> Telemetry:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import TracerProvider

    from rara_scheduler.telemetry.calls import CallObserver
    from rara_scheduler.telemetry.guarded import GuardedMetrics, GuardedTracing
    from rara_scheduler.telemetry.recorder import RecordedMetrics
    from rara_scheduler.telemetry.span_ids import PlannedIds
    from rara_scheduler.telemetry.tracer import OtelTracing

    otlp.take_complaints(_complain)
    about = otlp.resource("rara-scheduler", scheduler_id)
    made = Telemetry()
    readers: list[Any] = []  # of the SDK, which is not imported where nothing is wanted
    if what.metrics_listen:
        from rara_scheduler.telemetry.prometheus import PrometheusEndpoint

        endpoint = PrometheusEndpoint(what.metrics_listen)
        made.metrics_address = endpoint.address
        made.endings.append(endpoint.close)
        readers.append(endpoint.reader)
    if what.push_metrics:
        readers.append(otlp.metric_sender())
    if readers:
        meters = MeterProvider(readers, resource=about, shutdown_on_exit=False)
        made.metrics = GuardedMetrics(RecordedMetrics(meters.get_meter(_SCOPE)))
        made.endings.insert(0, meters.shutdown)
    if what.push_traces:
        spans = TracerProvider(resource=about, shutdown_on_exit=False, id_generator=PlannedIds())
        spans.add_span_processor(otlp.span_sender())
        tracing = OtelTracing(spans.get_tracer(_SCOPE), made.metrics)
        made.tracing = made.spans = GuardedTracing(tracing, tracing)
        made.endings.insert(0, spans.shutdown)
    made.interceptors = (CallObserver(made.metrics, made.tracing),)
    return made


def _complain(error: str, unsaid: int) -> None:
    log.warning("telemetry.export_failed", error=error, unsaid=unsaid)
