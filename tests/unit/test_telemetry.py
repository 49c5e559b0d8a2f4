"""Telemetry costs nothing that was not asked for, and its labels stay few."""

import inspect
import re
import subprocess
import sys
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from rara.v1 import workflow_pb2
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.telemetry.catalogue import METRICS, Shape
from rara_scheduler.telemetry.guarded import GuardedMetrics, GuardedTracing
from rara_scheduler.telemetry.labels import OTHER, Folded
from rara_scheduler.telemetry.port import (
    SILENT,
    UNTRACED,
    CallSpan,
    EndedAttempt,
    Metrics,
    Tracing,
)
from rara_scheduler.telemetry.setup import Wanted, begin, wanted
from rara_scheduler.telemetry.tracer import OtelTracing
from structlog.testing import capture_logs
from support import telemetry_names
from support.documents import REFERENCE


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


# ---------------------------------------------------------------- what listeners may do to work


class _Broken:
    """Raises whatever it is told."""

    is_on = True

    def __init__(self) -> None:
        self.ended: deque[EndedAttempt] = deque()
        self.told: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        def tell(*given: object) -> object:
            self.told.add(name)
            raise RuntimeError(f"{name}: {len(given)}")

        return tell


def _port_names(port: type) -> set[str]:
    return {name for name, member in vars(port).items() if inspect.isfunction(member)}


def test_a_listener_that_raises_is_dropped_and_named_once() -> None:
    broken: Any = _Broken()
    with capture_logs() as logs:
        metrics = GuardedMetrics(broken)
        for name in sorted(_port_names(Metrics)):
            arguments = len(inspect.signature(getattr(Metrics, name)).parameters) - 1
            assert getattr(metrics, name)(*[()] * arguments) is None
    assert broken.told == _port_names(Metrics)
    assert [(each["event"], each["told"]) for each in logs] == [("telemetry.failed", "attempts_ended")]

    broken = _Broken()
    with capture_logs() as logs:
        tracing = GuardedTracing(broken, broken)
        with tracing.call("m", workflow_pb2.StartRunRequest(), ()) as span:
            span.failed("INTERNAL")
        with pytest.raises(KeyError), tracing.call("m", workflow_pb2.StartRunRequest(), ()):
            raise KeyError
        assert tracing.run_context("p", "s") == tracing.retries("p", "s") == ("p", "s")
        assert tracing.attempt_context("p", "s", 7) == ("p", "s")
        tracing.sent([])
        tracing.attempts_ended([], 1, 2)
        made: Any = None
        tracing.attempt_span(made, made)
    assert broken.told == {*_port_names(Tracing), "attempt_span"}
    assert [each["event"] for each in logs] == ["telemetry.failed"]


def test_a_span_that_cannot_end_costs_its_call_nothing() -> None:
    class Ends(AbstractContextManager[CallSpan]):
        def __enter__(self) -> CallSpan:
            return CallSpan()

        def __exit__(self, *given: object) -> None:
            raise RuntimeError("no")

    class Begins(Tracing):
        def call(self, *given: object) -> AbstractContextManager[CallSpan]:
            return Ends()

    broken: Any = _Broken()
    with capture_logs() as logs:
        tracing = GuardedTracing(Begins(), broken)
        with tracing.call("m", workflow_pb2.StartRunRequest(), ()):
            pass
        with pytest.raises(KeyError), tracing.call("m", workflow_pb2.StartRunRequest(), ()):
            raise KeyError
    assert len(logs) == 1


def test_a_state_that_is_too_long_is_stored_with_no_run() -> None:
    """A call's own headers, which nobody else looks at."""
    tracing = OtelTracing(TracerProvider().get_tracer("x"), SILENT)
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    for members, is_kept in ((2, True), (3, False)):
        state = ",".join(f"k{n}={'x' * 200}" for n in range(members))
        headers = (("traceparent", parent), ("tracestate", state))
        with tracing.call("rara.v1.WorkflowService/StartRun", workflow_pb2.StartRunRequest(), headers):
            traceparent, tracestate = tracing.run_context("", "")
        assert traceparent.split("-")[1] == "a" * 32
        assert tracestate == (state if is_kept else "")


# ---------------------------------------------------------------- the page


PAGE = (REFERENCE / "telemetry.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    below = PAGE.split(f"# {heading}\n", 1)[1]
    lines = below[below.index("| ") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def described(heading: str) -> dict[str, set[str]]:
    return {row[0].strip("` "): set(row[1].split(", ")) for row in table(heading)}


def test_every_event_of_the_scheduler_is_described_with_its_level() -> None:
    assert described("Of the scheduler") == telemetry_names.log_events(telemetry_names.SCHEDULER)


def test_every_event_of_executors_is_described_with_its_levels() -> None:
    events = telemetry_names.log_events(telemetry_names.EXECUTOR)
    for event, levels in telemetry_names.go_log_events().items():
        events[event] = events.get(event, set()) | levels
    assert described("Of executors") == events


def test_every_event_has_a_meaning() -> None:
    for row in table("Of the scheduler") + table("Of executors"):
        assert len(row) == 4
        assert row[3], row[0]


def test_every_span_is_described() -> None:
    spans = telemetry_names.span_names(telemetry_names.SCHEDULER)
    spans |= telemetry_names.span_names(telemetry_names.EXECUTOR)
    assert {row[0].strip("`") for row in table("Traces")} == spans


def test_every_attribute_of_a_span_is_described() -> None:
    sources = [
        telemetry_names.SCHEDULER / "rara_scheduler" / "telemetry" / "tracer.py",
        telemetry_names.EXECUTOR / "rara_executor" / "sent_spans.py",
        telemetry_names.GO / "internal" / "engine" / "tracing.go",
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    used = set(re.findall(r'"((?:rara|rpc|error)\.[a-z_.]+)"', text)) - {"rara.link", "rara.executor"}
    shown = {name for row in table("Traces") for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row[4])}
    assert shown == used
