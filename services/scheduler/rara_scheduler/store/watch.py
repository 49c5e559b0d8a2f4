"""What changed since it was last looked at: of a run and its steps, or of one attempt."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Final

from rara_scheduler.domain.ids import run_not_found
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.views import RunView, StepView
from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query
from rara_scheduler.store.reads import LEAN_BYTES, Reads

EVENT_PAGE: Final = 200
STEP_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class RunLook:
    """Where a run stands, and which of its steps changed after a revision or are leased, in the order of changes."""

    state: RunState
    revision: int
    step_run_ids: Sequence[str]


@dataclass(frozen=True, slots=True)
class AttemptMark:
    """executor_name: empty where nothing is known of the executor any more."""

    granted_on: date
    lease_token: int
    is_over: bool
    executor_id: str
    executor_name: str


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """body: a serialised rara.v1.ProgressEvent without what the rows beside it tell."""

    sequence: int
    body: bytes


class WatchReads:
    """The statements behind the watches; each sees one moment, none holds a transaction between."""

    def __init__(self, database: Database, reads: Reads) -> None:
        self._database = database
        self._reads = reads

    async def look(self, workflow_run_id: str, after_revision: int) -> RunLook:
        """Raises RUN_NOT_FOUND."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("watch_run_look"), workflow_run_id, after_revision)
        if row is None:
            raise run_not_found(workflow_run_id)
        return RunLook(RunState(row["state"]), row["revision"], row["step_run_ids"])

    async def run(self, workflow_run_id: str) -> RunView:
        """The run without large payloads. Raises RUN_NOT_FOUND."""
        async with self._database.connection() as connection:
            found = await self._reads.runs(connection, [workflow_run_id], LEAN_BYTES)
        if not found:
            raise run_not_found(workflow_run_id)
        return found[0]

    async def settled_runs(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those of the runs that have ended, and those that do not exist."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("watch_settled_runs"), ids)
        ended = [row["workflow_run_id"] for row in rows if row["is_known"]]
        return ended, [row["workflow_run_id"] for row in rows if not row["is_known"]]

    async def lean_runs(self, ids: Sequence[str]) -> list[RunView]:
        """Those of the runs that exist, in that order, without large payloads."""
        async with self._database.connection() as connection:
            return await self._reads.runs(connection, ids, LEAN_BYTES)

    async def all_step_ids(self, workflow_run_id: str) -> list[str]:
        """Every step that the run shows, reused ones too, by id."""
        async with self._database.connection() as connection:
            return await self._reads.step_ids_of_run(connection, workflow_run_id)

    async def first_steps(self, workflow_run_id: str) -> list[StepView]:
        """The first STEP_PAGE of them, without large payloads."""
        return await self._reads.first_steps(workflow_run_id, STEP_PAGE, LEAN_BYTES)

    async def steps(self, ids: Sequence[str]) -> list[StepView]:
        """The steps without large payloads; at most STEP_PAGE are asked for at once."""
        return await self._reads.steps(ids, LEAN_BYTES) if ids else []

    async def attempt_mark(self, step_run_id: str, attempt: int) -> AttemptMark | None:
        """None: there is no such attempt, yet."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("watch_attempt"), step_run_id, attempt)
        return None if row is None else AttemptMark(*row)  # its columns are the fields, in their order

    async def events(
        self, step_run_id: str, attempt: int, granted_on: date, after_sequence: int
    ) -> list[StoredEvent]:
        """Up to EVENT_PAGE stored events of an attempt, in order."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("watch_events"), granted_on, step_run_id, attempt, after_sequence, EVENT_PAGE
            )
        return [StoredEvent(row["sequence"], row["body"]) for row in rows]
