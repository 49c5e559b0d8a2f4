"""The database's faults do what they say, and are undone."""

import asyncio
from pathlib import Path

import asyncpg
import pytest
from rara_scheduler.embedded import EmbeddedPostgres
from rara_testing.database_faults import DatabaseFaults, kill_server, outage, stop_immediately

APPLICATION = "victim"


async def victim(dsn: str, **settings: str) -> "asyncpg.Connection[asyncpg.Record]":
    return await asyncpg.connect(dsn, server_settings={"application_name": APPLICATION} | settings)


async def is_ended(connection: "asyncpg.Connection[asyncpg.Record]") -> bool:
    try:
        await connection.fetchval("select 1", timeout=5)
    except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
        return True
    return False


async def test_sessions_are_terminated_by_name_and_others_stay(database_url: str) -> None:
    faults = DatabaseFaults(database_url)
    gone, stays = await victim(database_url), await asyncpg.connect(database_url)
    assert await faults.backends("vic%") == [gone.get_server_pid()]
    assert await faults.terminate("vic%") == 1
    assert await is_ended(gone)
    assert not await is_ended(stays)
    await stays.close()


async def test_listening_sessions_are_terminated(database_url: str) -> None:
    faults = DatabaseFaults(database_url)
    listener, other = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    await listener.execute("listen anything")
    assert await faults.terminate(listening=True) == 1
    assert await is_ended(listener)
    assert not await is_ended(other)
    await other.close()


async def test_rows_are_locked_until_the_block_ends(database_url: str) -> None:
    connection = await victim(database_url, lock_timeout="100")
    await connection.execute("create table t as select generate_series(1, 3) as n")
    async with DatabaseFaults(database_url).locked("select from t where n = $1 for update", 2) as rows:
        assert rows == 1
        assert await connection.execute("delete from t where n = 1") == "DELETE 1"
        with pytest.raises(asyncpg.LockNotAvailableError):
            await connection.execute("delete from t where n = 2")
    assert await connection.execute("delete from t where n = 2") == "DELETE 1"
    await connection.close()


async def test_a_lock_ends_by_itself_after_its_bound(database_url: str) -> None:
    connection = await victim(database_url, lock_timeout="5000")
    await connection.execute("create table t as select 1 as n")
    async with DatabaseFaults(database_url).locked("lock table t", at_most_s=0.2):
        assert await connection.execute("delete from t") == "DELETE 1"
    await connection.close()


async def test_a_snapshot_holds_back_what_may_be_cleaned(database_url: str) -> None:
    connection = await victim(database_url)
    holders = "select count(*) from pg_stat_activity where backend_xmin is not null and application_name = 'rara-fault'"
    async with DatabaseFaults(database_url).snapshot():
        assert await connection.fetchval(holders) == 1
    async with asyncio.timeout(5):
        while await connection.fetchval(holders):
            await asyncio.sleep(0.01)
    await connection.close()


async def test_statements_are_slowed_or_refused_and_then_are_not(database_url: str) -> None:
    faults = DatabaseFaults(database_url)
    connection = await victim(database_url, statement_timeout="100")
    await connection.execute("create table t (step_run_id int)")
    async with faults.slowed("t", seconds=5):
        with pytest.raises(asyncpg.QueryCanceledError):
            await connection.execute("insert into t values (1)")
    async with faults.refused("t", sqlstate="53100", step_run_id="2"):
        await connection.execute("insert into t values (1)")
        with pytest.raises(asyncpg.DiskFullError):
            await connection.execute("insert into t values (2)")
    await connection.execute("insert into t values (2)")
    assert await connection.fetchval("select count(*) from t") == 2
    await connection.close()


async def test_a_read_only_default_reaches_every_session(database_url: str) -> None:
    faults = DatabaseFaults(database_url)
    old = await victim(database_url)
    async with faults.read_only(APPLICATION):
        assert await is_ended(old)
        connection = await victim(database_url)
        with pytest.raises(asyncpg.ReadOnlySQLTransactionError):
            await connection.execute("create table t ()")
    assert await is_ended(connection)
    connection = await victim(database_url)
    await connection.execute("create table t ()")
    await connection.close()


async def test_a_small_statement_timeout_cancels(database_url: str) -> None:
    async with DatabaseFaults(database_url).statement_timeout(0.05, APPLICATION):
        connection = await victim(database_url)
        with pytest.raises(asyncpg.QueryCanceledError):
            await connection.execute("select pg_sleep(5)")
        await connection.close()


async def test_a_server_of_its_own(tmp_path: Path) -> None:
    """Exhausted connections, a killed backend, outages: what would disturb the other tests' server."""
    settings = {"max_connections": "12", "fsync": "off"}
    async with EmbeddedPostgres(tmp_path / "postgres", settings=settings) as postgres:
        faults = DatabaseFaults(postgres.dsn)
        connection = await victim(postgres.dsn)
        async with faults.exhausted(leave=1) as taken:
            assert 5 < taken < 12
            last = await victim(postgres.dsn)
            with pytest.raises(asyncpg.TooManyConnectionsError):
                await victim(postgres.dsn)
            assert not await is_ended(connection)
        await last.close()
        bystander = await asyncpg.connect(postgres.dsn)
        assert await faults.kill_backend(APPLICATION) == connection.get_server_pid()
        async with asyncio.timeout(10):
            while not (await is_ended(connection) and await is_ended(bystander)):
                await asyncio.sleep(0.01)
        before = postgres.pid
        async with outage(postgres):
            assert postgres.pid is None
            with pytest.raises(OSError):  # noqa: PT011 - which one depends on how far the server's end is
                await asyncpg.connect(postgres.dsn, timeout=5)
        assert postgres.pid not in (None, before)
        await (await victim(postgres.dsn)).close()
        await kill_server(postgres)
        await postgres.start()
        await stop_immediately(postgres)
        await postgres.start()
        await (await victim(postgres.dsn)).close()
