"""Dialled executors that misbehave: their own steps bear it, and nobody else."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.rpc import status_pb2
from rara.v1 import dispatch_pb2, executor_pb2
from rara_testing import job_events
from rara_testing.ports import free_port
from support.running_scheduler import KIND, LEASE_S, RunningScheduler, running_scheduler, until

SERVICE = "rara.v1.ExecutorService"
Execute = Callable[["Misbehaving", executor_pb2.ExecuteStart, Any], Awaitable[None]]


class Misbehaving:
    """Serves ExecutorService in bytes, so that it can say anything. execute: what each call does."""

    def __init__(self, execute: Execute, *, slots: int = 2) -> None:
        self.executor_id = str(uuid.uuid4())
        self.starts: list[executor_pb2.ExecuteStart] = []
        self.slots = slots
        self._execute = execute

    async def _capabilities(self, request: bytes, context: Any) -> bytes:
        hello = dispatch_pb2.Hello(
            protocol_version=1,
            executor_id=self.executor_id,
            executor_name="odd",
            executor_kind="odd",
            sdk="odd",
            capabilities=[dispatch_pb2.Capability(kind=KIND, versions=["1.0.0"])],
        )
        return executor_pb2.GetCapabilitiesResponse(hello=hello, free_slots=self.slots).SerializeToString()

    async def _call(self, requests: Any, context: Any) -> None:
        start = executor_pb2.ExecuteRequest.FromString(await context.read()).start
        self.starts.append(start)
        await self._execute(self, start, context)

    async def _cancel(self, request: bytes, context: Any) -> bytes:
        return executor_pb2.CancelResponse(known=True).SerializeToString()

    @contextlib.asynccontextmanager
    async def served(self, database_url: str, folder: Path) -> AsyncIterator[RunningScheduler]:
        """A scheduler that dials it, with a definition `one` of one step."""
        server = grpc.aio.server()
        methods: dict[str, Any] = {
            "GetCapabilities": grpc.unary_unary_rpc_method_handler(self._capabilities),
            "Cancel": grpc.unary_unary_rpc_method_handler(self._cancel),
            "Execute": grpc.stream_stream_rpc_method_handler(self._call),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        port = free_port()
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            async with running_scheduler(
                database_url, folder, direct_executors=(f"127.0.0.1:{port}",)
            ) as world:
                await world.define("one", {"a": {"retry": {"max_attempts": 2}}})
                yield world
        finally:
            await server.stop(0)


async def say(context: Any, **frame: Any) -> None:
    await context.write(executor_pb2.ExecuteResponse(**frame).SerializeToString())


async def begin(start: executor_pb2.ExecuteStart, context: Any) -> None:
    """Accept, run, and beat once."""
    lease = start.job.lease
    await say(context, event=job_events.accepted(lease))
    await say(context, event=job_events.running(lease))
    await say(context, heartbeat=dispatch_pb2.Heartbeat(number=1, lease_tokens=[lease.lease_token]))


async def finish(start: executor_pb2.ExecuteStart, context: Any) -> None:
    lease = start.job.lease
    if not start.resume_after_sequence:
        await say(context, event=job_events.accepted(lease))
        await say(context, event=job_events.running(lease))
    await say(context, event=job_events.succeeded(lease, 3))


async def step_of(world: RunningScheduler, run_id: str) -> str:
    return str(
        await world.raw.fetchval(
            "select step_run_id::text from rara.step_run where workflow_run_id = $1::uuid", run_id
        )
    )


async def test_a_status_that_contradicts_itself_ends_its_call_alone(
    database_url: str, tmp_path: Path
) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if len(odd.starts) > 2:
            await finish(start, context)
            return
        details = status_pb2.Status(code=13, message="another").SerializeToString()
        context.set_trailing_metadata(
            (("grpc-status-details-bin", details if len(odd.starts) == 1 else b"\xff"),)
        )
        await context.abort(grpc.StatusCode.UNAVAILABLE, "no")

    async with Misbehaving(execute).served(database_url, tmp_path) as world:
        run_id = await world.start("one")
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"


async def test_a_job_whose_call_beats_no_more_is_not_renewed(database_url: str, tmp_path: Path) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if start.job.lease.attempt > 1:
            await finish(start, context)
            return
        if not start.resume_after_sequence:
            await begin(start, context)
        await asyncio.sleep(60)

    async with Misbehaving(execute).served(database_url, tmp_path) as world:
        run_id = await world.start("one")
        step_id = await step_of(world, run_id)
        await world.until_step(step_id, "running")
        async with asyncio.timeout(4 * LEASE_S):
            row = await world.until_step(step_id, "succeeded")
        assert (row["attempt"], row["failures"]) == (2, 1)
        assert await world.raw.fetchval("select reason from rara.step_attempt") == "LEASE_EXPIRED"


async def test_a_frame_that_nobody_can_read_breaks_the_call(database_url: str, tmp_path: Path) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if len(odd.starts) == 1:
            await begin(start, context)
            await context.write(b"\xff\xff\xff")
            await asyncio.sleep(60)
        await finish(start, context)

    odd = Misbehaving(execute)
    async with odd.served(database_url, tmp_path) as world:
        run_id = await world.start("one")
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        row = await world.step(await step_of(world, run_id))
        assert row["attempt"] == 1  # attached again, and went on
        assert [start.job.lease.lease_token for start in odd.starts] == [
            odd.starts[0].job.lease.lease_token
        ] * 2


async def test_calls_that_hang_are_given_up_with_their_leases(database_url: str, tmp_path: Path) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if len(odd.starts) <= 2:
            await asyncio.sleep(60)
        await finish(start, context)

    async with Misbehaving(execute).served(database_url, tmp_path) as world:
        runs = [await world.start("one") for _ in range(4)]
        for run_id in runs:
            assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        lost = await world.raw.fetch("select reason from rara.step_attempt")
        assert {row["reason"] for row in lost} == {"DISPATCH_LOST"}


async def test_a_status_of_the_transport_under_a_running_job_is_no_refusal(
    database_url: str, tmp_path: Path
) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if len(odd.starts) == 1:
            await begin(start, context)
            await asyncio.sleep(0.2)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "a frame was too large")
        await finish(start, context)

    async with Misbehaving(execute).served(database_url, tmp_path) as world:
        run_id = await world.start("one")
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert (await world.step(await step_of(world, run_id)))["attempt"] == 1


async def test_an_end_before_the_last_event_is_no_end(database_url: str, tmp_path: Path) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if len(odd.starts) == 1:
            await begin(start, context)
            return
        await finish(start, context)

    async with Misbehaving(execute).served(database_url, tmp_path) as world:
        run_id = await world.start("one")
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert (await world.step(await step_of(world, run_id)))["attempt"] == 1


async def test_a_refusal_for_want_of_room_waits_for_the_next_poll(database_url: str, tmp_path: Path) -> None:
    async def execute(odd: Misbehaving, start: executor_pb2.ExecuteStart, context: Any) -> None:
        if len(odd.starts) <= 2:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        await finish(start, context)

    odd = Misbehaving(execute, slots=1)
    async with odd.served(database_url, tmp_path) as world:
        run_id = await world.start("one")
        loop = asyncio.get_running_loop()
        await until(lambda: _value(len(odd.starts) >= 1), "first try")
        began_at = loop.time()
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert loop.time() - began_at > 0.4  # a heartbeat interval passed between the tries
        assert (await world.step(await step_of(world, run_id)))["failures"] == 0


async def _value(value: bool) -> bool:
    return value
