"""Operations that do not end by themselves, each in its own way of not ending when asked either.

Each start appends a line to `<folder>/<step name>`: its attempt, and the numbers of the processes that it is made of.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from rara_executor import BlockingJob, Job, operation

V = "1.0.0"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# Importing waits for as long as this file exists, so that a runner can be held at its start.
HOLD = os.environ.get("RARA_TEST_HOLD", "")

while HOLD and Path(HOLD).exists():
    time.sleep(0.02)


def started(job: Job | BlockingJob, *pids: int) -> None:
    with (Path(job.input["folder"]) / job.step_name).open("a") as file:
        file.write(json.dumps({"attempt": job.attempt, "pids": [os.getpid(), *pids]}) + "\n")


def starts(folder: Path, step: str) -> list[dict[str, Any]]:
    """What the starts of a step have written, each once it is whole."""
    with contextlib.suppress(FileNotFoundError):
        text = (folder / step).read_text()
        return [json.loads(line) for line in text.splitlines()] if text.endswith("\n") else []
    return []


def pids_of(folder: Path, *steps: str) -> set[int]:
    return {pid for step in steps for start in starts(folder, step) for pid in start["pids"]}


def living(pids: set[int]) -> set[int]:
    """Those in the process table that still run; a zombie does not."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(pid)
    return found


@operation("stubborn.async", version=V)
async def cooperates(job: Job) -> None:
    started(job)
    await asyncio.sleep(600)


@operation("stubborn.swallows", version=V)
async def swallows(job: Job) -> None:
    started(job)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


@operation("stubborn.blocks_loop", version=V)
async def blocks_loop(job: Job) -> None:
    started(job)
    time.sleep(600)  # noqa: ASYNC251 - that is the point


@operation("stubborn.blocking", version=V)
def blocking(job: BlockingJob) -> None:
    started(job)
    time.sleep(600)


@operation("stubborn.lock", version=V)
def lock(job: BlockingJob) -> None:
    """Keeps the interpreter lock."""
    started(job)
    ctypes.PyDLL(None).usleep(ctypes.c_uint(600_000_000))


@operation("stubborn.sigterm", version=V)
def sigterm(job: BlockingJob) -> None:
    """Takes the signal away from the runner, and catches whatever is raised all the same."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started(job)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(600)


@operation("stubborn.children", version=V)
def children(job: BlockingJob) -> None:
    """A child that ignores SIGTERM and a grandchild, in the runner's group."""
    script = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    script += f"print(subprocess.Popen({SLEEP!r}).pid, flush=True); time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    started(job, child.pid, int(child.stdout.readline()))
    time.sleep(600)


@operation("stubborn.sessions", version=V)
def sessions(job: BlockingJob) -> None:
    """A child, a daemon's child and a forked daemon, each in a session of its own."""
    daemon = f"import subprocess; print(subprocess.Popen({SLEEP!r}, start_new_session=True, stdout=-3).pid)"
    child = subprocess.Popen(SLEEP, start_new_session=True)
    orphan = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True, check=True)
    started(job, child.pid, int(orphan.stdout), daemonise())
    time.sleep(600)


def daemonise() -> int:
    """The classic way: fork, setsid, fork. The number of the last."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if pid := os.fork():
            os.write(writer, str(pid).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        time.sleep(600)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return int(pipe.read(20))


KINDS = ("async", "swallows", "blocking", "lock", "sigterm", "children", "sessions")


def steps(**fields: Any) -> dict[str, dict[str, Any]]:
    """A step for each way, by its name."""
    return {kind: {"kind": f"stubborn.{kind}"} | fields for kind in KINDS}
