"""Every metric of the scheduler as an interface: name, unit, labels, meaning. docs/reference/telemetry.md shows it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Shape(StrEnum):
    """How values add up."""

    COUNTER = "counter"  # only grows, from this scheduler's start
    GAUGE = "gauge"  # as it is now
    HISTOGRAM = "histogram"  # counts by size, from this scheduler's start


@dataclass(frozen=True, slots=True)
class Metric:
    """unit: as UCUM writes it; things are counted in braces. buckets: upper bounds, of a histogram alone."""

    name: str
    shape: Shape
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_S: Final = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    1800.0,
    7200.0,
)
_SIZES: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)

STEPS_READY: Final = Metric(
    "rara.step.ready",
    Shape.GAUGE,
    "{step}",
    "steps that could be leased now; counted up to 10,000 a route, and 100,000 or 100 a route in all",
    ("kind",),
)
STEPS_WAITING: Final = Metric(
    "rara.step.waiting",
    Shape.GAUGE,
    "{step}",
    "steps that wait for their backoff; counted up to 10,000 in all",
    ("kind",),
)
STEPS_HELD: Final = Metric(
    "rara.step.held",
    Shape.GAUGE,
    "{step}",
    "steps that stand aside since their definition is paused; counted up to 10,000. Those of a paused kind are ready",
)
PAUSES: Final = Metric(
    "rara.pause.active", Shape.GAUGE, "{pause}", "kinds and definitions that are paused", ("sort",)
)
OLDEST_READY: Final = Metric(
    "rara.step.oldest_ready",
    Shape.GAUGE,
    "s",
    "for how long the oldest ready step could have been leased",
    ("kind",),
)
OLDEST_TRANSACTION: Final = Metric(
    "rara.transaction.oldest", Shape.GAUGE, "s", "age of the oldest open transaction in this database"
)
IN_FLIGHT: Final = Metric(
    "rara.step.in_flight",
    Shape.GAUGE,
    "{step}",
    "leases that executors connected to this scheduler hold",
    ("kind",),
)
SESSIONS: Final = Metric(
    "rara.session.open", Shape.GAUGE, "{session}", "executors connected to this scheduler"
)
COMMIT_QUEUE: Final = Metric(
    "rara.commit.queue", Shape.GAUGE, "{event}", "events that have arrived and are not committed yet"
)
LOOP_LAG: Final = Metric(
    "rara.loop.lag", Shape.GAUGE, "s", "longest delay of the event loop within the last 15 s"
)
DISPATCH_LATENCY: Final = Metric(
    "rara.dispatch.latency", Shape.HISTOGRAM, "s", "from ready to sent to an executor", ("kind",), _LONG_S
)
RENEWALS: Final = Metric("rara.lease.renewals", Shape.COUNTER, "{lease}", "leases renewed by heartbeats")
EXPIRATIONS: Final = Metric(
    "rara.lease.expirations", Shape.COUNTER, "{lease}", "leases that nobody renewed in time", ("kind",)
)
ATTEMPTS: Final = Metric(
    "rara.attempt.ended",
    Shape.COUNTER,
    "{attempt}",
    "attempts that ended; outcome `retried` leaves the step open",
    ("kind", "outcome", "code"),
)
RETRIES: Final = Metric(
    "rara.step.retries", Shape.COUNTER, "{step}", "attempts after which their step goes on", ("kind", "code")
)
STEPS_ENDED: Final = Metric(
    "rara.step.ended",
    Shape.COUNTER,
    "{step}",
    "steps that closed; kind `none`: closed while no executor held them",
    ("kind", "outcome"),
)
RUNS_STARTED: Final = Metric(
    "rara.run.started", Shape.COUNTER, "{run}", "runs and retries of runs that were stored"
)
RUNS_ENDED: Final = Metric("rara.run.ended", Shape.COUNTER, "{run}", "runs that closed", ("outcome",))
COMMIT_EVENTS: Final = Metric("rara.commit.events", Shape.COUNTER, "{event}", "events committed")
COMMIT_BATCH: Final = Metric(
    "rara.commit.batch_size", Shape.HISTOGRAM, "{event}", "events in one transaction", (), _SIZES
)
COMMIT_DURATION: Final = Metric(
    "rara.commit.duration", Shape.HISTOGRAM, "s", "time of one transaction", (), _SHORT_S
)
POOL_WAIT: Final = Metric(
    "rara.pool.wait", Shape.HISTOGRAM, "s", "wait for a database connection", ("lane",), _SHORT_S
)
POOL_TIMEOUTS: Final = Metric(
    "rara.pool.timeouts", Shape.COUNTER, "{wait}", "waits for a database connection given up", ("lane",)
)
ARTIFACT_BYTES: Final = Metric(
    "rara.artifact.transferred",
    Shape.COUNTER,
    "By",
    "bytes of artifacts through this scheduler",
    ("direction",),
)
CALLS: Final = Metric("rara.call.count", Shape.COUNTER, "{call}", "gRPC calls that ended", ("method", "code"))
CALL_DURATION: Final = Metric(
    "rara.call.duration", Shape.HISTOGRAM, "s", "time of one unary gRPC call", ("method",), _SHORT_S
)
SPANS_DROPPED: Final = Metric(
    "rara.telemetry.dropped",
    Shape.COUNTER,
    "{attempt}",
    "attempts without spans, since too many ended at once",
)

METRICS: Final = (
    STEPS_READY,
    STEPS_WAITING,
    STEPS_HELD,
    PAUSES,
    OLDEST_READY,
    IN_FLIGHT,
    SESSIONS,
    DISPATCH_LATENCY,
    RENEWALS,
    EXPIRATIONS,
    ATTEMPTS,
    RETRIES,
    STEPS_ENDED,
    RUNS_STARTED,
    RUNS_ENDED,
    COMMIT_EVENTS,
    COMMIT_BATCH,
    COMMIT_DURATION,
    COMMIT_QUEUE,
    POOL_WAIT,
    POOL_TIMEOUTS,
    OLDEST_TRANSACTION,
    LOOP_LAG,
    ARTIFACT_BYTES,
    CALLS,
    CALL_DURATION,
    SPANS_DROPPED,
)
