"""One turn of a caller: what it asks for, and which of its waits are measured from where.

The first call of a turn counts from when the turn was due, not from when it was sent: what the generator or a slow
system held up is part of the latency.
"""

import asyncio
import random
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import workflow_pb2
from rara_client import CallTimeout, Client, RaraError
from rara_client.errors import may_resume
from rara_client.payloads import json_payload

from rara_load.figures import Figures
from rara_load.plan import Form, Kind, Plan
from rara_load.shapes import graph

LABEL: Final = "load"  # on every run: which load started it
PLANNED: Final = "planned"  # on every run: how it is to end
WARM_UP: Final = "warm-up"
NOT_ENDED: Final = "RUN_NOT_ENDED"  # our own code: a watched run had not ended in time
_RECENT: Final = 1000
_SAMPLED_STEPS: Final = 3
_LONG_RUN_S: Final = 60.0  # of one that is there to be cancelled
_CANCEL_WITHIN_S: Final = 0.3
_ENDED: Final = {
    workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED,
    workflow_pb2.WORKFLOW_RUN_STATE_FAILED,
    workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Turn:
    """due_s: by the clock of `time.monotonic`."""

    kind: Kind
    due_s: float
    is_measured: bool


@dataclass(slots=True)
class Caller:
    """Takes turns against one or several schedulers.

    versions: of the definitions that were registered for this load.
    """

    plan: Plan
    load_id: str
    figures: Figures
    clients: Sequence[Client]
    versions: Mapping[Form, int]
    draw: random.Random
    runs: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    steps: deque[str] = field(default_factory=lambda: deque(maxlen=_RECENT))
    in_flight: int = 0
    _numbers: "count[int]" = field(default_factory=count)

    async def take(self, turn: Turn) -> None:
        """One turn to its end; a fault is counted."""
        self.figures.turn(turn.kind, is_measured=turn.is_measured)
        self.in_flight += 1
        try:
            await self._act(turn)
        except RaraError as fault:
            self.figures.fault(turn.kind, fault.reason, is_measured=turn.is_measured)
        except TimeoutError:
            self.figures.fault(turn.kind, NOT_ENDED, is_measured=turn.is_measured)
        finally:
            self.in_flight -= 1

    async def _act(self, turn: Turn) -> None:
        match turn.kind:
            case Kind.START:
                await self._start(turn, self._request(turn))
            case Kind.WATCH:
                await self._watch(turn)
            case Kind.BATCH:
                await self._batch(turn)
            case Kind.CANCEL:
                await self._cancel(turn)
            case Kind.RETRY:
                await self._retry(turn)
            case Kind.GET | Kind.LIST | Kind.EXPLAIN:
                await self._read(turn)

    # What a turn consists of

    async def _watch(self, turn: Turn) -> None:
        request = self._request(turn)
        run = await self._start(turn, request)
        ended = await self._ended(run.workflow_run_id)
        seen_s = time.monotonic() - turn.due_s
        self.figures.call(turn.kind, seen_s, is_measured=turn.is_measured)
        self.figures.stage("start_to_terminal_seen", seen_s, is_measured=turn.is_measured)
        if turn.is_measured and self.draw.random() < self.plan.sample:
            await self._look_at_steps(ended, Form(request.definition.removeprefix("load-")))

    async def _batch(self, turn: Turn) -> None:
        requests = [self._request(turn) for _ in range(self.plan.batch_size)]
        try:
            answer = await self._client().batch_start_runs(requests, timeout_s=self.plan.call_timeout_s)
        except RaraError as fault:
            self.figures.unknown += len(requests) if may_have_happened(fault) else 0
            raise
        seconds = time.monotonic() - turn.due_s
        self.figures.call(turn.kind, seconds, is_measured=turn.is_measured)
        self.figures.start(seconds, len(answer.runs), is_measured=turn.is_measured)
        self.runs.extend(run.workflow_run_id for run in answer.runs)

    async def _cancel(self, turn: Turn) -> None:
        run = await self._start(turn, self._request(turn, duration_s=_LONG_RUN_S, planned="cancelled"))
        await asyncio.sleep(self.draw.uniform(0, _CANCEL_WITHIN_S))
        began_s = time.monotonic()
        await self._client().cancel_run(run.workflow_run_id, timeout_s=self.plan.call_timeout_s)
        self.figures.call(turn.kind, time.monotonic() - began_s, is_measured=turn.is_measured)
        await self._ended(run.workflow_run_id)
        self.figures.stage(
            "cancel_to_terminal_seen", time.monotonic() - began_s, is_measured=turn.is_measured
        )

    async def _retry(self, turn: Turn) -> None:
        request = self._request(turn, fails=True)
        first = await self._start(turn, request)
        await self._ended(first.workflow_run_id)
        began_s = time.monotonic()
        try:
            answer = await self._client().retry_run(
                first.workflow_run_id,
                idempotency_key=f"{request.idempotency_key}-retry",
                timeout_s=self.plan.call_timeout_s,
            )
        except RaraError as fault:
            self.figures.unknown += may_have_happened(fault)
            raise
        self.figures.call(turn.kind, time.monotonic() - began_s, is_measured=turn.is_measured)
        self.figures.started += 1
        self.figures.started_measured += turn.is_measured
        await self._ended(answer.run.workflow_run_id)
        self.figures.stage("retry_to_terminal_seen", time.monotonic() - began_s, is_measured=turn.is_measured)

    async def _read(self, turn: Turn) -> None:
        client, timeout_s = self._client(), self.plan.call_timeout_s
        if turn.kind is Kind.GET:
            await client.get_run(self.draw.choice(self.runs), include_steps=True, timeout_s=timeout_s)
        elif turn.kind is Kind.EXPLAIN:
            await client.explain_step(self.draw.choice(self.steps), timeout_s=timeout_s)
        else:
            request = workflow_pb2.ListRunsRequest(labels={LABEL: self.load_id})
            await client.call(client.workflow.ListRuns, request, is_repeatable=True, timeout_s=timeout_s)
        self.figures.call(turn.kind, time.monotonic() - turn.due_s, is_measured=turn.is_measured)

    # Parts of it

    def _client(self) -> Client:
        return self.draw.choice(self.clients)

    def _request(
        self, turn: Turn, *, duration_s: float = 0.0, planned: str = "succeeded", fails: bool = False
    ) -> workflow_pb2.StartRunRequest:
        form = self.draw.choices(list(self.plan.forms), list(self.plan.forms.values()))[0]
        if planned == "succeeded" and (fails or self.draw.random() < self.plan.failing):
            planned, fails = "failed", True
        return run_request(
            self.plan,
            form,
            self.versions[form],
            key=f"load-{self.load_id}-{next(self._numbers)}",
            labels={LABEL: self.load_id, PLANNED: planned} | ({} if turn.is_measured else {WARM_UP: "yes"}),
            duration_s=duration_s or self.plan.step_s,
            fails=self.draw.choice(list(graph(form, self.plan.width, self.plan.depth))) if fails else "",
        )

    async def _start(self, turn: Turn, request: workflow_pb2.StartRunRequest) -> workflow_pb2.WorkflowRun:
        client = self._client()
        try:
            answer = await client.call(
                client.workflow.StartRun, request, is_repeatable=True, timeout_s=self.plan.call_timeout_s
            )
        except RaraError as fault:
            self.figures.unknown += may_have_happened(fault)
            raise
        seconds = time.monotonic() - turn.due_s
        if turn.kind is Kind.START:
            self.figures.call(turn.kind, seconds, is_measured=turn.is_measured)
        self.figures.start(seconds, 1, is_measured=turn.is_measured)
        self.runs.append(answer.run.workflow_run_id)
        return answer.run

    async def _ended(self, workflow_run_id: str) -> workflow_pb2.WorkflowRun:
        """The run as a watch shows it when it has ended. Raises TimeoutError."""
        watch = self._client().watch_run(workflow_run_id)
        async with asyncio.timeout(self.plan.run_timeout_s), aclosing(watch) as updates:
            return await self._last(updates)

    async def _last(
        self, updates: AsyncGenerator[workflow_pb2.WatchRunResponse, None]
    ) -> workflow_pb2.WorkflowRun:
        async for update in updates:
            if update.HasField("step_run"):
                self.steps.append(update.step_run.step_run_id)
            elif update.HasField("run") and update.run.state in _ENDED:
                return update.run
        raise TimeoutError  # the watch ended without the end of the run, which the client rules out

    async def _look_at_steps(self, run: workflow_pb2.WorkflowRun, form: Form) -> None:
        """By the database's instants alone: no clock of ours is compared with it."""
        client, timeout_s = self._client(), self.plan.call_timeout_s
        steps = {
            step.step_name: step
            async for step in client.list_step_runs(run.workflow_run_id, page_size=1000, timeout_s=timeout_s)
        }
        before = graph(form, self.plan.width, self.plan.depth)
        for name in self.draw.sample(sorted(steps), min(_SAMPLED_STEPS, len(steps))):
            found = await client.get_step_run(steps[name].step_run_id, timeout_s=timeout_s)
            ready_s = max([seconds(steps[one].ended_at) for one in before[name]] or [seconds(run.created_at)])
            self._note_attempts(found, ready_s)

    def _note_attempts(self, found: workflow_pb2.GetStepRunResponse, ready_s: float) -> None:
        for attempt in found.attempts:
            leased_s, started_s = seconds(attempt.leased_at), seconds(attempt.started_at)
            if attempt.lease.attempt == 1:
                self.figures.stage("ready_to_leased", leased_s - ready_s, is_measured=True)
            if attempt.HasField("started_at"):
                self.figures.stage("leased_to_running", started_s - leased_s, is_measured=True)
                if attempt.HasField("ended_at"):
                    ran_s = seconds(attempt.ended_at) - started_s
                    self.figures.stage("running_to_terminal", ran_s, is_measured=True)


def run_request(
    plan: Plan,
    form: Form,
    version: int,
    *,
    key: str,
    labels: Mapping[str, str],
    duration_s: float,
    fails: str = "",
) -> workflow_pb2.StartRunRequest:
    """fails: the step that does, until the run is retried; empty: none."""
    given: dict[str, object] = {"duration_s": duration_s, "filler": "x" * plan.payload_bytes}
    given |= {"output_bytes": plan.output_bytes, "artifact_bytes": plan.artifact_bytes, "flaky": plan.flaky}
    if fails:
        given["fails"] = fails
    return workflow_pb2.StartRunRequest(
        idempotency_key=key,
        definition=f"load-{form}",
        definition_version=version,
        input=json_payload(given),
        labels=labels,
    )


def may_have_happened(fault: RaraError) -> bool:
    """Whether a call that ended so may have been carried out all the same."""
    return isinstance(fault, CallTimeout) or may_resume(fault) or fault.status in {"INTERNAL", "UNKNOWN"}


def seconds(instant: Timestamp) -> float:
    return instant.seconds + instant.nanos / 1e9
