"""Operations that make and read one large artifact: `rara-executor --module rara_testing.bulk`, and `rara-go-probe`."""

import asyncio
import hashlib
import random
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Final

from rara_executor import Job, operation

VERSION: Final = "1.0.0"
NAME: Final = "large"
_BLOCK_BYTES: Final = 1 << 20


@operation("bulk.make", version=VERSION)
async def make(job: Job) -> Any:
    """Puts `size_bytes` that follow from `seed` as artifact `large`. put_s: how long the SDK took."""
    size_bytes, seed = job.input["size_bytes"], job.input["seed"]
    with tempfile.NamedTemporaryFile(dir=job.input["folder"]) as file:
        await asyncio.to_thread(_fill, file, size_bytes, seed)
        began = time.monotonic()
        put = await job.artifacts.put_file(NAME, file.name)
    return {"sha256": put.digest, "size_bytes": put.size_bytes, "put_s": time.monotonic() - began}


@operation("bulk.read", version=VERSION)
async def read(job: Job) -> Any:
    """Opens artifact `large` and reads it. open_s: how long the SDK took. sha256: of what was read."""
    began = time.monotonic()
    given = await job.artifacts.open(NAME)
    open_s = time.monotonic() - began
    return {"sha256": await asyncio.to_thread(_digest, given.path), "open_s": open_s}


def _fill(file: IO[bytes], size_bytes: int, seed: int) -> None:
    """Every block is another one, so that no disk can keep it once."""
    block = random.Random(seed).randbytes(_BLOCK_BYTES)  # noqa: S311 - to be moved, not to be kept secret
    for number in range(0, size_bytes, _BLOCK_BYTES):
        file.write(number.to_bytes(8, "big") + block[8 : min(_BLOCK_BYTES, size_bytes - number)])
    file.flush()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
