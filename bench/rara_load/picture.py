"""A load as a picture: what happened over time, and below it the latencies by stage."""

import math
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from rara_load.figures import Latencies, Point

_SVG: Final = "http://www.w3.org/2000/svg"
_WIDTH: Final = 900
_HEIGHT: Final = 420
_LEAST_POWER: Final = -1  # of ten: what is below 0.1 ms is drawn there
_SHOWN: Final = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)


class NoPictures(Exception):
    """The drawing library is not installed."""


def draw(path: Path, points: list[Point], stages: dict[str, Latencies]) -> None:
    """Write an SVG. Raises NoPictures and OSError."""
    try:
        import pygal  # only who wants a picture needs it
    except ImportError as error:
        raise NoPictures("no picture: pygal is missing (pip install pygal, or make .venv/.dev)") from error
    charts = [_over_time(pygal, points), _by_stage(pygal, stages)]
    ElementTree.register_namespace("", _SVG)
    whole = ElementTree.Element(
        f"{{{_SVG}}}svg", viewBox=f"0 0 {_WIDTH} {_HEIGHT * len(charts)}", width=str(_WIDTH)
    )
    for number, chart in enumerate(charts):
        inner = ElementTree.fromstring(chart.render())
        inner.set("y", str(number * _HEIGHT))
        inner.set("width", str(_WIDTH))
        inner.set("height", str(_HEIGHT))
        whole.append(inner)
    path.write_bytes(ElementTree.tostring(whole, encoding="utf-8", xml_declaration=True))


def _over_time(pygal: Any, points: list[Point]) -> Any:
    flow = [(point.at_s, point.runs / point.span_s) for point in points if point.span_s]
    most_ms = max((point.p99_ms for point in points), default=0.0)
    chart = _chart(
        pygal,
        title="StartRun, ms, and runs started a second (right)",
        x_title="seconds since the load began",
        range=(0, most_ms * 1.05 or 1),
        secondary_range=(0, max((runs for _, runs in flow), default=0.0) * 1.05 or 1),
    )
    chart.add("p50", [(point.at_s, point.p50_ms) for point in points])
    chart.add("p99", [(point.at_s, point.p99_ms) for point in points])
    chart.add("runs/s", flow, secondary=True)
    return chart


def _by_stage(pygal: Any, stages: dict[str, Latencies]) -> Any:
    """Percentiles on the scale that gives each further nine the same room, milliseconds on a logarithmic one."""
    chart = _chart(pygal, title="Latency by stage, ms", x_title="percentile")
    curves = {name: latencies.curve() for name, latencies in stages.items() if latencies.count}
    furthest = max((at for curve in curves.values() for at, _ in curve if at < 100), default=0.0)
    shown = [at for at in _SHOWN if at <= max(furthest, 90.0)]
    chart.x_labels = [{"label": f"{at:g}", "value": _nines(at)} for at in shown]
    largest = max((ms for curve in curves.values() for _, ms in curve), default=1.0)
    powers = range(_LEAST_POWER, max(math.ceil(math.log10(largest)), 1) + 1)
    chart.y_labels = [{"label": f"{10.0**power:g}", "value": power} for power in powers]
    for name, curve in curves.items():
        line = [(_nines(at), max(math.log10(ms), _LEAST_POWER)) for at, ms in curve if at < 100]
        chart.add(name.replace("_", " "), line)
    return chart


def _chart(pygal: Any, **settings: Any) -> Any:
    return pygal.XY(
        width=_WIDTH,
        height=_HEIGHT,
        show_dots=False,
        margin_bottom=60,  # the legend would be cut off
        js=[],
        legend_at_bottom=True,
        legend_at_bottom_columns=4,
        truncate_legend=-1,
        value_formatter=lambda value: f"{value:.3g}",
        **settings,
    )


def _nines(percentile: float) -> float:
    """0 of 0, 1 of 90, 2 of 99."""
    return -math.log10(1 - percentile / 100)
