"""Pausing and resuming as operators do it: on two schedulers, over restarts, and by the command as a process."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest_asyncio
from rara.v1 import job_pb2
from rara.v1 import workflow_pb2 as wf
from rara_testing import job_events
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor
from support.api_errors import refusal
from support.bearers import make_token
from support.command_line import Ended, ended, rara_process
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        for name in ("held", "free"):
            await opened.define(name, {"a": {}})
        yield opened


async def pause(world: RunningScheduler, **target: Any) -> wf.PauseResponse:
    response: wf.PauseResponse = await world.workflows.Pause(wf.PauseRequest(**target), timeout=WAIT_S)
    return response


async def resume(world: RunningScheduler, **target: Any) -> wf.ResumeResponse:
    response: wf.ResumeResponse = await world.workflows.Resume(wf.ResumeRequest(**target), timeout=WAIT_S)
    return response


async def pauses(world: RunningScheduler) -> list[wf.Pause]:
    return list((await world.workflows.ListPauses(wf.ListPausesRequest(), timeout=WAIT_S)).pauses)


async def step_of(world: RunningScheduler, run_id: str) -> str:
    return str(
        await world.raw.fetchval(
            "select step_run_id from rara.step_run where workflow_run_id = $1::uuid", run_id
        )
    )


async def explained(world: RunningScheduler, run_id: str) -> list[wf.Obstacle]:
    request = wf.ExplainStepRequest(step_run_id=await step_of(world, run_id))
    return list((await world.workflows.ExplainStep(request, timeout=WAIT_S)).obstacles)


async def runs_next(executor: ScriptedExecutor, run_id: str, credit: int) -> None:
    """The executor, given one slot more, gets the run's step, and finishes it."""
    await executor.credit(credit)
    job = await executor.expect_job()
    assert job.workflow_run_id == run_id
    await succeed(executor, job)


async def succeed(executor: ScriptedExecutor, job: job_pb2.JobRequest) -> None:
    lease = job.lease
    await executor.events(
        job_events.accepted(lease), job_events.running(lease), job_events.succeeded(lease, 3)
    )
    await executor.expect_ack(lease, 3)


async def knows(other: RunningScheduler, *definitions: str) -> None:
    async def look() -> bool:
        return other.scheduler.paused_definitions == frozenset(definitions)

    await until(look, f"other scheduler that knows of {definitions}")


async def test_a_paused_definition_is_leased_by_no_scheduler_and_what_runs_goes_on(
    world: RunningScheduler, database_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(
            running_scheduler(database_url, tmp_path, check_history=False)
        )
        here = await stack.enter_async_context(world.executor())
        there = await stack.enter_async_context(other.executor(credit=0))
        started = await world.start("held")
        job = await here.expect_job()
        answer = await pause(world, definition="held", reason="bad input")
        assert (answer.already_paused, answer.pause.definition, answer.pause.reason) == (
            False,
            "held",
            "bad input",
        )
        assert (await pause(world, definition="held", reason="again")).pause == answer.pause
        held = [await world.start("held") for _ in range(3)]  # runs start, and wait
        free = [await world.start("free") for _ in range(2)]
        await succeed(here, job)
        await world.until_run(started, "succeeded")
        await runs_next(here, free[0], 2)
        await knows(other, "held")
        await runs_next(there, free[1], 1)

        async def all_held() -> bool:
            return [p.steps_held for p in await pauses(other)] == [3]

        await until(all_held, "pause that holds three steps")
        (obstacle,) = await explained(other, held[0])
        assert (obstacle.code, obstacle.pause) == ("PAUSED", answer.pause)
        assert obstacle.message.endswith("Z: bad input")
        definition = await other.workflows.GetDefinition(wf.GetDefinitionRequest(definition="held"))
        assert definition.definition.pause == answer.pause
        await world.cancel(held[1])
        await world.until_run(held[1], "cancelled")
        assert (await resume(other, definition="held")).pause == answer.pause
        await runs_next(there, held[0], 2)
        await runs_next(there, held[2], 3)
        assert await pauses(world) == []
        assert not (await resume(other, definition="held")).HasField("pause")


async def test_what_is_behind_a_crowd_of_a_paused_definition_runs_and_the_crowd_after_it(
    world: RunningScheduler,
) -> None:
    batch = wf.BatchStartRunsRequest(requests=[wf.StartRunRequest(definition="held")] * 1000)
    crowd: list[str] = []
    for _ in range(3):
        answer: wf.BatchStartRunsResponse = await world.workflows.BatchStartRuns(batch, timeout=60)
        crowd += [run.workflow_run_id for run in answer.runs]
    behind = await world.start("free")
    await pause(world, definition="held")
    async with world.executor(credit=0) as executor:
        await runs_next(executor, behind, 1)

        async def all_aside() -> bool:
            return [p.steps_held for p in await pauses(world)] == [3000]

        await until(all_aside, "pause that holds the crowd", 60)
        await resume(world, definition="held")
        for number in range(3):
            await runs_next(executor, crowd[number], number + 2)  # in the order in which they came

        async def all_back() -> bool:
            return bool(await world.raw.fetchval("select count(*) from rara.pause") == 0)

        await until(all_back, "end of the pause's row", 60)
        assert await world.raw.fetchval("select count(*) from rara.ready where route_id < 0") == 0


async def test_a_paused_kind_survives_a_restart_and_spares_other_kinds(
    database_url: str, tmp_path: Path
) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("two", {"a": {}, "b": {"kind": "other.do"}}, on_failure="CONTINUE")
        await pause(world, kind=KIND, reason="maintenance")
        run_id = await world.start("two")
    async with (
        running_scheduler(database_url, tmp_path) as world,
        world.executor([KIND, "other.do"], credit=2) as executor,
    ):
        job = await executor.expect_job()
        assert job.step_name == "b"
        await succeed(executor, job)
        (shown,) = await pauses(world)
        assert (shown.kind, shown.reason, shown.steps_held, shown.steps_in_flight) == (
            KIND,
            "maintenance",
            1,
            0,
        )
        await resume(world, kind=KIND)
        job = await executor.expect_job()
        assert job.step_name == "a"
        await succeed(executor, job)
        await world.until_run(run_id, "succeeded")


async def test_what_cannot_be_paused_is_told_clearly(world: RunningScheduler) -> None:
    for request, reason, says in (
        (wf.PauseRequest(), "FIELD_INVALID", "name a kind or a definition"),
        (wf.PauseRequest(kind="work.*"), "FIELD_INVALID", "is a pattern"),
        (wf.PauseRequest(definition="A B"), "FIELD_INVALID", "lower-case letters"),
        (wf.PauseRequest(kind=KIND, reason="x" * 501), "FIELD_INVALID", "at most 500 characters"),
        (wf.PauseRequest(kind="work.dp"), "KIND_NOT_FOUND", "did you mean work.do?"),
        (wf.PauseRequest(definition="hold"), "DEFINITION_NOT_FOUND", "did you mean held?"),
    ):
        refused = await refusal(world.workflows.Pause(request, timeout=WAIT_S))
        assert refused.reason == reason
        assert says in refused.message
    assert await pauses(world) == []


async def test_a_name_that_is_not_known_yet_can_be_paused_on_purpose(world: RunningScheduler) -> None:
    assert not (await pause(world, kind="later.do", allow_unknown=True)).already_paused
    assert (await pause(world, kind="later.do")).already_paused
    assert (await resume(world, kind="later.do")).HasField("pause")
    refused = await refusal(world.workflows.Resume(wf.ResumeRequest(kind="later.do"), timeout=WAIT_S))
    assert (refused.status, refused.reason) == (grpc.StatusCode.NOT_FOUND, "KIND_NOT_FOUND")


async def test_the_command_pauses_shows_and_resumes(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("held", {"a": {}})
        run_id = await world.start("held")
        async with running_scheduler(database_url, tmp_path, auth="tokens", check_history=False) as guarded:
            token = await make_token(world.raw, "operator", name="ops")
            env = {"RARA_SERVER": guarded.address, "RARA_TOKEN": token}

            # As processes: what schedulers log in this one would be among what it prints.
            async def rara(*arguments: str) -> Ended:
                return await ended(await rara_process(*arguments, env=env))

            paused = await rara("definition", "pause", "held", "--reason", "bad input")
            assert (paused.code, paused.lines) == (0, ["definition held is paused"])
            assert "rara definition resume held" in paused.err
            again = await rara("definition", "pause", "held")
            assert again.out.endswith("by ops: bad input\n")

            async def one_held() -> bool:
                return [p.steps_held for p in await pauses(world)] == [1]

            await until(one_held, "pause that holds a step")
            (row,) = (await rara("pause", "list", "-o", "json")).json
            assert (row["definition"], row["paused_by"], row["reason"], row["steps_held"]) == (
                "held",
                "ops",
                "bad input",
                1,
            )
            why = await rara("why", f"{run_id}/a")
            assert "1. PAUSED: definition held is paused since" in why.out
            resumed = await rara("definition", "resume", "held")
            assert resumed.out.startswith("definition held is resumed; paused ")
            assert (await rara("definition", "resume", "held")).lines == ["definition held was not paused"]
            unknown = await rara("kind", "pause", "work.dp")
            assert (unknown.code, "did you mean work.do?" in unknown.err) == (3, True), unknown.err
            assert (await rara("pause", "list")).err == "nothing is paused\n"
