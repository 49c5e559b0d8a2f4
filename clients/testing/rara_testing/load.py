"""The operations that `bench/load.py` puts to work: `rara-executor --module rara_testing.load`.

A step does what the run's input says, which every step of the run is given as it is:

    duration_s      how long it takes, asleep
    output_bytes    size of what it returns
    artifact_bytes  size of the artifact `out` that it makes; 0: none
    flaky           the share of steps, 0 to 1, whose first attempt fails with LOAD_FLAKY
    fails           the step that fails for good with LOAD_PLANNED, until the run is retried
"""

import asyncio
import random
import zlib
from typing import Any, Final

from rara_executor import Job, Retryable, Terminal, operation

KIND: Final = "load.step"
VERSION: Final = "1.0.0"
_HASHES: Final = 2**32


@operation(KIND, version=VERSION)
async def step(job: Job) -> Any:
    given = job.input
    for name in job.artifacts.names():
        await job.artifacts.open(name)
    if given.get("duration_s"):
        await asyncio.sleep(given["duration_s"])
    await _fail_as_planned(job, given)
    if size_bytes := given.get("artifact_bytes"):
        await job.artifacts.put_bytes("out", _content(job.idempotency_key, size_bytes))
    return {"filler": "x" * given.get("output_bytes", 0)}


async def _fail_as_planned(job: Job, given: Any) -> None:
    if job.failures == 0 and zlib.crc32(job.idempotency_key.encode()) < given.get("flaky", 0) * _HASHES:
        raise Retryable("LOAD_FLAKY", "the first attempt fails as planned")
    if given.get("fails") == job.step_name:
        # The checkpoint goes with the step into the run that retries this one.
        met = (job.checkpoint or {}).get("run", job.workflow_run_id)
        if met == job.workflow_run_id:
            await job.progress(checkpoint={"run": job.workflow_run_id})
            raise Terminal("LOAD_PLANNED", "the run fails as planned")


def _content(seed: str, size_bytes: int) -> bytes:
    """Other bytes for every step, so that no store keeps them once; the same for every attempt of one."""
    return random.Random(seed).randbytes(size_bytes)  # noqa: S311 - to be stored, not to be kept secret
