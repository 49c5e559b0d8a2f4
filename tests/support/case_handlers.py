"""Operations that tell the test about each start and each effect, in files of their own.

Input: {"folder": where the files are, "hold": attempts up to this one wait until the file `gate-<attempt>` is there}.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from rara_executor import Job, operation

V = "1.0.0"


def note(folder: str, name: str, job: Job) -> None:
    with (Path(folder) / name).open("a") as file:
        file.write(f"{job.idempotency_key} {job.attempt} {job.lease_token} {time.monotonic()}\n")


@operation("case.work", version=V)
async def work(job: Job) -> Any:
    """Starts, waits for the gate if it is to be held, has its effect."""
    folder: str = job.input["folder"]
    note(folder, "starts", job)
    await job.progress(0.1, "started")
    while job.attempt <= job.input.get("hold", 0) and not (Path(folder) / f"gate-{job.attempt}").exists():
        await asyncio.sleep(0.02)
    note(folder, "effects", job)
    return {"attempt": job.attempt, "token": job.lease_token}


@operation("case.count", version=V)
async def count(job: Job) -> Any:
    """The first attempt counts to 100 in two seconds and never ends; a later one tells what it was given."""
    folder: str = job.input["folder"]
    note(folder, "starts", job)
    if job.attempt > 1:
        await job.progress(0.0, "again")
        return job.checkpoint
    for number in range(1, 101):
        await job.progress(number / 100, f"{number} of 100", checkpoint={"done": number})
        await asyncio.sleep(0.02)
    note(folder, "counted", job)
    await asyncio.sleep(600)
    return None


@operation("case.story", version=V)
async def story(job: Job) -> Any:
    """Says one of everything that a handler can say: progress, checkpoints, an effect, artifacts, an output."""
    note(job.input["folder"], "starts", job)
    await job.progress(0.25, "first", {"n": 1}, checkpoint={"at": 1})
    paid = await job.once("charge", lambda: {"paid": 5})
    await job.progress(0.5, "second", {"n": 2}, checkpoint={"at": 2})
    path = job.scratch / "big"
    path.write_bytes(b"big" * 20_000)  # over what goes inline
    big = await job.artifacts.put_file("big", path, type="dataset")
    small = await job.artifacts.put_bytes("small", b"small")
    await job.progress(0.75, "third", {"n": 3}, checkpoint={"at": 3})
    return {"paid": paid, "big": big.digest, "small": small.digest}
