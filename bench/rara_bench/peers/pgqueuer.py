"""pgqueuer: one process, batch 100."""

from datetime import timedelta
from typing import Any

from rara_bench.peers.peer import OnStart


class Pgqueuer:
    name = "pgqueuer"
    settings = "one process, asyncpg pool of 8, batch_size 100, uvloop"
    jobs = 20_000
    concurrency = 100
    remaining = "select count(*) from pgqueuer where status <> 'successful'"
    uvloop = True

    def __init__(self) -> None:
        self._queries: Any = None

    async def install(self, dsn: str) -> None:
        await (await _queries(dsn)).install()

    async def enqueue(self, dsn: str, count: int) -> None:
        queries = await _queries(dsn)
        for first in range(0, count, 1000):
            numbers = range(first, min(first + 1000, count))
            payloads = [b"%d" % number for number in numbers]
            await queries.enqueue(["noop"] * len(payloads), payloads, [0] * len(payloads))

    async def enqueue_one(self, dsn: str, number: int) -> None:
        if self._queries is None:
            self._queries = await _queries(dsn)
        await self._queries.enqueue("noop", b"%d" % number)

    async def work(self, dsn: str, on_start: OnStart, concurrency: int) -> None:
        import asyncpg
        from pgqueuer import PgQueuer
        from pgqueuer.db import AsyncpgPoolDriver

        queuer = PgQueuer(AsyncpgPoolDriver(await asyncpg.create_pool(dsn, min_size=2, max_size=8)))

        @queuer.entrypoint("noop")
        async def noop(job: Any) -> None:
            on_start(int(job.payload))

        await queuer.run(batch_size=concurrency, dequeue_timeout=timedelta(seconds=2))


async def _queries(dsn: str) -> Any:
    import asyncpg
    from pgqueuer.db import AsyncpgPoolDriver
    from pgqueuer.queries import Queries

    return Queries(AsyncpgPoolDriver(await asyncpg.create_pool(dsn, min_size=1, max_size=1)))


PEER = Pgqueuer()
