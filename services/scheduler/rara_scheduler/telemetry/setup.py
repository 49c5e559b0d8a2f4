"""Which telemetry is wanted, and what it takes: nothing of it is imported, made or asked for where none is."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.telemetry.port import SILENT, UNTRACED, Metrics, SpanMaker, Tracing

_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"


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
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Wanted(metrics_listen)
    return Wanted(
        metrics_listen, push_metrics=_is_pushed("METRICS", environ), push_traces=_is_pushed("TRACES", environ)
    )


def _is_pushed(signal: str, environ: Mapping[str, str]) -> bool:
    if not environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") and not environ.get(_ENDPOINT):
        return False
    if environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip() != "otlp":
        return False
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "").strip()
        if protocol and protocol != "grpc":
            raise Fault(Code.FIELD_INVALID, f"{name}={protocol} is not spoken here: only grpc is")
        if protocol:
            break
    return True


@dataclass(slots=True)
class Telemetry:
    """What a scheduler tells its work to. metrics_address: where metrics are served; empty: nowhere."""

    metrics: Metrics = SILENT
    tracing: Tracing = UNTRACED
    spans: SpanMaker | None = None
    interceptors: tuple[Any, ...] = ()
    metrics_address: str = ""
    _endings: list[Callable[[], None]] = field(default_factory=list)

    def close(self, *, timeout_s: float) -> None:
        """Send what is left, within the bound. May block for so long."""
        if self._endings:
            from rara_scheduler.telemetry.export import shut_down

            shut_down(*self._endings, timeout_s=timeout_s)
            self._endings.clear()


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
    from rara_scheduler.telemetry import export
    from rara_scheduler.telemetry.calls import CallObserver

    export.take_complaints()
    about = export.resource(scheduler_id)
    made = Telemetry()
    readers: list[Any] = []  # of the SDK, which is not imported where nothing is wanted
    if what.metrics_listen:
        endpoint = export.PrometheusEndpoint(what.metrics_listen)
        made.metrics_address = endpoint.address
        made._endings.append(endpoint.close)  # noqa: SLF001 - its own maker
        readers.append(endpoint.reader)
    if what.push_metrics:
        readers.append(export.metric_pusher())
    if readers:
        from rara_scheduler.telemetry.recorder import RecordedMetrics

        meters = export.meter_provider(about, readers)
        made.metrics = RecordedMetrics(meters.get_meter(export.SCOPE))
        made._endings.append(meters.shutdown)  # noqa: SLF001
    if what.push_traces:
        from rara_scheduler.telemetry.tracer import OtelTracing

        spans = export.span_provider(about)
        made.tracing = made.spans = OtelTracing(spans.get_tracer(export.SCOPE), made.metrics)
        made._endings.insert(0, spans.shutdown)  # noqa: SLF001
    made.interceptors = (CallObserver(made.metrics, made.tracing),)
    return made
