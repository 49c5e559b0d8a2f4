"""Connections that are lost, taken away, pooled by somebody else, or never given back."""

import asyncio
import contextlib
import random
import statistics
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from rara_scheduler.domain.errors import Code
from rara_scheduler.loops.notify import NotifyLoop
from rara_scheduler.store.database import Database, Lane, PoolTimeout
from rara_scheduler.store.pooler import PoolerUnsupported, require_sessions
from rara_testing.auto_executor import AutoExecutor
from rara_testing.fault_proxy import FaultProxy
from rara_testing.processes import Processes
from support.command_line import rara
from support.database_paths import Place, pgbouncer, proxied
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until

REFUSES_SETTINGS = "ignore_startup_parameters = extra_float_digits"
DROPS_SETTINGS = (
    "ignore_startup_parameters = statement_timeout,lock_timeout,idle_in_transaction_session_timeout,jit"
)


@pytest.mark.case("DBC-4")
@pytest.mark.needs("pgbouncer")
@pytest.mark.parametrize(
    ("mode", "option"),
    [("transaction", REFUSES_SETTINGS), ("transaction", DROPS_SETTINGS), ("statement", DROPS_SETTINGS)],
    ids=["refuses settings", "drops settings", "no transactions"],
)
async def test_a_scheduler_behind_a_transaction_pooler_says_so_and_ends(
    database_url: str, tmp_path: Path, mode: str, option: str
) -> None:
    async with (
        pgbouncer(database_url, tmp_path, mode, option) as url,
        Processes(tmp_path / "scheduler") as processes,
    ):
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        without = await processes.start(
            "without", ["rara-scheduler"]
        )  # what starting itself takes here and now
        assert await without.wait() == 2
        started_s = loop.time() - began_at
        began_at = loop.time()
        scheduler = await processes.start(
            "scheduler",
            ["rara-scheduler"],
            env={
                "RARA_DATABASE_URL": url,
                "RARA_LISTEN": "127.0.0.1:0",
                "RARA_BLOB_STORE": f"file://{tmp_path / 'blobs'}",
            },
        )
        assert await scheduler.wait() == 1
        assert loop.time() - began_at < 5 + started_s
        assert "POOLER_UNSUPPORTED" in scheduler.stderr.read_text()
        assert not scheduler.lines  # it never said that it listens
        asked = await rara("db", "migrate", "--database-url", url)
        assert (asked.code, "POOLER_UNSUPPORTED" in asked.err) == (5, True)


@pytest.mark.case("DBC-4")
@pytest.mark.needs("pgbouncer")
@pytest.mark.parametrize("pool_size", [1, 3])
@pytest.mark.parametrize(
    "order", ["server_round_robin = 0", "server_round_robin = 1"], ids=["last", "in turn"]
)
async def test_a_pooler_that_keeps_settings_is_told_by_what_it_does(
    database_url: str, tmp_path: Path, pool_size: int, order: str
) -> None:
    """Newer poolers hand settings on. Here the database itself has what the check asks for, to the same effect."""
    name = Place.of(database_url).database
    raw = await asyncpg.connect(database_url)
    await raw.execute(f"alter database {name} set statement_timeout = 4321")
    await raw.close()
    options = (DROPS_SETTINGS, order)
    async with pgbouncer(database_url, tmp_path, "transaction", *options, pool_size=pool_size) as url:
        busy = await asyncpg.connect(url, statement_cache_size=0)
        if pool_size > 1:  # another client has made the pooler open more connections
            async with busy.transaction():
                await require_sessions_refused(url, "between transactions")
        await require_sessions_refused(url, "between transactions")
        await busy.close()
    async with pgbouncer(database_url, tmp_path, "session", *options, pool_size=3) as url:
        await require_sessions(url)
    async with pgbouncer(database_url, tmp_path, "session", *options, pool_size=1) as url:
        await require_sessions_refused(url, "no two connections")


async def require_sessions_refused(url: str, why: str) -> None:
    with pytest.raises(PoolerUnsupported, match=why) as raised:
        async with asyncio.timeout(5):
            await require_sessions(url)
    assert raised.value.code is Code.POOLER_UNSUPPORTED


@pytest.mark.case("DBC-4")
async def test_postgresql_itself_is_never_taken_for_a_pooler(database_url: str) -> None:
    await require_sessions(database_url)
    async with proxied(database_url) as (_, url):
        await asyncio.gather(*(require_sessions(url) for _ in range(10)))


# ---------------------------------------------------------------- connections that are never given back


async def take_and_cancel(database: Database, count: int, at_once: int, dice: random.Random) -> None:
    """Take a connection, ask something, and be cancelled at any moment of it; `at_once` at a time."""

    async def one(number: int) -> None:
        lane = (Lane.CALLS, Lane.ENGINE)[number % 2]
        held = database.transaction(lane) if number % 3 else database.connection(lane)
        async with held as connection:
            await connection.fetchval("select pg_sleep(0.002)")

    for start in range(0, count, at_once):
        tasks = [asyncio.create_task(one(number)) for number in range(start, start + at_once)]
        loop = asyncio.get_running_loop()
        for task in tasks:
            loop.call_later(dice.uniform(0, 0.02), task.cancel)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError | PoolTimeout), repr(outcome)


async def survive_cancels(database_url: str, count: int) -> None:
    dice = random.Random(464)
    loop = asyncio.get_running_loop()
    async with proxied(database_url) as (proxy, url):
        database = Database(url, call_connections=5, engine_connections=3, acquire_timeout_s=1.0)
        await database.open()
        raw = await asyncpg.connect(database_url)
        try:
            for delay_s in (0.0, 0.005):
                proxy.delay(delay_s)  # so that some are cancelled while they connect
                await take_and_cancel(database, count // 2, 50, dice)
            proxy.delay(0.0)
            for lane, size in ((Lane.CALLS, 5), (Lane.ENGINE, 3)):
                async with contextlib.AsyncExitStack() as held:
                    async with asyncio.timeout(1):
                        for connection in [database.connection(lane) for _ in range(size)]:
                            await held.enter_async_context(connection)
                    began_at = loop.time()
                    with pytest.raises(PoolTimeout) as full:
                        async with database.connection(lane):
                            pass
                    assert full.value.code is Code.POOL_TIMEOUT
                    assert 0.9 < loop.time() - began_at < 2

            async def settled() -> bool:
                rows = await raw.fetch(
                    "select application_name, state from pg_stat_activity"
                    " where datname = current_database() and application_name like 'rara-scheduler %'"
                )
                names = [row["application_name"].rpartition(" ")[2] for row in rows]
                states = {row["state"] for row in rows}
                return names.count("calls") <= 5 and names.count("engine") <= 3 and states <= {"idle"}

            # A connection whose end was asked for is gone a moment later.
            await until(settled, "quiet sessions within the pools' sizes", 5)
            began_at = loop.time()
            await database.close()
            assert loop.time() - began_at < 5
            await until(
                lambda: raw.fetchval(
                    "select count(*) = 0 from pg_stat_activity where application_name like 'rara-scheduler %'"
                    " and datname = current_database()"
                ),
                "end of all sessions",
            )
        finally:
            await raw.close()


@pytest.mark.case("DBC-1")
async def test_waits_that_are_cancelled_at_any_moment_give_their_connection_back(database_url: str) -> None:
    await survive_cancels(database_url, 400)


@pytest.mark.case("DBC-1")
@pytest.mark.soak
async def test_two_thousand_cancelled_waits_give_their_connections_back(database_url: str) -> None:
    await survive_cancels(database_url, 2000)


@pytest.mark.case("DBC-1")
async def test_a_pool_whose_connections_stand_still_is_closed_in_time(database_url: str) -> None:
    async with proxied(database_url) as (proxy, url):
        database = Database(url, acquire_timeout_s=0.5)
        await database.open()
        async with database.connection() as one, database.connection() as two:
            await one.fetchval("select 1")
            await two.fetchval("select 1")
        asking = asyncio.create_task(ask_slowly(database))
        await asyncio.sleep(0.1)
        proxy.stall()
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        await database.close(timeout_s=1.0)
        assert loop.time() - began_at < 5
        asking.cancel()
        assert isinstance((await asyncio.gather(asking, return_exceptions=True))[0], BaseException)


async def ask_slowly(database: Database) -> None:
    async with database.connection() as connection:
        await connection.fetchval("select pg_sleep(30)")


# ---------------------------------------------------------------- the connection that listens


POLL_S = 2.0


@contextlib.asynccontextmanager
async def two_schedulers(
    database_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[RunningScheduler, RunningScheduler, FaultProxy]]:
    """Steps are submitted to the first; the executors are at the second, which listens through the proxy."""
    poll: dict[str, Any] = {"poll_s": POLL_S, "sweep_s": 1.0}
    async with (
        running_scheduler(database_url, folder / "a", **poll) as first,
        proxied(database_url) as (proxy, url),
    ):
        monkeypatch.setattr("rara_scheduler.app.NotifyLoop", lambda _, **more: NotifyLoop(url, **more))
        async with running_scheduler(database_url, folder / "b", **poll) as second:
            await until(lambda: listener(first), "listener of the second")
            yield first, second, proxy


async def listener(first: RunningScheduler) -> int | None:
    """The process that listens for the second scheduler: its connection is the one that came last."""
    rows = await first.raw.fetch(
        "select pid from pg_stat_activity where datname = current_database()"
        " and application_name = 'rara-scheduler notify' order by backend_start"
    )
    return rows[-1]["pid"] if len(rows) > 1 else None


@pytest.mark.case("DBC-2")
@pytest.mark.parametrize("fault", ["ended", "swallowed", "reset"])
async def test_work_is_found_without_the_listener_and_the_listener_comes_back(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    loop = asyncio.get_running_loop()
    async with two_schedulers(database_url, tmp_path, monkeypatch) as (first, second, proxy):
        await first.define("one", {"a": {}})
        async with AutoExecutor(second.address, {KIND: lambda _: None}, slots=10) as executor:
            for _ in range(3):
                await first.start("one")
            await executor.wait_for(3)

            lost = await until(lambda: listener(first), "listener of the second")
            lost_at = loop.time()
            match fault:
                case "ended":
                    assert await first.raw.fetchval("select pg_terminate_backend($1::int)", lost)
                case "reset":
                    proxy.reset()
                case _:
                    proxy.drop_idle(0.3)
                    await asyncio.sleep(0.5)
            submitted_at = loop.time()
            for _ in range(10):
                await first.start("one")
            await executor.wait_for(13)
            assert loop.time() - submitted_at < POLL_S + 1.0 + 0.5
            proxy.resume()  # what was swallowed stays so; a new connection passes

            await proxy.wait_accepted(2)
            await until(lambda: another_listener(first, lost), "listener again")
            assert loop.time() - lost_at < 5
            took_s = []
            for number in range(14, 19):
                began_at = loop.time()
                await first.start("one")
                await executor.wait_for(number)
                took_s.append(loop.time() - began_at)
            # Polling alone would take half an interval in the middle; a busy machine takes some of it too.
            assert min(took_s) < 0.2, took_s
            assert statistics.median(took_s) < POLL_S / 4, took_s
    assert {row["attempt"] for row in await rows_of(database_url, "select attempt from rara.result")} == {1}


async def another_listener(first: RunningScheduler, lost: int) -> bool:
    return await listener(first) not in (None, lost)


async def rows_of(url: str, question: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url)
    try:
        return list(await connection.fetch(question))
    finally:
        await connection.close()
