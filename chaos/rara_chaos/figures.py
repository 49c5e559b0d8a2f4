"""What a stack weighs and how fast it is, at the beginning and at the end of a run."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

import asyncpg

from rara_chaos.load import Load, Took

_TABLES: Final = """
select coalesce(pg_partition_root(relid), relid)::regclass::text as name, sum(n_live_tup)::bigint as rows,
       sum(n_dead_tup)::bigint as dead_rows, sum(pg_table_size(relid))::bigint as table_bytes,
       sum(pg_indexes_size(relid))::bigint as index_bytes
  from pg_stat_user_tables where schemaname = 'rara' group by 1 order by 1
"""
# A crash of PostgreSQL loses what it knew of dead rows.
_ANALYZE: Final = "set lock_timeout = 1000; analyze (skip_locked)"
_STEPS: Final = (
    "select count(*) from rara.result where ended_at > to_timestamp($1) and ended_at <= to_timestamp($2)"
)
_CONNECT_S = 10.0
_QUERY_S = 60.0
_WINDOW_S = 60.0
_FIRST_S = 3.0  # until callers are under way
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process or container, first and last seen, and the most."""

    first_bytes: int
    last_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Table:
    """As the statistics have it; partitions count as their table."""

    name: str
    rows: int
    dead_rows: int
    table_bytes: int
    index_bytes: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds; of how many."""

    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Speed:
    """In one stretch of the load. steps_per_s: None where the database is out of reach."""

    seconds: float
    runs_per_s: float
    steps_per_s: float | None
    start: Latency  # of StartRun
    run: Latency  # from its answer until the run's end was seen


@dataclass(slots=True)
class Figures:
    tables_at_start: Sequence[Table] = ()
    tables_at_end: Sequence[Table] = ()
    speed_at_start: Speed | None = None
    speed_at_end: Speed | None = None
    memory: Mapping[str, Memory] = field(default_factory=dict)

    def document(self) -> dict[str, object]:
        """For JSON."""
        return {
            "memory": {name: asdict(one) for name, one in sorted(self.memory.items())},
            "tables": {
                "start": {one.name: _sizes(one) for one in self.tables_at_start},
                "end": {one.name: _sizes(one) for one in self.tables_at_end},
            },
            "speed": {
                "start": self.speed_at_start and asdict(self.speed_at_start),
                "end": self.speed_at_end and asdict(self.speed_at_end),
            },
        }

    def lines(self) -> list[str]:
        """For people."""
        lines = ["memory, MiB: first, last, most"]
        lines += [
            f"  {name:22} {_mib(m.first_bytes)} {_mib(m.last_bytes)} {_mib(m.peak_bytes)}"
            for name, m in sorted(self.memory.items())
        ]
        if self.tables_at_end:
            lines.append("tables, MiB: table and indexes at the start, at the end; rows, dead rows")
        before = {one.name: one for one in self.tables_at_start}
        for one in self.tables_at_end:
            first = before.get(one.name, one)
            lines.append(
                f"  {one.name:22} {_mib(first.table_bytes)} {_mib(first.index_bytes)}"
                f" {_mib(one.table_bytes)} {_mib(one.index_bytes)} {one.rows:9} {one.dead_rows:9}"
            )
        for title, speed in (("first", self.speed_at_start), ("last", self.speed_at_end)):
            if speed is not None:
                lines.append(f"{title} {speed.seconds:.0f} s: {_said(speed)}")
        return lines


async def tables(database_url: str, *, counted: bool) -> Sequence[Table]:
    """Empty where PostgreSQL is away just now. counted: have it look at the rows, not only tell what it knows."""
    try:
        connection = await asyncpg.connect(database_url, timeout=_CONNECT_S, command_timeout=_QUERY_S)
        try:
            if counted:
                await connection.execute(_ANALYZE)
            return [Table(**row) for row in await connection.fetch(_TABLES)]
        finally:
            connection.terminate()
    except _AWAY:
        return ()


async def speeds(
    load: Load, began: float, ended: float, database_url: str
) -> tuple[Speed | None, Speed | None]:
    """In the first and the last stretch of the load; instants are monotonic."""
    began += _FIRST_S
    window_s = min(_WINDOW_S, (ended - began) / 2)
    if window_s <= 0:
        return None, None
    first = await _speed(load, began, began + window_s, database_url)
    return first, await _speed(load, ended - window_s, ended, database_url)


async def _speed(load: Load, began: float, ended: float, database_url: str) -> Speed:
    runs = _within(load.runs, began, ended)
    seconds = ended - began
    steps = await _steps(began, ended, database_url) if database_url else None
    return Speed(
        round(seconds, 1),
        round(len(runs) / seconds, 2),
        None if steps is None else round(steps / seconds, 2),
        latency(_within(load.starts, began, ended)),
        latency(runs),
    )


async def _steps(began: float, ended: float, database_url: str) -> int | None:
    wall_s = time.time() - time.monotonic()
    try:
        connection = await asyncpg.connect(database_url, timeout=_CONNECT_S, command_timeout=_QUERY_S)
        try:
            return int(await connection.fetchval(_STEPS, began + wall_s, ended + wall_s))
        finally:
            connection.terminate()
    except _AWAY:
        return None


def _within(those: Iterable[Took], began: float, ended: float) -> list[float]:
    return [one.seconds for one in those if began < one.at_s <= ended]


def latency(seconds: Sequence[float]) -> Latency:
    if not seconds:
        return Latency(0, 0.0, 0.0, 0.0)
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [*seconds] * 99
    return Latency(len(seconds), *(round(1000 * cuts[at - 1], 1) for at in (50, 90, 99)))


class MemoryWatch:
    """Looks at the target's processes until cancelled."""

    def __init__(self) -> None:
        self.seen: dict[str, Memory] = {}

    def note(self, now: Mapping[str, int]) -> None:
        for name, size in now.items():
            known = self.seen.get(name, Memory(size, size, size))
            self.seen[name] = Memory(known.first_bytes, size, max(known.peak_bytes, size))

    async def run(self, look: Callable[[], Awaitable[Mapping[str, int]]], every_s: float) -> None:
        while True:
            self.note(await look())
            await asyncio.sleep(every_s)


def _sizes(table: Table) -> dict[str, int]:
    return {name: size for name, size in asdict(table).items() if name != "name"}


def _mib(size: int) -> str:
    return f"{size / (1024 * 1024):7.1f}"


def _said(speed: Speed) -> str:
    steps = "" if speed.steps_per_s is None else f", {speed.steps_per_s:.1f} steps/s"
    return f"{speed.runs_per_s:.1f} runs/s{steps}; StartRun {_quantiles(speed.start)}; a run {_quantiles(speed.run)}"


def _quantiles(took: Latency) -> str:
    return f"p50 {took.p50:.0f} ms, p90 {took.p90:.0f} ms, p99 {took.p99:.0f} ms"
