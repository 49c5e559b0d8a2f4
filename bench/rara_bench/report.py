"""What a run leaves behind: latest.json, two pictures, the table in bench/README.md, and lines on the terminal."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rara_bench.arithmetic import medians
from rara_bench.arm import Sample
from rara_bench.bars import BARS, Bar, Standing, Verdict

BENCH: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = BENCH / "results"
README: Final = BENCH / "README.md"
_MADE: Final = re.compile(r"(<!-- made: bench -->\n).*?(<!-- end -->)", re.DOTALL)
_PICTURES: Final = """
![Steps or jobs a second](results/rates.svg)
![Figures as multiples of their bars](results/bars.svg)
"""
_RATES: Final = {
    "limit": ("physical limit", "steps_per_s"),
    "drain_go": ("rara, Go executor", "steps_per_s"),
    "drain": ("rara", "steps_per_s"),
    "peer_river": ("River (Go)", "jobs_per_s"),
    "peer_pgqueuer": ("pgqueuer", "jobs_per_s"),
    "peer_oban": ("Oban", "jobs_per_s"),
    "peer_absurd": ("Absurd", "jobs_per_s"),
    "peer_dbos": ("DBOS", "jobs_per_s"),
    "peer_procrastinate": ("Procrastinate", "jobs_per_s"),
}


def document(
    facts: Mapping[str, object],
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    missing: Mapping[str, str],
    *,
    others: float,
) -> dict[str, Any]:
    """latest.json. others: what they may use of the processors before a sample counts as disturbed."""
    arms = dict.fromkeys(sample.arm for sample in samples)
    found = [verdict for verdict in verdicts if verdict.figure is not None]
    return {
        **facts,
        "bars": {v.bar.name: [_rounded(v.figure), v.bar.sense, v.bar.bar] for v in found},
        "floors": {v.bar.name: [_rounded(v.figure), v.bar.sense, v.bar.floor] for v in found},
        "moonshots": {v.bar.name: [_rounded(v.moonshot_figure), v.bar.sense, v.bar.moonshot] for v in found},
        "standings": {verdict.bar.name: verdict.standing.value for verdict in verdicts},
        "missing": dict(missing),
        "medians": {
            arm: {
                name: _rounded(figure) for name, figure in medians(s for s in samples if s.arm == arm).items()
            }
            for arm in arms
        },
        "disturbed": sum(sample.others > others for sample in samples),
        "samples": [asdict(sample) for sample in samples],
    }


def write(result: Mapping[str, Any], folder: Path) -> None:
    """latest.json and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1)
    (folder / "latest.json").write_text(_on_one_line(text) + "\n", encoding="utf-8")
    draw_rates(result, folder / "rates.svg")
    draw_bars(result, folder / "bars.svg")


def update_readme(result: Mapping[str, Any], readme: Path = README) -> None:
    """Make the table between its markers anew."""
    text = readme.read_text(encoding="utf-8")
    made = _MADE.sub(lambda match: f"{match[1]}\n{table(result)}\n{_PICTURES}\n{match[2]}", text)
    readme.write_text(made, encoding="utf-8")


def table(result: Mapping[str, Any]) -> str:
    """In Markdown: the bars, then what was measured."""
    lines = [
        _circumstances(result),
        "",
        "| Bar | Figure | Floor | Bar | Moonshot | Standing |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
        *(_bar_row(bar, result) for bar in BARS),
        "",
        "| Arm | What | Medians |",
        "| --- | --- | --- |",
        *(_arm_row(arm, result) for arm in result["medians"]),
    ]
    return "\n".join(lines) + "\n"


def _circumstances(result: Mapping[str, Any]) -> str:
    machine, versions, postgres = result["machine"], result["versions"], result["settings"]["postgres"]
    parts = [
        result["began"],
        f"{machine['cores']} cores ({machine['processor']})",
        f"{machine['system']}, {machine['filesystem']}",
        f"PostgreSQL {postgres['version']}",
        f"Python {versions['python']}",
        f"commit `{versions.get('commit', 'unknown')}`",
        f"{result['options']['rounds']} rounds in {result['took_s'] / 60:.0f} minutes",
        f"{result['disturbed']} of {len(result['samples'])} samples disturbed by others",
    ]
    return "; ".join(parts) + "."


def lines(verdicts: Sequence[Verdict], missing: Mapping[str, str]) -> list[str]:
    """For the terminal."""
    shown = [f"{'bar':<24}{'figure':>10}  {'floor':>8} {'bar':>8} {'moonshot':>8}"]
    for verdict in verdicts:
        bar = verdict.bar
        figure = "-" if verdict.figure is None else f"{verdict.figure:,.3g}"
        shown.append(
            f"{bar.name:<24}{figure:>10}  {bar.sense}{bar.floor:>6,g} {bar.bar:>8,g} {bar.moonshot:>8,g}"
            f"  {verdict.standing.value}"
        )
    for heading, standings in (
        ("missing", {Standing.MISSING}),
        ("below the floor", {Standing.BELOW_FLOOR}),
        ("not reached", {Standing.BELOW_FLOOR, Standing.FLOOR}),
    ):
        names = [verdict.bar.name for verdict in verdicts if verdict.standing in standings]
        shown.append(f"{heading}: {', '.join(names) or 'none'}")
    return [*shown, *(f"{arm} could not be measured: {why}" for arm, why in missing.items())]


def draw_rates(result: Mapping[str, Any], target: Path) -> None:
    """Steps or jobs a second, medians."""
    found = [
        (label, result["medians"][arm][figure], arm.startswith("drain"))
        for arm, (label, figure) in _RATES.items()
        if figure in result["medians"].get(arm, {})
    ]
    chart = _chart("No-op steps or jobs a second", "medians of a run, logarithmic")
    chart.logarithmic = True
    chart.zero = 10
    chart.range = (10, max((rate for _, rate, _ in found), default=10) * 1.1)
    chart.x_labels = [f"{label}: {rate:,.0f}" for label, rate, _ in reversed(found)]
    colors = {True: "#2a7f3f", False: "#7a8ca5"}
    chart.add("rate", [{"value": rate, "color": colors[ours]} for _, rate, ours in reversed(found)])
    _save(chart, target)


def draw_bars(result: Mapping[str, Any], target: Path) -> None:
    """Each bar as a multiple of what it asks for: 1 and more is reached."""
    chart = _chart("Figures as multiples of their bars", "1 and more: reached")
    chart.range = (0, 3)
    names, shares = [], []
    for name, (figure, sense, bar) in reversed(result["bars"].items()):
        share = figure / bar if sense == ">=" else bar / max(figure, 1e-9)
        names.append(name)
        shares.append({"value": min(share, 3), "color": "#2a7f3f" if share >= 1 else "#c0562b"})
    chart.x_labels = names
    chart.add("multiple of the bar", shares)
    _save(chart, target)


def _chart(title: str, x_title: str) -> Any:
    import pygal
    from pygal.style import Style

    return pygal.HorizontalBar(
        title=title,
        x_title=x_title,
        js=(),
        style=Style(background="white", plot_background="white", opacity="1"),
        show_legend=False,
        print_values=False,
        height=520,
        width=860,
    )


def _save(chart: Any, target: Path) -> None:
    """Without the scripts that only a browser's tooltips need."""
    text = chart.render(is_unicode=True)
    target.write_text(re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL) + "\n", encoding="utf-8")


def _bar_row(bar: Bar, result: Mapping[str, Any]) -> str:
    figure = result["bars"].get(bar.name, ["missing"])[0]
    shown = figure if isinstance(figure, str) else f"{figure:,g}"
    sign = "≥" if bar.sense == ">=" else "≤"
    levels = " | ".join(f"{sign} {level:,g}" for level in (bar.floor, bar.bar, bar.moonshot))
    return f"| `{bar.name}` | {shown} | {levels} | {result['standings'].get(bar.name, 'missing')} |"


def _arm_row(arm: str, result: Mapping[str, Any]) -> str:
    figures = ", ".join(f"{name} {figure:,g}" for name, figure in result["medians"][arm].items())
    return f"| `{arm}` | {result['arms'][arm]} | {figures} |"


def _rounded(figure: float | None) -> float | None:
    """To four digits: more is noise."""
    return None if figure is None else float(f"{figure:.4g}")


def _on_one_line(text: str) -> str:
    """Short lists and objects stay on their line, so that a change of the file can be read."""
    return re.sub(r"[\[{][^\[\]{}]{0,300}[\]}]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text)
