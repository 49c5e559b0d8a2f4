"""Uploads and downloads of artifact bytes: streamed, and resumed where they broke off."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

import grpc.aio
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2

from rara_client.blobs import Check, digest_of, write_requests
from rara_client.calls import Calls
from rara_client.errors import ArtifactMismatch, RaraError, Refused, from_rpc_error, may_resume

# The slowest transfer that is still one: below it a connection counts as stuck.
_MIN_BYTES_PER_S: Final = 64 * 1024
_GRACE_S: Final = 60.0


class Transfers:
    """Moves blobs over the ArtifactService."""

    def __init__(self, stub: artifact_pb2_grpc.ArtifactServiceStub, calls: Calls) -> None:
        self._stub = stub
        self._calls = calls

    async def upload(self, source: Path | bytes, media_type: str) -> common_pb2.Digest:
        """Store a file or bytes unless they are stored already; their digest."""
        digest = await digest_of(source)
        created = await self._calls.unary(
            self._stub.CreateUpload,
            artifact_pb2.CreateUploadRequest(digest=digest, media_type=media_type),
            is_repeatable=True,  # named by content: a second upload of the same bytes changes nothing
        )
        if not created.upload_id:
            return digest
        if created.parts:
            raise Refused(
                "this scheduler wants the upload at presigned addresses, which this client cannot do",
                reason="FEATURE_DISABLED",
                status="UNIMPLEMENTED",
            )
        verified = await self._send(source, created.upload_id, digest)
        if verified.sha256 != digest.sha256:
            raise ArtifactMismatch(
                f"sent {digest.sha256}, but {verified.sha256 or 'nothing'} was verified",
                reason="ARTIFACT_MISMATCH",
                status="DATA_LOSS",
            )
        return digest

    async def _send(
        self, source: Path | bytes, upload_id: str, digest: common_pb2.Digest
    ) -> common_pb2.Digest:
        pacing = self._calls.pacing
        offset = failures = 0
        while True:
            try:
                return (await self._write(source, upload_id, offset, digest.size_bytes)).verified
            except RaraError as fault:
                failures += 1
                if failures > pacing.retries or not may_resume(fault):
                    raise
                await pacing.sleep(pacing.pause_s(failures, fault.retry_after_s))
            status = await self._calls.unary(
                self._stub.QueryWriteStatus,
                artifact_pb2.QueryWriteStatusRequest(upload_id=upload_id),
                is_repeatable=True,
            )
            if status.complete:
                return digest
            if status.committed_bytes > offset:
                offset, failures = status.committed_bytes, 0

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
                if failures > pacing.retries or not may_resume(fault):
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
