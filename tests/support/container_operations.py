"""Operations for the tests of stops: each waits for the file `go`, and writes down what it did.

In a container this module is mounted alone, so it imports only the standard library and the SDK. The folder that the
test reads is named by BOX_WORK.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from rara_executor import BlockingJob, Job, operation

V = "1.0.0"
WORK = Path(os.environ.get("BOX_WORK", "/tests/work"))


def note(file: str, step_name: str, lease_token: int) -> None:
    with (WORK / file).open("a") as lines:
        lines.write(f"{step_name} {lease_token}\n")


def may_go() -> bool:
    return (WORK / "go").exists()


@operation("box.wait", version=V)
async def wait(job: Job) -> int:
    """Has one effect, and then waits as a handler should."""
    note("starts", job.step_name, job.lease_token)
    await job.once("effect", lambda: note("effects", job.step_name, job.lease_token))
    await job.progress(0.5, "waiting")
    while not may_go():
        await asyncio.sleep(0.02)
    return job.attempt


@operation("box.stubborn", version=V)
async def stubborn(job: Job) -> int:
    """Takes no notice of its cancel: it has to be killed."""
    note("starts", job.step_name, job.lease_token)
    await job.once("effect", lambda: note("effects", job.step_name, job.lease_token))
    while not may_go():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
    return job.attempt


@operation("box.children", version=V)
def children(job: BlockingJob) -> int:
    """Blocks, and has a child and a grandchild that sleep on."""
    note("starts", job.step_name, job.lease_token)
    job.once("effect", lambda: note("effects", job.step_name, job.lease_token))
    sleep = "import time; time.sleep(600)"
    script = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    child = subprocess.Popen([sys.executable, "-c", script])
    while not may_go():
        time.sleep(0.02)
    child.kill()
    child.wait()
    return job.attempt
