"""Connections that are lost, taken away, pooled by somebody else, or never given back."""

import asyncio
from pathlib import Path

import asyncpg
import pytest
from rara_scheduler.domain.errors import Code
from rara_scheduler.store.pooler import PoolerUnsupported, require_sessions
from rara_testing.processes import Processes
from support.command_line import rara
from support.database_paths import Place, pgbouncer, proxied

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
        assert loop.time() - began_at < 5
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
