"""Definitions in the database: registered once, read often, kept in memory because they never change."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, ParamSpec, TypeVar

import asyncpg
from google.protobuf.message import DecodeError
from rara.v1 import workflow_pb2

from rara_scheduler.domain.definition import (
    DefinitionLimits,
    DefinitionSpec,
    parse_definition,
    stored_definition,
)
from rara_scheduler.domain.definition_content import content_of, content_sha256
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.routing import Route
from rara_scheduler.store.database import Connection, Database
from rara_scheduler.store.queries import query

_P = ParamSpec("_P")
_T = TypeVar("_T")
_RouteKey = tuple[str, str, str, str]  # executor_kind, kind, kind_version, required_labels as JSON

_LONG: Final = 200  # steps from which on parsing leaves the event loop


@dataclass(frozen=True)
class Registered:
    """One stored version: its message as clients see it, its value, and each step's route."""

    message: workflow_pb2.Definition
    spec: DefinitionSpec
    route_ids: Mapping[str, int]


class UnusableDefinition(Fault):
    """A version that cannot be had, so that nothing of its runs can be built or judged."""


class DefinitionNotFound(UnusableDefinition):
    def __init__(self, definition: str, version: int) -> None:
        which = f"version {version} of definition {definition}" if version else f"definition {definition}"
        metadata = {"definition": definition} | ({"version": str(version)} if version else {})
        super().__init__(Code.DEFINITION_NOT_FOUND, f"there is no {which}", metadata=metadata)


class DefinitionDamaged(UnusableDefinition):
    """What is stored is not what was registered: somebody changed the row by hand."""

    def __init__(self, definition: str, version: int) -> None:
        metadata = {"definition": definition, "version": str(version)}
        message = f"version {version} of definition {definition} cannot be read"
        super().__init__(Code.INTERNAL, message, metadata=metadata)


class DefinitionStore:
    """Registers and reads definitions; keeps up to `cached_steps` steps of the last used ones in memory.

    on_routes: called when this process meets a definition, whose routes the dispatcher may not know yet.
    """

    def __init__(
        self,
        database: Database,
        defaults: RetryPolicy,
        limits: DefinitionLimits | None = None,
        *,
        cached_steps: int = 50_000,
        on_routes: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._defaults = defaults
        self._limits = limits or DefinitionLimits()
        self._cached_steps = cached_steps
        self._on_routes = on_routes
        self._steps_in_cache = 0
        self._cache: OrderedDict[tuple[str, int], Registered] = OrderedDict()
        self._newest: dict[str, Registered] = {}  # when last looked, of those in the cache

    @property
    def limits(self) -> DefinitionLimits:
        return self._limits

    async def register(
        self, message: workflow_pb2.Definition, *, validate_only: bool = False
    ) -> tuple[workflow_pb2.Definition, bool]:
        """Check and store a definition; return it as stored, and whether its content existed already.

        With `validate_only` nothing is stored, and the answer of new content has version 0. Raises the faults of
        `parse_definition`.
        """
        content = content_of(message)
        spec = await self._parse(content)
        sha256 = content_sha256(content)
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("definition_by_hash"), spec.definition, sha256)
        if row is not None or validate_only:
            version, created_at = (0, None) if row is None else (row["version"], row["created_at"])
            return _described(content, version, sha256, created_at), row is not None
        routes = sorted({_route_key(spec, name) for name in spec.steps})
        # Deterministic: equal content gives equal bytes, whatever order its maps arrived in.
        body = content.SerializeToString(deterministic=True)
        async with self._database.transaction() as connection:
            await connection.execute(query("definition_lock"), spec.definition)
            row = await connection.fetchrow(query("definition_by_hash"), spec.definition, sha256)
            existed = row is not None
            if row is None:
                await _intern_routes(connection, routes)
                row = await connection.fetchrow(query("definition_insert"), spec.definition, sha256, body)
        assert row is not None  # noqa: S101 - the insert returns its row
        self._on_routes()
        return _described(content, row["version"], sha256, row["created_at"]), existed

    async def load(self, definition: str, version: int = 0) -> Registered:
        """One version, 0 being the newest. Raises UnusableDefinition."""
        cached = self._cache.get((definition, version))
        if cached is not None:
            self._cache.move_to_end((definition, version))
            return cached
        asked_newest = version == 0
        async with self._database.connection() as connection:
            if asked_newest:
                version = await connection.fetchval(query("definition_newest"), definition) or 0
                cached = self._cache.get((definition, version))
                if cached is not None:
                    self._newest[definition] = cached
                    return cached
            row = await connection.fetchrow(query("definition_get"), definition, version)
            if row is None:
                raise DefinitionNotFound(definition, version)
            try:
                message = _message(row)
                spec = await _off_loop(len(message.steps), stored_definition, message, self._defaults)
            except (DecodeError, LookupError, TypeError, ValueError) as error:
                raise DefinitionDamaged(definition, version) from error
            keys = [_route_key(spec, name) for name in spec.steps]
            unique = sorted(set(keys))
            found = dict(zip(unique, await _find_routes(connection, unique), strict=True))
        # A route is interned with the definition, in one transaction. Where one is gone all the same, no run can
        # start, and those that run go on.
        route_ids = {
            name: route_id
            for name, key in zip(spec.steps, keys, strict=True)
            if (route_id := found[key]) is not None
        }
        registered = Registered(message, spec, route_ids)
        self._keep(registered, is_newest=asked_newest)
        self._on_routes()
        return registered

    def newest_known(self, definition: str) -> Registered | None:
        """What was the newest version when this process last looked; another may be by now."""
        known = self._newest.get(definition)
        if known is not None:
            self._cache.move_to_end((definition, known.spec.version))
        return known

    async def get(self, definition: str, version: int = 0) -> tuple[workflow_pb2.Definition, DefinitionSpec]:
        """A version as clients see it (do not change it) and its value. Raises UnusableDefinition."""
        registered = await self.load(definition, version)
        return registered.message, registered.spec

    async def spec(self, definition: str, version: int) -> DefinitionSpec:
        return (await self.load(definition, version)).spec

    def cached(self, definition: str, version: int) -> DefinitionSpec | None:
        """The same where it is in memory."""
        registered = self._cache.get((definition, version))
        if registered is None:
            return None
        self._cache.move_to_end((definition, version))
        return registered.spec

    async def newest(self, *, after: str, limit: int) -> list[workflow_pb2.Definition]:
        """The newest version of each definition, by name, from behind `after` (empty: from the first)."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("definition_list_newest"), after, limit)
        return [_message(row) for row in rows]

    async def versions(
        self, definition: str, *, below: int | None, limit: int
    ) -> list[workflow_pb2.Definition]:
        """The versions of one definition, the newest first; empty for an unknown one."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("definition_list_versions"), definition, below, limit)
        return [_message(row) for row in rows]

    async def routes_after(self, route_id: int) -> list[Route]:
        """Routes with larger ids, in order. Who goes on from the last one misses none."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("definition_routes_after"), route_id)
        return [
            Route(
                row["route_id"],
                row["executor_kind"],
                row["kind"],
                row["kind_version"],
                json.loads(row["required_labels"]),
            )
            for row in rows
        ]

    async def _parse(self, content: workflow_pb2.Definition) -> DefinitionSpec:
        return await _off_loop(len(content.steps), parse_definition, content, self._defaults, self._limits)

    def _keep(self, registered: Registered, *, is_newest: bool) -> None:
        definition, version = registered.spec.definition, registered.spec.version
        if (definition, version) not in self._cache:
            if len(registered.spec.steps) > self._cached_steps:
                return
            self._cache[definition, version] = registered
            self._steps_in_cache += len(registered.spec.steps)
        if is_newest:
            self._newest[definition] = self._cache[definition, version]
        while self._steps_in_cache > self._cached_steps:
            (name, _), dropped = self._cache.popitem(last=False)
            self._steps_in_cache -= len(dropped.spec.steps)
            if self._newest.get(name) is dropped:
                del self._newest[name]


async def _off_loop(steps: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call it, in a thread when the definition is long: 10,000 steps take half a second."""
    if steps < _LONG:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def _route_key(spec: DefinitionSpec, step_name: str) -> _RouteKey:
    step = spec.steps[step_name]
    labels = json.dumps(dict(sorted(step.required_labels.items())))
    return step.executor_kind, step.kind, step.kind_version, labels


async def _find_routes(connection: Connection, keys: Sequence[_RouteKey]) -> list[int | None]:
    rows = await connection.fetch(query("route_find"), *_columns(keys))
    return [row["route_id"] for row in rows]


async def _intern_routes(connection: Connection, keys: Sequence[_RouteKey]) -> None:
    found = await _find_routes(connection, keys)
    missing = [key for key, route_id in zip(keys, found, strict=True) if route_id is None]
    if missing:
        await connection.execute(query("route_lock"))
        await connection.execute(query("route_insert"), *_columns(missing))


def _columns(keys: Sequence[_RouteKey]) -> tuple[list[str], list[str], list[str], list[str]]:
    return (
        [key[0] for key in keys],
        [key[1] for key in keys],
        [key[2] for key in keys],
        [key[3] for key in keys],
    )


def _described(
    content: workflow_pb2.Definition, version: int, sha256: str, created_at: datetime | None
) -> workflow_pb2.Definition:
    message = workflow_pb2.Definition()
    message.CopyFrom(content)
    message.version = version
    message.content_sha256 = sha256
    if created_at is not None:
        message.created_at.FromDatetime(created_at)
    return message


def _message(row: asyncpg.Record) -> workflow_pb2.Definition:
    content = workflow_pb2.Definition.FromString(row["body"])
    return _described(content, row["version"], row["content_sha256"], row["created_at"])
