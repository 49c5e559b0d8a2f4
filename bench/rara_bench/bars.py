"""The bars: which figures are compared, what they should be, and how a run stands to them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, TypeAlias

from rara_bench.arithmetic import ratio, value
from rara_bench.arm import Sample

Figure: TypeAlias = tuple[str, str]  # arm, name
Sense: TypeAlias = Literal[">=", "<="]


class Standing(StrEnum):
    """From worst to best."""

    MISSING = "missing"
    BELOW_FLOOR = "below the floor"
    FLOOR = "floor held"
    BAR = "bar reached"
    MOONSHOT = "moonshot reached"


@dataclass(frozen=True, slots=True)
class Bar:
    """above ÷ below; below None: `above` as it is. moonshot_above: where the moonshot asks for another figure."""

    name: str
    sense: Sense
    above: Figure
    below: Figure | None
    floor: float
    bar: float
    moonshot: float
    moonshot_above: Figure | None = None

    @property
    def arms(self) -> set[str]:
        """What has to be measured for it."""
        return {figure[0] for figure in (self.above, self.below) if figure is not None}

    def figure(self, samples: Sequence[Sample]) -> float | None:
        return _figure(samples, self.above, self.below)

    def moonshot_figure(self, samples: Sequence[Sample]) -> float | None:
        return _figure(samples, self.moonshot_above or self.above, self.below)

    def meets(self, figure: float, level: float) -> bool:
        return figure >= level if self.sense == ">=" else figure <= level


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run stands to one bar. figure: None where it is missing."""

    bar: Bar
    figure: float | None
    moonshot_figure: float | None
    standing: Standing


_DRAIN: Final = ("drain", "steps_per_s")


def _peer(name: str, floor: float, bar: float, moonshot: float) -> Bar:
    return Bar(f"drain_vs_{name}", ">=", _DRAIN, (f"peer_{name}", "jobs_per_s"), floor, bar, moonshot)


def _drains(name: str, above: str, below: str, floor: float, bar: float, moonshot: float) -> Bar:
    return Bar(name, ">=", (above, "steps_per_s"), (below, "steps_per_s"), floor, bar, moonshot)


def _latency(share: str, floor: float, bar: float, moonshot: float) -> Bar:
    figure = f"{share}_ms"
    return Bar(
        f"latency_{share}", "<=", ("latency", figure), ("latency_pgqueuer", figure), floor, bar, moonshot
    )


BARS: Final = (
    _drains("drain_vs_limit", "drain", "limit", 0.10, 0.18, 0.5),
    _peer("pgqueuer", 0.5, 0.8, 2),
    _peer("oban", 1, 1.6, 4),
    _peer("absurd", 2.5, 6, 20),
    _peer("dbos", 5, 12, 40),
    _peer("procrastinate", 7, 16, 50),
    _latency("p50", 4, 2, 1),
    _latency("p99", 8, 3, 1),
    Bar(
        "open_loop_500",
        "<=",
        ("open_loop_500", "p99_ms"),
        ("latency", "p50_ms"),
        16,
        8,
        3,
        moonshot_above=("open_loop_1000", "p99_ms"),
    ),
    Bar("backlog_1m", "<=", ("backlog_1m", "p50_ms"), ("backlog_10k", "p50_ms"), 3, 1.5, 1.1),
    _drains("held_snapshot", "drain_held", "drain_unheld", 0.3, 0.75, 0.95),
    _drains("slow_disk", "drain_slow_disk", "drain_fast_disk", 0.5, 0.75, 0.95),
    _drains("one_parent", "drain_one_parent", "drain", 0.7, 0.8, 1),
    Bar("heartbeat_wal", "<=", ("heartbeat", "wal_bytes_per_step_and_beat"), None, 600, 250, 1),
    Bar("wal_per_step", "<=", ("drain_four_events", "wal_bytes_per_step"), None, 3000, 2000, 1200),
    Bar("idle", "<=", ("idle", "statements_per_minute"), None, 600, 120, 30),
    _drains("two_schedulers", "drain_two_schedulers", "drain_two_executors", 0.7, 0.8, 1.2),
    _drains("go_vs_python", "drain_go", "drain", 0.8, 1.1, 1.5),
    _drains("isolation", "drain", "drain_in_process", 0.4, 0.6, 0.9),
)


def judge(samples: Sequence[Sample], bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """One verdict for each bar, missing ones too."""
    return [_verdict(bar, samples) for bar in bars]


def exit_code(verdicts: Collection[Verdict], *, strict: bool) -> int:
    """2: a bar is missing. 1: one is below its floor; strict: one is not reached. 0: else."""
    standings = {verdict.standing for verdict in verdicts}
    if Standing.MISSING in standings:
        return 2
    refused = {Standing.BELOW_FLOOR} | ({Standing.FLOOR} if strict else set())
    return 1 if standings & refused else 0


def selected(names: Collection[str], arms: Collection[str]) -> tuple[set[str], list[Bar]]:
    """The arms that the names (of arms or bars) ask for, and the bars that these arms suffice for.

    Raises ValueError for a name that is neither.
    """
    of_bars: Mapping[str, Bar] = {bar.name: bar for bar in BARS}
    chosen: set[str] = set()
    for name in names:
        if name not in arms and name not in of_bars:
            raise ValueError(f"{name!r} is neither an arm nor a bar: {', '.join([*arms, *of_bars])}")
        chosen |= {name} & set(arms)
        chosen |= of_bars[name].arms if name in of_bars else set()
    return chosen, [bar for bar in BARS if bar.arms <= chosen]


def _verdict(bar: Bar, samples: Sequence[Sample]) -> Verdict:
    figure, moonshot_figure = bar.figure(samples), bar.moonshot_figure(samples)
    if figure is None:
        standing = Standing.MISSING
    elif not bar.meets(figure, bar.floor):
        standing = Standing.BELOW_FLOOR
    elif not bar.meets(figure, bar.bar):
        standing = Standing.FLOOR
    elif moonshot_figure is None or not bar.meets(moonshot_figure, bar.moonshot):
        standing = Standing.BAR
    else:
        standing = Standing.MOONSHOT
    return Verdict(bar, figure, moonshot_figure, standing)


def _figure(samples: Sequence[Sample], above: Figure, below: Figure | None) -> float | None:
    found = value(samples, above) if below is None else ratio(samples, above, below)
    return found if found is not None and math.isfinite(found) else None
