"""Streams that stand still, lose what was sent, ping too often, flood, or grow old."""

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest
from rara.v1 import common_pb2, dispatch_pb2, job_pb2, workflow_pb2
from rara_client import Client, channel
from rara_client.definitions import definition_from
from rara_executor import direct
from rara_executor.app import BLOB_KEEPALIVE, Executor
from rara_executor.connection import CHANNEL_OPTIONS
from rara_scheduler.settings import Settings
from rara_scheduler.transport import connections
from rara_testing.auto_executor import AutoExecutor, AutoJob
from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.job_events import accepted, progress, running, succeeded
from rara_testing.processes import Processes
from rara_testing.scripted_executor import ScriptedExecutor
from support.database_paths import proxied
from support.go_executor import spawn_go_executor
from support.running_executor import running as running_executor
from support.running_executor import until as until_true
from support.running_scheduler import (
    ACCEPT_S,
    HEARTBEAT_S,
    KIND,
    SWEEP_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)
from support.scheduler_process import start_scheduler
from support.spawned_executor import spawn_executor

ROOT = Path(__file__).resolve().parents[2]
SLACK_S = 0.5  # of a busy machine


@contextlib.asynccontextmanager
async def stream_proxy(world: RunningScheduler) -> AsyncIterator[FaultProxy]:
    host, _, port = world.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy:
        yield proxy


# ---------------------------------------------------------------- heartbeats fine, stream dead

ECHO = "demo.echo"


@pytest.mark.case("STREAM-1")
@pytest.mark.parametrize(
    "directions",
    [(Direction.TO_CLIENT,), (Direction.TO_SERVER,), tuple(Direction)],
    ids=["down", "up", "both"],
)
async def test_work_goes_round_an_executor_whose_stream_stands_still(
    database_url: str, tmp_path: Path, directions: tuple[Direction, ...]
) -> None:
    loop = asyncio.get_running_loop()
    async with running_scheduler(database_url, tmp_path) as world, stream_proxy(world) as proxy:
        await world.define("wide", {f"s{n}": {"kind": ECHO} for n in range(20)})
        await world.define("one", {"a": {"kind": ECHO}})
        async with running_executor(proxy.address, tmp_path, slots=20) as zombie:
            await until_true(lambda: zombie.is_ready)
            run_id = await world.start("one")
            await world.until_run(run_id, "succeeded")
            async with AutoExecutor(world.address, {ECHO: lambda _: None}, slots=20) as healthy:
                proxy.stall(*directions)
                stalled_at = loop.time()
                await until_true(lambda: not zombie.is_ready)
                assert loop.time() - stalled_at < 2 * HEARTBEAT_S + HEARTBEAT_S + SLACK_S
                await asyncio.sleep(max(0.0, stalled_at + 2 * HEARTBEAT_S + HEARTBEAT_S / 2 - loop.time()))

                due_at = loop.time()
                run_id = await world.start("wide")
                await healthy.wait_for(20)
                assert loop.time() - due_at < 2 * HEARTBEAT_S + SWEEP_S + SLACK_S
                await world.until_run(run_id, "succeeded")
                rows = await world.raw.fetch(
                    "select attempt, failures from rara.result where workflow_run_id = $1::uuid", run_id
                )
                assert {tuple(row) for row in rows} == {(1, 0)}
            # The healthy one is gone: whatever comes now, only the healed one can run.
            proxy.resume()
            healed_at = loop.time()
            run_id = await world.start("one")
            await world.until_run(run_id, "succeeded")
            assert loop.time() - healed_at < 5
            await until_true(lambda: zombie.is_ready)


@pytest.mark.case("STREAM-1")
async def test_what_was_sent_into_a_dead_stream_is_taken_back_and_runs_elsewhere(
    database_url: str, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    async with running_scheduler(database_url, tmp_path) as world, stream_proxy(world) as proxy:
        await world.define("wide", {f"s{n}": {"kind": ECHO} for n in range(20)})
        async with (
            running_executor(proxy.address, tmp_path, slots=20) as zombie,
            AutoExecutor(world.address, {ECHO: lambda _: None}, slots=10) as healthy,
        ):
            await until_true(lambda: zombie.is_ready)
            proxy.stall(Direction.TO_CLIENT)  # and at once, before anybody can know
            due_at = loop.time()
            run_id = await world.start("wide")
            await world.until_run(run_id, "succeeded")
            assert loop.time() - due_at < 2 * HEARTBEAT_S + ACCEPT_S + 2 * SWEEP_S + SLACK_S
            await healthy.wait_for(20)  # it is told a little after the database
            rows = await world.raw.fetch("select attempt, failures from rara.result")
            assert {row["failures"] for row in rows} == {0}
            assert {row["attempt"] for row in rows} <= {1, 2}
            reasons = await world.raw.fetch("select distinct reason from rara.step_attempt")
            assert {row["reason"] for row in reasons} <= {"DISPATCH_LOST"}
            proxy.resume()


# ---------------------------------------------------------------- leased, but the request never arrived


async def taken_back(world: RunningScheduler, other: AutoExecutor, starts: list[float]) -> None:
    """The step of a request that was lost runs on the other executor soon, once, and free of cost."""
    await other.wait_for(1)
    row = await world.raw.fetchrow(
        "select x.state, x.attempt, x.failures, a.reason, a.spent,"
        " extract(epoch from x.started_at - a.granted_at)::float8 as gap_s, a.granted_at"
        " from rara.result x join rara.step_attempt a using (step_run_id)"
    )
    assert row is not None
    assert (row["state"], row["attempt"], row["failures"]) == ("succeeded", 2, 0)
    assert (row["reason"], row["spent"]) == ("DISPATCH_LOST", False)
    assert row["gap_s"] < ACCEPT_S + 2 * SWEEP_S + SLACK_S
    assert len(starts) == 1


@pytest.mark.case("STREAM-2")
@pytest.mark.parametrize("fault", ["cut", "died"])
async def test_a_request_that_was_lost_is_taken_back_whatever_the_lease(
    database_url: str, tmp_path: Path, fault: str
) -> None:
    starts: list[float] = []

    def work(_: AutoJob) -> None:
        starts.append(time.monotonic())

    async with (
        running_scheduler(database_url, tmp_path, lease_s=600.0) as world,
        stream_proxy(world) as proxy,
    ):
        await world.define("one", {"a": {}})
        async with ScriptedExecutor() as first:
            await first.connect(proxy.address)
            await first.hello([KIND])
            await first.expect("welcome")
            await first.credit(1)
            async with beating(first):
                if fault == "cut":
                    proxy.cut_at(b"one", Direction.TO_CLIENT)  # the definition's name, in the request alone
                await world.start("one")
                if fault == "cut":
                    await asyncio.wait_for(proxy.triggered.wait(), 5)
                    assert not first.all("jobs")
                else:
                    await first.expect_job()
                    first.cancel()
                await asyncio.wait_for(first.ended.wait(), 5)
            async with AutoExecutor(world.address, {KIND: work}, slots=1) as other:
                await taken_back(world, other, starts)


# ---------------------------------------------------------------- too many pings


def scaled(monkeypatch: pytest.MonkeyPatch, divisor: int) -> None:
    """The shipped values of every server, divided."""
    for name in ("MIN_PING_INTERVAL_MS", "KEEPALIVE_TIME_MS", "PING_TIMEOUT_MS"):
        monkeypatch.setattr(connections, name, getattr(connections, name) // divisor)


@contextlib.asynccontextmanager
async def connected(
    database_url: str, folder: Path, **settings: object
) -> AsyncIterator[tuple[RunningScheduler, FaultProxy, Executor]]:
    long: dict[str, Any] = {"heartbeat_s": 2.0, "lease_s": 8.0, "silence_s": 6.0} | settings
    async with running_scheduler(database_url, folder, **long) as world, stream_proxy(world) as proxy:
        await world.define("one", {"a": {"kind": "demo.wait_for_file"}})
        async with running_executor(proxy.address, folder, slots=2) as executor:
            await until_true(lambda: executor.is_ready)
            yield world, proxy, executor


async def stay_connected(database_url: str, folder: Path, *, idle_s: float, busy_s: float) -> None:
    async with connected(database_url, folder) as (world, proxy, executor):
        await asyncio.sleep(idle_s)
        go = folder / "go"
        run_id = await world.start("one", value={"file": str(go)})
        await asyncio.sleep(busy_s)
        go.touch()
        await world.until_run(run_id, "succeeded")
        assert executor.is_ready
        assert proxy.accepted == 1  # no connection was ended, and no session
        assert await world.raw.fetchval("select count(distinct session_id) from rara.executor") == 1


@pytest.mark.case("STREAM-3")
async def test_an_executor_stays_connected_with_the_values_that_are_shipped(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled(monkeypatch, 100)  # in three seconds what takes five minutes
    await stay_connected(database_url, tmp_path, idle_s=2.0, busy_s=1.0)


@pytest.mark.case("STREAM-3")
@pytest.mark.soak
async def test_an_executor_stays_connected_for_ten_minutes_with_the_values_that_are_shipped(
    database_url: str, tmp_path: Path
) -> None:
    await stay_connected(database_url, tmp_path, idle_s=300.0, busy_s=300.0)


@pytest.mark.case("STREAM-3")
async def test_a_client_that_pings_too_often_is_sent_away_and_loses_no_step(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's minimum stands above the period of the client's pings."""
    pings = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    monkeypatch.setattr("rara_executor.connection.CHANNEL_OPTIONS", [*CHANNEL_OPTIONS, *pings])
    # Beats are rare here: each answer lets the server forget the pings so far.
    rare = {"heartbeat_s": 6.0, "silence_s": 16.0, "lease_s": 20.0}
    async with connected(database_url, tmp_path, **rare) as (world, proxy, _):
        go = tmp_path / "go"
        run_id = await world.start("one", value={"file": str(go)})
        await proxy.wait_accepted(2)  # it was sent away and came again
        await asyncio.sleep(0.5)
        go.touch()
        await world.until_run(run_id, "succeeded")
        row = await world.raw.fetchrow("select attempt, failures from rara.result")
        assert row is not None
        assert tuple(row) == (1, 0)


@pytest.mark.case("STREAM-3")
def test_both_ends_keep_connections_alive_by_the_same_values() -> None:
    server = dict(connections.keepalive_options())
    allowed_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    # An executor's session sends none at all; whoever else dials pings less often than servers allow.
    assert allowed_ms < dict(BLOB_KEEPALIVE)["grpc.keepalive_time_ms"]
    assert allowed_ms < channel.KEEPALIVE_MS
    assert not [name for name, _ in CHANNEL_OPTIONS if "keepalive" in name or "ping" in name]
    assert dict(direct.SERVER_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] == allowed_ms
    # A server's own pings meet clients that enforce gRPC's default: none may come more often than each 10 s.
    assert server["grpc.keepalive_time_ms"] >= 10_000
    written = {
        path.relative_to(ROOT).as_posix()
        for folder in ("services", "clients/python", "clients/cli")
        for path in (ROOT / folder).rglob("*.py")
        if "grpc.keepalive" in (text := path.read_text(encoding="utf-8")) or "ping_interval" in text
    }
    assert written == {
        "clients/python/rara_client/channel.py",
        "services/executor/rara_executor/app.py",
        "services/scheduler/rara_scheduler/transport/connections.py",
        "services/executor/rara_executor/direct.py",
    }


@pytest.mark.case("STREAM-1")
@pytest.mark.soak
@pytest.mark.parametrize("language", ["python", pytest.param("go", marks=pytest.mark.needs("go"))])
async def test_transfers_leave_a_path_that_swallows_everything_while_the_session_lives(
    database_url: str, tmp_path: Path, language: str
) -> None:
    """Only the connection for artifacts is dead, and nobody is told: pings find it, since no heartbeat goes there."""
    async with (
        running_scheduler(database_url, tmp_path) as world,
        stream_proxy(world) as proxy,
        Processes(tmp_path) as processes,
    ):
        if language == "go":
            await spawn_go_executor(processes, proxy.address, tmp_path)
        else:
            await spawn_executor(processes, proxy.address, tmp_path, module="rara_testing.probes", prestart=1)
        template = common_pb2.Payload(data=b'{"size": {"$ref": "/run/input"}}')
        await world.define("put", {"a": {"kind": "probe.artifact", "input_template": template}})
        await world.until_run(await world.start("put", value=40_000), "succeeded")
        proxy.drop_idle(3.0)

        async def is_forgotten() -> bool:
            return proxy.forgotten_links > 0

        await until(is_forgotten, "the connection for artifacts is forgotten")
        run_id = await world.start("put", value=50_000)

        async def has_ended() -> bool:
            return await world.run_state(run_id) == "succeeded"

        await until(has_ended, "a transfer over another connection", 55)
        row = await world.raw.fetchrow(
            "select attempt, failures from rara.result where workflow_run_id = $1::uuid", run_id
        )
        assert row is not None
        assert tuple(row) == (1, 0)


# ---------------------------------------------------------------- a connection that grows old


@pytest.mark.case("STOP-1")
async def test_an_old_connection_is_given_up_without_a_lost_step(database_url: str, tmp_path: Path) -> None:
    async with (
        running_scheduler(database_url, tmp_path, connection_age_s=1.5) as world,
        stream_proxy(world) as proxy,
    ):
        await world.define("one", {"a": {"kind": "demo.wait_for_file"}})
        async with ScriptedExecutor() as watched:
            await watched.connect(world.address)
            await watched.hello([KIND])
            await watched.expect("welcome")
            async with running_executor(proxy.address, tmp_path, slots=2), beating(watched):
                go = tmp_path / "go"
                run_id = await world.start("one", value={"file": str(go)})
                away = await watched.expect("go_away")
                assert away.reason == "REBALANCE"
                await proxy.wait_accepted(2)  # over a new connection
                await asyncio.sleep(0.5)
                go.touch()
                await world.until_run(run_id, "succeeded")
        row = await world.raw.fetchrow("select attempt, failures from rara.result")
        assert row is not None
        assert tuple(row) == (1, 0)


@pytest.mark.case("STOP-1")
@pytest.mark.parametrize("age_s", [1.5, Settings.model_fields["connection_age_s"].default])
def test_a_session_is_asked_to_come_again_between_the_end_of_calls_and_of_the_connection(
    age_s: float,
) -> None:
    options = dict(connections.age_options(age_s))
    first_s, last_s = 0.9 * age_s, 1.1 * age_s  # gRPC spreads the age by a tenth
    asked_s = connections.rebalance_after_s(age_s)
    assert options["grpc.max_connection_age_ms"] == 1000 * age_s
    assert last_s < asked_s < first_s + options["grpc.max_connection_age_grace_ms"] / 1000


# ---------------------------------------------------------------- fast events, slow database

MIB = 1 << 20


async def flood(database_url: str, folder: Path, *, count: int) -> None:
    """Progress in a tight loop while each stored event takes 10 ms; ten other steps beside it."""
    raw = await asyncpg.connect(database_url)
    await raw.execute(
        "create function rara.dawdle() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(0.01); return new; end $$;"
        "create trigger dawdle before insert on rara.step_event for each row execute function rara.dawdle()"
    )
    async with Processes(folder) as processes:
        # Three of a busy machine's pauses fit into this lease.
        scheduler, address = await start_scheduler(processes, database_url, folder, lease_s=5.0)
        executor = await spawn_executor(
            processes, address, folder, module="support.timed_handlers", slots=11, prestart=2
        )
        async with Client.connect(address) as client:
            steps = [{"step_name": f"s{n}", "kind": "timed.steady"} for n in range(10)]
            await client.register_definition(definition_from({"definition": "steady", "steps": steps}))
            await client.register_definition(
                definition_from({"definition": "flood", "steps": [{"step_name": "f", "kind": "timed.flood"}]})
            )
            go = folder / "go"
            steady_id = (await client.start_run("steady", {"file": str(go)})).run.workflow_run_id
            await until(
                lambda: raw.fetchval("select count(*) = 10 from rara.lease where started_at is not null"),
                "steady",
            )
            watched = [psutil.Process(process.pid) for process in (scheduler, executor)]
            before = [process.memory_info().rss for process in watched]
            most = list(before)
            flood_id = (await client.start_run("flood", {"count": count})).run.workflow_run_id

            async def ended() -> bool:
                for index, process in enumerate(watched):
                    most[index] = max(most[index], process.memory_info().rss)
                await asyncio.sleep(0.1)
                return bool(
                    await raw.fetchval(
                        "select ended_at is not null from rara.workflow_run where workflow_run_id = $1::uuid",
                        flood_id,
                    )
                )

            await until(ended, "end of the flood", 30 + count / 500)
            grown = [(after - start) // MIB for after, start in zip(most, before, strict=True)]
            assert max(grown) < 64, grown
            go.touch()
            run = await client.wait_run(steady_id, 20)
            assert run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
    row = await raw.fetchrow(
        "select x.state, x.attempt, x.output, x.last_sequence, x.gaps, count(e.sequence) as events,"
        " (array_agg(e.body order by e.sequence desc) filter (where e.type = 'progress'))[1] as newest,"
        " (array_agg(e.type order by e.sequence desc))[1] as last_type,"
        " (select c.data from rara.checkpoint c where c.step_run_id = x.step_run_id) as checkpoint"
        " from rara.result x join rara.step_event e using (step_run_id)"
        " where x.workflow_run_id = $1::uuid group by x.step_run_id",
        flood_id,
    )
    assert row is not None
    assert (row["state"], row["attempt"], row["output"]) == ("succeeded", 1, str(count).encode())
    assert (row["events"], row["gaps"], row["last_type"]) == (row["last_sequence"], 0, "succeeded")
    assert row["events"] < count / 2  # merged before they were sent
    assert f"{count} of {count}".encode() in row["newest"]
    others = await raw.fetch(
        "select state, attempt, failures from rara.result where workflow_run_id = $1::uuid", steady_id
    )
    assert [tuple(other) for other in others] == [("succeeded", 1, 0)] * 10, row["events"]
    await raw.close()


@pytest.mark.case("STREAM-4")
async def test_a_flood_of_progress_is_merged_and_holds_nobody_up(database_url: str, tmp_path: Path) -> None:
    await flood(database_url, tmp_path, count=10_000)


@pytest.mark.case("STREAM-4")
@pytest.mark.soak
async def test_a_hundred_thousand_events_are_merged_and_hold_nobody_up(
    database_url: str, tmp_path: Path
) -> None:
    await flood(database_url, tmp_path, count=100_000)


@pytest.mark.case("STREAM-4")
async def test_an_executor_beyond_its_window_loses_its_session_and_no_event(
    database_url: str, tmp_path: Path
) -> None:
    window = 16
    async with running_scheduler(database_url, tmp_path, event_window=window) as world:
        await world.define("one", {"a": {}})
        run_id = await world.start("one")
        async with world.executor() as greedy:
            lease = (await greedy.expect_job()).lease
            await greedy.events(accepted(lease), running(lease))
            await greedy.expect_ack(lease, 2)
            transaction = world.raw.transaction()
            await transaction.start()
            await world.raw.execute("select from rara.workflow_run for update")  # nothing can be stored
            sent = 2
            with contextlib.suppress(AssertionError, asyncio.InvalidStateError):
                while not greedy.ended.is_set() and sent < 20 * window:
                    await greedy.events(*(progress(lease, sent + n) for n in range(1, 9)))
                    sent += 8
                    await asyncio.sleep(0.02)
            await asyncio.wait_for(greedy.ended.wait(), 5)
            assert "RESOURCE_EXHAUSTED" in str(await greedy.status())
            assert 2 * window < sent - 2 <= 3 * window + 16
            # Who comes again while nothing can be stored brings no more than fits.
            async with ScriptedExecutor(executor_id=greedy.executor_id) as hasty:
                await hasty.connect(world.address)
                await hasty.hello([KIND], held_jobs=[held(lease, sent)])
                await hasty.expect("welcome")
                await hasty.events(*(progress(lease, n) for n in range(3, 3 + window)))
                assert "RESOURCE_EXHAUSTED" in str(await hasty.status())
            await transaction.rollback()
            await until(
                lambda: world.raw.fetchval(f"select last_sequence = {2 + 2 * window} from rara.lease"),
                "stored events",
            )
        async with world.executor(executor_id=greedy.executor_id, held_jobs=[held(lease, sent + 1)]) as again:
            (ack,) = again.all("welcome")[0].acks.acks
            assert (ack.sequence, list(ack.missing)) == (2 + 2 * window, [])
            await again.events(*(progress(lease, n) for n in range(ack.sequence + 1, sent + 1)))
            await again.events(succeeded(lease, sent + 1))
            await again.expect_ack(lease, sent + 1)
        assert await world.run_state(run_id) == "succeeded"
        stored = await world.raw.fetch("select sequence from rara.step_event order by sequence")
        assert [row["sequence"] for row in stored] == list(range(1, sent + 2))
        assert await world.raw.fetchval("select attempt from rara.result") == 1


def held(lease: job_pb2.Lease, last: int) -> dispatch_pb2.HeldJob:
    return dispatch_pb2.HeldJob(lease=lease, last_sequence=last, acked_sequence=2)


@pytest.mark.case("STREAM-4")
async def test_a_lease_that_writers_hold_nearly_all_the_time_is_renewed_in_between(
    database_url: str, tmp_path: Path
) -> None:
    """A heartbeat counts when all of its leases are renewed: one that is always busy must not starve the others."""
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("two", {"a": {}, "b": {}})
        await world.start("two")
        async with world.executor(credit=2, beat=False) as executor:
            leases: list[job_pb2.Lease] = []
            while len(leases) < 2:
                leases += [job.lease for job in (await executor.expect("jobs")).jobs]
            tokens = [lease.lease_token for lease in leases]
            async with beating(executor, lambda: tokens), asyncio.TaskGroup() as writers:
                for lease in leases:
                    await executor.events(accepted(lease), running(lease))
                    await executor.expect_ack(lease, 2)
                holding = [
                    writers.create_task(hold_again_and_again(database_url, tokens[0])) for _ in range(2)
                ]
                lapsed_at = time.monotonic() + 3 * 2.0  # three leases
                while time.monotonic() < lapsed_at:
                    seen = newest_renewal(executor)
                    await until(functools.partial(renewed_after, executor, seen), "another renewal", 1.9)
                for task in holding:
                    task.cancel()
            assert await world.raw.fetchval("select bool_and(expires_at > now()) from rara.lease")
            assert not any(ack.lost_lease_tokens for ack in executor.all("heartbeat_ack"))
            for lease in leases:
                await executor.events(succeeded(lease))
                await executor.expect_ack(lease, 3)
        assert {row["attempt"] for row in await world.raw.fetch("select attempt from rara.result")} == {1}


def newest_renewal(executor: ScriptedExecutor) -> int:
    return max((ack.renewed for ack in executor.all("heartbeat_ack")), default=0)


async def renewed_after(executor: ScriptedExecutor, seen: int) -> bool:
    return newest_renewal(executor) > seen


async def hold_again_and_again(url: str, lease_token: int) -> None:
    """Lock the row for 0.1 s, again and again; with a second one at it there is hardly a moment between.

    Who has just given it back often gets it again before one that waits, and so a renewal waits for several.
    """
    connection = await asyncpg.connect(url)
    try:
        while True:
            async with connection.transaction():
                await connection.execute(
                    "select from rara.lease where lease_token = $1 for update", lease_token
                )
                await asyncio.sleep(0.1)
    finally:
        connection.terminate()


# ---------------------------------------------------------------- a scheduler without its database


@pytest.mark.case("STREAM-1")
@pytest.mark.parametrize("others", [True, False])
async def test_a_scheduler_without_its_database_sends_its_executors_to_another(
    database_url: str, tmp_path: Path, others: bool
) -> None:
    loop = asyncio.get_running_loop()
    lease_s = 3.0
    async with contextlib.AsyncExitStack() as stack:
        proxy, url = await stack.enter_async_context(proxied(database_url))
        cut_off = await stack.enter_async_context(
            running_scheduler(
                url, tmp_path / "a", lease_s=lease_s, acquire_timeout_s=1.0, statement_timeout_s=1.0
            )
        )
        if others:
            other = await stack.enter_async_context(running_scheduler(database_url, tmp_path / "b"))
            # It is known by the executors that it has.
            await stack.enter_async_context(other.executor(["other.kind"], credit=0))
        await cut_off.define("one", {"a": {}})
        await cut_off.start("one")
        async with cut_off.executor() as executor:
            lease = (await executor.expect_job()).lease
            await executor.events(accepted(lease), running(lease))
            await executor.expect_ack(lease, 2)
            await asyncio.sleep(2 * SWEEP_S)  # it has looked around since the other came
            proxy.reset()
            proxy.refuse()
            lost_at = loop.time()
            if others:
                assert (await executor.expect("go_away", timeout_s=6)).reason == "REBALANCE"
                # Half a lease, counted from the last look that was answered.
                assert loop.time() - lost_at > lease_s / 2 - 2 * SWEEP_S
            else:
                await asyncio.sleep(1.5 * lease_s)
                assert not executor.all("go_away")
                assert not executor.ended.is_set()
            proxy.resume()


@pytest.mark.case("STREAM-1")
async def test_after_an_outage_longer_than_a_lease_living_executors_keep_their_steps(
    database_url: str, tmp_path: Path
) -> None:
    """Leases ran out while nobody could renew them. Who lives gets the time to say so; who does not, loses them."""
    settle_s = 1.5
    short: dict[str, Any] = {"acquire_timeout_s": 1.0, "statement_timeout_s": 1.0}
    async with proxied(database_url) as (proxy, url):  # noqa: SIM117 - one line each
        async with running_scheduler(url, tmp_path, settle_s=settle_s, **short) as world:
            raw = await asyncpg.connect(database_url)
            await world.define("one", {"a": {}})
            for _ in range(2):
                await world.start("one")
            async with world.executor(beat=False) as lives, world.executor(beat=False) as dies:
                jobs = [await lives.expect_job(), await dies.expect_job()]
                async with beating(lives, lambda: [jobs[0].lease.lease_token]):
                    async with beating(dies, lambda: [jobs[1].lease.lease_token]):
                        for executor, job in zip((lives, dies), jobs, strict=True):
                            await executor.events(accepted(job.lease), running(job.lease))
                            await executor.expect_ack(job.lease, 2)
                        proxy.reset()
                        proxy.refuse()
                        dies.cancel()
                        await until(
                            lambda: raw.fetchval("select bool_and(expires_at < now()) from rara.lease"),
                            "lapse",
                            10,
                        )
                    proxy.resume()
                    healed_at = await raw.fetchval("select clock_timestamp()")
                    await until(
                        lambda: raw.fetchval(
                            "select exists (select from rara.lease where expires_at > now() and lease_token = $1)",
                            jobs[0].lease.lease_token,
                        ),
                        "renewal",
                    )
                    gone = await until(
                        lambda: raw.fetchrow("select reason, ended_at, lease_token from rara.step_attempt"),
                        "reclaim",
                    )
                    assert gone["lease_token"] == jobs[1].lease.lease_token
                    assert gone["reason"] == "LEASE_EXPIRED"
                    # The last failed look may lie a little before the moment in which the way was free again.
                    assert (gone["ended_at"] - healed_at).total_seconds() > settle_s - SWEEP_S - 0.6
                    await lives.events(succeeded(jobs[0].lease))
                    await lives.expect_ack(jobs[0].lease, 3)
            assert await raw.fetchval("select attempt from rara.result") == 1
            await raw.close()
