"""What the API shows of runs, steps and executors, each answer from one moment of the database."""

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

import asyncpg

from rara_scheduler.domain.ids import executor_not_found, run_not_found, step_not_found
from rara_scheduler.domain.views import (
    ArtifactView,
    AttemptView,
    ExecutorFilter,
    ExecutorView,
    RunFilter,
    RunView,
    StepFilter,
    StepView,
)
from rara_scheduler.store.database import Connection, Database
from rara_scheduler.store.definitions import DefinitionStore, UnusableDefinition
from rara_scheduler.store.queries import query
from rara_scheduler.store.view_rows import (
    artifact_view,
    attempt_view,
    executor_view,
    run_view,
    step_view,
)

LEAN_BYTES: Final = 4096  # larger payloads are left out of lists and watches
MAX_STEPS_WITH_RUN: Final = 1000
MAX_STEPS: Final = 1_000_000  # of one run: more than any definition may have
_LEAN_TOTAL_BYTES: Final = 2 * 1024 * 1024  # of payloads in one answer, whose frame may have 4 MiB


def lean_bytes(count: int) -> int:
    """Up to how many bytes each of `count` things in one answer may bring per payload: 4 KiB, less in long ones."""
    return min(LEAN_BYTES, _LEAN_TOTAL_BYTES // (4 * max(count, 1)))


class Reads:
    """silent_after_s: since when an executor must not have been heard of to be called silent: two heartbeats."""

    def __init__(self, database: Database, definitions: DefinitionStore, *, silent_after_s: float) -> None:
        self._database = database
        self._definitions = definitions
        self._silent_after_s = silent_after_s

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Connection]:
        """A connection on which every statement sees the same moment."""
        async with (
            self._database.connection() as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            yield connection

    # ------------------------------------------------------------------ runs

    async def get_run(self, workflow_run_id: str) -> RunView:
        """One run with all its payloads. Raises RUN_NOT_FOUND."""
        # No snapshot: the run is one statement, and its artifacts never change.
        async with self._database.connection() as connection:
            found = await self.runs(connection, [workflow_run_id], None)
        if not found:
            raise run_not_found(workflow_run_id)
        return found[0]

    async def get_run_with_steps(self, workflow_run_id: str) -> tuple[RunView, list[StepView]]:
        """A run and up to 1,000 of its steps, reused ones too, in the order of their ids; large payloads left out."""
        async with self.snapshot() as connection:
            found = await self.runs(connection, [workflow_run_id], LEAN_BYTES)
            if not found:
                raise run_not_found(workflow_run_id)
            ids = await self.step_ids_of_run(connection, workflow_run_id, MAX_STEPS_WITH_RUN)
            rows = await self._step_rows(connection, ids, lean_bytes(len(ids)))
        return found[0], await self._step_views(rows)

    async def list_runs(
        self, wanted: RunFilter, *, after: tuple[datetime, str] | None, limit: int
    ) -> list[RunView]:
        """Runs by creation, the newest first, from behind the position `after`."""
        async with self.snapshot() as connection:
            rows = await connection.fetch(
                query("list_runs"),
                wanted.definition or None,
                [str(state) for state in wanted.states] or None,
                json.dumps(dict(wanted.labels)) if wanted.labels else None,
                wanted.created_from,
                wanted.created_before,
                after[0] if after else None,
                after[1] if after else None,
                limit,
            )
            return await self.runs(connection, [row["workflow_run_id"] for row in rows], lean_bytes(limit))

    async def lean_runs(self, ids: Sequence[str]) -> list[RunView]:
        """Those of the runs that exist, in that order, large payloads left out."""
        async with self.snapshot() as connection:
            return await self.runs(connection, ids, lean_bytes(len(ids)))

    async def runs(self, connection: Connection, ids: Sequence[str], max_bytes: int | None) -> list[RunView]:
        """Those of the runs that exist, in that order. max_bytes: larger payloads are left out; None: none are."""
        rows = await connection.fetch(query("read_runs"), ids, max_bytes)
        artifacts: dict[str, list[ArtifactView]] = defaultdict(list)
        given = [row["workflow_run_id"] for row in rows if row["has_artifacts"]]
        if given:
            for row in await connection.fetch(query("read_run_artifacts"), given, max_bytes):
                artifacts[row["workflow_run_id"]].append(artifact_view(row))
        return [run_view(row, artifacts[row["workflow_run_id"]]) for row in rows]

    # ------------------------------------------------------------------ steps

    async def get_step(self, step_run_id: str) -> StepView:
        """One step with all its payloads. Raises STEP_NOT_FOUND."""
        found = await self.steps([step_run_id], None)
        if not found:
            raise step_not_found(step_run_id)
        return found[0]

    async def get_step_with_attempts(self, step_run_id: str) -> tuple[StepView, list[AttemptView]]:
        """One step and every attempt at it, the current one too. Raises STEP_NOT_FOUND."""
        async with self.snapshot() as connection:
            rows = await self._step_rows(connection, [step_run_id], None)
            if not rows:
                raise step_not_found(step_run_id)
            attempts = await connection.fetch(query("read_attempts"), step_run_id)
            failed = [(step_run_id, row["attempt"]) for row in attempts if row["reason"]]
            left_behind = await self._manifests(connection, failed, LEAN_BYTES)
        views = [
            attempt_view(step_run_id, row, left_behind.get((step_run_id, row["attempt"]), ()))
            for row in attempts
        ]
        return (await self._step_views(rows))[0], views

    async def list_steps(self, wanted: StepFilter, *, below: str | None, limit: int) -> list[StepView]:
        """Steps by id, the newest first; with a run, those that it reuses too. Raises RUN_NOT_FOUND."""
        states = [str(state) for state in wanted.states] or None
        kind = wanted.kind or None
        async with self.snapshot() as connection:
            if wanted.workflow_run_id is not None:
                if not await connection.fetchval(query("run_exists"), wanted.workflow_run_id):
                    raise run_not_found(wanted.workflow_run_id)
                found = await connection.fetch(
                    query("list_steps_of_run"), wanted.workflow_run_id, states, kind, below, limit
                )
            elif states is None:
                found = await connection.fetch(query("list_steps"), kind, below, limit)
            else:
                found = await connection.fetch(query("list_steps_in_states"), kind, below, limit, states)
            ids = [row["step_run_id"] for row in found]
            rows = await self._step_rows(connection, ids, lean_bytes(limit))
        return await self._step_views(rows)

    async def steps(self, ids: Sequence[str], max_bytes: int | None) -> list[StepView]:
        """Those of the steps that exist, in that order, from one moment."""
        # No snapshot: the steps are one statement, and the manifest of an attempt never changes.
        async with self._database.connection() as connection:
            rows = await self._step_rows(connection, ids, max_bytes)
        return await self._step_views(rows)

    async def first_steps(self, workflow_run_id: str, limit: int, max_bytes: int | None) -> list[StepView]:
        """Up to `limit` steps that a run shows, by id, from one moment."""
        async with self._database.connection() as connection:
            rows = await self._step_rows(connection, None, max_bytes, of_run=(workflow_run_id, limit))
        return await self._step_views(rows)

    async def step_ids_of_run(
        self, connection: Connection, workflow_run_id: str, limit: int = MAX_STEPS
    ) -> list[str]:
        """The steps that a run shows, by id: reused ones come first, being older."""
        rows = await connection.fetch(query("step_ids_of_run"), workflow_run_id, limit)
        return [row["step_run_id"] for row in rows]

    async def _step_rows(
        self,
        connection: Connection,
        ids: Sequence[str] | None,
        max_bytes: int | None,
        *,
        of_run: tuple[str, int] | tuple[None, None] = (None, None),
    ) -> list[tuple[asyncpg.Record, Sequence[ArtifactView] | None]]:
        rows = await connection.fetch(query("read_steps"), ids, max_bytes, *of_run)
        made = await self._manifests(
            connection,
            [
                (row["step_run_id"], row["attempt"])
                for row in rows
                if row["has_manifest"] and row["has_artifacts"]
            ],
            max_bytes,
        )
        return [
            (row, made.get((row["step_run_id"], row["attempt"]), ()) if row["has_manifest"] else None)
            for row in rows
        ]

    async def _step_views(
        self, rows: Sequence[tuple[asyncpg.Record, Sequence[ArtifactView] | None]]
    ) -> list[StepView]:
        views = []
        for row, manifest in rows:
            try:
                spec = await self._definitions.spec(row["definition"], row["definition_version"])
                max_attempts = spec.steps[row["step_name"]].retry.max_attempts
            except (LookupError, UnusableDefinition):
                max_attempts = 0  # not known any more; what has become of the step still is
            views.append(step_view(row, max_attempts=max_attempts, manifest=manifest))
        return views

    async def _manifests(
        self, connection: Connection, attempts: Sequence[tuple[str, int]], max_bytes: int | None
    ) -> dict[tuple[str, int], list[ArtifactView]]:
        """The artifacts of attempts, by step and attempt; an attempt without any is not there."""
        if not attempts:
            return {}
        rows = await connection.fetch(
            query("read_manifests"), [each[0] for each in attempts], [each[1] for each in attempts], max_bytes
        )
        digests = sorted({digest for row in rows for digest in row["derived_from"]})
        sizes: dict[str, int] = {}
        if digests:
            known = await connection.fetch(query("read_blob_sizes"), digests)
            sizes = {row["sha256"]: row["size_bytes"] for row in known}
        found: dict[tuple[str, int], list[ArtifactView]] = defaultdict(list)
        for row in rows:
            found[row["step_run_id"], row["attempt"]].append(artifact_view(row, sizes))
        return found

    # ------------------------------------------------------------------ executors

    async def get_executor(self, executor_id: str) -> ExecutorView:
        """Raises EXECUTOR_NOT_FOUND."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                query("list_executors"), self._silent_after_s, None, None, None, 1, executor_id
            )
        if row is None:
            raise executor_not_found(executor_id)
        return executor_view(row)

    async def list_executors(
        self, wanted: ExecutorFilter, *, below: str | None, limit: int
    ) -> list[ExecutorView]:
        """Executors by id, downwards."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("list_executors"),
                self._silent_after_s,
                [str(state) for state in wanted.states] or None,
                wanted.kind or None,
                below,
                limit,
                None,
            )
        return [executor_view(row) for row in rows]
