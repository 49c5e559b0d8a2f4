"""The scheduler's stores over one real database, without loops or wire: tests play executor and clock."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import asyncpg
import uuid_utils.compat
from rara.v1 import workflow_pb2
from rara_scheduler.domain.attempt import (
    ArtifactFacts,
    AttemptEnding,
    Checkpoint,
    EventType,
    Guard,
    Item,
    Outcome,
    Report,
)
from rara_scheduler.domain.errors import StepError
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.start_command import StartCommand
from rara_scheduler.store.cancel import CancelResult, CancelStore
from rara_scheduler.store.commit import BatchResult, CommitStore, LeaseReports
from rara_scheduler.store.database import Database, LockTimeout
from rara_scheduler.store.definitions import DefinitionStore
from rara_scheduler.store.known_runs import KnownRuns
from rara_scheduler.store.leases import Grant, LeaseStore
from rara_scheduler.store.sessions import SessionStore
from rara_scheduler.store.start import RunStarter
from rara_scheduler.store.sweeps import BEFORE_ALL, SweepStore
from support.kept_promises import assert_promises_kept

LEASE_S = 30.0
ACCEPT_S = 10.0
GRACE_S = 5.0
NIL = str(UUID(int=0))


def new_id() -> str:
    return str(uuid_utils.compat.uuid7())


def accepted(sequence: int = 1) -> Report:
    return Report(sequence, EventType.ACCEPTED, b"a")


def running(sequence: int = 2) -> Report:
    return Report(sequence, EventType.RUNNING, b"r")


def progress(
    sequence: int, checkpoint: bytes | None = None, artifacts: Sequence[ArtifactFacts] = ()
) -> Report:
    kept = None if checkpoint is None else Checkpoint(checkpoint, tuple(artifacts))
    return Report(sequence, EventType.PROGRESS, b"p", checkpoint=kept)


def succeeded(sequence: int, output: bytes | None = b"{}", artifacts: Sequence[ArtifactFacts] = ()) -> Report:
    return Report(sequence, EventType.SUCCEEDED, b"s", outcome=Outcome(output, tuple(artifacts)))


def failed(sequence: int, code: str = "HANDLER_FAILED", *, retryable: bool | None = None) -> Report:
    return Report(sequence, EventType.FAILED, b"f", error=StepError(code, "it broke", retryable=retryable))


def cancelled(sequence: int, reason: str = "CANCELLED") -> Report:
    return Report(sequence, EventType.CANCELLED, b"c", reason=reason)


def ending(code: str, guard: Guard = Guard.NONE) -> AttemptEnding:
    return AttemptEnding(StepError(code, "the scheduler's word"), guard)


def inline_artifact(name: str, data: bytes) -> ArtifactFacts:
    return ArtifactFacts(
        name, hashlib.sha256(data).hexdigest(), len(data), "application/octet-stream", "blob", inline=data
    )


def stored_artifact(name: str, data: bytes) -> ArtifactFacts:
    return replace(inline_artifact(name, data), inline=None)


@dataclass
class StoreWorld:
    database: Database
    raw: "asyncpg.Connection[asyncpg.Record]"
    definitions: DefinitionStore
    starter: RunStarter
    leases: LeaseStore
    commits: CommitStore
    cancels: CancelStore
    sweeps: SweepStore
    sessions: SessionStore
    known: KnownRuns

    async def define(
        self,
        name: str,
        steps: dict[str, dict[str, Any]],
        *,
        on_failure: str = "ON_FAILURE_FAIL_FAST",
        **more: Any,
    ) -> None:
        """Register a definition; each step is its StepDefinition as a dict, kind `work.do` unless it says so."""
        message = workflow_pb2.Definition(
            definition=name,
            steps=[
                workflow_pb2.StepDefinition(step_name=step, **({"kind": "work.do"} | fields))
                for step, fields in steps.items()
            ],
            on_failure=workflow_pb2.OnFailure.Value(on_failure),
            **more,
        )
        await self.definitions.register(message)

    async def start(self, name: str, **fields: Any) -> str:
        return (await self.starter.start(StartCommand(name, **fields))).run_id

    async def lease(
        self, most: int = 100, executor_id: str | None = None, kind_version: str = "1.0.0"
    ) -> list[Grant]:
        routes = [r.route_id for r in await self.definitions.routes_after(0)]
        return await self.leases.grant(
            [(route_id, most, BEFORE_ALL, kind_version) for route_id in routes],
            [executor_id or new_id()] * most,
        )

    async def put_blobs(self, *blobs: ArtifactFacts) -> None:
        """Have the store know them."""
        await self.raw.executemany(
            "insert into rara.blob (sha256, size_bytes) values ($1, $2)",
            [(blob.sha256, blob.size_bytes) for blob in blobs],
        )

    async def checkpoint(self, grant: Grant) -> Checkpoint | None:
        """What the next attempt would be given."""
        definition = await self.definitions.spec(grant.definition, grant.definition_version)
        later = replace(grant, attempt=grant.attempt + 1)
        materials = await self.leases.materials([(later, definition.steps[grant.step_name])])
        return materials.checkpoints.get(grant.idempotency_key)

    async def lease_one(self) -> Grant:
        grants = await self.lease(1)
        assert len(grants) == 1
        return grants[0]

    async def report(self, grant: Grant, *items: Item, executor_id: str | None = None) -> BatchResult:
        return await self.commits.commit(
            [reports(grant, *items, executor_id=executor_id or grant.executor_id)]
        )

    async def commit(self, batch: Sequence[LeaseReports]) -> BatchResult:
        """As the committer does: whoever holds rows of the batch is waited for once, and then left out."""
        try:
            return await self.commits.commit(batch)
        except LockTimeout:
            return await self.commits.commit(batch, skip_locked=True)

    async def say(self, grant: Grant, *items: Item) -> BatchResult:
        """The scheduler's own word about a lease."""
        return await self.commits.commit([reports(grant, *items, executor_id=None)])

    async def run_to_success(self, grant: Grant, output: bytes = b"{}") -> BatchResult:
        return await self.report(grant, accepted(1), running(2), succeeded(3, output))

    async def state(self, step_run_id: str) -> str:
        return str(
            await self.raw.fetchval(
                "select state from rara.step_state where step_run_id = $1::uuid", step_run_id
            )
        )

    async def step(self, step_run_id: str) -> asyncpg.Record:
        row = await self.raw.fetchrow(
            "select * from rara.step_state where step_run_id = $1::uuid", step_run_id
        )
        assert row is not None
        return row

    async def steps(self, run_id: str) -> dict[str, tuple[str, str]]:
        rows = await self.raw.fetch(
            "select step_name, state, reason from rara.step_state where workflow_run_id = $1::uuid", run_id
        )
        return {row["step_name"]: (row["state"], row["reason"]) for row in rows}

    async def run(self, run_id: str) -> asyncpg.Record:
        row = await self.raw.fetchrow(
            "select * from rara.workflow_run where workflow_run_id = $1::uuid", run_id
        )
        assert row is not None
        return row

    async def run_state(self, run_id: str) -> str:
        return str((await self.run(run_id))["state"])

    async def cancel(self, run_id: str, *, grace_s: float | None = None) -> CancelResult:
        return await self.cancels.cancel_run(run_id, reason="CANCELLED", message="enough", grace_s=grace_s)

    async def expire(self, grant: Grant) -> None:
        """Let the lease's time be over, as if it had passed."""
        await self.raw.execute(
            "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 second'"
            " where lease_token = $1",
            grant.lease_token,
        )

    async def make_due(self) -> None:
        """Let every backoff be over."""
        await self.raw.execute(
            "update rara.waiting set available_at = now()"
            " where step_run_id in (select step_run_id from rara.waiting for update skip locked)"
        )
        await self.sweeps.promote_due()


def reports(grant: Grant, *items: Item, executor_id: str | None) -> LeaseReports:
    return LeaseReports(grant.step_run_id, grant.workflow_run_id, grant.lease_token, executor_id, items)


def payload(value: Any) -> bytes:
    return json.dumps(value).encode()


@asynccontextmanager
async def store_world(
    url: str, open_database: Callable[[str], Database] = Database, *, check_history: bool = False
) -> AsyncIterator[StoreWorld]:
    """The stores over this database. check_history: fail a test that leaves a broken promise there."""
    database = open_database(url)
    await database.open()
    raw = await asyncpg.connect(url)
    definitions = DefinitionStore(database, RetryPolicy())
    known = KnownRuns()
    known.told_by(await raw.fetchval("select pg_postmaster_start_time()"))  # else the first commit would ask
    try:
        yield StoreWorld(
            database=database,
            raw=raw,
            definitions=definitions,
            starter=RunStarter(database, definitions, on_ready=lambda: None, known=known),
            leases=LeaseStore(database, lease_s=LEASE_S, heartbeat_s=5.0, known=known),
            commits=CommitStore(
                database,
                definitions,
                lease_s=LEASE_S,
                accept_timeout_s=ACCEPT_S,
                cancel_grace_s=GRACE_S,
                jitter=lambda: 0.5,
                known=known,
            ),
            cancels=CancelStore(database, definitions, cancel_grace_s=GRACE_S),
            sweeps=SweepStore(database, scheduler_id=NIL, accept_timeout_s=ACCEPT_S, silence_s=15.0),
            sessions=SessionStore(database),
            known=known,
        )
    finally:
        async with asyncio.timeout(10):
            await raw.close()
            await database.close()
    if check_history:
        await assert_promises_kept(url)
