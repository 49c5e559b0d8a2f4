"""What closings do to runs: counters, cascades and the run's own end, inside one transaction."""

import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import asyncpg

from rara_scheduler.domain.definition import DefinitionSpec
from rara_scheduler.domain.errors import FAILS_THE_RUN, Code
from rara_scheduler.domain.run import TERMINAL, RunEvent, RunState, Tally, closing_event, transition
from rara_scheduler.store.database import Connection
from rara_scheduler.store.definitions import UnusableDefinition
from rara_scheduler.store.queries import query

T = TypeVar("T")


class Specs(Protocol):
    async def spec(self, definition: str, version: int) -> DefinitionSpec: ...
    def cached(self, definition: str, version: int) -> DefinitionSpec | None: ...


class Inconsistent(Exception):
    """Rows contradict each other, which no code of ours should have let happen. The transaction had no effect."""


class SpecsMissing(Exception):
    """A transaction met definitions that are not in memory. It had no effect yet."""

    def __init__(self, keys: Collection[tuple[str, int]]) -> None:
        super().__init__(", ".join(f"{definition} {version}" for definition, version in keys))
        self.keys = keys


class SpecsAtHand:
    """The definitions that one piece of work needs inside its transactions.

    Which they are shows only under the runs' locks, and to load one there would mean to wait for another connection,
    or for parsing, with the locks held. So the transaction ends, they are loaded, and the work is done anew.
    """

    def __init__(self, specs: Specs) -> None:
        self._specs = specs
        self._loaded: dict[tuple[str, int], DefinitionSpec | None] = {}

    async def work(self, do: Callable[[], Awaitable[T]]) -> T:
        """Do it, and again after loading what it missed."""
        while True:
            try:
                return await do()
            except SpecsMissing as missing:
                for key in missing.keys:
                    self._loaded[key] = await self._load(*key)

    async def _load(self, definition: str, version: int) -> DefinitionSpec | None:
        try:
            return await self._specs.spec(definition, version)
        except UnusableDefinition:
            return None

    def of(self, runs: Iterable["LockedRun"]) -> dict[tuple[str, int], DefinitionSpec | None]:
        """The definitions of these runs; None for one that cannot be had. Raises SpecsMissing."""
        found = {}
        missing = []
        for key in {(run.definition, run.definition_version) for run in runs}:
            found[key] = self._loaded[key] if key in self._loaded else self._specs.cached(*key)
            if found[key] is None and key not in self._loaded:
                missing.append(key)
        if missing:
            raise SpecsMissing(missing)
        return found


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """A request that an executor stop one attempt; stored already, to be pushed after the commit."""

    executor_id: str
    lease_token: int
    reason: str
    grace_s: float


@dataclass(slots=True)
class LockedRun:
    """A run's row under its lock, and what this transaction makes of it."""

    workflow_run_id: str
    state: RunState
    revision: int  # as stored; what this transaction writes is stamped revision + 1
    total: int
    succeeded: int
    failed: int
    cancelled: int
    on_failure: str
    cancel_reason: str | None
    definition: str
    definition_version: int
    failed_step_run_id: str | None
    started: bool = False
    new_cancel_reason: str | None = None
    touched: bool = False

    @property
    def next_revision(self) -> int:
        return self.revision + 1

    def tally(self) -> Tally:
        return Tally(self.total, self.succeeded, self.failed, self.cancelled)


def locked_run(row: asyncpg.Record) -> LockedRun:
    return LockedRun(
        workflow_run_id=row["workflow_run_id"],
        state=RunState(row["run_state"]),
        revision=row["revision"],
        total=row["steps_total"],
        succeeded=row["steps_succeeded"],
        failed=row["steps_failed"],
        cancelled=row["steps_cancelled"],
        on_failure=row["on_failure"],
        cancel_reason=row["run_cancel_reason"],
        definition=row["definition"],
        definition_version=row["definition_version"],
        failed_step_run_id=row["failed_step_run_id"],
    )


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """A step that closes in this transaction. state: succeeded, terminal_failed or cancelled."""

    workflow_run_id: str
    step_run_id: str
    step_name: str
    state: str
    reason: str

    @property
    def fails_the_run(self) -> bool:
        return self.state == "terminal_failed" or (self.state == "cancelled" and self.reason in FAILS_THE_RUN)


@dataclass(slots=True)
class RunLedger:
    """The runs of one transaction, all locked in id order before anything else.

    cancel_grace_s: the grace of a step that has none of its own.
    """

    runs: dict[str, LockedRun]
    specs: Mapping[tuple[str, int], DefinitionSpec | None]
    cancel_grace_s: float
    orders: list[CancelOrder] = field(default_factory=list)
    closed_unheld: int = 0  # steps closed while nobody held them: cancelled, all of them

    def spec(self, run: LockedRun) -> DefinitionSpec | None:
        """None: its definition cannot be had. Nothing of the run can go on then, and other runs do not notice."""
        return self.specs[run.definition, run.definition_version]

    def start(self, workflow_run_id: str) -> None:
        """An executor took up a lease of the run."""
        run = self.runs[workflow_run_id]
        run.touched = True
        if run.state is RunState.PENDING:
            run.state = transition(run.state, RunEvent.START)
            run.started = True

    def touch(self, workflow_run_id: str) -> None:
        self.runs[workflow_run_id].touched = True

    def count(self, closed: Iterable[ClosedStep]) -> None:
        """Count steps that close, and nothing else: enough where they have succeeded."""
        for step in closed:
            self._count(step.workflow_run_id, step)

    async def close(
        self,
        connection: Connection,
        closed: Sequence[ClosedStep],
        *,
        ending_step_ids: Sequence[str],
    ) -> None:
        """Count steps that close, and close what cannot go on behind or beside them.

        ending_step_ids: steps whose leases end in this transaction by other means: they are not asked to stop.
        """
        self.count(closed)
        failing: dict[str, list[ClosedStep]] = {}
        for step in closed:
            if step.state != "succeeded":
                failing.setdefault(step.workflow_run_id, []).append(step)
        whole: list[tuple[str, str]] = []
        behind: list[tuple[str, str, int]] = []
        for workflow_run_id, steps in failing.items():
            run = self.runs[workflow_run_id]
            if run.tally().open == 0:
                continue
            spec = self.spec(run)
            names = [step.step_name for step in steps]
            downstream = spec.downstream(names) - set(names) if spec else set()
            if spec is None or (run.on_failure == "fail_fast" and any(step.fails_the_run for step in steps)):
                if run.cancel_reason is None:
                    run.cancel_reason = run.new_cancel_reason = Code.SIBLING_FAILED
                whole.append((workflow_run_id, run.cancel_reason))
                behind.extend((workflow_run_id, name, run.next_revision) for name in downstream)
            else:
                behind.extend((workflow_run_id, name, run.next_revision) for name in downstream)
        if behind:
            rows = await connection.fetch(query("close_steps_behind"), *_columns(behind, 3))
            self._count_rows(rows)
        if whole:
            await self.cancel_rest(connection, dict(whole), grace_s=None, ending_step_ids=ending_step_ids)

    async def cancel_rest(
        self,
        connection: Connection,
        reasons: Mapping[str, str],
        *,
        grace_s: float | None,
        ending_step_ids: Sequence[str] = (),
    ) -> None:
        """Close every step of these runs that nobody holds, and ask for the end of the rest.

        reasons: by workflow_run_id. grace_s: None takes each step's own.
        """
        wanted = [(run_id, reason, self.runs[run_id].next_revision) for run_id, reason in reasons.items()]
        columns = _columns(wanted, 3)
        self._count_rows(await connection.fetch(query("close_waiting_steps"), *columns))
        self._count_rows(await connection.fetch(query("close_ready_steps"), *columns))
        self._count_rows(await connection.fetch(query("close_blocked_steps"), *columns, [], []))
        graces = []
        for run_id in reasons:
            run = self.runs[run_id]
            run.touched = True
            spec = self.spec(run)
            steps = spec.steps if spec else {}
            own = {n: s.cancel_grace_s for n, s in steps.items() if s.cancel_grace_s is not None}
            graces.append(json.dumps(own))
        rows = await connection.fetch(
            query("mark_leases_of_runs"),
            list(reasons),
            list(reasons.values()),
            [grace_s] * len(reasons),
            graces,
            self.cancel_grace_s,
            list(ending_step_ids),
        )
        self.orders.extend(cancel_order(row) for row in rows)
        for run_id in reasons:
            run = self.runs[run_id]
            if run.tally().open and run.state is not RunState.CANCELLING:
                run.state = transition(run.state, RunEvent.REQUEST_CANCEL)

    def settle(self) -> list[LockedRun]:
        """Let runs without open steps end; the runs to be written."""
        written = []
        for run in self.runs.values():
            if not run.touched:
                continue
            event = closing_event(run.tally())
            if event is not None:
                if run.state is RunState.PENDING and event is RunEvent.SUCCEED:
                    run.state = transition(run.state, RunEvent.START)
                run.state = transition(run.state, event)
            written.append(run)
        return written

    async def write(self, connection: Connection) -> list[LockedRun]:
        """Write the runs where no batch does it. For use outside `apply_batch`."""
        runs = self.settle()
        if runs:
            rows = await connection.fetch(
                query("update_runs"),
                [r.workflow_run_id for r in runs],
                [r.state.value for r in runs],
                [r.next_revision for r in runs],
                [r.succeeded for r in runs],
                [r.failed for r in runs],
                [r.cancelled for r in runs],
                [r.failed_step_run_id for r in runs],
                [r.new_cancel_reason for r in runs],
            )
            if len(rows) != len(runs):  # cannot be while we hold their locks
                raise Inconsistent("a locked run changed under its lock")
        return runs

    def _count_rows(self, rows: Iterable[asyncpg.Record]) -> None:
        for row in rows:
            self.closed_unheld += 1
            self._count(
                row["workflow_run_id"],
                ClosedStep(row["workflow_run_id"], row["step_run_id"], "", "cancelled", row["reason"]),
            )

    def _count(self, workflow_run_id: str, step: ClosedStep) -> None:
        run = self.runs[workflow_run_id]
        run.touched = True
        if step.state == "succeeded":
            run.succeeded += 1
        elif step.fails_the_run:
            run.failed += 1
            if run.failed_step_run_id is None:
                run.failed_step_run_id = step.step_run_id
        else:
            run.cancelled += 1


def ended(runs: Iterable[LockedRun]) -> dict[str, str]:
    """How those of the written runs ended that did, by id."""
    return {run.workflow_run_id: run.state.value for run in runs if run.state in TERMINAL}


def cancel_order(row: asyncpg.Record) -> CancelOrder:
    return CancelOrder(row["executor_id"], row["lease_token"], row["cancel_reason"], row["cancel_grace_s"])


def _columns(rows: Sequence[tuple[object, ...]], width: int) -> tuple[list[object], ...]:
    return tuple(list(column) for column in zip(*rows, strict=True)) or tuple([] for _ in range(width))
