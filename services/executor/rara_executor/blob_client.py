"""Blobs to and from ArtifactService: streamed, verified, resumed where they broke off, waited for while it is away."""

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, job_pb2

from rara_executor.artifact_files import DISK_FULL
from rara_executor.blob_faults import Fault, fault_of
from rara_executor.codes import Code
from rara_executor.errors import JobFailure

CHUNK_BYTES = 256 << 10
UNARY_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 60.0  # a transfer that moves nothing for so long is cut and tried again
PATIENCE_S = 300.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0


class BlobClient:
    """Calls go over a channel of their own: a large upload must not delay a heartbeat.

    patience_s: how long a transfer may move nothing, whatever is the reason, before it is given up. The work of the
    job waits for as long; its lease goes on meanwhile.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        patience_s: float = PATIENCE_S,
        jitter: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
        self._patience_s = patience_s
        self._jitter = jitter
        self._clock = clock

    async def download(self, digest: common_pb2.Digest, target: Path) -> None:
        """Write the blob to target, verified. Raises JobFailure."""
        got = common_pb2.Digest()
        for _ in range(2):  # once, wrong bytes may be a fault of the way
            download = _Download(digest, target)
            await self._again(lambda: self._download_on(download), lambda: download.size_bytes)  # noqa: B023
            got = download.digest()
            if got == digest:
                return
        raise JobFailure(
            Code.ARTIFACT_MISMATCH,
            f"blob {digest.sha256}: {digest.size_bytes} bytes were named, "
            f"{got.size_bytes} with digest {got.sha256} came",
        )

    async def upload(
        self, lease: job_pb2.Lease, digest: common_pb2.Digest, media_type: str, source: Path
    ) -> None:
        """Store the file's bytes under the digest, unless they are there. Raises JobFailure."""
        upload = _Upload(lease, digest, media_type, source)
        for is_last in (False, True):
            try:
                await self._again(lambda: self._upload_on(upload), lambda: upload.sent_bytes)
                return
            except JobFailure as failure:
                # What an earlier call has left may have been wrong. It was dropped: once more, from the beginning.
                if is_last or failure.code != Code.ARTIFACT_MISMATCH or not upload.resumed_at:
                    raise

    async def _download_on(self, download: "_Download") -> None:
        """From where an earlier call was cut."""
        digest = download.expected
        await download.open()
        call = self._stub.ReadBlob(artifact_pb2.ReadBlobRequest(digest=digest, offset=download.size_bytes))
        try:
            while True:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    response = await call.read()
                if not isinstance(response, artifact_pb2.ReadBlobResponse):
                    break
                if download.size_bytes + len(response.data) > digest.size_bytes:
                    download.size_bytes += len(response.data)
                    break  # not the blob that was named, however long it goes on
                await asyncio.to_thread(download.take, response.data)
        finally:
            call.cancel()
            await download.close()

    async def _upload_on(self, upload: "_Upload") -> None:
        created = await self._stub.CreateUpload(
            artifact_pb2.CreateUploadRequest(
                lease=upload.lease, digest=upload.digest, media_type=upload.media_type
            ),
            timeout=UNARY_TIMEOUT_S,
        )
        if not created.upload_id:
            return  # it is there
        if created.parts:
            raise JobFailure(
                Code.DEPENDENCY_UNAVAILABLE, "the blob store asks for presigned parts, which this SDK lacks"
            )
        upload.resumed_at = offset = await self._resume_at(created.upload_id)
        call = self._stub.WriteBlob()
        try:
            try:
                async for request in _chunks(created.upload_id, upload, offset):
                    async with asyncio.timeout(IDLE_TIMEOUT_S):
                        await call.write(request)
                await call.done_writing()
            except asyncio.InvalidStateError:
                pass  # the other side has ended the call early: its status says why
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                response = await call
        finally:
            call.cancel()
        if response.verified != upload.digest:
            raise JobFailure(
                Code.ARTIFACT_MISMATCH,
                f"blob {upload.digest.sha256}: the store verified {response.verified.sha256 or 'nothing'}",
            )

    async def _resume_at(self, upload_id: str) -> int:
        """What an earlier, cut call has stored: of this attempt, or of one whose executor has died."""
        try:
            status = await self._stub.QueryWriteStatus(
                artifact_pb2.QueryWriteStatusRequest(upload_id=upload_id), timeout=UNARY_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
                return 0
            raise
        return status.committed_bytes

    async def _again(self, attempt: Callable[[], Awaitable[None]], moved_bytes: Callable[[], int]) -> None:
        """Until it is done, fails for good, or nothing has moved for the patience. Raises JobFailure."""
        furthest, moved_at, number = 0, self._clock(), 0
        while True:
            try:
                return await attempt()
            except (grpc.aio.AioRpcError, TimeoutError, OSError, asyncio.InvalidStateError) as error:
                fault = _fault(error)
                if fault is None:
                    raise
                if moved_bytes() > furthest:
                    furthest, moved_at, number = moved_bytes(), self._clock(), 0
                pause_s = max(fault.retry_after_s, min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**number))
                pause_s *= 1.0 if fault.retry_after_s else self._jitter()
                if fault.is_final or self._clock() + pause_s - moved_at > self._patience_s:
                    raise fault.failure from error
            number = min(number + 1, 16)
            await asyncio.sleep(pause_s)


class _Download:
    """A blob's bytes on their way into a file, over as many calls as it takes."""

    def __init__(self, expected: common_pb2.Digest, target: Path) -> None:
        self.expected = expected
        self.size_bytes = 0
        self._target = target
        self._hash = hashlib.sha256()

    async def open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (0 if self.size_bytes else os.O_TRUNC)
        self._file = await asyncio.to_thread(os.open, self._target, flags, 0o600)

    def take(self, data: bytes) -> None:
        """In a thread. Only what is written is counted, so that a full disk costs a pause and not the blob."""
        view = memoryview(data)
        written = 0
        while written < len(view):
            written += os.pwrite(self._file, view[written:], self.size_bytes + written)
        self._hash.update(view)
        self.size_bytes += len(view)

    async def close(self) -> None:
        await asyncio.to_thread(os.close, self._file)

    def digest(self) -> common_pb2.Digest:
        return common_pb2.Digest(sha256=self._hash.hexdigest(), size_bytes=self.size_bytes)


class _Upload:
    """resumed_at: what was stored when the last call began. sent_bytes: the furthest that any call came."""

    def __init__(
        self, lease: job_pb2.Lease, digest: common_pb2.Digest, media_type: str, source: Path
    ) -> None:
        self.lease = lease
        self.digest = digest
        self.media_type = media_type
        self.source = source
        self.resumed_at = 0
        self.sent_bytes = 0


def _fault(error: Exception) -> Fault | None:
    """None: not one of the transfer."""
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        if error.errno not in DISK_FULL:
            return None
        return Fault(
            JobFailure(
                Code.DEPENDENCY_UNAVAILABLE,
                f"the executor's disk is full (RARA_EXECUTOR_DIR): {error.strerror}",
            )
        )
    return fault_of(error)


async def _chunks(
    upload_id: str, upload: _Upload, offset: int
) -> AsyncIterator[artifact_pb2.WriteBlobRequest]:
    size_bytes = upload.digest.size_bytes
    with await asyncio.to_thread(upload.source.open, "rb") as file:
        file.seek(offset)
        first = True
        while True:
            data = await asyncio.to_thread(file.read, CHUNK_BYTES)
            finish = not data or offset + len(data) >= size_bytes
            yield artifact_pb2.WriteBlobRequest(
                upload_id=upload_id if first else "", offset=offset, data=data, finish=finish
            )
            if finish:
                return
            first = False
            offset += len(data)
            upload.sent_bytes = max(upload.sent_bytes, offset)
