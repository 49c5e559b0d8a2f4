"""After the load: waits until its runs have ended, and holds what is stored against what was planned."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from rara.v1 import workflow_pb2
from rara_client import Client, RaraError

from rara_load.figures import Latencies
from rara_load.turns import LABEL, PLANNED, WARM_UP, seconds

_PAGE: Final = 1000
_LOOK_S: Final = 0.5
_SHOWN: Final = 10
_BUCKET_S: Final = 0.5
_OPEN: Final = (
    workflow_pb2.WORKFLOW_RUN_STATE_PENDING,
    workflow_pb2.WORKFLOW_RUN_STATE_RUNNING,
    workflow_pb2.WORKFLOW_RUN_STATE_CANCELLING,
)
_WORDS: Final = {
    workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED: "succeeded",
    workflow_pb2.WORKFLOW_RUN_STATE_FAILED: "failed",
    workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED: "cancelled",
}
# A cancel may come too late, which is no fault.
_MAY_END: Final = {"succeeded": {"succeeded"}, "failed": {"failed"}, "cancelled": {"cancelled", "succeeded"}}


@dataclass(slots=True)
class Tally:
    """The load's runs as they are stored.

    by_state: how they ended, or `open`. unplanned: those that ended as they should not have.
    created_to_ended: of all measured runs that were planned to succeed, by the database's clock.
    """

    by_state: Counter[str] = field(default_factory=Counter)
    unplanned: int = 0
    examples: list[str] = field(default_factory=list)
    created_to_ended: Latencies = field(default_factory=Latencies)
    # Runs and steps by when their run ended, in units of _BUCKET_S.
    _runs_ended: Counter[int] = field(default_factory=Counter)
    _steps_ended: Counter[int] = field(default_factory=Counter)
    _first_created_s: float = math.inf  # of measured runs
    _last_created_s: float = -math.inf

    @property
    def found(self) -> int:
        return self.by_state.total()

    def finished_per_s(self) -> tuple[float, float]:
        """Runs and steps that closed a second, from the first to the last start that was measured."""
        if self._last_created_s < self._first_created_s:
            return 0.0, 0.0
        window = range(int(self._first_created_s / _BUCKET_S), int(self._last_created_s / _BUCKET_S) + 1)
        span_s = len(window) * _BUCKET_S
        runs, steps = (sum(of[at] for at in window) for of in (self._runs_ended, self._steps_ended))
        return runs / span_s, steps / span_s

    def take(self, run: workflow_pb2.WorkflowRun) -> None:
        state = _WORDS.get(run.state, "open")
        self.by_state[state] += 1
        is_measured = WARM_UP not in run.labels
        if is_measured:
            created_s = seconds(run.created_at)
            self._first_created_s = min(self._first_created_s, created_s)
            self._last_created_s = max(self._last_created_s, created_s)
        planned = "succeeded" if run.retry_of_workflow_run_id else run.labels[PLANNED]
        if state == "open":
            self._note(f"run {run.workflow_run_id} is still open")
            return
        if state not in _MAY_END[planned]:
            self.unplanned += 1
            self._note(f"run {run.workflow_run_id} has {state}, planned: {planned} ({run.error.code})")
        ended_s = seconds(run.ended_at)
        self._runs_ended[int(ended_s / _BUCKET_S)] += 1
        self._steps_ended[int(ended_s / _BUCKET_S)] += sum(run.step_counts.values())
        if planned == "succeeded" and not run.retry_of_workflow_run_id and is_measured:
            self.created_to_ended.record(ended_s - seconds(run.created_at))

    def _note(self, line: str) -> None:
        if len(self.examples) < _SHOWN:
            self.examples.append(line)


@dataclass(frozen=True, slots=True)
class Settling:
    """Asks one scheduler about the load's runs. since: no run of it was created before."""

    client: Client
    load_id: str
    since: datetime
    timeout_s: float

    async def wait(self) -> bool:
        """True when every run has ended, False when that takes too long."""
        until_s = time.monotonic() + self.timeout_s
        while True:
            asked_s = time.monotonic()
            is_open = await self._any(_OPEN)
            now_s = time.monotonic()
            if not is_open or now_s > until_s:
                return not is_open
            # The search for an open one among a million takes its time, and is not to become a load of its own.
            await asyncio.sleep(max(_LOOK_S, 4 * (now_s - asked_s)))

    async def _any(self, states: Iterable[workflow_pb2.WorkflowRunState.ValueType]) -> bool:
        """A fault counts as yes: the answer is still to be found out."""
        request = workflow_pb2.ListRunsRequest(page_size=1, labels={LABEL: self.load_id}, states=states)
        request.created_from.FromDatetime(self.since)
        try:
            answer = await self.client.call(self.client.workflow.ListRuns, request, is_repeatable=True)
        except RaraError:
            return True
        return bool(answer.runs)

    async def tally(self) -> Tally:
        """Goes over all runs once, newest first, page by page."""
        tally = Tally()
        async for run in self.client.list_runs(
            labels={LABEL: self.load_id}, created_from=self.since, page_size=_PAGE
        ):
            tally.take(run)
        return tally
