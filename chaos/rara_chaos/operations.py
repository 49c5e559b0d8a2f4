"""The handlers of the load: short, restartable, each keeping the ledger.

executors/go/internal/chaos has the same in Go.
"""

import asyncio
import contextlib
import hashlib
import threading
import zlib
from collections.abc import Iterator
from typing import Any

from rara_executor import BlockingJob, Job, Retryable, Terminal, operation

from rara_chaos.ledger import What, Writer

VERSION = "1.0.0"
_TICK_S = 0.1
_TICKS = 4
_SLOW_TICKS = 30
_PARTS = 3
_ARTIFACT_BYTES = 50_000  # too large to travel inside a message
_LARGE_BYTES = 1_500_000  # travels in several pieces
_SHARED = 40  # contents that many runs have in common


def value_of(step_name: str, number: int) -> int:
    """What a step makes of its number."""
    return (number * 31 + zlib.crc32(step_name.encode())) % 1_000_003


def content_of(number: int) -> bytes:
    """The artifact of a number. Every other number shares its with others, and every fourth content is large."""
    seed = number % _SHARED if number % 2 else number
    size_bytes = _ARTIFACT_BYTES if seed % 4 else _LARGE_BYTES
    return hashlib.shake_256(str(seed).encode()).digest(size_bytes)


def number_of(given: Any) -> int:
    """A step's number: the run's, or the sum of what the steps before it made."""
    return sum(given["parts"]) if "parts" in given else int(given["number"])


@contextlib.contextmanager
def _ledger(job: Job | BlockingJob) -> Iterator[Writer]:
    writer = Writer(job)
    try:
        writer.write(What.START)
        yield writer
        writer.write(What.END)
    finally:
        writer.close()


async def _work(job: Job, ledger: Writer, ticks: int) -> None:
    """Tick from where the checkpoint says on."""
    for done in range(_done(job), ticks):
        await asyncio.sleep(_TICK_S)
        ledger.write(What.TICK)
        await job.progress((done + 1) / ticks, "working", {"done": done + 1}, {"done": done + 1})


def _done(job: Job | BlockingJob) -> int:
    return int((job.checkpoint or {}).get("done", 0))


async def _result(job: Job, ledger: Writer) -> dict[str, object]:
    charge = await job.once("charge", ledger.effect)
    return {"value": value_of(job.step_name, number_of(job.input)), "charge": charge}


@operation("chaos.work", version=VERSION)
async def work(job: Job) -> dict[str, object]:
    with _ledger(job) as ledger:
        await _work(job, ledger, _TICKS)
        return await _result(job, ledger)


@operation("chaos.slow", version=VERSION)
async def slow(job: Job) -> dict[str, object]:
    """Long enough to be cancelled or overtaken by its deadline."""
    with _ledger(job) as ledger:
        await _work(job, ledger, _SLOW_TICKS)
        return await _result(job, ledger)


@operation("chaos.block", version=VERSION)
def block(job: BlockingJob) -> dict[str, object]:
    """A plain function, in a process of its own."""
    pause = threading.Event()  # libfaketime makes time.sleep() fail when the clock jumps
    with _ledger(job) as ledger:
        for done in range(_done(job), _TICKS):
            pause.wait(_TICK_S)
            ledger.write(What.TICK)
            job.progress((done + 1) / _TICKS, checkpoint={"done": done + 1})
        charge = job.once("charge", ledger.effect)
        return {"value": value_of(job.step_name, number_of(job.input)), "charge": charge}


@operation("chaos.flaky", version=VERSION)
async def flaky(job: Job) -> dict[str, object]:
    """Fails twice after its effect, which is not done again."""
    with _ledger(job) as ledger:
        result = await _result(job, ledger)
        await asyncio.sleep(_TICK_S)
        if job.failures < 2:
            raise Retryable("CHAOS_FLAKY", "not yet")
        return result


@operation("chaos.hopeless", version=VERSION)
async def hopeless(job: Job) -> dict[str, object]:
    """Fails for good in the run that it first met, and succeeds in a run that retries that one."""
    with _ledger(job) as ledger:
        met = (job.checkpoint or {}).get("run", job.workflow_run_id)
        if met == job.workflow_run_id:
            await job.progress(checkpoint={"run": job.workflow_run_id})
            raise Terminal("CHAOS_HOPELESS", "never in this run")
        return await _result(job, ledger)


@operation("chaos.make", version=VERSION)
async def make(job: Job) -> dict[str, object]:
    """Stores an artifact."""
    with _ledger(job) as ledger:
        number = number_of(job.input)
        await job.artifacts.put_bytes("content", content_of(number), metadata={"number": number})
        return await _result(job, ledger)


@operation("chaos.use", version=VERSION)
async def use(job: Job) -> dict[str, object]:
    """Reads the artifact of the step before it."""
    with _ledger(job) as ledger:
        content = await job.artifacts.open("content")
        data = await asyncio.to_thread(content.path.read_bytes)
        if data != content_of(job.input["made_from"]):
            raise Terminal("CHAOS_CONTENT", "the artifact is not what was stored")
        return await _result(job, ledger)


@operation("chaos.parts", version=VERSION)
async def parts(job: Job) -> dict[str, object]:
    """Goes on from a checkpoint whose bytes are in the blob store, and stores them as its artifact at the end."""
    with _ledger(job) as ledger:
        number = number_of(job.input)
        if last := _done(job):
            part = await job.artifacts.open_checkpoint("part")
            if await asyncio.to_thread(part.path.read_bytes) != content_of(number + last):
                raise Terminal("CHAOS_CONTENT", "the checkpoint's bytes are not what was stored")
        for done in range(last + 1, _PARTS + 1):
            await asyncio.sleep(_TICK_S)
            ledger.write(What.TICK)
            await job.progress(
                done / _PARTS,
                "kept",
                checkpoint={"done": done},
                artifacts={"part": content_of(number + done)},
            )
        await job.artifacts.put_bytes("content", content_of(number))
        return await _result(job, ledger)
