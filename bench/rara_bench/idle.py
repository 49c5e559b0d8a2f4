"""What a scheduler with 10 connected executors and nothing to do asks of PostgreSQL, by pg_stat_statements."""

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from rara_testing.scripted_executor import ScriptedExecutor

from rara_bench.arm import Bench, CannotMeasure, Figures
from rara_bench.operations import NOOP
from rara_bench.product import Product, Shape, running
from rara_bench.server import Server, ServerFailed

EXECUTORS: Final = 10
SLOTS: Final = 4
WINDOW_S: Final = 15.0
_SETTLE_S: Final = 3.0
_KEY: Final = "server that counts statements"
_SETTINGS: Final = {"shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.track": "all"}
_CALLS: Final = """
    select coalesce(sum(s.calls), 0)::bigint
      from pg_stat_statements s join pg_database d on d.oid = s.dbid
     where d.datname = $1 and s.toplevel
"""


async def measure(bench: Bench) -> Figures:
    server = await _server(bench)
    async with running(bench, "rara_idle", Shape(), server=server) as product, AsyncExitStack() as stack:
        for _ in range(EXECUTORS):
            executor = await stack.enter_async_context(ScriptedExecutor())
            interval_s = await _connect(executor, product.addresses[0])
            beats = asyncio.create_task(_beat(executor, interval_s), name="heartbeats")
            stack.callback(beats.cancel)
        await asyncio.sleep(_SETTLE_S)
        before = await _calls(server, product)
        await asyncio.sleep(WINDOW_S)
        calls = await _calls(server, product) - before
    return {"statements_per_minute": calls * 60 / WINDOW_S}


async def _server(bench: Bench) -> Server:
    server = bench.kept.get(_KEY)
    if isinstance(server, Server):
        return server
    server = Server(bench.folder / "postgres-counting", bench.server.binaries, settings=_SETTINGS)
    try:
        await bench.stack.enter_async_context(server)
    except ServerFailed as error:
        raise CannotMeasure(f"pg_stat_statements is not here: {error}") from error
    await server.execute("create extension pg_stat_statements")
    bench.kept[_KEY] = server
    return server


async def _connect(executor: ScriptedExecutor, address: str) -> float:
    """Seconds between its heartbeats."""
    await executor.connect(address)
    await executor.hello([NOOP])
    welcome = await executor.expect("welcome", timeout_s=60)
    await executor.credit(SLOTS)
    return welcome.terms.heartbeat_interval.ToTimedelta().total_seconds()


async def _beat(executor: ScriptedExecutor, interval_s: float) -> None:
    while True:
        await executor.heartbeat()
        await asyncio.sleep(interval_s)


async def _calls(server: Server, product: Product) -> int:
    """From another database, so that the question is not counted."""
    connection = await server.connect()
    try:
        return int(await connection.fetchval(_CALLS, product.database))
    finally:
        await connection.close()
