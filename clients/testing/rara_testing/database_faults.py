"""Makes PostgreSQL fail on command: its process, its sessions, its locks, its settings.

    faults = DatabaseFaults(dsn)
    await faults.terminate("rara-scheduler%")                # its sessions end
    async with faults.locked("select from rara.lease for update"):
        ...                                                   # whoever wants these rows waits
    async with faults.slowed("rara.lease", seconds=0.5):
        ...                                                   # each write to the table takes longer
    async with outage(postgres):                              # stopped at once, and started again at the end
        ...

The role must own the tables, and be a superuser for what concerns the whole server. Sessions of the faults call
themselves `rara-fault` and are spared. A fault that is held ends by itself after `at_most_s`, whatever becomes of
its owner.
"""

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

import asyncpg

APPLICATION = "rara-fault"
_CONNECT_S = 5.0
_UNDO_S = 30.0
_PAUSE_S = 0.1
_SCHEMA = "rara_faults"
Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
# What a session meets while the server is down, full or coming up.
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


class Server(Protocol):
    """A PostgreSQL whose process this one started, such as `EmbeddedPostgres`."""

    @property
    def pid(self) -> int | None: ...
    async def start(self) -> None: ...
    async def wait(self) -> int: ...


async def stop_immediately(server: Server) -> None:
    """What `pg_ctl stop -m immediate` does: every session ends now, and the next start recovers from the log."""
    await _end(server, signal.SIGQUIT)


async def kill_server(server: Server) -> None:
    """SIGKILL the postmaster. Its children notice and end by themselves."""
    await _end(server, signal.SIGKILL)


@asynccontextmanager
async def outage(server: Server, *, killed: bool = False) -> AsyncIterator[None]:
    """PostgreSQL is away while the block runs; at its end it is started, and answers."""
    await (kill_server(server) if killed else stop_immediately(server))
    try:
        yield
    finally:
        await server.start()


async def _end(server: Server, number: signal.Signals) -> None:
    if server.pid is None:
        raise RuntimeError("PostgreSQL does not run")
    os.kill(server.pid, number)
    await server.wait()


class DatabaseFaults:
    """Faults of one database, made from sessions of their own.

    applications: a LIKE pattern of application names; `%`: all sessions of this database.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._numbers = itertools.count(1)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session that is spared by the other faults, and may write whatever the defaults say."""
        session = await asyncpg.connect(
            self._dsn,
            timeout=_CONNECT_S,
            command_timeout=_UNDO_S,
            server_settings={"application_name": APPLICATION, "default_transaction_read_only": "off"},
        )
        try:
            yield session
        finally:
            session.terminate()

    # ------------------------------------------------------------ sessions

    async def backends(self, applications: str = "%", *, listening: bool = False) -> list[int]:
        """The process ids of these sessions; listening: only those that wait for notifications."""
        async with self.session() as session:
            return await self._pids(session, applications, listening)

    async def terminate(self, applications: str = "%", *, listening: bool = False) -> int:
        """pg_terminate_backend for each of these sessions; how many there were."""
        async with self.session() as session:
            pids = await self._pids(session, applications, listening)
            await session.execute("select pg_terminate_backend(pid) from unnest($1::int[]) as pid", pids)
        return len(pids)

    async def _pids(self, session: Session, applications: str, listening: bool) -> list[int]:
        rows = await session.fetch(
            "select pid from pg_stat_activity where backend_type = 'client backend'"
            " and datname = current_database() and application_name like $1 and application_name <> $2"
            " and (not $3 or query ilike 'listen %' or application_name like '%notify')",
            applications,
            APPLICATION,
            listening,
        )
        return [row["pid"] for row in rows]

    async def kill_backend(self, applications: str = "%") -> int:
        """SIGKILL one of these sessions' processes: the server ends all the others too and recovers. Its id.

        Needs the right to signal the server's processes. Raises LookupError when there is no such session.
        """
        found = await self.backends(applications)
        if not found:
            raise LookupError(f"no session of {applications}")
        os.kill(found[0], signal.SIGKILL)
        return found[0]

    @asynccontextmanager
    async def exhausted(self, *, leave: int = 0, at_most_s: float = 60.0) -> AsyncIterator[int]:
        """Take every connection that the server has left but `leave`; how many that were.

        Sessions that are open stay: terminate them inside the block, and they cannot come back.
        """
        held: list[Session] = []
        settings = {"application_name": APPLICATION, "idle_session_timeout": str(int(at_most_s * 1000))}
        try:
            with contextlib.suppress(asyncpg.TooManyConnectionsError):
                while True:
                    held.append(
                        await asyncpg.connect(self._dsn, timeout=_CONNECT_S, server_settings=settings)
                    )
            for session in held[len(held) - leave :]:
                await session.close(timeout=_CONNECT_S)
            yield len(held) - leave
        finally:
            for session in held:
                session.terminate()

    # ------------------------------------------------------------ locks and snapshots

    @asynccontextmanager
    async def locked(self, query: str, *arguments: object, at_most_s: float = 60.0) -> AsyncIterator[int]:
        """Hold what the query locks (`select ... for update`, `lock table ...`); the number of rows."""
        async with self._held(at_most_s, "read committed") as session:
            yield len(await session.fetch(query, *arguments))

    @asynccontextmanager
    async def snapshot(self, *, at_most_s: float = 60.0) -> AsyncIterator[None]:
        """Hold a snapshot, so that nothing that dies meanwhile can be cleaned away."""
        async with self._held(at_most_s, "repeatable read") as session:
            await session.fetchval("select count(*) from pg_class")
            yield

    @asynccontextmanager
    async def _held(self, at_most_s: float, isolation: str) -> AsyncIterator[Session]:
        async with self.session() as session:
            await session.execute(f"set idle_in_transaction_session_timeout = {int(at_most_s * 1000)}")
            await session.execute(f"begin isolation level {isolation}")
            yield session  # the session is terminated at the end: nothing to roll back

    # ------------------------------------------------------------ statements

    @asynccontextmanager
    async def slowed(
        self, table: str, *, seconds: float, step_run_id: str | None = None
    ) -> AsyncIterator[None]:
        """Each statement that writes the table takes so much longer; or each written row of one step."""
        async with self._trigger(table, f"perform pg_sleep({float(seconds)});", step_run_id):
            yield

    @asynccontextmanager
    async def refused(
        self, table: str, *, sqlstate: str = "58030", step_run_id: str | None = None
    ) -> AsyncIterator[None]:
        """Each statement that writes the table fails with this code; or each that writes a row of one step."""
        if not (len(sqlstate) == 5 and sqlstate.isalnum()):
            raise ValueError(f"{sqlstate!r} is no SQLSTATE")
        async with self._trigger(
            table, f"raise exception 'fault' using errcode = '{sqlstate}';", step_run_id
        ):
            yield

    @asynccontextmanager
    async def _trigger(self, table: str, body: str, step_run_id: str | None) -> AsyncIterator[None]:
        name = f"fault_{os.getpid()}_{next(self._numbers)}"
        level = "statement" if step_run_id is None else "row"
        condition = "true" if step_run_id is None else f"new.step_run_id::text = '{step_run_id}'"
        remove = f"drop trigger if exists {name} on {table}; drop function if exists {_SCHEMA}.{name}()"
        try:
            await self._insist(
                f"create schema if not exists {_SCHEMA};"
                f"create function {_SCHEMA}.{name}() returns trigger language plpgsql as $$"
                f" begin if {condition} then {body} end if; return new; end $$;"
                f"create trigger {name} before insert or update on {table}"
                f" for each {level} execute function {_SCHEMA}.{name}()"
            )
            yield
        finally:
            await self._insist(remove)

    # ------------------------------------------------------------ settings

    @asynccontextmanager
    async def default_setting(self, name: str, value: str, applications: str = "%") -> AsyncIterator[None]:
        """Change a setting's default in this database; these sessions are ended, so that they take it up.

        What a session sets for itself wins: the scheduler's own statement_timeout, for example.
        """
        database = await self._database()
        try:
            await self._insist(f"alter database {database} set {name} = '{value}'")
            await self.terminate(applications)
            yield
        finally:
            await self._insist(f"alter database {database} reset {name}")
            await self._insist_terminate(applications)

    def read_only(self, applications: str = "%") -> contextlib.AbstractAsyncContextManager[None]:
        """New transactions may not write, as after a failover to a standby or on a full disk."""
        return self.default_setting("default_transaction_read_only", "on", applications)

    def statement_timeout(
        self, seconds: float, applications: str = "%"
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Statements of sessions that set no timeout of their own are cancelled after so long."""
        return self.default_setting("statement_timeout", str(int(seconds * 1000)), applications)

    # ------------------------------------------------------------ being there in spite of other faults

    async def _database(self) -> str:
        async with self.session() as session:
            return str(await session.fetchval("select quote_ident(current_database())"))

    async def _insist(self, statements: str) -> None:
        """Run statements as one transaction, again and again until the server is there and no lock is in the way."""
        async with asyncio.timeout(_UNDO_S):
            while True:
                try:
                    async with self.session() as session:
                        await session.execute("set lock_timeout = 1000")
                        await session.execute(statements)
                    return
                except (asyncpg.SyntaxOrAccessError, asyncpg.DataError):
                    raise
                except _AWAY:
                    await asyncio.sleep(_PAUSE_S)

    async def _insist_terminate(self, applications: str) -> None:
        async with asyncio.timeout(_UNDO_S):
            while True:
                try:
                    await self.terminate(applications)
                    return
                except _AWAY:
                    await asyncio.sleep(_PAUSE_S)
