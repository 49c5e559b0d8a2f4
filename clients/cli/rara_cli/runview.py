"""What is known of a watched run: how far it is, how fast, and how it ended."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from rara.v1 import workflow_pb2
from rara_client.cursors import RUN_ENDED, STEP_ENDED

from rara_cli import words
from rara_cli.exits import Exit

# A rate over less time than this says nothing.
_MEASURED_S: Final = 3.0

_ORDER: Final = {
    "terminal_failed": 0,
    "running": 1,
    "retryable_failed": 2,
    "leased": 3,
    "pending": 4,
    "cancelled": 5,
    "succeeded": 6,
}


@dataclass(slots=True)
class _Pace:
    """How a fraction moved since it was first seen in this attempt."""

    attempt: int
    first: float
    first_s: float
    last: float
    last_s: float


class RunView:
    """Takes a watch's updates in. `now_s` is a monotonic clock: rates are measured here, not between clocks."""

    def __init__(self, workflow_run_id: str) -> None:
        self.workflow_run_id = workflow_run_id
        self.run: workflow_pb2.WorkflowRun | None = None
        self.steps: dict[str, workflow_pb2.StepRun] = {}
        self.depends_on: dict[str, list[str]] = {}
        self._pace: dict[str, _Pace] = {}

    def apply(self, update: workflow_pb2.WatchRunResponse, now_s: float) -> None:
        match update.WhichOneof("update"):
            case "run":
                self.run = update.run
                self._measure("", 0, self.fraction(), now_s)
            case "step_run":
                step = update.step_run
                self.steps[step.step_run_id] = step
                self._measure(step.step_run_id, step.attempt, fraction_of(step), now_s)
                self._measure("", 0, self.fraction(), now_s)

    def learn(self, definition: workflow_pb2.Definition) -> None:
        """Take in who waits for whom."""
        self.depends_on = {step.step_name: dependencies(step) for step in definition.steps}

    @property
    def state(self) -> str:
        return words.run_state(self.run.state) if self.run is not None else "unknown"

    @property
    def has_ended(self) -> bool:
        return self.run is not None and self.run.state in RUN_ENDED

    def counts(self) -> tuple[int, int]:
        """Steps that have ended, and all steps."""
        ended = sum(step.state in STEP_ENDED for step in self.steps.values())
        known = len(self.steps)
        if self.run is not None and self.run.step_counts:
            known = max(known, sum(self.run.step_counts.values()))
        return ended, known

    def fraction(self) -> float:
        """Of the whole run, every step counting the same."""
        _, known = self.counts()
        return sum(fraction_of(step) or 0.0 for step in self.steps.values()) / known if known else 0.0

    def eta_s(self, step_run_id: str = "") -> float | None:
        """Seconds left at the rate seen so far; of the run if no step is named. None: cannot be said."""
        pace = self._pace.get(step_run_id)
        if pace is None or pace.last_s - pace.first_s < _MEASURED_S or pace.last <= pace.first:
            return None
        return (1.0 - pace.last) * (pace.last_s - pace.first_s) / (pace.last - pace.first)

    def waits_for(self, step: workflow_pb2.StepRun) -> list[str]:
        """Steps before this one that have not succeeded."""
        done = {
            other.step_name
            for other in self.steps.values()
            if other.state == workflow_pb2.STEP_RUN_STATE_SUCCEEDED
        }
        return [name for name in self.depends_on.get(step.step_name, []) if name not in done]

    def rows(self) -> list[workflow_pb2.StepRun]:
        """Steps, those that a person should see first at the top, else in the definition's order."""
        places = {name: place for place, name in enumerate(self.depends_on)}
        return sorted(
            self.steps.values(),
            key=lambda step: (
                _ORDER.get(words.step_state(step.state), 4),
                places.get(step.step_name, 0),
                step.step_run_id,
            ),
        )

    def _measure(self, key: str, attempt: int, fraction: float | None, now_s: float) -> None:
        if fraction is None:
            return
        pace = self._pace.get(key)
        if pace is None or pace.attempt != attempt or fraction < pace.last:
            self._pace[key] = _Pace(attempt, fraction, now_s, fraction, now_s)
        else:
            pace.last, pace.last_s = fraction, now_s


def fraction_of(step: workflow_pb2.StepRun) -> float | None:
    """How far a step is, from 0 to 1; None where it does not say."""
    if step.state in STEP_ENDED:
        return 1.0
    if step.state != workflow_pb2.STEP_RUN_STATE_RUNNING or not step.progress.HasField("fraction"):
        return None
    return min(max(step.progress.fraction, 0.0), 1.0)


def dependencies(step: workflow_pb2.StepDefinition) -> list[str]:
    """Steps that this one names: as dependency, as an artifact's source, or in a reference of its input."""
    names = [*step.depends_on, *(item.from_step for item in step.input_artifacts if item.from_step)]
    for pointer in references(step):
        parts = pointer.split("/")
        if len(parts) > 2 and parts[1] == "steps":
            names.append(parts[2].replace("~1", "/").replace("~0", "~"))
    return list(dict.fromkeys(names))


def references(step: workflow_pb2.StepDefinition) -> list[str]:
    """What its input is made from, as JSON pointers; without a template it is the run's input."""
    if not step.HasField("input_template"):
        return ["/run/input"]
    return list(_references(step.input_template.data))


@lru_cache(maxsize=20_000)  # the definitions of two runs, each of whose steps is asked for several times
def _references(template: bytes) -> tuple[str, ...]:
    try:
        return tuple(_pointers(json.loads(template or b"null")))
    except ValueError:  # of another media type
        return ()


def _pointers(value: object) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _pointers(item)
    elif isinstance(value, dict):
        pointer = value.get("$ref") if len(value) == 1 else None
        if isinstance(pointer, str):
            yield pointer
        else:
            for item in value.values():
                yield from _pointers(item)


def exit_of(run: workflow_pb2.WorkflowRun, failed_step: workflow_pb2.StepRun | None) -> Exit:
    """The exit code that says how a run ended; STILL_GOING for one that has not."""
    match run.state:
        case workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED:
            return Exit.OK
        case workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED:
            return Exit.RUN_CANCELLED
        case workflow_pb2.WORKFLOW_RUN_STATE_FAILED:
            reasons = {run.error.code, failed_step.reason if failed_step is not None else ""}
            return Exit.DEADLINE_EXCEEDED if "DEADLINE_EXCEEDED" in reasons else Exit.RUN_FAILED
        case _:
            return Exit.STILL_GOING
