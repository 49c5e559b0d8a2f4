"""The product as delivered: scheduler and executor processes over one database, and how fast they drain it."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rara.v1 import workflow_pb2
from rara_client import Client
from rara_scheduler.store.migrate import migrate
from rara_testing.processes import Process, Processes

from rara_bench import machine
from rara_bench.arm import Bench, Figures
from rara_bench.operations import NOOP
from rara_bench.server import Connection, Server

STEPS_A_RUN: Final = 10
START_S: Final = 120.0
DRAIN_S: Final = 900.0
TEMPLATE: Final = "rara_template"
_LOOK_S: Final = 0.1
_INPUT: Final = b'{"page": 17, "of": "a small input, as most are"}'
_LISTENS: Final = r"rara-scheduler listening on (?P<address>\S+)"
_CONNECTED: Final = r"connected to"
_PACKAGES: Final = str(Path(__file__).resolve().parents[1])

_IS_RUNNING: Final = "select exists (select from rara.workflow_run where ended_at is null)"
_WAL: Final = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
_NOW: Final = "select clock_timestamp()"
# From the first lease to the last commit, by the database's clock.
_DRAINED: Final = """
    select count(*) as steps, count(*) filter (where state <> 'succeeded') as lost,
           extract(epoch from max(ended_at) - min(granted_at))::float8 as took_s
      from rara.result where granted_at >= $1
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drained and by whom.

    command: of the executors. steps: 0 takes the run's own. environment: of all processes. checkpoint: just before the
    drain; its first change of a page then writes the whole page to the log, as it does once in five minutes else.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "rara_executor")
    kind: str = NOOP
    schedulers: int = 1
    executors: int = 1
    steps: int = 0
    steps_a_run: int = STEPS_A_RUN
    checkpoint: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Product:
    """Schedulers that run, with no executor yet."""

    bench: Bench
    server: Server
    database: str
    schedulers: list[Process]
    addresses: list[str]
    processes: Processes
    client: Client
    connection: Connection
    shape: Shape

    async def start_executors(self) -> list[Process]:
        """All at once, dealt to the schedulers; the slots are shared out."""
        return await asyncio.gather(*(self._start_executor(n) for n in range(self.shape.executors)))

    async def _start_executor(self, number: int) -> Process:
        options = self.bench.options
        env = {
            "RARA_SCHEDULER": self.addresses[number % len(self.addresses)],
            "RARA_EXECUTOR_NAME": f"bench-{number}",
            "RARA_EXECUTOR_MODULES": "rara_bench.operations",  # means nothing to Go
            "RARA_EXECUTOR_DIR": str(self.bench.folder / "executors" / f"{self.database}-{number}"),
            **_common(self.shape),
            **options.product,
            "RARA_EXECUTOR_SLOTS": str(max(1, options.slots // self.shape.executors)),
        }
        return await self.processes.start(
            "executor", list(self.shape.command), env=env, ready=_CONNECTED, ready_s=START_S
        )

    async def seed(self, steps: int) -> None:
        """Store runs with that many steps in all, through BatchStartRuns."""
        a_run = self.shape.steps_a_run
        await self.client.register_definition(definition(self.shape.kind, a_run))
        request = workflow_pb2.StartRunRequest(definition="bench")
        request.input.data = _INPUT
        requests = (request for _ in range(steps // a_run))
        async with aclosing(self.client.start_runs(requests, batch_size=500)) as started:
            async for _ in started:
                pass

    async def until_all_ended(self) -> None:
        async with asyncio.timeout(DRAIN_S):
            while await self.connection.fetchval(_IS_RUNNING):  # noqa: ASYNC110 - asking is all there is
                await asyncio.sleep(_LOOK_S)

    async def drain(self, steps: int) -> Figures:
        """Seed, then start the executors and let them work."""
        steps -= steps % self.shape.steps_a_run
        before_seed = await self.connection.fetchval(_WAL)
        await self.seed(steps)
        start_wal = await self.connection.fetchval(_WAL) - before_seed
        await self.server.settle(self.database, checkpoint=self.shape.checkpoint)
        began = await self.connection.fetchval(_NOW)
        wal = -await self.connection.fetchval(_WAL)
        before = self._cpu_s([])
        executors = await self.start_executors()
        executor_before_s = machine.cpu_s([each.pid for each in executors])
        await self.until_all_ended()
        after = self._cpu_s(executors)
        wal += await self.connection.fetchval(_WAL)
        drained = await self.connection.fetchrow(_DRAINED, began)
        for each in executors:
            await each.stop(timeout_s=60)
        if drained is None or drained["steps"] != steps or drained["lost"]:
            raise RuntimeError(f"{drained} of {steps} steps succeeded")
        return {
            "steps_per_s": steps / drained["took_s"],
            "seconds": drained["took_s"],
            "scheduler_cpu_ms_per_step": 1000 * (after[0] - before[0]) / steps,
            "postgres_cpu_ms_per_step": 1000 * (after[1] - before[1]) / steps,
            "executor_cpu_ms_per_step": 1000 * (after[2] - executor_before_s) / steps,
            "wal_bytes_per_step": float(wal) / steps,
            "wal_bytes_per_start": float(start_wal) / steps,
        }

    def _cpu_s(self, executors: list[Process]) -> tuple[float, float, float]:
        """Of schedulers, PostgreSQL and executors."""
        return (
            machine.cpu_s([each.pid for each in self.schedulers]),
            machine.cpu_s([self.server.pid]),
            machine.cpu_s([each.pid for each in executors]),
        )


def definition(kind: str, steps: int) -> workflow_pb2.Definition:
    parts = [workflow_pb2.StepDefinition(step_name=f"s{n}", kind=kind) for n in range(steps)]
    return workflow_pb2.Definition(definition="bench", steps=parts)


@asynccontextmanager
async def running(
    bench: Bench, database: str, shape: Shape, *, server: Server | None = None, keep: bool = False
) -> AsyncIterator[Product]:
    """Schedulers over a new database; keep: over one that `prepare` made, which stays."""
    server = server or bench.server
    if not keep:
        await prepare(server, database)
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(bench.folder / "logs" / database))
        schedulers, addresses = [], []
        for _ in range(shape.schedulers):
            env = {
                "RARA_DATABASE_URL": server.dsn(database),
                "RARA_LISTEN": "127.0.0.1:0",
                "RARA_BLOB_STORE": f"file://{bench.folder / 'blobs' / database}",
                **_common(shape),
                **bench.options.product,
            }
            one = await processes.start("scheduler", [sys.executable, "-m", "rara_scheduler"], env=env)
            addresses.append((await one.expect_line(_LISTENS, START_S))["address"])
            schedulers.append(one)
        client = await stack.enter_async_context(Client.connect(addresses[0]))
        connection = await server.connect(database)
        stack.push_async_callback(connection.close)
        yield Product(bench, server, database, schedulers, addresses, processes, client, connection, shape)
        for each in schedulers:
            await each.stop(timeout_s=60)
    if not keep:
        await server.drop(database)


async def prepare(server: Server, database: str) -> None:
    """A new database with the product's schema, from a template that is made once a server."""
    connection = await server.connect()
    try:
        exists = await connection.fetchval(
            "select exists (select from pg_database where datname = $1)", TEMPLATE
        )
    finally:
        await connection.close()
    if not exists:
        await migrate(await server.create(TEMPLATE))
    await server.create(database, template=TEMPLATE)


async def drain(bench: Bench, name: str, shape: Shape, *, server: Server | None = None) -> Figures:
    """One drain in a new database."""
    async with running(bench, f"rara_{name}", shape, server=server) as product:
        return await product.drain(shape.steps or bench.options.steps)


def _common(shape: Shape) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (_PACKAGES, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, **shape.environment}
