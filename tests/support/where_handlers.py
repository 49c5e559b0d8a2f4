"""Operations that say where they run; executors/go/internal/where has the same kinds in other versions."""

import asyncio
import time
from typing import Any

from rara_executor import Job, operation


async def here(job: Job) -> dict[str, Any]:
    return {"language": "python", "version": job.kind_version}


for kind, version in (("where.a", "1.4.2"), ("where.a", "2.0.0-rc1"), ("where.b", "1.4.2")):
    operation(kind, version=version)(here)


@operation("where.narrow", version="1.0.0", max_concurrency=1)
async def slowly(job: Job) -> dict[str, Any]:
    """Takes a while, and tells when."""
    began = time.time()
    await asyncio.sleep(0.1)
    return {"language": "python", "version": job.kind_version, "stay": [began, time.time()]}
