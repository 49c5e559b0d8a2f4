"""Cancelling runs, and closing steps that waited beyond their time: the database alone, under the run's lock."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from rara_scheduler.domain.errors import Code
from rara_scheduler.domain.run import TERMINAL
from rara_scheduler.store.database import Conflict, Connection, Database, Lane
from rara_scheduler.store.queries import query
from rara_scheduler.store.run_ledger import (
    CancelOrder,
    ClosedStep,
    RunLedger,
    Specs,
    SpecsAtHand,
    ended,
    locked_run,
)
from rara_scheduler.store.sweeps import OverdueStep

_CONFLICT_RETRIES = 5


@dataclass(slots=True)
class CancelResult:
    """What was stored: requests to push to executors, and the runs that changed."""

    orders: list[CancelOrder] = field(default_factory=list)
    changed_runs: set[str] = field(default_factory=set)
    ended_runs: dict[str, str] = field(default_factory=dict)  # how they ended, by id
    closed_unheld: int = 0


class CancelStore:
    def __init__(self, database: Database, specs: Specs, *, cancel_grace_s: float) -> None:
        self._database = database
        self._specs = specs
        self._cancel_grace_s = cancel_grace_s

    async def cancel_run(
        self,
        workflow_run_id: str,
        *,
        reason: str,
        message: str,
        grace_s: float | None,
        skip_locked: bool = False,
    ) -> CancelResult:
        """Store the intent, close what nobody holds, and ask for the end of the rest. Repeats change nothing.

        grace_s: None takes each step's own. A run that does not exist, or is closed, gives an empty result, and with
        `skip_locked` one that somebody is at work on.
        """
        at_hand = SpecsAtHand(self._specs)

        async def once() -> CancelResult:
            async with self._database.transaction(Lane.ENGINE) as connection:
                ledger = await self._lock(connection, [workflow_run_id], at_hand, skip_locked=skip_locked)
                return await self._cancel_run(connection, ledger, workflow_run_id, reason, message, grace_s)

        for turn in range(_CONFLICT_RETRIES):
            try:
                return await at_hand.work(once)
            except Conflict:
                if turn == _CONFLICT_RETRIES - 1:
                    raise
            await asyncio.sleep(0.01 * 2**turn)
        raise AssertionError("unreachable")

    async def _cancel_run(
        self,
        connection: Connection,
        ledger: RunLedger,
        workflow_run_id: str,
        reason: str,
        message: str,
        grace_s: float | None,
    ) -> CancelResult:
        run = ledger.runs.get(workflow_run_id)
        if run is None or run.state in TERMINAL:
            return CancelResult()
        ended_runs: dict[str, str] = {}
        if run.cancel_reason is None:
            await connection.fetch(query("request_cancel"), workflow_run_id, reason, message)
            run.cancel_reason = reason
            await ledger.cancel_rest(connection, {workflow_run_id: reason}, grace_s=grace_s)
            ended_runs = ended(await ledger.write(connection))
        return CancelResult(ledger.orders, {workflow_run_id}, ended_runs, ledger.closed_unheld)

    async def close_overdue(
        self, steps: Sequence[OverdueStep], *, spared: frozenset[str] = frozenset()
    ) -> CancelResult:
        """Close ready or waiting steps beyond their time, and what follows for their runs.

        spared: definitions of which no step is closed because no executor is there.

        Steps that were leased meanwhile, and runs that somebody holds, are left alone.
        """
        at_hand = SpecsAtHand(self._specs)

        async def once() -> CancelResult:
            async with self._database.transaction(Lane.ENGINE) as connection:
                return await self._close_overdue(connection, at_hand, steps, spared)

        return await at_hand.work(once)

    async def _close_overdue(
        self,
        connection: Connection,
        at_hand: SpecsAtHand,
        steps: Sequence[OverdueStep],
        spared: frozenset[str],
    ) -> CancelResult:
        run_ids = list({step.workflow_run_id for step in steps})
        ledger = await self._lock(connection, run_ids, at_hand, skip_locked=True)
        held = [
            step
            for step in steps
            if (run := ledger.runs.get(step.workflow_run_id)) is not None
            and (step.past_deadline or run.definition not in spared)
        ]
        if not held:
            return CancelResult()
        rows = await connection.fetch(
            query("close_overdue_steps"),
            [step.step_run_id for step in held],
            [Code.DEADLINE_EXCEEDED if s.past_deadline else Code.NO_CAPABLE_EXECUTOR for s in held],
            [ledger.runs[step.workflow_run_id].next_revision for step in held],
        )
        names = await connection.fetch(query("step_names"), [row["step_run_id"] for row in rows])
        by_id = {row["step_run_id"]: row["step_name"] for row in names}
        closed = [
            ClosedStep(
                row["workflow_run_id"],
                row["step_run_id"],
                by_id[row["step_run_id"]],
                "cancelled",
                row["reason"],
            )
            for row in rows
        ]
        await ledger.close(connection, closed, ending_step_ids=())
        runs = await ledger.write(connection)
        return CancelResult(
            ledger.orders,
            {run.workflow_run_id for run in runs},
            ended(runs),
            ledger.closed_unheld + len(closed),
        )

    async def _lock(
        self, connection: Connection, run_ids: Sequence[str], at_hand: SpecsAtHand, *, skip_locked: bool
    ) -> RunLedger:
        rows = await connection.fetch(
            query("lock_runs_skip_locked" if skip_locked else "lock_runs"), list(run_ids)
        )
        runs = {row["workflow_run_id"]: locked_run(row) for row in rows}
        return RunLedger(runs, at_hand.of(runs.values()), self._cancel_grace_s)
