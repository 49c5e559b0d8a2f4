"""Where telemetry goes: OTLP by OpenTelemetry's own variables, and a Prometheus endpoint. Imported only when wanted."""

import logging
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Final

import structlog
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider

log = structlog.get_logger(__name__)

_SAY_AGAIN_S: Final = 300.0
SCOPE: Final = "rara.scheduler"


def resource(scheduler_id: str) -> Resource:
    """Who speaks. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    given = Resource.create({"service.instance.id": scheduler_id, "service.version": _version()})
    if str(given.attributes.get("service.name", "")).startswith("unknown_service"):
        return given.merge(Resource({"service.name": "rara-scheduler"}))
    return given


def _version() -> str:
    try:
        return metadata.version("rara")
    except metadata.PackageNotFoundError:
        return "0"


class _Complaints(logging.Handler):
    """What the exporters say, once in a while, as one event of ours: a receiver that is away is no reason to shout."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.WARNING)
        self._clock = clock
        self._say_at = float("-inf")
        self._unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._clock() < self._say_at:
            self._unsaid += 1
            return
        self._say_at = self._clock() + _SAY_AGAIN_S
        unsaid, self._unsaid = self._unsaid, 0
        log.warning("telemetry.export_failed", error=record.getMessage()[:300], unsaid=unsaid)


def take_complaints() -> None:
    """Let no line of the SDK reach standard error but through our log."""
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    if not any(isinstance(handler, _Complaints) for handler in logger.handlers):
        logger.addHandler(_Complaints())


def span_provider(about: Resource) -> TracerProvider:
    """Sampled by OTEL_TRACES_SAMPLER, sent by a thread with a bounded queue: what does not fit is dropped."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from rara_scheduler.telemetry.span_ids import PlannedIds

    provider = TracerProvider(resource=about, shutdown_on_exit=False, id_generator=PlannedIds())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def metric_pusher() -> MetricReader:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())


def meter_provider(about: Resource, readers: list[MetricReader]) -> MeterProvider:
    return MeterProvider(metric_readers=readers, resource=about, shutdown_on_exit=False)


class PrometheusEndpoint:
    """Serves /metrics from a thread of its own. Raises OSError when the address cannot be had."""

    def __init__(self, listen: str) -> None:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader
        from prometheus_client import (
            CollectorRegistry,
            GCCollector,
            PlatformCollector,
            ProcessCollector,
            start_http_server,
        )

        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self.reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
        host, _, port = listen.rpartition(":")
        self._server, _ = start_http_server(int(port), host.strip("[]"), registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def shut_down(*endings: Callable[[], None], timeout_s: float) -> None:
    """Send what is left and end, within a bound: a receiver that is away must not keep the service from its end.

    From here on the threads are daemons: what hangs in them ends with the process.
    """

    def end() -> None:
        for ending in endings:
            try:
                ending()
            except Exception as error:  # whatever an exporter does: the service has ended well
                log.warning("telemetry.end_failed", error=repr(error))

    thread = threading.Thread(target=end, name="telemetry end", daemon=True)
    thread.start()
    thread.join(timeout_s)
