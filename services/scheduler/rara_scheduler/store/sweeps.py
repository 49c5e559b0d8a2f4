"""Finding what falls due by itself: expired leases, waits that are over, deadlines."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import orjson

from rara_scheduler.domain.routing import Capability, Offer
from rara_scheduler.store.database import Database, Lane
from rara_scheduler.store.queries import query
from rara_scheduler.store.run_ledger import CancelOrder, cancel_order

Place = tuple[datetime, UUID]
BEFORE_ALL: Place = (datetime(1970, 1, 1, tzinfo=UTC), UUID(int=0))
FIRST = str(UUID(int=0))  # before every step
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a look around found. next_due_s: until the next waiting step is due; None: none waits."""

    next_due_s: float | None
    reclaimable: bool
    leases_overdue: bool
    runs_overdue: bool
    ready_overdue: bool
    waiting_overdue: bool
    any_ready: bool  # leasable, by whomever
    others_known: bool  # executors are connected to other schedulers, too
    newest_route_id: int
    pauses: str  # what is paused, as Pauses.mark says it


@dataclass(frozen=True, slots=True)
class Reclaimable:
    step_run_id: str
    workflow_run_id: str
    lease_token: int
    executor_id: str
    unaccepted: bool


@dataclass(frozen=True, slots=True)
class OverdueLease:
    step_run_id: str
    lease_token: int
    definition: str
    definition_version: int
    step_name: str
    reason: str  # DEADLINE_EXCEEDED, ATTEMPT_TIMEOUT or PROGRESS_TIMEOUT


@dataclass(frozen=True, slots=True)
class OverdueRun:
    workflow_run_id: str
    deadline: datetime


@dataclass(frozen=True, slots=True)
class OverdueStep:
    step_run_id: str
    workflow_run_id: str
    past_deadline: bool  # else it waits too long for a capable executor


class SweepStore:
    def __init__(
        self, database: Database, *, scheduler_id: str, accept_timeout_s: float, silence_s: float
    ) -> None:
        self._database = database
        self._scheduler_id = scheduler_id
        self._accept_timeout_s = accept_timeout_s
        self._silence_s = silence_s

    async def look_around(self) -> Outlook:
        async with self._database.connection(Lane.ENGINE) as connection:
            row = await connection.fetchrow(
                query("look_around"), self._accept_timeout_s, self._scheduler_id, self._silence_s
            )
        assert row is not None  # noqa: S101 - a select without from
        return Outlook(
            next_due_s=row["next_due_s"],
            reclaimable=row["reclaimable"],
            leases_overdue=row["leases_overdue"],
            runs_overdue=row["runs_overdue"],
            ready_overdue=row["ready_overdue"],
            waiting_overdue=row["waiting_overdue"],
            any_ready=row["any_ready"],
            others_known=row["others_known"],
            newest_route_id=row["newest_route_id"],
            pauses=row["pauses"] or "",
        )

    async def reclaimable(self, after_step_run_id: str) -> list[Reclaimable]:
        """A page of leases to take back, behind a step; an empty one ends the sweep."""
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("reclaimable_leases"), self._accept_timeout_s, after_step_run_id, _PAGE
            )
        return [
            Reclaimable(
                row["step_run_id"],
                row["workflow_run_id"],
                row["lease_token"],
                row["executor_id"],
                row["unaccepted"],
            )
            for row in rows
        ]

    async def overdue_leases(self, after_step_run_id: str = FIRST) -> list[OverdueLease]:
        """A page of leases beyond a time of their own, behind a step."""
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(query("overdue_leases"), after_step_run_id, _PAGE)
        return [
            OverdueLease(
                row["step_run_id"],
                row["lease_token"],
                row["definition"],
                row["definition_version"],
                row["step_name"],
                row["reason"],
            )
            for row in rows
        ]

    async def mark_leases(self, marks: Sequence[tuple[OverdueLease, float]]) -> list[CancelOrder]:
        """Ask for the end of these leases, each with its grace in seconds. Rows that moved on are left alone."""
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("mark_leases"),
                [lease.step_run_id for lease, _ in marks],
                [lease.lease_token for lease, _ in marks],
                [lease.reason for lease, _ in marks],
                [grace_s for _, grace_s in marks],
            )
        return [cancel_order(row) for row in rows]

    async def promote_due(self) -> int:
        """Make waiting steps whose time has come leasable; how many. Runs that somebody holds are left for later."""
        promoted = 0
        after = BEFORE_ALL
        while True:
            async with self._database.transaction(Lane.ENGINE) as connection:
                due = await connection.fetch(query("due_steps"), *after, _PAGE)
                if not due:
                    return promoted
                runs = await connection.fetch(
                    query("lock_runs_skip_locked"), list({row["workflow_run_id"] for row in due})
                )
                free = {row["workflow_run_id"] for row in runs if row["run_cancel_reason"] is None}
                steps = [row["step_run_id"] for row in due if row["workflow_run_id"] in free]
                if steps:
                    promoted += len(await connection.fetch(query("promote_steps"), steps))
            if len(due) < _PAGE:
                return promoted
            after = (due[-1]["available_at"], UUID(due[-1]["step_run_id"]))

    async def overdue_runs(self, after: Place = BEFORE_ALL) -> list[OverdueRun]:
        """A page of runs beyond their deadline, behind a place."""
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(query("overdue_runs"), *after, _PAGE)
        return [OverdueRun(row["workflow_run_id"], row["deadline"]) for row in rows]

    async def overdue_steps(
        self, after_step_run_id: str, unserved_route_ids: Sequence[int] = ()
    ) -> list[OverdueStep]:
        """A page of ready or waiting steps beyond their time, behind a step.

        unserved_route_ids: those for which no capable executor is known; steps of others wait on for a free one.
        """
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("overdue_steps"), after_step_run_id, list(unserved_route_ids), _PAGE
            )
        return [OverdueStep(row["step_run_id"], row["workflow_run_id"], row["past_deadline"]) for row in rows]

    async def live_offers(self, seen_within_s: float) -> list[Offer]:
        """What all connected executors offer, whichever scheduler they are connected to."""
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(query("live_offers"), seen_within_s)
        return [
            Offer(
                row["executor_kind"],
                tuple(
                    Capability(c["kind"], tuple(c["versions"]), c["max_concurrency"])
                    for c in orjson.loads(row["capabilities"])
                ),
                orjson.loads(row["labels"]),
            )
            for row in rows
        ]
