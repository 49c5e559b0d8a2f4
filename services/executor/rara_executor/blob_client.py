"""Blobs to and from ArtifactService: streamed, verified, tried again while the service is away."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, job_pb2

from rara_executor.codes import Code
from rara_executor.errors import JobFailure

T = TypeVar("T")

CHUNK_BYTES = 256 << 10
UNARY_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 60.0  # a transfer that moves nothing for so long is cut and tried again
ATTEMPTS = 6
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0

_AGAIN = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED})


class BlobClient:
    """Calls go over a channel of their own: a large upload must not delay a heartbeat."""

    def __init__(self, channel: grpc.aio.Channel, *, jitter: Callable[[], float] = random.random) -> None:
        self._stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
        self._jitter = jitter

    async def download(self, digest: common_pb2.Digest, target: Path) -> None:
        """Write the blob to target, verified. Raises JobFailure."""
        mismatches = 0
        while True:
            sha256, size = await self._again(lambda: self._download_once(digest, target))
            if (sha256, size) == (digest.sha256, digest.size_bytes):
                return
            mismatches += 1
            if mismatches > 1:  # once may be a fault of the way
                raise JobFailure(
                    Code.ARTIFACT_MISMATCH,
                    f"blob {digest.sha256}: {digest.size_bytes} bytes were named, "
                    f"{size} with digest {sha256} came",
                )

    async def upload(
        self, lease: job_pb2.Lease, digest: common_pb2.Digest, media_type: str, source: Path
    ) -> None:
        """Store the file's bytes under the digest, unless they are there. Raises JobFailure."""
        await self._again(lambda: self._upload_once(lease, digest, media_type, source))

    async def _download_once(self, digest: common_pb2.Digest, target: Path) -> tuple[str, int]:
        call = self._stub.ReadBlob(artifact_pb2.ReadBlobRequest(digest=digest))
        hasher = hashlib.sha256()
        size = 0
        try:
            with await asyncio.to_thread(target.open, "wb") as file:
                while True:
                    async with asyncio.timeout(IDLE_TIMEOUT_S):
                        response = await call.read()
                    if not isinstance(response, artifact_pb2.ReadBlobResponse):
                        break
                    size += len(response.data)
                    if size > digest.size_bytes:
                        break  # not the blob that was named, however long it goes on
                    await asyncio.to_thread(_take, file.write, hasher.update, response.data)
        finally:
            call.cancel()
        return hasher.hexdigest(), size

    async def _upload_once(
        self, lease: job_pb2.Lease, digest: common_pb2.Digest, media_type: str, source: Path
    ) -> None:
        created = await self._stub.CreateUpload(
            artifact_pb2.CreateUploadRequest(lease=lease, digest=digest, media_type=media_type),
            timeout=UNARY_TIMEOUT_S,
        )
        if not created.upload_id:
            return  # it is there
        if created.parts:
            raise JobFailure(
                Code.DEPENDENCY_UNAVAILABLE, "the blob store asks for presigned parts, which this SDK lacks"
            )
        offset = await self._resume_at(created.upload_id)
        call = self._stub.WriteBlob()
        try:
            async for request in _chunks(created.upload_id, source, offset, digest.size_bytes):
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    await call.write(request)
            await call.done_writing()
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                response = await call
        finally:
            call.cancel()
        if response.verified != digest:
            raise JobFailure(
                Code.ARTIFACT_MISMATCH,
                f"blob {digest.sha256}: the store verified {response.verified.sha256 or 'nothing'}",
            )

    async def _resume_at(self, upload_id: str) -> int:
        """What an earlier, cut attempt has stored."""
        try:
            status = await self._stub.QueryWriteStatus(
                artifact_pb2.QueryWriteStatusRequest(upload_id=upload_id), timeout=UNARY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return 0
            raise
        return status.committed_bytes

    async def _again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The attempt's result, tried again while the service is away. Raises JobFailure."""
        for number in range(ATTEMPTS):
            try:
                return await attempt()
            except (grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError) as error:
                failure = _failure(error)
                if failure.code != Code.DEPENDENCY_UNAVAILABLE or number == ATTEMPTS - 1:
                    raise failure from error
            await asyncio.sleep(self._jitter() * min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**number))
        raise AssertionError("the last attempt returns or raises")


def _failure(error: Exception) -> JobFailure:
    if not isinstance(error, grpc.aio.AioRpcError):
        return JobFailure(Code.DEPENDENCY_UNAVAILABLE, f"the artifact service does not answer: {error}")
    code, details = error.code(), error.details()
    if code in _AGAIN:
        return JobFailure(Code.DEPENDENCY_UNAVAILABLE, f"the artifact service is away: {details}")
    match code:
        case grpc.StatusCode.NOT_FOUND:
            return JobFailure(Code.ARTIFACT_MISSING, f"the artifact is gone: {details}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            return JobFailure(Code.ARTIFACT_MISMATCH, f"the artifact service refused the blob: {details}")
        case grpc.StatusCode.FAILED_PRECONDITION:
            return JobFailure(Code.LEASE_LOST, f"the lease is not current: {details}")
        case _:
            return JobFailure(Code.INTERNAL, f"the artifact service failed with {code.name}: {details}")


async def _chunks(
    upload_id: str, source: Path, offset: int, size: int
) -> AsyncIterator[artifact_pb2.WriteBlobRequest]:
    with await asyncio.to_thread(source.open, "rb") as file:
        file.seek(offset)
        first = True
        while True:
            data = await asyncio.to_thread(file.read, CHUNK_BYTES)
            finish = not data or offset + len(data) >= size
            yield artifact_pb2.WriteBlobRequest(
                upload_id=upload_id if first else "", offset=offset, data=data, finish=finish
            )
            if finish:
                return
            first = False
            offset += len(data)


def _take(write: Callable[[bytes], int], update: Callable[[bytes], None], data: bytes) -> None:
    update(data)
    write(data)
