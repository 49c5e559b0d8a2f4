"""What one peer may have at a time, and what a start says of a port that is open to all."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rara.v1 import dispatch_pb2_grpc, workflow_pb2, workflow_pb2_grpc
from rara_client.errors import from_rpc_error
from rara_executor.door import Door
from rara_scheduler.transport import connections
from rara_testing.scripted_executor import WAIT_S
from structlog.testing import capture_logs
from support.running_scheduler import running_scheduler

SILENT = 2  # streams without a Hello beside one session


async def test_streams_without_a_hello_are_bounded(database_url: str, tmp_path: Path) -> None:
    async with (
        running_scheduler(database_url, tmp_path, max_sessions=1) as world,
        grpc.aio.insecure_channel(world.address) as channel,
    ):
        stub: Any = dispatch_pb2_grpc.DispatchServiceStub(channel)
        calls = [stub.Connect(timeout=WAIT_S) for _ in range(SILENT + 1)]
        ended = [asyncio.ensure_future(call.code()) for call in calls]
        done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for call in calls:
            call.cancel()
        await asyncio.wait(ended)


async def test_calls_on_one_connection_are_bounded(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_STREAMS", 2)
    options = [("grpc.use_local_subchannel_pool", 1)]
    list_runs = workflow_pb2.ListRunsRequest()
    async with (
        running_scheduler(database_url, tmp_path) as world,
        grpc.aio.insecure_channel(world.address, options=options) as crowded,
        grpc.aio.insecure_channel(world.address, options=options) as other,
    ):
        await world.define("one", {"a": {}})
        run_id = await world.start("one")
        workflows: Any = workflow_pb2_grpc.WorkflowServiceStub(crowded)
        watch = workflow_pb2.WatchRunRequest(workflow_run_id=run_id)
        watches = [workflows.WatchRun(watch, timeout=WAIT_S) for _ in range(2)]
        for one in watches:
            assert await one.read()
        with pytest.raises(grpc.aio.AioRpcError) as waited:
            await workflows.ListRuns(list_runs, timeout=0.5)
        assert from_rpc_error(waited.value).status == "DEADLINE_EXCEEDED"
        others: Any = workflow_pb2_grpc.WorkflowServiceStub(other)
        await others.ListRuns(list_runs, timeout=WAIT_S)
        for one in watches:
            one.cancel()
        await workflows.ListRuns(list_runs, timeout=WAIT_S)


async def test_a_start_warns_of_what_is_open_to_all(database_url: str, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with running_scheduler(database_url, tmp_path, insecure=True):
            pass
        assert "scheduler.exposed" not in {line["event"] for line in logs}
        async with running_scheduler(database_url, tmp_path, listen="0.0.0.0:0", insecure=True):
            pass
        said = [line["what"] for line in logs if line["event"] == "scheduler.exposed"]
        assert len(said) == 2
        assert "RARA_TLS_CERT" in said[0]
        assert "RARA_AUTH=tokens" in said[1]
        for listen, warns in (("127.0.0.1:0", False), ("[::1]:0", False), ("0.0.0.0:0", True)):
            logs.clear()
            server = grpc.aio.server()
            assert Door().open(server, listen) > 0
            await server.stop(None)
            assert ("executor.exposed" in {line["event"] for line in logs}) is warns, listen
