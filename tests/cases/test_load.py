"""What many writers at once do to the database: deadlocks, transactions held too long, notifications."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import Guard
from rara_scheduler.loops.notify import NotifyLoop
from rara_scheduler.store.database import LockTimeout
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.queries import query
from rara_testing.auto_executor import AutoExecutor, AutoJob
from rara_testing.fault_proxy import Direction, FaultProxy
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until
from support.store_world import (
    StoreWorld,
    accepted,
    ending,
    progress,
    reports,
    running,
    store_world,
    succeeded,
)

# ---------------------------------------------------------------- batch writers in opposite order


@pytest_asyncio.fixture
async def worlds(database_url: str) -> AsyncIterator[list[StoreWorld]]:
    async with store_world(database_url) as first, store_world(database_url) as second:
        yield [first, second]


async def deadlocks(world: StoreWorld) -> int:
    # Counters arrive when the sessions that hold them are idle or gone.
    await asyncio.sleep(1.1)
    return int(
        await world.raw.fetchval("select deadlocks from pg_stat_database where datname = current_database()")
    )


class Crowd:
    """500 leased steps of many runs, and writers of every kind that are at them at once."""

    def __init__(self, worlds: list[StoreWorld], lasting_s: float) -> None:
        self.worlds = worlds
        self.first = worlds[0]
        self.dice = random.Random(89)
        self.end = time.monotonic() + lasting_s
        self.held: dict[int, Grant] = {}
        self.sequence: dict[int, int] = {}
        self.turns = dict.fromkeys(("events", "beats", "sweeps", "cancels"), 0)

    async def begin(self) -> None:
        await self.first.define("wide", {f"s{n}": {} for n in range(50)}, on_failure="ON_FAILURE_CONTINUE")
        for _ in range(10):
            await self.first.start("wide")
        for grant in await self.first.lease(500):
            self.held[grant.lease_token] = grant
            self.sequence[grant.lease_token] = 2
        assert len(self.held) == 500
        await self.first.commits.commit(
            [reports(g, accepted(), running(), executor_id=g.executor_id) for g in self.held.values()]
        )

    def is_on(self) -> bool:
        return time.monotonic() < self.end

    async def write_events(self, world: StoreWorld) -> None:
        """Progress of many steps in one batch. Each lease is written by one of the two schedulers."""
        index = self.worlds.index(world)
        while self.is_on():
            mine = [g for t, g in self.held.items() if t % 2 == index]
            batch = []
            for grant in self.dice.sample(mine, 60):
                self.sequence[grant.lease_token] += 1
                item = progress(self.sequence[grant.lease_token])
                batch.append(reports(grant, item, executor_id=grant.executor_id))
            result = await world.commit(batch)
            for token in result.busy:  # left out, since somebody held it for too long: it comes again
                self.sequence[token] -= 1
            self.turns["events"] += len(batch)

    async def beat(self, world: StoreWorld) -> None:
        """One scheduler renews in ascending order, the other in descending."""
        order = sorted(self.held.values(), key=lambda g: g.step_run_id, reverse=world is not self.first)
        while self.is_on():
            await world.leases.renew([(g.step_run_id, g.lease_token, g.executor_id) for g in order])
            self.turns["beats"] += 1

    async def sweep(self, world: StoreWorld) -> None:
        """Asks for the end of leases as if they had expired; they have not, by the time it looks again."""
        while self.is_on():
            some = self.dice.sample(list(self.held.values()), 200)
            await world.commits.commit(
                [reports(g, ending("LEASE_EXPIRED", Guard.EXPIRED), executor_id=None) for g in some],
                skip_locked=True,
            )
            await world.sweeps.promote_due()
            self.turns["sweeps"] += 1

    async def cancel(self, world: StoreWorld) -> None:
        while self.is_on():
            run_id = self.dice.choice(list(self.held.values())).workflow_run_id
            with contextlib.suppress(LockTimeout):  # the caller would try again
                # Within its grace a cancelled lease is renewed like any other.
                await world.cancel(run_id, grace_s=600)
                self.turns["cancels"] += 1
            await asyncio.sleep(0.01)

    async def work(self) -> None:
        async with asyncio.TaskGroup() as group:
            for world in self.worlds:
                for work in (self.write_events, self.beat, self.sweep, self.cancel):
                    group.create_task(work(world))


async def race(worlds: list[StoreWorld], lasting_s: float) -> None:
    crowd = Crowd(worlds, lasting_s)
    first = worlds[0]
    await crowd.begin()
    crowd.end = time.monotonic() + lasting_s
    before = await deadlocks(first)
    await crowd.work()  # an exception of any writer, 40P01 among them, would come out here
    assert all(turns > lasting_s / 2 for turns in crowd.turns.values()), crowd.turns
    assert await deadlocks(first) - before <= max(1, lasting_s // 60)

    # Each event is stored once, and nothing that was not sent.
    stored = await first.raw.fetch(
        "select l.lease_token, count(e.sequence) as events, count(distinct e.sequence) as numbers,"
        " l.last_sequence, l.gaps from rara.lease l join rara.step_event e using (step_run_id)"
        " group by l.lease_token, l.last_sequence, l.gaps"
    )
    assert {r["lease_token"]: r["last_sequence"] for r in stored} == crowd.sequence
    assert {
        (r["events"] - r["last_sequence"], r["numbers"] - r["last_sequence"], r["gaps"]) for r in stored
    } == {(0, 0, 0)}
    # Every lease is its first, and ends as it would have: a success that commits first wins over the cancel.
    grants = list(crowd.held.values())
    await first.commits.commit(
        [
            reports(g, succeeded(crowd.sequence[g.lease_token] + 1), executor_id=g.executor_id)
            for g in grants[:250]
        ]
    )
    await worlds[1].commits.commit(
        [
            reports(g, succeeded(crowd.sequence[g.lease_token] + 1), executor_id=g.executor_id)
            for g in reversed(grants[250:])
        ]
    )
    rows = await first.raw.fetch(
        "select state, attempt, failures, count(*) from rara.result group by 1, 2, 3"
    )
    assert [tuple(row) for row in rows] == [("succeeded", 1, 0, 500)]
    states = await first.raw.fetch("select state, count(*) from rara.workflow_run group by state")
    assert [tuple(row) for row in states] == [("succeeded", 10)]


@pytest.mark.case("DBL-1")
async def test_writers_of_all_kinds_in_opposite_orders_do_not_deadlock(worlds: list[StoreWorld]) -> None:
    await race(worlds, 4.0)


@pytest.mark.case("DBL-1")
@pytest.mark.soak
async def test_writers_in_opposite_orders_do_not_deadlock_for_a_minute(worlds: list[StoreWorld]) -> None:
    await race(worlds, 60.0)


# ---------------------------------------------------------------- transactions over anything but SQL


class Samples:
    """What pg_stat_activity and pg_locks showed of the scheduler, looked at every 100 ms."""

    def __init__(self) -> None:
        self.looks = 0
        self.longest_idle_s = 0.0
        self.longest_lock_s = 0.0

    async def take(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        row = await connection.fetchrow(
            "select coalesce(max(extract(epoch from clock_timestamp() - a.state_change))"
            "                filter (where a.state like 'idle in transaction%'), 0)::float8 as idle_s,"
            "       coalesce(max(extract(epoch from clock_timestamp() - a.xact_start))"
            "                filter (where exists (select from pg_locks l where l.pid = a.pid and l.granted"
            "                                        and l.mode in ('RowShareLock', 'RowExclusiveLock'))), 0)::float8"
            "       as lock_s"
            "  from pg_stat_activity a"
            " where a.datname = current_database() and a.application_name like 'rara-scheduler %'"
        )
        assert row is not None
        self.looks += 1
        self.longest_idle_s = max(self.longest_idle_s, row["idle_s"])
        self.longest_lock_s = max(self.longest_lock_s, row["lock_s"])


@contextlib.asynccontextmanager
async def sampled(url: str) -> AsyncIterator[Samples]:
    samples = Samples()
    connection = await asyncpg.connect(url)

    async def look() -> None:
        while True:
            await samples.take(connection)
            await asyncio.sleep(0.1)

    task = asyncio.create_task(look(), name="samples")
    try:
        yield samples
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.close()


async def work_a_little(_: AutoJob) -> None:
    await asyncio.sleep(0.05)


async def killed_sessions(world: RunningScheduler) -> int:
    return int(
        await world.raw.fetchval(
            "select sessions_killed + sessions_fatal from pg_stat_database where datname = current_database()"
        )
    )


async def rate_of(executor: AutoExecutor, lasting_s: float) -> float:
    before = len(executor.outcomes)
    await asyncio.sleep(lasting_s)
    return (len(executor.outcomes) - before) / lasting_s


@contextlib.asynccontextmanager
async def given_up(executor: AutoExecutor) -> AsyncIterator[None]:
    """One whose session ends for its silence: what its jobs say of that is not the test's failure."""
    await executor.__aenter__()
    try:
        yield
    finally:
        with contextlib.suppress(ExceptionGroup, AssertionError):
            await executor.__aexit__(None, None, None)


async def stall_one(
    database_url: str, folder: Path, *, normal_s: float, stalled_s: float, least: float
) -> None:
    # The scheduler's idle_in_transaction_session_timeout equals its statement timeout.
    settings: dict[str, Any] = {"statement_timeout_s": 2.0, "accept_timeout_s": 1.0}
    async with running_scheduler(database_url, folder, **settings) as world:
        await world.define("wide", {f"s{n}": {} for n in range(500)})
        killed = await killed_sessions(world)
        host, _, port = world.address.rpartition(":")
        async with (
            FaultProxy(host, int(port)) as proxy,
            given_up(AutoExecutor(proxy.address, {KIND: work_a_little}, slots=8, executor_name="stalled")),
            AutoExecutor(world.address, {KIND: work_a_little}, slots=8, executor_name="other") as other,
        ):
            for _ in range(2 + int(stalled_s)):
                await world.start("wide")
            await other.wait_for(20)
            normal = await rate_of(other, normal_s)
            proxy.stall(Direction.TO_CLIENT)
            async with sampled(database_url) as samples:
                stalled = await rate_of(other, stalled_s)
            proxy.resume()
            assert samples.looks > 5 * stalled_s
            assert samples.longest_idle_s < 1.0
            assert samples.longest_lock_s < 1.0
            assert stalled >= least * normal, (stalled, normal)
            assert await killed_sessions(world) == killed


@pytest.mark.case("DBL-2")
async def test_an_executor_that_stands_still_holds_no_transaction_open(
    database_url: str, tmp_path: Path
) -> None:
    # The bound is looser than in the long run: other tests share the machine.
    await stall_one(database_url, tmp_path, normal_s=1.0, stalled_s=3.0, least=0.4)


@pytest.mark.case("DBL-2")
@pytest.mark.soak
async def test_an_executor_that_stands_still_for_half_a_minute_holds_no_transaction_open(
    database_url: str, tmp_path: Path
) -> None:
    await stall_one(database_url, tmp_path, normal_s=10.0, stalled_s=30.0, least=0.9)


@pytest.mark.case("DBL-2")
async def test_no_definition_is_loaded_inside_a_transaction(
    worlds: list[StoreWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = worlds
    await first.define("one", {"a": {"timeout": {"seconds": 60}}, "b": {"depends_on": ["a"]}})
    run_ids = [await first.start("one") for _ in range(3)]
    grants = await first.lease(3)
    open_transactions = []
    load = other.definitions.load

    async def watched_load(definition: str, version: int = 0) -> object:
        open_transactions.append(
            await first.raw.fetchval(
                "select count(*) from pg_stat_activity where datname = current_database()"
                " and application_name like 'rara-scheduler %' and state like 'idle in transaction%'"
            )
        )
        return await load(definition, version)

    monkeypatch.setattr(other.definitions, "load", watched_load)
    forget: Callable[[], None] = other.definitions._cache.clear
    await other.run_to_success(grants[0])
    forget()
    await other.cancel(grants[1].workflow_run_id)
    forget()
    await first.raw.execute("update rara.ready set deadline = now() - interval '1 s'")
    overdue = await other.sweeps.overdue_steps("00000000-0000-0000-0000-000000000000", [])
    await other.cancels.close_overdue(overdue)
    assert len(overdue) == 1
    assert open_transactions == [0, 0, 0]
    assert await first.run_state(run_ids[0]) == "failed"


# ---------------------------------------------------------------- notifications


async def commit_rate(connections: list["asyncpg.Connection[asyncpg.Record]"], lasting_s: float) -> float:
    """Commits a second of all these connections at full speed."""
    end = time.monotonic() + lasting_s
    count = 0

    async def commit(connection: "asyncpg.Connection[asyncpg.Record]", number: int) -> None:
        nonlocal count
        while time.monotonic() < end:
            await connection.execute(f"insert into public.load values ({number})")
            count += 1

    await asyncio.gather(*(commit(c, n) for n, c in enumerate(connections)))
    return count / lasting_s


class Heard:
    """Counts notifications, by the process that sent them."""

    def __init__(self) -> None:
        self.by_pid: dict[int, int] = {}

    def __call__(self, _: object, pid: int, *__: object) -> None:
        self.by_pid[pid] = self.by_pid.get(pid, 0) + 1

    @property
    def count(self) -> int:
        return sum(self.by_pid.values())

    async def more_than(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.count <= count:
                await asyncio.sleep(0.01)


async def compare_rates(
    database_url: str,
    *,
    connections: int,
    windows: int,
    window_s: float,
    judged: Callable[[list[float]], float],
) -> None:
    """Commit rates with and without a scheduler that has something to tell all the time, in turns.

    judged: which of the windows' ratios counts.
    """
    heard = Heard()
    async with contextlib.AsyncExitStack() as stack:
        opened = []
        for _ in range(connections + 1):
            connection = await asyncpg.connect(database_url)
            stack.push_async_callback(connection.close)
            opened.append(connection)
        listener, *writers = opened
        await listener.execute("create table public.load (n int)")
        await listener.add_listener("rara_work", heard)
        ratios = []
        for _ in range(windows):
            quiet = await commit_rate(writers, window_s)
            loop = NotifyLoop(database_url, hint=lambda: None)
            telling = asyncio.create_task(tell_all_the_time(loop), name="telling")
            notifying = asyncio.create_task(loop.run(), name="notify")
            before, began_at = heard.count, time.monotonic()
            await heard.more_than(before)
            loud = await commit_rate(writers, window_s)
            lasted_s = time.monotonic() - began_at
            for task in (telling, notifying):
                task.cancel()
            await asyncio.gather(telling, notifying, return_exceptions=True)
            assert heard.count - before <= 20 * lasted_s + 2
            ratios.append(loud / quiet)
        assert judged(ratios) >= 0.8, ratios


async def tell_all_the_time(loop: NotifyLoop) -> None:
    while True:
        loop.tell_others()
        await asyncio.sleep(0.001)


@pytest.mark.case("DBL-3")
async def test_notifications_do_not_slow_commits(database_url: str) -> None:
    # On a machine that others use, the best of some windows: writers that queue would be slow in each of them.
    await compare_rates(database_url, connections=32, windows=4, window_s=0.4, judged=max)


@pytest.mark.case("DBL-3")
@pytest.mark.soak
async def test_notifications_do_not_slow_commits_of_sixty_four_connections(database_url: str) -> None:
    await compare_rates(database_url, connections=64, windows=6, window_s=10.0, judged=statistics.median)


@pytest.mark.case("DBL-3")
async def test_notifications_are_merged_and_come_from_no_transaction_of_work(
    database_url: str, tmp_path: Path
) -> None:
    """Steps are submitted where no executor is, so that every one of them is worth a hint."""
    heard = Heard()
    # Without polling nothing but the hint can start a step soon.
    settings: dict[str, Any] = {"poll_s": 5.0, "sweep_s": 5.0}
    async with (
        running_scheduler(database_url, tmp_path / "a", **settings) as first,
        running_scheduler(database_url, tmp_path / "b", **settings) as second,
    ):
        await first.define("one", {"a": {}, "b": {"depends_on": ["a"]}})
        await first.raw.add_listener("rara_work", heard)
        notifiers = await until(lambda: notify_pids(first), "both notifying sessions")
        started_at: dict[str, float] = {}

        async def work(job: AutoJob) -> None:
            started_at[job.lease.step_run_id] = time.monotonic()
            for number in range(5):
                await job.progress(number / 5)

        async with AutoExecutor(second.address, {KIND: work}, slots=100) as executor:
            began_at = time.monotonic()
            for _ in range(15):
                await asyncio.gather(*(first.start("one") for _ in range(8)))
            await executor.wait_for(240)
            assert heard.count <= 20 * (time.monotonic() - began_at) * 2 + 4
            assert 0 < heard.count < 120
            took_s = []
            for _ in range(7):
                await asyncio.sleep(0.1)  # idle
                before = time.monotonic()
                run_id = await first.start("one")
                await first.until_run(run_id, "succeeded")
                step = await first.raw.fetchval(
                    "select step_run_id::text from rara.step_run where workflow_run_id = $1::uuid"
                    " and step_name = 'a'",
                    run_id,
                )
                took_s.append(started_at[step] - before)
            assert min(took_s) < 0.2, took_s
            assert statistics.median(took_s) < 1.0, took_s  # polling alone would take seconds
        assert set(heard.by_pid) <= notifiers


@pytest.mark.case("DBL-3")
async def test_what_a_commit_makes_ready_is_told_to_those_whose_executors_run_it(
    database_url: str, tmp_path: Path
) -> None:
    """The steps of one run change between the executors of two schedulers."""
    settings: dict[str, Any] = {"poll_s": 5.0, "sweep_s": 5.0}
    kinds = ("work.first", "work.second")
    async with (
        running_scheduler(database_url, tmp_path / "a", **settings) as first,
        running_scheduler(database_url, tmp_path / "b", **settings) as second,
    ):
        chain: dict[str, dict[str, Any]] = {
            f"s{n}": {"kind": kinds[n % 2]} | ({"depends_on": [f"s{n - 1}"]} if n else {}) for n in range(6)
        }
        await first.define("chain", chain)
        async with (
            AutoExecutor(first.address, {kinds[0]: nothing_to_do}, slots=4),
            AutoExecutor(second.address, {kinds[1]: nothing_to_do}, slots=4),
        ):
            await first.until_run(await first.start("chain"), "succeeded")  # each has seen the other by then
            took_s = []
            for _ in range(3):
                before = time.monotonic()
                await first.until_run(await first.start("chain"), "succeeded")
                took_s.append(time.monotonic() - before)
            assert min(took_s) < 2.0, took_s  # by polls alone each of the five changes takes seconds


async def nothing_to_do(job: AutoJob) -> None:
    pass


async def notify_pids(world: RunningScheduler) -> set[int] | None:
    rows = await world.raw.fetch(
        "select pid from pg_stat_activity"
        " where datname = current_database() and application_name = 'rara-scheduler notify'"
    )
    return {row["pid"] for row in rows} if len(rows) == 2 else None


@pytest.mark.case("DBL-3")
def test_no_statement_of_work_notifies() -> None:
    for name in (
        "apply_batch",
        "grant_leases",
        "renew_leases",
        "start_runs",
        "update_runs",
        "release_dependants",
    ):
        assert "notify" not in query(name).lower()
