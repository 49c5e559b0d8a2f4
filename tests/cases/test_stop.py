"""A stop with everything open ends within its bound, costs no work, and is never waited for in vain."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import grpc.aio
import pytest
from rara.v1 import workflow_pb2, workflow_pb2_grpc
from rara_client import Client
from rara_client.definitions import definition_from
from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.job_events import accepted, failed, progress, running
from rara_testing.ports import free_port
from rara_testing.processes import Process, Processes
from rara_testing.scripted_executor import ScriptedExecutor
from support.database_paths import frozen, sessions
from support.drain_line import drained
from support.running_executor import TESTS
from support.running_scheduler import ACCEPT_S, SWEEP_S, until
from support.scheduler_process import start_scheduler
from support.spawned_executor import spawn_executor

STREAMS = 20
STEPS = 10
STOP_S = 3.0  # both bounds; a busy machine has the rest of it to spare
EXIT_S = 1.0  # what the end of a process itself may take
# Scripted streams do not beat.
LONG_LEASE: dict[str, Any] = {"lease_s": 60.0, "silence_s": 45.0, "heartbeat_s": 0.5}


@contextlib.asynccontextmanager
async def database(url: str) -> "AsyncIterator[asyncpg.Connection[asyncpg.Record]]":
    raw = await asyncpg.connect(url)
    try:
        yield raw
    finally:
        await raw.close()


async def define(client: Client, steps: int = STEPS) -> None:
    await client.register_definition(
        definition_from(
            {
                "definition": "hold",
                "steps": [{"step_name": f"s{n}", "kind": "timed.steady"} for n in range(steps)],
            }
        )
    )


async def until_running(raw: "asyncpg.Connection[asyncpg.Record]", count: int) -> None:
    await until(
        lambda: raw.fetchval("select count(*) = $1 from rara.lease where started_at is not null", count),
        f"{count} running steps",
    )


async def stopped(process: Process, bound_s: float = STOP_S) -> tuple[int, float]:
    """SIGTERM; the exit code and how long it took."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    process.terminate()
    code = await process.wait(bound_s + EXIT_S)
    return code, loop.time() - began_at


# ---------------------------------------------------------------- scheduler and executor, with live streams


async def stop_scheduler(
    url: str,
    folder: Path,
    processes: Processes,
    raw: "asyncpg.Connection[asyncpg.Record]",
    stop_s: float,
    slack_s: float,
) -> None:
    """20 streams, ten running steps, SIGTERM, a successor at the same address."""
    port = free_port()
    settings: dict[str, Any] = {"stop_s": stop_s, "listen": f"127.0.0.1:{port}"} | LONG_LEASE
    first, address = await start_scheduler(processes, url, folder, name="first", **settings)
    go = folder / "go"
    executor = await spawn_executor(
        processes, address, folder, module="support.timed_handlers", slots=STEPS, prestart=1, stop_s=stop_s
    )
    async with contextlib.AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(ScriptedExecutor()) for _ in range(STREAMS - 1)]
        for stream in streams:
            await stream.connect(address)
            await stream.hello(["other.kind"])
            await stream.expect("welcome")
        async with Client.connect(address) as client:
            await define(client)
            run_id = (await client.start_run("hold", {"file": str(go)})).run.workflow_run_id
        await until_running(raw, STEPS)
        code, took_s = await stopped(first, stop_s)
        assert (code, took_s < stop_s + slack_s) == (0, True), (code, took_s)
        assert drained(first) == (0, STEPS, 0, 0)  # left to their executor
        for stream in streams:
            assert (await stream.expect("go_away")).reason == "SHUTTING_DOWN"
            await asyncio.wait_for(stream.ended.wait(), 5)
    await start_scheduler(processes, url, folder, name="second", **settings)
    go.touch()
    async with Client.connect(address) as client:
        run = await client.wait_run(run_id, 15)
    assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
    rows = await raw.fetch(
        "select attempt, failures, output from rara.result where workflow_run_id = $1::uuid", run_id
    )
    assert [(row["attempt"], row["failures"], row["output"]) for row in rows] == [(1, 0, b"1")] * STEPS
    assert (await stopped(executor, stop_s))[0] == 0
    assert drained(executor) == (0, 0, 0, 0)


async def hand_back(
    url: str,
    folder: Path,
    processes: Processes,
    raw: "asyncpg.Connection[asyncpg.Record]",
    stop_s: float,
    slack_s: float,
) -> None:
    """SIGTERM for an executor whose handler will not end by itself."""
    _, address = await start_scheduler(processes, url, folder, name="keeps", **LONG_LEASE)
    given: dict[str, Any] = {"module": "support.timed_handlers", "slots": 1, "prestart": 1, "stop_s": stop_s}
    leaving = await spawn_executor(processes, address, folder, name="leaving", **given)
    async with Client.connect(address) as client:
        await define(client, steps=1)
        run_id = (await client.start_run("hold", {"file": str(folder / "let-go")})).run.workflow_run_id
        await until_running(raw, 1)
        await spawn_executor(processes, address, folder, name="staying", **given)
        code, took_s = await stopped(leaving, stop_s)
        assert (code, took_s < stop_s + slack_s) == (0, True), (code, took_s)
        assert drained(leaving) == (0, 1, 0, 0)
        await until_running(raw, 1)
        row = await raw.fetchrow(
            "select a.reason, a.spent, l.attempt, l.failures, extract(epoch from l.granted_at - a.ended_at) as gap_s"
            " from rara.step_attempt a join rara.lease l using (step_run_id) where l.workflow_run_id = $1::uuid",
            run_id,
        )
        assert row is not None
        assert (row["reason"], row["spent"], row["attempt"], row["failures"]) == (
            "EXECUTOR_SHUTDOWN",
            False,
            2,
            0,
        )
        assert row["gap_s"] < 1.0  # at once, and not when the lease would have ended
        (folder / "let-go").touch()
        run = await client.wait_run(run_id, 15)
        assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED


async def stop_both(url: str, folder: Path, stop_s: float, slack_s: float) -> None:
    async with database(url) as raw:
        for name, play in (("scheduler", stop_scheduler), ("executor", hand_back)):
            place = folder / name
            place.mkdir(parents=True)
            async with Processes(place) as processes:
                await play(url, place, processes, raw, stop_s, slack_s)


@pytest.mark.case("STOP-1")
async def test_a_stop_with_live_streams_ends_in_time_and_costs_nothing(
    database_url: str, tmp_path: Path
) -> None:
    await stop_both(database_url, tmp_path, STOP_S, EXIT_S)


@pytest.mark.case("STOP-1")
@pytest.mark.soak
@pytest.mark.parametrize("turn", range(50))
async def test_fifty_stops_with_live_streams_end_in_time(
    database_url: str, tmp_path: Path, turn: int
) -> None:
    await stop_both(database_url, tmp_path / str(turn), 2 * STOP_S, 0.0)


# ---------------------------------------------------------------- what a stop must not wait for


STUCK = """
import sys, threading
if any(name in argument for argument in sys.orig_argv for name in ("rara-scheduler", "rara-executor", "rara_cli")):
    threading.Thread(target=threading.Event().wait).start()
"""


HANGS = """
import threading, time
from rara_executor.app import Executor
from rara_executor.__main__ import main
end = Executor.run
async def run(self):
    threading.Thread(target=threading.Event().wait).start()
    await end(self)
    {instead}
Executor.run = run
main()
"""


@pytest.mark.case("STOP-1")
@pytest.mark.parametrize(
    ("instead", "said"), [("time.sleep(3600)", ""), ("raise RuntimeError('a bug')", "a bug")]
)
async def test_a_bug_or_a_loop_that_hangs_keeps_no_process(
    database_url: str, tmp_path: Path, instead: str, said: str
) -> None:
    async with Processes(tmp_path) as processes:
        _, address = await start_scheduler(processes, database_url, tmp_path)
        executor = await processes.start(
            "executor",
            [sys.executable, "-c", HANGS.format(instead=instead), "--scheduler", address],
            env={
                "PYTHONPATH": str(TESTS),
                "RARA_EXECUTOR_MODULES": "support.timed_handlers",
                "RARA_EXECUTOR_DIR": str(tmp_path / "executor"),
                "RARA_EXECUTOR_STOP_S": "1",
            },
            ready="connected to",
        )
        code, took_s = await stopped(executor, 1.0 + 0.7)  # the bound, the last resort, its last words
        assert (code, took_s < 1.0 + 0.7 + EXIT_S) == (1, True)
        assert said in executor.report()


@pytest.mark.case("STOP-1")
async def test_a_thread_that_never_ends_keeps_no_process(database_url: str, tmp_path: Path) -> None:
    """A name that is looked up, or one of gRPC's own: the interpreter would wait for it."""
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    env = {"PYTHONPATH": str(tmp_path)}
    async with Processes(tmp_path) as processes:
        scheduler, address = await start_scheduler(processes, database_url, tmp_path, env=env)
        executor = await spawn_executor(
            processes,
            address,
            tmp_path,
            module="support.timed_handlers",
            env={"PYTHONPATH": f"{tmp_path}:{TESTS}"},
            prestart=1,
        )
        shown = await processes.start("cli", [sys.executable, "-m", "rara_cli", "--version"], env=env)
        assert await shown.wait() == 0
        assert "rara" in shown.report()
        for process in (executor, scheduler):
            code, took_s = await stopped(process)
            assert (code, took_s < STOP_S) == (0, True), (process.name, code, took_s)


@contextlib.asynccontextmanager
async def busy_scheduler(
    url: str, folder: Path, *, stop_s: float = STOP_S
) -> AsyncIterator[tuple[Process, str, ScriptedExecutor]]:
    """A scheduler process with one running step on a stream."""
    async with Processes(folder) as processes:
        process, address = await start_scheduler(processes, url, folder, stop_s=stop_s, **LONG_LEASE)
        async with Client.connect(address) as client, ScriptedExecutor() as executor:
            await define(client, steps=1)
            await executor.connect(address)
            await executor.hello(["timed.steady"])
            await executor.expect("welcome")
            await executor.credit(1)
            await client.start_run("hold", {"file": "none"})
            job = await executor.expect_job()
            await executor.events(accepted(job.lease), running(job.lease))
            await executor.expect_ack(job.lease, 2)
            yield process, address, executor


@pytest.mark.case("STOP-1")
async def test_a_stop_ends_in_time_while_postgresql_stands_still(database_url: str, tmp_path: Path) -> None:
    async with (
        database(database_url) as raw,
        busy_scheduler(database_url, tmp_path) as (process, _, executor),
    ):
        (job,) = [job for batch in executor.all("jobs") for job in batch.jobs]
        with frozen(await sessions(raw, "rara-scheduler")):
            await executor.events(progress(job.lease, 3))  # a commit that cannot end
            code, took_s = await stopped(process)
            assert took_s < STOP_S + EXIT_S
            assert code in (0, 1)
            assert (await executor.expect("go_away")).reason == "SHUTTING_DOWN"
            acked = {ack.sequence for acks in executor.all("acks") for ack in acks.acks}
            assert max(acked) == 2  # what was not stored was not acknowledged
            assert drained(process) == (0, 1, 0, 0)
        # The lease is as it was: its executor goes on with the next scheduler.
        assert await raw.fetchval("select lease_token from rara.lease") == job.lease.lease_token


@pytest.mark.case("STOP-1")
async def test_what_has_arrived_is_committed_before_the_end_and_counted(
    database_url: str, tmp_path: Path
) -> None:
    """PostgreSQL comes back within the stop."""
    async with (
        database(database_url) as raw,
        busy_scheduler(database_url, tmp_path) as (process, _, executor),
    ):
        (job,) = [job for batch in executor.all("jobs") for job in batch.jobs]
        with frozen(await sessions(raw, "rara-scheduler")):
            await executor.events(failed(job.lease, 3))
            await executor.heartbeat([job.lease.lease_token])
            await executor.expect("heartbeat_ack")  # so what was sent before it has arrived, too
            process.terminate()
            await until(lambda: says(process, "scheduler.stopping"), "begun stop")
        await executor.expect_ack(job.lease, 3)
        assert await process.wait(STOP_S + EXIT_S) == 0
        assert drained(process) == (1, 0, 0, 1)


@pytest.mark.case("STOP-1")
async def test_a_second_signal_ends_a_scheduler_at_once(database_url: str, tmp_path: Path) -> None:
    async with (
        database(database_url) as raw,
        busy_scheduler(database_url, tmp_path) as (process, _, executor),
    ):
        (job,) = [job for batch in executor.all("jobs") for job in batch.jobs]
        with frozen(await sessions(raw, "rara-scheduler")):
            await executor.events(progress(job.lease, 3))
            await executor.heartbeat([job.lease.lease_token])
            await executor.expect("heartbeat_ack")  # so what was sent before it has arrived, too
            process.terminate()
            await asyncio.sleep(0.3)
            assert process.returncode is None
            code, took_s = await stopped(process)
            assert (code, took_s < 0.5) == (1, True), (code, took_s)
            assert drained(process) == (0, 0, 1, 0)  # its executor was not told


@pytest.mark.case("STOP-1")
@pytest.mark.parametrize("direction", [Direction.TO_CLIENT, Direction.TO_SERVER])
async def test_a_stop_does_not_wait_for_a_stream_that_stands_still(
    database_url: str, tmp_path: Path, direction: Direction
) -> None:
    async with busy_scheduler(database_url, tmp_path) as (process, address, _):
        host, _, port = address.rpartition(":")
        async with FaultProxy(host, int(port)) as proxy, ScriptedExecutor() as stalled:
            await stalled.connect(proxy.address)
            await stalled.hello(["other.kind"])
            await stalled.expect("welcome")
            proxy.stall(direction)
            code, took_s = await stopped(process)
            assert (code, took_s < STOP_S) == (0, True), (code, took_s)
            assert drained(process) == (0, 1, 0, 0)


@pytest.mark.case("STOP-1")
async def test_a_stop_does_not_wait_for_calls_and_watchers(database_url: str, tmp_path: Path) -> None:
    """A watcher, and a call that waits for a lock."""
    async with database(database_url) as raw, busy_scheduler(database_url, tmp_path) as (process, address, _):
        run_id = str(await raw.fetchval("select workflow_run_id from rara.workflow_run"))
        async with grpc.aio.insecure_channel(address) as channel:
            stub = workflow_pb2_grpc.WorkflowServiceStub(channel)
            watch = stub.WatchRun(workflow_pb2.WatchRunRequest(workflow_run_id=run_id))
            await watch.read()
            transaction = raw.transaction()
            await transaction.start()
            await raw.execute("select from rara.workflow_run for update")
            cancel = asyncio.ensure_future(
                stub.CancelRun(workflow_pb2.CancelRunRequest(workflow_run_id=run_id))
            )
            await asyncio.sleep(0.2)
            code, took_s = await stopped(process)
            assert (code, took_s < STOP_S) == (0, True), (code, took_s)
            await transaction.rollback()
            assert isinstance((await asyncio.gather(cancel, return_exceptions=True))[0], grpc.aio.AioRpcError)


@pytest.mark.case("STOP-1")
async def test_a_call_on_its_way_is_answered_before_the_end(database_url: str, tmp_path: Path) -> None:
    stop_s = 20.0  # of which a quarter is for calls
    async with (
        database(database_url) as raw,
        busy_scheduler(database_url, tmp_path, stop_s=stop_s) as (process, address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        run_id = str(await raw.fetchval("select workflow_run_id from rara.workflow_run"))
        stub = workflow_pb2_grpc.WorkflowServiceStub(channel)
        async with raw.transaction():
            await raw.execute("select from rara.workflow_run for update")
            cancel = asyncio.ensure_future(
                stub.CancelRun(workflow_pb2.CancelRunRequest(workflow_run_id=run_id))
            )
            await asyncio.sleep(0.2)
            process.terminate()
            await until(lambda: says(process, "session.ended"), "sessions that have ended")
        answer = await asyncio.wait_for(cancel, stop_s)
        assert answer.run.state == workflow_pb2.WORKFLOW_RUN_STATE_CANCELLING
        assert await process.wait(stop_s) == 0


@pytest.mark.case("STOP-1")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_before_the_database_is_there_is_a_stop(tmp_path: Path, number: signal.Signals) -> None:
    async with Processes(tmp_path) as processes:
        process = await processes.start(
            "early",
            ["rara-scheduler"],
            env={
                "RARA_DATABASE_URL": f"postgresql://rara@127.0.0.1:{free_port()}/rara",
                "RARA_LISTEN": "127.0.0.1:0",
                "RARA_BLOB_STORE": f"file://{tmp_path / 'blobs'}",
            },
        )
        await until(lambda: says(process, "scheduler.waiting_for_database"), "a scheduler that waits")
        (process.interrupt if number is signal.SIGINT else process.terminate)()
        assert await process.wait(5) == 0
        assert drained(process) == (0, 0, 0, 0)


async def says(process: Process, text: str) -> bool:
    return text in process.stderr.read_text()


# ---------------------------------------------------------------- a drain that an operator asks for


@pytest.mark.case("STOP-1")
async def test_an_operators_drain_lets_jobs_end_and_the_executor_leave(
    database_url: str, tmp_path: Path
) -> None:
    async with database(database_url) as raw, Processes(tmp_path) as processes:
        _, address = await start_scheduler(processes, database_url, tmp_path, **LONG_LEASE)
        given: dict[str, Any] = {"module": "support.timed_handlers", "slots": 1, "prestart": 1, "stop_s": 10}
        leaving = await spawn_executor(processes, address, tmp_path, name="leaving", **given)
        go = tmp_path / "go"
        async with Client.connect(address) as client:
            await define(client, steps=1)
            first = (await client.start_run("hold", {"file": str(go)})).run.workflow_run_id
            await until_running(raw, 1)
            executor_id = str(await raw.fetchval("select executor_id from rara.executor"))
            async with grpc.aio.insecure_channel(address) as channel:
                stub = workflow_pb2_grpc.WorkflowServiceStub(channel)
                await stub.DrainExecutor(workflow_pb2.DrainExecutorRequest(executor_id=executor_id))
            second = (await client.start_run("hold", {"file": str(go)})).run.workflow_run_id
            await asyncio.sleep(ACCEPT_S + SWEEP_S)
            assert await raw.fetchval("select count(*) from rara.lease") == 1  # nothing new for it
            assert leaving.returncode is None
            go.touch()
            run = await client.wait_run(first, 10)
            assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
            assert await leaving.wait(10) == 0
            assert drained(leaving) == (1, 0, 0, 0)
            await spawn_executor(processes, address, tmp_path, name="next", **given)
            run = await client.wait_run(second, 10)
            assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
        rows = await raw.fetch("select attempt, failures from rara.result")
        assert [tuple(row) for row in rows] == [(1, 0), (1, 0)]
