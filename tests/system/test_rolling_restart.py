"""A rolling restart of all parts under load: each in turn by SIGTERM, then a new process in its place."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg
import pytest
from rara.v1 import workflow_pb2
from rara_cli.ports import lasting_port
from rara_client import Client
from rara_client.definitions import definition_from
from rara_testing.processes import Process, Processes
from support.drain_line import drained
from support.go_executor import program, spawn_go_executor
from support.kept_promises import assert_promises_kept
from support.scheduler_process import start_scheduler
from support.spawned_executor import spawn_executor

pytestmark = pytest.mark.needs("go")

STOP_S = 4.0  # of executors
LONG_STOP_S = 8.0  # more time for the last words where the machine is busy
EXIT_S = 15.0  # generous: the machine may be busy
RUN_S = 90.0
CALLERS = 4
SLOW_EVERY = 5  # of the runs, one has a step that no executor waits for
SETTINGS: Final[dict[str, Any]] = {"lease_s": 30.0, "silence_s": 5.0, "heartbeat_s": 0.5, "stop_s": 5.0}
CHAIN: Final = {
    "definition": "chain",
    "steps": [
        {
            "step_name": "first",
            "kind": "timed.add",
            "input_template": {"seconds": 0.05, "number": {"$ref": "/run/input/number"}},
        },
        {
            "step_name": "in-go",
            "kind": "probe.sleep",
            "depends_on": ["first"],
            "input_template": {"seconds": {"$ref": "/run/input/seconds"}, "checkpoint": {"half": True}},
        },
        {
            "step_name": "last",
            "kind": "timed.add",
            "depends_on": ["first", "in-go"],
            "input_template": {
                "seconds": {"$ref": "/run/input/seconds"},
                "number": {"$ref": "/steps/first/output"},
            },
        },
    ],
}

Start = Callable[[], Awaitable[Process]]


@dataclass
class Part:
    """A process that can be replaced by another one of the same kind."""

    name: str
    start: Start
    process: Process

    async def replace(self) -> tuple[int, int, int, int]:
        """SIGTERM, its end, and a new one; what the old one said of its drain."""
        assert await self.process.stop(EXIT_S) == 0, self.process.report()
        said = drained(self.process)
        self.process = await self.start()
        return said


@dataclass
class Load:
    """Runs one after the other, until it is told to stop; numbers by run id."""

    client: Client
    slow_s: float
    started: dict[str, int] = field(default_factory=dict)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def call(self) -> None:
        while not self.stopping.is_set():
            number = next(self._numbers)
            seconds = self.slow_s if number % SLOW_EVERY == 0 else 0.05
            started = await self.client.start_run(
                "chain",
                {"number": number, "seconds": seconds},
                idempotency_key=f"rolling-{number}",
                timeout_s=RUN_S,
            )
            run_id = started.run.workflow_run_id
            self.started[run_id] = number
            run = await self.client.wait_run(run_id, RUN_S)
            assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED, run


@contextlib.asynccontextmanager
async def stack(database_url: str, folder: Path, stop_s: float) -> AsyncIterator[tuple[list[Part], str]]:
    """Two schedulers, two Python executors, one in Go; and the target that names both schedulers."""
    program("rara-go-probe")
    addresses = [f"127.0.0.1:{lasting_port()}" for _ in range(2)]
    target = "ipv4:" + ",".join(addresses)
    async with Processes(folder) as processes:

        def scheduler(number: int) -> Start:
            async def start() -> Process:
                values = SETTINGS | {"listen": addresses[number]}
                name = f"scheduler-{number}"
                process, _ = await start_scheduler(processes, database_url, folder, name=name, **values)
                return process

            return start

        def executor(number: int) -> Start:
            return lambda: spawn_executor(
                processes,
                target,
                folder,
                module="support.timed_handlers",
                name=f"python-{number}",
                slots=4,
                prestart=0,
                stop_s=stop_s,
            )

        def go_executor() -> Start:
            return lambda: spawn_go_executor(processes, target, folder, slots=4, stop_s=stop_s)

        async def part(name: str, start: Start) -> Part:
            return Part(name, start, await start())

        parts = [await part("scheduler-0", scheduler(0)), await part("scheduler-1", scheduler(1))]
        parts += await asyncio.gather(
            part("python-0", executor(0)), part("python-1", executor(1)), part("go", go_executor())
        )
        yield parts, target


async def roll(database_url: str, folder: Path, *, rounds: int, callers: int, stop_s: float) -> None:
    async with stack(database_url, folder, stop_s) as (parts, target), Client.connect(target) as client:
        await client.register_definition(definition_from(CHAIN))
        load = Load(client, slow_s=0.9 * stop_s)  # longer than an executor lets it go on
        async with asyncio.TaskGroup() as tasks:
            for _ in range(callers):
                tasks.create_task(load.call())
            for part in parts * rounds:
                done = len(load.started)
                _, _, lost, spent = await part.replace()
                assert (lost, spent) == (0, 0), f"{part.name} lost {lost} and spent {spent}"
                await until_more(load, done + 2)  # work goes on before the next one goes
            load.stopping.set()
        await assert_nothing_burnt(database_url, load.started)
        for part in parts:
            assert await part.process.stop(EXIT_S) == 0
    await assert_promises_kept(database_url, overdue_s=5.0)


async def until_more(load: Load, count: int) -> None:
    async with asyncio.timeout(RUN_S):
        while len(load.started) < count:
            await asyncio.sleep(0.05)


async def assert_nothing_burnt(database_url: str, started: dict[str, int]) -> None:
    """Every run that was answered has succeeded with its values, and no attempt of any step has cost anything."""
    raw = await asyncpg.connect(database_url)
    try:
        rows = await raw.fetch(
            "select s.workflow_run_id::text, s.step_name, x.failures, convert_from(x.output, 'utf8') as output"
            " from rara.result x join rara.step_run s using (step_run_id) where x.state = 'succeeded'"
        )
        attempts = await raw.fetch("select reason, spent, count(*) from rara.step_attempt group by 1, 2")
    finally:
        await raw.close()
    assert len(rows) == 3 * len(started)
    assert {row["failures"] for row in rows} == {0}
    last = {row["workflow_run_id"]: int(row["output"]) for row in rows if row["step_name"] == "last"}
    assert last == {run_id: number + 2 for run_id, number in started.items()}
    # What did not succeed was handed back, or had not been taken up.
    assert {(row["reason"], row["spent"]) for row in attempts} <= {
        ("EXECUTOR_SHUTDOWN", False),
        ("DISPATCH_LOST", False),
    }


async def test_a_rolling_restart_of_all_parts_burns_no_attempt_and_loses_nothing(
    database_url: str, tmp_path: Path
) -> None:
    await roll(database_url, tmp_path, rounds=1, callers=CALLERS, stop_s=STOP_S)


@pytest.mark.soak
async def test_five_rolling_restarts_in_a_row_burn_nothing(database_url: str, tmp_path: Path) -> None:
    await roll(database_url, tmp_path, rounds=5, callers=4 * CALLERS, stop_s=LONG_STOP_S)
