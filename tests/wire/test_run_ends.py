"""Many runs on one stream: ended before or after they were added, unknown, elsewhere, and over a restart."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_client import Client, NotFound, RunEnd
from rara_client.cursors import RUN_ENDED
from rara_scheduler import run_ends
from rara_testing.auto_executor import AutoExecutor, AutoJob
from rara_testing.scripted_executor import WAIT_S
from support.api_errors import refusal
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until

S = workflow_pb2
NOBODY = "0198c2a0-0000-7000-8000-000000000001"


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        await opened.define("one", {"a": {}})
        yield opened


async def done(job: AutoJob) -> object:
    return {}


async def start_many(world: RunningScheduler, count: int) -> list[str]:
    started: list[str] = []
    while len(started) < count:
        size = min(1000, count - len(started))
        answer = await world.workflows.BatchStartRuns(
            S.BatchStartRunsRequest(requests=[S.StartRunRequest(definition="one")] * size), timeout=WAIT_S
        )
        started += [run.workflow_run_id for run in answer.runs]
    return started


async def end_all(world: RunningScheduler) -> None:
    """As another scheduler would: in the database alone."""
    await world.raw.execute("""
        with over as (
            delete from rara.ready returning step_run_id, workflow_run_id, released_at
        ), closed as (
            insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures,
                                     released_at, ended_at)
            select step_run_id, workflow_run_id, 'cancelled', 'CANCELLED', 2, 0, 0, released_at, now() from over
        )
        update rara.workflow_run w
           set state = 'cancelled', steps_cancelled = 1, ended_at = now(), cancel_requested_at = now(),
               cancel_reason = 'CANCELLED', revision = revision + 1
          from over
         where over.workflow_run_id = w.workflow_run_id""")


async def told(ends: Any, count: int) -> list[RunEnd]:
    async with asyncio.timeout(WAIT_S):
        return [await anext(ends) for _ in range(count)]


async def test_runs_are_told_as_they_end_and_those_that_had_ended_at_once(world: RunningScheduler) -> None:
    early = await start_many(world, 3)
    async with AutoExecutor(world.address, {KIND: done}, slots=20), Client.connect(world.address) as client:
        for run_id in early:
            await world.until_run(run_id, "succeeded")
        more: asyncio.Queue[str] = asyncio.Queue()

        async def ids() -> AsyncIterator[str]:
            for run_id in early:
                yield run_id.upper()
            while True:
                yield await more.get()

        async with aclosing(client.watch_runs(ids())) as ends:
            assert {end.workflow_run_id for end in await told(ends, 3)} == set(early)
            late = await start_many(world, 50)
            for run_id in [*late, NOBODY, "no-uuid", late[0]]:
                more.put_nowait(run_id)
            found = {end.workflow_run_id: end.run for end in await told(ends, 52)}
    assert {name for name, run in found.items() if run is None} == {NOBODY, "no-uuid"}
    assert {name for name, run in found.items() if run is not None} == set(late)
    for run in found.values():
        if run is not None:
            assert (run.state, run.definition) == (S.WORKFLOW_RUN_STATE_SUCCEEDED, "one")
            assert dict(run.step_counts) == {"succeeded": 1}
            assert run.HasField("ended_at")


async def test_five_thousand_runs_on_one_stream_ended_by_another_scheduler(world: RunningScheduler) -> None:
    started = await start_many(world, 5000)
    async with Client.connect(world.address) as client:
        async with asyncio.timeout(WAIT_S):
            waiting = asyncio.create_task(client.wait_runs(started))
            await asyncio.sleep(0)
            await end_all(world)
            runs = await waiting
        assert [run.workflow_run_id for run in runs] == started
        assert {run.state for run in runs} <= RUN_ENDED
        with pytest.raises(NotFound):
            await client.wait_runs([started[0], NOBODY])
        assert await client.wait_runs([]) == []


async def test_a_stream_ends_well_when_its_caller_has_closed_and_all_was_told(
    world: RunningScheduler,
) -> None:
    [run_id] = await start_many(world, 1)
    call = world.workflows.WatchRuns(timeout=WAIT_S)
    await call.write(S.WatchRunsRequest(workflow_run_ids=[run_id]))
    await call.done_writing()
    await world.cancel(run_id)
    [response] = [each async for each in call]
    assert [run.workflow_run_id for run in response.ended] == [run_id]
    assert await call.code() is grpc.StatusCode.OK
    # Added again, it is told again; where nothing is asked, nothing is waited for.
    again = world.workflows.WatchRuns(
        iter([S.WatchRunsRequest(workflow_run_ids=[run_id, run_id])]), timeout=WAIT_S
    )
    assert [len(each.ended) async for each in again] == [1]
    nothing = world.workflows.WatchRuns(iter([S.WatchRunsRequest()]), timeout=WAIT_S)
    assert [each async for each in nothing] == []


async def test_what_cannot_be_waited_for_is_refused(world: RunningScheduler) -> None:
    for ids, field, says in (
        ([NOBODY] * 1001, "workflow_run_ids", "at most 1000 in a message"),
        ([NOBODY, ""], "workflow_run_ids[1]", "is empty"),
        (["x" * 65], "workflow_run_ids[0]", "at most 64"),
    ):
        refused = await ended_by(world, ids)
        assert (refused.status, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
        assert refused.fields == [field]
        assert says in refused.message


async def ended_by(world: RunningScheduler, ids: list[str]) -> Any:
    """How a stream ends that asks for these, and goes on."""
    call = world.workflows.WatchRuns(timeout=WAIT_S)
    for begin in range(0, len(ids), 1001):
        await call.write(S.WatchRunsRequest(workflow_run_ids=ids[begin : begin + 1001]))

    async def answers() -> list[Any]:
        return [each async for each in call]

    return await refusal(answers())


async def test_a_stream_and_a_scheduler_wait_for_so_many(
    world: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = world.scheduler._run_ends
    monkeypatch.setattr(ends, "_max_untold", 5)
    monkeypatch.setattr(ends, "_max_untold_in_all", 6)
    monkeypatch.setattr(ends, "_max_streams", 2)
    open_runs = await start_many(world, 6)
    refused = await ended_by(world, open_runs)
    assert (refused.status, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert (refused.fields, refused.metadata["limit"]) == (["workflow_run_ids"], "5")
    first = world.workflows.WatchRuns(timeout=WAIT_S)
    await first.write(S.WatchRunsRequest(workflow_run_ids=open_runs[:5]))
    await until(lambda: _is(len(ends._awaited) == 5), "such a state")
    assert (await ended_by(world, open_runs[:2])).metadata["limit"] == "6"
    second = world.workflows.WatchRuns(timeout=WAIT_S)
    await second.write(S.WatchRunsRequest(workflow_run_ids=open_runs[:1]))
    await until(lambda: _is(len(ends._streams) == 2), "such a state")
    assert (await ended_by(world, open_runs[:1])).metadata["limit"] == "2"
    for call in (first, second):
        call.cancel()
    await until(lambda: _is(not ends._streams and not ends._awaited and not ends._new), "such a state")
    # The client keeps to the limit by itself.
    async with Client.connect(world.address) as client:
        waiting = asyncio.create_task(_all(client, open_runs, max_untold=2))
        for run_id in open_runs:
            await world.cancel(run_id)
        async with asyncio.timeout(WAIT_S):
            assert {end.workflow_run_id for end in await waiting} == set(open_runs)


async def _is(value: bool) -> bool:
    return value


async def _all(client: Client, ids: Any, **more: Any) -> list[RunEnd]:
    return [end async for end in client.watch_runs(ids, **more)]


async def test_a_slow_reader_makes_nothing_pile_up_but_ids(
    world: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    lean_runs = world.scheduler._run_ends.store.lean_runs

    async def counted(ids: list[str]) -> Any:
        reads.append(len(ids))
        return await lean_runs(ids)

    monkeypatch.setattr(world.scheduler._run_ends.store, "lean_runs", counted)
    labels = {f"label{n}": "x" * 60 for n in range(20)}
    request = S.StartRunRequest(definition="one", labels=labels)
    request.input.data = b'"' + b"x" * 3900 + b'"'
    started: list[str] = []
    for _ in range(4):
        answer = await world.workflows.BatchStartRuns(
            S.BatchStartRunsRequest(requests=[request] * 250), timeout=WAIT_S
        )
        started += [run.workflow_run_id for run in answer.runs]
    call = world.workflows.WatchRuns(timeout=2 * WAIT_S)
    await call.write(S.WatchRunsRequest(workflow_run_ids=started))
    await call.done_writing()
    await end_all(world)
    await until(lambda: _is(bool(reads)), "such a state")
    before = -1
    while before != len(reads):  # until flow control holds it
        before = len(reads)
        await asyncio.sleep(0.1)
    assert sum(reads) < 1000
    other = await start_many(world, 1)
    await world.cancel(other[0])
    async with Client.connect(world.address) as client, asyncio.timeout(WAIT_S):
        assert len(await client.wait_runs(other)) == 1  # others are not held up
    seen = [run.workflow_run_id async for response in call for run in response.ended]
    assert sorted(seen) == sorted(started)
    assert max(reads) <= run_ends.TOLD_AT_ONCE


async def test_a_client_goes_on_with_what_is_open_over_a_restart(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(database_url, tmp_path) as first:
        await first.define("one", {"a": {}})
        started = await start_many(first, 20)
        client = Client.connect(first.address)
        ends = client.watch_runs(started)
        await first.cancel(started[0])
        [end] = await told(ends, 1)
        assert end.workflow_run_id == started[0]
        call = first.workflows.WatchRuns()
        await call.write(S.WatchRunsRequest(workflow_run_ids=started))
        await until(lambda: _is(len(first.scheduler._run_ends._streams) == 2), "such a state")
        rest = asyncio.create_task(told(ends, 19))

        async def answers() -> list[Any]:
            return [each async for each in call]

        stopped = asyncio.create_task(refusal(answers()))
        first.scheduler.stop()
        refused = await stopped
        assert (refused.status, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert refused.retry_after_s is not None
    async with running_scheduler(database_url, tmp_path, listen=first.address) as second:
        for run_id in started[1:]:
            await second.cancel(run_id)
        assert {end.workflow_run_id for end in await rest} == set(started[1:])
        with pytest.raises(StopAsyncIteration):
            await anext(ends)
        await client.close()


async def test_what_the_caller_s_ids_raise_is_raised(world: RunningScheduler) -> None:
    async def ids() -> AsyncIterator[str]:
        yield str(uuid.uuid4())
        raise ArithmeticError("no more")

    async with Client.connect(world.address) as client:
        with pytest.raises(ArithmeticError, match="no more"):
            await _all(client, ids())
        with pytest.raises(ValueError, match="max_untold must be"):
            await _all(client, [], max_untold=0)
