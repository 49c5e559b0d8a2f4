"""Single-step runs that arrive at random, whether or not earlier ones have ended: how late is the slowest percent?"""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Final

from rara.v1 import workflow_pb2
from rara_client import Client
from rara_client.errors import RaraError

from rara_bench.arithmetic import percentile
from rara_bench.arm import Bench, Figures
from rara_bench.operations import NOOP
from rara_bench.product import Shape, definition, running

SECONDS: Final = 10.0
WARM_UP_S: Final = 1.0
SEED: Final = 2026
MOST_A_CALL: Final = 500
CALLS: Final = 4  # at once
LIMIT_S: Final = 30.0  # for all to end
AGAIN_S: Final = 0.1


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
        await _Load(product.client).offer(list(arrivals(per_s, WARM_UP_S)))
        load = _Load(product.client)
        await load.offer(list(arrivals(per_s, SECONDS)))
    waits_ms = [1000 * wait_s for wait_s in load.waits_s]
    return {
        "p50_ms": percentile(waits_ms, 0.5),
        "p99_ms": percentile(waits_ms, 0.99),
        "runs": len(waits_ms),
        "unfinished": load.unfinished,
        "repeated": load.repeated,
    }


class _Load:
    """Starts what has arrived in batches, and counts each run from its own arrival, not from its call.

    unfinished: runs that were given up; they count with the time that they had by then, which is too short.
    repeated: calls that failed and were made again.
    """

    def __init__(self, client: Client) -> None:
        self.waits_s: list[float] = []
        self.unfinished = 0
        self.repeated = 0
        self._client = client
        self._watch = _Watch(client)
        self._calls = asyncio.Semaphore(CALLS)
        self._until = 0.0

    async def offer(self, instants: list[float]) -> None:
        """Returns when all have ended, or after LIMIT_S."""
        began = time.perf_counter()
        self._until = began + LIMIT_S
        watching = asyncio.create_task(self._watch.run(), name="watch")
        try:
            await self._begin(began, instants)
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
        self.repeated += self._watch.repeated

    async def _begin(self, began: float, instants: list[float]) -> None:
        async with asyncio.TaskGroup() as group:
            while instants:
                await self._calls.acquire()
                await asyncio.sleep(max(0.0, instants[0] - (time.perf_counter() - began)))
                elapsed_s = time.perf_counter() - began
                due = [at for at in instants[:MOST_A_CALL] if at <= elapsed_s]
                if due:
                    del instants[: len(due)]
                    group.create_task(self._start(group, [began + at for at in due]))
                else:
                    self._calls.release()

    async def _start(self, group: asyncio.TaskGroup, arrived: list[float]) -> None:
        try:
            started = await self._started(len(arrived))
        finally:
            self._calls.release()
        for run, at in zip(started, arrived, strict=True):
            group.create_task(self._follow(run, at))

    async def _started(self, count: int) -> list[str]:
        """Ids of that many new runs; empty ids when the scheduler does not take them in time."""
        requests = [
            workflow_pb2.StartRunRequest(definition="bench", idempotency_key=str(uuid.uuid4()))
            for _ in range(count)
        ]
        while time.perf_counter() < self._until:
            try:
                answer = await self._client.batch_start_runs(requests)
                return [run.workflow_run_id for run in answer.runs]
            except RaraError:
                self.repeated += 1
                await asyncio.sleep(AGAIN_S)
        return [""] * count

    async def _follow(self, workflow_run_id: str, arrived: float) -> None:
        try:
            async with asyncio.timeout(self._until - time.perf_counter()):
                await self._until_ended(workflow_run_id)
        except TimeoutError:
            self.unfinished += 1
        self.waits_s.append(time.perf_counter() - arrived)

    async def _until_ended(self, workflow_run_id: str) -> None:
        if workflow_run_id:
            await self._watch.until_ended(workflow_run_id)
        else:  # it was never taken, so it never ends
            await asyncio.Event().wait()


class _Watch:
    """One stream for all runs of a load."""

    def __init__(self, client: Client) -> None:
        self.repeated = 0
        self._client = client
        self._added: asyncio.Queue[str] = asyncio.Queue()
        self._ended: dict[str, asyncio.Event] = {}

    async def until_ended(self, workflow_run_id: str) -> None:
        ended = self._ended[workflow_run_id] = asyncio.Event()
        self._added.put_nowait(workflow_run_id)
        try:
            await ended.wait()
        finally:
            self._ended.pop(workflow_run_id, None)

    async def run(self) -> None:
        """Until cancelled. A scheduler that refuses or cancels the stream is asked again."""
        while True:
            try:
                async with aclosing(self._client.watch_runs(self._ids())) as ends:
                    async for end in ends:
                        if end.run is not None and (ended := self._ended.get(end.workflow_run_id)):
                            ended.set()
            except RaraError:
                self.repeated += 1
                await asyncio.sleep(AGAIN_S)

    async def _ids(self) -> AsyncIterator[str]:
        for workflow_run_id in list(self._ended):
            yield workflow_run_id
        while True:
            yield await self._added.get()
