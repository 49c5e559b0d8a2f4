"""ArtifactService: blobs by digest, streamed in both directions."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import artifact_pb2 as pb
from rara.v1 import artifact_pb2_grpc, common_pb2, job_pb2

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.transfers import BlobTransfers, Piece
from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.domain.tokens import Token
from rara_scheduler.store.blobs import UploadLease, UploadLeaseLost
from rara_scheduler.telemetry.port import SILENT, Metrics
from rara_scheduler.transport.auth import uploads_under_lease
from rara_scheduler.transport.status import abort, answers, internal_fault, streams

MAX_DIGESTS: Final = 1000  # in one FindMissingBlobs
MAX_MEDIA_TYPE_CHARS: Final = 255
PIECE_WAIT_S: Final = 60.0  # the longest silence of an uploader; its hold on the upload ends with the call

WriteContext: TypeAlias = grpc.aio.ServicerContext[
    AsyncIterator[pb.WriteBlobRequest], Awaitable[pb.WriteBlobResponse]
]


class ArtifactServicer(artifact_pb2_grpc.ArtifactServiceServicer):
    """Put it on the scheduler's port; callers use a channel of its own, so that no heartbeat waits for a blob."""

    def __init__(
        self,
        transfers: BlobTransfers,
        *,
        piece_wait_s: float = PIECE_WAIT_S,
        holds_lease: Callable[[str, int, Token], Awaitable[bool]] | None = None,
        metrics: Metrics = SILENT,
    ) -> None:
        """holds_lease: whether a step's lease is a token's bearer's; asked where callers have tokens."""
        self._metrics = metrics
        self._transfers = transfers
        self._piece_wait_s = piece_wait_s
        self._holds_lease = holds_lease

    @answers
    async def FindMissingBlobs(
        self,
        request: pb.FindMissingBlobsRequest,
        context: grpc.aio.ServicerContext[pb.FindMissingBlobsRequest, Awaitable[pb.FindMissingBlobsResponse]],
    ) -> pb.FindMissingBlobsResponse:
        if len(request.digests) > MAX_DIGESTS:
            raise field_invalid("digests", f"at most {MAX_DIGESTS} in one call")
        digests = [digest_of(digest, f"digests[{at}]") for at, digest in enumerate(request.digests)]
        missing = await self._transfers.missing(digests)
        return pb.FindMissingBlobsResponse(missing=[digest_message(digest) for digest in missing])

    @answers
    async def CreateUpload(
        self,
        request: pb.CreateUploadRequest,
        context: grpc.aio.ServicerContext[pb.CreateUploadRequest, Awaitable[pb.CreateUploadResponse]],
    ) -> pb.CreateUploadResponse:
        if len(request.media_type) > MAX_MEDIA_TYPE_CHARS:
            raise field_invalid("media_type", f"at most {MAX_MEDIA_TYPE_CHARS} characters")
        digest = digest_of(request.digest, "digest")
        lease = lease_of(request.lease) if request.HasField("lease") else None
        await self._require_own(lease)
        upload_id, expires_at = await self._transfers.create_upload(digest, lease)
        response = pb.CreateUploadResponse(upload_id=upload_id)
        if expires_at is not None:
            shown = Timestamp()
            shown.FromDatetime(expires_at)
            response.expires_at.CopyFrom(shown)
        return response

    async def _require_own(self, lease: UploadLease | None) -> None:
        """An executor uploads under a lease that it holds."""
        token = uploads_under_lease()
        if token is None:
            return
        if lease is None:
            raise Fault(
                Code.NOT_ALLOWED,
                "lease: an executor's token uploads under a lease",
                metadata={"field": "lease"},
            )
        if self._holds_lease and not await self._holds_lease(lease.step_run_id, lease.lease_token, token):
            raise UploadLeaseLost(lease.step_run_id)

    async def WriteBlob(
        self, request_iterator: AsyncIterator[pb.WriteBlobRequest], context: WriteContext
    ) -> pb.WriteBlobResponse:
        """Not bounded as other calls are: a large blob takes its time, and only silence ends it."""
        try:
            response = await self._write_blob(request_iterator)
        except Fault as fault:
            await abort(context, fault)
        except Exception as error:
            await abort(context, internal_fault("ArtifactServicer.WriteBlob", error))
        return response

    async def _write_blob(self, messages: AsyncIterator[pb.WriteBlobRequest]) -> pb.WriteBlobResponse:
        first = await self._next(messages)
        if first is None or not first.upload_id:
            raise field_invalid("upload_id", "must be in the first message")
        async with aclosing(self._pieces(first, messages)) as pieces:
            progress = await self._transfers.write(first.upload_id, pieces)
        return pb.WriteBlobResponse(
            committed_bytes=progress.committed_bytes,
            verified=None if progress.verified is None else digest_message(progress.verified),
        )

    async def _pieces(
        self, first: pb.WriteBlobRequest, rest: AsyncIterator[pb.WriteBlobRequest]
    ) -> AsyncGenerator[Piece, None]:
        message: pb.WriteBlobRequest | None = first
        while message is not None:
            if message.upload_id not in ("", first.upload_id):
                raise field_invalid("upload_id", "must not change within a call")
            self._metrics.transferred("up", len(message.data))
            yield Piece(offset=message.offset, data=message.data, finish=message.finish)
            message = await self._next(rest)

    async def _next(self, messages: AsyncIterator[pb.WriteBlobRequest]) -> pb.WriteBlobRequest | None:
        """The next message, None at the end. Raises a fault when none comes in time."""
        reading = asyncio.ensure_future(anext(messages, None))
        try:
            # Not asyncio.timeout: cancelling the read would cancel the call, and the caller would not be told why.
            done, _ = await asyncio.wait({reading}, timeout=self._piece_wait_s)
            if not done:
                raise Fault(
                    Code.STORE_UNAVAILABLE,
                    f"no bytes came for {self._piece_wait_s:g} s: go on from QueryWriteStatus",
                    retry_after_s=1.0,
                )
            return reading.result()
        finally:
            reading.cancel()

    @answers
    async def QueryWriteStatus(
        self,
        request: pb.QueryWriteStatusRequest,
        context: grpc.aio.ServicerContext[pb.QueryWriteStatusRequest, Awaitable[pb.QueryWriteStatusResponse]],
    ) -> pb.QueryWriteStatusResponse:
        progress = await self._transfers.status(request.upload_id)
        return pb.QueryWriteStatusResponse(
            committed_bytes=progress.committed_bytes, complete=progress.verified is not None
        )

    @answers
    async def CompleteUpload(
        self,
        request: pb.CompleteUploadRequest,
        context: grpc.aio.ServicerContext[pb.CompleteUploadRequest, Awaitable[pb.CompleteUploadResponse]],
    ) -> pb.CompleteUploadResponse:
        raise Fault(Code.FEATURE_DISABLED, "this blob store takes no presigned parts: use WriteBlob")

    @answers
    async def GetDownload(
        self,
        request: pb.GetDownloadRequest,
        context: grpc.aio.ServicerContext[pb.GetDownloadRequest, Awaitable[pb.GetDownloadResponse]],
    ) -> pb.GetDownloadResponse:
        await self._transfers.check(digest_of(request.digest, "digest"))
        return pb.GetDownloadResponse()  # no url: ReadBlob

    @streams
    async def ReadBlob(
        self,
        request: pb.ReadBlobRequest,
        context: grpc.aio.ServicerContext[pb.ReadBlobRequest, AsyncIterator[pb.ReadBlobResponse]],
    ) -> AsyncIterator[pb.ReadBlobResponse]:
        if request.offset < 0:
            raise field_invalid("offset", "must not be negative")
        if request.limit < 0:
            raise field_invalid("limit", "must not be negative")
        digest = digest_of(request.digest, "digest")
        async with aclosing(self._transfers.read(digest, request.offset, request.limit)) as chunks:
            async for chunk in chunks:
                self._metrics.transferred("down", len(chunk))
                yield pb.ReadBlobResponse(data=chunk)


def digest_of(message: common_pb2.Digest, path: str) -> BlobDigest:
    """Raises a fault that names the field below `path`."""
    if message.size_bytes < 0:
        raise field_invalid(f"{path}.size_bytes", "must not be negative")
    try:
        return BlobDigest(message.sha256, message.size_bytes)
    except ValueError as error:
        raise field_invalid(f"{path}.sha256", str(error)) from None


def digest_message(digest: BlobDigest) -> common_pb2.Digest:
    return common_pb2.Digest(sha256=digest.sha256, size_bytes=digest.size_bytes)


def lease_of(message: job_pb2.Lease) -> UploadLease:
    """Raises a fault that names the field."""
    try:
        step_run_id = str(uuid.UUID(message.step_run_id))
    except ValueError:
        raise field_invalid("lease.step_run_id", "is not the id of a step run") from None
    if message.lease_token < 1:
        raise field_invalid("lease.lease_token", "must be positive")
    return UploadLease(step_run_id, message.lease_token)
