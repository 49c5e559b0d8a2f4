"""Starting runs: everything of a run in one transaction, once per caller's key."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from rara_scheduler.domain.canonical import Json
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.payload import parse_payload
from rara_scheduler.domain.start_command import (
    RunArtifact,
    StartCommand,
    check_artifacts,
    refuse_secrets,
    request_sha256,
)
from rara_scheduler.store.database import Conflict, Connection, Database
from rara_scheduler.store.definitions import DefinitionStore, Registered
from rara_scheduler.store.queries import query
from rara_scheduler.store.step_rows import StepColumns, new_id

_TRIES: Final = 3


class IdempotencyConflict(Fault):
    def __init__(self, workflow_run_id: str) -> None:
        super().__init__(
            Code.IDEMPOTENCY_CONFLICT,
            f"the idempotency key was used with other content, for run {workflow_run_id}",
            metadata={"workflow_run_id": workflow_run_id},
        )


async def run_of_key(connection: Connection, key: str, sha256: str) -> str | None:
    """The run that a key started, None if it started none. Raises IdempotencyConflict for other content."""
    row = await connection.fetchrow(query("start_key_get"), key)
    if row is None:
        return None
    if row["request_sha256"] != sha256:
        raise IdempotencyConflict(row["workflow_run_id"])
    workflow_run_id: str = row["workflow_run_id"]
    return workflow_run_id


class RunStarter:
    """Starts runs, and tells `on_ready` after each commit that made steps leasable."""

    def __init__(
        self,
        database: Database,
        definitions: DefinitionStore,
        *,
        on_ready: Callable[[], None],
        max_inline_bytes: int = 16 * 1024,
    ) -> None:
        self._database = database
        self._definitions = definitions
        self._on_ready = on_ready
        self._max_inline_bytes = max_inline_bytes

    async def start(self, command: StartCommand) -> tuple[str, bool]:
        """The run's id, and whether an earlier call with the same key and content had started it.

        Raises Fault: DEFINITION_NOT_FOUND; SECRET_IN_PAYLOAD; ARTIFACT_MISMATCH, ARTIFACT_NOT_FOUND,
        PAYLOAD_TOO_LARGE or FIELD_INVALID for the artifacts; IDEMPOTENCY_CONFLICT naming the run.
        """
        value = None if command.input is None else parse_payload(command.input)
        registered = await self._definitions.load(command.definition, command.version)
        if not registered.spec.allows_secrets:
            refuse_secrets(command, value)
        check_artifacts(command, registered.spec, self._max_inline_bytes)
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._start(command, registered, value)
            except Conflict:
                if attempt == _TRIES:
                    raise Fault(
                        Code.STORE_UNAVAILABLE, "the start met other transactions", retry_after_s=0.2
                    ) from None
        raise AssertionError("unreachable")

    async def _start(self, command: StartCommand, registered: Registered, value: Json) -> tuple[str, bool]:
        key = command.idempotency_key
        sha256 = "" if key is None else request_sha256(command, value)
        arguments = _arguments(command, registered, sha256)
        stored = [artifact for artifact in command.artifacts if artifact.inline is None]
        if stored:
            async with self._database.transaction() as connection:
                started = await connection.fetchval(query("start_run"), *arguments)
                if started is not None:
                    await _lock_blobs(connection, stored)
        else:  # one statement is a transaction by itself
            async with self._database.connection() as connection:
                started = await connection.fetchval(query("start_run"), *arguments)
        if started is not None:
            self._on_ready()
            return str(started), False
        # The key is taken, and its run has committed: the statement waited for it. A new one sees it.
        assert key is not None  # noqa: S101 - without a key the statement always inserts
        async with self._database.connection() as connection:
            earlier = await run_of_key(connection, key, sha256)
        if earlier is None:
            raise Conflict("the key vanished with its run")
        return earlier, True


async def _lock_blobs(connection: Connection, artifacts: Sequence[RunArtifact]) -> None:
    rows = await connection.fetch(query("start_blobs_lock"), [artifact.sha256 for artifact in artifacts])
    sizes = {row["sha256"]: row["size_bytes"] for row in rows}
    for artifact in artifacts:
        metadata = {"name": artifact.name, "sha256": artifact.sha256}
        if artifact.sha256 not in sizes:
            raise Fault(
                Code.ARTIFACT_NOT_FOUND,
                f"input artifact {artifact.name}: no blob {artifact.sha256} is stored; upload it first",
                metadata=metadata,
            )
        if sizes[artifact.sha256] != artifact.size_bytes:
            raise Fault(
                Code.ARTIFACT_MISMATCH,
                f"input artifact {artifact.name}: blob {artifact.sha256} has {sizes[artifact.sha256]} bytes, "
                f"not {artifact.size_bytes}",
                metadata=metadata,
            )


def _arguments(command: StartCommand, registered: Registered, sha256: str) -> list[Any]:
    """The parameters of `start_run`, in its order."""
    spec = registered.spec
    run_id = new_id()
    ids = {name: new_id() for name in spec.steps}
    rows = StepColumns()
    for name, step in spec.steps.items():
        rows.add(
            step,
            route_id=registered.route_ids[name],
            ids=ids,
            idempotency_key=f"{run_id}/{name}",
            is_ready=not step.depends_on,
        )
    timeout_s = spec.run_timeout_s if command.run_timeout_s is None else command.run_timeout_s
    artifacts = command.artifacts
    return [
        run_id,
        spec.definition,
        spec.version,
        spec.on_failure,
        command.input,
        json.dumps(dict(command.labels)),
        command.traceparent,
        command.tracestate,
        timeout_s,
        command.idempotency_key,
        sha256,
        rows.ids,
        rows.names,
        rows.routes,
        rows.keys,
        rows.schedule_timeouts,
        rows.edge_steps,
        rows.edge_ups,
        rows.ready_ids,
        rows.ready_routes,
        rows.ready_timeouts,
        rows.ready_schedule_timeouts,
        [each.name for each in artifacts],
        [each.sha256 for each in artifacts],
        [each.size_bytes for each in artifacts],
        [each.media_type for each in artifacts],
        [each.type for each in artifacts],
        [each.inline for each in artifacts],
        [each.metadata for each in artifacts],
    ]
