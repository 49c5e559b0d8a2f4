"""How soon a run on an idle system is known to have ended: StartRun sent until WatchRun shows it."""

import asyncio
import time
from contextlib import aclosing
from typing import Final

from rara_client import Client
from rara_client.cursors import RUN_ENDED

from rara_bench.arithmetic import percentile
from rara_bench.arm import Bench, Figures
from rara_bench.operations import NOOP
from rara_bench.product import Shape, definition, running

SAMPLES: Final = 200
WARM_UP: Final = 20
GAP_S: Final = 0.02  # between two runs: the system is idle when the next one comes
_LIMIT_S: Final = 30.0


async def measure(bench: Bench, database: str = "") -> Figures:
    """database: one that `prepare` made, which stays; else in a new one."""
    shape = Shape(steps_a_run=1)
    async with running(bench, database or "rara_latency", shape, keep=bool(database)) as product:
        await product.client.register_definition(definition(NOOP, 1))
        await product.start_executors()
        waits_ms = []
        for number in range(WARM_UP + SAMPLES):
            took_ms = 1000 * await _one(product.client)
            if number >= WARM_UP:
                waits_ms.append(took_ms)
            await asyncio.sleep(GAP_S)
    return {"p50_ms": percentile(waits_ms, 0.5), "p99_ms": percentile(waits_ms, 0.99)}


async def _one(client: Client) -> float:
    """Seconds."""
    sent = time.perf_counter()
    started = await client.start_run("bench", {"page": 17})
    async with asyncio.timeout(_LIMIT_S), aclosing(client.watch_run(started.run.workflow_run_id)) as updates:
        async for update in updates:
            if update.WhichOneof("update") == "run" and update.run.state in RUN_ENDED:
                return time.perf_counter() - sent
    raise RuntimeError("the watch ended before the run")
