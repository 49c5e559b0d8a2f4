"""Sessions that are cut, schedulers that stop, databases that go away: what is kept, and what is told."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest_asyncio
from rara.v1 import dispatch_pb2, job_pb2
from rara_testing.fault_proxy import FaultProxy
from rara_testing.job_events import accepted, cancelled, progress, running, succeeded
from rara_testing.scripted_executor import ScriptedExecutor
from support.running_scheduler import (
    KIND,
    LEASE_S,
    SWEEP_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def jobs_of(executor: ScriptedExecutor, count: int) -> list[job_pb2.JobRequest]:
    jobs: list[job_pb2.JobRequest] = []
    while len(jobs) < count:
        jobs += (await executor.expect("jobs")).jobs
    return jobs


def held(lease: job_pb2.Lease, last: int, acked: int = 0) -> dispatch_pb2.HeldJob:
    return dispatch_pb2.HeldJob(lease=lease, last_sequence=last, acked_sequence=acked)


async def test_after_a_cut_every_held_token_is_answered_and_the_rest_is_released(
    world: RunningScheduler,
) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(4)})
    run_id = await world.start("wide")
    async with world.executor(credit=4) as first:
        goes_on, finished, accepted_only, never_arrived = (j.lease for j in await jobs_of(first, 4))
        await first.events(accepted(goes_on), running(goes_on), progress(goes_on, 5))
        await first.events(accepted(finished), running(finished), succeeded(finished))
        await first.events(accepted(accepted_only))
        await first.expect_ack(goes_on, 5)
        await first.expect_ack(finished, 3)
        await first.expect_ack(accepted_only, 1)
        first.cancel()
        await first.ended.wait()
        stale = job_pb2.Lease(step_run_id=goes_on.step_run_id, lease_token=10_000, attempt=7)
        listed = [held(goes_on, 6), held(finished, 3), held(stale, 2)]
        async with world.executor(
            executor_id=first.executor_id, credit=0, beat=False, held_jobs=listed
        ) as second:
            (welcome,) = second.all("welcome")
            acks = {ack.lease_token: (ack.sequence, list(ack.missing)) for ack in welcome.acks.acks}
            assert acks == {goes_on.lease_token: (5, [3, 4]), finished.lease_token: (3, [])}
            assert list(welcome.lost_lease_tokens) == [10_000]
            await second.heartbeat([goes_on.lease_token])
            row = await world.until_step(never_arrived.step_run_id, "retryable_failed", "pending")
            assert (row["reason"], row["failures"]) == ("DISPATCH_LOST", 0)
            row = await world.until_step(accepted_only.step_run_id, "retryable_failed")
            assert (row["reason"], row["failures"]) == ("LEASE_EXPIRED", 1)
            async with beating(second, lambda: [goes_on.lease_token]):
                await second.events(progress(goes_on, 3), progress(goes_on, 4), succeeded(goes_on, 6))
                await second.expect_ack(goes_on, 6)
                row = await world.step(goes_on.step_run_id)
                assert (row["state"], row["attempt"], row["gaps"]) == ("succeeded", 1, 0)
                await second.credit(2)
                for job in await jobs_of(second, 2):
                    assert job.lease.attempt == 2
                    await second.events(accepted(job.lease), running(job.lease), succeeded(job.lease))
                await world.until_run(run_id, "succeeded")


async def test_an_old_hello_that_is_read_late_takes_nothing_from_the_newer_session(
    world: RunningScheduler, database_url: str, tmp_path: Path
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with (
        running_scheduler(database_url, tmp_path, settle_s=0.0) as other,
        world.executor() as newer,
    ):
        lease = (await newer.expect_job()).lease
        await newer.events(accepted(lease), running(lease))
        await newer.expect_ack(lease, 2)
        async with other.executor(executor_id=newer.executor_id, credit=0, beat=False) as older:
            # Welcome was sent after the comparison, and after it nothing more comes: it was an old one.
            assert len(older.all("welcome")) == 1
            await newer.expect("go_away")  # the database takes the latest Hello for the newest; that heals
        listed = [held(lease, 2, 2)]
        async with world.executor(executor_id=newer.executor_id, credit=0, held_jobs=listed) as again:
            (welcome,) = again.all("welcome")
            assert [(ack.lease_token, ack.sequence) for ack in welcome.acks.acks] == [(lease.lease_token, 2)]
            await again.events(succeeded(lease))
            await again.expect_ack(lease, 3)
    assert await world.run_state(run_id) == "succeeded"
    assert await world.raw.fetchval("select count(*) from rara.step_attempt") == 0


async def test_a_cancel_asked_for_while_the_executor_is_away_meets_it_at_the_welcome(
    world: RunningScheduler,
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with world.executor() as first:
        (job,) = await jobs_of(first, 1)
        await first.events(accepted(job.lease), running(job.lease))
        await first.expect_ack(job.lease, 2)
        first.cancel()
        await first.ended.wait()
    await world.cancel(run_id)
    async with world.executor(executor_id=first.executor_id, held_jobs=[held(job.lease, 2, 2)]) as second:
        (welcome,) = second.all("welcome")
        assert [(c.lease_token, c.reason) for c in welcome.cancels] == [(job.lease.lease_token, "CANCELLED")]
        await second.events(cancelled(job.lease))
        await world.until_run(run_id, "cancelled")


async def test_the_stream_cut_after_each_event_stores_every_event_in_order_once(
    world: RunningScheduler,
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    executor_id = None
    lease = None
    events: list[job_pb2.ProgressEvent] = []
    for cut_after in range(7):
        listed: list[dispatch_pb2.HeldJob] = [] if lease is None else [held(lease, len(events))]
        async with world.executor(executor_id=executor_id, credit=1, held_jobs=listed) as executor:
            executor_id = executor.executor_id
            if lease is None:
                lease = (await executor.expect_job()).lease
                events = [accepted(lease), running(lease)]
                events += [progress(lease, n, message=f"m{n}") for n in (3, 4, 5)]
                events.append(succeeded(lease, 6))
            # Everything so far again, and one more: the acknowledgements of before are taken as lost.
            await executor.events(*events[: cut_after + 1])
            await executor.expect_ack(lease, min(cut_after + 1, len(events)))
            executor.cancel()
            await executor.ended.wait()
    stored = await world.raw.fetch("select sequence, type from rara.step_event order by sequence")
    assert [row["sequence"] for row in stored] == [1, 2, 3, 4, 5, 6]
    assert await world.run_state(run_id) == "succeeded"
    assert await world.raw.fetchval("select attempt from rara.result") == 1


async def test_a_connection_that_is_reset_under_a_running_job_costs_no_attempt(
    world: RunningScheduler,
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    host, _, port = world.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        first = ScriptedExecutor()
        async with first:
            await first.connect(proxy.address)
            await first.hello([KIND])
            await first.expect("welcome")
            await first.credit(1)
            (job,) = await jobs_of(first, 1)
            await first.events(accepted(job.lease), running(job.lease))
            await first.expect_ack(job.lease, 2)
            proxy.reset()
            assert await first.status() is grpc.StatusCode.UNAVAILABLE
    async with world.executor(executor_id=first.executor_id, held_jobs=[held(job.lease, 3, 2)]) as second:
        await second.events(succeeded(job.lease))
        await second.expect_ack(job.lease, 3)
    row = await world.step(job.lease.step_run_id)
    assert (row["state"], row["attempt"]) == ("succeeded", 1)


async def test_a_frame_over_the_limit_ends_its_session_alone(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor(credit=0) as big, world.executor(beat=False) as other:
        (job,) = await jobs_of(other, 1)
        await other.events(accepted(job.lease), running(job.lease))
        limit = big.all("welcome")[0].terms.limits.max_frame_bytes
        lease = job_pb2.Lease(step_run_id=job.lease.step_run_id, lease_token=job.lease.lease_token, attempt=1)

        def frame(padding: int) -> dispatch_pb2.ConnectRequest:
            event = progress(lease, 1, message="x" * padding)
            return dispatch_pb2.ConnectRequest(events=dispatch_pb2.EventBatch(events=[event]))

        def frame_of(size: int) -> dispatch_pb2.ConnectRequest:
            made = frame(size - 200)
            return frame(size - 200 + size - made.ByteSize())

        assert frame_of(limit).ByteSize() == limit
        async with beating(other, lambda: [job.lease.lease_token]):
            await big.send(frame_of(limit))
            assert (await big.expect_refusal(lease, 1)).code == "LEASE_LOST"
            await big.send(frame_of(limit + 1))
            assert await big.status() is not grpc.StatusCode.OK
            await other.events(succeeded(job.lease))
            await other.expect_ack(job.lease, 3)


async def test_a_scheduler_that_stops_says_so_and_keeps_the_leases(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("two", {"a": {}, "b": {"depends_on": ["a"]}})
        run_id = await world.start("two")
        async with world.executor() as first:
            (job,) = await jobs_of(first, 1)
            await first.events(accepted(job.lease), running(job.lease))
            await first.expect_ack(job.lease, 2)
            await first.events(progress(job.lease, 3))
            world.scheduler.stop()
            away = await first.expect("go_away")
            assert away.reason == "SHUTTING_DOWN"
            assert away.reconnect_after.ToMilliseconds() == 200
            assert await first.status() is grpc.StatusCode.OK
            token = await world.raw.fetchval("select lease_token from rara.lease")
            assert token == job.lease.lease_token
    async with (
        running_scheduler(database_url, tmp_path) as again,
        again.executor(executor_id=first.executor_id, credit=1, held_jobs=[held(job.lease, 4, 2)]) as second,
    ):
        (welcome,) = second.all("welcome")
        (ack,) = welcome.acks.acks
        assert ack.lease_token == job.lease.lease_token
        # What was acknowledged is stored; what was on its way may be, and is sent again.
        assert ack.sequence >= (await first.expect_ack(job.lease, 2)).sequence
        await second.events(progress(job.lease, 3), succeeded(job.lease, 4))
        (after,) = await jobs_of(second, 1)
        await second.events(accepted(after.lease), running(after.lease), succeeded(after.lease))
        await again.until_run(run_id, "succeeded")
        assert {r["attempt"] for r in await again.raw.fetch("select attempt from rara.result")} == {1}


async def test_a_database_that_drops_every_connection_costs_nothing(world: RunningScheduler) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(6)})
    run_id = await world.start("wide")
    async with world.executor(credit=6, beat=False) as executor:
        leases = [job.lease for job in await jobs_of(executor, 6)]
        dropped = 0
        async with beating(executor, lambda: [lease.lease_token for lease in leases]):
            for lease in leases:
                await executor.events(accepted(lease), running(lease))
                dropped += await world.raw.fetchval(
                    "select count(pg_terminate_backend(pid)) from pg_stat_activity"
                    " where datname = current_database() and pid <> pg_backend_pid()"
                )
                await executor.events(progress(lease, 3), succeeded(lease, 4))
            for lease in leases:
                await executor.expect_ack(lease, 4)
        assert dropped > 0
        assert not executor.ended.is_set()
        assert not any(acks.refusals for acks in executor.all("acks"))
    assert await world.until_run(run_id, "succeeded")
    rows = await world.raw.fetch("select attempt, last_sequence, gaps from rara.result")
    assert {tuple(row) for row in rows} == {(1, 4, 0)}


async def test_a_session_moves_to_another_scheduler_with_its_jobs(database_url: str, tmp_path: Path) -> None:
    async with (
        running_scheduler(database_url, tmp_path / "a") as a,
        running_scheduler(database_url, tmp_path / "b") as b,
    ):
        await a.define("one", {"a": {}})
        run_id = await a.start("one")
        async with a.executor() as first:
            (job,) = await jobs_of(first, 1)
            await first.events(accepted(job.lease), running(job.lease))
            await first.expect_ack(job.lease, 2)
            async with b.executor(
                executor_id=first.executor_id, credit=0, held_jobs=[held(job.lease, 3, 2)]
            ) as second:
                assert (await first.expect("go_away")).reason == "REPLACED"
                await second.events(succeeded(job.lease))
                await second.expect_ack(job.lease, 3)
        assert await a.until_run(run_id, "succeeded")


async def test_a_cancel_reaches_an_executor_of_another_scheduler(database_url: str, tmp_path: Path) -> None:
    async with (
        running_scheduler(database_url, tmp_path / "a") as a,
        running_scheduler(database_url, tmp_path / "b", sweep_s=30.0, poll_s=30.0) as b,
    ):
        await a.define("one", {"a": {}})
        run_id = await a.start("one")
        async with b.executor() as executor:
            (job,) = await jobs_of(executor, 1)
            await executor.events(accepted(job.lease), running(job.lease))
            await executor.expect_ack(job.lease, 2)
            await a.cancel(run_id)
            # Neither a sweep nor a heartbeat of the lease can bring it: the hint does.
            (cancel,) = (await executor.expect("cancels", timeout_s=5)).jobs
            assert cancel.lease_token == job.lease.lease_token
            await executor.events(cancelled(job.lease))
            await a.until_run(run_id, "cancelled")


async def test_work_left_by_a_dead_executor_is_leased_again_within_its_lease_and_a_sweep(
    world: RunningScheduler,
) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(10)})
    run_id = await world.start("wide")
    async with world.executor(credit=10) as dead:
        for job in await jobs_of(dead, 10):
            await dead.events(accepted(job.lease), running(job.lease))
            await dead.expect_ack(job.lease, 2)
        dead.cancel()
        await dead.ended.wait()
    await world.raw.execute("delete from rara.executor")  # recovery needs nothing but the leases
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with world.executor(credit=10) as other:
        answered = 0
        while answered < 10:
            for job in await jobs_of(
                other, 1
            ):  # at once: who waits for the last lets the first one's time run out
                assert job.lease.attempt == 2
                await other.events(accepted(job.lease), running(job.lease), succeeded(job.lease))
                answered += 1
        assert loop.time() - started < LEASE_S + 2 * SWEEP_S + 5.0  # room for a machine that does much else
        await world.until_run(run_id, "succeeded")
    assert await until(
        lambda: world.raw.fetchval(
            "select count(*) = 10 from rara.step_attempt where reason = 'LEASE_EXPIRED'"
        ),
        "ten expired attempts",
    )


async def test_the_end_of_every_session_is_noted_however_its_call_breaks(world: RunningScheduler) -> None:
    """A call that is reset is cancelled in its server, too, at whatever it has come to."""
    host, _, port = world.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        for _ in range(15):
            async with ScriptedExecutor() as executor:
                await executor.connect(proxy.address)
                await executor.hello([KIND])
                await executor.expect("welcome")
                proxy.reset()

    async def all_noted() -> bool:
        return bool(
            await world.raw.fetchval("select count(*) = 15 from rara.executor where ended_at is not null")
        )

    await until(all_noted, "end of every session")
