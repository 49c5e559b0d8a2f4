"""Starting runs: everything of a run in one transaction, once per caller's key."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import asyncpg

from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.domain.payload import parse_payload
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.start_command import (
    MAX_BATCH_STEPS,
    RunArtifact,
    StartCommand,
    check_artifacts,
    check_keys,
    of_request,
    refuse_secrets,
    request_sha256,
)
from rara_scheduler.domain.step import StepState
from rara_scheduler.domain.views import PayloadView, RunView
from rara_scheduler.store.database import Conflict, Connection, Database
from rara_scheduler.store.definitions import DefinitionStore, Registered
from rara_scheduler.store.known_runs import MAX_TOGETHER, KnownRuns
from rara_scheduler.store.queries import query
from rara_scheduler.store.run_ledger import LockedRun
from rara_scheduler.store.step_rows import StepColumns, new_id

_TRIES: Final = 3
_BREATH: Final = 50  # requests of a batch that are checked without a pause


class IdempotencyConflict(Fault):
    def __init__(self, workflow_run_id: str) -> None:
        super().__init__(
            Code.IDEMPOTENCY_CONFLICT,
            f"the idempotency key was used with other content, for run {workflow_run_id}",
            metadata={"workflow_run_id": workflow_run_id},
        )


class _NotNewest(Exception):
    """A version that was to be started as the newest no longer is: nothing is stored."""


async def run_of_key(connection: Connection, key: str, sha256: str) -> str | None:
    """The run that a key started, None if it started none. Raises IdempotencyConflict for other content."""
    found = await _runs_of_keys(connection, [key])
    return _same_content(found[key], sha256) if key in found else None


async def _runs_of_keys(connection: Connection, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    """By key: the run that it started, and the hash of what asked for it."""
    rows = await connection.fetch(query("start_keys_get"), keys)
    return {row["idempotency_key"]: (row["workflow_run_id"], row["request_sha256"]) for row in rows}


def _same_content(found: tuple[str, str], sha256: str) -> str:
    workflow_run_id, found_sha256 = found
    if found_sha256 != sha256:
        raise IdempotencyConflict(workflow_run_id)
    return workflow_run_id


@dataclass(frozen=True, slots=True)
class _Start:
    """A run that is to be started. index: its place in a batch; None: it is no part of one.

    as_newest: only if the version is still the newest when it is stored.
    """

    run_id: str
    command: StartCommand
    registered: Registered
    sha256: str
    index: int | None = None
    as_newest: bool = False

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Say in faults which request of the batch they are about."""
        try:
            yield
        except Fault as fault:
            if self.index is None:
                raise
            raise of_request(self.index, fault) from fault

    @property
    def stored_artifacts(self) -> list[RunArtifact]:
        return [artifact for artifact in self.command.artifacts if artifact.inline is None]

    def stored(self) -> LockedRun:
        """The run's row as the start has written it."""
        spec = self.registered.spec
        return LockedRun(
            workflow_run_id=self.run_id,
            state=RunState.PENDING,
            revision=1,
            total=len(spec.steps),
            succeeded=0,
            failed=0,
            cancelled=0,
            on_failure=spec.on_failure,
            cancel_reason=None,
            definition=spec.definition,
            definition_version=spec.version,
            failed_step_run_id=None,
        )

    def view(self, created_at: datetime, deadline: datetime | None) -> RunView:
        """The run, which has no artifacts, at the moment of its start."""
        command, spec = self.command, self.registered.spec
        return RunView(
            workflow_run_id=self.run_id,
            definition=spec.definition,
            definition_version=spec.version,
            state=RunState.PENDING,
            revision=1,
            input=None if command.input is None else PayloadView(command.input, len(command.input)),
            input_artifacts=[],
            step_counts={StepState.PENDING: len(spec.steps)},
            failed_step_run_id=None,
            error=None,
            labels=command.labels,
            retry_of_workflow_run_id=None,
            created_at=created_at,
            started_at=None,
            ended_at=None,
            deadline=deadline,
            cancel_requested_at=None,
        )


@dataclass(frozen=True, slots=True)
class Started:
    """already: an earlier call with the same key and content had started it. view: as it was started, None where it
    has to be read."""

    run_id: str
    already: bool
    view: RunView | None = None


class RunStarter:
    """Starts runs, and tells `known`, `on_started` and `on_ready` after each commit that started any."""

    def __init__(
        self,
        database: Database,
        definitions: DefinitionStore,
        *,
        on_ready: Callable[[], None],
        on_started: Callable[[Iterable[str]], None] = lambda _: None,
        known: KnownRuns | None = None,
        max_inline_bytes: int = 16 * 1024,
    ) -> None:
        self._database = database
        self._definitions = definitions
        self._known = KnownRuns() if known is None else known
        self._on_ready = on_ready
        self._on_started = on_started
        self._max_inline_bytes = max_inline_bytes

    async def start(self, command: StartCommand) -> Started:
        """Start one run, or find the one that its key has started.

        Raises Fault: DEFINITION_NOT_FOUND; SECRET_IN_PAYLOAD; ARTIFACT_MISMATCH, ARTIFACT_NOT_FOUND,
        PAYLOAD_TOO_LARGE or FIELD_INVALID for the artifacts; IDEMPOTENCY_CONFLICT naming the run.
        """
        started = None if command.version else await self._start_as_known(command)
        if started is None:
            registered = await self._definitions.load(command.definition, command.version)
            (started,) = await self._start([self._checked(command, registered)])
        return started

    async def _start_as_known(self, command: StartCommand) -> Started | None:
        """Start the newest version that is known, without asking first. None: ask."""
        known = self._definitions.newest_known(command.definition)
        if known is None:
            return None
        try:
            start = self._checked(command, known, as_newest=True)
        except Fault:
            return None  # a newer version may allow what this one does not
        try:
            (started,) = await self._start([start])
        except _NotNewest:
            return None
        return started

    async def start_batch(self, commands: Sequence[StartCommand]) -> list[Started]:
        """Start all or none, in one transaction; what `start` returns, for each.

        Raises the faults of `start` with the request's `index` in their metadata, and FIELD_INVALID for more than
        MAX_BATCH_STEPS steps or a key that is there twice.
        """
        check_keys(commands)
        loaded: dict[
            tuple[str, int], Registered
        ] = {}  # the newest version is the same one for all of a batch
        starts = []
        steps = 0
        for index, command in enumerate(commands):
            try:
                which = command.definition, command.version
                if which not in loaded:
                    loaded[which] = await self._definitions.load(*which)
                starts.append(self._checked(command, loaded[which], index))
            except Fault as fault:
                raise of_request(index, fault) from fault
            steps += len(loaded[which].spec.steps)
            if steps > MAX_BATCH_STEPS:
                raise field_invalid("requests", f"have more than {MAX_BATCH_STEPS} steps together")
            if index % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)  # sessions and heartbeats are served by the same loop
        return await self._start(starts)

    def _checked(
        self,
        command: StartCommand,
        registered: Registered,
        index: int | None = None,
        *,
        as_newest: bool = False,
    ) -> _Start:
        value = None if command.input is None else parse_payload(command.input)
        if not registered.spec.allows_secrets:
            refuse_secrets(command, value)
        check_artifacts(command, registered.spec, self._max_inline_bytes)
        sha256 = "" if command.idempotency_key is None else request_sha256(command, value)
        return _Start(new_id(), command, registered, sha256, index, as_newest)

    async def _start(self, starts: Sequence[_Start]) -> list[Started]:
        arguments = _arguments(starts)
        for attempt in range(1, _TRIES + 1):
            try:
                started, earlier = await self._try(starts, arguments)
            except Conflict:
                if attempt == _TRIES:
                    raise Fault(
                        Code.STORE_UNAVAILABLE, "the start met other transactions", retry_after_s=0.2
                    ) from None
                continue
            if started:
                if len(starts) <= MAX_TOGETHER:
                    self._known.started(each.stored() for each in starts if each.run_id in started)
                self._on_started(started)
                self._on_ready()
                await asyncio.sleep(0)  # leasing asks the database while the answer is made
            return [
                Started(earlier[each.run_id], already=True)
                if each.run_id in earlier
                else Started(each.run_id, already=False, view=_view(each, started[each.run_id]))
                for each in starts
            ]
        raise AssertionError("unreachable")

    async def _try(
        self, starts: Sequence[_Start], arguments: Sequence[Any]
    ) -> tuple[dict[str, asyncpg.Record], dict[str, str]]:
        """The rows of what was started, by id, and for the others the run that their key had started before."""
        alone = len(starts) == 1 and not starts[0].stored_artifacts
        # One statement is a transaction by itself.
        scope = self._database.connection() if alone else self._database.transaction()
        async with scope as connection:
            rows = await connection.fetch(query("start_runs"), *arguments)
            started = {row["workflow_run_id"]: row for row in rows}
            earlier = await _earlier(connection, [each for each in starts if each.run_id not in started])
            await _lock_blobs(connection, [each for each in starts if each.run_id in started])
        return started, earlier


def _view(start: _Start, row: asyncpg.Record) -> RunView | None:
    return None if start.command.artifacts else start.view(row["created_at"], row["deadline"])


async def _earlier(connection: Connection, taken: Sequence[_Start]) -> dict[str, str]:
    """The runs of keys that were taken. They have committed: the statement waited for them, and a new one sees them.

    Raises _NotNewest for a start that was not stored for another reason.
    """
    if not taken:
        return {}
    # Without a key the statement inserts whatever has not become older than the newest.
    found = await _runs_of_keys(connection, [each.command.idempotency_key or "" for each in taken])
    earlier = {}
    for each in taken:
        key = each.command.idempotency_key or ""
        if key not in found:
            if each.as_newest:
                raise _NotNewest
            raise Conflict("the key vanished with its run")
        with each.blamed():
            earlier[each.run_id] = _same_content(found[key], each.sha256)
    return earlier


async def _lock_blobs(connection: Connection, starts: Sequence[_Start]) -> None:
    wanted = {artifact.sha256 for each in starts for artifact in each.stored_artifacts}
    if not wanted:
        return
    rows = await connection.fetch(query("start_blobs_lock"), sorted(wanted))
    sizes = {row["sha256"]: row["size_bytes"] for row in rows}
    for each in starts:
        with each.blamed():
            _check_stored(each.stored_artifacts, sizes)


def _check_stored(artifacts: Iterable[RunArtifact], sizes: Mapping[str, int]) -> None:
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


def _arguments(starts: Sequence[_Start]) -> list[Any]:
    """The parameters of `start_runs`, in its order."""
    steps = StepColumns()
    for each in starts:
        _add_steps(steps, each)
    artifacts = [(each.run_id, artifact) for each in starts for artifact in each.command.artifacts]
    return [
        *_run_columns(starts),
        steps.runs,
        steps.ids,
        steps.names,
        steps.routes,
        steps.keys,
        steps.schedule_timeouts,
        steps.edge_runs,
        steps.edge_steps,
        steps.edge_ups,
        steps.ready_runs,
        steps.ready_ids,
        steps.ready_routes,
        steps.ready_timeouts,
        steps.ready_schedule_timeouts,
        [run_id for run_id, _ in artifacts],
        [artifact.name for _, artifact in artifacts],
        [artifact.sha256 for _, artifact in artifacts],
        [artifact.size_bytes for _, artifact in artifacts],
        [artifact.media_type for _, artifact in artifacts],
        [artifact.type for _, artifact in artifacts],
        [artifact.inline for _, artifact in artifacts],
        [artifact.metadata for _, artifact in artifacts],
        [each.as_newest for each in starts],
    ]


def _run_columns(starts: Sequence[_Start]) -> list[list[Any]]:
    rows = []
    for each in starts:
        command, spec = each.command, each.registered.spec
        rows.append(
            (
                each.run_id,
                spec.definition,
                spec.version,
                spec.on_failure,
                command.input,
                json.dumps(dict(command.labels)),
                command.traceparent,
                command.tracestate,
                spec.run_timeout_s if command.run_timeout_s is None else command.run_timeout_s,
                len(spec.steps),
                command.idempotency_key,
                each.sha256,
            )
        )
    return [list(column) for column in zip(*rows, strict=True)]


def _add_steps(steps: StepColumns, each: _Start) -> None:
    spec = each.registered.spec
    ids = {name: new_id() for name in spec.steps}
    for name, step in spec.steps.items():
        steps.add(
            each.run_id,
            step,
            route_id=each.registered.route_ids[name],
            ids=ids,
            idempotency_key=f"{each.run_id}/{name}",
            is_ready=not step.depends_on,
        )
