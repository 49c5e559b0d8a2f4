"""Measures what an executor alone costs: CPU a job, frames a job, driven by a scripted scheduler.

    .venv/bin/python bench/executor.py [--jobs 20000] [--slots 1000] [--rounds 3] [--kind bench.report] COMMAND...

COMMAND starts an executor, Python's by default. Several take turns, so that code of two trees can be compared; a
command may begin with NAME=VALUE words for its environment (PYTHONPATH=...). The script gives jobs as credit allows, up
to 500 a frame, and acknowledges what has come each 8 ms, as a scheduler does that commits in sets. 3,000 jobs come
first and are not counted. CPU is that of the executor with all its children; others on the machine inflate it, so only
figures taken in turn compare.
"""

import argparse
import asyncio
import os
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, Final

import grpc
import psutil
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc, job_pb2
from rara_testing.processes import Process, Processes
from rara_testing.scripted_scheduler import Terms, job

WARM_UP: Final = 3000
COMMIT_S: Final = 0.008
JOBS_A_FRAME: Final = 500
LIMIT_S: Final = 600.0


class Script(dispatch_pb2_grpc.DispatchServiceServicer):
    """One session: takes events in as they come, answers them in sets, and gives jobs up to `wanted`."""

    def __init__(self, kind: str) -> None:
        self.frames: Counter[str] = Counter()
        self._kind = kind
        self._wanted = self._given = self._credit = self._done = 0
        self._stored: dict[int, int] = {}
        self._beats: list[int] = []
        self._news = asyncio.Event()
        self._ends = asyncio.Condition()

    async def run(self, jobs: int) -> None:
        """Until so many more jobs have succeeded."""
        self._wanted += jobs
        self._news.set()
        async with asyncio.timeout(LIMIT_S), self._ends:
            await self._ends.wait_for(lambda: self._done >= self._wanted)

    async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: ARG002, N802
        await context.read()
        terms = Terms(event_window=5000, silence_s=600.0).message()
        welcome = dispatch_pb2.Welcome(protocol_version=1, session_id="bench", terms=terms)
        await context.write(dispatch_pb2.ConnectResponse(welcome=welcome))
        writer = asyncio.create_task(self._write(context))
        try:
            while (frame := await context.read()) is not grpc.aio.EOF:
                await self._hear(frame)
        finally:
            writer.cancel()

    async def _hear(self, frame: dispatch_pb2.ConnectRequest) -> None:
        kind = frame.WhichOneof("frame") or ""
        self.frames[kind] += 1
        if kind == "credit":
            self._credit = frame.credit.limit
        elif kind == "heartbeat":
            self._beats.append(frame.heartbeat.number)
        for event in frame.events.events:
            self.frames["event"] += 1
            self._stored[event.lease.lease_token] = event.sequence
            self._done += event.HasField("succeeded")
        self._news.set()
        async with self._ends:
            self._ends.notify_all()

    async def _write(self, context: Any) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            await asyncio.sleep(COMMIT_S)
            for number in self._beats:
                ack = dispatch_pb2.HeartbeatAck(number=number, renewed=number)
                await context.write(dispatch_pb2.ConnectResponse(heartbeat_ack=ack))
            self._beats.clear()
            stored, self._stored = self._stored, {}
            acks = [dispatch_pb2.EventAck(lease_token=one, sequence=last) for one, last in stored.items()]
            if acks:
                await context.write(dispatch_pb2.ConnectResponse(acks=dispatch_pb2.EventAcks(acks=acks)))
            jobs = self._next_jobs()
            if jobs:
                await context.write(dispatch_pb2.ConnectResponse(jobs=dispatch_pb2.JobBatch(jobs=jobs)))
                self._news.set()

    def _next_jobs(self) -> list[job_pb2.JobRequest]:
        count = max(0, min(self._credit, self._wanted, self._given + JOBS_A_FRAME) - self._given)
        tokens = range(self._given + 1, self._given + count + 1)
        self._given += count
        requests = [job(token, self._kind, input={"count": 1}) for token in tokens]
        for request in requests:
            request.executor_kind = ""
        return requests


async def _measure(folder: Path, command: str, given: argparse.Namespace) -> dict[str, float]:
    server, script = grpc.aio.server(), Script(given.kind)
    dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    words = shlex.split(command)
    own = dict(word.split("=", 1) for word in words if "=" in word.split("/")[0])
    packages = os.pathsep.join(filter(None, (own.pop("PYTHONPATH", ""), str(Path(__file__).parent))))
    env = {
        "RARA_SCHEDULER": f"127.0.0.1:{port}",
        "RARA_EXECUTOR_SLOTS": str(given.slots),
        "RARA_EXECUTOR_JOBS_PER_RUNNER": str(given.slots),
        "RARA_EXECUTOR_MODULES": "rara_bench.operations",
        "RARA_EXECUTOR_DIR": str(folder / "executor"),
        "RARA_LOG_LEVEL": "warning",
        "PYTHONPATH": packages,
        **own,
    }
    argv = [word for word in words if "=" not in word.split("/")[0]]
    async with Processes(folder) as processes:
        executor = await processes.start("executor", argv, env=env, ready="connected to", ready_s=60)
        await script.run(WARM_UP)
        cpu_s, frames = _cpu_s(executor), script.frames.copy()
        await script.run(given.jobs)
        cpu_s, frames = _cpu_s(executor) - cpu_s, script.frames - frames
        await executor.stop(timeout_s=30)
    await server.stop(None)
    return {
        "cpu_ms_per_job": 1000 * cpu_s / given.jobs,
        "events_per_job": frames["event"] / given.jobs,
        "frames_per_job": frames["events"] / given.jobs,
    }


def _cpu_s(executor: Process) -> float:
    process = psutil.Process(executor.pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def _run(given: argparse.Namespace) -> None:
    found: dict[str, list[dict[str, float]]] = {command: [] for command in given.commands}
    for _ in range(given.rounds):
        for command in given.commands:
            with tempfile.TemporaryDirectory(prefix="rara-bench-") as folder:
                found[command].append(await _measure(Path(folder), command, given))
    for command, rounds in found.items():
        medians = {name: round(median(each[name] for each in rounds), 4) for name in rounds[0]}
        print(command, medians)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--slots", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", default="bench.report", help="Go's probe has probe.progress")
    parser.add_argument("commands", nargs="*", default=[f"{sys.executable} -m rara_executor"])
    asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    main()
