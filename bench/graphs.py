"""Measures one run of many steps: how long its start takes, how fast it goes on, and whether a step's cost stays flat.

    PYTHONPATH=bench .venv/bin/python bench/graphs.py [--steps 10000] [--shapes wide,diamond,deep] > graphs.json

wide: one step, then all others at once. diamond: a step, a hundred behind it, one that waits for them, and again.
deep: a chain. As a comparison, the same number of steps in runs of ten. Real processes, an embedded PostgreSQL, no-op
steps; the tenths of a run are by the order in which its steps ended, seconds are the database's.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from rara.v1 import workflow_pb2
from rara_bench import machine
from rara_bench.arm import Bench
from rara_bench.operations import NOOP
from rara_bench.options import Options
from rara_bench.product import Product, Shape, running
from rara_bench.server import Server, choose_binaries

FAN: Final = 100
_TENTHS: Final = """
    with ended as (
        select ended_at, ntile(10) over (order by ended_at, lease_token) as tenth
          from rara.result where workflow_run_id = $1::uuid
    )
    select tenth, count(*) as steps, extract(epoch from max(ended_at) - min(ended_at))::float8 as took_s
      from ended group by tenth order by tenth
"""
_WHOLE: Final = """
    select extract(epoch from max(ended_at) - min(granted_at))::float8 as took_s, count(*) as steps,
           count(*) filter (where state <> 'succeeded') as lost
      from rara.result where workflow_run_id = $1::uuid
"""


def wide(steps: int) -> Iterator[workflow_pb2.StepDefinition]:
    yield step(0)
    for number in range(1, steps):
        yield step(number, 0)


def deep(steps: int) -> Iterator[workflow_pb2.StepDefinition]:
    yield step(0)
    for number in range(1, steps):
        yield step(number, number - 1)


def diamond(steps: int) -> Iterator[workflow_pb2.StepDefinition]:
    yield step(0)
    join = 0
    for number in range(1, steps):
        if number - join <= FAN:
            yield step(number, join)
        else:
            yield step(number, *range(join + 1, number))
            join = number


SHAPES: Final = {"wide": wide, "diamond": diamond, "deep": deep}


def step(number: int, *behind: int) -> workflow_pb2.StepDefinition:
    return workflow_pb2.StepDefinition(
        step_name=f"s{number}", kind=NOOP, depends_on=[f"s{other}" for other in behind]
    )


async def one_run(product: Product, name: str, steps: int) -> dict[str, Any]:
    """Start a run of the shape with the executor connected, and wait until it has ended."""
    definition = workflow_pb2.Definition(definition=name, steps=SHAPES[name](steps))
    began = time.monotonic()
    await product.client.register_definition(definition, timeout_s=60)
    registered_s = time.monotonic() - began
    await product.server.settle(product.database)
    began = time.monotonic()
    before = machine.cpu_s([product.server.pid]), machine.cpu_s([product.schedulers[0].pid])
    run_id = (await product.client.start_run(name, {}, timeout_s=60)).run.workflow_run_id
    started_s = time.monotonic() - began
    run = await product.client.wait_run(run_id, timeout_s=1800)
    closed_s = time.monotonic() - began
    after = machine.cpu_s([product.server.pid]), machine.cpu_s([product.schedulers[0].pid])
    whole = await product.connection.fetchrow(_WHOLE, run_id)
    tenths = await product.connection.fetch(_TENTHS, run_id)
    if whole is None or (whole["steps"], whole["lost"]) != (steps, 0):
        raise RuntimeError(f"{name}: {whole}, {run.state}")
    rates = [round(row["steps"] / max(row["took_s"], 1e-3)) for row in tenths]
    return {
        "registered_s": round(registered_s, 3),
        "started_s": round(started_s, 3),
        "closed_s": round(closed_s, 3),
        "steps_per_s": round(steps / whole["took_s"]),
        "steps_per_s_by_tenth": rates,
        "postgres_cpu_ms_per_step": round(1000 * (after[0] - before[0]) / steps, 3),
        "scheduler_cpu_ms_per_step": round(1000 * (after[1] - before[1]) / steps, 3),
    }


async def measure(steps: int, shapes: list[str], folder: Path) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(folder / "postgres", choose_binaries("wheel")))
        bench = Bench(Options(), folder, server, stack)
        found: dict[str, Any] = {"steps": steps, "machine": machine.facts(folder)}
        for name in shapes:
            async with running(bench, f"rara_{name}", Shape()) as product:
                (executor,) = await product.start_executors()
                found[name] = await one_run(product, name, steps)
                await executor.stop(timeout_s=60)
        async with running(bench, "rara_tens", Shape()) as product:
            found["runs_of_ten"] = dict(await product.drain(steps))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rara-graphs-") as name:
        Path(name).chmod(0o711)  # PostgreSQL may have to run as another account
        found = asyncio.run(measure(given.steps, given.shapes.split(","), Path(name)))
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
