"""Watches over dropped streams: every change once, in order, whatever happens to the connection."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import grpc
import pytest
from rara.v1 import job_pb2, workflow_pb2
from rara_client import Client, NotFound, Pacing, RaraError, Unavailable
from support.scripted_workflow import CUT, Fault, ScriptedServer, scripted_server

RUN = "0198c2a0-0000-7000-8000-000000000001"
STEP = "0198c2a0-0000-7000-8000-0000000000a1"


async def no_sleep(_seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[Client]:
    async with Client.connect(server.address, pacing=Pacing(sleep=no_sleep)) as connected:
        yield connected


def run_in(state: str) -> workflow_pb2.WorkflowRun:
    number = workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{state}")
    return workflow_pb2.WorkflowRun(
        workflow_run_id=RUN, definition="nightly", definition_version=1, state=number
    )


def step_in(state: str, fraction: float | None = None, *, name: str = "a") -> workflow_pb2.StepRun:
    number = workflow_pb2.StepRunState.Value(f"STEP_RUN_STATE_{state}")
    progress = job_pb2.JobProgress(fraction=fraction) if fraction is not None else None
    return workflow_pb2.StepRun(
        step_run_id=f"{STEP[:-1]}{name}",
        workflow_run_id=RUN,
        step_name=name,
        state=number,
        attempt=1,
        progress=progress,
    )


def shown(updates: Sequence[workflow_pb2.WatchRunResponse]) -> list[str]:
    """Updates as words: `run RUNNING`, `a RUNNING 0.5`, `end`."""
    return [one_shown(update) for update in updates]


def one_shown(update: workflow_pb2.WatchRunResponse) -> str:
    match update.WhichOneof("update"):
        case "run":
            state = workflow_pb2.WorkflowRunState.Name(update.run.state)
            return f"run {state.removeprefix('WORKFLOW_RUN_STATE_')}"
        case "step_run":
            state = workflow_pb2.StepRunState.Name(update.step_run.state).removeprefix("STEP_RUN_STATE_")
            fraction = (
                f" {update.step_run.progress.fraction:g}" if update.step_run.HasField("progress") else ""
            )
            return f"{update.step_run.step_name} {state}{fraction}"
        case other:
            return str(other)


async def watched(client: Client, after: int = 0) -> list[str]:
    return shown([update async for update in client.watch_run(RUN, after)])


def a_finished_run(server: ScriptedServer) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.workflow.put_step(step_in("RUNNING"))
    server.workflow.put_step(step_in("RUNNING", name="b"))
    server.workflow.put_step(step_in("SUCCEEDED"))
    server.workflow.put_step(step_in("SUCCEEDED", name="b"))
    server.workflow.put_run(run_in("SUCCEEDED"))


async def test_a_watch_from_zero_gives_the_snapshot_its_end_and_then_changes(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.workflow.put_step(step_in("RUNNING", 0.5))
    seen: list[str] = []
    async for update in client.watch_run(RUN):
        seen.append(one_shown(update))
        if seen[-1] == "snapshot_end":
            server.workflow.put_step(step_in("SUCCEEDED"))
            server.workflow.put_run(run_in("SUCCEEDED"))
    assert seen == ["run RUNNING", "a RUNNING 0.5", "snapshot_end", "a SUCCEEDED", "run SUCCEEDED"]


@pytest.mark.parametrize("after", range(7))
async def test_a_stream_cut_after_any_message_loses_and_repeats_nothing(
    server: ScriptedServer, client: Client, after: int
) -> None:
    a_finished_run(server)
    server.script.plant("WatchRun", *[Fault(grpc.StatusCode.UNAVAILABLE, after=after)] * 3)
    assert await watched(client, 1) == [
        "a RUNNING",
        "b RUNNING",
        "a SUCCEEDED",
        "b SUCCEEDED",
        "run SUCCEEDED",
    ]


@pytest.mark.parametrize("after", range(5))
async def test_a_stream_cut_within_the_snapshot_begins_it_again_without_repeats(
    server: ScriptedServer, client: Client, after: int
) -> None:
    a_finished_run(server)
    server.script.plant("WatchRun", Fault(grpc.StatusCode.UNAVAILABLE, after=after))
    assert await watched(client) == ["run SUCCEEDED", "a SUCCEEDED", "b SUCCEEDED", "snapshot_end"]


async def test_a_stream_cut_between_two_changes_of_one_revision_gives_both(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.workflow.put_step(step_in("RUNNING"))
    server.workflow.put_step(step_in("RUNNING", name="b"), is_same_revision=True)
    server.workflow.put_run(run_in("SUCCEEDED"))
    server.script.plant("WatchRun", Fault(grpc.StatusCode.UNAVAILABLE, after=1))
    assert await watched(client, 1) == ["a RUNNING", "b RUNNING", "run SUCCEEDED"]


@pytest.mark.parametrize(
    "status",
    [grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN],
    ids=lambda s: s.name,
)
async def test_a_reset_is_survived_under_any_of_its_names(
    server: ScriptedServer, client: Client, status: grpc.StatusCode
) -> None:
    a_finished_run(server)
    server.script.plant("WatchRun", Fault(status, after=2))
    assert len(await watched(client, 1)) == 5


async def test_compacted_revisions_are_answered_with_a_snapshot(
    server: ScriptedServer, client: Client
) -> None:
    a_finished_run(server)
    server.workflow.compacted_before = 4
    assert await watched(client, 2) == ["run SUCCEEDED", "a SUCCEEDED", "b SUCCEEDED", "snapshot_end"]
    assert [request.after_revision for request in server.script.requests("WatchRun")] == [2, 0]


async def test_a_stream_that_ends_well_too_early_is_opened_again(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.script.plant("WatchRun", Fault(grpc.StatusCode.OK, after=1))
    seen: list[str] = []
    async for update in client.watch_run(RUN):
        seen.append(one_shown(update))
        if seen[-1] == "snapshot_end":
            server.workflow.put_run(run_in("CANCELLED"))
    assert seen == ["run RUNNING", "snapshot_end", "run CANCELLED"]


async def test_a_fault_that_retrying_cannot_mend_ends_the_watch_at_once(
    server: ScriptedServer, client: Client
) -> None:
    with pytest.raises(NotFound):
        await watched(client)
    server.workflow.put_run(run_in("RUNNING"))
    server.script.plant("WatchRun", Fault(grpc.StatusCode.INTERNAL, "INTERNAL", "log 17"))
    with pytest.raises(RaraError, match="log 17"):
        await watched(client)
    assert len(server.script.requests("WatchRun")) == 2


async def test_a_scheduler_never_heard_is_given_up_after_five_repeats(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.script.plant("WatchRun", *[CUT] * 6)
    with pytest.raises(Unavailable):
        await watched(client)
    assert len(server.script.requests("WatchRun")) == 6


async def test_a_scheduler_heard_before_is_given_up_after_the_time_to_resume(server: ScriptedServer) -> None:
    now = [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds
        await asyncio.sleep(0)

    pacing = Pacing(sleep=sleep, clock=lambda: now[0], jitter=lambda: 1.0, resume_within_s=30.0)
    server.workflow.put_run(run_in("RUNNING"))
    server.script.plant("WatchRun", Fault(grpc.StatusCode.UNAVAILABLE, after=1), *[CUT] * 100)
    async with Client.connect(server.address, pacing=pacing) as client:
        with pytest.raises(Unavailable):
            await watched(client)
    assert 25.0 <= now[0] <= 30.0


async def test_a_silent_stream_is_replaced(server: ScriptedServer) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    pacing = Pacing(sleep=no_sleep, silence_s=0.2)
    seen: list[str] = []
    async with (
        Client.connect(server.address, pacing=pacing) as client,
        aclosing(client.watch_run(RUN)) as updates,
    ):
        async for update in updates:
            seen.append(one_shown(update))
            if seen[-1] == "snapshot_end":
                break
        nothing = asyncio.create_task(anext(updates))
        async with asyncio.timeout(10):
            while len(server.script.requests("WatchRun")) < 3:
                await asyncio.sleep(0.01)
        server.workflow.put_run(run_in("SUCCEEDED"))
        assert one_shown(await nothing) == "run SUCCEEDED"


async def test_wait_run_returns_the_run_that_has_ended_and_times_out_on_one_that_has_not(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    with pytest.raises(TimeoutError):
        await client.wait_run(RUN, 0.1)
    server.workflow.put_run(run_in("FAILED"))
    assert (await client.wait_run(RUN, 10)).state == workflow_pb2.WORKFLOW_RUN_STATE_FAILED


def event(sequence: int, attempt: int = 1) -> job_pb2.ProgressEvent:
    lease = job_pb2.Lease(step_run_id=f"{STEP[:-1]}a", lease_token=7, attempt=attempt)
    return job_pb2.ProgressEvent(lease=lease, sequence=sequence, progress=job_pb2.JobProgress(fraction=0.1))


async def sequences(client: Client, **where: int) -> list[int]:
    updates = client.watch_step_run(f"{STEP[:-1]}a", **where)
    return [update.event.sequence async for update in updates if update.WhichOneof("update") == "event"]


@pytest.mark.parametrize("after", range(6))
async def test_events_come_once_and_in_order_over_a_cut_stream(
    server: ScriptedServer, client: Client, after: int
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.workflow.put_step(step_in("SUCCEEDED"))
    for sequence in range(1, 6):
        server.workflow.put_event(event(sequence))
    server.script.plant("WatchStepRun", Fault(grpc.StatusCode.UNAVAILABLE, after=after))
    assert await sequences(client) == [1, 2, 3, 4, 5]


async def test_events_after_a_gap_are_not_repeated_and_a_late_one_is_not_missed(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.workflow.put_step(step_in("RUNNING"))
    for sequence in (1, 2, 4, 5):
        server.workflow.put_event(event(sequence))
    server.script.plant("WatchStepRun", Fault(grpc.StatusCode.UNAVAILABLE, after=4))
    seen: list[int] = []
    async for update in client.watch_step_run(f"{STEP[:-1]}a"):
        if update.WhichOneof("update") == "event":
            seen.append(update.event.sequence)
        if seen == [1, 2, 4, 5]:
            server.workflow.put_event(event(3))
            server.workflow.put_step(step_in("SUCCEEDED"))
    assert seen == [1, 2, 4, 5, 3]
    assert [request.after_sequence for request in server.script.requests("WatchStepRun")] == [0, 2]


async def test_a_resumed_watch_of_the_newest_attempt_stays_with_the_attempt_it_began(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    step = step_in("RUNNING")
    server.workflow.put_step(step)
    for sequence in (1, 2, 3):
        server.workflow.put_event(event(sequence))
    server.script.plant("WatchStepRun", Fault(grpc.StatusCode.UNAVAILABLE, after=2))
    seen: list[tuple[int, int]] = []
    async for update in client.watch_step_run(step.step_run_id):
        if update.WhichOneof("update") != "event":
            continue
        seen.append((update.event.lease.attempt, update.event.sequence))
        if len(seen) == 2:
            second = step_in("RUNNING")
            second.attempt = 2
            server.workflow.put_step(second)
            server.workflow.put_event(event(1, attempt=2))
    assert seen == [(1, 1), (1, 2), (1, 3)]
    assert [request.attempt for request in server.script.requests("WatchStepRun")] == [0, 1]


async def test_events_can_be_read_from_any_number_on(server: ScriptedServer, client: Client) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    server.workflow.put_step(step_in("SUCCEEDED"))
    for sequence in range(1, 6):
        server.workflow.put_event(event(sequence))
    assert await sequences(client, attempt=1, after_sequence=3) == [4, 5]


async def test_the_watch_of_an_attempt_that_was_never_taken_up_ends_with_it(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(run_in("RUNNING"))
    lost = step_in("RETRYABLE_FAILED")
    lost.reason = "DISPATCH_LOST"
    server.workflow.put_step(lost)
    updates = [update async for update in client.watch_step_run(lost.step_run_id)]
    assert [update.step_run.reason for update in updates] == ["DISPATCH_LOST"]
    assert len(server.script.requests("WatchStepRun")) == 1


def many(states: Sequence[str], server: ScriptedServer) -> list[str]:
    """Runs in these states; their ids."""
    runs = []
    for number, state in enumerate(states):
        run = run_in(state)
        run.workflow_run_id = f"{RUN[:-1]}{number:x}"
        server.workflow.put_run(run)
        runs.append(run.workflow_run_id)
    return runs


async def test_ends_of_many_runs_go_on_over_cut_streams_and_each_comes_once(
    server: ScriptedServer, client: Client
) -> None:
    runs = many(["SUCCEEDED"] * 5 + ["RUNNING"], server)
    server.script.plant("WatchRuns", Fault(grpc.StatusCode.UNAVAILABLE, after=2), CUT)
    async with asyncio.timeout(20), aclosing(client.watch_runs([*runs, *runs[:2]])) as ends:
        found = [(await anext(ends)).workflow_run_id for _ in range(5)]
        assert found == runs[:5]
        last = run_in("FAILED")
        last.workflow_run_id = runs[5]
        server.workflow.put_run(last)
        assert (await anext(ends)).run == last
        with pytest.raises(StopAsyncIteration):
            await anext(ends)
    asked = [list(request.workflow_run_ids) for request in server.script.requests("WatchRuns request")]
    assert runs[2:] in asked  # what was told is not asked for again
    assert len(server.script.requests("WatchRuns")) == 3


async def test_a_wait_for_runs_gives_up_after_its_time_and_on_what_cannot_be_mended(
    server: ScriptedServer, client: Client
) -> None:
    runs = many(["SUCCEEDED", "RUNNING"], server)
    with pytest.raises(TimeoutError):
        await client.wait_runs(runs, timeout_s=0.2)
    server.script.plant("WatchRuns", Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"))
    with pytest.raises(RaraError, match="planted") as refused:
        await client.wait_runs(runs)
    assert refused.value.reason == "QUEUE_FULL"
    server.script.plant("WatchRuns", *[CUT] * 6)
    with pytest.raises(Unavailable):
        await client.wait_runs(runs)
    with pytest.raises(NotFound):
        await client.wait_runs([f"{RUN[:-1]}f"])
