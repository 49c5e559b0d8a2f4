"""Measures one scheduler with many connected executors and jobs in flight: what each costs, and what stays in time.

    .venv/bin/python bench/sessions.py [--executors 1000] [--jobs 10000] [--window 30] > sessions.json

Needs `make test`'s environment. One embedded PostgreSQL, one scheduler with its default settings, and scripted sessions
in this process, each over a connection of its own. First they are only connected, then they hold their jobs and beat;
then a tenth of the jobs ends and is replaced, and a tenth is cancelled. Processor time and memory are the scheduler's
alone. The exit code is 1 when a lease or session was lost, when a renewal took longer than half a lease, or
when a job or cancel never came.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil
from rara.v1 import workflow_pb2
from rara_cli.stack import Stack, StackSettings
from rara_client import Client
from rara_load.figures import Latencies
from rara_scheduler.settings import Settings
from rara_sessions.peer import KIND, Fleet, Peer

LIMIT_S: Final = 600.0
AT_ONCE: Final = 20
MIB: Final = 2**20
LEASE_S: Final = float(Settings.model_fields["lease_s"].default)
DEFINITION: Final = workflow_pb2.Definition(
    definition="hold", steps=[workflow_pb2.StepDefinition(step_name="only", kind=KIND)]
)


@dataclass(slots=True)
class Bench:
    """What stays from phase to phase. answered, renewed: heartbeats of the current one."""

    client: Client
    scheduler: psutil.Process
    address: str
    answered: Latencies = field(default_factory=Latencies)
    renewed: Latencies = field(default_factory=Latencies)
    fleet: Fleet = field(init=False)
    peers: list[Peer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = Fleet(lambda s: self.answered.record(s), lambda s: self.renewed.record(s))

    async def connect(self, count: int) -> None:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            peer = Peer(self.fleet, number)
            async with slots:
                await peer.connect(self.address, LIMIT_S)
            self.peers.append(peer)

        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(one(number))

    async def start(self, count: int) -> list[str]:
        requests = (workflow_pb2.StartRunRequest(definition="hold") for _ in range(count))
        async with aclosing(self.client.start_runs(requests, timeout_s=LIMIT_S)) as started:
            return [each.workflow_run_id async for each in started]

    async def until(self, reached: Callable[[], bool]) -> bool:
        """False: it was not reached in a long time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LIMIT_S), self.fleet.changed:
                await self.fleet.changed.wait_for(reached)
        return reached()

    async def window(self, seconds: float) -> dict[str, Any]:
        """What the scheduler uses meanwhile, and how soon heartbeats are answered."""
        self.answered, self.renewed = Latencies(), Latencies()
        began_s, used_s = time.monotonic(), self.cpu_s()
        await asyncio.sleep(seconds)
        took_s = time.monotonic() - began_s
        return {
            "took_s": round(took_s, 2),
            "scheduler_cpu_ms_per_s": round(1000 * (self.cpu_s() - used_s) / took_s, 3),
            "scheduler_mib": self.mib(),
            "heartbeat_answered": self.answered.summary(),
            "heartbeat_renewed": self.renewed.summary(),
        }

    def cpu_s(self) -> float:
        times = self.scheduler.cpu_times()
        return float(times.user + times.system)

    def mib(self) -> float:
        return round(self.scheduler.memory_info().rss / MIB, 3)


async def hold(bench: Bench, jobs: int) -> dict[str, Any]:
    """Have every job in flight, and running."""
    each, more = divmod(jobs, len(bench.peers))
    for number, peer in enumerate(bench.peers):
        await peer.allow(each + (number < more))
    began_s, used_s = time.monotonic(), bench.cpu_s()
    await bench.start(jobs)
    is_held = await bench.until(lambda: bench.fleet.running >= jobs)
    return {
        "running": bench.fleet.running,
        "is_held": is_held,
        "took_s": round(time.monotonic() - began_s, 2),
        "scheduler_cpu_us_per_job": round(1e6 * (bench.cpu_s() - used_s) / jobs, 1),
    }


async def replace(bench: Bench, count: int) -> dict[str, Any]:
    """End some jobs of every peer while as many steps are ready: from the new credit to the job."""
    fleet, came = bench.fleet, Latencies()
    await bench.start(count)  # wait for credit
    before = fleet.jobs
    fleet.job_came.clear()
    began_s = time.monotonic()
    each, more = divmod(count, len(bench.peers))
    for number, peer in enumerate(bench.peers):
        await peer.finish(each + (number < more))
    is_reached = await bench.until(lambda: fleet.jobs >= before + count)
    for at_s in fleet.job_came.values():
        came.record(at_s - began_s)
    return {"jobs": fleet.jobs - before, "is_reached": is_reached, "credit_to_job": came.summary()}


async def cancel(bench: Bench, count: int) -> dict[str, Any]:
    """Cancel some runs: from the call to the executor, which is often before its answer."""
    fleet, came = bench.fleet, Latencies()
    held = [job.workflow_run_id for peer in bench.peers for job in peer.held.values()]
    wanted = held[:: max(len(held) // count, 1)][:count]  # some of every peer
    called: dict[str, float] = {}
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(run_id: str) -> None:
        async with slots:
            called[run_id] = time.monotonic()
            await bench.client.cancel_run(run_id, timeout_s=LIMIT_S)

    async with asyncio.TaskGroup() as tasks:
        for run_id in wanted:
            tasks.create_task(one(run_id))
    is_reached = await bench.until(lambda: all(run_id in fleet.cancel_came for run_id in wanted))
    for run_id in set(wanted) & set(fleet.cancel_came):
        came.record(fleet.cancel_came[run_id] - called[run_id])
    return {"cancels": len(wanted), "is_reached": is_reached, "call_to_executor": came.summary()}


async def measure(folder: Path, executors: int, jobs: int, window_s: float) -> dict[str, Any]:
    env = {"RARA_LOG_LEVEL": "warning", "RARA_MAX_SESSIONS": str(max(executors, 1000))}
    settings = StackSettings(directory=folder, with_executor=False, env=env)
    found: dict[str, Any] = {}

    async def phase(name: str, work: Coroutine[None, None, dict[str, Any]]) -> None:
        found[name] = await work
        print(name, found[name], file=sys.stderr, flush=True)

    async with Stack(settings) as stack, Client.connect(stack.address) as client:
        await client.register_definition(DEFINITION)
        bench = Bench(client, psutil.Process(stack.scheduler.pid), stack.address)
        try:
            await phase("alone", bench.window(window_s))
            await bench.connect(executors)
            await phase("connected", bench.window(window_s))
            await phase("hold", hold(bench, jobs))
            await phase("holding", bench.window(window_s))
            await phase("replace", replace(bench, max(jobs // 10, 1)))
            await phase("cancel", cancel(bench, max(jobs // 10, 1)))
            await phase("lost", lost(bench, stack.dsn))
        finally:
            await asyncio.gather(*(peer.close() for peer in bench.peers))
    return found


async def lost(bench: Bench, dsn: str) -> dict[str, Any]:
    """What should be zero. attempts: that ended without the end of their step, whatever the reason."""
    database = await asyncpg.connect(dsn)
    try:
        attempts = await database.fetchval("select count(*) from rara.step_attempt")
    finally:
        await database.close()
    fleet = bench.fleet
    return {"leases": fleet.lost, "sessions": fleet.ended, "attempts": attempts}


def costs(found: dict[str, Any], executors: int, jobs: int) -> dict[str, float]:
    """Of one more executor, and of one more job in flight: memory, and processor time a second, beats included."""
    alone, connected, holding = found["alone"], found["connected"], found["holding"]

    def more(after: dict[str, Any], before: dict[str, Any], of: str) -> float:
        return float(after[of] - before[of])

    return {
        "kib_per_executor": round(1024 * more(connected, alone, "scheduler_mib") / executors, 2),
        "kib_per_job": round(1024 * more(holding, connected, "scheduler_mib") / jobs, 2),
        "cpu_us_per_s_and_executor": round(
            1000 * more(connected, alone, "scheduler_cpu_ms_per_s") / executors, 2
        ),
        "cpu_us_per_s_and_job": round(1000 * more(holding, connected, "scheduler_cpu_ms_per_s") / jobs, 2),
    }


def problems(found: dict[str, Any]) -> list[str]:
    """What did not stay in time."""
    wrong = [f"lost {what}: {count}" for what, count in found["lost"].items() if count]
    for phase, key in (("hold", "is_held"), ("replace", "is_reached"), ("cancel", "is_reached")):
        if not found[phase][key]:
            wrong.append(f"{phase} did not come to its end in {LIMIT_S:g} s")
    late_ms = found["holding"]["heartbeat_renewed"].get("max_ms", 0.0)
    if late_ms > 1000 * LEASE_S / 2:
        wrong.append(f"leases were renewed {late_ms:.0f} ms after the heartbeat, later than half a lease")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--executors", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--window", type=float, default=30.0, help="seconds of each measurement")
    given = parser.parse_args()
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
        Path(folder).chmod(0o711)  # as root, PostgreSQL runs as another account
        found = asyncio.run(measure(Path(folder), given.executors, given.jobs, given.window))
    wrong = problems(found)
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "executors": given.executors,
        "jobs": given.jobs,
        "costs": costs(found, given.executors, given.jobs),
        "problems": wrong,
        **found,
    }
    print(json.dumps(result, indent=2))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
