"""Measures a client that streams a million starts: runs a second, and memory, which must not grow with their number.

    .venv/bin/python bench/bulk.py [--runs 1000000] [--seconds 600] > bulk.json

Needs `make test`'s environment. One embedded PostgreSQL, one scheduler and no executor: what is started stays ready.
`Client.start_runs` takes requests from a generator, each with a key, and yields what each started. Memory is that of
the resident pages of this process, which holds the client, and of the scheduler, at every twentieth part. The exit code
is 1 when either has grown by more than `--bound` MiB from the first twentieth on, or an answer is missing.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil
from rara.v1 import workflow_pb2
from rara_cli.stack import Stack, StackSettings
from rara_client import Client

PARTS: Final = 20
BATCH: Final = 500
IN_FLIGHT: Final = 4
MIB: Final = 2**20
DEFINITION: Final = workflow_pb2.Definition(
    definition="bulk", steps=[workflow_pb2.StepDefinition(step_name="only", kind="bulk.none")]
)


def requests(runs: int, seconds: float) -> Iterator[workflow_pb2.StartRunRequest]:
    """So many, or as many as are taken in the time."""
    until_s = time.monotonic() + seconds
    for number in range(runs):
        if time.monotonic() > until_s:
            return
        yield workflow_pb2.StartRunRequest(definition="bulk", idempotency_key=f"bulk-{number}")


def mib(process: psutil.Process) -> float:
    return round(process.memory_info().rss / MIB, 2)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def stream(client: Client, scheduler: psutil.Process, runs: int, seconds: float) -> dict[str, Any]:
    own = psutil.Process()
    part = max(runs // PARTS, 1)
    points: list[dict[str, float]] = []
    used_s = cpu_s(own), cpu_s(scheduler)
    began_s = time.monotonic()
    started = new = 0
    first = last = ""
    each = client.start_runs(requests(runs, seconds), batch_size=BATCH, in_flight=IN_FLIGHT, timeout_s=60)
    async with aclosing(each) as answers:
        async for answer in answers:
            started, new, last = started + 1, new + (not answer.already_started), answer.workflow_run_id
            first = first or last
            if started % part == 0:
                took_s = round(time.monotonic() - began_s, 2)
                points.append(
                    {
                        "started": started,
                        "at_s": took_s,
                        "client_mib": mib(own),
                        "scheduler_mib": mib(scheduler),
                    }
                )
                print(points[-1], file=sys.stderr, flush=True)
    took_s = time.monotonic() - began_s
    return {
        "started": started,
        "new": new,
        "took_s": round(took_s, 2),
        "runs_per_s": round(started / took_s, 1),
        "client_cpu_us_per_run": round(1e6 * (cpu_s(own) - used_s[0]) / started, 1),
        "scheduler_cpu_us_per_run": round(1e6 * (cpu_s(scheduler) - used_s[1]) / started, 1),
        "first": first,
        "last": last,
        "points": points,
    }


def growth_mib(points: list[dict[str, float]], of: str) -> float:
    """From the first point to the highest after it."""
    return round(max(point[of] for point in points) - points[0][of], 2) if points else 0.0


async def measure(folder: Path, runs: int, seconds: float) -> dict[str, Any]:
    settings = StackSettings(directory=folder, with_executor=False, env={"RARA_LOG_LEVEL": "warning"})
    async with Stack(settings) as stack, Client.connect(stack.address) as client:
        await client.register_definition(DEFINITION)
        scheduler = psutil.Process(stack.scheduler.pid)
        found = await stream(client, scheduler, runs, seconds)
        database = await asyncpg.connect(stack.dsn)
        found["stored"] = await database.fetchval("select count(*) from rara.workflow_run")
        found["database_mib"] = await database.fetchval("select pg_database_size(current_database())") // MIB
        await database.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=600.0, help="no more are sent after so long")
    parser.add_argument("--bound", type=float, default=16.0, help="MiB that memory may grow by")
    given = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
        Path(folder).chmod(0o711)  # as root, PostgreSQL runs as another account
        found = asyncio.run(measure(Path(folder), given.runs, given.seconds))
    growth = {of: growth_mib(found["points"], of) for of in ("client_mib", "scheduler_mib")}
    is_good = max(growth.values()) <= given.bound and found["started"] == found["new"] == found["stored"]
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "batch": BATCH,
        "in_flight": IN_FLIGHT,
        "growth": growth,
        "bound_mib": given.bound,
        "is_good": is_good,
        **found,
    }
    print(json.dumps(result, indent=2))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
