"""Operations that take a time that is asked for, and say what the clocks around them showed."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from rara_executor import Job, Retryable, operation

V = "1.0.0"


@operation("timed.sleep", version=V)
async def sleep(job: Job) -> Any:
    """Fails on attempts below `succeed_at`; else takes so many seconds."""
    if job.attempt < job.input.get("succeed_at", 1):
        raise Retryable("TOOL_FAILED", "not yet")
    left_s = job.time_left_s
    await asyncio.sleep(job.input["seconds"])
    return {"wall": time.time(), "time_left_s": left_s}


@operation("timed.flood", version=V)
async def flood(job: Job) -> int:
    """Progress in a tight loop, as fast as it is taken."""
    count: int = job.input["count"]
    for number in range(1, count + 1):
        await job.progress(number / count, f"{number} of {count}", checkpoint={"done": number})
    return count


@operation("timed.steady", version=V)
async def steady(job: Job) -> int:
    """Runs on as long as the file is not there."""
    while not Path(job.input["file"]).exists():
        await asyncio.sleep(0.02)
    return job.attempt


@operation("timed.fails", version=V)
async def fails(job: Job) -> None:
    """Fails when the file is there."""
    while not Path(job.input["file"]).exists():
        await asyncio.sleep(0.02)
    raise Retryable("TOOL_FAILED", "as asked")


@operation("timed.ignores", version=V)
async def ignores(_job: Job) -> None:
    """Takes no notice of its cancel."""
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


@operation("timed.add", version=V)
async def add(job: Job) -> int:
    """One more than the number, after so many seconds."""
    await asyncio.sleep(job.input["seconds"])
    return int(job.input["number"]) + 1
