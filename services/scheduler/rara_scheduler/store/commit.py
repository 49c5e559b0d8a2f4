"""One transaction that turns reports about leases into history, states, results and what follows from them."""

import asyncio
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog

from rara_scheduler.domain.attempt import (
    AttemptEnding,
    Decision,
    EventType,
    Guard,
    Item,
    LeaseFacts,
    Outcome,
    Refusal,
    Report,
    decide,
    overrule_retry,
)
from rara_scheduler.domain.definition import DefinitionSpec, StepSpec
from rara_scheduler.domain.errors import Code, StepError
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.step import IllegalTransition, StepState
from rara_scheduler.store.database import Conflict, Connection, Database, DataRefused, Lane
from rara_scheduler.store.inputs import load_input_artifacts
from rara_scheduler.store.known_runs import MAX_TOGETHER, KnownRuns
from rara_scheduler.store.queries import query
from rara_scheduler.store.run_ledger import (
    CancelOrder,
    ClosedStep,
    Inconsistent,
    LockedRun,
    RunLedger,
    Specs,
    SpecsAtHand,
    SpecsMissing,
    ended,
    locked_run,
)

log = structlog.get_logger(__name__)

_CONFLICT_RETRIES = 5
# Events are copied from so many on: one record of WAL for a page of them, and less to encode. Of fewer, the round trip
# would cost more.
_COPIED = 32
# Up to so many leases are read with their runs: a round trip less, and each row carries the run's columns, too.
_READ_TOGETHER = 32
_OF_LEASE = slice(13, None)  # the columns of read_leases in a row of both
_EVENT_COLUMNS = ("granted_on", "step_run_id", "attempt", "sequence", "type", "body")


class _LeaseChanged(Exception):
    """A lease that was read without its lock was renewed, or asked to end, before it was written: nothing is stored."""


# What is left of a step whose definition cannot be had: enough to close it.
_BARE_STEP = StepSpec("", "", "", "", (), None, b"", (), (), {}, {}, RetryPolicy())
_UNREADABLE = StepError(Code.PAYLOAD_INVALID, "its definition cannot be read", retryable=False)


@dataclass(slots=True)
class LeaseReports:
    """What arrived about one lease, in order. executor_id: the session's; None: the scheduler's own word."""

    step_run_id: str
    workflow_run_id: str
    lease_token: int
    executor_id: str | None
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class Late:
    """Events under a token that holds no lease: stored already (acknowledge), or never (lease lost)."""

    stored: tuple[int, ...]
    lost: tuple[int, ...]


@dataclass(slots=True)
class BatchResult:
    """What was committed. By lease token: decisions, or `late` for tokens that were not current."""

    decisions: dict[int, Decision] = field(default_factory=dict)
    late: dict[int, Late] = field(default_factory=dict)
    orders: list[CancelOrder] = field(default_factory=list)
    changed_runs: set[str] = field(default_factory=set)
    made_ready: bool = False
    made_waiting: bool = False
    ended_runs: dict[str, str] = field(default_factory=dict)  # how they ended, by id
    closed_unheld: int = 0  # steps closed beside and behind them, while nobody held them
    busy: set[int] = field(default_factory=set)  # current, and held by somebody else just now: not committed

    def merge(self, other: "BatchResult") -> None:
        self.decisions |= other.decisions
        self.late |= other.late
        self.orders += other.orders
        self.changed_runs |= other.changed_runs
        self.made_ready |= other.made_ready
        self.made_waiting |= other.made_waiting
        self.ended_runs |= other.ended_runs
        self.closed_unheld += other.closed_unheld
        self.busy |= other.busy


def error_json(error: StepError | None) -> str | None:
    """The stored form of an error: only what is set."""
    if error is None:
        return None
    stored: dict[str, object] = {"code": str(error.code), "message": error.message}
    if error.retryable is not None:
        stored["retryable"] = error.retryable
    if error.details is not None:
        stored["details"] = error.details
    if error.retry_after_s is not None:
        stored["retry_after_s"] = error.retry_after_s
    if error.stack_trace:
        stored["stack_trace"] = error.stack_trace
    if error.runner_exit:
        stored["runner_exit"] = dict(error.runner_exit)
    return orjson.dumps(stored).decode()


class CommitStore:
    """Commits batches of reports.

    jitter: draws from [0, 1), for the backoff. known: is told of what is committed, and asked before it is read.
    """

    def __init__(
        self,
        database: Database,
        specs: Specs,
        *,
        lease_s: float,
        accept_timeout_s: float,
        cancel_grace_s: float,
        jitter: Callable[[], float] = random.random,
        known: KnownRuns | None = None,
    ) -> None:
        self._database = database
        self._specs = specs
        self._known_runs = KnownRuns() if known is None else known
        self._lease_s = lease_s
        self._accept_timeout_s = accept_timeout_s
        self._cancel_grace_s = cancel_grace_s
        self._jitter = jitter

    async def commit(self, batch: Sequence[LeaseReports], *, skip_locked: bool = False) -> BatchResult:
        """Commit reports about many leases in one transaction; each lease at most once in `batch`.

        skip_locked: for sweeps; leases or runs that somebody is at work on are left out of the result.
        Data that cannot be stored fails its own job alone, and a lease whose rows contradict each other is left as it
        is, told lost and logged: neither holds up its neighbours. Raises StoreUnavailable or PoolTimeout, after which
        nothing is stored, and Conflict when conflicts do not end.
        """
        if not batch:
            return BatchResult()
        try:
            return await self._commit_repeating(batch, skip_locked=skip_locked)
        except (DataRefused, IllegalTransition, Inconsistent) as error:
            if len(batch) > 1:
                # Neighbours never suffer: halve down to the culprit.
                middle = len(batch) // 2
                result = await self.commit(batch[:middle], skip_locked=skip_locked)
                result.merge(await self.commit(batch[middle:], skip_locked=skip_locked))
                return result
            if not isinstance(error, DataRefused):
                return _left_alone(batch[0], error)
            try:
                return await self._fail_unstorable(batch[0], error, skip_locked=skip_locked)
            except (DataRefused, IllegalTransition, Inconsistent) as again:
                return _left_alone(batch[0], again)

    async def _fail_unstorable(
        self, reports: LeaseReports, error: DataRefused, *, skip_locked: bool
    ) -> BatchResult:
        failure = StepError(
            Code.PAYLOAD_INVALID, f"the database refused the data: SQLSTATE {error.sqlstate}", retryable=False
        )
        ending = LeaseReports(
            reports.step_run_id, reports.workflow_run_id, reports.lease_token, None, (AttemptEnding(failure),)
        )
        result = await self._commit_repeating([ending], skip_locked=skip_locked)
        decision = result.decisions.get(reports.lease_token)
        if decision is not None:
            _refuse_all(decision, reports, failure)
        return result

    async def _commit_repeating(self, batch: Sequence[LeaseReports], *, skip_locked: bool) -> BatchResult:
        at_hand = SpecsAtHand(self._specs)
        # A lock on each lease costs a write, and renewals would wait for it through the whole transaction. Whether one
        # has expired, though, a renewal may change.
        locks = skip_locked or any(_asks_for_time(item) for reports in batch for item in reports.items)

        async def once() -> BatchResult:
            epoch = self._known_runs.epoch
            async with self._database.transaction(Lane.ENGINE) as connection:
                result, runs = await self._commit(
                    connection, batch, at_hand, locks=locks, skip_locked=skip_locked
                )
            if len(batch) <= MAX_TOGETHER:
                self._known_runs.committed(runs, result.decisions.values(), epoch)
            else:
                self._known_runs.forget(run.workflow_run_id for run in runs)
            return result

        async def surely() -> BatchResult:
            nonlocal locks
            try:
                return await at_hand.work(once)
            except _LeaseChanged:
                locks = True
                return await at_hand.work(once)

        if len(batch) == 1 and not locks and (result := await self._commit_as_known(batch[0], at_hand)):
            return result
        for turn in range(_CONFLICT_RETRIES):
            try:
                return await surely()
            except Conflict:
                if turn == _CONFLICT_RETRIES - 1:
                    raise
            await asyncio.sleep(self._jitter() * 0.01 * 2**turn)
        raise AssertionError("unreachable")

    async def _commit(
        self,
        connection: Connection,
        batch: Sequence[LeaseReports],
        at_hand: SpecsAtHand,
        *,
        locks: bool,
        skip_locked: bool,
    ) -> tuple[BatchResult, Collection[LockedRun]]:
        """What was committed, and the runs, all of them locked."""
        runs, rows = await self._lock(connection, batch, locks=locks, skip_locked=skip_locked)
        leases: dict[str, LeaseFacts] = {}
        asked: dict[int, bool] | None = None if locks else {}
        for row in rows:
            lease = LeaseFacts(*row)  # its columns are the fields, in their order
            if asked is not None:
                asked[lease.lease_token] = lease.cancel_reason is not None
            lease.cancel_reason = runs[lease.workflow_run_id].cancel_reason or lease.cancel_reason
            leases[lease.step_run_id] = lease
        ledger = RunLedger(runs, at_hand.of(runs.values()), self._cancel_grace_s)

        result = BatchResult()
        current: list[tuple[LeaseReports, LeaseFacts]] = []
        late: list[LeaseReports] = []
        for reports in batch:
            named = leases.get(reports.step_run_id)
            if (
                named is not None
                and named.lease_token == reports.lease_token
                and reports.executor_id in (None, named.executor_id)
            ):
                current.append((reports, named))
            else:
                late.append(reports)
        if skip_locked and late:
            rows = await connection.fetch(
                query("current_tokens"), [r.step_run_id for r in late], [r.lease_token for r in late]
            )
            result.busy = {row["lease_token"] for row in rows}
            late = [reports for reports in late if reports.lease_token not in result.busy]
        if late:
            result.late = await self._classify_late(connection, late)

        known = await self._known(connection, current)
        blobs = await self._blobs(connection, [item for reports, _ in current for item in reports.items])
        specs: dict[int, StepSpec] = {}
        for reports, lease in current:
            definition = ledger.spec(runs[lease.workflow_run_id])
            step = definition.steps.get(lease.step_name) if definition else None
            specs[lease.lease_token] = step or _BARE_STEP
            decision = decide(
                lease,
                reports.items if step else (AttemptEnding(_UNREADABLE),),
                (step or _BARE_STEP).retry,
                known=known.get(lease.lease_token, frozenset()),
                blobs=blobs,
                jitter=self._jitter(),
                allows_secrets=definition is not None and definition.allows_secrets,
            )
            if step is None:
                _refuse_all(decision, reports, _UNREADABLE)
            else:
                decision.kind = step.kind
            result.decisions[lease.lease_token] = decision
        changed = [decision for decision in result.decisions.values() if decision.changed]
        if changed:
            await self._write(connection, ledger, changed, specs, asked, result)
        return result, runs.values()

    async def _commit_as_known(self, reports: LeaseReports, at_hand: SpecsAtHand) -> BatchResult | None:
        """Commit by one statement what is decided by what is known of the run, if it still is so.

        None: nothing is stored, and the rows have to be asked.
        """
        epoch = self._known_runs.epoch
        known = self._known_runs.of(reports.workflow_run_id, reports.step_run_id, reports.lease_token)
        if known is None:
            return None
        run, lease = known
        try:
            ledger = RunLedger({run.workflow_run_id: run}, at_hand.of([run]), self._cancel_grace_s)
        except SpecsMissing:
            return None
        definition = ledger.spec(run)
        step = definition.steps.get(lease.step_name) if definition else None
        if definition is None or step is None or not _goes_well(reports, lease, step, definition):
            return None
        try:
            decision = decide(lease, reports.items, step.retry, known=frozenset(), blobs={}, jitter=0.0)
            if decision.refused or not decision.changed:
                return None
            ledger.start(run.workflow_run_id)
            if decision.closing is not None:
                ledger.count(_closed_steps([decision]))
            runs = ledger.settle()
        except IllegalTransition:  # the rows may say something else
            return None
        decision.kind = step.kind
        try:
            async with self._database.connection(Lane.ENGINE) as connection:
                row = await connection.fetchrow(
                    query("go_on_as_known" if decision.closing is None else "succeed_as_known"),
                    *_known_columns(run, decision, step, self._lease_s),
                    self._known_runs.server,
                )
        except (DataRefused, Conflict):  # the other way finds out what it was
            return None
        assert row is not None  # noqa: S101 - a select without from
        if not row["runs"]:
            self._known_runs.contested(run.workflow_run_id, run.revision)
            self._known_runs.told_by(row["server"])
            return None
        self._known_runs.committed(runs, [decision], epoch)
        return BatchResult(
            decisions={lease.lease_token: decision},
            ended_runs=ended(runs),
            changed_runs={run.workflow_run_id},
        )

    async def _lock(
        self, connection: Connection, batch: Sequence[LeaseReports], *, locks: bool, skip_locked: bool
    ) -> tuple[dict[str, LockedRun], Iterable[Iterable[Any]]]:
        """The runs, which are locked, and the rows of the leases, which are if `locks`."""
        run_ids = list({reports.workflow_run_id for reports in batch})
        step_ids = [reports.step_run_id for reports in batch]
        if not locks and len(batch) <= _READ_TOGETHER:
            rows = await connection.fetch(
                query("lock_runs_and_read_leases"), run_ids, step_ids, self._accept_timeout_s
            )
            runs = {row["workflow_run_id"]: locked_run(row) for row in rows}
            if all(row["is_settled"] for row in rows):
                return runs, [row[_OF_LEASE] for row in rows if row["lease_token"] is not None]
        else:
            skip = "_skip_locked" if skip_locked else ""
            rows = await connection.fetch(query(f"lock_runs{skip}"), run_ids)
            runs = {row["workflow_run_id"]: locked_run(row) for row in rows}
            if locks:
                statement = query(f"lock_leases{skip}")
                return runs, await connection.fetch(statement, list(runs), step_ids, self._accept_timeout_s)
        leases = await connection.fetch(query("read_leases"), list(runs), step_ids, self._accept_timeout_s)
        return runs, leases

    async def _write(
        self,
        connection: Connection,
        ledger: RunLedger,
        changed: list[Decision],
        specs: Mapping[int, StepSpec],
        asked: Mapping[int, bool] | None,
        result: BatchResult,
    ) -> None:
        """asked: whether each lease, by token, was asked to end when it was read; None: they are locked."""
        for decision in changed:
            if decision.accept:
                ledger.start(decision.lease.workflow_run_id)
            else:
                ledger.touch(decision.lease.workflow_run_id)
        ending = [decision for decision in changed if decision.closing is not None]
        closed = _closed_steps(ending)
        if closed:
            await ledger.close(
                connection, closed, ending_step_ids=[decision.lease.step_run_id for decision in ending]
            )
            # A failure of this batch may have cancelled its run after a neighbour's retry was decided. After the
            # request nothing is retried: put among the waiting now, that step would never be looked at again.
            overruled = [
                decision
                for decision in ending
                if (reason := ledger.runs[decision.lease.workflow_run_id].new_cancel_reason) is not None
                and overrule_retry(decision, reason)
            ]
            if overruled:
                await ledger.close(connection, _closed_steps(overruled), ending_step_ids=())
        runs = ledger.settle()
        events = [
            (d.lease.granted_on, d.lease.step_run_id, d.lease.attempt, r.sequence, r.type, r.body)
            for d in changed
            for r in d.stored
        ]
        events.sort()  # by key, so that neighbours in the index come together: splits of its pages cost less
        if len(events) >= _COPIED:
            await connection.copy_records_to_table(
                "step_event", schema_name="rara", columns=_EVENT_COLUMNS, records=events
            )
            events = []
        row = await connection.fetchrow(
            query("apply_batch"), *_batch_columns(changed, events, runs, ledger, specs, asked, self._lease_s)
        )
        if row is None or (row["runs"], row["ended"], row["going_on"]) != (
            len(runs),
            len(ending),
            len(changed) - len(ending),
        ):
            if asked is not None:
                raise _LeaseChanged
            raise Inconsistent("a locked row changed under its lock")
        await self._record(connection, changed, specs)
        if ending:
            result.made_ready = await self._release(connection, ledger, ending)
        for decision in ending:
            if decision.closing is not None and decision.closing.to is StepState.RETRYABLE_FAILED:
                result.made_ready |= decision.closing.at_once
                result.made_waiting |= not decision.closing.at_once
        result.orders = ledger.orders
        result.ended_runs = ended(runs)
        result.closed_unheld = ledger.closed_unheld
        result.changed_runs = {run.workflow_run_id for run in runs}

    async def _classify_late(self, connection: Connection, late: Sequence[LeaseReports]) -> dict[int, Late]:
        wanted = [
            (reports, item.sequence) for reports in late for item in reports.items if isinstance(item, Report)
        ]
        stored: dict[int, set[int]] = {}
        if wanted:
            rows = await connection.fetch(
                query("classify_late"),
                [reports.step_run_id for reports, _ in wanted],
                [reports.lease_token for reports, _ in wanted],
                [sequence for _, sequence in wanted],
                [reports.executor_id for reports, _ in wanted],
            )
            for row in rows:
                reports, sequence = wanted[row["n"] - 1]
                if row["stored"]:
                    stored.setdefault(reports.lease_token, set()).add(sequence)
        answers = {}
        for reports in late:
            have = stored.get(reports.lease_token, set())
            sequences = [item.sequence for item in reports.items if isinstance(item, Report)]
            answers[reports.lease_token] = Late(
                tuple(s for s in sequences if s in have), tuple(s for s in sequences if s not in have)
            )
        return answers

    async def _known(
        self, connection: Connection, current: Sequence[tuple[LeaseReports, LeaseFacts]]
    ) -> dict[int, frozenset[int]]:
        """Numbers that may be repeats are looked up; in the usual case there is none."""
        known = {}
        for reports, lease in current:
            old = [
                item.sequence
                for item in reports.items
                if isinstance(item, Report) and item.sequence <= lease.last_sequence
            ]
            if old:
                rows = await connection.fetch(
                    query("known_sequences"), lease.granted_on, lease.step_run_id, lease.attempt, old
                )
                known[lease.lease_token] = frozenset(row["sequence"] for row in rows)
        return known

    async def _blobs(self, connection: Connection, items: Sequence[Item]) -> Mapping[str, int]:
        wanted = {
            artifact.sha256
            for item in items
            if isinstance(item, Report) and (item.outcome or item.partial or item.checkpoint)
            for artifact in item.artifacts
            if artifact.inline is None
        }
        if not wanted:
            return {}
        rows = await connection.fetch(query("lock_blobs"), sorted(wanted))
        return {row["sha256"]: row["size_bytes"] for row in rows}

    async def _record(
        self, connection: Connection, changed: Sequence[Decision], specs: Mapping[int, StepSpec]
    ) -> None:
        effects = [
            (d.lease.idempotency_key, *r.effect, d.lease.step_run_id, d.lease.attempt, d.lease.lease_token)
            for d in changed
            for r in d.stored
            if r.effect is not None
        ]
        if effects:
            await connection.execute(query("record_effects"), *_transposed(effects))
        await _record_checkpoints(connection, changed)
        await self._record_artifacts(connection, changed, specs)

    async def _record_artifacts(
        self, connection: Connection, changed: Sequence[Decision], specs: Mapping[int, StepSpec]
    ) -> None:
        manifests = []
        succeeded: list[tuple[LeaseFacts, Outcome]] = []
        for d in changed:
            if d.closing is None:
                continue
            artifacts = d.closing.outcome.artifacts if d.closing.outcome else d.closing.partial
            for position, a in enumerate(artifacts):
                manifests.append(
                    (
                        d.lease.step_run_id,
                        d.lease.attempt,
                        a.name,
                        position,
                        a.sha256,
                        a.size_bytes,
                        a.media_type,
                        a.type,
                        a.inline,
                        a.metadata,
                        d.lease.lease_token,
                    )
                )
            if d.closing.outcome is not None:
                succeeded.append((d.lease, d.closing.outcome))
        if manifests:
            await connection.execute(query("record_artifacts"), *_transposed(manifests))
        if succeeded:
            edges = await _lineage(connection, succeeded, specs)
            if edges:
                await connection.execute(query("record_lineage"), *_transposed(edges))

    async def _release(self, connection: Connection, ledger: RunLedger, ending: Sequence[Decision]) -> bool:
        """Make dependants of steps that succeeded leasable. True when any became so."""
        candidates: dict[tuple[str, str], tuple[str, str, float | None, int]] = {}
        for decision in ending:
            lease = decision.lease
            if decision.closing is None or decision.closing.to is not StepState.SUCCEEDED:
                continue
            run = ledger.runs[lease.workflow_run_id]
            if run.cancel_reason is not None:
                continue  # after a cancel request nothing new becomes leasable
            spec = ledger.spec(run)
            if spec is None:
                continue
            for name in spec.dependants(lease.step_name):
                step = spec.steps[name]
                candidates[run.workflow_run_id, name] = (
                    run.workflow_run_id,
                    name,
                    step.timeout_s,
                    run.next_revision,
                )
        if not candidates:
            return False
        rows = await connection.fetch(
            query("release_dependants"), *_transposed([candidates[key] for key in sorted(candidates)])
        )
        return bool(rows)


def _asks_for_time(item: Item) -> bool:
    return isinstance(item, AttemptEnding) and item.guard is Guard.EXPIRED


_GOES_WELL = frozenset({EventType.ACCEPTED, EventType.RUNNING, EventType.PROGRESS, EventType.SUCCEEDED})


def _goes_well(reports: LeaseReports, lease: LeaseFacts, step: StepSpec, definition: DefinitionSpec) -> bool:
    """Whether the owner reports only what needs no other rows: nothing that may be stored already, is recorded by
    itself, ends other steps or makes them ready. And little enough for one statement."""
    if reports.executor_id != lease.executor_id or len(reports.items) >= _COPIED:
        return False
    for item in reports.items:
        if not isinstance(item, Report) or item.type not in _GOES_WELL:
            return False
        if item.sequence <= lease.last_sequence or item.artifacts or item.checkpoint or item.effect:
            return False
        if item.type is EventType.SUCCEEDED and (
            definition.dependants(lease.step_name)
            or step.input_artifacts
            or (item.outcome is not None and item.outcome.consumed)
        ):
            return False
    return True


def _left_alone(reports: LeaseReports, error: Exception) -> BatchResult:
    log.error(
        "commit.inconsistent",
        workflow_run_id=reports.workflow_run_id,
        step_run_id=reports.step_run_id,
        lease_token=reports.lease_token,
        error=str(error),
    )
    lost = tuple(item.sequence for item in reports.items if isinstance(item, Report))
    return BatchResult(late={reports.lease_token: Late((), lost)})


def _refuse_all(decision: Decision, reports: LeaseReports, error: StepError) -> None:
    decision.refused.extend(
        Refusal(item.sequence, Code.PAYLOAD_INVALID, error.message)
        for item in reports.items
        if isinstance(item, Report)
    )


def _closed_steps(ending: Sequence[Decision]) -> list[ClosedStep]:
    return [
        ClosedStep(
            d.lease.workflow_run_id,
            d.lease.step_run_id,
            d.lease.step_name,
            d.closing.to,
            d.closing.reason,
        )
        for d in ending
        if d.closing is not None and d.closing.to is not StepState.RETRYABLE_FAILED
    ]


async def _lineage(
    connection: Connection,
    succeeded: Sequence[tuple[LeaseFacts, Outcome]],
    specs: Mapping[int, StepSpec],
) -> list[tuple[object, ...]]:
    """Rows of lineage: what each step made, what it was given by its definition, what else it really read."""
    inputs = await load_input_artifacts(
        connection,
        [(lease.step_run_id, lease.workflow_run_id, specs[lease.lease_token]) for lease, _ in succeeded],
    )
    edges: list[tuple[object, ...]] = []
    for lease, outcome in succeeded:
        where = (lease.step_run_id, lease.workflow_run_id, lease.attempt)
        given = inputs.get(lease.step_run_id, ())
        digests = {artifact.sha256 for artifact in given}
        edges.extend(
            (a.sha256, a.size_bytes, *where, True, True, a.name, ",".join(a.derived_from))
            for a in outcome.artifacts
        )
        edges.extend((a.sha256, a.size_bytes, *where, False, True, a.name, "") for a in given)
        edges.extend(
            (sha256, size, *where, False, False, "", "")
            for sha256, size in outcome.consumed
            if sha256 not in digests
        )
    return edges


async def _record_checkpoints(connection: Connection, changed: Sequence[Decision]) -> None:
    newest: dict[str, tuple[Decision, Report]] = {}
    for d in changed:
        for r in sorted(d.stored, key=lambda report: report.sequence):  # by number, not by arrival
            if r.checkpoint is not None:
                newest[d.lease.idempotency_key] = d, r
    if not newest:
        return
    rows = []
    artifacts = []
    for key, (d, r) in sorted(newest.items()):
        assert r.checkpoint is not None  # noqa: S101 - chosen so above
        lease = d.lease
        rows.append((key, lease.step_run_id, lease.attempt, lease.lease_token, r.sequence, r.checkpoint.data))
        artifacts += [
            (key, a.name, position, a.sha256, a.size_bytes, a.media_type, a.type)
            for position, a in enumerate(r.checkpoint.artifacts)
        ]
    await connection.execute(query("record_checkpoints"), *_transposed(rows), *_padded(artifacts, 7))


def _transposed(rows: Sequence[tuple[object, ...]]) -> list[Sequence[object]]:
    return list(zip(*rows, strict=True))


def _batch_columns(
    changed: Sequence[Decision],
    events: Sequence[tuple[object, ...]],
    runs: Sequence[LockedRun],
    ledger: RunLedger,
    specs: Mapping[int, StepSpec],
    asked: Mapping[int, bool] | None,
    lease_s: float,
) -> list[object]:
    """The 45 parameters of `apply_batch`, in its order."""
    going_on = []
    ended = []
    ended_asked = []
    for d in changed:
        lease = d.lease
        revision = ledger.runs[lease.workflow_run_id].next_revision
        spec = specs[lease.lease_token]
        if d.closing is None:
            going_on.append(
                (
                    lease.step_run_id,
                    lease.lease_token,
                    d.accept,
                    d.start,
                    d.last_sequence,
                    d.gaps,
                    d.moved,
                    d.receipt,
                    revision,
                    spec.attempt_timeout_s,
                    spec.progress_timeout_s,
                )
            )
        else:
            c = d.closing
            outcome: str = c.to
            if c.to is StepState.RETRYABLE_FAILED:
                outcome = "ready" if c.at_once else "waiting"
            ended.append(
                (
                    lease.step_run_id,
                    lease.lease_token,
                    outcome,
                    c.reason,
                    c.spent,
                    c.failures,
                    c.free_endings,
                    c.delay_s,
                    c.outcome.output if c.outcome else None,
                    error_json(c.error),
                    d.last_sequence,
                    d.gaps,
                    d.accept,
                    d.start,
                    c.confirmed,
                    revision,
                    spec.schedule_timeout_s,
                )
            )
            ended_asked.append(None if asked is None else asked[lease.lease_token])
    run_rows = [
        (
            r.workflow_run_id,
            r.state.value,
            r.next_revision,
            r.succeeded,
            r.failed,
            r.cancelled,
            r.started,
            r.failed_step_run_id,
            r.new_cancel_reason,
        )
        for r in runs
    ]
    return [
        *_padded(events, 6),
        *_padded(going_on, 11),
        lease_s,
        *_padded(ended, 17),
        *_padded(run_rows, 9),
        ended_asked,
    ]


def _known_columns(run: LockedRun, decision: Decision, step: StepSpec, lease_s: float) -> tuple[object, ...]:
    """All parameters but the last of `go_on_as_known`, or of `succeed_as_known` for what ends."""
    lease, closing = decision.lease, decision.closing
    of_run = (run.workflow_run_id, run.revision, run.state.value)
    events = sorted((report.sequence, report.type, report.body) for report in decision.stored)
    of_events = (lease.granted_on, lease.attempt, *_transposed(events))
    if closing is None:
        return (
            *of_run,
            lease.step_run_id,
            lease.lease_token,
            decision.accept,
            lease_s,
            decision.start,
            step.attempt_timeout_s,
            step.progress_timeout_s,
            decision.last_sequence,
            decision.gaps,
            decision.moved,
            *of_events,
        )
    return (
        *of_run,
        run.succeeded,
        lease.step_run_id,
        lease.lease_token,
        decision.accept,
        decision.start,
        decision.last_sequence,
        decision.gaps,
        closing.failures,
        closing.spent,
        closing.outcome.output if closing.outcome else None,
        *of_events,
    )


def _padded(rows: Sequence[tuple[object, ...]], width: int) -> list[Sequence[object]]:
    return _transposed(rows) if rows else [[] for _ in range(width)]
