"""What a load is to be: plain values, checked where they are made."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

MAX_BATCH_STEPS: Final = 10_000  # the contract's bound on the steps of one BatchStartRuns


class Kind(StrEnum):
    """What a caller does in one turn."""

    START = "start"  # StartRun, and on
    WATCH = "watch"  # StartRun, and WatchRun until the run has ended
    BATCH = "batch"  # BatchStartRuns
    GET = "get"  # GetRun with the steps of a run started lately
    LIST = "list"  # the first page of ListRuns
    CANCEL = "cancel"  # StartRun of a long run, CancelRun, WatchRun until it has ended
    RETRY = "retry"  # StartRun of a run that fails, WatchRun, RetryRun, WatchRun
    EXPLAIN = "explain"  # ExplainStep of a step seen lately


class Form(StrEnum):
    """The graph of a run."""

    SINGLE = "single"  # one step
    DEEP = "deep"  # a chain
    WIDE = "wide"  # one step, then many at once, then one
    DIAMOND = "diamond"  # three diamonds, one after the other


MIX: Final = {
    Kind.START: 8,
    Kind.WATCH: 8,
    Kind.BATCH: 1,
    Kind.GET: 4,
    Kind.LIST: 1,
    Kind.CANCEL: 1,
    Kind.RETRY: 1,
    Kind.EXPLAIN: 1,
}
FORMS: Final = {Form.SINGLE: 8, Form.DEEP: 1, Form.WIDE: 1, Form.DIAMOND: 1}


class PlanInvalid(ValueError):
    """What was asked for cannot be. The message names the option."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One load.

    rate: turns a second that are begun, whatever became of those before (open loop). callers: so many, each beginning
    its next turn when the last is over (closed loop). One of them.
    warm_up_s: comes before duration_s and does not count. duration_s: 0 for until it is told to stop.
    sample: share of the watched runs whose steps are looked at for the latencies of stages.
    """

    rate: float = 0.0
    callers: int = 0
    duration_s: float = 30.0
    warm_up_s: float = 5.0
    poisson: bool = True
    mix: Mapping[Kind, float] = field(default_factory=lambda: dict(MIX))
    forms: Mapping[Form, float] = field(default_factory=lambda: dict(FORMS))
    width: int = 10
    depth: int = 5
    batch_size: int = 10
    payload_bytes: int = 100
    output_bytes: int = 100
    artifact_bytes: int = 0
    step_s: float = 0.0
    flaky: float = 0.0
    failing: float = 0.0
    sample: float = 0.1
    max_in_flight: int = 1000
    call_timeout_s: float = 30.0
    run_timeout_s: float = 120.0
    settle_s: float = 120.0
    ready_s: float = 30.0
    every_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.rate) == bool(self.callers):
            raise PlanInvalid("either --rate (open loop) or --callers (closed loop), one of them above 0")
        largest = max(steps_of(form, self.width, self.depth) for form in self.forms)
        if Kind.BATCH in self.mix and largest * self.batch_size > MAX_BATCH_STEPS:
            raise PlanInvalid(
                f"--batch-size {self.batch_size} x {largest} steps are more than {MAX_BATCH_STEPS} in one call"
            )


def steps_of(form: Form, width: int, depth: int) -> int:
    """How many steps a run of that form has."""
    return {Form.SINGLE: 1, Form.DEEP: depth, Form.WIDE: width + 2, Form.DIAMOND: 10}[form]


def weights(text: str, names: Iterable[str], option: str) -> dict[str, float]:
    """`start=3,get=1` as weights; a name alone counts once, what is not named is left out."""
    known = list(names)
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, given = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise PlanInvalid(f"{option}: there is no {name!r}, only {', '.join(known)}")
        try:
            weight = float(given or 1)
        except ValueError:
            raise PlanInvalid(f"{option}: {given!r} is no weight of {name}") from None
        if not 0 <= weight < float("inf"):
            raise PlanInvalid(f"{option}: the weight of {name} must be 0 or more")
        found[name] = weight
    if not any(found.values()):
        raise PlanInvalid(f"{option}: one weight must be above 0")
    return {name: weight for name, weight in found.items() if weight}
