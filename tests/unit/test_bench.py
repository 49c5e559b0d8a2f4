"""The benchmark's arithmetic, and that no bar can go missing unnoticed."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rara_bench import report
from rara_bench.arithmetic import medians, percentile, ratio, value
from rara_bench.arm import Sample
from rara_bench.arms import ARMS
from rara_bench.bars import BARS, Bar, Standing, exit_code, judge, selected
from rara_bench.machine import Watch, shares
from rara_bench.open_loop import arrivals
from rara_bench.options import Options

# The table of the issue that set them: floor, bar, moonshot.
LEVELS = {
    "drain_vs_limit": (">=", 0.10, 0.18, 0.5),
    "drain_vs_pgqueuer": (">=", 0.5, 0.8, 2),
    "drain_vs_oban": (">=", 1, 1.6, 4),
    "drain_vs_absurd": (">=", 2.5, 6, 20),
    "drain_vs_dbos": (">=", 5, 12, 40),
    "drain_vs_procrastinate": (">=", 7, 16, 50),
    "latency_p50": ("<=", 4, 2, 1),
    "latency_p99": ("<=", 8, 3, 1),
    "open_loop_500": ("<=", 16, 8, 3),
    "backlog_1m": ("<=", 3, 1.5, 1.1),
    "held_snapshot": (">=", 0.3, 0.75, 0.95),
    "slow_disk": (">=", 0.5, 0.75, 0.95),
    "one_parent": (">=", 0.7, 0.8, 1),
    "heartbeat_wal": ("<=", 600, 250, 1),
    "wal_per_step": ("<=", 3000, 2000, 1200),
    "idle": ("<=", 600, 120, 30),
    "two_schedulers": (">=", 0.7, 0.8, 1.2),
    "go_vs_python": (">=", 0.8, 1.1, 1.5),
    "isolation": (">=", 0.4, 0.6, 0.9),
}


def sample(arm: str, number: int, at: float, **figures: float) -> Sample:
    return Sample(arm, number, at, figures, busy=0.5, others=0.0, tries=1)


def everything(figure: float = 100.0) -> list[Sample]:
    """All arms with the same value of all that bars ask for, in two rounds."""
    names = {f for bar in BARS for f in (bar.above, bar.below, bar.moonshot_above) if f is not None}
    return [
        sample(arm.name, number, at, **{name: figure for of, name in names if of == arm.name})
        for number in (1, 2)
        for at, arm in enumerate(ARMS)
    ]


def test_a_percentile_is_the_value_that_its_share_does_not_exceed() -> None:
    values = [float(n) for n in range(1, 201)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1)) == (100, 198, 200)
    assert percentile([7.0], 0.01) == 7
    for wrong in (([], 0.5), ([1.0], 0.0), ([1.0], 1.1)):
        with pytest.raises(ValueError, match=r"no values|no share"):
            percentile(*wrong)


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """The machine was twice as fast in the second round: that cancels out, as it does not in a ratio of medians."""
    samples = [
        sample("a", 1, 0, rate=100), sample("b", 1, 1, rate=200),
        sample("a", 2, 2, rate=400), sample("b", 2, 3, rate=400),
        sample("a", 3, 4, rate=90), sample("b", 3, 5, rate=100),
        sample("a", 4, 6, rate=90),  # its other half was not measured
    ]  # fmt: skip
    assert ratio(samples, ("a", "rate"), ("b", "rate")) == 0.9
    assert ratio(samples, ("a", "rate"), ("c", "rate")) is None
    assert value(samples, ("a", "rate")) == 95
    assert value(samples, ("c", "rate")) is None
    assert medians(s for s in samples if s.arm == "b") == {"rate": 200}
    assert medians([]) == {}


def test_an_arm_measured_twice_a_round_counts_where_it_stands_nearer() -> None:
    samples = [sample("drain", 1, 0, rate=10), sample("drain", 1, 50, rate=20), sample("go", 1, 45, rate=30)]
    assert ratio(samples, ("go", "rate"), ("drain", "rate")) == 1.5
    assert ratio(samples, ("drain", "rate"), ("go", "rate")) == pytest.approx(2 / 3)


def test_nothing_is_divided_by_nothing() -> None:
    samples = [sample("a", 1, 0, rate=10), sample("b", 1, 1, rate=0)]
    assert ratio(samples, ("a", "rate"), ("b", "rate")) is None


def test_others_are_what_was_busy_and_not_ours() -> None:
    before, after = Watch(busy_s=100, own_s=40, all_s=200), Watch(busy_s=110, own_s=46, all_s=220)
    assert shares(before, after) == (0.5, 0.2)
    assert shares(before, replace(after, own_s=60)) == (0.5, 0.0)  # ticks are coarse


def test_arrivals_come_at_the_rate_and_the_same_each_time() -> None:
    instants = list(arrivals(500, 10))
    assert instants == list(arrivals(500, 10))
    assert instants == sorted(instants)
    assert instants[0] > 0
    assert instants[-1] < 10
    assert len(instants) == pytest.approx(5000, rel=0.05)
    gaps = [after - before for before, after in pairwise(instants)]
    assert sum(gap > 0.002 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1/e: memoryless


def test_the_bars_are_those_that_were_set() -> None:
    assert {bar.name: (bar.sense, bar.floor, bar.bar, bar.moonshot) for bar in BARS} == LEVELS
    for bar in BARS:
        order = (bar.floor, bar.bar, bar.moonshot)
        assert list(order) == sorted(order, reverse=bar.sense == "<=")


def test_each_bar_is_fed_by_arms_that_exist() -> None:
    arms = {arm.name for arm in ARMS}
    for bar in BARS:
        assert bar.arms <= arms
        assert bar.moonshot_above is None or bar.moonshot_above[0] in arms


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.name)
def test_a_bar_without_its_figure_is_missing_and_fails_the_run(bar: Bar) -> None:
    whole = everything()
    for arm in bar.arms:
        verdicts = {v.bar.name: v for v in judge([s for s in whole if s.arm != arm])}
        assert verdicts.keys() == LEVELS.keys()
        assert verdicts[bar.name].standing is Standing.MISSING
        assert verdicts[bar.name].figure is None
        assert exit_code(verdicts.values(), strict=False) == 2
    complete = judge(whole)
    assert not [v for v in complete if v.figure is None]
    assert exit_code(complete, strict=False) in (0, 1)


@pytest.mark.parametrize(
    ("figure", "standing", "code", "strict_code"),
    [
        (0.09, Standing.BELOW_FLOOR, 1, 1),
        (0.10, Standing.FLOOR, 0, 1),
        (0.18, Standing.BAR, 0, 0),
        (0.5, Standing.MOONSHOT, 0, 0),
        (float("nan"), Standing.MISSING, 2, 2),
        (float("inf"), Standing.MISSING, 2, 2),
    ],
)
def test_how_a_figure_stands(figure: float, standing: Standing, code: int, strict_code: int) -> None:
    bar = next(bar for bar in BARS if bar.name == "drain_vs_limit")
    samples = [sample("drain", 1, 0, steps_per_s=1000 * figure), sample("limit", 1, 1, steps_per_s=1000)]
    [verdict] = judge(samples, [bar])
    assert verdict.standing is standing
    assert exit_code([verdict], strict=False) == code
    assert exit_code([verdict], strict=True) == strict_code


def test_the_open_loop_s_moonshot_is_at_twice_the_rate() -> None:
    bar = next(bar for bar in BARS if bar.name == "open_loop_500")
    samples = [sample("open_loop_500", 1, 0, p99_ms=20), sample("latency", 1, 1, p50_ms=10)]
    [verdict] = judge(samples, [bar])
    assert (verdict.standing, verdict.figure, verdict.moonshot_figure) == (Standing.BAR, 2, None)
    [verdict] = judge([*samples, sample("open_loop_1000", 1, 2, p99_ms=31)], [bar])
    assert verdict.standing is Standing.BAR
    [verdict] = judge([*samples, sample("open_loop_1000", 1, 2, p99_ms=30)], [bar])
    assert verdict.standing is Standing.MOONSHOT


def test_a_part_of_a_run_judges_what_it_measured() -> None:
    arms = [arm.name for arm in ARMS]
    assert selected(["limit", "drain"], arms)[0] == {"limit", "drain"}
    assert [bar.name for bar in selected(["limit", "drain"], arms)[1]] == ["drain_vs_limit"]
    assert selected(["isolation"], arms)[0] == {"drain", "drain_in_process"}
    with pytest.raises(ValueError, match="'drian' is neither an arm nor a bar"):
        selected(["drian"], arms)


def test_what_is_written(tmp_path: Path) -> None:
    verdicts = judge(everything())
    result = report.document(facts(), everything(), verdicts, {"peer_river": "no go"}, others=0.08)
    report.write(result, tmp_path)
    written = json.loads((tmp_path / "latest.json").read_text())
    assert written == json.loads(json.dumps(result))
    assert written["bars"]["latency_p50"] == [1.0, "<=", 2]
    assert written["bars"].keys() == written["floors"].keys() == written["moonshots"].keys() == LEVELS.keys()
    assert written["missing"] == {"peer_river": "no go"}
    for picture in ("rates.svg", "bars.svg"):
        text = (tmp_path / picture).read_text()
        assert text.startswith("<?xml")
        assert "<script" not in text


def test_the_readme_s_table_is_made_again(tmp_path: Path) -> None:
    result = report.document(facts(), everything(), judge(everything()), {}, others=0.08)
    readme = tmp_path / "README.md"
    readme.write_text("before\n\n<!-- made: bench -->\nOLD TABLE\n<!-- end -->\n\nafter\n")
    report.update_readme(result, readme)
    once = readme.read_text()
    assert once.startswith("before\n\n<!-- made: bench -->\n")
    assert once.endswith("<!-- end -->\n\nafter\n")
    assert "OLD TABLE" not in once
    for name in LEVELS:
        assert f"| `{name}` |" in once
    report.update_readme(result, readme)
    assert readme.read_text() == once


def test_the_readme_shows_the_latest_results() -> None:
    made = report.README.read_text()
    latest = report.RESULTS / "latest.json"
    if latest.exists():
        result = json.loads(latest.read_text())
        assert result["bars"].keys() == LEVELS.keys()
        assert report.table(result) in made
    else:
        assert "<!-- made: bench -->" in made


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"steps": 10}, {"others": 0.0}, {"tries": 0}, {"slots": 0}])
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Options(**wrong)


def facts() -> dict[str, Any]:
    return {
        "began": "2026-11-30 04:00 UTC",
        "took_s": 60,
        "machine": {"cores": 2, "processor": "one", "system": "Linux", "filesystem": "ext4"},
        "versions": {"python": "3.13.0"},
        "settings": {"postgres": {"version": "15.18"}},
        "options": Options().record(),
        "arms": {arm.name: arm.what for arm in ARMS},
    }
