"""Procrastinate."""

import logging
from typing import Any

from rara_bench.peers.peer import OnStart


class Procrastinate:
    name = "procrastinate"
    settings = "one process, psycopg pool of 4 to 20, concurrency 50, LISTEN, jobs kept, uvloop"
    jobs = 2000
    concurrency = 50
    remaining = "select count(*) from procrastinate_jobs where status not in ('succeeded', 'failed')"
    uvloop = True

    def __init__(self) -> None:
        self._on_start: OnStart = lambda _number: None
        self._task: Any = None

    async def install(self, dsn: str) -> None:
        async with self._app(dsn).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def enqueue(self, dsn: str, count: int) -> None:
        async with self._app(dsn).open_async():
            for first in range(0, count, 1000):
                numbers = range(first, min(first + 1000, count))
                await self._task.batch_defer_async(*({"number": number} for number in numbers))

    async def enqueue_one(self, dsn: str, number: int) -> None:  # noqa: ARG002 - the worker's own connection
        await self._task.defer_async(number=number)

    async def work(self, dsn: str, on_start: OnStart, concurrency: int) -> None:
        self._on_start = on_start
        logging.disable(logging.CRITICAL)  # it logs each job
        async with self._app(dsn).open_async() as app:
            await app.run_worker_async(
                concurrency=concurrency, install_signal_handlers=False, fetch_job_polling_interval=1.0
            )

    def _app(self, dsn: str) -> Any:
        import procrastinate

        connector = procrastinate.PsycopgConnector(conninfo=dsn, min_size=4, max_size=20)
        app = procrastinate.App(connector=connector)

        @app.task(name="noop")
        async def noop(number: int) -> None:
            self._on_start(number)

        self._task = noop
        return app


PEER = Procrastinate()
