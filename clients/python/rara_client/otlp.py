"""How the services send telemetry: by OpenTelemetry's own variables, over gRPC, and never in the way of work.

Nothing of OpenTelemetry is imported before something is to be sent.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor

SAY_AGAIN_S: Final = 300.0
_ENDPOINT: Final = "OTEL_EXPORTER_OTLP_ENDPOINT"


def is_sent(signal: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a signal, TRACES or METRICS, has an endpoint. Raises ValueError for a protocol not spoken here."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if not environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") and not environ.get(_ENDPOINT):
        return False
    if environ.get(f"OTEL_{signal}_EXPORTER", "otlp").strip() != "otlp":
        return False
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(name, "").strip()
        if protocol and protocol != "grpc":
            raise ValueError(f"{name}={protocol} is not spoken here: only grpc is")
        if protocol:
            break
    return True


def resource(service: str, instance_id: str) -> "Resource":
    """Who speaks. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES come first."""
    from opentelemetry.sdk.resources import Resource

    given = Resource.create({"service.instance.id": instance_id, "service.version": _version()})
    if str(given.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        return given.merge(Resource({"service.name": service}))
    return given


def _version() -> str:
    try:
        return metadata.version("rara")
    except metadata.PackageNotFoundError:
        return "0"


def span_sender() -> "SpanProcessor":
    """Sends from a thread with a bounded queue: what does not fit is dropped."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


def metric_sender() -> "MetricReader":
    """Sends from a thread, each OTEL_METRIC_EXPORT_INTERVAL."""
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    return PeriodicExportingMetricReader(OTLPMetricExporter())


class _Complaints(logging.Handler):
    """What exporters say, once in a while: a receiver that is away is no reason to shout."""

    def __init__(self, say: Callable[[str, int], None], clock: Callable[[], float]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._clock = clock
        self._say_at = float("-inf")
        self._unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        if self._clock() < self._say_at:
            self._unsaid += 1
            return
        self._say_at = self._clock() + SAY_AGAIN_S
        unsaid, self._unsaid = self._unsaid, 0
        self._say(record.getMessage()[:300], unsaid)


def take_complaints(say: Callable[[str, int], None], *, clock: Callable[[], float] = time.monotonic) -> None:
    """Let no line of OpenTelemetry reach standard error but through `say`: the line, and how many were left out."""
    logger = logging.getLogger("opentelemetry")
    logger.propagate = False
    logger.handlers = [one for one in logger.handlers if not isinstance(one, _Complaints)]
    logger.addHandler(_Complaints(say, clock))


def shut_down(*endings: Callable[[], None], timeout_s: float) -> None:
    """Send what is left and end, within a bound: a receiver that is away must not keep a service from its end."""

    def end() -> None:
        for ending in endings:
            try:
                ending()
            except Exception as error:  # whatever an exporter does: the service has ended well
                logging.getLogger("opentelemetry.rara").warning("the end of telemetry failed: %r", error)

    thread = threading.Thread(
        target=end, name="telemetry end", daemon=True
    )  # what hangs in it ends with the process
    thread.start()
    thread.join(timeout_s)
