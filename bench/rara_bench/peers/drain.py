"""How fast a peer drains its jobs, and how soon it begins one."""

import asyncio
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

from rara_testing.processes import Processes

from rara_bench import machine
from rara_bench.arm import Bench, CannotMeasure, Figures
from rara_bench.peers.peer import Peer
from rara_bench.peers.process import peer
from rara_bench.server import Connection

SAMPLES: Final = 200
_LIMIT_S: Final = 300.0
_LOOK_S: Final = 0.005
_PACKAGES: Final = str(Path(__file__).resolve().parents[2])
_MODULES: Final = {"absurd": "absurd_sdk"}
"""Where the module is not named as the peer."""


async def drain(bench: Bench, name: str) -> Figures:
    """From the first handler's begin until nothing is unfinished."""
    of = _present(name)
    command = [sys.executable, "-m", "rara_bench.peers.process"]
    return await drain_by(bench, name, command, jobs=of.jobs, remaining=of.remaining)


async def drain_by(bench: Bench, name: str, command: list[str], *, jobs: int, remaining: str) -> Figures:
    """The same by any program that has the commands of rara_bench.peers.process."""
    database = f"peer_{name}"
    dsn = await bench.server.create(database)
    async with Processes(bench.folder / "logs" / database) as processes:
        arguments = [name, dsn, str(jobs)]
        for preparation in ("install", "enqueue"):
            await _end_well(bench, processes, [*command, preparation, *arguments])
        await bench.server.settle(database)
        connection = await bench.server.connect(database)
        try:
            stored = await connection.fetchval(remaining)
            if stored != jobs:
                raise RuntimeError(f"{name} stored {stored} of {jobs} jobs")
            figures = await _work(bench, [*command, "work", *arguments], connection, jobs, remaining)
        finally:
            await connection.close()
    await bench.server.drop(database)
    return figures


async def _work(
    bench: Bench, command: list[str], connection: Connection, jobs: int, remaining: str
) -> Figures:
    position = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
    worker = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **_environment(bench)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        async with asyncio.timeout(_LIMIT_S):
            await _expect(worker.stdout, "ready")
            wal = -await connection.fetchval(position)
            worker_s, postgres_s = -machine.cpu_s([worker.pid]), -machine.cpu_s([bench.server.pid])
            worker.stdin.write(b"go\n")
            await _expect(worker.stdout, "first")
            began = time.perf_counter()
            await _expect(worker.stdout, "all")
            while await connection.fetchval(remaining):  # noqa: ASYNC110 - asking is all there is
                await asyncio.sleep(_LOOK_S)
            took_s = time.perf_counter() - began
            worker_s += machine.cpu_s([worker.pid])
            postgres_s += machine.cpu_s([bench.server.pid])
            wal += await connection.fetchval(position)
    finally:
        worker.kill()
        await worker.wait()
    return {
        "jobs_per_s": jobs / took_s,
        "seconds": took_s,
        "worker_cpu_ms_per_job": 1000 * worker_s / jobs,
        "postgres_cpu_ms_per_job": 1000 * postgres_s / jobs,
        "wal_bytes_per_job": float(wal) / jobs,
    }


async def _expect(lines: asyncio.StreamReader, word: str) -> None:
    while (line := await lines.readline()).decode(errors="replace").strip() != word:
        if not line:
            raise RuntimeError(f"the worker ended before it said {word!r}")


async def latency(bench: Bench, name: str) -> Figures:
    """Enqueue called to handler begun, one job at a time, worker and producer in one process."""
    _present(name)
    database = f"peer_{name}"
    dsn = await bench.server.create(database)
    command = [sys.executable, "-m", "rara_bench.peers.process"]
    async with Processes(bench.folder / "logs" / database) as processes:
        await _end_well(bench, processes, [*command, "install", name, dsn, "0"])
        await bench.server.settle(database)
        said = await _end_well(bench, processes, [*command, "latency", name, dsn, str(SAMPLES)])
    await bench.server.drop(database)
    return {figure: float(value) for figure, value in json.loads(said[-1]).items()}


async def _end_well(bench: Bench, processes: Processes, command: list[str]) -> list[str]:
    """What it printed."""
    process = await processes.start("peer", command, env=_environment(bench))
    if await process.wait(timeout_s=_LIMIT_S) != 0:
        raise RuntimeError(process.report())
    return await process.output()


def _present(name: str) -> Peer:
    if importlib.util.find_spec(_MODULES.get(name, name)) is None:
        raise CannotMeasure(f"{name} is not installed (`make bench` does; Oban needs Python 3.12)")
    return peer(name)


def _environment(bench: Bench) -> dict[str, str]:
    return {"PYTHONPATH": _PACKAGES, "BENCH_PG_BIN": str(bench.server.binaries.bin)}
