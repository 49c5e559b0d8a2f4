"""Artifact bytes to and from the scheduler: streamed, resumed where they broke off, and checked by digest."""

import asyncio
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import BinaryIO, Final

from rara.v1 import artifact_pb2, common_pb2

from rara_client.errors import ArtifactMismatch

# Large enough to be cheap, small enough to interleave with other calls on the connection.
CHUNK_BYTES: Final = 256 * 1024


async def digest_of(source: Path | bytes) -> common_pb2.Digest:
    """SHA-256 and size of a file or of bytes; a file is read in a thread."""
    if isinstance(source, bytes):
        return common_pb2.Digest(sha256=hashlib.sha256(source).hexdigest(), size_bytes=len(source))
    return await asyncio.to_thread(_digest_of_file, source)


def _digest_of_file(path: Path) -> common_pb2.Digest:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return common_pb2.Digest(sha256=digest, size_bytes=file.tell())


async def write_requests(
    source: Path | bytes, upload_id: str, offset: int
) -> AsyncGenerator[artifact_pb2.WriteBlobRequest, None]:
    """The messages that send a blob from this offset on; the last one asks for verification."""
    if isinstance(source, bytes):
        for start in range(offset, len(source), CHUNK_BYTES):
            chunk = source[start : start + CHUNK_BYTES]
            yield artifact_pb2.WriteBlobRequest(upload_id=upload_id, offset=start, data=chunk)
            upload_id = ""
        offset = max(offset, len(source))
    else:
        file = await asyncio.to_thread(_open_at, source, offset)
        with file:
            while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield artifact_pb2.WriteBlobRequest(upload_id=upload_id, offset=offset, data=chunk)
                upload_id = ""
                offset += len(chunk)
    yield artifact_pb2.WriteBlobRequest(upload_id=upload_id, offset=offset, finish=True)


def _open_at(path: Path, offset: int) -> BinaryIO:
    file = path.open("rb")
    file.seek(offset)
    return file


class Check:
    """Counts and hashes a blob's bytes as they come."""

    def __init__(self, expected: common_pb2.Digest) -> None:
        self._expected = expected
        self._hash = hashlib.sha256()
        self.received_bytes = 0

    def take(self, data: bytes) -> None:
        """Raises ArtifactMismatch as soon as there are too many bytes."""
        self._hash.update(data)
        self.received_bytes += len(data)
        if self._expected.size_bytes and self.received_bytes > self._expected.size_bytes:
            self._refuse(f"more than its {self._expected.size_bytes} bytes came")

    def finish(self) -> None:
        """Raises ArtifactMismatch if the bytes are not the blob that was asked for."""
        if self._expected.size_bytes and self.received_bytes != self._expected.size_bytes:
            self._refuse(f"{self.received_bytes} of its {self._expected.size_bytes} bytes came")
        if self._hash.hexdigest() != self._expected.sha256:
            self._refuse(f"the bytes have the digest {self._hash.hexdigest()}")

    def _refuse(self, why: str) -> None:
        raise ArtifactMismatch(
            f"artifact {self._expected.sha256}: {why}", reason="ARTIFACT_MISMATCH", status="DATA_LOSS"
        )


async def save(chunks: AsyncIterator[bytes], destination: Path) -> None:
    """Write to the file in one move: a download that fails leaves nothing, and not the half of an old file.

    What is at the destination is replaced, and not followed if it is a link. Raises OSError, of a full disk as well.
    """
    partial = await asyncio.to_thread(_new_file_beside, destination)
    write: Callable[[bytes], int]
    try:
        file = await asyncio.to_thread(partial.open, "wb")
        with file:
            write = file.write
            async for chunk in chunks:
                await asyncio.to_thread(write, chunk)
        await asyncio.to_thread(partial.replace, destination)
    except OSError as error:
        if error.filename is None:  # a write, as to a full disk, does not say where
            raise OSError(error.errno, error.strerror, str(destination)) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


def _new_file_beside(destination: Path) -> Path:
    """Of a name that nobody can foresee, so that no link waits there, and short enough where the other is long."""
    path = destination.parent / f".rara-{secrets.token_hex(8)}.part"
    path.touch(exist_ok=False)
    return path
