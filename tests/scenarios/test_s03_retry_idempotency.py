"""S03: whatever breaks at whatever point of a step, its effect is recorded once and the step succeeds."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import grpc.aio
import psutil
import pytest
from google.protobuf.duration_pb2 import Duration
from rara.v1 import workflow_pb2
from rara_testing.processes import Process, Processes
from support import faulty
from support.frame_relay import POINTS, FrameRelay, Then
from support.running_executor import running
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

pytestmark = pytest.mark.case("S03")

MODULE = "support.faulty"
# Where a fault has a meaning of its own; between these the same happens as at their neighbours.
MAIN_POINTS = ("job", "accepted", "ack accepted", "effect", "ack effect", "succeeded", "ack succeeded")
OTHER_POINTS = tuple(point for point in POINTS if point not in MAIN_POINTS)
NOT_STARTED = ("job", "accepted", "ack accepted")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a fault may cost. ended: how attempts before the last one did."""

    attempt: int = 1
    failures: int = 0
    ended: tuple[str, ...] = ()
    charges: int = 1


UNHARMED = Expected()
LOST = Expected(attempt=2, ended=("DISPATCH_LOST",))


async def started(world: RunningScheduler, name: str, folder: Path) -> str:
    """The run's id, also where a fault hits before the answer: equal calls give the same definition and run."""

    async def start() -> str:
        try:
            await world.define(name, {name: {"kind": "faulty.charge"}})
            return await world.start(name, value={"folder": str(folder)}, idempotency_key=name)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return ""

    return await until(start, "start of the run")


async def charged(world: RunningScheduler, folder: Path, point: str, relay: FrameRelay) -> asyncpg.Record:
    """Run one step into the fault that is armed at the point; the step's row, when the run has ended."""
    name = f"at {point}".replace(" ", "-")
    run_id = await started(world, name, folder)
    assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == "succeeded", point
    async with asyncio.timeout(15):
        await relay.fired.wait()
    row = await world.raw.fetchrow("select * from rara.step_state where workflow_run_id = $1::uuid", run_id)
    assert row is not None
    return row


async def is_as_expected(
    world: RunningScheduler, folder: Path, point: str, row: asyncpg.Record, expected: Expected
) -> None:
    attempts = await world.raw.fetch(
        "select * from rara.step_attempt where step_run_id = $1 order by attempt", row["step_run_id"]
    )
    seen = Expected(
        attempt=row["attempt"],
        failures=row["failures"],
        ended=tuple(attempt["reason"] for attempt in attempts),
        charges=len(faulty.notes(folder, row["step_name"], "charges")),
    )
    assert seen == expected, point
    # The ledger of the store has one row, and it is the one that the step's result came from.
    (effect,) = await world.raw.fetch(
        "select * from rara.effect where step_run_id = $1::uuid", row["step_run_id"]
    )
    assert json.loads(effect["result"]) == json.loads(row["output"]), point
    notes = faulty.notes(folder, row["step_name"], "charges")
    assert effect["lease_token"] == int(notes[-1][1]), point
    assert {note[2] for note in notes} == {effect["idempotency_key"]}, point
    tokens = [attempt["lease_token"] for attempt in attempts] + [row["lease_token"]]
    assert tokens == sorted(set(tokens)), point
    events = await world.raw.fetch(
        "select type from rara.step_event where step_run_id = $1::uuid and type = 'succeeded'",
        row["step_run_id"],
    )
    assert len(events) == 1, point


async def test_a_stream_that_is_cut_at_any_frame_costs_nothing(database_url: str, tmp_path: Path) -> None:
    async def cut() -> Then:
        return Then.CUT

    async with (
        running_scheduler(database_url, tmp_path) as world,
        FrameRelay(world.address, tmp_path) as relay,
        running(relay.address, tmp_path, modules=MODULE),
    ):
        for point in POINTS:
            relay.arm(point, cut)
            row = await charged(world, tmp_path, point, relay)
            await is_as_expected(world, tmp_path, point, row, LOST if point == "job" else UNHARMED)


def runners(supervisor: int) -> list[int]:
    found = []
    for child in psutil.Process(supervisor).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "rara_executor.runner_process" in child.cmdline():
                found.append(child.pid)
    return found


async def test_a_runner_that_is_killed_at_any_frame_costs_one_attempt_at_most(
    database_url: str, tmp_path: Path
) -> None:
    async def kill() -> Then:
        killed = runners(os.getpid())
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

        async def reaped() -> bool:
            return not any(map(psutil.pid_exists, killed))

        await until(reaped, "end of the runners")
        return Then.PASS

    crashed = Expected(attempt=2, failures=1, ended=("RUNNER_CRASHED",))
    async with (
        running_scheduler(database_url, tmp_path) as world,
        FrameRelay(world.address, tmp_path) as relay,
        running(relay.address, tmp_path, modules=MODULE),
    ):
        for point in POINTS:
            relay.arm(point, kill)
            row = await charged(world, tmp_path, point, relay)
            # Once it is written the result counts, whatever becomes of who made it.
            harmless = (*NOT_STARTED, "succeeded", "ack succeeded")
            # Before its event is out the effect is not known to have happened. On its way it gets through: it
            # is the supervisor that holds it.
            expected = UNHARMED if point in harmless else crashed
            await is_as_expected(world, tmp_path, point, row, expected)


@dataclass
class Executors:
    """Executors one after the other, of which the newest is there before the oldest is killed."""

    start: Callable[[str], Any]
    living: list[Process] = field(default_factory=list)
    count: int = 0

    async def ensure(self, number: int) -> None:
        while len(self.living) < number:
            self.count += 1
            self.living.append(await self.start(f"executor-{self.count}"))


@pytest.mark.parametrize("points", [MAIN_POINTS, pytest.param(OTHER_POINTS, marks=pytest.mark.soak)])
async def test_an_executor_that_is_killed_at_any_frame_costs_one_attempt_at_most(
    database_url: str, tmp_path: Path, points: Sequence[str]
) -> None:
    expired = Expected(attempt=2, failures=1, ended=("LEASE_EXPIRED",))
    by_point = {"job": LOST, "accepted": LOST, "effect": Expected(2, 1, ("LEASE_EXPIRED",), charges=2)}
    async with (
        running_scheduler(database_url, tmp_path) as world,
        FrameRelay(world.address, tmp_path) as relay,
        Processes(tmp_path) as processes,
    ):

        async def start(name: str) -> Process:
            return await spawn_executor(
                processes, relay.address, tmp_path, module=MODULE, name=name, prestart=0
            )

        executors = Executors(start)

        async def kill() -> Then:
            executor = executors.living.pop(0)
            await executor.kill_and_wait()
            return Then.CUT

        await executors.ensure(1)
        for point in points:
            relay.arm(point, kill)
            async with asyncio.TaskGroup() as group:
                step = group.create_task(charged(world, tmp_path, point, relay))
                async with asyncio.timeout(15):
                    await relay.fired.wait()
                await executors.ensure(1)
            row = step.result()
            expected = by_point.get(point, UNHARMED if point == "ack succeeded" else expired)
            await is_as_expected(world, tmp_path, point, row, expected)


@pytest.mark.parametrize("points", [MAIN_POINTS, pytest.param(OTHER_POINTS, marks=pytest.mark.soak)])
async def test_a_scheduler_that_is_killed_at_any_frame_costs_nothing(
    database_url: str, tmp_path: Path, points: Sequence[str]
) -> None:
    async with (
        Processes(tmp_path) as processes,
        # Leases and grants live far longer than a restart takes, so that none ends meanwhile.
        spawned_scheduler(
            processes, database_url, tmp_path, lease_s=12.0, silence_s=3.0, accept_timeout_s=12.0
        ) as scheduler,
        FrameRelay(scheduler.address, tmp_path) as relay,
        running(relay.address, tmp_path, modules=MODULE),
    ):

        async def kill() -> Then:
            await scheduler.restart()
            return Then.CUT

        for point in points:
            relay.arm(point, kill)
            row = await charged(scheduler.world, tmp_path, point, relay)
            expected = LOST if point == "job" else UNHARMED
            await is_as_expected(scheduler.world, tmp_path, point, row, expected)


async def test_attempts_and_backoff_grow_while_the_key_and_the_effect_stay(
    database_url: str, tmp_path: Path
) -> None:
    retry = workflow_pb2.RetryPolicy(
        max_attempts=5, initial_backoff=milliseconds(100), max_backoff=milliseconds(300), backoff_multiplier=2
    )
    async with (
        running_scheduler(database_url, tmp_path, sweep_s=0.1, poll_s=0.1) as world,
        running(world.address, tmp_path, modules=MODULE),
    ):
        world.scheduler._committer._store._jitter = lambda: 0.999  # each wait is as long as it may be
        await world.define("fails", {"fails": {"kind": "faulty.charge_then_fail", "retry": retry}})
        run_id = await world.start("fails", value={"folder": str(tmp_path), "succeed_at": 5})
        await world.until_run(run_id, "succeeded")
        attempts = await world.raw.fetch("select * from rara.step_attempt order by attempt")
        (last,) = await world.raw.fetch("select * from rara.step_state")
    assert [row["attempt"] for row in attempts] == [1, 2, 3, 4]
    assert [(row["reason"], row["spent"]) for row in attempts] == [("TOOL_FAILED", True)] * 4
    assert (last["attempt"], last["failures"], last["state"]) == (5, 4, "succeeded")
    begins = [row["granted_at"] for row in attempts[1:]] + [last["granted_at"]]
    waits = [(begin - row["ended_at"]).total_seconds() for begin, row in zip(begins, attempts, strict=True)]
    assert all(wait >= least for wait, least in zip(waits, (0.09, 0.19, 0.29, 0.29), strict=True)), waits
    assert all(wait < most for wait, most in zip(waits, (1.1, 1.2, 1.3, 1.3), strict=True)), waits
    starts = faulty.notes(tmp_path, "fails", "starts")
    assert [int(note[0]) for note in starts] == [1, 2, 3, 4, 5]
    assert len({note[2] for note in starts}) == 1
    assert [int(note[1]) for note in starts] == sorted({int(note[1]) for note in starts})
    assert len(faulty.notes(tmp_path, "fails", "charges")) == 1
    assert json.loads(last["output"]) == {"charged_by": int(starts[0][1]), "count": 1}


def milliseconds(value: int) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(value)
    return duration
