"""Moves one large artifact from step to step between real processes, and watches what that does to them.

async with Watch({"scheduler": pid, "python": pid}, database, lease_s=6, heartbeat_s=0.5) as watch:
    moved = await move(client, "python", "go", size_bytes=1 << 30, seed=1, folder=folder)
watch.growth_bytes["python"], watch.lateness_s
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import asyncpg
import psutil
from rara.v1 import common_pb2, workflow_pb2
from rara_client import Client

_SAMPLE_S: Final = 0.05
_ENDED: Final = frozenset(
    {
        workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED,
        workflow_pb2.WORKFLOW_RUN_STATE_FAILED,
        workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED,
    }
)
# How long ago the lease that was renewed longest ago was renewed: $1 is how long a lease is.
_OLDEST_RENEWAL: Final = (
    "select extract(epoch from max($1::interval - (expires_at - clock_timestamp())))::float8"
    " from rara.lease where started_at is not null"
)


@dataclass(frozen=True, slots=True)
class Moved:
    """up_s: the put of the one step. down_s: the open of the next."""

    size_bytes: int
    up_s: float
    down_s: float

    @property
    def up_mib_per_s(self) -> float:
        return self.size_bytes / 2**20 / self.up_s

    @property
    def down_mib_per_s(self) -> float:
        return self.size_bytes / 2**20 / self.down_s


class Watch:
    """Samples resident memory, of each process with all its children, and how late heartbeats renew leases.

    growth_bytes: over what it was at the start. lateness_s: longest time between two renewals of a running step's
    lease, beyond the heartbeat interval, as the database has it.
    """

    def __init__(
        self,
        pids: Mapping[str, int],
        database: "asyncpg.Connection[asyncpg.Record]",
        *,
        lease_s: float,
        heartbeat_s: float,
    ) -> None:
        self.growth_bytes: dict[str, int] = dict.fromkeys(pids, 0)
        self.lateness_s = 0.0
        self.samples = 0
        self._pids = dict(pids)
        self._database = database
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s

    async def __aenter__(self) -> Self:
        self._before = {name: resident_bytes(pid) for name, pid in self._pids.items()}
        self._task = asyncio.create_task(self._run(), name="watch")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        if kind is None and not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        while True:
            for name, pid in self._pids.items():
                grown = resident_bytes(pid) - self._before[name]
                self.growth_bytes[name] = max(self.growth_bytes[name], grown)
            age_s = await self._database.fetchval(_OLDEST_RENEWAL, _interval(self._lease_s))
            if age_s is not None:
                self.samples += 1
                self.lateness_s = max(self.lateness_s, age_s - self._heartbeat_s)
            await asyncio.sleep(_SAMPLE_S)


def _interval(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def resident_bytes(pid: int) -> int:
    """Of a process and all that it started, shared pages counted in each."""
    return sum(_rss(process) for process in _tree(pid))


def _tree(pid: int) -> Iterator[psutil.Process]:
    process = psutil.Process(pid)
    yield process
    yield from process.children(recursive=True)


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


async def move(
    client: Client, maker: str, reader: str, *, size_bytes: int, seed: int, folder: Path, bound_s: float
) -> Moved:
    """Run the two steps, on executors of these kinds. Raises AssertionError unless the bytes arrive."""
    name = f"bulk-{maker}-{reader}"
    await client.register_definition(_definition(name, maker, reader))
    given = {"size_bytes": size_bytes, "seed": seed, "folder": str(folder)}
    run_id = (await client.start_run(name, given)).run.workflow_run_id
    async with asyncio.timeout(bound_s):
        while (found := await client.get_run(run_id, include_steps=True)).run.state not in _ENDED:
            await asyncio.sleep(0.1)
    outputs = {step.step_name: step.output.data for step in found.steps}
    assert found.run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED, found.run.error
    made, read = json.loads(outputs["make"]), json.loads(outputs["read"])
    assert (read["sha256"], made["size_bytes"]) == (made["sha256"], size_bytes)
    return Moved(size_bytes, made["put_s"], read["open_s"])


def _definition(name: str, maker: str, reader: str) -> workflow_pb2.Definition:
    template = common_pb2.Payload(data=b'{"$ref": "/run/input"}')
    bound = workflow_pb2.ArtifactBinding(name="large", from_step="make")
    return workflow_pb2.Definition(
        definition=name,
        steps=[
            workflow_pb2.StepDefinition(
                step_name="make", executor_kind=maker, kind="bulk.make", input_template=template
            ),
            workflow_pb2.StepDefinition(
                step_name="read", executor_kind=reader, kind="bulk.read", input_artifacts=[bound]
            ),
        ],
    )
