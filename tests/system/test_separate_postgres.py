"""A scheduler on a PostgreSQL that somebody else runs: in a container where an engine answers, else as a process."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from rara_client import Client
from rara_scheduler.store.migrate import migrate
from rara_testing.processes import Processes
from support.running_scheduler import RunningScheduler, running_scheduler
from support.separate_postgres import PASSWORD, SeparatePostgres, separate_postgres
from support.spawned_executor import spawn_executor
from support.stopping import STEPS, counts, ended_run, started_run

# A fault is shorter than half of it: the promise of no lost work. Nothing waits for it.
LEASE_S = 40.0
OWNER = "app"


@pytest_asyncio.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SeparatePostgres]:
    folder = tmp_path_factory.mktemp("separate")
    folder.chmod(0o755)  # as root, the server runs as another account
    async with separate_postgres(folder / "postgres", {"fsync": "off"}) as started:
        admin = await asyncpg.connect(started.dsn_of("postgres"))
        await admin.execute(f"create role {OWNER} login password '{PASSWORD}'")
        await admin.close()
        yield started


@pytest_asyncio.fixture
async def database_url(server: SeparatePostgres, request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """A migrated database whose owner is no superuser, and may make neither databases nor roles."""
    name = f"test_{abs(hash(request.node.nodeid))}"
    admin = await asyncpg.connect(server.dsn_of("postgres"))
    await admin.execute(f"create database {name} owner {OWNER}")
    await admin.close()
    url = server.dsn_of(name, OWNER)
    await migrate(url)
    yield url
    admin = await asyncpg.connect(server.dsn_of("postgres"))
    await admin.execute(f"drop database {name} with (force)")
    await admin.close()


async def connected(processes: Processes, world: RunningScheduler, work: Path) -> None:
    work.mkdir()
    await spawn_executor(
        processes,
        world.address,
        work,
        module="support.container_operations",
        env={"BOX_WORK": str(work)},
    )


@pytest.mark.parametrize("fault", ["frozen", "killed"])
async def test_a_role_that_owns_one_database_is_enough_and_a_fault_of_the_server_costs_no_attempt(
    server: SeparatePostgres, database_url: str, tmp_path: Path, fault: str
) -> None:
    work = tmp_path / "work"
    async with (
        running_scheduler(database_url, tmp_path, lease_s=LEASE_S, heartbeat_s=1.0, silence_s=30.0) as world,
        Processes(tmp_path / "logs") as processes,
        Client.connect(world.address) as client,
    ):
        await connected(processes, world, work)
        run_id = await started_run(client, work, fault)
        if fault == "frozen":
            await server.freeze()
            try:
                assert await is_silent(database_url)
            finally:
                await server.thaw()
        else:
            await server.kill()
            await server.start()
        steps = await ended_run(client, work, run_id)
        assert [(step.attempt, step.failures) for step in steps.values()] == [(1, 0)] * len(STEPS)
        assert counts(work / "effects") == counts(work / "starts") == dict.fromkeys(STEPS, 1)


async def is_silent(database_url: str) -> bool:
    """Whether the server gives no answer within two heartbeats."""
    try:
        await asyncpg.connect(database_url, timeout=2)
    except TimeoutError:
        return True
    return False
