"""A stop of the services as their containers do it, with the shipped commands and settings but without an engine."""

import json
import sys
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rara_client import Client
from rara_testing.processes import Process, Processes
from support.deploy_files import image_of, long_running_services
from support.stopping import STEPS, counts, ended_run, lines, started_run, until

OPERATIONS = "support.container_operations"
TESTS = Path(__file__).resolve().parents[1]
EXECUTOR_STOP_S = 3.0
SWEEP_S = 1.0
LEASE_S = 6.0
# What a busy machine adds.
BUSY_S = 3.0


class Services:
    """Scheduler and executor as processes: command and settings as shipped, places and leases a test's own."""

    def __init__(self, processes: Processes, database_url: str, folder: Path) -> None:
        self.work = folder / "box"
        self.work.mkdir()
        self.address = "127.0.0.1:0"
        self._processes = processes
        self._folder = folder
        self._scheduler_env = {
            "RARA_DATABASE_URL": database_url,
            "RARA_BLOB_STORE": f"file://{folder / 'blobs'}",
            "RARA_LEASE_S": str(LEASE_S),
            "RARA_HEARTBEAT_S": "0.5",
            "RARA_SILENCE_S": "3",
        }

    async def start_scheduler(self) -> Process:
        started = await self._start("scheduler", {**self._scheduler_env, "RARA_LISTEN": self.address})
        self.address = (await started.expect_line(r"rara-scheduler listening on (\S+)"))[1]
        return started

    async def start_executor(self) -> Process:
        env = {
            "RARA_SCHEDULER": self.address,
            "RARA_EXECUTOR_MODULES": OPERATIONS,
            "RARA_EXECUTOR_STOP_S": str(EXECUTOR_STOP_S),
            "RARA_EXECUTOR_DIR": str(self._folder / "executor"),
            "RARA_EXECUTOR_READY_FILE": str(self._folder / "ready"),
            "BOX_WORK": str(self.work),
            "PYTHONPATH": str(TESTS),
        }
        started = await self._start("python-executor", env)
        await started.expect_line(r"rara-executor \S+ connected to")
        return started

    async def _start(self, name: str, own: dict[str, str]) -> Process:
        service = long_running_services()[name]
        made = image_of(service)
        script, *arguments = made.command()
        shipped = {**made.env, **service["environment"]}
        shipped.pop("PATH")
        shipped = {
            name: value for name, value in shipped.items() if value is not None
        }  # None: taken from outside
        command = [str(Path(sys.executable).with_name(script)), *arguments]
        return await self._processes.start(name, command, env={**shipped, **own})


@pytest_asyncio.fixture
async def services(database_url: str, tmp_path: Path) -> AsyncIterator[Services]:
    async with Processes(tmp_path) as processes:
        yield Services(processes, database_url, tmp_path)


def events(process: Process) -> list[dict[str, Any]]:
    return [json.loads(line) for line in process.stderr.read_text().splitlines() if line.startswith("{")]


def event_at(process: Process, name: str) -> datetime:
    """AssertionError where its log does not name the event."""
    found = [event["timestamp"] for event in events(process) if event["event"] == name]
    assert found, f"no {name}\n{process.report()}"
    return datetime.fromisoformat(found[-1])


async def stop(process: Process, prefix: str, bound_s: float) -> None:
    """SIGTERM, and the end that the case wants."""
    began = time.monotonic()
    process.terminate()
    assert await process.wait() == 0, process.report()
    took = event_at(process, f"{prefix}.stopped") - event_at(process, f"{prefix}.stopping")
    assert timedelta() <= took < timedelta(seconds=bound_s + BUSY_S)
    assert time.monotonic() - began < bound_s + 2 * BUSY_S


@pytest.mark.case("STOP-2")
async def test_the_shipped_commands_stop_in_order_and_what_ran_goes_on(services: Services) -> None:
    scheduler = await services.start_scheduler()
    executor = await services.start_executor()
    async with Client.connect(services.address) as client:
        run_id = await started_run(client, services.work, "in order")
        await stop(executor, "executor", EXECUTOR_STOP_S)
        await stop(scheduler, "scheduler", 10.0)
        scheduler = await services.start_scheduler()
        await services.start_executor()
        await until(lambda: len(lines(services.work / "starts")) == 2 * len(STEPS))
        opened_at = event_at(scheduler, "session.opened")
        steps = await ended_run(client, services.work, run_id)
    for step in steps.values():
        assert (step.attempt, step.failures) == (2, 0)
        assert (step.attempts[0].reason, step.attempts[0].spent) == ("EXECUTOR_SHUTDOWN", False)
        assert step.attempts[1].leased_at - opened_at < timedelta(seconds=2 * SWEEP_S + BUSY_S)
    assert counts(services.work / "effects") == dict.fromkeys(STEPS, 1)


@pytest.mark.case("STOP-2")
async def test_an_executor_whose_scheduler_is_gone_already_stops_in_time_too(services: Services) -> None:
    scheduler = await services.start_scheduler()
    executor = await services.start_executor()
    async with Client.connect(services.address) as client:
        run_id = await started_run(client, services.work, "the wrong way round")
        await stop(scheduler, "scheduler", 10.0)
        await stop(executor, "executor", EXECUTOR_STOP_S)
        await services.start_scheduler()
        await services.start_executor()
        steps = await ended_run(client, services.work, run_id)
    # Nobody heard the executor: its leases had to end by themselves, which costs the attempt.
    assert [step.attempt for step in steps.values()] == [2] * len(STEPS)
    assert [step.failures for step in steps.values()] == [1] * len(STEPS)
    assert counts(services.work / "effects") == dict.fromkeys(STEPS, 1)


@pytest.mark.case("STOP-2")
async def test_both_that_get_the_signal_at_once_stop_in_time(services: Services) -> None:
    scheduler = await services.start_scheduler()
    executor = await services.start_executor()
    async with Client.connect(services.address) as client:
        run_id = await started_run(client, services.work, "at once")
        scheduler.terminate()
        await stop(executor, "executor", EXECUTOR_STOP_S)
        assert await scheduler.wait() == 0
        assert event_at(scheduler, "scheduler.stopping") < event_at(scheduler, "scheduler.stopped")
        await services.start_scheduler()
        await services.start_executor()
        steps = await ended_run(client, services.work, run_id)
    assert all(step.attempt <= 2 for step in steps.values())
    assert counts(services.work / "effects") == dict.fromkeys(STEPS, 1)
