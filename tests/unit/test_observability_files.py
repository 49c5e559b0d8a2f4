"""Alerts, dashboard, collector and the compose profile speak of what there is."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry, generate_latest
from rara_scheduler.domain.attempt import Decision
from rara_scheduler.telemetry.catalogue import METRICS, Metric, Shape
from rara_scheduler.telemetry.port import Outlook, Queues
from rara_scheduler.telemetry.recorder import RecordedMetrics
from support.deploy_files import DEPLOY, compose

FOLDER = DEPLOY / "observability"
RULES: list[dict[str, Any]] = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
PROFILE = {
    name: service
    for name, service in compose()["services"].items()
    if "observability" in service.get("profiles", [])
}
_METRIC = re.compile(r"\brara_[a-z0-9_]+")
_LABELS = re.compile(r"\b(rara_[a-z0-9_]+)\{([^}]*)\}")
_GROUPED = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")
OF_PROMETHEUS = {"le", "instance", "job"}


def expressions() -> list[str]:
    """Of all alerts and panels."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [rule["expr"] for rule in RULES] + panels


@pytest.fixture(scope="module")
def shown() -> str:
    """What a scheduler shows Prometheus when it has measured something of everything."""
    registry = CollectorRegistry()
    reader = PrometheusMetricReader(registry=registry, scope_info_enabled=False)
    provider = MeterProvider([reader], shutdown_on_exit=False)
    metrics = RecordedMetrics(provider.get_meter("test"))
    metrics.looks(Outlook(Queues({"k": 1}, {"k": 1.0}, {"k": 1}, 1.0, 1, {"kind": 1}), {"k": 1}, 1, 1, 0.1))
    metrics.dispatched([("k", 1.0)])
    metrics.renewed(1)
    metrics.committed(1, 0.1)
    metrics.attempts_ended(list[Decision]())
    for metric in METRICS:
        _measure(metrics, metric)
    text = generate_latest(registry).decode()
    provider.shutdown()
    return text


def _measure(metrics: RecordedMetrics, metric: Metric) -> None:
    labels = dict.fromkeys(metric.labels, "x")
    if metric.shape is Shape.COUNTER:
        metrics._add(metric, 1, **labels)
    elif metric.shape is Shape.HISTOGRAM:
        metrics._record(metric, 1.0, **labels)


def test_every_metric_of_the_catalogue_is_shown(shown: str) -> None:
    families = set(re.findall(r"^# TYPE (rara_\w+) ", shown, re.MULTILINE))
    assert len(families) == len(METRICS)


def test_every_metric_that_is_asked_for_exists_with_its_labels(shown: str) -> None:
    samples: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(rara_\w+)(?:\{(.*)\})? ", shown, re.MULTILINE):
        samples.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    for expression in expressions():
        used = set(_METRIC.findall(expression))
        assert used <= set(samples), expression
        known = set().union(*(samples[name] for name in used)) | OF_PROMETHEUS
        for name, matchers in _LABELS.findall(expression):
            assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers)) <= samples[name], expression
        for group in _GROUPED.findall(expression):
            assert {label.strip() for label in group.split(",")} - {""} <= known, expression


def test_expressions_are_balanced() -> None:
    for expression in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression


def test_every_metric_of_a_scheduler_is_on_the_dashboard(shown: str) -> None:
    asked = {name for expression in expressions() for name in _METRIC.findall(expression)}
    families = re.findall(r"^# TYPE (rara_\w+) ", shown, re.MULTILINE)
    assert [one for one in families if not any(name.startswith(one) for name in asked)] == []


def test_an_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+m", rule["for"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_panels_do_not_overlap() -> None:
    places = [tuple(panel["gridPos"][side] for side in "xy") for panel in DASHBOARD["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)


def test_the_profile_mounts_files_that_are_there_and_pins_what_it_runs() -> None:
    assert set(PROFILE) == {"collector", "prometheus", "grafana"}
    for service in PROFILE.values():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists()
                assert volume.endswith(":ro")
            else:
                assert source in compose()["volumes"]


def test_prometheus_asks_where_schedulers_show_their_metrics() -> None:
    environment = compose()["services"]["scheduler"]["environment"]
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    assert (found["names"], f":{found['port']}") == (["scheduler"], environment["RARA_METRICS_LISTEN"][-5:])
    (rules,) = config["rule_files"]
    assert Path(rules).name == "alerts.yml"
    assert f'job="{job["job_name"]}"' in (FOLDER / "alerts.yml").read_text()


def test_grafana_finds_the_dashboard_and_its_data() -> None:
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} == {source["uid"]}
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/rara.yml").read_text())["providers"]
    mounts = [volume.split(":")[1] for volume in PROFILE["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/rara.json" in mounts


def test_the_collector_takes_what_services_send() -> None:
    config = yaml.safe_load((FOLDER / "collector.yml").read_text())
    pipeline = config["service"]["pipelines"]["traces"]
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) == set(config[part])
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].endswith(":4317")
