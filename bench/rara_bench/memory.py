"""What an executor that has nothing to do occupies, with all its processes: the Python one and the Go one."""

import asyncio
from pathlib import Path
from typing import Final

import psutil
from rara_testing.processes import Process

from rara_bench import go_build
from rara_bench.arm import Bench, Figures
from rara_bench.product import Shape, running

SETTLE_S: Final = 3.0
_MIB: Final = 2**20


async def measure(bench: Bench, go_source: Path) -> Figures:
    program = await go_build.program(bench, go_source, "./cmd/rara-go-probe", "rara-go-probe")
    figures: dict[str, float] = {}
    for language, shape in (("python", Shape()), ("go", Shape(command=(str(program),)))):
        async with running(bench, "rara_memory", shape) as product:
            [executor] = await product.start_executors()
            await asyncio.sleep(SETTLE_S)
            for name, size in _occupied(executor).items():
                figures[f"{language}_{name}"] = size
            await executor.stop()
    return figures


def _occupied(executor: Process) -> dict[str, float]:
    """Resident: shared pages count in each process. Proportional: they count once."""
    top = psutil.Process(executor.pid)
    whole = [process.memory_full_info() for process in (top, *top.children(recursive=True))]
    return {
        "processes": len(whole),
        "resident_mib": sum(each.rss for each in whole) / _MIB,
        "proportional_mib": sum(each.pss for each in whole) / _MIB,
    }
