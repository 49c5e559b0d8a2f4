"""Measures the Go executor against the Python one: no-op jobs a second, CPU a job, memory while idle.

    .venv/bin/python bench/executors.py [--steps 3000] [--rounds 3] [--slots 100] > executors.json

Needs `make test`'s environment and Go. One embedded PostgreSQL, one scheduler, one executor at a time, in turn. All
runs (of ten steps of `probe.echo` each) wait before the executor starts; seconds are the database's, from the first
start of a step to the last end. Memory is that of an executor with all its children, three seconds after it connected
to a scheduler without work: resident (shared pages count in each process) and proportional (they count once).
With few slots (10, say) the way to the scheduler and back bounds both, so compare CPU a job there.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Final

import asyncpg
import psutil
from rara.v1 import workflow_pb2
from rara_cli.stack import Stack, StackSettings
from rara_client import Client
from rara_testing.processes import Process, Processes

ROOT: Final = Path(__file__).resolve().parents[1]
STEPS_A_RUN: Final = 10
IDLE_S: Final = 3.0
LIMIT_S: Final = 600.0
_IS_RUNNING: Final = "select exists (select from rara.workflow_run where ended_at is null)"
_COMMITS: Final = "select xact_commit from pg_stat_database where datname = current_database()"
_DONE: Final = (
    "select count(*) as steps, extract(epoch from max(ended_at) - min(started_at))::float8 as took_s"
    " from rara.step_state where started_at > $1 and state = 'succeeded'"
)


@dataclass(frozen=True, slots=True)
class Measured:
    language: str
    jobs_per_s: float
    executor_cpu_ms_per_job: float
    scheduler_cpu_ms_per_job: float
    commits_per_job: float
    processes: int
    idle_resident_mib: float
    idle_proportional_mib: float


@dataclass(frozen=True, slots=True)
class Bench:
    """What stays the same from turn to turn."""

    stack: Stack
    client: Client
    database: "asyncpg.Connection[asyncpg.Record]"
    processes: Processes
    commands: dict[str, list[str]]
    folder: Path
    slots: int

    async def measure(self, language: str, steps: int) -> Measured:
        idle = await self._start(language)
        await asyncio.sleep(IDLE_S)
        count = sum(1 for _ in _tree(idle))
        resident = _sum(idle, lambda process: process.memory_info().rss)
        proportional = _sum(idle, lambda process: process.memory_full_info().pss)
        await idle.stop()

        since = await self.database.fetchval("select clock_timestamp()")
        for _ in range(steps // STEPS_A_RUN):
            await self.client.start_run("noop")
        scheduler = psutil.Process(self.stack.scheduler.pid)
        scheduler_s, commits = -_cpu_s(scheduler), -await self.database.fetchval(_COMMITS)
        busy = await self._start(language)
        await self._until_all_ended()
        scheduler_s += _cpu_s(scheduler)
        commits += await self.database.fetchval(_COMMITS)
        executor_s = _sum(busy, _cpu_s)
        await busy.stop()
        (row,) = await self.database.fetch(_DONE, since)
        done, took_s = row["steps"], row["took_s"]
        if done != steps:
            raise SystemExit(f"{done} of {steps} steps succeeded")
        mib = 2**20
        return Measured(
            language=language,
            jobs_per_s=done / took_s,
            executor_cpu_ms_per_job=1000 * executor_s / done,
            scheduler_cpu_ms_per_job=1000 * scheduler_s / done,
            commits_per_job=commits / done,
            processes=count,
            idle_resident_mib=resident / mib,
            idle_proportional_mib=proportional / mib,
        )

    async def _start(self, language: str) -> Process:
        env = {
            "RARA_SCHEDULER": self.stack.address,
            "RARA_EXECUTOR_NAME": language,
            "RARA_EXECUTOR_SLOTS": str(self.slots),
            "RARA_EXECUTOR_DIR": str(self.folder / "executor"),
            "RARA_EXECUTOR_MODULES": "rara_testing.probes",  # means nothing to Go
            "RARA_LOG_LEVEL": "warning",
        }
        return await self.processes.start(language, self.commands[language], env=env, ready="connected to")

    async def _until_all_ended(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            while await self.database.fetchval(_IS_RUNNING):  # noqa: ASYNC110 - asking is all there is
                await asyncio.sleep(0.2)


def _tree(executor: Process) -> Iterator[psutil.Process]:
    process = psutil.Process(executor.pid)
    yield process
    yield from process.children(recursive=True)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _sum(executor: Process, of: Callable[[psutil.Process], float]) -> float:
    return sum(of(process) for process in _tree(executor))


def _commands(folder: Path) -> dict[str, list[str]]:
    program = folder / "rara-go-probe"
    build = ["go", "build", "-buildvcs=false", "-o", str(program), "./cmd/rara-go-probe"]
    subprocess.run(build, cwd=ROOT / "executors" / "go", check=True)
    return {"python": [sys.executable, "-m", "rara_executor"], "go": [str(program)]}


async def _run(folder: Path, *, steps: int, rounds: int, slots: int) -> list[Measured]:
    commands = _commands(folder)
    settings = StackSettings(directory=folder, with_executor=False, env={"RARA_LOG_LEVEL": "warning"})
    async with (
        Stack(settings) as stack,
        Client.connect(stack.address) as client,
        Processes(folder) as processes,
    ):
        database = await asyncpg.connect(stack.dsn)
        noop = [workflow_pb2.StepDefinition(step_name=f"s{n}", kind="probe.echo") for n in range(STEPS_A_RUN)]
        await client.register_definition(workflow_pb2.Definition(definition="noop", steps=noop))
        bench = Bench(stack, client, database, processes, commands, folder, slots)
        found = []
        for _ in range(rounds):
            for language in commands:
                found.append(await bench.measure(language, steps))
                print(found[-1], file=sys.stderr)
        await database.close()
        return found


def _medians(found: list[Measured], language: str) -> dict[str, float]:
    rows = [asdict(one) for one in found if one.language == language]
    return {name: round(median(row[name] for row in rows), 2) for name in rows[0] if name != "language"}


def _print_table(medians: dict[str, dict[str, float]]) -> None:
    """On standard error: the other one is for the JSON."""
    print(f"{'median of rounds':<26}" + "".join(f"{name:>10}" for name in medians), file=sys.stderr)
    for name in next(iter(medians.values())):
        print(f"{name:<26}" + "".join(f"{of[name]:>10.2f}" for of in medians.values()), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=100)
    given = parser.parse_args()
    steps = given.steps - given.steps % STEPS_A_RUN
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
        found = asyncio.run(_run(Path(folder), steps=steps, rounds=given.rounds, slots=given.slots))
    medians = {language: _medians(found, language) for language in ("python", "go")}
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "go": subprocess.check_output(["go", "version"], text=True).strip(),
        "load_before": load_before,
        "load_after": os.getloadavg(),
        "medians": medians,
        "rounds": [asdict(one) for one in found],
    }
    print(json.dumps(result, indent=2))
    _print_table(medians)


if __name__ == "__main__":
    main()
