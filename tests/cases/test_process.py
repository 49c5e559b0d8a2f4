"""Handlers may start processes and die as they like, and streams may come and go: nothing is left behind."""

import asyncio
import contextlib
import gc
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import pytest_asyncio
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc
from rara_testing.processes import Processes
from rara_testing.scripted_executor import capability
from rara_testing.scripted_scheduler import ScriptedScheduler, Terms, job
from support import faulty
from support.running_executor import running
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor

MODULE = "support.faulty"
GROWTH_BYTES = 20 << 20


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest.mark.case("PROC-1")
@pytest.mark.parametrize(
    ("subprocesses", "workers"), [(40, 2), pytest.param(500, 20, marks=pytest.mark.soak)]
)
async def test_handlers_start_processes_side_by_side_while_streams_are_open(
    world: RunningScheduler, tmp_path: Path, subprocesses: int, workers: int
) -> None:
    kinds = {f"s{number}": f"faulty.spawns{'_async' * (number % 2)}" for number in range(4)}
    async with Processes(tmp_path) as processes:
        executor = await spawn_executor(processes, world.address, tmp_path, module=MODULE, prestart=2)
        await world.define("spawn", {name: {"kind": kind} for name, kind in kinds.items()})
        given = {"folder": str(tmp_path), "subprocesses": subprocesses, "workers": workers}
        run_id = await world.start("spawn", value=given)

        async def ended() -> str:
            state = await world.run_state(run_id)
            return state if state in ("succeeded", "failed", "cancelled") else ""

        assert await until(ended, "end of the run", 30 + subprocesses) == "succeeded"
        rows = await world.raw.fetch("select attempt, output from rara.step_state")
        assert {row["attempt"] for row in rows} == {1}
        assert all(float(row["output"]) < 5.0 for row in rows), rows
        await until(lambda: only_ours(executor.pid), "end of all children", 5)


async def only_ours(supervisor: int) -> bool:
    """Whether below the supervisor are but its runners and warden, and what the library keeps in a runner."""
    for child in psutil.Process(supervisor).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            line = " ".join(child.cmdline())
            if not any(word in line for word in ("runner_process", "warden.py", "resource_tracker")):
                return False
    return True


@pytest.mark.case("PROC-2")
@pytest.mark.parametrize("how", ["exception", "system_exit", "interrupt", "recursion", "thread_exit"])
async def test_what_can_be_caught_costs_the_step_that_raised_it_alone(
    world: RunningScheduler, tmp_path: Path, how: str
) -> None:
    """In a process that it shares with four others."""
    async with running(world.address, tmp_path, modules=MODULE, slots=10):
        rows = await panic_beside_four(world, tmp_path, "faulty.panics", how)
    attempts = {name: row["attempt"] for name, row in rows.items()}
    bad = 1 if how == "thread_exit" else 2
    assert attempts == {"bad": bad} | {f"good{number}": 1 for number in range(4)}
    reasons = await world.raw.fetch(
        "select reason, spent, error->>'stack_trace' as stack from rara.step_attempt"
    )
    assert [row["reason"] for row in reasons] == ["HANDLER_FAILED"] * (bad - 1)
    assert all("faulty.py" in row["stack"] for row in reasons)


@pytest.mark.case("PROC-2")
@pytest.mark.parametrize("how", ["segfault", "os_exit"])
@pytest.mark.parametrize("kind", ["faulty.panics", "faulty.panics_blocking"])
async def test_what_ends_the_process_costs_one_attempt_of_what_ran_in_it(
    world: RunningScheduler, tmp_path: Path, kind: str, how: str
) -> None:
    async with running(world.address, tmp_path, modules=MODULE, slots=10):
        rows = await panic_beside_four(world, tmp_path, kind, how)
    others = 1 if kind == "faulty.panics_blocking" else 2
    attempts = {name: row["attempt"] for name, row in rows.items()}
    assert attempts == {"bad": 2} | {f"good{number}": others for number in range(4)}
    reasons = await world.raw.fetch("select reason, spent from rara.step_attempt")
    assert {tuple(row) for row in reasons} == {("RUNNER_CRASHED", True)}


async def panic_beside_four(world: RunningScheduler, folder: Path, kind: str, how: str) -> dict[str, Any]:
    good = {f"good{number}": {"kind": "faulty.sleeps"} for number in range(4)}
    await world.define("panic", {"bad": {"kind": kind}} | good)
    value = {"folder": str(folder), "how": how, "seconds": 1.0}
    run_id = await world.start("panic", value=value)
    assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "succeeded"
    for name in ("bad", *good):
        assert faulty.notes(folder, name, "starts")
    return {row["step_name"]: row for row in await world.raw.fetch("select * from rara.step_state")}


class Baseline:
    """What this process holds: tasks, open files and memory, now and later."""

    def __init__(self) -> None:
        gc.collect()
        self._process = psutil.Process()
        self.tasks = len(asyncio.all_tasks())
        self.files = self._process.num_fds()
        self.rss = self._process.memory_info().rss

    async def is_kept(self, *, files: int = 5, tasks: int = 5) -> bool:
        now = Baseline()
        return now.tasks <= self.tasks + tasks and now.files <= self.files + files


@pytest.mark.case("PROC-3")
@pytest.mark.parametrize(("warm_up", "streams"), [(50, 300), pytest.param(500, 5000, marks=pytest.mark.soak)])
async def test_streams_that_are_cancelled_at_any_moment_leave_nothing_in_the_scheduler(
    world: RunningScheduler, warm_up: int, streams: int
) -> None:
    randomly = random.Random(1)
    async with grpc.aio.insecure_channel(
        world.address, options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        stub = dispatch_pb2_grpc.DispatchServiceStub(channel)

        async def open_many(count: int) -> None:
            for start in range(0, count, 25):
                await asyncio.gather(
                    *(
                        open_and_cancel(stub, start + number, randomly.random() * 0.03)
                        for number in range(min(25, count - start))
                    )
                )

        await open_many(warm_up)
        before = Baseline()
        await open_many(streams)
        await until(before.is_kept, "baseline", 5)

        async def forgotten() -> bool:
            return bool(
                await world.raw.fetchval("select count(*) = 0 from rara.executor where ended_at is null")
            )

        await until(forgotten, "end of all sessions", 5)
        assert Baseline().rss - before.rss < GROWTH_BYTES
    # It works as it did.
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as executor:
        await executor.expect_job()


async def open_and_cancel(stub: Any, number: int, after_s: float) -> None:
    """A third is cancelled in the middle of writing, a third right after Welcome, and a third before."""
    call = stub.Connect()
    hello = dispatch_pb2.Hello(
        protocol_version=1,
        executor_id=f"0198c2a0-0000-7000-8000-{number:012x}",
        executor_name="fleeting",
        executor_kind="python",
        capabilities=[capability(KIND)],
    )

    async def talk() -> None:
        await call.write(dispatch_pb2.ConnectRequest(hello=hello))
        if number % 3 == 0:
            return
        await call.read()
        beat = dispatch_pb2.Heartbeat(lease_tokens=range(1, 2000))
        while number % 3 == 1:
            beat.number += 1
            await call.write(dispatch_pb2.ConnectRequest(heartbeat=beat))

    talking = asyncio.create_task(talk())
    await asyncio.wait([talking], timeout=after_s)
    call.cancel()
    talking.cancel()
    await asyncio.gather(talking, return_exceptions=True)


@pytest.mark.case("PROC-3")
@pytest.mark.parametrize(
    ("warm_up", "sessions"), [(20, 150), pytest.param(200, 3000, marks=pytest.mark.soak)]
)
async def test_sessions_that_end_at_any_moment_leave_nothing_in_the_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_up: int, sessions: int
) -> None:
    monkeypatch.setattr("rara_executor.connection.FIRST_BACKOFF_S", 0.005)  # or it would take its time
    randomly = random.Random(2)
    tokens = iter(range(1, 100_000))
    async with (
        ScriptedScheduler(Terms(heartbeat_s=0.1)) as scheduler,
        running(scheduler.address, tmp_path, modules=MODULE),
    ):

        def forget() -> None:
            """What the scripted scheduler remembers is not what is looked for."""
            scheduler.stored.clear()
            for index, session in enumerate(scheduler.sessions):
                session.frames.clear()
                if session.ended.is_set():
                    scheduler.sessions[index] = scheduler.sessions[0]

        async def end_many(count: int) -> None:
            for number in range(count):
                session = await scheduler.session()
                if number % 3 == 1:
                    session.send_jobs(job(next(tokens), "faulty.echo", input="x" * 50_000))
                await asyncio.sleep(randomly.random() * 0.01)
                session.end((grpc.StatusCode.UNAVAILABLE, None, grpc.StatusCode.CANCELLED)[number % 3])
                if number % 50 == 49:
                    forget()

        await end_many(warm_up)
        forget()
        before = Baseline()
        await end_many(sessions)
        session = await scheduler.session()
        last = next(tokens)
        session.send_jobs(job(last, "faulty.echo", input=1))
        await scheduler.event(last, "succeeded")
        forget()
        await until(before.is_kept, "baseline", 5)
        assert Baseline().rss - before.rss < GROWTH_BYTES
