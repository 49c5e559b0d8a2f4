"""Moving blobs in and out: bytes first, then the row that makes them count."""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime

import structlog
import uuid_utils

from rara_scheduler.blobs.admission import Admission, UploadLimits
from rara_scheduler.blobs.checks import BlobChecks
from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.port import BlobMismatch, BlobStore
from rara_scheduler.domain.errors import Code, Fault, FieldViolation
from rara_scheduler.store.blobs import (
    BlobBeingRemoved,
    BlobRows,
    Upload,
    UploadLease,
    UploadLeaseLost,
    UploadNotFound,
)

log = structlog.get_logger(__name__)

_CANDIDATES = 5  # open uploads of one digest that are looked at for one to go on with
_LOOKS_AT_ONCE = 16  # of one call
_REMOVAL_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class TransferLimits:
    uploads: UploadLimits = field(default_factory=UploadLimits)
    upload_expires_s: float = 24 * 3600.0  # from its creation, or from when it was taken up again
    max_transfers: int = 64  # at one time; an upload into a bucket holds a piece (8 MiB), others a message
    removal_wait_s: float = 5.0  # for a collection that removes the bytes which are to be uploaded
    lease_check_s: float = 5.0  # how often an upload's lease is looked at while its bytes come


@dataclass(frozen=True, slots=True)
class Piece:
    """The next bytes of an upload. offset: what is stored before them. finish: verify and keep."""

    offset: int
    data: bytes
    finish: bool


@dataclass(frozen=True, slots=True)
class Progress:
    """verified: the blob counts now."""

    committed_bytes: int
    verified: BlobDigest | None


class ArtifactNotFound(Fault):
    def __init__(self, sha256: str) -> None:
        super().__init__(Code.ARTIFACT_NOT_FOUND, f"there is no blob {sha256}", metadata={"sha256": sha256})


class BlobTransfers:
    """Uploads and downloads of one scheduler. Raises faults with codes of the contract, all of them `Fault`."""

    def __init__(
        self,
        store: BlobStore,
        rows: BlobRows,
        limits: TransferLimits | None = None,
        *,
        checks: BlobChecks | None = None,
    ) -> None:
        self._store = store
        self._rows = rows
        self._checks = checks or BlobChecks(store, rows)
        self._limits = limits or TransferLimits()
        self._admission = Admission(store, rows, self._limits.uploads)
        self._running = 0

    # ------------------------------------------------------------ what is there

    async def missing(self, digests: Sequence[BlobDigest]) -> list[BlobDigest]:
        """Those that do not count, or whose bytes are gone; in the given order."""
        known = await self._rows.known(digests)
        slots = asyncio.Semaphore(_LOOKS_AT_ONCE)  # a look at a store of objects takes its milliseconds

        async def is_stored(digest: BlobDigest) -> bool:
            async with slots:
                return await self._is_stored(digest)

        found = await asyncio.gather(*(is_stored(digest) for digest in known))
        there = {digest for digest, is_there in zip(known, found, strict=True) if is_there}
        return [digest for digest in digests if digest not in there]

    async def _is_stored(self, digest: BlobDigest) -> bool:
        return await self._store.size(digest.sha256) == digest.size_bytes

    async def check(self, digest: BlobDigest) -> int:
        """The size of a blob that counts. A size of 0 in `digest` asks for any. Raises ArtifactNotFound."""
        size_bytes = await self._rows.size_of(digest.sha256)
        if size_bytes is None or digest.size_bytes not in (0, size_bytes):
            raise ArtifactNotFound(digest.sha256)
        return size_bytes

    # ------------------------------------------------------------ uploads

    async def create_upload(
        self, digest: BlobDigest, lease: UploadLease | None
    ) -> tuple[str, datetime | None]:
        """The id of an upload and when it expires; an empty id when the blob is there already.

        One that was cut off, by the death of its caller or of the connection, is gone on with rather than begun
        again: by a later attempt of the same step, or by another client.
        """
        self._admission.check_size(digest)
        known_bytes = await self._rows.size_of(digest.sha256)
        if known_bytes is not None and known_bytes != digest.size_bytes:
            raise BlobMismatch(digest, f"the blob of this SHA-256 has {known_bytes} bytes")
        if known_bytes is not None:
            if await self._is_stored(digest):
                return "", None
            # While it counts, an upload of it would be taken for finished before its first byte.
            await self._checks.report(digest, "its bytes are gone")
        begun = await self._resumable(digest, lease)
        if begun is not None:
            return begun
        upload_id = str(uuid_utils.uuid7())
        return upload_id, await self._register(upload_id, digest, lease)

    async def _register(self, upload_id: str, digest: BlobDigest, lease: UploadLease | None) -> datetime:
        """When the upload expires. Waits a little for a collection that removes these bytes."""
        waited_s = 0.0
        while True:
            try:
                async with self._admission.place(digest, lease):
                    return await self._rows.create_upload(
                        upload_id, digest, lease, expires_s=self._limits.upload_expires_s
                    )
            except BlobBeingRemoved:
                if waited_s >= self._limits.removal_wait_s:
                    raise
            await asyncio.sleep(_REMOVAL_LOOK_S)
            waited_s += _REMOVAL_LOOK_S

    async def _resumable(
        self, digest: BlobDigest, lease: UploadLease | None
    ) -> tuple[str, datetime | None] | None:
        """An upload with some bytes that nobody writes. Two callers who get the same one write one after the other."""
        for upload_id in await self._rows.resumable_uploads(digest, lease, limit=_CANDIDATES):
            if not await self._store.uploaded_bytes(upload_id):
                continue
            if await self._store.is_being_written(upload_id):
                continue
            expires_at = await self._rows.adopt_upload(
                upload_id, lease, expires_s=self._limits.upload_expires_s
            )
            if expires_at is not None:
                return upload_id, expires_at
        return None

    async def status(self, upload_id: str) -> Progress:
        """Where to go on. Raises UploadNotFound."""
        upload = await self._upload(upload_id)
        if upload.is_complete:
            return Progress(upload.digest.size_bytes, upload.digest)
        committed_bytes = await self._store.uploaded_bytes(upload_id)
        if not committed_bytes and await self._is_stored(upload.digest):
            # All bytes came and were named, and then the row could not be written: `finish` is what is missing.
            committed_bytes = upload.digest.size_bytes
        return Progress(committed_bytes, None)

    async def write(self, upload_id: str, pieces: AsyncIterator[Piece]) -> Progress:
        """Store pieces until one says `finish` or they end. Wrong bytes are dropped together with their upload.

        What an upload has stored when its lease passes on stays for the next attempt.
        """
        upload = await self._writable(upload_id)
        if upload.is_complete:
            return Progress(upload.digest.size_bytes, upload.digest)
        with self._slot():
            try:
                return await self._store_pieces(upload_id, upload.digest, pieces)
            except BlobMismatch:
                await self._rows.delete_upload(upload_id)
                raise

    async def _store_pieces(
        self, upload_id: str, digest: BlobDigest, pieces: AsyncIterator[Piece]
    ) -> Progress:
        async with self._store.write(upload_id, digest) as writer:
            # Again: the call that we waited for may have finished the upload, or lost its lease.
            if (await self._writable(upload_id)).is_complete:
                return Progress(digest.size_bytes, digest)
            looked_at: float | None = None
            async for piece in pieces:
                if looked_at is None:
                    looked_at = time.monotonic()
                elif piece.finish or time.monotonic() - looked_at >= self._limits.lease_check_s:
                    await self._writable(upload_id)
                    looked_at = time.monotonic()
                committed_bytes = writer.committed_bytes
                if not committed_bytes and piece.offset == digest.size_bytes > 0 and piece.finish:
                    await self._adopt(digest)
                    break
                if piece.offset != committed_bytes:
                    raise wrong_offset(piece.offset, committed_bytes)
                if piece.data:
                    await writer.append(piece.data)
                if piece.finish:
                    await writer.keep()
                    break
            else:
                return Progress(writer.committed_bytes, None)
            # Inside the lock: until the row is there, no second call may take the upload for unfinished.
            await self._rows.record(digest, upload_id)
            await self._checks.hashed(digest)
        log.debug("blob.kept", sha256=digest.sha256, size_bytes=digest.size_bytes)
        return Progress(digest.size_bytes, digest)

    async def _adopt(self, digest: BlobDigest) -> None:
        """Take the stored bytes that an earlier call has named but could not record, if they are still right."""
        if not await self._is_stored(digest):
            raise wrong_offset(digest.size_bytes, 0)
        found = await self._store.fingerprint(digest.sha256)
        if not await self._store.verify(digest):
            await self._store.remove(digest.sha256, only=found)  # not what another upload stores meanwhile
            raise BlobMismatch(digest, "the stored bytes have changed; upload them again")

    async def _writable(self, upload_id: str) -> Upload:
        """Raises UploadNotFound or UploadLeaseLost."""
        upload = await self._upload(upload_id)
        if not upload.lease_is_current and not upload.is_complete:
            raise UploadLeaseLost(upload.step_run_id or "")
        return upload

    async def _upload(self, upload_id: str) -> Upload:
        try:
            canonical = str(uuid.UUID(upload_id))
        except ValueError:
            canonical = ""
        if canonical != upload_id:  # ids are opaque to callers: a strange one is just unknown
            raise UploadNotFound(upload_id[:64])
        return await self._rows.get_upload(upload_id)

    async def expire_uploads(self, *, limit: int = 100) -> int:
        """Remove up to `limit` uploads whose time is over, with their bytes; how many. For a sweep."""
        removed = 0
        for upload_id in await self._rows.expired_uploads(limit=limit):
            if await self._store.discard(upload_id):
                await self._rows.delete_upload(upload_id)
                removed += 1
        return removed

    # ------------------------------------------------------------ downloads

    async def read(self, digest: BlobDigest, offset: int, limit: int) -> AsyncGenerator[bytes, None]:
        """The bytes from `offset` on, `limit` of them at most, 0 for all; raises ArtifactNotFound, BlobMismatch.

        A whole blob is hashed on the way, and its last chunk given out only when the digest is right.
        """
        size_bytes = await self.check(digest)
        if offset > size_bytes:
            raise Fault(
                Code.FIELD_INVALID,
                f"offset: is beyond the blob's {size_bytes} bytes",
                fields=(FieldViolation("offset", f"is beyond the blob's {size_bytes} bytes"),),
                metadata={"size_bytes": str(size_bytes)},
            )
        whole = offset == 0 and (limit == 0 or limit >= size_bytes)
        with self._slot():
            try:
                async with aclosing(
                    self._store.read(digest.sha256, offset=offset, limit=limit or None)
                ) as stored:
                    chunks = self._checked(BlobDigest(digest.sha256, size_bytes), stored) if whole else stored
                    async with aclosing(chunks):
                        async for chunk in chunks:
                            yield chunk
            except FileNotFoundError:
                await self._checks.report(BlobDigest(digest.sha256, size_bytes), "its bytes are gone")
                raise ArtifactNotFound(digest.sha256) from None

    async def _checked(
        self, expected: BlobDigest, chunks: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        found = hashlib.sha256()
        held = b""
        async for chunk in chunks:
            if held:
                yield held
            await asyncio.to_thread(found.update, chunk)
            held = chunk
        if found.hexdigest() != expected.sha256:
            await self._checks.report(expected, "its bytes have changed")
            raise BlobMismatch(expected, "the stored bytes have changed")
        if held:
            yield held

    # ------------------------------------------------------------ bounds

    @contextmanager
    def _slot(self) -> Iterator[None]:
        if self._running >= self._limits.max_transfers:
            raise Fault(
                Code.QUEUE_FULL,
                f"{self._limits.max_transfers} blobs are being transferred already",
                retry_after_s=1.0,
            )
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def wrong_offset(offset: int, committed_bytes: int) -> Fault:
    description = f"is {offset}, and {committed_bytes} bytes are stored"
    return Fault(
        Code.FIELD_INVALID,
        f"offset: {description}",
        fields=(FieldViolation("offset", description),),
        metadata={"committed_bytes": str(committed_bytes)},
    )
