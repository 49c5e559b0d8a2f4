"""Uploads and downloads of artifact bytes: streamed, and resumed where they broke off."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import grpc.aio
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2

from rara_client.blobs import Check, digest_of, write_requests
from rara_client.calls import Calls
from rara_client.errors import (
    ArtifactMismatch,
    NotFound,
    RaraError,
    Refused,
    from_rpc_error,
    may_resume,
)

# The slowest transfer that is still one: below it a connection counts as stuck.
_MIN_BYTES_PER_S: Final = 64 * 1024
_GRACE_S: Final = 60.0

T = TypeVar("T")


def _may_go_on(fault: RaraError) -> bool:
    """Whether another call may go on with the transfer: the other side was away, busy, or has more than we thought."""
    return may_resume(fault) or fault.reason == "QUEUE_FULL" or "committed_bytes" in fault.metadata


class Transfers:
    """Moves blobs over the ArtifactService."""

    def __init__(self, stub: artifact_pb2_grpc.ArtifactServiceStub, calls: Calls) -> None:
        self._stub = stub
        self._calls = calls

    async def upload(self, source: Path | bytes, media_type: str) -> common_pb2.Digest:
        """Store a file or bytes unless they are stored already; their digest."""
        digest = await digest_of(source)
        for is_last in (False, True):
            upload_id = await self._begin(digest, media_type)
            if not upload_id:
                return digest
            offset, is_complete = await self._stored(upload_id)
            if is_complete:
                return digest
            try:
                await self._send(source, upload_id, offset, digest)
                return digest
            except (ArtifactMismatch, NotFound):
                # What an earlier client has left was wrong and is dropped, or its time ran out: once more, from the
                # beginning.
                if is_last or not offset:
                    raise
        raise AssertionError("the last turn returns or raises")

    async def _begin(self, digest: common_pb2.Digest, media_type: str) -> str:
        """An upload of the digest, new or left by a client that was cut off; empty: the blob is there."""
        created = await self._busy(
            lambda: self._calls.unary(
                self._stub.CreateUpload,
                artifact_pb2.CreateUploadRequest(digest=digest, media_type=media_type),
                is_repeatable=True,  # named by content: a second upload of the same bytes changes nothing
            )
        )
        if created.parts:
            raise Refused(
                "this scheduler wants the upload at presigned addresses, which this client cannot do",
                reason="FEATURE_DISABLED",
                status="UNIMPLEMENTED",
            )
        return created.upload_id

    async def _busy(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call that a scheduler may be too busy for."""
        pacing = self._calls.pacing
        failures = 0
        while True:
            try:
                return await call()
            except Refused as fault:
                failures += 1
                if failures > pacing.retries or fault.reason != "QUEUE_FULL":
                    raise
                pause_s = pacing.pause_s(failures, fault.retry_after_s)
            await pacing.sleep(pause_s)

    async def _stored(self, upload_id: str) -> tuple[int, bool]:
        """How many bytes an upload has, and whether it is done."""
        status = await self._calls.unary(
            self._stub.QueryWriteStatus,
            artifact_pb2.QueryWriteStatusRequest(upload_id=upload_id),
            is_repeatable=True,
        )
        return status.committed_bytes, status.complete

    async def _send(
        self, source: Path | bytes, upload_id: str, offset: int, digest: common_pb2.Digest
    ) -> None:
        pacing = self._calls.pacing
        failures = 0
        while True:
            try:
                verified = (await self._write(source, upload_id, offset, digest.size_bytes)).verified
                break
            except RaraError as fault:
                failures += 1
                if failures > pacing.retries or not _may_go_on(fault):
                    raise
                await pacing.sleep(pacing.pause_s(failures, fault.retry_after_s))
            stored, is_complete = await self._stored(upload_id)
            if is_complete:
                return
            if stored > offset:
                failures = 0
            offset = stored
        if verified.sha256 != digest.sha256:
            raise ArtifactMismatch(
                f"sent {digest.sha256}, but {verified.sha256 or 'nothing'} was verified",
                reason="ARTIFACT_MISMATCH",
                status="DATA_LOSS",
            )

    async def _write(
        self, source: Path | bytes, upload_id: str, offset: int, size_bytes: int
    ) -> artifact_pb2.WriteBlobResponse:
        timeout_s = _GRACE_S + size_bytes / _MIN_BYTES_PER_S
        call = self._stub.WriteBlob(timeout=timeout_s, metadata=self._calls.metadata)
        try:
            # Written one by one: an error of the file in a request iterator would show as a cancelled task.
            try:
                async for request in write_requests(source, upload_id, offset):
                    await call.write(request)
                await call.done_writing()
            except asyncio.InvalidStateError:
                pass  # the other side has ended the call early; its status says why, unless a write met the end:
                # then grpc.aio puts an INTERNAL of its own in its place, which the next call finds out about
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def download(self, digest: common_pb2.Digest) -> AsyncGenerator[bytes, None]:
        """The blob's bytes; raises ArtifactMismatch at the end if they are not the right ones."""
        pacing = self._calls.pacing
        check = Check(digest)
        failures = 0
        while True:
            try:
                async for data in self._read(digest, check.received_bytes):
                    failures = 0
                    check.take(data)
                    yield data
                break
            except RaraError as fault:
                failures += 1
                if failures > pacing.retries or not _may_go_on(fault):
                    raise
                await pacing.sleep(pacing.pause_s(failures, fault.retry_after_s))
        check.finish()

    async def _read(self, digest: common_pb2.Digest, offset: int) -> AsyncGenerator[bytes, None]:
        call = self._stub.ReadBlob(
            artifact_pb2.ReadBlobRequest(digest=digest, offset=offset),
            timeout=_GRACE_S + digest.size_bytes / _MIN_BYTES_PER_S,
            metadata=self._calls.metadata,
        )
        try:
            async for message in call:
                yield message.data
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
