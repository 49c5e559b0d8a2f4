"""Measures what ten million finished steps in the database cost: drain and latency beside an empty one, in turn.

    PYTHONPATH=bench .venv/bin/python bench/history.py [--steps 10000000] [--days 30] [--rounds 3] > history.json

The past is stored by SQL, spread evenly over the days before today: runs of ten succeeded steps with their results, and
an event a step in partitions of their day. Of the oldest day only the history is left, as after the removal of its
runs: how long its partitions take to go is measured too. Real processes, the embedded PostgreSQL's binaries.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from rara_bench import latency, machine
from rara_bench.arm import Bench, Figures
from rara_bench.options import Options
from rara_bench.product import Shape, prepare, running
from rara_bench.server import Server, choose_binaries

FULL: Final = "rara_full"
FRESH: Final = "rara_fresh"
A_RUN: Final = 10
_DAY: Final = """
    create table if not exists rara.step_event_{day} partition of rara.step_event
        for values from ('{day}') to (date '{day}' + 1);
    create table if not exists rara.step_attempt_{day} partition of rara.step_attempt
        for values from ('{day}') to (date '{day}' + 1);
"""
# One day: $1 runs of $2 steps that ended on the day $3. Without the runs for the day of which only history is left.
_PAST: Final = """
    with run as (
        insert into rara.workflow_run (workflow_run_id, definition, definition_version, state, steps_total,
                                       steps_succeeded, on_failure, created_at, started_at, ended_at)
        select gen_random_uuid(), 'past', 1, 'succeeded', $2, $2, 'fail_fast', at, at, at
          from (select $3::date + make_interval(secs => 80000.0 * n / $1) as at from generate_series(1, $1::int) n) t
        returning workflow_run_id, ended_at
    ), step as (
        insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)
        select gen_random_uuid(), r.workflow_run_id, 's' || n, 1, r.workflow_run_id || '/s' || n
          from run r, generate_series(1, $2::int) n
        returning step_run_id, workflow_run_id
    ), result as (
        insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, lease_token,
                                 executor_id, granted_at, granted_on, started_at, output, ended_at)
        select s.step_run_id, s.workflow_run_id, 'succeeded', '', 2, 1, 0, nextval('rara.lease_token_seq'),
               '00000000-0000-0000-0000-000000000001', r.ended_at, $3::date, r.ended_at, '{}', r.ended_at
          from step s join run r using (workflow_run_id)
    )
    insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)
    select $3::date, step_run_id, 1, 4, 'succeeded', decode(repeat('0a', 60), 'hex') from step
"""
_HISTORY_ALONE: Final = """
    insert into rara.step_event (granted_on, step_run_id, attempt, sequence, type, body)
    select $2::date, gen_random_uuid(), 1, 4, 'succeeded', decode(repeat('0a', 60), 'hex')
      from generate_series(1, $1::int)
"""


async def store_past(server: Server, steps: int, days: int) -> float:
    """Seconds."""
    began = time.monotonic()
    await prepare(server, FULL)
    connection = await server.connect(FULL)
    try:
        a_day = steps // days
        for ago in range(days, 0, -1):
            day = await connection.fetchval("select (now() at time zone 'UTC')::date - $1::int", ago)
            await connection.execute(_DAY.format(day=f"{day:%Y%m%d}"))
            if ago == days:
                await connection.execute(_HISTORY_ALONE, a_day, day, timeout=3600)
            else:
                await connection.execute(_PAST, a_day // A_RUN, A_RUN, day, timeout=3600)
            print(f"{days - ago + 1} of {days} days stored", file=sys.stderr)
    finally:
        await connection.close()
    await server.settle(FULL)
    return time.monotonic() - began


async def round_of(bench: Bench, database: str) -> Figures:
    if database == FRESH:
        await prepare(bench.server, FRESH)
    async with running(bench, database, Shape(), keep=True) as product:
        drained = await product.drain(bench.options.steps)
    waits = await latency.measure(bench, database)
    return {**drained, **{f"latency_{name}": value for name, value in waits.items()}}


async def drop_oldest_day(server: Server, days: int) -> dict[str, Any]:
    connection = await server.connect(FULL)
    try:
        dropped = {}
        for _ in ("step_attempt", "step_event"):
            began = time.monotonic()
            name = await connection.fetchval("select rara.drop_history_partition($1::int)", days - 1)
            dropped[str(name)] = round(time.monotonic() - began, 3)
        return dropped
    finally:
        await connection.close()


async def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(folder / "postgres", choose_binaries("wheel")))
        bench = Bench(Options(steps=given.drain), folder, server, stack)
        found: dict[str, Any] = {"steps": given.steps, "machine": machine.facts(folder)}
        found["stored_s"] = round(await store_past(server, given.steps, given.days))
        taken: dict[str, list[Figures]] = {FRESH: [], FULL: []}
        for _ in range(given.rounds):
            for database, rounds in taken.items():
                rounds.append(await round_of(bench, database))
        for database, rounds in taken.items():
            found[database] = {name: round(median(one[name] for one in rounds), 3) for name in rounds[0]}
        found["full_over_fresh"] = {
            name: round(value / found[FRESH][name], 3) for name, value in found[FULL].items()
        }
        found["dropped_s"] = await drop_oldest_day(server, given.days)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--drain", type=int, default=10_000, help="steps of a drain")
    parser.add_argument("--folder", type=Path, help="where the database is kept meanwhile, on a real disk")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rara-history-", dir=given.folder) as name:
        Path(name).chmod(0o711)  # PostgreSQL may have to run as another account
        found = asyncio.run(measure(given, Path(name)))
    json.dump(found, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
