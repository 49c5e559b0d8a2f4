"""Absurd, by its Python SDK."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from rara_bench.peers.peer import OnStart


class Absurd:
    name = "absurd"
    settings = "one process, AsyncAbsurd, one connection, concurrency and batch 100, poll 0.25 s, uvloop"
    jobs = 4000
    concurrency = 100
    remaining = (
        "select count(*) from absurd.t_default where state not in ('completed', 'failed', 'cancelled')"
    )
    uvloop = True

    def __init__(self) -> None:
        self._client: Any = None

    async def install(self, dsn: str) -> None:
        await _control(dsn, "init")
        await _control(dsn, "create-queue", "default")

    async def enqueue(self, dsn: str, count: int) -> None:
        from absurd_sdk import AsyncAbsurd

        clients = [AsyncAbsurd(dsn) for _ in range(4)]  # it has no call for many

        async def spawn(client: Any, numbers: range) -> None:
            for number in numbers:
                await client.spawn("noop", {"number": number}, queue="default")
            await client.close()

        await asyncio.gather(*(spawn(each, range(n, count, 4)) for n, each in enumerate(clients)))

    async def enqueue_one(self, dsn: str, number: int) -> None:
        if self._client is None:
            from absurd_sdk import AsyncAbsurd

            self._client = AsyncAbsurd(dsn)
        await self._client.spawn("noop", {"number": number}, queue="default")

    async def work(self, dsn: str, on_start: OnStart, concurrency: int) -> None:
        from absurd_sdk import AsyncAbsurd

        app = AsyncAbsurd(dsn, queue_name="default")

        @app.register_task(name="noop")
        async def noop(params: dict[str, int], context: Any) -> int:  # noqa: ARG001 - its signature
            on_start(params["number"])
            return 1

        await app.start_worker(concurrency=concurrency, poll_interval=0.25)


async def _control(dsn: str, *arguments: str) -> None:
    program = Path(sys.executable).with_name("absurdctl")
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        env={**os.environ, "ABSURD_DATABASE_URL": dsn, "PATH": _with_psql()},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"absurdctl {arguments[0]} failed: {said.decode()[-1000:]}")


def _with_psql() -> str:
    """absurdctl may call psql: the server's own programs come last on the path."""
    return os.pathsep.join(filter(None, (os.environ.get("PATH"), os.environ.get("BENCH_PG_BIN"))))


PEER = Absurd()
