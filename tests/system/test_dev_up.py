"""`rara dev up` and the stack below it, with the real services."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from rara.v1 import workflow_pb2
from rara_cli.stack import Stack, StackSettings
from rara_client import Client
from rara_client.definitions import definition_from
from support.command_line import Ended, ended, rara, rara_process

OPERATIONS = '''
"""Operations of a test: `toy.double` doubles, `toy.wait` waits for a file and notes each of its starts."""

import asyncio
from pathlib import Path

from rara_executor import Job, operation


@operation("toy.double", version="1.0.0")
async def double(job: Job) -> dict:
    await job.artifacts.put_bytes("note", b"twice\\n", type="report", media_type="text/plain")
    return {"n": job.input["n"] * 2}


@operation("toy.wait", version="1.0.0")
async def wait(job: Job) -> dict:
    folder = Path(job.input["folder"])
    with (folder / "starts").open("a") as starts:
        starts.write(f"{job.attempt} {job.lease_token}\\n")
    while not (folder / "go").exists():
        await asyncio.sleep(0.02)
    return {"attempt": job.attempt}
'''
DOUBLE = {
    "definition": "double",
    "steps": [
        {"step_name": "double", "kind": "toy.double", "input_template": {"n": {"$ref": "/run/input/n"}}}
    ],
}
WAIT = {
    "definition": "wait",
    "steps": [{"step_name": "wait", "kind": "toy.wait", "input_template": {"$ref": "/run/input"}}],
}
# A dead executor's lease is over within seconds; the others' absence is shorter than half of theirs.
LEASES = {
    "executor": {"RARA_LEASE_S": "4", "RARA_HEARTBEAT_S": "1", "RARA_SILENCE_S": "3"},
    "scheduler": {"RARA_LEASE_S": "40", "RARA_HEARTBEAT_S": "1", "RARA_SILENCE_S": "5"},
    "database": {"RARA_LEASE_S": "40", "RARA_HEARTBEAT_S": "1", "RARA_SILENCE_S": "5"},
}


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the module `toy_operations` can be imported."""
    folder = tmp_path_factory.mktemp("operations")
    (folder / "toy_operations.py").write_text(OPERATIONS)
    return {"PYTHONPATH": str(folder)}


class DevUp:
    """A running `rara dev up`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    async def stop(self) -> Ended:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGINT)
        return await ended(self.process)


@asynccontextmanager
async def dev_up(folder: Path, env: dict[str, str], *arguments: str) -> AsyncIterator[DevUp]:
    process = await rara_process(
        *("dev", "up", "--dir", str(folder), "--port", "0", "--module", "toy_operations", *arguments), env=env
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(90):
            line = (await process.stdout.readline()).decode()
        match = re.fullmatch(r"rara is up at (\S+)\n", line)
        if match is None:
            pytest.fail(f"not up: {(await ended(process)).err}")
        yield DevUp(process, match[1])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def all_gone(processes: list[psutil.Process], within_s: float = 20.0) -> None:
    """Wait until all have ended; one that nobody reaps counts as ended."""
    async with asyncio.timeout(within_s):
        for process in processes:
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)


async def test_up_runs_a_definition_and_ctrl_c_stops_all_parts_in_order(
    tmp_path: Path, operations: dict[str, str]
) -> None:
    definition = tmp_path / "double.json"
    definition.write_text(json.dumps(DOUBLE))
    folder = tmp_path / "data"
    async with dev_up(folder, operations) as up:
        applied = await rara("definition", "apply", str(definition), server=up.address)
        assert applied.out == "definition double v1 created\n"
        run = await rara(
            *("run", "start", "double", "--input", "n=21", "--wait", "-o", "json"), server=up.address
        )
        assert run.code == 0, run.err
        assert run.json["steps"][0]["output"] == {"n": 42}
        run_id = run.json["run"]["workflow_run_id"]
        note = await rara("artifact", "cat", run_id, "note", server=up.address)
        assert note.raw == b"twice\n"
        shown = await rara("executor", "list", "-o", "json", server=up.address)
        assert shown.json[0]["executor_name"] == "dev"
        children = up.children()
        assert len(children) >= 3
        result = await up.stop()
        assert result.code == 0
        assert result.err.splitlines()[-2:] == [
            "rara: stopping the executor, the scheduler, the database",
            "rara: stopped",
        ]
        await all_gone(children)
    assert {path.name for path in folder.iterdir()} >= {"postgres", "logs"}
    async with dev_up(folder, operations) as again:
        kept = await rara("run", "list", "-o", "name", server=again.address)
        assert kept.lines == [run_id]
        await again.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
async def test_when_up_is_killed_its_parts_end_too_and_the_next_one_goes_on(
    tmp_path: Path, operations: dict[str, str]
) -> None:
    folder = tmp_path / "data"
    async with dev_up(folder, operations) as up:
        children = up.children()
        up.process.kill()
        await up.process.wait()
        await all_gone(children)
    async with dev_up(folder, operations) as again:
        assert (await again.stop()).code == 0


async def test_two_cannot_share_a_folder_and_the_second_says_so(
    tmp_path: Path, operations: dict[str, str]
) -> None:
    folder = tmp_path / "data"
    async with dev_up(folder, operations) as up:
        second = await rara_process("dev", "up", "--dir", str(folder), "--port", "0", env=operations)
        result = await ended(second)
        assert result.code == 5
        assert result.err.splitlines()[-1].startswith("rara: POSTGRES_FOLDER_IN_USE: ")
        reset = await rara("dev", "reset", "--dir", str(folder), "--yes")
        assert (reset.code, "FOLDER_IN_USE" in reset.err) == (5, True)
        assert (await up.stop()).code == 0


async def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await rara_process("dev", "up", "--dir", str(tmp_path / "data"), "--port", str(port))
        result = await ended(process)
    assert result.code == 5
    assert result.err.startswith(f"rara: PORT_TAKEN: port {port} is taken")
    assert not (tmp_path / "data").exists()


async def test_a_module_that_cannot_be_imported_ends_everything_with_the_executors_words(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "data"
    process = await rara_process(
        "dev", "up", "--dir", str(folder), "--port", "0", "--module", "no_such_module"
    )
    result = await ended(process)
    assert result.code == 1
    assert "rara: PART_FAILED: executor ended with exit code" in result.err
    assert "no_such_module" in result.err
    assert "Traceback" not in result.err.rpartition("PART_FAILED")[0]


@pytest.mark.parametrize("victim", ["executor", "scheduler", "database"])
async def test_a_part_killed_in_the_middle_of_a_step_comes_back_and_the_run_ends_with_one_result(
    tmp_path: Path, operations: dict[str, str], victim: str
) -> None:
    path = os.pathsep.join(filter(None, (operations["PYTHONPATH"], os.environ.get("PYTHONPATH", ""))))
    env = {**LEASES[victim], "PYTHONPATH": path}
    settings = StackSettings(directory=tmp_path / "data", modules=("toy_operations",), env=env)
    async with Stack(settings) as stack:
        await survive(stack, tmp_path, victim)


async def survive(stack: Stack, tmp_path: Path, victim: str) -> None:
    """Kill a part while a step waits; let the step go on; compare what is kept of it."""
    starts = tmp_path / "starts"
    async with Client.connect(stack.address) as client:
        await client.register_definition(definition_from(WAIT))
        run = (await client.start_run("wait", {"folder": str(tmp_path)}, idempotency_key="k")).run
        await until(lambda: starts.exists() and bool(starts.read_text()))
        match victim:
            case "executor":
                await stack.kill_executor()
                await stack.restart_executor()
                await until(lambda: len(starts.read_text().splitlines()) == 2)
            case "scheduler":
                await stack.kill_scheduler()
                await stack.restart_scheduler()
            case _:
                await stack.kill_database()
        (tmp_path / "go").touch()
        ended_run = await client.wait_run(run.workflow_run_id, 60)
        assert ended_run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
        steps = [step async for step in client.list_step_runs(run.workflow_run_id)]
        attempts = (await client.get_step_run(steps[0].step_run_id)).attempts
    # A killed scheduler or database costs no work; a killed executor costs its attempt.
    assert steps[0].attempt == (2 if victim == "executor" else 1)
    tokens = [attempt.lease.lease_token for attempt in attempts]
    assert tokens == sorted(set(tokens))
    assert [line.split()[1] for line in starts.read_text().splitlines()] == [str(token) for token in tokens]


async def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    """Poll until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.05)
