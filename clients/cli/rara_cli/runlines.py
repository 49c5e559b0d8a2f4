"""A watched run as plain lines: one for each change that matters, and some of the progress."""

from datetime import UTC, datetime
from typing import Final

from rara.v1 import workflow_pb2

from rara_cli import words
from rara_cli.runview import RunView

# Progress without a change of state: at most so often for one step.
_PROGRESS_S: Final = 2.0


class RunLines:
    """Turns updates into lines. `now_s` is a monotonic clock."""

    def __init__(self, view: RunView) -> None:
        self._view = view
        self._run_said = ""
        self._step_said: dict[str, tuple[str, float]] = {}

    def lines(self, update: workflow_pb2.WatchRunResponse, now_s: float, now: datetime) -> list[str]:
        """What to print for an update that the view has taken in."""
        at = now.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        match update.WhichOneof("update"):
            case "run" if self._view.state != self._run_said:
                self._run_said = self._view.state
                ended, known = self._view.counts()
                steps = f"  {ended}/{known} steps" if known else ""
                return [f"{at}  run {self._view.workflow_run_id}  {self._view.state}{steps}"]
            case "step_run":
                text = self._step_news(update.step_run, now_s)
                return [f"{at}  step {text}"] if text else []
            case _:
                return []

    def _step_news(self, step: workflow_pb2.StepRun, now_s: float) -> str:
        state = words.step_state(step.state)
        key = f"{state} {step.attempt}"
        said, said_s = self._step_said.get(step.step_run_id, ("", float("-inf")))
        if key == said and now_s - said_s < _PROGRESS_S:
            return ""
        if key == said and state != "running":
            return ""
        self._step_said[step.step_run_id] = (key, now_s)
        return "  ".join([words.clean(step.step_name), state, *step_details(step)])


def ended_line(run: workflow_pb2.WorkflowRun) -> str:
    """How a run stands, and how long it took."""
    took = ""
    if run.started_at.seconds and run.ended_at.seconds:
        seconds = (words.instant(run.ended_at) - words.instant(run.started_at)).total_seconds()
        took = f" in {words.took_text(seconds)}"
    return f"run {run.workflow_run_id} {words.run_state(run.state)}{took}"


def step_details(step: workflow_pb2.StepRun) -> list[str]:
    """What there is to say besides name and state."""
    parts = [f"attempt {step.attempt}"] if step.attempt else []
    state = words.step_state(step.state)
    if state == "running":
        if step.progress.HasField("fraction"):
            parts.append(f"{step.progress.fraction:.0%}")
        if step.progress.message:
            parts.append(words.clean(step.progress.message))
        if step.executor_name:
            parts.append(f"on {words.clean(step.executor_name)}")
    elif state in ("retryable_failed", "terminal_failed", "cancelled"):
        code = step.error.code or step.reason
        parts.extend(text for text in (step.reason, code if code != step.reason else "") if text)
        if step.error.message and state != "cancelled":
            parts.append(words.clean(step.error.message)[:200])
    elif state == "succeeded" and step.started_at.seconds:
        took = words.instant(step.ended_at) - words.instant(step.started_at)
        parts.append(words.took_text(took.total_seconds()))
        if step.progress.message:
            parts.append(words.clean(step.progress.message))
    return parts
