"""Single-step runs that arrive at random, whether or not earlier ones have ended: how late is the slowest percent?"""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Final

from rara.v1 import workflow_pb2
from rara_client import Client
from rara_client.cursors import RUN_ENDED

from rara_bench.arithmetic import percentile
from rara_bench.arm import Bench, Figures
from rara_bench.operations import NOOP
from rara_bench.product import Shape, definition, running

SECONDS: Final = 10.0
WARM_UP_S: Final = 1.0
SEED: Final = 2026
MOST_A_CALL: Final = 500
CALLS: Final = 4  # at once
_LIMIT_S: Final = 120.0


def arrivals(per_s: float, seconds: float, seed: int = SEED) -> Iterator[float]:
    """Instants of a Poisson process, in seconds from its begin."""
    draw = random.Random(seed)
    at = draw.expovariate(per_s)
    while at < seconds:
        yield at
        at += draw.expovariate(per_s)


async def measure(bench: Bench, per_s: float) -> Figures:
    async with running(bench, "rara_open_loop", Shape(steps_a_run=1)) as product:
        await product.client.register_definition(definition(NOOP, 1))
        await product.start_executors()
        load = _Load(product.client)
        async with asyncio.timeout(_LIMIT_S):
            await load.offer(list(arrivals(per_s, WARM_UP_S)))
            load.waits_ms.clear()
            await load.offer(list(arrivals(per_s, SECONDS)))
    return {
        "p50_ms": percentile(load.waits_ms, 0.5),
        "p99_ms": percentile(load.waits_ms, 0.99),
        "runs": len(load.waits_ms),
    }


class _Load:
    """Starts what has arrived in batches, and counts each run from its own arrival, not from its call."""

    def __init__(self, client: Client) -> None:
        self.waits_ms: list[float] = []
        self._client = client
        self._calls = asyncio.Semaphore(CALLS)

    async def offer(self, instants: list[float]) -> None:
        """Returns when all have ended."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while instants:
                await self._calls.acquire()
                await asyncio.sleep(max(0.0, instants[0] - (time.perf_counter() - began)))
                elapsed = time.perf_counter() - began
                due = [at for at in instants[:MOST_A_CALL] if at <= elapsed]
                if due:
                    del instants[: len(due)]
                    group.create_task(self._start(group, [began + at for at in due]))
                else:
                    self._calls.release()

    async def _start(self, group: asyncio.TaskGroup, arrived: list[float]) -> None:
        try:
            request = workflow_pb2.StartRunRequest(definition="bench")
            answer = await self._client.batch_start_runs([request] * len(arrived))
        finally:
            self._calls.release()
        for run, at in zip(answer.runs, arrived, strict=True):
            group.create_task(self._until_ended(run.workflow_run_id, at))

    async def _until_ended(self, workflow_run_id: str, arrived: float) -> None:
        async with aclosing(self._client.watch_run(workflow_run_id)) as updates:
            async for update in updates:
                if update.WhichOneof("update") == "run" and update.run.state in RUN_ENDED:
                    self.waits_ms.append(1000 * (time.perf_counter() - arrived))
                    return
