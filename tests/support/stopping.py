"""Runs of the operations that wait, and what is kept of them: for tests that stop the services meanwhile."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rara.v1 import workflow_pb2
from rara_client import Client
from rara_client.definitions import definition_from

STEPS = ("wait", "stubborn", "children")
DEFINITION = {
    "definition": "boxes",
    "steps": [{"step_name": name, "kind": f"box.{name}", "input_template": {}} for name in STEPS],
}
WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Attempt:
    token: int
    reason: str
    spent: bool
    leased_at: datetime


@dataclass(frozen=True, slots=True)
class Kept:
    """A step as the API tells it."""

    state: int
    attempt: int
    failures: int
    attempts: tuple[Attempt, ...]


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def counts(path: Path) -> Mapping[str, int]:
    """How often each step has written into the file."""
    return Counter(line.split()[0] for line in lines(path))


async def until(condition: Callable[[], bool], within_s: float = WAIT_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


async def started_run(client: Client, work: Path, key: str) -> str:
    """A run of which all steps are running and have had their effect; its id."""
    await client.register_definition(definition_from(DEFINITION))
    run_id = (await client.start_run("boxes", {}, idempotency_key=key)).run.workflow_run_id
    await until(lambda: len(lines(work / "effects")) == len(STEPS))
    async with asyncio.timeout(WAIT_S):
        while any(
            step.state != workflow_pb2.STEP_RUN_STATE_RUNNING for step in await steps_of(client, run_id)
        ):
            await asyncio.sleep(0.05)
    return run_id


async def ended_run(client: Client, work: Path, run_id: str) -> dict[str, Kept]:
    """Let the steps go, wait for the run; its steps. AssertionError unless it has succeeded."""
    (work / "go").touch()
    run = await client.wait_run(run_id, WAIT_S)
    assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
    return {step.step_name: await _kept(client, step) for step in await steps_of(client, run_id)}


async def steps_of(client: Client, run_id: str) -> list[Any]:
    return [step async for step in client.list_step_runs(run_id)]


async def _kept(client: Client, step: Any) -> Kept:
    shown = (await client.get_step_run(step.step_run_id)).attempts
    attempts = (
        Attempt(one.lease.lease_token, one.reason, one.spent, one.leased_at.ToDatetime(UTC)) for one in shown
    )
    return Kept(
        step.state, step.attempt, step.failures, tuple(sorted(attempts, key=lambda attempt: attempt.token))
    )
