"""docs/how-to/back-up.md, done: a dump taken under load comes back, and work goes on from it."""

import asyncio
import json
from pathlib import Path

import asyncpg
import grpc
import pytest
from rara.v1 import common_pb2, workflow_pb2
from rara_scheduler.embedded.binaries import Binaries
from rara_testing.processes import Processes
from support.command_line import rara
from support.postgres import PostgresServer
from support.running_scheduler import RunningScheduler, until
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

LEASE_S = 3.0


async def tool(binaries: Binaries, name: str, *arguments: str) -> None:
    process = await asyncio.create_subprocess_exec(
        binaries.bin / name, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, output.decode()


async def start(world: RunningScheduler, until_file: Path) -> str:
    template = common_pb2.Payload(data=json.dumps({"file": str(until_file)}).encode())
    at_once = common_pb2.Payload(data=b'{"seconds": 0}')
    steps = {
        "a": {"kind": "timed.steady", "input_template": template},
        "b": {"kind": "timed.sleep", "depends_on": ["a"], "input_template": at_once},
    }
    await world.define("steady", steps)
    return await world.start("steady")


async def token_of(raw: "asyncpg.Connection[asyncpg.Record]", run_id: str) -> int | None:
    """Of the lease of the run's first step, once it runs."""
    token: int | None = await raw.fetchval(
        "select lease_token from rara.lease where workflow_run_id = $1::uuid and started_at is not null",
        run_id,
    )
    return token


async def test_a_backup_under_load_comes_back_and_work_goes_on(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    binaries = postgres_server.binaries
    dump = tmp_path / "rara.dump"
    go_on, never = tmp_path / "go-on", tmp_path / "never"
    async with (
        postgres_server.database() as url,
        postgres_server.database(migrated=False) as new_url,
        Processes(tmp_path) as processes,
    ):
        async with spawned_scheduler(processes, url, tmp_path, lease_s=LEASE_S) as scheduler:
            await spawn_executor(
                processes, scheduler.address, tmp_path, module="support.timed_handlers", prestart=1
            )
            world, raw = scheduler.world, scheduler.world.raw
            in_backup = await start(world, go_on)

            async def runs_in_backup() -> bool:
                return await token_of(raw, in_backup) is not None

            await until(runs_in_backup, "the step that the backup holds")
            await tool(binaries, "pg_dump", "--format=custom", f"--file={dump}", url)

            after_backup = await start(world, never)

            async def runs_after() -> bool:
                return await token_of(raw, after_backup) is not None

            await until(runs_after, "the step that the backup lacks")
            newest_token = await token_of(raw, after_backup)
            assert newest_token is not None
            go_on.touch()
            await world.until_run(in_backup, "succeeded")
            await scheduler.kill()
            address = scheduler.address

        await tool(binaries, "pg_restore", "--exit-on-error", f"--dbname={new_url}", str(dump))
        said = await rara("db", "restored", "--database-url", new_url, "-o", "json")
        assert int(said.json["lease_tokens_above"]) > newest_token

        async with spawned_scheduler(
            processes, new_url, tmp_path, address=address, lease_s=LEASE_S
        ) as scheduler:
            world = scheduler.world
            await world.until_run(in_backup, "succeeded")
            tokens = await world.raw.fetch(
                "select lease_token from rara.result where workflow_run_id = $1::uuid", in_backup
            )
            # The executor had finished the step and forgot it: nobody held it, so it ran again.
            assert len(tokens) == 2
            assert all(row["lease_token"] > newest_token for row in tokens)
            with pytest.raises(grpc.aio.AioRpcError) as gone:
                await world.workflows.GetRun(
                    workflow_pb2.GetRunRequest(workflow_run_id=after_backup), timeout=10
                )
            assert gone.value.code() is grpc.StatusCode.NOT_FOUND
        checked = await rara(
            "db", "check", "--database-url", new_url, "--blob-store", f"file://{tmp_path / 'blobs'}"
        )
        assert (checked.code, checked.err) == (0, "")
