"""How jobs are stopped: asked, killed, confirmed, and at what cost to their neighbours."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from rara.v1 import dispatch_pb2
from rara_executor.app import Executor
from rara_testing.scripted_scheduler import ScriptedScheduler, Session, Terms, cancel, job
from support.running_executor import running, until


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler(Terms(heartbeat_s=0.1, silence_s=5)) as scheduler:
        yield scheduler


@pytest_asyncio.fixture
async def executor(scheduler: ScriptedScheduler, tmp_path: Path) -> AsyncIterator[Executor]:
    async with running(scheduler.address, tmp_path, grace_s=1) as executor:
        yield executor


@pytest_asyncio.fixture
async def session(scheduler: ScriptedScheduler, executor: Executor) -> Session:
    session = await scheduler.session()
    await session.frame("credit")
    return session


async def is_marked(path: Path) -> int:
    """The number of the process whose handler has left its mark."""
    return int(await until(lambda: path.exists() and path.read_text()))


async def test_a_cooperative_async_handler_is_cancelled_at_once(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.wait", input={"file": str(tmp_path / "m")}))
    await is_marked(tmp_path / "m")
    session.cancel_job(1, reason="SIBLING_FAILED", grace_s=10)
    cancelled = (await scheduler.event(1, "cancelled", bound_s=3)).cancelled
    assert cancelled.reason == "SIBLING_FAILED"
    assert not cancelled.HasField("runner_exit")  # its runner goes on, with other jobs
    assert (await session.frame("cancel_receipts")).lease_tokens == [1]
    session.send_jobs(job(2, "demo.echo"))
    await scheduler.event(2, "succeeded")


async def test_a_blocking_handler_is_interrupted_in_its_sleep_and_its_process_ends(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.wait_blocking", input={"file": str(tmp_path / "m")}))
    pid = await is_marked(tmp_path / "m")
    await scheduler.event(1, "progress")
    session.cancel_job(1, grace_s=10)
    cancelled = (await scheduler.event(1, "cancelled", bound_s=3)).cancelled
    assert cancelled.reason == "CANCELLED"
    assert json.loads(cancelled.checkpoint.data) == {"half": True}
    assert cancelled.runner_exit.exit_code == 0
    assert not psutil.pid_exists(pid)


async def test_a_handler_that_keeps_the_interpreter_lock_is_killed_after_the_grace(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.hold_lock", input={"file": str(tmp_path / "m"), "seconds": 600}))
    pid = await is_marked(tmp_path / "m")
    started = time.monotonic()
    session.cancel_job(1, grace_s=0.5)
    cancelled = (await scheduler.event(1, "cancelled")).cancelled
    assert 0.45 <= time.monotonic() - started < 3
    assert cancelled.runner_exit.signal == 9
    assert cancelled.runner_exit.peak_memory_bytes > 1 << 20
    assert not cancelled.runner_exit.out_of_memory
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("kind", ["demo.swallow", "demo.block_loop"])
async def test_an_async_handler_that_ignores_its_cancel_is_killed_and_its_neighbours_end_free_of_cost(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path, kind: str
) -> None:
    session.send_jobs(job(2, "demo.wait_for_file", input={"file": str(tmp_path / "never")}))
    await scheduler.event(2, "progress")
    session.send_jobs(job(1, kind, input={"file": str(tmp_path / "m"), "seconds": 600}))
    pid = await is_marked(tmp_path / "m")
    session.cancel_job(1, grace_s=0.3)
    cancelled = (await scheduler.event(1, "cancelled")).cancelled
    assert (cancelled.reason, cancelled.runner_exit.signal) == ("CANCELLED", 9)
    neighbour = (await scheduler.event(2, "cancelled")).cancelled
    assert neighbour.reason == "EXECUTOR_SHUTDOWN"
    assert json.loads(neighbour.checkpoint.data) == {"waiting": True}
    assert not psutil.pid_exists(pid)
    session.send_jobs(job(3, "demo.echo"))
    await scheduler.event(3, "succeeded")


async def test_a_crash_of_a_shared_runner_fails_all_that_ran_in_it(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(2, "demo.wait_for_file", input={"file": str(tmp_path / "never")}))
    await scheduler.event(2, "progress")
    session.send_jobs(job(1, "demo.die_async", input={}))
    for token in (1, 2):
        failed = (await scheduler.event(token, "failed")).failed
        assert (failed.code, failed.runner_exit.signal) == ("RUNNER_CRASHED", 9)


async def test_children_and_grandchildren_of_a_cancelled_handler_are_gone_when_it_is_confirmed(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.children", input={"file": str(tmp_path / "pids")}))
    pids = json.loads(await until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text()))
    assert all(psutil.pid_exists(pid) for pid in pids)
    session.cancel_job(1, grace_s=5)
    await scheduler.event(1, "cancelled")
    await until(lambda: not any(_runs(pid) for pid in pids), bound_s=2)


@pytest.mark.case("S04")
@pytest.mark.parametrize(
    ("how", "end"), [("wait", "cancelled"), ("crash", "failed"), ("succeed", "succeeded")]
)
async def test_children_in_sessions_of_their_own_do_not_outlive_a_blocking_job(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path, how: str, end: str
) -> None:
    path = tmp_path / "pids"
    session.send_jobs(job(1, "demo.setsid", input={"file": str(path), how: True}))
    pids = json.loads(await until(lambda: path.exists() and path.read_text()))
    if how == "wait":
        session.cancel_job(1, grace_s=5)
    event = await scheduler.event(1, end)
    await until(lambda: not any(_runs(pid) for pid in pids), bound_s=2)
    assert not event.failed.HasField("runner_exit") or how == "crash"
    session.send_jobs(job(2, "demo.pid"))
    output = (await scheduler.event(2, "succeeded")).succeeded.output
    assert int(output.data) != pids[0]


async def test_a_child_of_an_async_handler_in_a_session_of_its_own_ends_with_the_runner(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    path = tmp_path / "pids"
    async with running(scheduler.address, tmp_path, grace_s=1):
        session = await scheduler.session()
        session.send_jobs(job(1, "demo.setsid_async", input={"file": str(path)}))
        pids = json.loads(await until(lambda: path.exists() and path.read_text()))
        session.cancel_job(1)
        await scheduler.event(1, "cancelled")
        assert all(map(_runs, pids))  # others run in the same process: nobody can tell whose they are
    await until(lambda: not any(_runs(pid) for pid in pids), bound_s=2)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_handler_that_finishes_when_asked_has_succeeded(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.stop_nicely", input={"file": str(tmp_path / "m")}))
    await is_marked(tmp_path / "m")
    session.cancel_job(1)
    output = json.loads((await scheduler.event(1, "succeeded")).succeeded.output.data)
    assert output == {"cancelled": True, "reason": "CANCELLED"}


async def test_a_cancel_before_the_start_ends_the_job_without_a_handler(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    scheduler.acknowledge = lambda event: not event.HasField("accepted")
    session.send_jobs(job(1, "demo.block_loop", input={"file": str(tmp_path / "m"), "seconds": 0}))
    session.cancel_job(1)
    await scheduler.event(1, "cancelled")
    assert scheduler.kinds(1) == ["cancelled"]
    assert not (tmp_path / "m").exists()


async def test_a_cancel_comes_with_a_heartbeat_answer_too(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.wait", input={"file": str(tmp_path / "m")}))
    await is_marked(tmp_path / "m")
    session.send(
        heartbeat_ack=dispatch_pb2.HeartbeatAck(number=1, renewed=1, cancels=[cancel(1), cancel(77)])
    )
    await scheduler.event(1, "cancelled")
    assert [list(frame.lease_tokens) for frame in session.of("cancel_receipts")] == [[1]]


async def test_lease_lost_stops_the_handler_and_nothing_more_is_said_of_it(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.ticks", input={"file": str(tmp_path / "ticks")}))
    await until(lambda: (tmp_path / "ticks").exists())
    scheduler.lost.add(1)
    await session.frame("heartbeat", lambda beat: 1 not in beat.lease_tokens and beat.number > 3)
    size = (tmp_path / "ticks").stat().st_size
    session.send_jobs(job(2, "demo.echo"))
    await scheduler.event(2, "succeeded")
    await asyncio.sleep(0.1)  # several ticks
    assert (tmp_path / "ticks").stat().st_size == size
    assert [event.WhichOneof("event") for event in session.events if event.lease.lease_token == 1] == [
        "accepted",
        "running",
    ]


async def test_what_a_handler_reports_after_its_lease_was_lost_is_not_sent(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(job(1, "demo.last_words", input={"file": str(tmp_path / "m")}))
    await is_marked(tmp_path / "m")
    scheduler.lost.add(1)
    await until(lambda: (tmp_path / "m.said").exists())
    session.send_jobs(job(2, "demo.echo"))
    await scheduler.event(2, "succeeded")
    assert [event.WhichOneof("event") for event in session.events if event.lease.lease_token == 1] == [
        "accepted",
        "running",
    ]


async def test_a_refused_event_tells_of_the_lost_lease(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    scheduler.refuse = lambda event: (
        dispatch_pb2.EventRefusal(code="LEASE_LOST") if event.HasField("progress") else None
    )
    session.send_jobs(job(1, "demo.wait_for_file", input={"file": str(tmp_path / "never")}))
    await session.frame("credit", lambda credit: credit.limit == 5)  # its slot is free again
    await session.frame("heartbeat", lambda beat: beat.number > 2)
    assert 1 not in session.of("heartbeat")[-1].lease_tokens
    assert scheduler.kinds(1) == ["accepted", "running"]


@pytest.mark.parametrize("kind", ["demo.block_loop", "demo.hold_lock"])
async def test_heartbeats_go_on_while_a_handler_blocks(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path, kind: str
) -> None:
    session.send_jobs(job(1, kind, input={"file": str(tmp_path / "m"), "seconds": 1.5}, lease_s=0.6))
    await is_marked(tmp_path / "m")
    before = session.of("heartbeat")[-1].number
    await scheduler.event(1, "succeeded")
    beats = [beat for beat in session.of("heartbeat") if beat.number > before]
    assert len(beats) >= 10
    assert all(1 in beat.lease_tokens for beat in beats[1:-1])
    # Each tells of the newest answer, which on a busy machine may be on its way when the next beat goes.
    assert all(beat.number - 3 <= beat.answered < beat.number for beat in beats[1:])


async def test_without_renewals_the_handler_is_stopped_before_the_lease_is_over(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "ticks"
    session.send_jobs(job(1, "demo.ticks", input={"file": str(path)}, lease_s=1.2))
    await until(path.exists)
    scheduler.renew = False  # the database is away; the stream stays up
    last = time.monotonic()
    failed = (await scheduler.event(1, "failed")).failed
    stopped_after_s = time.monotonic() - last
    assert failed.code == "LEASE_EXPIRED"
    assert 0.8 < stopped_after_s < 1.2
    ticks = [float(line.split()[1]) for line in path.read_text().splitlines()]
    assert ticks[-1] - last < 1.2
    assert not session.ended.is_set()


async def test_a_handler_that_ignores_the_fence_is_dead_when_the_lease_is_over(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(
        job(1, "demo.hold_lock", input={"file": str(tmp_path / "m"), "seconds": 600}, lease_s=1.2),
        job(2, "demo.swallow", input={"file": str(tmp_path / "n")}, lease_s=1.2),
    )
    pids = [await is_marked(tmp_path / name) for name in ("m", "n")]
    scheduler.renew = False
    last = time.monotonic()
    for token in (1, 2):
        failed = (await scheduler.event(token, "failed")).failed
        assert (failed.code, failed.runner_exit.signal) == ("LEASE_EXPIRED", 9)
    assert time.monotonic() - last < 1.2 + 0.5  # the lease, and what a busy machine takes to tell
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_a_job_whose_acceptance_was_stored_long_ago_waits_for_a_renewal(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    scheduler.renew = False
    scheduler.acknowledge = lambda event: event.lease.lease_token != 1
    given = {"file": str(tmp_path / "m"), "seconds": 0}
    session.send_jobs(job(1, "demo.block_loop", input=given, lease_s=0.4))
    accepted = await scheduler.until(lambda: session.events, "accepted")
    await asyncio.sleep(0.45)  # longer than the lease
    scheduler.acknowledge = lambda _: True
    scheduler.stored[1] = {1: accepted[0]}
    session.acknowledge(1, 1)
    await session.frame("heartbeat", lambda beat: 1 in beat.lease_tokens)
    assert not (tmp_path / "m").exists()
    scheduler.renew = True
    await scheduler.event(1, "succeeded")


async def test_ends_are_noticed_where_the_system_has_no_process_descriptors(
    scheduler: ScriptedScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.pidfd_open")
    async with running(scheduler.address, tmp_path):
        session = await scheduler.session()
        session.send_jobs(job(1, "demo.die", input={"how": "exit"}))
        assert (await scheduler.event(1, "failed")).failed.runner_exit.exit_code == 7


async def test_the_warden_is_replaced_when_it_dies(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    def is_warden(process: psutil.Process) -> bool:
        try:
            return any("warden.py" in word for word in process.cmdline())
        except psutil.NoSuchProcess:  # ended while we looked; a zombie counts as ended
            return False

    def wardens() -> list[psutil.Process]:
        return [one for one in psutil.Process().children() if is_warden(one)]

    (first,) = wardens()
    first.kill()
    second = await until(lambda: [one for one in wardens() if one.pid != first.pid])
    assert len(second) == 1
    session.send_jobs(job(1, "demo.echo"))
    await scheduler.event(1, "succeeded")


async def test_a_handler_over_its_memory_limit_is_out_of_memory(
    scheduler: ScriptedScheduler, tmp_path: Path
) -> None:
    async with running(scheduler.address, tmp_path, memory_bytes=1 << 30):
        session = await scheduler.session()
        session.send_jobs(job(1, "demo.hog", input=2 << 30), job(2, "demo.hog", input=1 << 20))
        assert (await scheduler.event(1, "failed")).failed.code == "OUT_OF_MEMORY"
        await scheduler.event(2, "succeeded")


async def test_a_runner_that_the_kernel_killed_for_memory_says_so(
    scheduler: ScriptedScheduler, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for the kernel's counter, which a test should not raise for the whole machine.
    monkeypatch.setattr("rara_executor.child_process.oom_kills", lambda: 1 << 60)
    session.send_jobs(job(1, "demo.die", input={"how": "kill"}))
    failed = (await scheduler.event(1, "failed")).failed
    assert failed.code == "OUT_OF_MEMORY"
    assert (failed.runner_exit.signal, failed.runner_exit.out_of_memory) == (9, True)
