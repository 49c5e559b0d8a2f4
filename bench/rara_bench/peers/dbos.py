"""DBOS Transact: a queued workflow is a job."""

import asyncio
from typing import Any

from rara_bench.peers.peer import OnStart

_POLL_S = 0.05  # its default is 1 s
_VERSION = "1"


class Dbos:
    name = "dbos"
    settings = "one process, queued async workflow, worker_concurrency 100, poll 0.05 s, pool of 20"
    jobs = 2000
    concurrency = 100
    remaining = (
        "select count(*) from dbos.workflow_status"
        " where queue_name is not null and status not in ('SUCCESS', 'ERROR') and name like '%noop%'"
    )
    uvloop = False

    def __init__(self) -> None:
        self._workflow: Any = None

    async def install(self, dsn: str) -> None:
        from dbos import DBOS

        await asyncio.to_thread(_launch, dsn)
        await DBOS.register_queue_async(
            "bench",
            worker_concurrency=self.concurrency,
            polling_interval_sec=_POLL_S,
            on_conflict="always_update",
        )
        await asyncio.to_thread(DBOS.destroy)

    async def enqueue(self, dsn: str, count: int) -> None:
        from dbos import DBOSClient

        client = DBOSClient(system_database_url=dsn)
        turns = asyncio.Semaphore(20)  # it has no call for many

        async def enqueue_one(number: int) -> None:
            options = {"queue_name": "bench", "workflow_name": "noop", "app_version": _VERSION}
            async with turns:
                await client.enqueue_async(options, number)

        await asyncio.gather(*(enqueue_one(number) for number in range(count)))
        client.destroy()

    async def enqueue_one(self, dsn: str, number: int) -> None:  # noqa: ARG002 - the worker's own connection
        from dbos import DBOS

        await DBOS.enqueue_workflow_async("bench", self._workflow, number)

    async def work(self, dsn: str, on_start: OnStart, concurrency: int) -> None:
        from dbos import DBOS

        @DBOS.workflow(name="noop")
        async def noop(number: int) -> int:
            on_start(number)
            return number

        self._workflow = noop
        _launch(dsn)
        await DBOS.register_queue_async(
            "bench",
            worker_concurrency=concurrency,
            polling_interval_sec=_POLL_S,
            on_conflict="always_update",
        )
        await asyncio.Event().wait()


def _launch(dsn: str) -> None:
    from dbos import DBOS

    DBOS(
        config={
            "name": "bench",
            "system_database_url": dsn,
            "log_level": "ERROR",
            "application_version": _VERSION,
            "sys_db_pool_size": 20,
        }
    )
    DBOS.launch()


PEER = Dbos()
