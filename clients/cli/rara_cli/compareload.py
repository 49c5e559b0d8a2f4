"""Two runs from the API, with as much of them as a comparison needs."""

import asyncio
from collections import defaultdict
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from rara.v1 import workflow_pb2
from rara_client import Client

from rara_cli.compare import LoadedRun

_PAGE: Final = 128  # of longer ones the API leaves out outputs of less than 4 KiB, too
_MAX_FETCHED: Final = 200  # outputs that were left out, one by one
_AT_A_TIME: Final = 8


async def load_pair(
    client: Client, run_a: str, run_b: str, *, timeout_s: float | None = None
) -> tuple[LoadedRun, LoadedRun]:
    """Both runs; a run that is named twice is read once. Raises NotFound also for one that goes meanwhile."""
    a = await _load(client, run_a, timeout_s)
    if run_b == run_a:
        return a, a
    b = await _load(client, run_b, timeout_s)
    wanted = [
        (run, name)
        for name in a.steps
        if name in b.steps and a.steps[name].step_run_id != b.steps[name].step_run_id
        for run in (a, b)
        if run.steps[name].output.omitted_bytes
    ]
    whole = await _fetch(client, [run.steps[name] for run, name in wanted[:_MAX_FETCHED]], timeout_s)
    return _with(a, whole), _with(b, whole)


async def _load(client: Client, run_id: str, timeout_s: float | None) -> LoadedRun:
    run = (await client.get_run(run_id, timeout_s=timeout_s)).run
    definition = await client.get_definition(run.definition, run.definition_version, timeout_s=timeout_s)
    steps: dict[str, workflow_pb2.StepRun] = {}
    async with aclosing(client.list_step_runs(run_id, page_size=_PAGE, timeout_s=timeout_s)) as found:
        async for step in found:
            steps[step.step_name] = step
    return LoadedRun(run, definition, steps, await _reads(client, run_id, timeout_s))


async def _reads(client: Client, run_id: str, timeout_s: float | None) -> dict[str, frozenset[str]]:
    """What the run's steps read beyond what the definition hands them."""
    request = workflow_pb2.QueryLineageRequest(
        workflow_run_id=run_id,
        direction=workflow_pb2.LINEAGE_DIRECTION_UPSTREAM,
        depth=1,
        page_size=1000,
    )
    found: defaultdict[str, set[str]] = defaultdict(set)
    async with aclosing(client.query_lineage(request, timeout_s=timeout_s)) as edges:
        async for edge in edges:
            if not edge.produced and not edge.declared:
                found[edge.step_run_id].add(edge.artifact.sha256)
    return {step: frozenset(digests) for step, digests in found.items()}


async def _fetch(
    client: Client, steps: list[workflow_pb2.StepRun], timeout_s: float | None
) -> dict[str, workflow_pb2.StepRun]:
    """The steps whole, by id."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def fetch(step_run_id: str) -> workflow_pb2.StepRun:
        async with places:
            return (await client.get_step_run(step_run_id, timeout_s=timeout_s)).step_run

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(fetch(step.step_run_id)) for step in steps]
    return {task.result().step_run_id: task.result() for task in tasks}


def _with(run: LoadedRun, whole: dict[str, workflow_pb2.StepRun]) -> LoadedRun:
    return replace(run, steps={name: whole.get(step.step_run_id, step) for name, step in run.steps.items()})
