"""A watched run as a live view on a terminal: a line for the run, then the steps, the urgent ones first."""

from datetime import UTC, datetime

from rara.v1 import workflow_pb2
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rara_cli import words
from rara_cli.runlines import step_details
from rara_cli.runview import RunView

_MARKS = {
    "succeeded": ("✓", "+"),
    "running": ("▶", ">"),
    "leased": ("▷", ">"),
    "retryable_failed": ("↻", "~"),
    "terminal_failed": ("✗", "x"),
    "cancelled": ("⊘", "-"),
    "pending": ("·", "."),
}
_BAR = 16


class RunLive:
    """Draws the view as it is now, on at most a screen."""

    def __init__(self, view: RunView, console: Console) -> None:
        self._view = view
        self._console = console
        self._is_plain = console.encoding.lower().replace("-", "") != "utf8"

    def __rich__(self) -> Group:
        return self.frame(datetime.now(UTC))

    def frame(self, now: datetime) -> Group:
        """now: to place the scheduler's instants; off by as much as the two clocks differ."""
        rows = self._view.rows()
        room = max(self._console.height - 3, 3)
        shown = rows if len(rows) <= room else rows[: room - 1]
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        for step in shown:
            state = words.step_state(step.state)
            style = words.color_of(state) or "dim"
            mark = _MARKS.get(state, ("?", "?"))[self._is_plain]
            table.add_row(
                Text(f"{mark} {words.clean(step.step_name)}", style=style),
                Text(state, style=style),
                Text(f"attempt {step.attempt}" if step.attempt else ""),
                Text("  ".join(self._details(step, now)), overflow="ellipsis"),
            )
        return Group(self._headline(now), table, self._footer(len(rows) - len(shown)))

    def _headline(self, now: datetime) -> Text:
        view, run = self._view, self._view.run
        if run is None:
            return Text(f"run {view.workflow_run_id}  waiting for news")
        ended, known = view.counts()
        line = Text(f"{words.clean(run.definition)} v{run.definition_version}  run {run.workflow_run_id}  ")
        line.append(view.state.upper(), style=f"bold {words.color_of(view.state) or ''}".strip())
        line.append(f"  {ended}/{known} steps  {view.fraction():.0%}")
        if run.started_at.seconds:
            end = words.instant(run.ended_at) if run.ended_at.seconds else now
            line.append(f"  {words.duration_text((end - words.instant(run.started_at)).total_seconds())}")
        left_s = None if view.has_ended else view.eta_s()
        if left_s is not None:
            line.append(f"  ETA {words.duration_text(left_s)}")
        line.no_wrap = True
        return line

    def _details(self, step: workflow_pb2.StepRun, now: datetime) -> list[str]:
        state = words.step_state(step.state)
        if state == "pending":
            waits = self._view.waits_for(step)
            return [f"waiting for: {', '.join(waits)}"] if waits else ["waiting for an executor"]
        if state == "retryable_failed" and step.available_at.seconds:
            at = words.instant(step.available_at)
            wait_s = max((at - now).total_seconds(), 0.0)
            code = step.error.code or step.reason
            return [f"failed {code}, retry at {at.astimezone():%H:%M:%S} (in {words.duration_text(wait_s)})"]
        if state != "running":
            return step_details(step)[1:]
        parts = []
        if step.progress.HasField("fraction"):
            filled = round(min(max(step.progress.fraction, 0.0), 1.0) * _BAR)
            parts.append(f"[{'#' * filled}{'-' * (_BAR - filled)}] {step.progress.fraction:.0%}")
        if step.progress.message:
            parts.append(words.clean(step.progress.message))
        left_s = self._view.eta_s(step.step_run_id)
        if left_s is not None:
            parts.append(f"ETA {words.duration_text(left_s)}")
        if step.executor_name:
            parts.append(words.clean(step.executor_name))
        if step.lease_expires_at.seconds:
            lease_s = (words.instant(step.lease_expires_at) - now).total_seconds()
            parts.append(f"lease {words.duration_text(lease_s)}" if lease_s > 0 else "lease overdue")
        return parts

    def _footer(self, hidden: int) -> Text:
        if self._view.has_ended:
            return Text(f"{hidden} more" if hidden else "", style="dim")
        more = f"{hidden} more {'.' if self._is_plain else '·'} " if hidden else ""
        urgent = next((step.step_name for step in self._view.rows()), "STEP")
        separator = "." if self._is_plain else "·"
        return Text(
            f"{more}detach with Ctrl-C {separator} details: "
            f"rara why {self._view.workflow_run_id}/{words.clean(urgent)}",
            style="dim",
            no_wrap=True,
        )
