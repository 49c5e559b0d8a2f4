"""Storing what is paused, and having ready steps of paused definitions stand aside and come back."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

import asyncpg

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.pause import MAX_COUNTED, MAX_PAUSES, Pause, PauseLoad, Target
from rara_scheduler.store.database import Connection, Database, Lane
from rara_scheduler.store.queries import query

Place = tuple[int, datetime, UUID]  # in the order of `ready`
FRONT: Final[Place] = (0, datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))  # behind all that stands aside
LAST_ROUTE: Final = 2**31 - 1


def front_of(route_id: int) -> Place:
    """Before every ready step of a route."""
    return (route_id, *FRONT[1:])


@dataclass(frozen=True, slots=True)
class Held:
    """What a look at ready steps came to. place: of the last one that was looked at; None: there was none."""

    walked: int
    held: int
    place: Place | None


@dataclass(frozen=True, slots=True)
class Restarted:
    """What a page of waits came to. left_out: somebody held these. place: where to go on; None: that was the last."""

    renewed: int
    left_out: int
    place: Place | None


async def hold(connection: Connection, after: Place, last_route: int, most: int) -> Held:
    """Look at up to `most` ready steps behind a place; those of paused definitions step aside."""
    row = await connection.fetchrow(query("hold_ready"), *after, most, last_route)
    assert row is not None  # noqa: S101 - a select from one row
    place = None
    if row["route_id"] is not None:
        place = (row["route_id"], row["available_at"], row["step_run_id"])
    return Held(row["walked"], row["held"], place)


class PauseStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self, lane: Lane = Lane.CALLS) -> list[Pause]:
        """All that is paused or being resumed, the newest first."""
        async with self._database.connection(lane) as connection:
            return [pause_of(row) for row in await connection.fetch(query("pauses"))]

    async def loads(self, pause_ids: Sequence[int]) -> dict[int, PauseLoad]:
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("pause_load"), list(pause_ids), MAX_COUNTED)
        return {row["pause_id"]: PauseLoad(min(row["held"], MAX_COUNTED), row["in_flight"]) for row in rows}

    async def known(self, sort: str) -> frozenset[str]:
        """Every definition, or every kind that one uses."""
        name = "kinds_known" if sort == "kind" else "definitions_known"
        async with self._database.connection() as connection:
            return frozenset(row["name"] for row in await connection.fetch(query(name)))

    async def current(self, target: Target) -> Pause | None:
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("pause_current"), target.kind, target.definition)
        return None if row is None else pause_of(row)

    async def pause(self, target: Target, *, reason: str, paused_by: str) -> tuple[Pause, bool]:
        """The pause as stored, and whether it was there before; the first one keeps its reason.

        Raises Fault QUOTA_EXCEEDED when too much is paused already.
        """
        async with self._database.transaction() as connection:
            await connection.execute(query("pause_lock"))
            row = await connection.fetchrow(query("pause_current"), target.kind, target.definition)
            if row is not None:
                return pause_of(row), True
            if await connection.fetchval(query("pause_count")) >= MAX_PAUSES:
                raise Fault(
                    Code.QUOTA_EXCEEDED,
                    f"{MAX_PAUSES} kinds and definitions are paused, and more cannot be",
                    metadata={"limit": str(MAX_PAUSES)},
                )
            row = await connection.fetchrow(
                query("pause_insert"), target.kind, target.definition, reason, paused_by
            )
            assert row is not None  # noqa: S101 - an insert that returns its row
            return pause_of(row), False

    async def resume(self, target: Target) -> Pause | None:
        """The pause that has ended; None: there was none. What stands aside comes back by `release`."""
        async with self._database.transaction() as connection:
            row = await connection.fetchrow(query("pause_end"), target.kind, target.definition)
        return None if row is None else pause_of(row)

    async def hold(self, after: Place, most: int) -> Held:
        """As `hold`, over all routes."""
        async with self._database.transaction(Lane.ENGINE) as connection:
            return await hold(connection, after, LAST_ROUTE, most)

    async def release(self, pause_id: int, most: int) -> int:
        """Up to `most` steps that stand aside under a pause that is over are ready again; how many."""
        async with self._database.transaction(Lane.ENGINE) as connection:
            return len(await connection.fetch(query("release_held"), pause_id, most))

    async def routes_of(self, kind: str) -> list[int]:
        """All routes of a kind that exist."""
        async with self._database.connection(Lane.ENGINE) as connection:
            return [row["route_id"] for row in await connection.fetch(query("routes_of_kind"), kind)]

    async def restart_waits(self, route_id: int, after: Place, resumed_at: datetime, most: int) -> Restarted:
        """Of a page of ready steps of a kind that was paused, the wait for a capable executor begins anew."""
        async with self._database.transaction(Lane.ENGINE) as connection:
            row = await connection.fetchrow(query("restart_waits"), route_id, *after[1:], resumed_at, most)
        assert row is not None  # noqa: S101 - a select from one row
        place = None
        if row["walked"] == most:
            place = (route_id, row["available_at"], row["step_run_id"])
        return Restarted(row["renewed"], row["left_out"], place)

    async def remove(self, pause_id: int) -> bool:
        """Forget a pause that is over; False: something still stands aside under it."""
        async with self._database.connection(Lane.ENGINE) as connection:
            return await connection.fetchval(query("pause_remove"), pause_id) is not None


def pause_of(row: asyncpg.Record) -> Pause:
    return Pause(
        row["pause_id"],
        Target(row["kind"], row["definition"]),
        row["reason"],
        row["paused_by"],
        row["paused_at"],
        row["resumed_at"],
    )
