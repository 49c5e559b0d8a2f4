"""Executors that are dialled: the same jobs, the same guarantees, over ExecutorService."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rara.v1 import dispatch_pb2, executor_pb2, executor_pb2_grpc, job_pb2
from rara_executor.app import Executor
from rara_testing.fault_proxy import FaultProxy
from rara_testing.ports import free_port
from rara_testing.scripted_scheduler import job
from support.running_executor import running
from support.running_executor import until as until_true
from support.running_scheduler import LEASE_S, RunningScheduler, running_scheduler, until

STEPS = {"a": {"kind": "demo.wait_for_file", "executor_kind": "python"}}


@contextlib.asynccontextmanager
async def direct(
    database_url: str, folder: Path, *, dialled: str = "", listen: str = "", **executor: Any
) -> AsyncIterator[tuple[RunningScheduler, Executor]]:
    """A scheduler that dials an executor. dialled: another way to where it listens."""
    listen = listen or f"127.0.0.1:{free_port()}"
    async with (
        running_scheduler(database_url, folder, direct_executors=(dialled or listen,)) as world,
        running(world.address, folder, listen=listen, **executor) as served,
    ):
        yield world, served


async def attempts(world: RunningScheduler, run_id: str) -> list[int]:
    rows = await world.raw.fetch(
        "select attempt from rara.step_state where workflow_run_id = $1::uuid order by step_name", run_id
    )
    return [row["attempt"] for row in rows]


async def test_jobs_run_with_their_progress_and_results(database_url: str, tmp_path: Path) -> None:
    async with direct(database_url, tmp_path) as (world, _):
        await world.define(
            "many",
            {
                **{f"echo{number}": {"kind": "demo.echo"} for number in range(10)},
                "count": {"kind": "demo.progress"},
            },
        )
        run_id = await world.start("many", value={"count": 30, "checkpoint": True})
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert await attempts(world, run_id) == [1] * 11
        numbers = await world.raw.fetch(
            "select sequence from rara.step_event e join rara.step_run s using (step_run_id)"
            " where s.step_name = 'count' order by sequence"
        )
        stored = [row["sequence"] for row in numbers]
        assert stored == list(range(1, len(stored) + 1))


async def test_a_cancel_reaches_the_handler(database_url: str, tmp_path: Path) -> None:
    async with direct(database_url, tmp_path) as (world, _):
        await world.define("wait", {"a": {"kind": "demo.wait"}})
        run_id = await world.start("wait", value={"file": str(tmp_path / "started")})
        await until_true((tmp_path / "started").exists)
        await world.cancel(run_id)
        assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "cancelled"
        assert await world.steps(run_id) == {"a": ("cancelled", "CANCELLED")}
        facts = await world.raw.fetchrow(
            "select cancel_requested_at is not null as requested, cancel_delivered_at is not null as delivered"
            " from rara.step_state where workflow_run_id = $1::uuid",
            run_id,
        )
        assert dict(facts or {}) == {"requested": True, "delivered": True}


async def test_a_job_longer_than_several_leases_is_renewed(database_url: str, tmp_path: Path) -> None:
    async with direct(database_url, tmp_path) as (world, _):
        await world.define("long", STEPS)
        run_id = await world.start("long", value={"file": str(tmp_path / "end")})
        step_id = await world.raw.fetchval("select step_run_id::text from rara.step_run")
        await world.until_step(step_id, "running")
        first = await world.raw.fetchval("select expires_at from rara.lease")

        async def renewed() -> bool:
            expires = await world.raw.fetchval("select expires_at from rara.lease")
            return bool((expires - first).total_seconds() > 2 * LEASE_S)

        await until(renewed, "lease renewed for two more leases", 4 * LEASE_S)
        (tmp_path / "end").touch()
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert await attempts(world, run_id) == [1]


async def test_a_cut_connection_costs_no_attempt(database_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with (
        FaultProxy("127.0.0.1", port) as proxy,
        direct(database_url, tmp_path, dialled=proxy.address, listen=f"127.0.0.1:{port}") as (world, _),
    ):
        await world.define("cut", STEPS)
        run_id = await world.start("cut", value={"file": str(tmp_path / "end")})
        step_id = await world.raw.fetchval("select step_run_id::text from rara.step_run")
        await world.until_step(step_id, "running")
        for _ in range(3):
            accepted = proxy.accepted
            await until_true(lambda: proxy.open_links)
            proxy.reset()
            await proxy.wait_accepted(accepted + 1)
        (tmp_path / "end").touch()
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert await attempts(world, run_id) == [1]


async def test_a_silent_scheduler_makes_the_executor_fence_itself(database_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with (
        FaultProxy("127.0.0.1", port) as proxy,
        direct(database_url, tmp_path, dialled=proxy.address, listen=f"127.0.0.1:{port}") as (
            world,
            _,
        ),
    ):
        await world.define("ticks", {"a": {"kind": "demo.wait"}})
        await world.start("ticks", value={"file": str(tmp_path / "started")})
        await until_true((tmp_path / "started").exists)
        step_id = await world.raw.fetchval("select step_run_id::text from rara.step_run")
        proxy.stall()
        row = await world.until_step(step_id, "retryable_failed", "pending", "terminal_failed")
        assert row["attempt"] == 1
        proxy.resume()
        proxy.reset()
        await world.raw.execute("update rara.waiting set available_at = now()")
        row = await world.until_step(step_id, "running")
        assert row["attempt"] == 2


async def test_a_restarted_scheduler_finds_the_job_again(database_url: str, tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        world = await first.enter_async_context(
            running_scheduler(database_url, tmp_path, direct_executors=(listen,))
        )
        await stack.enter_async_context(running(world.address, tmp_path, listen=listen))
        await world.define("restart", STEPS)
        run_id = await world.start("restart", value={"file": str(tmp_path / "end")})
        step_id = await world.raw.fetchval("select step_run_id::text from rara.step_run")
        await world.until_step(step_id, "running")
        await first.aclose()
        (tmp_path / "end").touch()  # its result waits for whoever comes
        world = await stack.enter_async_context(
            running_scheduler(database_url, tmp_path, direct_executors=(listen,))
        )
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert await attempts(world, run_id) == [1]


async def test_two_schedulers_leave_the_executor_to_one_and_the_other_takes_over(
    database_url: str, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with contextlib.AsyncExitStack() as stack:
        firsts = await stack.enter_async_context(contextlib.AsyncExitStack())
        world = await firsts.enter_async_context(
            running_scheduler(database_url, tmp_path, direct_executors=(listen,))
        )
        await stack.enter_async_context(running(world.address, tmp_path, listen=listen))
        await until(lambda: world.raw.fetchval("select true from rara.executor"), "session of the first")
        other = await stack.enter_async_context(
            running_scheduler(database_url, tmp_path, direct_executors=(listen,))
        )
        await world.define("shared", {"a": {"kind": "demo.echo"}})
        runs = [await other.start("shared", value=number) for number in range(5)]
        for run_id in runs:
            assert await other.until_run(run_id, "succeeded", "failed") == "succeeded"
            assert await attempts(other, run_id) == [1]
        assert await other.raw.fetchval("select count(*) from rara.executor") == 1
        await firsts.aclose()
        run_id = await other.start("shared", value=5)
        assert await other.until_run(run_id, "succeeded", "failed") == "succeeded"


async def test_a_restarted_executor_starts_the_step_anew(database_url: str, tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with running_scheduler(database_url, tmp_path, direct_executors=(listen,)) as world:
        await world.define("again", STEPS)
        async with running(world.address, tmp_path, listen=listen, stop_s=0.5):
            run_id = await world.start("again", value={"file": str(tmp_path / "end")})
            step_id = await world.raw.fetchval("select step_run_id::text from rara.step_run")
            await world.until_step(step_id, "running")
        (tmp_path / "end").touch()
        async with running(world.address, tmp_path, listen=listen):
            assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        row = await world.step(step_id)
        assert (row["attempt"], row["failures"]) == (2, 0)
        first = await world.raw.fetchval("select reason from rara.step_attempt")
        assert first == "EXECUTOR_SHUTDOWN"


# ---------------------------------------------------------------- the executor alone


@contextlib.asynccontextmanager
async def served(folder: Path, **executor: Any) -> AsyncIterator[executor_pb2_grpc.ExecutorServiceStub]:
    listen = f"127.0.0.1:{free_port()}"
    async with (
        running("127.0.0.1:1", folder, listen=listen, **executor),
        grpc.aio.insecure_channel(listen) as channel,
    ):
        yield executor_pb2_grpc.ExecutorServiceStub(channel)


def start(request: job_pb2.JobRequest, resume_after: int = 0) -> executor_pb2.ExecuteRequest:
    terms = dispatch_pb2.SessionTerms()
    terms.heartbeat_interval.FromMilliseconds(200)
    terms.silence_timeout.FromMilliseconds(5000)
    return executor_pb2.ExecuteRequest(
        start=executor_pb2.ExecuteStart(job=request, terms=terms, resume_after_sequence=resume_after)
    )


async def next_event(call: Any) -> job_pb2.ProgressEvent:
    async with asyncio.timeout(10):
        while True:
            frame = await call.read()
            assert isinstance(frame, executor_pb2.ExecuteResponse), (await call.code(), await call.details())
            if frame.WhichOneof("frame") == "event":
                return frame.event


def ack(token: int, sequence: int) -> executor_pb2.ExecuteRequest:
    acks = dispatch_pb2.EventAcks(acks=[dispatch_pb2.EventAck(lease_token=token, sequence=sequence)])
    return executor_pb2.ExecuteRequest(acks=acks)


async def begun(stub: Any, request: job_pb2.JobRequest, resume_after: int = 0) -> Any:
    async with asyncio.timeout(10):
        call = stub.Execute(wait_for_ready=True)
        await call.write(start(request, resume_after))
    return call


async def test_capabilities_name_slots_held_jobs_and_versions(tmp_path: Path) -> None:
    async with served(tmp_path, slots=3) as stub:
        request = executor_pb2.GetCapabilitiesRequest(protocol_version=1)
        answer = await stub.GetCapabilities(request, wait_for_ready=True, timeout=10)
        assert (answer.free_slots, answer.draining, list(answer.hello.held_jobs)) == (3, False, [])
        assert "demo.echo" in {capability.kind for capability in answer.hello.capabilities}
        call = await begun(stub, job(7, "demo.wait", input={"file": str(tmp_path / "x")}))
        assert (await next_event(call)).WhichOneof("event") == "accepted"
        answer = await stub.GetCapabilities(request, timeout=10)
        assert answer.free_slots == 2
        assert [held.lease.lease_token for held in answer.hello.held_jobs] == [7]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(protocol_version=2), timeout=10)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        call.cancel()


@pytest.mark.parametrize(
    ("kind", "version", "resume", "status"),
    [
        ("no.such", "1.0.0", 0, grpc.StatusCode.UNIMPLEMENTED),
        ("demo.echo", "9.9.9", 0, grpc.StatusCode.UNIMPLEMENTED),
        ("demo.echo", "1.0.0", 4, grpc.StatusCode.NOT_FOUND),
    ],
    ids=["kind", "version", "unknown lease"],
)
async def test_what_cannot_run_is_refused_by_status(
    kind: str, version: str, resume: int, status: grpc.StatusCode, tmp_path: Path
) -> None:
    async with served(tmp_path) as stub:
        call = await begun(stub, job(1, kind, version=version), resume)
        assert await call.code() is status


async def test_a_full_executor_says_so(tmp_path: Path) -> None:
    async with served(tmp_path, slots=1) as stub:
        first = await begun(stub, job(1, "demo.wait", input={"file": str(tmp_path / "x")}))
        await next_event(first)
        second = await begun(stub, job(2, "demo.echo"))
        assert await second.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()


@pytest.mark.parametrize("ended", [True, False], ids=["after the first", "beside the first"])
async def test_a_second_call_attaches_and_replays_what_is_not_stored(ended: bool, tmp_path: Path) -> None:
    async with served(tmp_path) as stub:
        request = job(3, "demo.echo", input={"a": 1})
        first = await begun(stub, request)
        assert (await next_event(first)).WhichOneof("event") == "accepted"
        await first.write(ack(3, 1))
        assert (await next_event(first)).WhichOneof("event") == "running"
        last = await next_event(first)
        assert last.WhichOneof("event") == "succeeded"
        if ended:
            first.cancel()
        lease = job_pb2.JobRequest(lease=request.lease)
        second = await begun(stub, lease, resume_after=1)
        again = [await next_event(second), await next_event(second)]
        assert [(event.sequence, event.WhichOneof("event")) for event in again] == [
            (2, "running"),
            (3, "succeeded"),
        ]
        assert again[1] == last
        await second.write(ack(3, 3))
        assert await second.code() is grpc.StatusCode.OK


async def test_a_job_starts_nothing_before_its_accepted_is_acknowledged(tmp_path: Path) -> None:
    async with served(tmp_path) as stub:
        marked = tmp_path / "ran"
        call = await begun(stub, job(5, "demo.wait", input={"file": str(marked)}))
        await next_event(call)
        answer = await stub.Cancel(
            executor_pb2.CancelRequest(cancel=dispatch_pb2.CancelJob(lease_token=5, reason="CANCELLED")),
            timeout=10,
        )
        assert answer.known
        event = await next_event(call)
        assert (event.WhichOneof("event"), event.cancelled.reason) == ("cancelled", "CANCELLED")
        assert not marked.exists()
        unknown = await stub.Cancel(
            executor_pb2.CancelRequest(cancel=dispatch_pb2.CancelJob(lease_token=99)), timeout=10
        )
        assert not unknown.known
        await call.write(ack(5, event.sequence))
        assert await call.code() is grpc.StatusCode.OK
