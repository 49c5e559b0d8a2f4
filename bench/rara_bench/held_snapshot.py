"""A drain while a transaction has been open since 100,000 steps ago, and the same without.

Two databases of one server that are the same but for that: a snapshot keeps dead rows of its own database alone.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from rara_bench.arm import Bench, Figures
from rara_bench.product import Shape, prepare, running
from rara_bench.server import Server

SINCE_DRAINS: Final = 5  # of the run's size: 100,000 steps with 20,000


async def measure(bench: Bench, *, is_held: bool) -> Figures:
    database = "rara_held" if is_held else "rara_unheld"
    steps = bench.options.steps
    if database not in bench.kept:
        await prepare(bench.server, database)
        if is_held:
            await bench.stack.enter_async_context(_snapshot(bench.server, database))
        await _drain(bench, database, SINCE_DRAINS * steps)
        bench.kept[database] = True  # whole: what failed half way is made again
    return await _drain(bench, database, steps // 2)


async def _drain(bench: Bench, database: str, steps: int) -> Figures:
    async with running(bench, database, Shape(), keep=True) as product:
        return await product.drain(steps)


@asynccontextmanager
async def _snapshot(server: Server, database: str) -> AsyncIterator[None]:
    """A transaction that has read something, as a forgotten session or a long report has."""
    connection = await server.connect(database)
    try:
        await connection.execute("begin isolation level repeatable read")
        await connection.fetchval("select count(*) from rara.ready")
        yield
    finally:
        await connection.close()
