"""Granting leases, renewing them, and loading what a granted step needs to run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from uuid import UUID

import asyncpg

from rara_scheduler.domain.attempt import ArtifactFacts, Checkpoint, LeaseFacts
from rara_scheduler.domain.definition import StepSpec
from rara_scheduler.store.database import Connection, Database, Lane
from rara_scheduler.store.inputs import ArtifactNotThere, load_input_artifacts
from rara_scheduler.store.known_runs import KnownRuns
from rara_scheduler.store.pauses import hold
from rara_scheduler.store.queries import query

Cursor = tuple[datetime, UUID]

_HOLD_PAGES = (200, 1000, 1000)  # steps looked at in one turn, where paused ones stand in front


class HeldInFront(Exception):
    """Only steps of paused definitions were met, and have stepped aside: look again."""


class HeldElsewhere(Exception):
    """Only steps of paused definitions were met, and somebody else is at them: what stands behind is not known."""


class _MetPaused(Exception):
    """The statement met steps of paused definitions: it has to be undone."""


@dataclass(slots=True)
class Grant:
    """One step, leased. deadline: the earlier of the step's and the run's; None: none."""

    step_run_id: str
    workflow_run_id: str
    route_id: int
    lease_token: int
    attempt: int
    failures: int
    free_endings: int
    executor_id: str
    granted_on: date
    deadline: datetime | None
    time_remaining_s: float | None
    available_at: datetime
    step_name: str
    idempotency_key: str
    carries_over: bool  # effects and checkpoint may come from the step of an earlier run
    definition: str
    definition_version: int
    run_input: bytes | None
    traceparent: str
    tracestate: str
    waited_s: float = 0.0  # from available_at to the grant, by the database's clock

    def facts(self) -> LeaseFacts:
        """The lease's row as it was granted."""
        return LeaseFacts(
            step_run_id=self.step_run_id,
            workflow_run_id=self.workflow_run_id,
            lease_token=self.lease_token,
            attempt=self.attempt,
            failures=self.failures,
            free_endings=self.free_endings,
            executor_id=self.executor_id,
            granted_on=self.granted_on,
            accepted=False,
            started=False,
            last_sequence=0,
            gaps=0,
            cancel_reason=None,
            expired=False,
            accept_overdue=False,
            step_name=self.step_name,
            idempotency_key=self.idempotency_key,
        )


@dataclass(slots=True)
class Materials:
    """What granted steps need beyond their own row, by step_run_id or idempotency key."""

    outputs: dict[str, dict[str, bytes | None]] = field(
        default_factory=dict
    )  # of the steps before, by step name
    artifacts: Mapping[str, tuple[ArtifactFacts, ...]] = field(default_factory=dict)
    missing: dict[str, ArtifactNotThere] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    effects: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict)


async def _load_checkpoints(connection: Connection, keys: Sequence[str], materials: Materials) -> None:
    rows = await connection.fetch(query("carried_checkpoints"), keys)
    artifacts: dict[str, list[ArtifactFacts]] = {}
    with_artifacts = [row["idempotency_key"] for row in rows if row["has_artifacts"]]
    if with_artifacts:
        for row in await connection.fetch(query("carried_checkpoint_artifacts"), with_artifacts):
            facts = {name: value for name, value in row.items() if name != "idempotency_key"}
            artifacts.setdefault(row["idempotency_key"], []).append(ArtifactFacts(**facts))
    for row in rows:
        key = row["idempotency_key"]
        materials.checkpoints[key] = Checkpoint(row["data"], tuple(artifacts.get(key, ())))


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease that a heartbeat found current; cancel_reason: its end is asked for."""

    lease_token: int
    cancel_reason: str | None
    cancel_grace_s: float | None


class LeaseStore:
    """known: is told of what is granted."""

    def __init__(
        self, database: Database, *, lease_s: float, heartbeat_s: float, known: KnownRuns | None = None
    ) -> None:
        self._database = database
        self._lease_s = lease_s
        self._heartbeat_s = heartbeat_s
        self._known = KnownRuns() if known is None else known

    async def grant(
        self,
        routes: Sequence[tuple[int, int, Cursor, str]],
        slots: Sequence[str],
        *,
        barred: frozenset[str] = frozenset(),
    ) -> list[Grant]:
        """Lease ready steps, oldest first, one per entry of `slots` at most.

        routes: (route_id, most steps of it, where to look from, the version of its kind that is run). slots: an
        executor_id per free slot; each of them must serve all the routes, by these versions. barred: definitions that
        are paused. Raises HeldInFront where it is worth to look again for others' steps, HeldElsewhere where it
        is not yet.
        """
        epoch = self._known.epoch
        arguments = (
            [route_id for route_id, _, _, _ in routes],
            [most for _, most, _, _ in routes],
            [cursor[0] for _, _, cursor, _ in routes],
            [cursor[1] for _, _, cursor, _ in routes],
            len(slots),
            list(slots),
            self._lease_s,
            [version for _, _, _, version in routes],
        )
        if barred:
            rows = await self._grant_around(arguments, {r: cursor for r, _, cursor, _ in routes}, barred)
        else:
            async with self._database.connection(Lane.ENGINE) as connection:
                rows = await connection.fetch(query("grant_leases"), *arguments)
        grants = [Grant(*row) for row in rows]  # its columns are the fields, in their order
        known = (grant.facts() for grant in grants if self._known.has(grant.workflow_run_id))
        self._known.granted(known, epoch)
        return grants

    async def _grant_around(
        self, arguments: Sequence[object], cursors: Mapping[int, Cursor], barred: frozenset[str]
    ) -> list[asyncpg.Record]:
        """Lease where some definitions are paused: a statement that met their steps is undone, and they step aside.

        So the statement itself is the same as ever, and each such step is met once.
        """
        for page in _HOLD_PAGES:
            met: set[int] = set()
            try:
                async with self._database.transaction(Lane.ENGINE) as connection:
                    rows = await connection.fetch(query("grant_leases"), *arguments)
                    met = {row["route_id"] for row in rows if row["definition"] in barred}
                    if not met:
                        return rows
                    raise _MetPaused
            except _MetPaused:
                pass
            async with self._database.transaction(Lane.ENGINE) as connection:
                seen = [await hold(connection, (r, *cursors[r]), r, page) for r in sorted(met)]
            if not any(each.held for each in seen):
                raise HeldElsewhere  # or they are paused no more: the next look will tell
        raise HeldInFront

    async def materials(self, granted: Sequence[tuple[Grant, StepSpec]]) -> Materials:
        """Load what the granted steps refer to; nothing is asked for steps that refer to nothing."""
        materials = Materials()
        referring = [
            grant.step_run_id
            for grant, spec in granted
            if any(reference.step for reference in spec.template_references)
        ]
        bound = [(g.step_run_id, g.workflow_run_id, spec) for g, spec in granted if spec.input_artifacts]
        carrying = [g.idempotency_key for g, _ in granted if g.attempt > 1 or g.carries_over]
        if not (referring or bound or carrying):
            return materials
        async with self._database.connection(Lane.ENGINE) as connection:
            if referring:
                for row in await connection.fetch(query("upstream_outputs"), referring):
                    materials.outputs.setdefault(row["step_run_id"], {})[row["step_name"]] = row["output"]
            if bound:
                materials.artifacts = await load_input_artifacts(connection, bound, materials.missing)
            if carrying:
                await _load_checkpoints(connection, carrying, materials)
                for row in await connection.fetch(query("carried_effects"), carrying):
                    materials.effects.setdefault(row["idempotency_key"], []).append(
                        (row["name"], row["result"])
                    )
        return materials

    async def renew(
        self, beats: Sequence[tuple[str, int, str]]
    ) -> tuple[dict[int, Renewal], frozenset[int], frozenset[int]]:
        """Renew the leases (step_run_id, lease_token, executor_id) that are listed.

        Returns what was renewed by token, the tokens that are lost, and those that a committer held just now: they
        are current, and the next beat renews them.
        """
        if not beats:
            return {}, frozenset(), frozenset()
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("renew_leases"),
                [step_run_id for step_run_id, _, _ in beats],
                [token for _, token, _ in beats],
                [executor_id for _, _, executor_id in beats],
                self._lease_s,
                self._heartbeat_s,
            )
            renewed = {
                row["lease_token"]: Renewal(row["lease_token"], row["cancel_reason"], row["cancel_grace_s"])
                for row in rows
            }
            rest = [(step, token) for step, token, _ in beats if token not in renewed]
            current: frozenset[int] = frozenset()
            if rest:
                rows = await connection.fetch(
                    query("current_tokens"), [step for step, _ in rest], [token for _, token in rest]
                )
                current = frozenset(row["lease_token"] for row in rows)
        lost = frozenset(token for _, token in rest if token not in current)
        return renewed, lost, current

    async def renew_held(self, step_run_id: str, lease_token: int, executor_id: str) -> bool:
        """Renew one lease that a committer holds, after it. False: it is gone, or is to end.

        Raises LockTimeout when the committer takes too long.
        """
        async with self._database.connection(Lane.ENGINE) as connection:
            row = await connection.fetchrow(
                query("renew_held_lease"), step_run_id, lease_token, executor_id, self._lease_s
            )
        return row is not None

    async def current(self, tokens: Sequence[tuple[str, int]]) -> frozenset[int]:
        """Of (step_run_id, lease_token) pairs, the tokens that are current."""
        if not tokens:
            return frozenset()
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("current_tokens"), [step for step, _ in tokens], [token for _, token in tokens]
            )
        return frozenset(row["lease_token"] for row in rows)
