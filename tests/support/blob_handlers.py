"""Operations that make large artifacts. Input: {"folder": where starts are noted, "size_bytes": of the artifact}."""

import random
from typing import Any

from rara_executor import Job, operation
from support.case_handlers import note

SEED = 1729


def content(size_bytes: int) -> bytes:
    """The same bytes for each attempt."""
    return random.Random(SEED).randbytes(size_bytes)


@operation("case.blob", version="1.0.0")
async def blob(job: Job) -> Any:
    note(job.input["folder"], "starts", job)
    made = await job.artifacts.put_bytes("large", content(job.input["size_bytes"]))
    return {"sha256": made.digest}
