"""Walks along lineage: breadth first, a statement for each half of a level, page by page over one snapshot."""

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal

import asyncpg

from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.domain.ids import run_not_found, step_not_found
from rara_scheduler.domain.lineage import (
    MAX_EDGES,
    MAX_ORIGINS,
    Half,
    LineageEdge,
    Place,
    Row,
    Through,
    leads_on,
    reached_inputs,
)
from rara_scheduler.store.database import Connection, Database
from rara_scheduler.store.queries import query

STATEMENT_TIMEOUT_S: Final = 5.0
WALK_TIMEOUT_S: Final = 10.0
# Walks at a time and scheduler: other calls must find a connection, and the database has other work too.
MAX_WALKS: Final = 2
MAX_WAITING: Final = 64
_ROWS_AT_ONCE: Final = 500  # before others may have the event loop
_KEPT_EDGES: Final = 2 * MAX_EDGES  # of walks whose pages are asked for: some 700 bytes each, without origins
_ORIGINS_AT_ONCE: Final = 20_000  # some 3 MB
# What one page shows: more than an answer has bytes for, so that a page which ends here is not taken for the last.
_ORIGINS_OF_PAGE: Final = 48_000


@dataclass(frozen=True, slots=True)
class Start:
    """Where a walk begins: a digest, the id of a step, or the id of a run with all of its steps."""

    kind: Literal["artifact", "step", "run"]
    what: str


@dataclass(frozen=True, slots=True)
class Position:
    """Behind which edge a page begins, and what the first page saw."""

    snapshot: str
    place: Place


@dataclass(frozen=True, slots=True)
class LineagePage:
    """truncated: there is more, behind so many edges that no call looks at it."""

    edges: Sequence[LineageEdge]
    snapshot: str
    places: Sequence[Place]
    truncated: bool


class LineageReads:
    """max_edges, max_origins: so many rows, and digests in their derived_from, are read for one page at most."""

    def __init__(
        self, database: Database, *, max_edges: int = MAX_EDGES, max_origins: int = MAX_ORIGINS
    ) -> None:
        self._database = database
        self._max_edges = max_edges
        self._max_origins = max_origins
        self._walks = asyncio.Semaphore(MAX_WALKS)
        self._waiting = 0
        self._walked: dict[tuple[object, ...], _Walked] = {}  # the oldest first

    async def digest_beginning(self, prefix: str) -> tuple[str, int]:
        """The one digest in lineage that begins so, and its size. Raises ARTIFACT_NOT_FOUND or FIELD_INVALID."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("lineage_digests_beginning"), prefix)
        if not rows:
            raise Fault(
                Code.ARTIFACT_NOT_FOUND, f"no step made or used an artifact that begins with {prefix}"
            )
        first, last = rows[0], rows[-1]
        if first["sha256"] != last["sha256"]:
            raise field_invalid(
                "artifact_prefix", f"several artifacts begin so: {first['sha256']}, {last['sha256']}"
            )
        return str(first["sha256"]), int(first["size_bytes"])

    async def size_of(self, sha256: str, edges: Iterable[LineageEdge] = ()) -> int:
        """Of an artifact, from these edges if they tell; 0 where nothing made or used it."""
        for edge in edges:
            if edge.sha256 == sha256:
                return edge.size_bytes
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("lineage_digests_beginning"), sha256)
        return int(rows[0]["size_bytes"]) if rows else 0

    async def page(
        self, start: Start, *, upstream: bool, depth: int, after: Position | None, size: int
    ) -> LineagePage:
        """Up to `size` edges and one more, the nearest first, from behind `after`.

        Raises STEP_NOT_FOUND, RUN_NOT_FOUND, QUEUE_FULL.
        """
        async with (
            self._turn(),
            self._database.connection() as connection,
            asyncio.timeout(WALK_TIMEOUT_S),
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            walk = _Walk(connection, upstream, depth, self._max_edges, self._max_origins, after)
            await walk.begin()
            key = (start, upstream, depth, walk.snapshot)
            known = self._walked.get(key)
            if after is not None and known is not None:
                at = bisect_right(known.found, after.place, key=itemgetter(0))
                found = _showable(known.found[at : at + size + 1])
                left, edges = await _edges(connection, found, upstream=upstream)
                if len(left) == len(found):
                    return LineagePage(edges, walk.snapshot, [place for place, _ in found], known.truncated)
                self._walked.pop(
                    key, None
                )  # runs were removed: what lies behind them may be farther now, or gone
            found = _showable(await walk.places(start, size + 1))
            if after is not None and walk.is_whole:
                self._keep(key, _Walked(walk.everything, walk.truncated))
            _, edges = await _edges(connection, found, upstream=upstream)
        return LineagePage(edges, walk.snapshot, [place for place, _ in found], walk.truncated)

    def _keep(self, key: tuple[object, ...], walked: "_Walked") -> None:
        """For the pages to come, which would walk the same way again."""
        self._walked.pop(key, None)
        self._walked[key] = walked
        while sum(len(each.found) for each in self._walked.values()) > _KEPT_EDGES:
            del self._walked[next(iter(self._walked))]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._waiting >= MAX_WAITING:
            raise Fault(
                Code.QUEUE_FULL,
                f"{MAX_WAITING} lineage queries wait already",
                metadata={"limit": str(MAX_WAITING)},
                retry_after_s=1.0,
            )
        self._waiting += 1
        try:
            await self._walks.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._walks.release()


_Found = tuple[Place, Row]


@dataclass(frozen=True, slots=True)
class _Walked:
    """All that a walk found, in order."""

    found: Sequence[_Found]
    truncated: bool


class _Walk:
    """One page's walk. It begins anew at the start.

    The first page's reads no further than the page goes. That of a later one goes on to the end, for all pages to
    come, unless it can begin in the middle.
    """

    def __init__(
        self,
        connection: Connection,
        upstream: bool,
        depth: int,
        budget: int,
        origins_left: int,
        after: Position | None,
    ) -> None:
        self._connection = connection
        self._upstream = upstream
        self._depth = depth
        self._budget = budget
        self._origins_left = origins_left
        self._after = after.place if after else None
        self._seen_by: str | None = after.snapshot if after else None
        self._next_xid = 0
        self._reached: set[str] = set()
        self._passed: set[tuple[str, str, str]] = set()
        self.snapshot = after.snapshot if after else ""
        self.truncated = False
        self.everything: list[_Found] = []
        self.is_whole = True

    async def begin(self) -> None:
        """Bound the statements to come, and note what they see."""
        (moment,) = await self._connection.fetch(query("lineage_moment"), int(STATEMENT_TIMEOUT_S * 1000))
        self._next_xid = moment["next_xid"]
        self.snapshot = self.snapshot or moment["snapshot"]

    async def places(self, start: Start, wanted: int) -> list[_Found]:
        """The first `wanted` edges behind `after`, in order."""
        found: list[_Found] = []
        steps = await self._steps_of(start)
        digests = [start.what] if start.kind == "artifact" else []
        self._reached.update(digests)
        for depth in range(1, self._depth + 1):
            if depth > 1 or steps is None:
                to_steps, is_enough = await self._to_steps(depth, digests, wanted - len(found))
                self._add(found, [(Place(depth, Half.TO_STEP, *row[:3]), row) for row in to_steps])
                self.is_whole = self.is_whole and not is_enough
                if is_enough or self._is_over(found, wanted):
                    break
                through = await self._through(to_steps)
            else:
                through = dict.fromkeys(steps)
            from_steps = await self._from_steps(through)
            digests = await self._go_on(depth, from_steps, through, found)
            if not digests or self._is_over(found, wanted):
                break
        return found[:wanted]

    def _is_over(self, found: Sequence[_Found], wanted: int) -> bool:
        return self.truncated or (self._after is None and len(found) >= wanted)

    def _add(self, found: list[_Found], new: Sequence[_Found]) -> None:
        """What is behind `after`."""
        after = self._after
        if after is None:
            found.extend(new)
        else:
            self.everything.extend(new)
            found.extend(each for each in new if each[0] > after)

    async def _steps_of(self, start: Start) -> list[str] | None:
        """The steps that a walk begins with, in order; None: it begins with a digest."""
        match start.kind:
            case "artifact":
                return None
            case "step":
                if not await self._connection.fetchval(query("step_exists"), start.what):
                    raise step_not_found(start.what)
                return [start.what]
            case "run":
                if not await self._connection.fetchval(query("run_exists"), start.what):
                    raise run_not_found(start.what)
                rows = await self._connection.fetch(query("step_ids_of_run"), start.what, self._budget + 1)
                self.truncated = len(rows) > self._budget
                return [row["step_run_id"] for row in rows[: self._budget]]

    async def _to_steps(self, depth: int, digests: Sequence[str], wanted: int) -> tuple[list[Row], bool]:
        """Edges from the digests to steps: all of them, or as many as the page still wants, and whether that is so.

        No such edge is met twice, so a page can begin in the middle of them: that of a digest which thousands of
        steps used costs no more than another. Only what lies behind them needs all of them.
        """
        after = self._after
        tail: list[Row] = []
        limit = max(self._budget + 1, wanted)
        if after is None:
            limit = wanted
        elif Place(depth, Half.TO_STEP, "", "", "") < after < Place(depth, Half.FROM_STEP, "", "", ""):
            behind = [digest for digest in digests if digest >= after.first]
            tail = await self._read_digests(behind, after, wanted)
            if len(tail) == wanted:
                return tail, True
        rows = await self._read_digests(digests, None, limit)
        if after is None and len(rows) == wanted:
            return rows, True
        if len(rows) > self._budget:
            self.truncated, self.is_whole = True, False
            return tail or rows, False
        self._budget -= len(rows)
        return rows, False

    async def _read_digests(self, digests: Sequence[str], after: Place | None, limit: int) -> list[Row]:
        where = (after.first, after.second, after.name) if after else (None, None, None)
        rows = await self._connection.fetch(
            query("lineage_at_digests"),
            digests,
            self._upstream,
            *where,
            limit,
            self._seen_by,
            self._next_xid,
        )
        return await _rows(rows)

    async def _through(self, to_steps: Sequence[Row]) -> Through:
        """How the walk came to each step. Upstream: what its outputs came from; downstream: which inputs."""
        if not self._upstream:
            return reached_inputs(to_steps)
        whole = {row.step_run_id for row in to_steps if not row.origins}
        some: dict[str, set[str]] = {}
        one_of_each: dict[str, str] = {}  # thousands of outputs may name the same digests
        named = [row for row in to_steps if row.step_run_id not in whole]
        async for row, origins in _origins(self._connection, self._affordable(named)):
            some.setdefault(row.step_run_id, set()).update(
                one_of_each.setdefault(each, each) for each in origins
            )
        return {**dict.fromkeys(whole), **some}

    def _affordable(self, rows: list[Row]) -> list[Row]:
        """Those whose origins the page may still look at."""
        for index, row in enumerate(rows):
            if row.origins > self._origins_left:
                self.truncated = True
                return rows[:index]
            self._origins_left -= row.origins
        return rows

    async def _of_what_was_reached(self, from_steps: Sequence[Row], through: Through) -> set[Row]:
        """Downstream: the outputs that name an input by which the walk came to their step."""
        if self._upstream:
            return set()
        named = [row for row in from_steps if row.origins and through[row.step_run_id] is not None]
        found: set[Row] = set()
        async for row, origins in _origins(self._connection, self._affordable(named)):
            inputs = through[row.step_run_id]
            if inputs is None or not inputs.isdisjoint(origins):
                found.add(row)
        return found

    async def _from_steps(self, through: Through) -> list[Row]:
        """All edges on the other side of the steps."""
        rows = await self._connection.fetch(
            query("lineage_at_steps"),
            sorted(through),
            not self._upstream,
            self._budget + 1,
            self._seen_by,
            self._next_xid,
        )
        return self._within_budget(await _rows(rows))

    def _within_budget(self, rows: list[Row]) -> list[Row]:
        self.truncated = self.truncated or len(rows) > self._budget
        rows = rows[: self._budget]
        self._budget -= len(rows)
        return rows

    async def _go_on(
        self, depth: int, from_steps: Sequence[Row], through: Through, found: list[_Found]
    ) -> list[str]:
        """Add what is new of the edges from steps; returns the digests that they reach for the first time."""
        reached: set[str] = set()
        named = await self._of_what_was_reached(from_steps, through)
        for index, row in enumerate(from_steps):
            if index % _ROWS_AT_ONCE == 0:
                await asyncio.sleep(0)
            key = row.step_run_id, row.sha256, row.name
            if key in self._passed or not leads_on(
                row, through[row.step_run_id], upstream=self._upstream, of_what_was_reached=named
            ):
                continue
            self._passed.add(key)
            reached.add(row.sha256)
            self._add(found, [(Place(depth, Half.FROM_STEP, *key), row)])
        reached -= self._reached
        self._reached |= reached
        return sorted(reached)


async def _rows(records: Sequence[asyncpg.Record]) -> list[Row]:
    rows = []
    for index, record in enumerate(records):
        if index % _ROWS_AT_ONCE == 0:
            await asyncio.sleep(0)
        rows.append(Row(*record))
    return rows


async def _origins(connection: Connection, rows: Iterable[Row]) -> AsyncIterator[tuple[Row, Sequence[str]]]:
    """What each output was derived from, of which only so many are in memory at a time."""
    for chunk in _chunks(row for row in rows if row.origins):
        records = await connection.fetch(
            query("lineage_origins"),
            [row.sha256 for row in chunk],
            [row.step_run_id for row in chunk],
            [row.attempt for row in chunk],
            [row.name for row in chunk],
        )
        for row, (derived_from,) in zip(chunk, records, strict=True):
            yield row, derived_from


def _chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    origins = 0
    for row in rows:
        if chunk and origins + row.origins > _ORIGINS_AT_ONCE:
            yield chunk
            chunk, origins = [], 0
        chunk.append(row)
        origins += row.origins
    if chunk:
        yield chunk


def _showable(found: Sequence[_Found]) -> list[_Found]:
    """What a page has room for, and one edge more."""
    shown: list[_Found] = []
    origins = 0
    for each in found:
        shown.append(each)
        origins += each[1].origins
        if origins > _ORIGINS_OF_PAGE:
            break
    return shown


async def _edges(
    connection: Connection, found: Sequence[_Found], *, upstream: bool
) -> tuple[list[_Found], list[LineageEdge]]:
    """The edges of a page, with what people want to know of each; less those of steps that are not there."""
    named = await connection.fetch(query("read_lineage_steps"), sorted({row.step_run_id for _, row in found}))
    steps = {step["step_run_id"]: step for step in named}
    found = [each for each in found if each[1].step_run_id in steps]
    rows = [row for _, row in found]
    produced = [(place.half is Half.TO_STEP) == upstream for place, _ in found]
    types = await connection.fetch(
        query("read_lineage_types"),
        [row.sha256 for row in rows],
        [row.workflow_run_id for row in rows],
        [row.step_run_id for row in rows],
        [row.attempt for row in rows],
        [row.name for row in rows],
        produced,
    )
    origins = {row: derived_from async for row, derived_from in _origins(connection, rows)}
    sizes: dict[str, int] = {}
    if origins:
        digests = sorted({digest for derived_from in origins.values() for digest in derived_from})
        known = await connection.fetch(query("read_blob_sizes"), digests)
        sizes = {row["sha256"]: row["size_bytes"] for row in known}
    edges = [
        LineageEdge(
            sha256=row.sha256,
            size_bytes=row.size_bytes,
            name=row.name,
            workflow_run_id=row.workflow_run_id,
            step_run_id=row.step_run_id,
            attempt=row.attempt,
            produced=is_made,
            declared=row.declared,
            depth=place.depth,
            step_name=steps[row.step_run_id]["step_name"],
            definition=steps[row.step_run_id]["definition"],
            definition_version=steps[row.step_run_id]["definition_version"],
            kind=steps[row.step_run_id]["kind"],
            artifact_type=artifact_type,
            derived_from=tuple((digest, sizes.get(digest, 0)) for digest in origins.get(row, ())),
        )
        for (place, row), is_made, (artifact_type,) in zip(found, produced, types, strict=True)
    ]
    return found, edges
