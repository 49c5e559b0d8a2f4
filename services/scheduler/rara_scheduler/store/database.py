"""Connections to PostgreSQL: two bounded pools, and one translation of what can go wrong with them."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from enum import StrEnum
from types import TracebackType
from typing import TypeAlias

import asyncpg

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.telemetry.port import SILENT, Metrics

# What the pools hand out. An alias, since the driver's own name says little.
Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"


ENGINE_LOCK_TIMEOUT_S = 1.0

# Hot tables are often empty when their statistics are made, and the planner would then read them whole for each row
# that a statement looks up by its key. What is looked up has an index.
PLANNER = {"enable_seqscan": "off"}
# The engine's statements have one good plan each, and planning them takes as long as carrying them out for one step.
ENGINE_PLANNER = PLANNER | {"plan_cache_mode": "force_generic_plan"}


class Lane(StrEnum):
    """Which pool a statement takes its connection from."""

    CALLS = "calls"  # API calls: may be many, may wait
    ENGINE = "engine"  # lease, commit, heartbeat, reclaim: must not stand behind calls


class StoreUnavailable(Fault):
    """PostgreSQL is away, restarting, read-only, full or unreachable: nothing was decided, try again."""

    def __init__(self, cause: str) -> None:
        super().__init__(Code.STORE_UNAVAILABLE, f"the database does not answer: {cause}", retry_after_s=1.0)


class LockTimeout(StoreUnavailable):
    """Somebody else holds a row for too long; the database itself is well."""


class PoolTimeout(Fault):
    def __init__(self, waited_s: float) -> None:
        super().__init__(
            Code.POOL_TIMEOUT, f"no database connection was free within {waited_s:g} s", retry_after_s=0.5
        )


class Conflict(Exception):
    """SQLSTATE class 40 (deadlock, serialization): the transaction had no effect and may be repeated."""


class DataRefused(Exception):
    """SQLSTATE class 22 or 23: the data itself cannot be stored. Repeating it cannot help."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(f"{sqlstate}: {message}")
        self.sqlstate = sqlstate


def _translate(error: asyncpg.PostgresError) -> Exception:
    state = getattr(error, "sqlstate", None) or ""
    if state[:2] == "40":
        return Conflict(str(error))
    if state[:2] in ("22", "23"):
        return DataRefused(state, str(error))
    if state == "55P03":
        return LockTimeout("55P03 lock not available")
    # 08 connection, 53 resources, 57 operator intervention (a cancelled statement too),
    # 25006 read-only transaction (a demoted primary, a full disk's safety switch), 58 system error
    if state[:2] in ("08", "53", "57", "58") or state == "25006":
        return StoreUnavailable(f"{state} {type(error).__name__}")
    return error


def _translation(error: BaseException) -> Exception | None:
    """What is raised in place of one of the driver's errors; None: it passes unchanged, a bug of ours among others."""
    if isinstance(error, asyncpg.PostgresError):
        translated = _translate(error)
        return None if translated is error else translated
    if isinstance(error, asyncpg.ClientConfigurationError):
        return None  # the address itself is wrong, and stays so
    # A connection that was closed under us has no narrower class.
    if isinstance(error, asyncpg.InterfaceError | asyncpg.InternalClientError | OSError):
        return StoreUnavailable(type(error).__name__)
    return None


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn the driver's errors into StoreUnavailable, Conflict or DataRefused; bugs of ours pass unchanged."""
    try:
        yield
    except Exception as error:
        translated = _translation(error)
        if translated is None:
            raise
        raise translated from error


async def _keep_as_it_is(_: "asyncpg.Connection[asyncpg.Record]") -> None:
    """Nothing of ours leaves session state behind, so the driver's reset would be a round trip for nothing."""


async def _close(pool: asyncpg.Pool, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await pool.close()
    except TimeoutError:
        pool.terminate()


class Database:
    """Pools of the scheduler. `open` connects lazily, so that a start does not need PostgreSQL to be up."""

    def __init__(
        self,
        dsn: str,
        *,
        call_connections: int = 6,
        engine_connections: int = 6,
        acquire_timeout_s: float = 5.0,
        statement_timeout_s: float = 20.0,
        lock_timeout_s: float = 5.0,
        metrics: Metrics = SILENT,
    ) -> None:
        self._dsn = dsn
        self._metrics = metrics
        self._lock_timeout_s = lock_timeout_s
        self._sizes = {Lane.CALLS: call_connections, Lane.ENGINE: engine_connections}
        self._pools: dict[Lane, asyncpg.Pool] = {}
        self._acquire_timeout_s = acquire_timeout_s
        self._command_timeout_s = statement_timeout_s + 5.0
        self._server_settings = {
            "application_name": "rara-scheduler",
            "jit": "off",  # compiling a statement costs more than any of ours takes
            "timezone": "UTC",
            "statement_timeout": str(int(statement_timeout_s * 1000)),
            "lock_timeout": str(int(lock_timeout_s * 1000)),
            "idle_in_transaction_session_timeout": str(int(statement_timeout_s * 1000)),
        }

    async def open(self) -> None:
        for lane, size in self._sizes.items():
            self._pools[lane] = await asyncpg.create_pool(
                self._dsn,
                min_size=0,
                max_size=size,
                command_timeout=self._command_timeout_s,
                timeout=self._acquire_timeout_s,
                server_settings=self._server_settings
                | {
                    "application_name": f"rara-scheduler {lane}",
                    # The engine must not stand still behind one row: it goes on with the others.
                    "lock_timeout": str(int(min(self._lock_timeout_s, ENGINE_LOCK_TIMEOUT_S) * 1000))
                    if lane is Lane.ENGINE
                    else self._server_settings["lock_timeout"],
                }
                | (ENGINE_PLANNER if lane is Lane.ENGINE else PLANNER),
                max_inactive_connection_lifetime=300.0,
                reset=_keep_as_it_is,
            )

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """Close both pools; connections still in use after `timeout_s` are terminated."""
        await asyncio.gather(*(_close(pool, timeout_s) for pool in self._pools.values()))
        self._pools.clear()

    def connection(self, lane: Lane = Lane.CALLS) -> AbstractAsyncContextManager[Connection]:
        """A connection outside any transaction. Raises PoolTimeout, or what `translated_errors` lists."""
        return _Borrowed(functools.partial(self._acquire, lane), self._release)

    async def _acquire(self, lane: Lane) -> tuple[asyncpg.Pool, Connection]:
        pool = self._pools[lane]
        began_at = time.perf_counter() if self._metrics.is_on else 0.0
        try:
            # Not the pool's own timeout, which costs as much as a small statement.
            async with asyncio.timeout(self._acquire_timeout_s):
                connection = await pool.acquire()
        except TimeoutError:
            self._metrics.pool_timed_out(lane)
            raise PoolTimeout(self._acquire_timeout_s) from None
        except asyncpg.ProtocolViolationError as error:
            # A pooler's, for whatever keeps it from the database.
            raise StoreUnavailable(str(error)) from error
        except Exception as error:
            translated = _translation(error)
            if translated is None:
                raise
            raise translated from error
        if began_at:
            self._metrics.waited_for_connection(lane, time.perf_counter() - began_at)
        return pool, connection

    async def _release(self, pool: asyncpg.Pool, connection: Connection) -> None:
        """Give a connection back; one that cannot be is ended.

        A failure here must not hide what happened to the connection's user: a cancellation that turned into another
        error would be lost, and a loop could not be stopped.
        """
        try:
            await pool.release(connection, timeout=self._acquire_timeout_s)
        except (
            OSError,
            TimeoutError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
        ):
            _end(connection)

    @asynccontextmanager
    async def transaction(self, lane: Lane = Lane.CALLS) -> AsyncIterator[Connection]:
        """A READ COMMITTED transaction; nothing but SQL may be awaited inside."""
        async with self.connection(lane) as connection, connection.transaction():
            yield connection


def _end(connection: Connection) -> None:
    with suppress(asyncpg.InterfaceError):  # it has been given back after all, or the pool has ended it
        connection.terminate()


class _Borrowed:
    """A connection for the time of an `async with`. A class, since each statement of a call pays for it."""

    __slots__ = ("_acquire", "_borrowed", "_release")

    def __init__(
        self,
        acquire: Callable[[], Awaitable[tuple[asyncpg.Pool, Connection]]],
        release: Callable[[asyncpg.Pool, Connection], Awaitable[None]],
    ) -> None:
        self._acquire = acquire
        self._release = release
        self._borrowed: tuple[asyncpg.Pool, Connection] | None = None

    async def __aenter__(self) -> Connection:
        self._borrowed = await self._acquire()
        return self._borrowed[1]

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._borrowed is not None  # noqa: S101 - it was entered
        pool, connection = self._borrowed
        if isinstance(error, asyncpg.InternalClientError):
            # The server ended while the driver was asking it about types: the driver has lost its place in the
            # protocol, and nothing more can be asked on this connection.
            _end(connection)
        await self._release(pool, connection)
        if isinstance(error, TimeoutError):  # the driver's own bound on one statement
            raise StoreUnavailable("statement took too long") from error
        translated = None if error is None else _translation(error)
        if translated is not None:
            raise translated from error
