"""What a load measures, in memory that does not grow with its length."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from hdrh.histogram import HdrHistogram

from rara_load.plan import Kind

_HOUR_US: Final = 3_600_000_000
_DIGITS: Final = 3
_MAX_POINTS: Final = 600
PERCENTILES: Final = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}
_CURVE: Final = (0, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 99.999, 100)


class Latencies:
    """A histogram from 1 us to an hour, to three digits; what is longer counts as an hour."""

    def __init__(self) -> None:
        self._histogram = HdrHistogram(1, _HOUR_US, _DIGITS)

    def record(self, seconds: float) -> None:
        self._histogram.record_value(min(max(round(seconds * 1e6), 1), _HOUR_US))

    @property
    def count(self) -> int:
        return int(self._histogram.total_count)

    def at_ms(self, percentile: float) -> float:
        """0 where nothing was recorded."""
        return self._of([percentile])[percentile]

    def _of(self, percentiles: Sequence[float]) -> dict[float, float]:
        if not self.count:
            return dict.fromkeys(percentiles, 0.0)
        found = self._histogram.get_percentile_to_value_dict(list(percentiles))
        most = self._histogram.get_max_value()
        return {at: min(value, most) / 1000 for at, value in found.items()}

    def summary(self) -> dict[str, float]:
        """Milliseconds; only the count where nothing was recorded."""
        if not self.count:
            return {"count": 0}
        found = self._of([*PERCENTILES.values(), 100.0])
        named = {f"{name}_ms": round(found[at], 3) for name, at in PERCENTILES.items()}
        mean_ms = round(self._histogram.get_mean_value() / 1000, 3)
        return {"count": self.count, "mean_ms": mean_ms, **named, "max_ms": round(found[100.0], 3)}

    def curve(self) -> list[tuple[float, float]]:
        """(percentile, ms) as far as there are enough values to tell them apart."""
        known = [at for at in _CURVE if at == 100 or self.count * (100 - at) >= 100]
        found = self._of([float(at) for at in known])
        return [(at, found[float(at)]) for at in known]

    def reset(self) -> None:
        self._histogram.reset()


@dataclass(frozen=True, slots=True)
class Point:
    """What happened from at_s - span_s to at_s."""

    at_s: float
    span_s: float
    turns: int
    runs: int
    errors: int
    p50_ms: float
    p99_ms: float


def merged(points: Sequence[Point]) -> list[Point]:
    """Half as many: counts are added, of latencies the worse is kept."""
    pairs = zip(points[::2], points[1::2], strict=False)
    found = [
        Point(
            b.at_s,
            a.span_s + b.span_s,
            a.turns + b.turns,
            a.runs + b.runs,
            a.errors + b.errors,
            max(a.p50_ms, b.p50_ms),
            max(a.p99_ms, b.p99_ms),
        )
        for a, b in pairs
    ]
    return found + list(points[len(found) * 2 :])


@dataclass(slots=True)
class Sent:
    """Of one kind of operation, without the warm-up."""

    turns: int = 0
    latencies: Latencies = field(default_factory=Latencies)
    errors: Counter[str] = field(default_factory=Counter)


STAGES: Final = (
    "start_accepted",
    "ready_to_leased",
    "leased_to_running",
    "running_to_terminal",
    "start_to_terminal_seen",
    "cancel_to_terminal_seen",
    "retry_to_terminal_seen",
)


class Figures:
    """Everything that is counted while the load goes on.

    not_begun: turns that were due and never begun, since too many were in flight to the end.
    started, unknown: runs, the warm-up's too; unknown: whose start was not answered, so that they may exist.
    """

    def __init__(self) -> None:
        self.operations = {kind: Sent() for kind in Kind}
        self.stages = {stage: Latencies() for stage in STAGES}
        self.send_lag = Latencies()
        self.errors: Counter[str] = Counter()
        self.started = 0
        self.started_measured = 0
        self.unknown = 0
        self.not_begun = 0
        self.turns = 0
        self.points: list[Point] = []
        self._interval = Latencies()
        self._at_s = 0.0
        self._before = (0, 0, 0)

    def turn(self, kind: Kind, *, is_measured: bool) -> None:
        """It was begun."""
        self.turns += 1
        self.operations[kind].turns += is_measured

    def call(self, kind: Kind, seconds: float, *, is_measured: bool) -> None:
        """The call for which an operation is named was answered."""
        if is_measured:
            self.operations[kind].latencies.record(seconds)

    def start(self, seconds: float, runs: int, *, is_measured: bool) -> None:
        """Runs were started by one call."""
        self.started += runs
        self._interval.record(seconds)
        if is_measured:
            self.started_measured += runs
            self.stages["start_accepted"].record(seconds)

    def stage(self, stage: str, seconds: float, *, is_measured: bool) -> None:
        if is_measured:
            self.stages[stage].record(seconds)

    def fault(self, kind: Kind, code: str, *, is_measured: bool) -> None:
        """Errors of the warm-up are errors, too."""
        self.errors[code] += 1
        if is_measured:
            self.operations[kind].errors[code] += 1

    def point(self, at_s: float) -> Point:
        """Close an interval: since the last one."""
        now = (self.turns, self.started, self.errors.total())
        turns, runs, errors = (a - b for a, b in zip(now, self._before, strict=True))
        p50_ms, p99_ms = self._interval.at_ms(50), self._interval.at_ms(99)
        point = Point(round(at_s, 3), round(at_s - self._at_s, 3), turns, runs, errors, p50_ms, p99_ms)
        self._interval.reset()
        self._at_s, self._before = at_s, now
        self.points.append(point)
        if len(self.points) > _MAX_POINTS:
            self.points = merged(self.points)
        return point

    def series(self) -> list[dict[str, float]]:
        return [asdict(point) for point in self.points]
