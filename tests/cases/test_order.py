"""The order of events: gaps are recorded and never waited for; what a killed attempt said last is what is kept."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from rara.v1 import dispatch_pb2, job_pb2
from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.job_events import accepted, cancelled, failed, json_payload, progress, running, succeeded
from rara_testing.processes import Processes
from rara_testing.scripted_executor import ScriptedExecutor
from support.executor_process import notes, start_executor
from support.running_scheduler import KIND, LEASE_S, RunningScheduler, beating, running_scheduler, until

COUNT = "case.count"


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def stored(world: RunningScheduler, attempt: int) -> list[job_pb2.ProgressEvent]:
    """The history of one attempt, in order."""
    rows = await world.raw.fetch(
        "select sequence, body from rara.step_event where attempt = $1 order by sequence", attempt
    )
    events = [job_pb2.ProgressEvent.FromString(row["body"]) for row in rows]
    for row, event in zip(rows, events, strict=True):
        event.sequence = row["sequence"]
    return events


ENDS: dict[str, tuple[Callable[[job_pb2.Lease], job_pb2.ProgressEvent], tuple[str, str, int]]] = {
    "succeeded": (lambda lease: succeeded(lease, 5, output={"n": 1}), ("succeeded", "", 0)),
    "failed for good": (
        lambda lease: failed(lease, 5, code="NO_SUCH_ROW", retryable=False),
        ("terminal_failed", "NO_SUCH_ROW", 1),
    ),
    "failed for now": (lambda lease: failed(lease, 5), ("retryable_failed", "HANDLER_FAILED", 1)),
    "given back": (
        lambda lease: cancelled(lease, 5, reason="EXECUTOR_SHUTDOWN"),
        ("retryable_failed", "EXECUTOR_SHUTDOWN", 0),
    ),
}


@pytest.mark.case("ORDER-1", "S06")
@pytest.mark.parametrize("end", ENDS)
async def test_a_terminal_event_is_applied_at_once_over_a_gap_and_a_late_one_changes_nothing(
    world: RunningScheduler, end: str
) -> None:
    make, expected = ENDS[end]
    await world.define("one", {"a": {"retry": {"initial_backoff": {"seconds": 600}}}})
    await world.start("one")
    async with world.executor() as executor:
        lease = (await executor.expect_job()).lease
        await executor.events(accepted(lease), running(lease), progress(lease, 3))
        await executor.expect_ack(lease, 3)
        sent_at = time.monotonic()
        await executor.events(make(lease))
        ack = await executor.expect_ack(lease, 5)
        assert time.monotonic() - sent_at < 1.0
        assert list(ack.missing) == [4]
        row = await world.step(lease.step_run_id)
        assert (row["state"], row["reason"], row["failures"]) == expected
        table = "rara.step_attempt" if row["state"] == "retryable_failed" else "rara.result"
        facts = f"select last_sequence, gaps, lease_token from {table}"
        assert [tuple(r) for r in await world.raw.fetch(facts)] == [(5, 1, lease.lease_token)]
        history = await stored(world, 1)

        await executor.events(progress(lease, 4))
        assert await executor.outcome_of(lease, 4) in ("", "refused:LEASE_LOST")
        assert await world.step(lease.step_run_id) == row
        assert [tuple(r) for r in await world.raw.fetch(facts)] == [(5, 1, lease.lease_token)]
        assert [e.sequence for e in history] == [1, 2, 3, 5]
        assert [e.sequence for e in await stored(world, 1)] in ([1, 2, 3, 5], [1, 2, 3, 4, 5])


@pytest.mark.case("ORDER-1", "S06")
async def test_a_stream_cut_within_the_events_goes_on_with_the_end_alone(world: RunningScheduler) -> None:
    """What was under way is lost, and the executor resends from 5 on."""
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    host, _, port = world.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy, ScriptedExecutor() as first:
        await first.connect(proxy.address)
        await first.hello([KIND])
        await first.expect("welcome")
        await first.heartbeat()
        await first.credit(1)
        lease = (await first.expect_job()).lease
        await first.events(accepted(lease), running(lease), progress(lease, 3))
        await first.expect_ack(lease, 3)
        proxy.cut_at(b"the fourth", Direction.TO_SERVER)
        await first.events(progress(lease, 4, message="the fourth"))
        async with asyncio.timeout(10):
            await proxy.triggered.wait()
        held = dispatch_pb2.HeldJob(lease=lease, last_sequence=5, acked_sequence=3, finished=True)
        async with world.executor(executor_id=first.executor_id, held_jobs=[held]) as second:
            (welcome,) = second.all("welcome")
            assert [(ack.sequence, list(ack.missing)) for ack in welcome.acks.acks] == [(3, [])]
            sent_at = time.monotonic()
            await second.events(succeeded(lease, 5))
            assert list((await second.expect_ack(lease, 5)).missing) == [4]
            assert await world.run_state(run_id) == "succeeded"
            assert time.monotonic() - sent_at < 1.0
    (row,) = await world.raw.fetch("select state, attempt, last_sequence, gaps from rara.result")
    assert tuple(row) == ("succeeded", 1, 5, 1)


@pytest.mark.case("ORDER-2", "S06")
async def test_what_a_killed_attempt_said_last_is_kept_and_handed_on(
    world: RunningScheduler, tmp_path: Path
) -> None:
    async with Processes(tmp_path / "processes") as processes:
        first = await start_executor(processes, world.address, tmp_path)
        await world.define("one", {"a": {"kind": COUNT}})
        run_id = await world.start("one", value={"folder": str(tmp_path)})

        async def counted() -> bool:
            return bool(notes(tmp_path, "counted"))

        await until(counted, "the hundredth progress")
        await first.kill_and_wait()
        killed_at = time.monotonic()
        second = await start_executor(processes, world.address, tmp_path, name="exec-2")
        await world.until_run(run_id, "succeeded")
        assert time.monotonic() - killed_at < LEASE_S + 5.0
        assert second.returncode is None

    counts = [e.progress for e in await stored(world, 1) if e.HasField("progress")]
    newest = counts[-1]
    assert newest.message == f"{round(newest.fraction * 100)} of 100"
    kept = round(newest.fraction * 100)
    assert kept >= 75
    fractions = [one.fraction for one in counts]
    assert fractions == sorted(set(fractions))  # merged ones are left out, none comes twice or late
    # Attempt 2 was given the newest checkpoint that is stored, and its numbers begin again.
    result = await world.raw.fetchrow("select attempt, failures, output from rara.result")
    assert result is not None
    assert (result["attempt"], result["failures"]) == (2, 1)
    assert result["output"] == json_payload({"done": kept}).data
    assert [event.sequence for event in await stored(world, 2)] == [1, 2, 3, 4]
    assert len(await stored(world, 1)) == 2 + len(counts)


@pytest.mark.case("ORDER-2")
async def test_the_newest_of_many_checkpoints_in_one_batch_is_the_one_handed_on(
    world: RunningScheduler,
) -> None:
    """Whatever the order of arrival, and also where the newest came without a checkpoint of its own."""
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor(credit=2, beat=False) as executor:
        tokens: list[int] = []
        async with beating(executor, lambda: tokens):
            lease = (await executor.expect_job()).lease
            await executor.events(accepted(lease), running(lease))
            await executor.expect_ack(lease, 2)
            batch = [progress(lease, n, checkpoint=json_payload({"n": n})) for n in range(3, 40)]
            await executor.events(batch[-1], *batch[:-1], progress(lease, 40, message="no checkpoint"))
            await executor.expect_ack(lease, 40)
            await executor.events(failed(lease, 41))
            again = await executor.expect_job()
            assert again.lease.attempt == 2
            assert again.checkpoint == json_payload({"n": 39})
            # A straggler of attempt 1 does not bring its checkpoint back over attempt 2's.
            await executor.events(accepted(again.lease), running(again.lease))
            await executor.events(progress(again.lease, 3, checkpoint=json_payload({"n": 100})))
            await executor.expect_ack(again.lease, 3)
            await executor.events(progress(lease, 42, checkpoint=json_payload({"n": 42})))
            assert (await executor.expect_refusal(lease, 42)).code == "LEASE_LOST"
            assert (
                await world.raw.fetchval("select data from rara.checkpoint") == json_payload({"n": 100}).data
            )
