"""Metrics as instruments of OpenTelemetry."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
from opentelemetry.metrics import Counter as CounterInstrument

from rara_scheduler.domain.attempt import Decision
from rara_scheduler.domain.errors import Code
from rara_scheduler.domain.step import StepState
from rara_scheduler.telemetry import catalogue as c
from rara_scheduler.telemetry.labels import OTHER, Folded
from rara_scheduler.telemetry.port import Metrics, Outlook

_CODES: Final = frozenset(str(code) for code in Code)
_OUTCOMES: Final = {
    StepState.SUCCEEDED: "succeeded",
    StepState.TERMINAL_FAILED: "failed",
    StepState.CANCELLED: "cancelled",
    StepState.RETRYABLE_FAILED: "retried",
}


class RecordedMetrics(Metrics):
    """Counters and histograms are told at once, from one batch together; gauges are read from the last outlook."""

    is_on = True

    def __init__(self, meter: Meter) -> None:
        self._kinds = Folded()
        self._gauges: dict[str, list[Observation]] = {}
        self._counters: dict[str, CounterInstrument] = {}
        self._histograms: dict[str, Histogram] = {}
        for metric in c.METRICS:
            match metric.shape:
                case c.Shape.COUNTER:
                    self._counters[metric.name] = meter.create_counter(
                        metric.name, metric.unit, metric.meaning
                    )
                case c.Shape.HISTOGRAM:
                    self._histograms[metric.name] = meter.create_histogram(
                        metric.name,
                        metric.unit,
                        metric.meaning,
                        explicit_bucket_boundaries_advisory=metric.buckets,
                    )
                case c.Shape.GAUGE:
                    meter.create_observable_gauge(
                        metric.name, [self._reader(metric.name)], metric.unit, metric.meaning
                    )

    def _reader(self, name: str) -> "_Reader":
        return _Reader(self, name)

    def observations(self, name: str) -> list[Observation]:
        """Called on exporters' threads: what it reads is replaced as a whole and never changed."""
        return self._gauges.get(name, [])

    def _add(self, metric: c.Metric, count: float, **labels: str) -> None:
        self._counters[metric.name].add(count, labels)

    def _record(self, metric: c.Metric, value: float, **labels: str) -> None:
        self._histograms[metric.name].record(value, labels)

    # What the parts tell.

    def dispatched(self, waited: Iterable[tuple[str, float]]) -> None:
        for kind, waited_s in waited:
            self._record(c.DISPATCH_LATENCY, max(0.0, waited_s), kind=self._kinds.label(kind))

    def renewed(self, leases: int) -> None:
        if leases:
            self._add(c.RENEWALS, leases)

    def committed(self, events: int, took_s: float) -> None:
        self._add(c.COMMIT_EVENTS, events)
        self._record(c.COMMIT_BATCH, events)
        self._record(c.COMMIT_DURATION, took_s)

    def attempts_ended(self, decisions: Iterable[Decision]) -> None:
        ended = Counter(
            (self._kinds.label(decision.kind), _OUTCOMES[closing.to], _code(decision))
            for decision in decisions
            if (closing := decision.closing) is not None
        )
        for (kind, outcome, code), count in ended.items():
            self._add(c.ATTEMPTS, count, kind=kind, outcome=outcome, code=code)
            if outcome == "retried":
                self._add(c.RETRIES, count, kind=kind, code=code)
            else:
                self._add(c.STEPS_ENDED, count, kind=kind, outcome=outcome)
            if code == Code.LEASE_EXPIRED:
                self._add(c.EXPIRATIONS, count, kind=kind)

    def steps_cancelled(self, count: int) -> None:
        if count:
            self._add(c.STEPS_ENDED, count, kind="none", outcome="cancelled")

    def run_started(self) -> None:
        self._add(c.RUNS_STARTED, 1)

    def runs_ended(self, outcomes: Iterable[str]) -> None:
        for outcome, count in Counter(outcomes).items():
            self._add(c.RUNS_ENDED, count, outcome=outcome)

    def waited_for_connection(self, lane: str, took_s: float) -> None:
        self._record(c.POOL_WAIT, took_s, lane=lane)

    def pool_timed_out(self, lane: str) -> None:
        self._add(c.POOL_TIMEOUTS, 1, lane=lane)

    def transferred(self, direction: str, size_bytes: int) -> None:
        self._add(c.ARTIFACT_BYTES, size_bytes, direction=direction)

    def call_ended(self, method: str, code: str, took_s: float | None) -> None:
        self._add(c.CALLS, 1, method=method, code=code)
        if took_s is not None:
            self._record(c.CALL_DURATION, took_s, method=method)

    def trace_dropped(self, attempts: int) -> None:
        self._add(c.SPANS_DROPPED, attempts)

    def looks(self, outlook: Outlook) -> None:
        gauges = {
            c.IN_FLIGHT.name: self._by_kind(outlook.in_flight),
            c.SESSIONS.name: [Observation(outlook.sessions)],
            c.COMMIT_QUEUE.name: [Observation(outlook.commit_queue)],
            c.LOOP_LAG.name: [Observation(outlook.loop_lag_s)],
        }
        queues = outlook.queues
        if queues is not None:
            gauges |= {
                c.STEPS_READY.name: self._by_kind(queues.ready),
                c.STEPS_WAITING.name: self._by_kind(queues.waiting),
                c.STEPS_HELD.name: [Observation(queues.held)],
                c.PAUSES.name: [Observation(count, {"sort": sort}) for sort, count in queues.pauses.items()],
                c.OLDEST_READY.name: self._oldest(queues.oldest_ready_s),
                c.OLDEST_TRANSACTION.name: [Observation(queues.oldest_transaction_s)],
            }
        self._gauges = gauges

    def _by_kind(self, counts: Mapping[str, int]) -> list[Observation]:
        folded: Counter[str] = Counter()
        for kind, count in counts.items():
            folded[self._kinds.label(kind)] += count
        return [Observation(count, {"kind": kind}) for kind, count in folded.items()]

    def _oldest(self, ages: Mapping[str, float]) -> list[Observation]:
        folded: dict[str, float] = {}
        for kind, age_s in ages.items():
            label = self._kinds.label(kind)
            folded[label] = max(age_s, folded.get(label, 0.0))
        return [Observation(age_s, {"kind": kind}) for kind, age_s in folded.items()]


class _Reader:
    """One gauge's callback."""

    def __init__(self, metrics: RecordedMetrics, name: str) -> None:
        self._metrics = metrics
        self._name = name

    def __call__(self, _options: CallbackOptions) -> Iterable[Observation]:
        return self._metrics.observations(self._name)


def _code(decision: Decision) -> str:
    """What went wrong, not that it went wrong too often; empty: nothing."""
    closing = decision.closing
    if closing is None:
        return ""
    code = str(closing.error.code) if closing.error else str(closing.reason)
    return code if not code or code in _CODES else OTHER
