"""Removing what is past retention, a bounded piece at a time."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query

_LAST = UUID(int=2**128 - 1)
_MOST_RUNS = 500


@dataclass(frozen=True, slots=True)
class ExpiredRun:
    workflow_run_id: str
    ended_at: datetime
    steps: int


@dataclass(frozen=True, slots=True)
class Expired:
    """What lies beyond a number of days: at most this goes."""

    runs: int
    steps: int
    oldest: datetime | None
    partitions: int
    partition_bytes: int


class RetentionStore:
    """Any scheduler may be at it; what one works on, the others pass over."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def limit(self, keep_days: int) -> datetime:
        """The instant, by the database's clock, before which a run must have ended."""
        async with self._database.connection() as connection:
            found = await connection.fetchval(query("retention_limit"), keep_days)
        assert isinstance(found, datetime)  # noqa: S101 - now() is one
        return found

    async def expired(self, keep_days: int) -> Expired:
        """How much is past retention. Changes nothing."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("expired"), keep_days)
        assert row is not None  # noqa: S101 - a row of counts
        return Expired(**dict(row))

    async def expired_runs(
        self, before: datetime, behind: ExpiredRun | None, *, steps: int
    ) -> list[ExpiredRun]:
        """A page of runs that ended before an instant, the newest first: at most so many steps, or one run."""
        at, last = (before, _LAST) if behind is None else (behind.ended_at, UUID(behind.workflow_run_id))
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("expired_runs"), before, at, last, _MOST_RUNS)
        page: list[ExpiredRun] = []
        room = steps
        for row in rows:
            run = ExpiredRun(row["workflow_run_id"], row["ended_at"], row["steps_total"])
            if page and run.steps > room:
                break
            room -= run.steps
            page.append(run)
        return page

    async def remove(self, page: list[ExpiredRun], before: datetime) -> tuple[int, int]:
        """Remove those of the page that nothing needs any more; how many runs and steps that were."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                query("remove_runs"), [run.workflow_run_id for run in page], before
            )
        assert row is not None  # noqa: S101 - a function gives one row
        return row["runs"], row["steps"]

    async def remove_default_history(self, before: datetime, *, rows: int) -> int:
        async with self._database.connection() as connection:
            removed = await connection.fetchval(query("remove_default_history"), before.date(), rows)
        return int(removed)

    async def drop_partition(self, keep_days: int) -> str | None:
        """Drop one day of one history table that no run needs; its name. None: there is none."""
        async with self._database.connection() as connection:
            name: str | None = await connection.fetchval(query("drop_partition"), keep_days)
        return name

    async def succeeded(self) -> None:
        async with self._database.connection() as connection:
            await connection.execute(query("retention_succeeded"))

    async def failed(self, error: str) -> None:
        async with self._database.connection() as connection:
            await connection.execute(query("retention_failed"), error)
