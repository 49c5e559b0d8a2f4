"""A name that stands for another address from now on, as after a restart of a container, is asked for again soon."""

import asyncio
import time
from pathlib import Path

from rara_client import Client
from rara_client.errors import RaraError
from rara_testing.scripted_scheduler import ScriptedScheduler, Terms
from support.name_server import name_server
from support.running_executor import running, until
from support.running_scheduler import running_scheduler

NOBODY = "127.0.0.2"  # loopback too, where nothing listens
# One second between two questions, a pause between two tries, and what a busy machine adds; gRPC's own is 30 s.
SOON_S = 15.0


async def test_an_executor_finds_the_scheduler_at_its_new_address(tmp_path: Path) -> None:
    async with ScriptedScheduler(Terms()) as scheduler, name_server(NOBODY) as names:
        port = scheduler.address.rpartition(":")[2]
        async with running(f"dns://{names.place}/scheduler.test:{port}", tmp_path):
            await until(lambda: names.asked)
            names.address = "127.0.0.1"
            moved_at = time.monotonic()
            await scheduler.session()
            assert time.monotonic() - moved_at < SOON_S


async def test_a_client_finds_the_scheduler_at_its_new_address(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(database_url, tmp_path) as world, name_server(NOBODY) as names:
        port = world.address.rpartition(":")[2]
        async with Client.connect(f"dns://{names.place}/scheduler.test:{port}") as client:
            assert await answer(client) != "DEFINITION_NOT_FOUND"
            names.address = "127.0.0.1"
            async with asyncio.timeout(SOON_S):
                while await answer(client) != "DEFINITION_NOT_FOUND":
                    await asyncio.sleep(0.05)


async def answer(client: Client) -> str:
    try:
        await client.get_definition("none", timeout_s=5)
    except RaraError as error:
        return error.reason
    return ""
