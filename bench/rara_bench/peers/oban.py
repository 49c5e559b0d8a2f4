"""Oban for Python."""

import asyncio
from typing import Any

from rara_bench.peers.peer import OnStart


class Oban:
    name = "oban"
    settings = "one process, queue limit 100, pool of 2 to 10, PostgreSQL notifier, uvloop"
    jobs = 10_000
    concurrency = 100
    remaining = "select count(*) from oban_jobs where state <> 'completed'"
    uvloop = True

    def __init__(self) -> None:
        self._on_start: OnStart = lambda _number: None
        self._oban: Any = None
        self._worker: Any = None

    async def install(self, dsn: str) -> None:
        from oban.schema import install

        pool = await _pool(dsn)
        await install(pool)
        await pool.close()

    async def enqueue(self, dsn: str, count: int) -> None:
        import oban

        pool = await _pool(dsn)
        client = oban.Oban(pool=pool, name="client")
        noop = self._noop()
        for first in range(0, count, 1000):
            numbers = range(first, min(first + 1000, count))
            await client.enqueue_many([noop.new({"number": number}) for number in numbers])
        await pool.close()

    async def enqueue_one(self, dsn: str, number: int) -> None:  # noqa: ARG002 - the worker's own connection
        await self._oban.enqueue(self._noop().new({"number": number}))

    async def work(self, dsn: str, on_start: OnStart, concurrency: int) -> None:
        import oban

        self._on_start = on_start
        self._noop()
        self._oban = oban.Oban(pool=await _pool(dsn), queues={"default": concurrency})
        async with self._oban:
            await asyncio.Event().wait()

    def _noop(self) -> Any:
        """The worker class, declared once: its name is what a job is found by."""
        if self._worker is None:
            from oban import worker

            outer = self

            @worker(queue="default")
            class Noop:
                async def process(self, job: Any) -> None:
                    outer._on_start(job.args["number"])

            self._worker = Noop
        return self._worker


async def _pool(dsn: str) -> Any:
    import oban

    return await oban.Oban.create_pool(dsn, min_size=2, max_size=10)


PEER = Oban()
