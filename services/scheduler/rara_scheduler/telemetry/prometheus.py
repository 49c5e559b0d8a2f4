"""The endpoint that Prometheus reads. Imported only when it is wanted."""

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)


class PrometheusEndpoint:
    """Serves /metrics from threads of its own. Raises OSError when the address cannot be had."""

    def __init__(self, listen: str) -> None:
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
