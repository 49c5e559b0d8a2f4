"""How an executor holds its session: reconnects, resends, and ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from rara.v1 import dispatch_pb2, job_pb2
from rara_executor.app import Executor
from rara_executor.connection import ReplacedError
from rara_testing.fault_proxy import FaultProxy
from rara_testing.scripted_scheduler import ScriptedScheduler, Terms, job
from support.running_executor import running, until


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler(Terms(heartbeat_s=0.1, silence_s=5)) as scheduler:
        yield scheduler


@pytest_asyncio.fixture
async def executor(scheduler: ScriptedScheduler, tmp_path: Path) -> AsyncIterator[Executor]:
    async with running(scheduler.address, tmp_path, grace_s=1) as executor:
        yield executor


KINDS = ["accepted", "running", "progress", "succeeded"]


@pytest.mark.case("S06")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_cut_around_any_event_loses_and_repeats_nothing(
    scheduler: ScriptedScheduler, executor: Executor, tmp_path: Path, kind: str, stored: bool
) -> None:
    """stored: whether the event was committed before the cut and only its ack was lost."""
    cut = False

    def acknowledge(event: job_pb2.ProgressEvent) -> bool:
        nonlocal cut
        if cut or event.WhichOneof("event") != kind:
            return True
        cut = True
        if stored:
            scheduler.stored.setdefault(1, {})[event.sequence] = event
        first.end(grpc.StatusCode.UNAVAILABLE)
        return False

    first = await scheduler.session()
    scheduler.acknowledge = acknowledge
    first.send_jobs(job(1, "demo.wait_for_file", input={"file": str(tmp_path / "go")}))
    if kind == "succeeded":
        await scheduler.event(1, "progress")
        (tmp_path / "go").touch()
    second = await scheduler.session()
    (held,) = second.hello.held_jobs
    assert held.lease.lease_token == 1
    assert held.finished == (kind == "succeeded")
    assert held.last_sequence >= KINDS.index(kind) + 1
    # `running` waits for company: where progress was its company, both acks are lost.
    assert held.acked_sequence in ((1, 2) if kind == "progress" else (KINDS.index(kind),))
    (tmp_path / "go").touch()
    await scheduler.event(1, "succeeded")
    assert scheduler.kinds(1) == KINDS
    resent = [event.WhichOneof("event") for event in second.events]
    assert (kind in resent) is not stored
    await second.frame("heartbeat", lambda beat: 1 not in beat.lease_tokens)


@pytest.mark.parametrize(
    "status", [None, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.PERMISSION_DENIED]
)
async def test_every_end_of_a_call_is_followed_by_a_new_one(
    scheduler: ScriptedScheduler, executor: Executor, status: grpc.StatusCode | None
) -> None:
    first = await scheduler.session()
    started = time.monotonic()
    first.end(status)
    second = await scheduler.session()
    assert time.monotonic() - started < 2
    assert second.hello.executor_id == first.hello.executor_id
    second.send_jobs(job(1, "demo.echo"))
    await scheduler.event(1, "succeeded")


async def test_a_running_job_survives_a_restart_of_the_scheduler(tmp_path: Path) -> None:
    scheduler = ScriptedScheduler(Terms(heartbeat_s=0.1))
    await scheduler.start()
    port = int(scheduler.address.rpartition(":")[2])
    async with running(scheduler.address, tmp_path):
        session = await scheduler.session()
        jobs = [job(token, "demo.wait_for_file", input={"file": str(tmp_path / "go")}) for token in (1, 2, 3)]
        session.send_jobs(*jobs)
        for token in (1, 2, 3):
            await scheduler.event(token, "progress")
        await scheduler.stop()
        (tmp_path / "go").touch()  # they finish while nobody listens
        successor = ScriptedScheduler(Terms(heartbeat_s=0.1), stored=scheduler.stored)
        await successor.start(port)
        session = await successor.session()
        assert {held.lease.lease_token for held in session.hello.held_jobs} == {1, 2, 3}
        for token in (1, 2, 3):
            await successor.event(token, "succeeded")
            assert successor.kinds(token) == KINDS
        await session.frame("credit", lambda credit: credit.limit == 4)
    await successor.stop()


async def test_a_job_that_welcome_does_not_name_or_calls_lost_is_stopped(
    scheduler: ScriptedScheduler, executor: Executor, tmp_path: Path
) -> None:
    first = await scheduler.session()
    for token in (1, 2, 3):
        first.send_jobs(job(token, "demo.ticks", input={"file": str(tmp_path / str(token))}))
        await until((tmp_path / str(token)).exists)
    scheduler.welcome = False
    first.end(grpc.StatusCode.UNAVAILABLE)
    second = await scheduler.session()
    welcome = scheduler._welcome(second.hello)
    del welcome.acks.acks[:]
    welcome.acks.acks.add(lease_token=1, sequence=2)
    welcome.lost_lease_tokens.append(2)
    second.send(welcome=welcome)
    beat = await second.frame("heartbeat", lambda beat: list(beat.lease_tokens) == [1])
    assert beat.number >= 1
    await second.frame("credit", lambda credit: credit.limit == 3)
    sizes = [(tmp_path / name).stat().st_size for name in ("2", "3")]
    await asyncio.sleep(0.1)  # several ticks
    assert [(tmp_path / name).stat().st_size for name in ("2", "3")] == sizes


async def test_a_cancel_in_welcome_is_carried_out(
    scheduler: ScriptedScheduler, executor: Executor, tmp_path: Path
) -> None:
    first = await scheduler.session()
    first.send_jobs(job(1, "demo.wait", input={"file": str(tmp_path / "m")}))
    await until((tmp_path / "m").exists)
    scheduler.welcome = False
    first.end(grpc.StatusCode.UNAVAILABLE)
    second = await scheduler.session()
    welcome = scheduler._welcome(second.hello)
    del welcome.acks.acks[:]
    welcome.cancels.add(lease_token=1, reason="CANCELLED")
    second.send(welcome=welcome)
    await second.frame("cancel_receipts")
    await second.frame("events", lambda batch: batch.events[-1].HasField("cancelled"))


async def test_progress_without_a_session_is_merged_into_the_newest(
    scheduler: ScriptedScheduler, executor: Executor
) -> None:
    first = await scheduler.session()
    scheduler.welcome = False
    first.end(grpc.StatusCode.UNAVAILABLE)
    second = await scheduler.session()  # not welcomed: nothing can be sent
    second.end(grpc.StatusCode.UNAVAILABLE)
    scheduler.welcome = True
    third = await scheduler.session()
    third.send_jobs(job(1, "demo.progress", input={"count": 2000, "checkpoint": True}))
    await scheduler.event(1, "running")
    third.end(grpc.StatusCode.UNAVAILABLE)
    await scheduler.event(1, "succeeded")
    reports = [event.progress for event in scheduler.events(1) if event.HasField("progress")]
    assert reports[-1].message == "2000 of 2000"
    assert reports[-1].checkpoint.data == b'{"done":2000}'
    sequences = [event.sequence for event in scheduler.events(1)]
    assert sequences == list(range(1, len(sequences) + 1))


@pytest.mark.case("ORDER-1", "S06")
async def test_missing_events_are_sent_again_when_asked_for(
    scheduler: ScriptedScheduler, executor: Executor
) -> None:
    session = await scheduler.session()
    dropped: set[int] = set()

    def acknowledge(event: job_pb2.ProgressEvent) -> bool:
        if event.HasField("progress") and event.sequence not in dropped:
            dropped.add(event.sequence)
            return False
        return True

    scheduler.acknowledge = acknowledge
    session.send_jobs(job(1, "demo.progress", input={"count": 3}))
    await scheduler.until(lambda: len(scheduler.events(1)) == 6, "all six")
    assert scheduler.kinds(1) == ["accepted", "running", "progress", "progress", "progress", "succeeded"]
    await session.frame("heartbeat", lambda beat: beat.number > 3 and 1 not in beat.lease_tokens)


async def test_a_full_window_holds_events_back_until_acknowledgements_come(
    tmp_path: Path,
) -> None:
    async with ScriptedScheduler(Terms(event_window=3)) as scheduler, running(scheduler.address, tmp_path):
        session = await scheduler.session()
        scheduler.acknowledge = lambda event: event.HasField("accepted")
        session.send_jobs(*(job(token, "demo.echo") for token in (1, 2, 3, 4)))
        await scheduler.until(
            lambda: len(scheduler.stored) == 4 and len(session.events) == 7, "a full window"
        )
        scheduler.acknowledge = lambda _: True
        for event in session.events:
            scheduler.stored[event.lease.lease_token][event.sequence] = event
        for token in (1, 2, 3, 4):
            session.acknowledge(token, max(scheduler.stored[token]))
        for token in (1, 2, 3, 4):
            await scheduler.event(token, "succeeded")


@pytest.mark.case("S06")
async def test_frames_that_come_twice_change_nothing(
    scheduler: ScriptedScheduler, executor: Executor
) -> None:
    session = await scheduler.session()
    request = job(1, "demo.progress", input={"count": 2})
    for _ in range(2):
        session.send_jobs(request)
    await scheduler.event(1, "succeeded")
    for _ in range(2):
        session.acknowledge(1, 5)
        session.cancel_job(1)
        session.send(heartbeat_ack=dispatch_pb2.HeartbeatAck(number=1, renewed=1, lost_lease_tokens=[1]))
    session.send_jobs(job(2, "demo.echo"))
    await scheduler.event(2, "succeeded")
    assert scheduler.kinds(1) == ["accepted", "running", "progress", "progress", "succeeded"]


async def test_go_away_ends_the_call_after_the_last_acks_and_the_executor_returns(
    scheduler: ScriptedScheduler, executor: Executor, tmp_path: Path
) -> None:
    first = await scheduler.session()
    first.send_jobs(job(1, "demo.wait_for_file", input={"file": str(tmp_path / "go")}))
    await scheduler.event(1, "progress")
    go_away = dispatch_pb2.GoAway(reason="SHUTTING_DOWN")
    go_away.reconnect_after.FromMilliseconds(300)
    started = time.monotonic()
    first.send(go_away=go_away)
    second = await scheduler.session()
    assert time.monotonic() - started >= 0.3
    assert first.ended.is_set()
    assert [held.lease.lease_token for held in second.hello.held_jobs] == [1]
    (tmp_path / "go").touch()
    await scheduler.event(1, "succeeded")


async def test_a_replaced_executor_stops_and_never_comes_back(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async def replaced() -> None:
        async with running(scheduler.address, tmp_path):
            session = await scheduler.session()
            session.send(go_away=dispatch_pb2.GoAway(reason="REPLACED"))
            await scheduler.until(session.ended.is_set, "the end")

    with pytest.raises(ReplacedError):
        await replaced()
    assert len(scheduler.sessions) == 1


async def test_silence_ends_the_call_and_a_new_one_is_opened(tmp_path: Path) -> None:
    terms = Terms(heartbeat_s=0.1, silence_s=0.4)
    async with (
        ScriptedScheduler(terms, beat=False) as scheduler,
        running(scheduler.address, tmp_path) as executor,
    ):
        first = await scheduler.session()
        await first.frame("credit")
        assert executor.is_ready
        second = await scheduler.session()
        assert first.ended.is_set()
        assert len(first.of("heartbeat")) >= 3
        scheduler.beat = True
        await second.frame("heartbeat", lambda beat: beat.number == 4)


async def test_a_swallowed_connection_is_not_used_again(tmp_path: Path) -> None:
    """What a firewall forgot stays open to TCP: a new call on it would hear nothing either."""
    async with (
        ScriptedScheduler(Terms(heartbeat_s=0.1, silence_s=0.4)) as scheduler,
        FaultProxy("127.0.0.1", int(scheduler.address.rpartition(":")[2])) as proxy,
        running(proxy.address, tmp_path) as executor,
    ):
        first = await scheduler.session()
        await first.frame("credit")
        proxy.drop_idle(0.0)
        await until(lambda: not executor.is_ready)
        proxy.resume()
        second = await scheduler.session()
        await second.frame("heartbeat", lambda beat: beat.number == 4)
        await until(lambda: executor.is_ready)


async def test_readiness_follows_the_answers_to_heartbeats(
    scheduler: ScriptedScheduler, executor: Executor
) -> None:
    session = await scheduler.session()
    await session.frame("heartbeat", lambda beat: beat.answered >= 2)
    assert executor.is_ready
    scheduler.beat = False
    await until(lambda: not executor.is_ready)
    scheduler.beat = True
    await until(lambda: executor.is_ready)


async def test_unknown_frames_are_passed_over(scheduler: ScriptedScheduler, executor: Executor) -> None:
    session = await scheduler.session()
    unknown: Any = dispatch_pb2.ConnectResponse()
    unknown.MergeFromString(b"\xfa\x06\x01x")  # field 111
    session._outgoing.put_nowait(unknown)
    session.send_jobs(job(1, "demo.echo"))
    await scheduler.event(1, "succeeded")


@pytest.mark.parametrize("code", ["PAYLOAD_INVALID", "ARTIFACT_MISMATCH", "FIELD_INVALID", "NEW_CODE"])
@pytest.mark.parametrize("kind", ["succeeded", "progress"])
async def test_a_refused_event_is_replaced_by_failed_under_its_number(
    scheduler: ScriptedScheduler, executor: Executor, tmp_path: Path, kind: str, code: str
) -> None:
    session = await scheduler.session()

    def refuse(event: job_pb2.ProgressEvent) -> dispatch_pb2.EventRefusal | None:
        if event.WhichOneof("event") == kind:
            return dispatch_pb2.EventRefusal(code=code, message="not like this")
        return None

    scheduler.refuse = refuse
    given = {"file": str(tmp_path / "go")}
    if kind == "succeeded":
        (tmp_path / "go").touch()
    session.send_jobs(job(1, "demo.wait_for_file", input=given))
    failed = await scheduler.event(1, "failed")
    assert (failed.failed.code, failed.failed.message) == (code, "not like this")
    assert failed.sequence == (4 if kind == "succeeded" else 3)
    await session.frame("credit", lambda credit: credit.limit == 5)
    await session.frame("heartbeat", lambda beat: beat.number > 3 and 1 not in beat.lease_tokens)
    session.send_jobs(job(2, "demo.echo"))
    scheduler.refuse = lambda _: None
    await scheduler.event(2, "succeeded")


async def test_a_scheduler_that_drains_it_gets_what_runs_then_goodbye(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async with running(scheduler.address, tmp_path):
        session = await scheduler.session()
        session.send_jobs(job(1, "demo.wait_for_file", input={"file": str(tmp_path / "go")}))
        await scheduler.event(1, "progress")
        session.send(drain=dispatch_pb2.Drain())
        drain = await session.frame("drain")
        assert not drain.HasField("finish_within")
        session.send_jobs(job(2, "demo.echo"))
        rejections = await session.frame("rejections")
        assert rejections.rejections[0].code == "EXECUTOR_SHUTDOWN"
        (tmp_path / "go").touch()
        await scheduler.event(1, "succeeded")
        await session.frame("goodbye")
        await scheduler.until(session.ended.is_set, "the end")
    assert len(scheduler.sessions) == 1
    assert 2 not in scheduler.stored


async def test_what_does_not_finish_in_the_drain_is_handed_back_free_of_cost(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    scheduler.acknowledge = lambda event: event.lease.lease_token != 3
    async with running(scheduler.address, tmp_path, stop_s=2.0) as executor:
        session = await scheduler.session()
        never = {"file": str(tmp_path / "never")}
        session.send_jobs(
            job(1, "demo.wait_for_file", input=never),
            job(2, "demo.swallow", input={"file": str(tmp_path / "m")}),
            job(3, "demo.echo"),  # its acceptance stays unanswered
        )
        await scheduler.event(1, "progress")
        await until((tmp_path / "m").exists)
        started = time.monotonic()
        executor.stop()
        cancelled = (await scheduler.event(1, "cancelled")).cancelled
        assert cancelled.reason == "EXECUTOR_SHUTDOWN"
        assert cancelled.checkpoint.data == b'{"waiting":true}'
        killed = (await scheduler.event(2, "cancelled")).cancelled
        assert (killed.reason, killed.runner_exit.signal) == ("EXECUTOR_SHUTDOWN", 9)
        rejections = await session.frame("rejections")
        assert [(one.lease.lease_token, one.code) for one in rejections.rejections] == [
            (3, "EXECUTOR_SHUTDOWN")
        ]
        await session.frame("goodbye")
        assert time.monotonic() - started < 2.0
