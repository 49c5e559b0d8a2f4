"""Operations that end in the middle, for tests of what the next attempt finds.

Those of the Go tests, executors/go/internal/fenced, do the same in every detail. Input: {"folder", "size"}.
"""

import asyncio
from pathlib import Path
from typing import Any

from rara_executor import Job, JobFailure, Terminal, operation

V = "1.0.0"
EPOCHS = 6


def mark(job: Job, name: str) -> None:
    """Leave a file that says how far this attempt is."""
    (Path(job.input["folder"]) / f"{name}-{job.attempt}").touch()


async def until(job: Job, name: str) -> None:
    """Wait for a file of the test."""
    while not (Path(job.input["folder"]) / name).exists():
        await asyncio.sleep(0.02)


def weights(size: int, epoch: int) -> bytes:
    """After an epoch: `size` bytes, each of which every epoch changes."""
    return bytes((i * 31 + epoch * 7) % 256 for i in range(size))


@operation("fenced.train", version=V)
async def train(job: Job) -> Any:
    """Goes on from the checkpoint's weights and log. The first attempt stops for ever in its middle."""
    at: dict[str, Any] = {"epoch": 0, "big": 2**53 + 1, "by": "python"}
    resumed = {"resumed_at": 0, "resumed_of": ""}
    log = ""
    if job.checkpoint is not None:
        at = dict(job.checkpoint)
        resumed = {"resumed_at": at["epoch"], "resumed_of": at["by"]}
        log = await _resume(job, at["epoch"])
    while at["epoch"] < EPOCHS:
        at |= {"epoch": at["epoch"] + 1, "by": "python"}
        log += f"python {at['epoch']}\n"
        path = job.scratch / "weights"
        path.write_bytes(weights(job.input["size"], at["epoch"]))
        await job.progress(checkpoint=at, artifacts={"weights": path, "log": log.encode()})
        if job.checkpoint is None and at["epoch"] == EPOCHS // 2:
            mark(job, "half")
            await asyncio.sleep(600)
    await job.artifacts.put_bytes("model", weights(job.input["size"], at["epoch"]), type="model")
    return {"epoch": at["epoch"], "by": "python", "big": at["big"], "log": log} | resumed


async def _resume(job: Job, epoch: int) -> str:
    found = await job.artifacts.open_checkpoint("weights")
    if found.read_bytes() != weights(job.input["size"], epoch) or found.type != "checkpoint":
        raise Terminal("WEIGHTS_WRONG", f"of epoch {epoch}")
    return (await job.artifacts.open_checkpoint("log")).read_text()


@operation("fenced.describe", version=V)
async def describe(job: Job) -> Any:
    """Reads one of its two inputs; leaves an output of every type, and says why it cannot leave another one."""
    read = await job.artifacts.open("read")
    for type_ in ("dataset", "model", "index", "metrics", "report", "checkpoint", "blob"):
        await job.artifacts.put_bytes(
            f"of/{type_}",
            type_.encode(),
            type=type_,
            media_type=f"text/{type_}",
            metadata={"type": type_, "big": 2**53 + 1, "read": read.metadata},
            derived_from=["read"],
        )
    await job.artifacts.put_bytes("plain", b"plain")
    try:
        await job.artifacts.put_bytes("other", b"other", type="embedding")
    except JobFailure as refused:
        return {"code": refused.code, "message": refused.message, "of": read.type}


@operation("fenced.charge", version=V)
async def charge(job: Job) -> Any:
    """Has its one effect when the test lets this attempt, and gives what is recorded of it."""

    def have() -> str:
        mark(job, "charged")
        return f"python {job.attempt}"

    mark(job, "stored")
    await until(job, f"publish-{job.attempt}")
    charged = await job.once("charge", have)
    mark(job, "returned")
    return charged


@operation("fenced.publish", version=V)
async def publish(job: Job) -> Any:
    """Stores what names its attempt, and ends when the test lets this attempt."""
    data = f"python {job.attempt}\n".encode() * job.input["size"]
    await job.artifacts.put_bytes("model", data, type="model")
    mark(job, "stored")
    await until(job, f"publish-{job.attempt}")
    mark(job, "returned")
    return {"attempt": job.attempt, "by": "python"}
