"""Refusing a connection pooler that takes away what a database session is.

Rara prepares statements, listens, and sets time limits for its sessions. Through a pooler that changes the server
connection between two transactions, all three go wrong later, under load, and without a word.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import asyncpg

from rara_scheduler.domain.errors import Code, Fault

# What is asked for is looked for again: some poolers are told to swallow settings.
_SETTING, _VALUE_MS = "statement_timeout", 4321
_KEPT = "select setting::int from pg_settings where name = 'statement_timeout'"
_CONNECT_S = 1.5
_ANSWER_S = 5.0  # a path that swallows everything shows itself by this alone
_ROUNDS = 3
_PID = "select pg_backend_pid()"

Plain: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


class PoolerUnsupported(Fault):
    def __init__(self, what: str) -> None:
        super().__init__(
            Code.POOLER_UNSUPPORTED,
            f"a connection pooler stands before the database and {what}: give the address of PostgreSQL itself,"
            " or of a pooler in session mode that keeps session settings",
        )


def refuses_settings(error: asyncpg.PostgresError) -> bool:
    """Whether this is a pooler's answer to session settings in the start of a connection."""
    return isinstance(error, asyncpg.ProtocolViolationError) and "startup parameter" in str(error)


async def require_sessions(dsn: str) -> None:
    """Raise PoolerUnsupported unless connections are sessions. What else can go wrong with them passes unchanged."""
    async with _connect(dsn) as first:
        own = await _ask(first, _PID)
        # PostgreSQL itself names its process in the start of a connection; a pooler makes a number up.
        if own == first.get_server_pid():
            return
        if await _ask(first, _KEPT) != _VALUE_MS:
            raise PoolerUnsupported("drops session settings")
        try:
            async with asyncio.timeout(_CONNECT_S), _connect(dsn) as second:
                await _compare(first, own, second)
        except TimeoutError:
            raise PoolerUnsupported("has no two connections for us at one time") from None


async def _compare(first: Plain, own: int, second: Plain) -> None:
    """Hold a transaction on one connection, and see whether the other keeps its backend.

    Some rounds of it: a pooler that takes its server connections in turn may give back the right one by chance.
    """
    for _ in range(_ROUNDS):
        async with second.transaction():
            if await second.fetchval(_PID) == own or await _ask(first, _PID) != own:
                raise PoolerUnsupported("changes the server connection between transactions")


async def _ask(connection: Plain, question: str) -> int:
    """One number. In a transaction, since even the driver's steps of one statement may else go to two backends."""
    try:
        async with connection.transaction():
            return int(await connection.fetchval(question))
    except (asyncpg.ProtocolViolationError, asyncpg.ConnectionDoesNotExistError) as error:
        if "transaction blocks not allowed" in str(error):
            raise PoolerUnsupported("allows no transactions") from error
        raise


@asynccontextmanager
async def _connect(dsn: str) -> AsyncIterator[Plain]:
    try:
        connection = await asyncpg.connect(
            dsn,
            timeout=_CONNECT_S,
            command_timeout=_ANSWER_S,
            statement_cache_size=0,
            server_settings={"application_name": "rara-scheduler check", _SETTING: str(_VALUE_MS)},
        )
    except asyncpg.ProtocolViolationError as error:
        if refuses_settings(error):
            raise PoolerUnsupported("refuses session settings") from error
        raise
    try:
        yield connection
    finally:
        connection.terminate()
