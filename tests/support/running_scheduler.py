"""A whole scheduler in the test's own process and loop, over a real database, with times short enough to wait for.

async with running_scheduler(database_url, tmp_path) as world:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with world.executor() as executor:
        job = await executor.expect_job()
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
from rara.v1 import common_pb2, workflow_pb2, workflow_pb2_grpc
from rara_client.security import Security
from rara_scheduler.app import Scheduler
from rara_scheduler.settings import Settings
from rara_testing.scripted_executor import WAIT_S, Capabilities, ScriptedExecutor
from support.kept_promises import assert_promises_kept

LEASE_S = 2.0
HEARTBEAT_S = 0.5
SWEEP_S = 0.5
ACCEPT_S = 1.0
GRACE_S = 1.0
KIND = "work.do"

TEST_VALUES: dict[str, object] = {
    "listen": "127.0.0.1:0",
    "lease_s": LEASE_S,
    "heartbeat_s": HEARTBEAT_S,
    "silence_s": 1.5,
    "accept_timeout_s": ACCEPT_S,
    "cancel_grace_s": GRACE_S,
    "settle_s": 0.2,
    "sweep_s": SWEEP_S,
    "poll_s": 0.5,
    "stop_s": 5.0,
    "retry_initial_backoff_s": 0.05,
    "retry_max_backoff_s": 0.2,
}

T = TypeVar("T")


@dataclass
class RunningScheduler:
    scheduler: Scheduler
    address: str
    raw: "asyncpg.Connection[asyncpg.Record]"
    workflows: Any  # the stub: its type for grpc.aio exists for type checkers alone

    async def define(
        self, name: str, steps: Mapping[str, Mapping[str, Any]], *, on_failure: str = "", **more: Any
    ) -> None:
        """Register a definition; each step is its StepDefinition as a dict, of kind `work.do` unless it says so."""
        message = workflow_pb2.Definition(
            definition=name,
            steps=[
                workflow_pb2.StepDefinition(step_name=step, **({"kind": KIND} | dict(fields)))
                for step, fields in steps.items()
            ],
            on_failure=workflow_pb2.OnFailure.Value(f"ON_FAILURE_{on_failure or 'FAIL_FAST'}"),
            **more,
        )
        await self.workflows.RegisterDefinition(
            workflow_pb2.RegisterDefinitionRequest(definition=message), timeout=WAIT_S
        )

    async def start(self, name: str, *, value: object = None, **more: Any) -> str:
        """Start a run, with `value` as its input; its id."""
        payload = None if value is None else common_pb2.Payload(data=json.dumps(value).encode())
        response = await self.workflows.StartRun(
            workflow_pb2.StartRunRequest(definition=name, input=payload, **more), timeout=WAIT_S
        )
        return str(response.run.workflow_run_id)

    async def cancel(self, workflow_run_id: str) -> None:
        await self.workflows.CancelRun(
            workflow_pb2.CancelRunRequest(workflow_run_id=workflow_run_id), timeout=WAIT_S
        )

    async def drain(self, executor_id: str, *, within_s: float | None = None) -> None:
        request = workflow_pb2.DrainExecutorRequest(executor_id=executor_id)
        if within_s is not None:
            request.finish_within.FromNanoseconds(int(within_s * 1e9))
        await self.workflows.DrainExecutor(request, timeout=WAIT_S)

    async def step(self, step_run_id: str) -> asyncpg.Record:
        row = await self.raw.fetchrow(
            "select * from rara.step_state where step_run_id = $1::uuid", step_run_id
        )
        assert row is not None
        return row

    async def steps(self, workflow_run_id: str) -> dict[str, tuple[str, str]]:
        """State and reason of each step by name."""
        rows = await self.raw.fetch(
            "select step_name, state, reason from rara.step_state where workflow_run_id = $1::uuid",
            workflow_run_id,
        )
        return {row["step_name"]: (row["state"], row["reason"]) for row in rows}

    async def run_state(self, workflow_run_id: str) -> str:
        return str(
            await self.raw.fetchval(
                "select state from rara.workflow_run where workflow_run_id = $1::uuid", workflow_run_id
            )
        )

    async def until_run(self, workflow_run_id: str, *states: str) -> str:
        """Wait until the run is in one of the states; the state."""

        async def look() -> str | None:
            state = await self.run_state(workflow_run_id)
            return state if state in states else None

        return await until(look, f"run in {states}")

    async def until_step(self, step_run_id: str, *states: str) -> asyncpg.Record:
        """Wait until the step is in one of the states; its row."""

        async def look() -> asyncpg.Record | None:
            row = await self.step(step_run_id)
            return row if row["state"] in states else None

        return await until(look, f"step in {states}")

    @contextlib.asynccontextmanager
    async def executor(
        self,
        capabilities: Capabilities = (KIND,),
        *,
        credit: int = 1,
        executor_id: str | None = None,
        beat: bool = True,
        **hello: Any,
    ) -> AsyncIterator[ScriptedExecutor]:
        """A welcomed executor with this credit. beat: it heartbeats by itself, with no leases, to stay in."""
        async with ScriptedExecutor(executor_id=executor_id) as executor:
            await executor.connect(self.address)
            await executor.hello(capabilities, **hello)
            await executor.expect("welcome")
            if credit:
                await executor.credit(credit)
            async with beating(executor) if beat else contextlib.nullcontext():
                yield executor


@contextlib.asynccontextmanager
async def beating(executor: ScriptedExecutor, tokens: Callable[[], list[int]] = list) -> AsyncIterator[None]:
    """Heartbeat at the agreed interval for as long as the block lasts. tokens: what to renew, asked each time."""

    async def beat() -> None:
        while True:
            await executor.heartbeat(tokens())
            await asyncio.sleep(HEARTBEAT_S)

    task = asyncio.create_task(beat(), name="beats of a scripted executor")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(ask: Callable[[], Awaitable[T | None]], what: str, timeout_s: float = WAIT_S) -> T:
    """Ask again and again, until the answer is neither None, False nor empty."""
    try:
        async with asyncio.timeout(timeout_s):
            while not (answer := await ask()):
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"no {what} within {timeout_s:g} s") from None
    return answer


@contextlib.asynccontextmanager
async def running_scheduler(
    database_url: str,
    folder: Path,
    *,
    check_history: bool = True,
    security: Security = Security(),  # noqa: B008 - a value, and never changed
    **settings: object,
) -> AsyncIterator[RunningScheduler]:
    """A scheduler that serves until the block ends, then stops in order. settings: over the test values.

    security: of the calls that this makes for the test. A scheduler that dies of a bug fails the test, and so does
    history that breaks a promise: `check_history` is for tests that break it themselves.
    """
    values = (
        TEST_VALUES | {"database_url": database_url, "blob_store": f"file://{folder / 'blobs'}"} | settings
    )
    chosen = Settings(**values)  # type: ignore[arg-type]  # validated by the model itself
    scheduler = Scheduler(chosen)
    await scheduler.start()
    serving = asyncio.create_task(scheduler.run(), name="scheduler")
    raw = await asyncpg.connect(database_url)
    channel = security.channel(scheduler.address, [("grpc.use_local_subchannel_pool", 1)])
    try:
        yield RunningScheduler(
            scheduler, scheduler.address, raw, workflow_pb2_grpc.WorkflowServiceStub(channel)
        )
    finally:
        scheduler.stop()
        await channel.close()
        async with asyncio.timeout(20):
            await serving
            await raw.close()
    if check_history:
        await assert_promises_kept(database_url, max_attempts=chosen.retry_max_attempts)
