"""A drain on a disk whose flush takes 2 ms more, and on the same disk without.

Two servers that differ in the delay alone; slow_flush.c, loaded before the C library, adds it to each flush.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Final

from rara_bench import product
from rara_bench.arm import Bench, CannotMeasure, Figures
from rara_bench.product import Shape
from rara_bench.server import Server

DELAY_US: Final = 2000
_SOURCE: Final = Path(__file__).with_name("slow_flush.c")
_LIBRARY: Final = "slow_flush.so"


async def measure(bench: Bench, *, is_slow: bool) -> Figures:
    delay_us = DELAY_US if is_slow else 0
    key = f"server with {delay_us} us"
    server = bench.kept.get(key)
    if not isinstance(server, Server):
        environment = {"LD_PRELOAD": str(await _library(bench)), "BENCH_FLUSH_DELAY_US": str(delay_us)}
        server = Server(bench.folder / f"postgres-{delay_us}", bench.server.binaries, environment=environment)
        await bench.stack.enter_async_context(server)
        bench.kept[key] = server
    shape = Shape(steps=bench.options.steps // 2)
    return await product.drain(bench, "slow_disk", shape, server=server)


async def _library(bench: Bench) -> Path:
    target = bench.folder / _LIBRARY
    if target.exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise CannotMeasure("there is no C compiler (`cc`) to build slow_flush.c with")
    process = await asyncio.create_subprocess_exec(
        *(compiler, "-shared", "-fPIC", "-O2", "-Wall", "-o", str(target), str(_SOURCE), "-ldl"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    if process.returncode != 0:
        raise CannotMeasure(f"slow_flush.c does not build: {said.decode()[-500:]}")
    target.chmod(0o755)
    return target
