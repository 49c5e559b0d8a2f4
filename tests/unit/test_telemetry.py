"""Telemetry costs nothing that was not asked for, and its labels stay few."""

import subprocess
import sys

import pytest
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.telemetry.catalogue import METRICS, Shape
from rara_scheduler.telemetry.labels import OTHER, Folded
from rara_scheduler.telemetry.port import SILENT, UNTRACED
from rara_scheduler.telemetry.setup import Wanted, begin, wanted


def test_nothing_is_wanted_by_default() -> None:
    assert not wanted("", {})
    made = begin(Wanted(), scheduler_id="s")
    assert (made.metrics, made.tracing, made.interceptors) == (SILENT, UNTRACED, ())


@pytest.mark.parametrize(
    ("environ", "metrics", "traces"),
    [
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, True, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, False, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4317"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_METRICS_EXPORTER": "none"}, False, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_TRACES_EXPORTER": "none"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_SDK_DISABLED": "true"}, False, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, True, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False, False),
    ],
)
def test_opentelemetrys_own_variables_say_what_is_sent(
    environ: dict[str, str], metrics: bool, traces: bool
) -> None:
    assert wanted("", environ) == Wanted(push_metrics=metrics, push_traces=traces)


def test_a_protocol_that_is_not_spoken_is_refused_by_its_variable() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    with pytest.raises(Fault) as raised:
        wanted("", environ)
    assert raised.value.code is Code.FIELD_INVALID
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in raised.value.message


def test_a_scheduler_without_telemetry_imports_none_of_it() -> None:
    code = (
        "import sys, rara_scheduler.app;"
        "print([m for m in sys.modules if m.partition('.')[0] in ('opentelemetry', 'prometheus_client')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_kinds_beyond_a_number_are_one() -> None:
    folded = Folded(2)
    assert [folded.label(kind) for kind in ("a", "b", "a", "c", "b", "d")] == [
        "a",
        "b",
        "a",
        OTHER,
        "b",
        OTHER,
    ]


def test_names_of_metrics_hold_no_unit() -> None:
    for metric in METRICS:
        assert metric.name.startswith("rara.")
        assert not metric.name.endswith(("total", "seconds", "bytes"))
        assert bool(metric.buckets) is (metric.shape is Shape.HISTOGRAM)
    assert len({metric.name for metric in METRICS}) == len(METRICS)
