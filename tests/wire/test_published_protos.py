"""The API as another service would call it: with nothing but stubs that it generated from the published protos."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from rara_testing.auto_executor import AutoExecutor, AutoJob
from support.running_scheduler import RunningScheduler, running_scheduler

PROTOS = Path(__file__).resolve().parents[2] / "api" / "proto"

# Knows gRPC and the generated stubs; nothing of ours.
CALLER = """
import json, sys
from pathlib import Path

import grpc
from rara.v1 import common_pb2, workflow_pb2 as w, workflow_pb2_grpc

assert Path(w.__file__).is_relative_to(sys.argv[2]), w.__file__
assert not any(name.startswith("rara_") for name in sys.modules)

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = workflow_pb2_grpc.WorkflowServiceStub(channel)
    payload = common_pb2.Payload
    definition = w.Definition(
        definition="greeting",
        steps=[
            w.StepDefinition(
                step_name="greet", kind="demo.greet",
                input_template=payload(data=b'{"name": {"$ref": "/run/input/name"}}'),
            )
        ],
    )
    made = stub.RegisterDefinition(w.RegisterDefinitionRequest(definition=definition), timeout=20).definition
    start = w.StartRunRequest(
        definition="greeting", definition_version=made.version, idempotency_key="greet-1",
        input=payload(data=b'{"name": "Ada"}'),
    )
    run = stub.StartRun(start, timeout=20).run
    repeat = stub.StartRun(start, timeout=20)
    for update in stub.WatchRun(w.WatchRunRequest(workflow_run_id=run.workflow_run_id), timeout=30):
        if update.WhichOneof("update") == "run":
            last = update.run
    steps = stub.ListStepRuns(w.ListStepRunsRequest(workflow_run_id=run.workflow_run_id), timeout=20).step_runs
    try:
        stub.GetRun(w.GetRunRequest(workflow_run_id="0" * 32), timeout=20)
    except grpc.RpcError as error:
        refused = error.code().name
    print(json.dumps({
        "version": made.version,
        "repeat": [repeat.already_started, repeat.run.workflow_run_id == run.workflow_run_id],
        "last": w.WorkflowRunState.Name(last.state),
        "state": w.WorkflowRunState.Name(stub.GetRun(
            w.GetRunRequest(workflow_run_id=run.workflow_run_id), timeout=20).run.state),
        "output": json.loads(steps[0].output.data),
        "refused": refused,
    }))
"""


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def greet(job: AutoJob) -> object:
    return {"greeting": f"hello {job.input['name']}"}


async def test_a_service_with_stubs_of_its_own_runs_a_workflow(
    world: RunningScheduler, tmp_path: Path
) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    protos = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    assert len(protos) == 6
    generate = [
        "-m",
        "grpc_tools.protoc",
        f"-I{PROTOS}",
        f"--python_out={stubs}",
        f"--grpc_python_out={stubs}",
    ]
    await asyncio.to_thread(subprocess.run, [sys.executable, *generate, *protos], check=True, timeout=60)
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    async with AutoExecutor(world.address, {"demo.greet": greet}):
        caller = await asyncio.create_subprocess_exec(
            sys.executable,
            str(script),
            world.address,
            str(stubs),
            env={**os.environ, "PYTHONPATH": str(stubs)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(60):
            out, errors = await caller.communicate()
    assert caller.returncode == 0, errors.decode()
    assert json.loads(out) == {
        "version": 1,
        "repeat": [True, True],
        "last": "WORKFLOW_RUN_STATE_SUCCEEDED",
        "state": "WORKFLOW_RUN_STATE_SUCCEEDED",
        "output": {"greeting": "hello Ada"},
        "refused": "NOT_FOUND",
    }
