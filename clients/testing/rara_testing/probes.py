"""The operations that an executor offers to be verified, in Python: `rara-executor --module rara_testing.probes`.

docs/how-to/executor-in-another-language.md says what each does.
"""

import asyncio
import contextlib
import hashlib
import time
from typing import Any, Final
from urllib.parse import quote

from rara_executor import BlockingJob, Job, Retryable, Terminal, operation

VERSION: Final = "1.0.0"


@operation("probe.echo", version=VERSION)
async def echo(job: Job) -> Any:
    """Returns its input."""
    return job.input


@operation("probe.sleep", version=VERSION)
async def sleep(job: Job) -> Any:
    """Sleeps for `seconds`, with a checkpoint first if there is a `checkpoint`; ends early when cancelled."""
    if "checkpoint" in job.input:
        await job.progress(0.0, "sleeping", checkpoint=job.input["checkpoint"])
    await asyncio.sleep(job.input["seconds"])
    return {"slept": job.input["seconds"], "checkpoint": job.checkpoint}


@operation("probe.fail", version=VERSION)
async def fail(job: Job) -> None:
    """Fails with `code`, `message` and `retryable`, which may be absent.

    bytes: the message as hexadecimal bytes. length: of a message of letters x.
    secret: the message and a progress text hold the secret `probe`, URL-encoded as well.
    """
    given = job.input
    message = given.get("message", "as asked") + "x" * given.get("length", 0)
    if "bytes" in given:
        message = bytes.fromhex(given["bytes"]).decode("utf-8", "surrogateescape")
    if given.get("secret"):
        value = job.secrets["probe"]
        message = f"cannot reach https://user:{value}@host/?key={quote(value, safe='')}"
        await job.progress(0.5, f"with {value}", checkpoint={"at": "page 2"})
        job.log.info("probe", secret=value)
    kinds = {True: Retryable, False: Terminal}
    if given.get("retryable") is None:
        raise RuntimeError(message)
    raise kinds[given["retryable"]](given.get("code", "PROBE_FAILED"), message)


@operation("probe.panic", version=VERSION)
async def panic(job: Job) -> None:  # noqa: ARG001
    """Dies of a bug."""
    nothing: Any = None
    nothing.panic()


@operation("probe.progress", version=VERSION)
async def progress(job: Job) -> Any:
    """Reports `count` times, with checkpoints {"done": n}."""
    count = job.input["count"]
    for number in range(1, count + 1):
        await job.progress(number / count, f"{number} of {count}", checkpoint={"done": number})
    return {"reported": count}


@operation("probe.artifact", version=VERSION)
async def artifact(job: Job) -> Any:
    """Puts `size` bytes, byte n being n modulo 251, as artifact `out`; copies an input artifact `source` first."""
    source = ""
    if "source" in job.artifacts.names():
        given = await job.artifacts.open("source")
        source = hashlib.sha256(given.path.read_bytes()).hexdigest()
    data = bytes(number % 251 for number in range(job.input["size"]))
    put = await job.artifacts.put_bytes("out", data)
    return {"out": put.digest, "source": source}


@operation("probe.ignore_cancel", version=VERSION)
async def ignore_cancel(job: Job) -> None:
    """Runs on for `seconds`, whatever it is asked."""
    until = time.monotonic() + job.input["seconds"]
    while (left := until - time.monotonic()) > 0:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(left)


@operation("probe.spin", version=VERSION)
def spin(job: BlockingJob) -> Any:
    """Computes for `seconds` without a pause."""
    until = time.monotonic() + job.input["seconds"]
    rounds = 0
    while time.monotonic() < until:
        rounds += 1
    return {"rounds": rounds > 0}


@operation("probe.once", version=VERSION)
async def once(job: Job) -> Any:
    """Records the effect `probe` with the result {"token": its lease token}, and returns what is recorded."""

    async def effect() -> Any:
        return {"token": job.lease_token}

    return await job.once("probe", effect)


@operation("probe.output", version=VERSION)
async def output(job: Job) -> Any:
    """Returns {"text": ...}: `size` letters x, or what is `bad`: "nul" has U+0000, "surrogate" a lone \\ud800."""
    bad = {"nul": "a\0b", "surrogate": "a\ud800b"}
    if "bad" in job.input:
        return {"deep": [{"text": bad[job.input["bad"]]}]}
    return {"text": "x" * job.input["size"]}
