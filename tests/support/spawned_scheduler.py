"""`rara-scheduler` as a process of its own, which can be killed and started again at its address."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import asyncpg
import grpc.aio
from rara.v1 import workflow_pb2, workflow_pb2_grpc
from rara_testing.processes import Process, Processes
from support.running_scheduler import TEST_VALUES, RunningScheduler, until


class SpawnedScheduler:
    """settings: over the test values. `world` speaks to it, but for its `scheduler`, which is not in this process."""

    world: RunningScheduler

    def __init__(
        self,
        processes: Processes,
        database_url: str,
        folder: Path,
        settings: Mapping[str, object],
        env: Mapping[str, str],
    ) -> None:
        self.address = "127.0.0.1:0"
        self.process: Process | None = None
        self._processes = processes
        values = (
            TEST_VALUES
            | {"database_url": database_url, "blob_store": f"file://{folder / 'blobs'}"}
            | dict(settings)
        )
        self._env = dict(env) | {f"RARA_{key.upper()}": str(value) for key, value in values.items()}

    async def start(self) -> None:
        env = self._env | {"RARA_LISTEN": self.address}
        self.process = await self._processes.start("scheduler", ["rara-scheduler"], env=env)
        match = await self.process.expect_line(r"rara-scheduler listening on (\S+)")
        self.address = match[1]

    async def kill(self) -> None:
        assert self.process is not None
        await self.process.kill_and_wait()

    async def restart(self) -> None:
        """Killed, started again, and reached by `world`."""
        await self.kill()
        await self.start()
        await until(self._answers, "answer of the new scheduler")

    async def _answers(self) -> bool:
        try:
            await self.world.workflows.ListDefinitions(workflow_pb2.ListDefinitionsRequest(), timeout=5)
        except grpc.aio.AioRpcError:
            return False
        return True


@contextlib.asynccontextmanager
async def spawned_scheduler(
    processes: Processes,
    database_url: str,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    address: str = "127.0.0.1:0",
    **settings: object,
) -> AsyncIterator[SpawnedScheduler]:
    scheduler = SpawnedScheduler(processes, database_url, folder, settings, env or {})
    scheduler.address = address
    await scheduler.start()
    raw = await asyncpg.connect(database_url)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
    async with grpc.aio.insecure_channel(scheduler.address, options=options) as channel:
        stub = workflow_pb2_grpc.WorkflowServiceStub(channel)
        scheduler.world = RunningScheduler(cast("Any", None), scheduler.address, raw, stub)
        yield scheduler
    await raw.close()
