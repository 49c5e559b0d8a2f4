"""Several pieces of work on one database, of which a test lets one run its next statement at a time."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any

import asyncpg
from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import Conflict, Connection, Database, Lane

_LOOK_S = 0.01
_BOUND_S = 20.0
_acting: ContextVar["Act | None"] = ContextVar("_acting", default=None)


class Act:
    """One piece of work: at a gate before its next statement, in one (perhaps waiting for a lock), or done."""

    def __init__(self, name: str, work: Coroutine[Any, Any, object], moved: asyncio.Event) -> None:
        self.name = name
        self._moved = moved  # set whenever it has come to a gate or to its end
        self.at_gate = False
        self.refused: Exception | None = None  # the store gave up, and has changed nothing
        self.pid = 0
        self._go = asyncio.Event()
        token = _acting.set(self)
        self.task = asyncio.create_task(self._run(work), name=name)
        _acting.reset(token)

    async def _run(self, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except (Fault, Conflict) as error:
            self.refused = error
        finally:
            self._moved.set()

    async def gate(self, pid: int) -> None:
        """Wait until somebody lets the next statement go."""
        self.pid = pid
        self.at_gate = True
        self._moved.set()
        await self._go.wait()

    def go(self) -> None:
        self.at_gate = False
        event, self._go = self._go, asyncio.Event()
        event.set()

    @property
    def done(self) -> bool:
        return self.task.done()


async def gate(connection: Connection) -> None:
    """Where an act waits for its turn; nobody else does."""
    if (act := _acting.get()) is not None:
        await act.gate(connection.get_server_pid())


class SteppedConnection:
    """A connection whose statements wait at the gate of whoever acts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    async def fetch(self, *arguments: Any) -> Any:
        await gate(self._connection)
        return await self._connection.fetch(*arguments)

    async def fetchrow(self, *arguments: Any) -> Any:
        await gate(self._connection)
        return await self._connection.fetchrow(*arguments)

    async def fetchval(self, *arguments: Any) -> Any:
        await gate(self._connection)
        return await self._connection.fetchval(*arguments)

    async def execute(self, *arguments: Any) -> Any:
        await gate(self._connection)
        return await self._connection.execute(*arguments)


class SteppedDatabase(Database):
    """The store's database; its statements, and the commits of its transactions, are steps of an Act."""

    @asynccontextmanager
    async def connection(self, lane: Lane = Lane.CALLS) -> AsyncIterator[Any]:
        async with super().connection(lane) as connection:
            yield SteppedConnection(connection)

    @asynccontextmanager
    async def transaction(self, lane: Lane = Lane.CALLS) -> AsyncIterator[Any]:
        async with super().transaction(lane) as connection:
            yield connection
            await gate(connection)


class Interleaver:
    """The acts that are under way. raw: a connection of its own, to see who waits for a lock."""

    def __init__(self, raw: "asyncpg.Connection[asyncpg.Record]") -> None:
        self._raw = raw
        self._moved = asyncio.Event()
        self.acts: list[Act] = []
        self.steps = 0

    async def begin(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        """Start, up to the first gate."""
        self.acts.append(Act(name, work, self._moved))
        await self._settle()

    def ready(self) -> list[Act]:
        """Those that could take a step."""
        return [act for act in self.acts if act.at_gate]

    async def step(self, act: Act) -> None:
        """Let one statement go, until all are at a gate, done, or waiting for somebody's lock."""
        self.steps += 1
        act.go()
        await self._settle()

    async def finish(self) -> None:
        """Let all go, in turns, until nothing is under way."""
        async with asyncio.timeout(_BOUND_S):
            while self.acts:
                for act in self.ready():
                    await self.step(act)
                if not self.ready():
                    await self._settle()

    async def abandon(self) -> None:
        """Cancel what is under way."""
        for act in self.acts:
            act.task.cancel()
        await asyncio.gather(*(act.task for act in self.acts), return_exceptions=True)
        self.acts.clear()

    async def _settle(self) -> None:
        async with asyncio.timeout(_BOUND_S):
            while moving := [act for act in self.acts if not act.at_gate and not act.done]:
                self._moved.clear()
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await self._moved.wait()
                except TimeoutError:
                    if await self._all_blocked(moving):
                        break
                await asyncio.sleep(0)  # whoever has come to its end is done after this
        for act in [act for act in self.acts if act.done]:
            self.acts.remove(act)
            act.task.result()  # a bug of ours, or an assertion

    async def _all_blocked(self, acts: list[Act]) -> bool:
        rows = await self._raw.fetch(
            "select pid from pg_stat_activity where wait_event_type = 'Lock' and pid = any($1::int[])",
            [act.pid for act in acts],
        )
        return {act.pid for act in acts} <= {row["pid"] for row in rows}
