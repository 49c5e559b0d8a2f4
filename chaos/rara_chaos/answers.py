"""The verdict where the database is out of reach: from the scheduler's answers and what the handlers wrote down."""

import asyncio
import contextlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import orjson
from rara.v1 import workflow_pb2
from rara_client import NotFound

from rara_chaos import ledger
from rara_chaos.load import ENDED, Confirmed
from rara_chaos.verdict import Verdict, activities, overlaps, wrong_effects, wrong_end, wrong_values

_CALL_S = 10.0
_LOOK_S = 0.5
_PATIENCE_S = 180.0  # of all runs together, for what is still open
_RUN: Final = "WORKFLOW_RUN_STATE_"


class Runs(Protocol):
    """A client of the scheduler."""

    async def get_run(
        self, workflow_run_id: str, *, include_steps: bool = False, timeout_s: float | None = None
    ) -> workflow_pb2.GetRunResponse: ...


async def judge_answers(
    client: Runs, ledger_path: Path, confirmed: Sequence[Confirmed], kinds: Mapping[str, str]
) -> Verdict:
    """kinds: of the executors that are known, by name."""
    verdict = Verdict(runs=len(confirmed))
    answers = await _answers(client, confirmed)
    stored = {key: _facts(answer.run) for key, answer in answers.items()}
    for run in confirmed:
        answer = answers.get(run.workflow_run_id)
        if answer is None:
            verdict.lost.append(f"run {run.workflow_run_id}")
            continue
        facts = stored[run.workflow_run_id]
        if answer.run.state not in ENDED:
            verdict.stranded.append(f"run {run.workflow_run_id} is {facts['state']}")
            continue
        verdict.violations += wrong_end(run, facts["state"], None, stored)
        verdict.violations += wrong_values(
            run, {step.step_name: _output(step) for step in _succeeded(answer)}
        )
    _count(verdict, answers.values(), kinds)
    _judge_ledger(verdict, ledger_path, answers.values())
    return verdict


async def _answers(client: Runs, confirmed: Sequence[Confirmed]) -> dict[str, workflow_pb2.GetRunResponse]:
    """The answer about each run that is known; those that are open get some time to end."""
    answers: dict[str, workflow_pb2.GetRunResponse] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE_S):
            for run in confirmed:
                with contextlib.suppress(NotFound):
                    while (answer := await _answer(client, run)).run.state not in ENDED:
                        answers[run.workflow_run_id] = answer
                        await asyncio.sleep(_LOOK_S)
                    answers[run.workflow_run_id] = answer
            return answers
    for run in confirmed:
        with contextlib.suppress(NotFound):
            answers[run.workflow_run_id] = await _answer(client, run)
    return answers


async def _answer(client: Runs, run: Confirmed) -> workflow_pb2.GetRunResponse:
    return await client.get_run(run.workflow_run_id, include_steps=True, timeout_s=_CALL_S)


def _facts(run: workflow_pb2.WorkflowRun) -> dict[str, Any]:
    state = workflow_pb2.WorkflowRunState.Name(run.state).removeprefix(_RUN).lower()
    return {"state": state}


def _succeeded(answer: workflow_pb2.GetRunResponse) -> list[workflow_pb2.StepRun]:
    return [step for step in answer.steps if step.state == workflow_pb2.STEP_RUN_STATE_SUCCEEDED]


def _output(step: workflow_pb2.StepRun) -> dict[str, Any]:
    output: dict[str, Any] = orjson.loads(step.output.data)
    return output


def _count(
    verdict: Verdict, answers: Collection[workflow_pb2.GetRunResponse], kinds: Mapping[str, str]
) -> None:
    steps = {step.step_run_id: step for answer in answers for step in answer.steps}
    verdict.steps = sum(step.HasField("ended_at") for step in steps.values())
    verdict.attempts = sum(step.attempt for step in steps.values())
    for step in steps.values():
        if kind := kinds.get(step.executor_name):
            verdict.attempts_by_kind[kind] = verdict.attempts_by_kind.get(kind, 0) + step.attempt
        reason = step.reason or "SUCCEEDED"
        verdict.reasons[reason] = verdict.reasons.get(reason, 0) + 1


def _judge_ledger(verdict: Verdict, path: Path, answers: Collection[workflow_pb2.GetRunResponse]) -> None:
    """What was recorded of an effect is what the success was given."""
    entries = list(ledger.read(path))
    keys = {entry.step_run_id: entry.key for entry in entries}
    recorded = {
        keys[step.step_run_id]: int(_output(step)["charge"]["token"])
        for answer in answers
        for step in _succeeded(answer)
        if step.step_run_id in keys
    }
    for key, attempts in activities(entries).items():
        verdict.violations += overlaps(key, attempts) + wrong_effects(key, attempts, recorded.get(key))
        done = sum(activity.effects for activity in attempts.values())
        verdict.effects += min(done, 1)
        verdict.effects_repeated += max(done - 1, 0)
