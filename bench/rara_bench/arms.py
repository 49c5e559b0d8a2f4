"""All arms, in the order of a round: what is compared stands side by side."""

import sys
from typing import Final

from rara_bench import go_executor, limit, product
from rara_bench.arm import Arm, Bench, Figures
from rara_bench.product import Shape

MOST_STEPS_A_RUN: Final = 10_000  # of one definition, by the product's limits


async def _drain(bench: Bench) -> Figures:
    return await product.drain(bench, "drain", Shape())


async def _in_process(bench: Bench) -> Figures:
    command = (sys.executable, "-m", "rara_bench.in_process")
    return await product.drain(bench, "in_process", Shape(command=command))


async def _go(bench: Bench) -> Figures:
    return await product.drain(bench, "go", Shape(command=(str(await go_executor.program(bench)),)))


ARMS: Final = (
    Arm("limit", limit.measure, "ready/lease/result life in sets of 100, pgbench"),
    Arm("drain", _drain, "no-op steps in runs of 10, as delivered"),
    Arm("drain_in_process", _in_process, "the same, handlers in the supervisor's process"),
    Arm("drain_go", _go, "the same through the Go executor"),
)
