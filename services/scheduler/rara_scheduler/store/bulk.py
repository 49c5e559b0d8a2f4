"""Finding the runs and steps of a filter, a bounded window at a time, and ending the waits of steps."""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import asyncpg

from rara_scheduler.domain.bulk import MAX_SAMPLE, MAX_WALKED, RETRYABLE, RunSelection, StepSelection
from rara_scheduler.domain.run import RunState
from rara_scheduler.store.database import Database, Lane
from rara_scheduler.store.queries import query

Place = tuple[datetime | None, str]  # of a run by its end or its start, or of a step
_START: Final = datetime(1970, 1, 1, tzinfo=UTC)
FIRST: Final[Place] = (_START, "00000000-0000-0000-0000-000000000000")
_WINDOW: Final = 5000


@dataclass(frozen=True, slots=True)
class Window:
    """found: what fits, in order, as many as were asked for; total: how many fit. end: None: nothing is behind it.

    states: how many closed runs fit in each state, also in those that were not asked for.
    """

    found: tuple[Place, ...]
    total: int
    walked: int
    end: Place | None
    states: Mapping[RunState, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Preview:
    """more: there are more, which were not counted. states: as in Window."""

    count: int
    more: bool
    sample: tuple[str, ...]
    as_of: datetime
    states: Mapping[RunState, int] = field(default_factory=dict)


Look = Callable[[Place, datetime, int], Awaitable[Window]]


class BulkStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def unsuccessful_runs(self, wanted: RunSelection) -> Look:
        """Looks at runs that can be retried and never were, those that ended first first."""

        async def look(after: Place, until: datetime, most: int) -> Window:
            if wanted.ended_from is not None and after == FIRST:
                # Just before it, whatever the id: the place itself is left out.
                after = (wanted.ended_from, FIRST[1])
            return await self._window(
                "unsuccessful_runs",
                *after,
                until,
                _WINDOW,
                most,
                wanted.definition or None,
                wanted.version or None,
                [str(state) for state in wanted.states] or None,
                list(wanted.reasons) or None,
                wanted.kind or None,
                _labels(wanted.labels),
                wanted.created_from,
                wanted.created_before,
                wanted.ended_before,
            )

        return look

    def open_runs(self, wanted: RunSelection) -> Look:
        """Looks at runs that can be cancelled, those that were created first first."""

        async def look(after: Place, until: datetime, most: int) -> Window:
            if wanted.created_from is not None and after == FIRST:
                after = (wanted.created_from, FIRST[1])
            return await self._window(
                "open_runs",
                *after,
                until,
                _WINDOW,
                most,
                wanted.definition or None,
                wanted.version or None,
                [str(state) for state in wanted.states] or None,
                _labels(wanted.labels),
                wanted.created_before,
            )

        return look

    def backing_off_steps(self, wanted: StepSelection) -> Look:
        """Looks at steps that wait for their next attempt."""

        async def look(after: Place, until: datetime, most: int) -> Window:
            return await self._window(
                "backing_off_steps",
                after[1],
                until,
                _WINDOW,
                most,
                wanted.definition or None,
                wanted.version or None,
                wanted.kind or None,
                list(wanted.reasons) or None,
                _labels(wanted.labels),
            )

        return look

    async def _window(self, name: str, *arguments: object) -> Window:
        async with self._database.connection() as connection:
            rows = await connection.fetch(query(name), *arguments)
        if not rows:
            return Window((), 0, 0, None)
        end = _place(rows[-1]) if rows[0]["walked"] == _WINDOW else None
        found = tuple(_place(row) for row in rows if row["fits"])
        states = {state: rows[0].get(str(state), 0) for state in RETRYABLE}
        return Window(found, rows[0]["total"], rows[0]["walked"], end, states)

    async def now(self) -> datetime:
        """The database's time, by which runs are created and end."""
        async with self._database.connection() as connection:
            instant: datetime = await connection.fetchval(query("instant"))
        return instant

    async def preview(self, look: Look, as_of: datetime) -> Preview:
        """Count what fitted then, within bounds."""
        count, walked, sample = 0, 0, list[str]()
        states: Counter[RunState] = Counter()
        place: Place | None = FIRST
        while place is not None and walked < MAX_WALKED:
            window = await look(place, as_of, MAX_SAMPLE)
            count, walked, place = count + window.total, walked + window.walked, window.end
            states.update(window.states)
            sample.extend(id_ for _, id_ in window.found[: MAX_SAMPLE - len(sample)])
        return Preview(count, place is not None, tuple(sample), as_of, states)

    async def page(
        self, look: Look, as_of: datetime, after: Place, most: int
    ) -> tuple[list[Place], Place | None]:
        """Up to `most` that fit behind a place, and the place to go on from; None: that was all."""
        walked, found = 0, list[Place]()
        place: Place | None = after
        while place is not None and walked < MAX_WALKED:
            window = await look(place, as_of, most - len(found))
            found.extend(window.found)
            walked += window.walked
            if window.total > len(window.found):
                return found, found[-1]
            place = window.end
            if len(found) == most:
                return found, place
        return found, place

    async def requeue(self, step_run_ids: Sequence[str]) -> set[str]:
        """End the waits of these steps; those that did wait. Where a cancel is asked for meanwhile, nothing is done."""
        async with self._database.transaction(Lane.ENGINE) as connection:
            runs = {
                row["step_run_id"]: row["workflow_run_id"]
                for row in await connection.fetch(query("runs_of_steps"), list(step_run_ids))
            }
            locked = await connection.fetch(query("lock_runs"), list(set(runs.values())))
            free = {row["workflow_run_id"] for row in locked if row["run_cancel_reason"] is None}
            steps = [step for step, run in runs.items() if run in free]
            await connection.execute(query("end_waits"), steps)
            return {row["step_run_id"] for row in await connection.fetch(query("promote_steps"), steps)}


def _place(row: asyncpg.Record) -> Place:
    return row["at"], row["id"]


def _labels(labels: Mapping[str, str]) -> Any:
    return json.dumps(dict(labels)) if labels else None
