"""Measures lineage queries over a million edges through the real service.

    .venv/bin/python bench/lineage.py [--edges 1000000] [--queries 200] [--depth 5] [--recursive] > lineage.json

Needs `make test`'s environment. An embedded PostgreSQL and one scheduler of their own; the rows are copied in, as
runs of ten steps leave them: a step uses one to three outputs of the steps before it and makes two, a run begins with
outputs of earlier runs (some of them popular), every third output names what it was made from, and a few digests
(settings, a base model) are used by thousands of steps each. Measured are calls, with pages of 1,000 and of 50
edges, and whole answers in pages of 1,000. --recursive also measures one recursive statement for the same, straight
at the database.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final
from uuid import UUID

import asyncpg
from rara.v1 import workflow_pb2
from rara_cli.stack import Stack, StackSettings
from rara_client import Client

STEPS_A_RUN: Final = 10
EDGES_A_RUN: Final = 48  # about
HOT: Final = 4
HOT_SHARE: Final = 0.05  # of all steps use a hot digest: 10,000 steps each, in a million edges
UPSTREAM: Final = workflow_pb2.LINEAGE_DIRECTION_UPSTREAM
DOWNSTREAM: Final = workflow_pb2.LINEAGE_DIRECTION_DOWNSTREAM
_DIRECTIONS: Final = {"upstream": UPSTREAM, "downstream": DOWNSTREAM}
_INDEXES: Final = """
select i.indexrelid::regclass::text as name, pg_get_indexdef(i.indexrelid) as definition
  from pg_index i
 where i.indrelid in ('rara.lineage'::regclass, 'rara.artifact'::regclass) and not i.indisunique
"""
_RECURSIVE: Final = """
with recursive walk (sha256, depth) as (
    select $1::text, 0
    union
    select b.sha256, w.depth + 1
      from walk w
      join rara.lineage a on a.sha256 = w.sha256 and a.produced = $3
      join rara.lineage b on b.step_run_id = a.step_run_id and b.produced <> $3
       and case when $3 then a.derived_from = '{}' or b.sha256 = any (a.derived_from)
                else b.derived_from = '{}' or a.sha256 = any (b.derived_from) end
     where w.depth < $2
)
select l.sha256, l.step_run_id, l.name, w.depth
  from (select sha256, min(depth) as depth from walk group by sha256) w
  join rara.lineage l on l.sha256 = w.sha256 and l.produced = $3
 where w.depth < $2
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of queries, and how many edges they gave."""

    queries: int
    p50_ms: float
    p95_ms: float
    max_ms: float
    median_edges: float
    most_edges: int


@dataclass(slots=True)
class History:
    """What is copied into the tables, as tuples in the order of their columns."""

    random: random.Random
    artifacts: list[str]
    popular: list[str]
    hot: list[str]
    steps: int = 0

    def runs(self, edges: int) -> Iterator[tuple[UUID, list[tuple[Any, ...]], list[tuple[Any, ...]]]]:
        """Runs with their steps and edges, until there are so many edges."""
        made = 0
        number = 0
        while made < edges:
            run_id = _id(number * (STEPS_A_RUN + 1))
            steps, rows = self._run(run_id, number)
            made += len(rows)
            number += 1
            yield run_id, steps, rows[: len(rows) - max(made - edges, 0)]

    def _run(self, run_id: UUID, number: int) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
        rng = self.random
        steps: list[tuple[Any, ...]] = []
        edges: list[tuple[Any, ...]] = []
        before: list[str] = []
        for index in range(STEPS_A_RUN):
            step_id = _id(number * (STEPS_A_RUN + 1) + 1 + index)
            steps.append((step_id, run_id, f"s{index}", 1, str(step_id)))
            given = self._given(before, is_first=index == 0)
            for place, digest in enumerate(given):
                edges.append((digest, 1000, step_id, run_id, 1, False, True, f"in{place}", []))
            for place in range(2):
                self.steps += 1
                digest = hashlib.sha256(b"%d" % self.steps).hexdigest()
                origins = given[:1] if rng.random() < 1 / 3 else []
                edges.append((digest, 1000, step_id, run_id, 1, True, True, f"out{place}", origins))
                before.append(digest)
        self.artifacts.extend(before)
        if number % 50 == 0:
            self.popular.append(before[-1])
        return steps, edges

    def _given(self, before: Sequence[str], *, is_first: bool) -> list[str]:
        rng = self.random
        given = set()
        if not is_first:
            given |= {rng.choice(before[-6:]) for _ in range(rng.randint(1, 3))}
        elif self.artifacts:
            given.add(rng.choice(self.artifacts))
            given.add(rng.choice(self.popular[-100:]))
        if rng.random() < HOT_SHARE * HOT:
            given.add(rng.choice(self.hot))
        return sorted(given)


def _id(number: int) -> UUID:
    """As UUIDv7: rising with time."""
    return UUID(int=(1_760_000_000_000 + number) << 80 | 0x7 << 76 | 0x8 << 60 | number)


async def _fill(database: "asyncpg.Connection[asyncpg.Record]", edges: int, seed: int) -> History:
    rng = random.Random(seed)
    history = History(rng, [], [], [hashlib.sha256(b"hot%d" % n).hexdigest() for n in range(HOT)])
    await database.execute("set session_replication_role = replica")  # the rows are right, keys need no check
    await database.execute("set synchronous_commit = off")
    await database.execute(
        "insert into rara.route (executor_kind, kind, kind_version, required_labels) values ('', 'a.b', '', '{}')"
    )
    tables: dict[str, tuple[list[str], list[tuple[Any, ...]]]] = {
        "workflow_run": (
            ["workflow_run_id", "definition", "definition_version", "steps_total", "on_failure"],
            [],
        ),
        "step_run": (["step_run_id", "workflow_run_id", "step_name", "route_id", "idempotency_key"], []),
        "lineage": (
            [
                "sha256",
                "size_bytes",
                "step_run_id",
                "workflow_run_id",
                "attempt",
                "produced",
                "declared",
                "name",
                "derived_from",
            ],
            [],
        ),
        "artifact": (
            [
                "step_run_id",
                "attempt",
                "name",
                "position",
                "sha256",
                "size_bytes",
                "media_type",
                "type",
                "lease_token",
            ],
            [],
        ),
    }
    runs, steps, lineage, artifacts = (rows for _, rows in tables.values())
    indexes = await database.fetch(_INDEXES)
    for index in indexes:
        await database.execute(f"drop index {index['name']}")

    async def flush() -> None:
        for table, (columns, rows) in tables.items():
            await database.copy_records_to_table(table, schema_name="rara", columns=columns, records=rows)
            rows.clear()

    for run_id, new_steps, new_edges in history.runs(edges):
        runs.append((run_id, "bench", 1, STEPS_A_RUN, "fail_fast"))
        steps.extend(new_steps)
        lineage.extend(new_edges)
        artifacts.extend(
            (edge[2], 1, edge[7], 0, edge[0], 1000, "a/b", "dataset", 1) for edge in new_edges if edge[5]
        )
        if len(lineage) >= 50_000:
            await flush()
    await flush()
    for index in indexes:
        await database.execute(index["definition"])
    await database.execute("reset session_replication_role")
    await database.execute("vacuum analyze")
    return history


async def _whole(client: Client, sha256: str, direction: Any, depth: int) -> int:
    request = workflow_pb2.QueryLineageRequest(direction=direction, depth=depth, page_size=1000)
    request.artifact.sha256 = sha256
    return sum([len(page.edges) async for page in client.lineage_pages(request)])


async def _call(client: Client, sha256: str, direction: Any, depth: int, size: int) -> int:
    request = workflow_pb2.QueryLineageRequest(direction=direction, depth=depth, page_size=size)
    request.artifact.sha256 = sha256
    return len((await client.call(client.workflow.QueryLineage, request, is_repeatable=True)).edges)


async def _time(ask: Callable[[str], Awaitable[int]], digests: Sequence[str]) -> Timed:
    took: list[float] = []
    edges: list[int] = []
    for digest in digests:
        began = time.perf_counter()
        edges.append(await ask(digest))
        took.append((time.perf_counter() - began) * 1000)
    return Timed(
        len(digests),
        round(median(took), 1),
        round(quantiles(took, n=20)[-1] if len(took) > 1 else took[0], 1),
        round(max(took), 1),
        median(edges),
        max(edges),
    )


async def _measure(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    settings = StackSettings(directory=folder, with_executor=False, env={"RARA_LOG_LEVEL": "warning"})
    async with Stack(settings) as stack, Client.connect(stack.address) as client:
        database = await asyncpg.connect(stack.dsn)
        began = time.perf_counter()
        history = await _fill(database, given.edges, given.seed)
        filled_s = round(time.perf_counter() - began, 1)
        print(f"filled in {filled_s} s", file=sys.stderr)
        rng = random.Random(given.seed + 1)
        digests = [
            rng.choice(history.popular) if n % 10 == 0 else rng.choice(history.artifacts)
            for n in range(given.queries)
        ]
        found: dict[str, Any] = {}
        for name, direction in _DIRECTIONS.items():
            for kind, ask in (
                ("first page of 1,000", partial(_call, size=1000)),
                ("first page of 50", partial(_call, size=50)),
                ("whole answer", _whole),
            ):

                async def one(digest: str, ask: Any = ask, direction: Any = direction) -> int:
                    return int(await ask(client, digest, direction, given.depth))

                await _time(one, digests[:20])  # connections and caches
                found[f"{name}, {kind}"] = await _time(one, digests)
                if name == "downstream":
                    found[f"{name} of a hot digest, {kind}"] = await _time(one, history.hot)
        if given.recursive:
            await database.execute("set jit = off")
            for name in _DIRECTIONS:

                async def recursive(digest: str, is_up: bool = name == "upstream") -> int:
                    return len(await database.fetch(_RECURSIVE, digest, given.depth, is_up, timeout=60))

                found[f"{name}, recursive statement, edges to steps only"] = await _time(recursive, digests)
        counts = await database.fetchrow(
            "select (select count(*) from rara.lineage) as edges, (select count(*) from rara.step_run) as steps,"
            " (select max(n) from (select count(*) as n from rara.lineage where not produced group by sha256) u)"
            " as most_users, pg_size_pretty(pg_total_relation_size('rara.lineage')) as size"
        )
        await database.close()
    assert counts is not None
    for what, timed in found.items():
        print(
            f"{what:<50} p50 {timed.p50_ms:>8} ms  p95 {timed.p95_ms:>8} ms  max {timed.max_ms:>8} ms"
            f"  edges {timed.median_edges:>6} (most {timed.most_edges:,})",
            file=sys.stderr,
        )
    return {
        **dict(counts),
        "filled_s": filled_s,
        "found": {what: asdict(each) for what, each in found.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--edges", type=int, default=1_000_000)
    parser.add_argument("--queries", type=int, default=200)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--recursive", action="store_true")
    given = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
        found = asyncio.run(_measure(Path(folder), given))
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "load_before": load_before,
        "load_after": os.getloadavg(),
        **found,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
