"""PostgreSQL restarts under a scheduler and an executor that stay the same processes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rara_chaos.shapes import BY_NAME, Shape, Step
from rara_chaos.stack import Stack
from rara_client import Client
from rara_scheduler.embedded import EmbeddedPostgres
from rara_scheduler.store import migrate
from rara_testing.database_faults import DatabaseFaults, outage
from rara_testing.fault_proxy import Direction, End, FaultProxy
from support.running_scheduler import running_scheduler
from support.stack_runs import StackRuns, until_quiet, until_running

# An executor stops its handlers after 5/6 of the lease without a renewal: an outage of half of it leaves room.
LEASE_S = 6.0
SHORT_S = LEASE_S / 2
LONG_S = LEASE_S + 1.0
START_S = 0.7  # of PostgreSQL
SETTINGS = {"RARA_LEASE_S": str(LEASE_S), "RARA_SILENCE_S": "3"}
FIFTY = Shape(
    "chaos-fifty",
    {f"s{number:02d}": Step("chaos.slow" if number < 10 else "chaos.work") for number in range(50)},
    on_failure="continue",
)


@contextlib.asynccontextmanager
async def readiness(address: str) -> AsyncIterator[list[bool]]:
    """The changes of the scheduler's readiness, as they come, from when its first look has made it ready."""
    seen: list[bool] = []

    async def watch() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            answers = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            while answer := await answers.read():
                is_ready = answer.status == health_pb2.HealthCheckResponse.SERVING
                if is_ready or seen:
                    seen.append(is_ready)

    task = asyncio.create_task(watch(), name="readiness")
    try:
        await until_ready(seen, 1)
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_ready(seen: list[bool], changes: int) -> None:
    """Wait until readiness has changed so often, and for the better."""
    async with asyncio.timeout(15):
        while len(seen) < changes or not seen[-1]:
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def submitting(runs: StackRuns) -> AsyncIterator[None]:
    """Somebody goes on submitting."""

    async def submit() -> None:
        while True:
            await runs.start(BY_NAME["chaos-single"])
            await asyncio.sleep(0.4)

    task = asyncio.create_task(submit(), name="submits")
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task  # whatever else ended it fails the test


async def away(postgres: EmbeddedPostgres, seconds: float) -> float:
    """Stop immediately, and be back after about so long; how long it was."""
    began = time.monotonic()
    async with outage(postgres):
        await asyncio.sleep(seconds - START_S)
    return time.monotonic() - began


async def most_attempts(dsn: str) -> int:
    """The highest attempt of any step so far."""
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select max(attempt) from rara.step_state") or 0)
    finally:
        await connection.close()


@pytest.mark.case("DBC-3")
async def test_a_restart_of_postgresql_costs_a_pause_and_nothing_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with (
        Stack(tmp_path, schedulers_count=1, executors_count=1, slots=10, settings=SETTINGS) as stack,
        Client.connect(stack.addresses[0]) as client,
        readiness(stack.addresses[0]) as seen,
    ):
        pids = [service.process.pid for service in stack.services]
        dsn = stack.postgres.dsn
        runs = StackRuns(stack, client)
        await runs.define(FIFTY, BY_NAME["chaos-single"])
        await runs.start(FIFTY)
        await until_running(dsn, 10)
        async with submitting(runs):
            assert await away(stack.postgres, SHORT_S) < 5 / 6 * LEASE_S
            await until_ready(seen, 3)
            await until_running(dsn, 5)
            # What ran when it stopped has ended since, or runs on: nothing was begun again.
            assert await most_attempts(dsn) == 1
            await away(stack.postgres, LONG_S)
            await until_ready(seen, 5)
        await until_quiet(dsn)
        verdict = await runs.judge()
        assert await most_attempts(dsn) <= 2
        assert [service.process.pid for service in stack.services if service.is_up] == pids
        assert not stack.crashes
        assert verdict.is_clean, verdict
        # A start whose answer was lost with its connection may have been stored.
        assert 0 <= verdict.runs - len(runs.confirmed) <= runs.refused
        assert verdict.effects == verdict.steps == 50 + verdict.runs - 1
        assert verdict.effects_repeated == 0
        assert seen == [True, False] * 2 + [True]
        assert runs.refused > 0


@contextlib.asynccontextmanager
async def proxied(database_url: str) -> AsyncIterator[tuple[FaultProxy, str]]:
    """A proxy before the test's database, and the address through it."""
    folder = database_url.partition("host=")[2].partition("&")[0]
    database = database_url.partition("@/")[2].partition("?")[0]
    async with FaultProxy(folder, 5432) as proxy:
        yield proxy, f"postgresql://rara@{proxy.address}/{database}?sslmode=disable"


@pytest.mark.case("DBC-3")
@pytest.mark.parametrize("passed_bytes", [0, 200, 400, 600, 800])
async def test_a_scheduler_that_starts_while_its_database_goes_away_waits_for_it(
    database_url: str, tmp_path: Path, passed_bytes: int
) -> None:
    """The connection ends at some point of the schema's check."""
    async with proxied(database_url) as (proxy, through):
        proxy.cut_after(passed_bytes, Direction.TO_CLIENT, End.RESET)
        async with asyncio.timeout(10), running_scheduler(through, tmp_path, migrate=True) as world:
            assert proxy.triggered.is_set()
            await world.define("one", {"a": {}})


@pytest.mark.case("DBC-3")
async def test_a_scheduler_whose_first_connection_is_swallowed_takes_another(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path forgets the connection while the schema's check waits for an answer: nobody is told, ever."""
    monkeypatch.setattr(migrate, "ANSWER_TIMEOUT_S", 1.0)

    async def start(address: str) -> None:
        async with running_scheduler(address, tmp_path):
            pass

    faults = DatabaseFaults(database_url)
    async with proxied(database_url) as (proxy, through):
        proxy.drop_idle(0.2)
        async with faults.locked("lock table rara.schema_migration in access exclusive mode"):
            starting = asyncio.create_task(start(through))
            await proxy.wait_accepted(2)  # the first asks what the database is, the second for the schema
            await asyncio.sleep(0.5)
        proxy.resume()
        async with asyncio.timeout(10):
            await starting
