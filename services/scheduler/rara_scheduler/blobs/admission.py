"""Whether one more upload may begin: the bounds on blobs, attempts, uploads under way and the store as a whole."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.port import BlobStore
from rara_scheduler.domain.errors import Code, Fault, FieldViolation
from rara_scheduler.store.blobs import BlobRows, UploadLease

GIB = 1024 * 1024 * 1024
_LOOK_EVERY_S = 5.0  # what other schedulers have admitted is seen after this
_LONG_LOOK_S = 0.1  # with a quota, a look reads a row for each blob
_ROOM_RETRY_S = 30.0  # room comes when somebody makes it, not in the next second


@dataclass(frozen=True, slots=True)
class UploadLimits:
    """max_attempt_bytes: all that one lease uploads. quota_bytes: of all blobs; None: as the disk has."""

    max_blob_bytes: int = 100 * GIB
    max_attempt_bytes: int = 1024 * GIB
    max_lease_uploads: int = 256
    max_open_uploads: int = 10_000
    quota_bytes: int | None = None


def too_large(field: str, size_bytes: int, limit_bytes: int, what: str) -> Fault:
    """Final: the same bytes are too large the next time as well."""
    description = f"{what} has {size_bytes} bytes, and the limit is {limit_bytes}"
    return Fault(
        Code.ARTIFACT_TOO_LARGE,
        f"{field}: {description}",
        fields=(FieldViolation(field, description),),
        metadata={"size_bytes": str(size_bytes), "limit_bytes": str(limit_bytes)},
    )


def no_room(digest: BlobDigest, free_bytes: int, **metadata: int) -> Fault:
    """Not final: room may be made."""
    shown = {"size_bytes": digest.size_bytes, "free_bytes": free_bytes, **metadata}
    return Fault(
        Code.QUOTA_EXCEEDED,
        f"the blob has {digest.size_bytes} bytes, and the store has room for {free_bytes}",
        metadata={key: str(value) for key, value in shown.items()},
        retry_after_s=_ROOM_RETRY_S,
    )


def too_many(what: str, limit: int) -> Fault:
    return Fault(
        Code.QUEUE_FULL, f"{limit} {what} already", metadata={"limit": str(limit)}, retry_after_s=1.0
    )


@dataclass(frozen=True, slots=True)
class _Load:
    uploads: int = 0
    size_bytes: int = 0

    def __add__(self, other: "_Load") -> "_Load":
        return _Load(self.uploads + other.uploads, self.size_bytes + other.size_bytes)

    def __sub__(self, other: "_Load") -> "_Load":
        return _Load(self.uploads - other.uploads, self.size_bytes - other.size_bytes)


class Admission:
    """Counts what this scheduler admits on top of what it last saw in the database, and looks before it refuses.

    One look at a time, and where looks take long they take a fifth of the time: what is refused between two of them
    is refused by the last one.

    Several schedulers may together admit a little more than the store's bounds, by what they take in within the
    seconds between two looks.
    """

    def __init__(
        self,
        store: BlobStore,
        rows: BlobRows,
        limits: UploadLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rows = rows
        self._limits = limits
        self._clock = clock
        self._seen = _Load()  # in the database, when it was last looked at
        self._admitted = _Load()  # since this scheduler began
        self._admitted_then = _Load()
        self._unwritten = _Load()  # admitted, and perhaps without a row yet
        self._looked_at: float | None = None
        self._looks = 0
        self._look_took_s = 0.0
        self._looking = asyncio.Lock()

    def check_size(self, digest: BlobDigest) -> None:
        """Raises ARTIFACT_TOO_LARGE."""
        if digest.size_bytes > self._limits.max_blob_bytes:
            raise too_large(
                "digest.size_bytes", digest.size_bytes, self._limits.max_blob_bytes, "an artifact"
            )

    @asynccontextmanager
    async def place(self, digest: BlobDigest, lease: UploadLease | None) -> AsyncIterator[None]:
        """Room for an upload whose row is written inside. Raises ARTIFACT_TOO_LARGE, QUEUE_FULL or QUOTA_EXCEEDED."""
        if lease is not None:
            await self._check_lease(digest, lease)
        if self._is_old() or self._refusal(digest):
            await self._look()
        if refusal := self._refusal(digest):
            raise refusal
        upload = _Load(1, digest.size_bytes)
        self._admitted += upload
        self._unwritten += upload
        try:
            free_bytes = await self._store.free_bytes()
            if free_bytes is not None and free_bytes < digest.size_bytes:
                raise no_room(digest, free_bytes)
            yield
        finally:
            self._unwritten -= upload

    async def _check_lease(self, digest: BlobDigest, lease: UploadLease) -> None:
        limits = self._limits
        open_uploads, named_bytes = await self._rows.lease_load(lease.lease_token)
        if named_bytes + digest.size_bytes > limits.max_attempt_bytes:
            raise too_large(
                "digest.size_bytes",
                named_bytes + digest.size_bytes,
                limits.max_attempt_bytes,
                "the attempt with this artifact",
            )
        if open_uploads >= limits.max_lease_uploads:
            raise too_many("uploads are open under this lease", limits.max_lease_uploads)

    def _refusal(self, digest: BlobDigest) -> Fault | None:
        limits = self._limits
        load = self._seen + self._admitted - self._admitted_then
        if load.uploads >= limits.max_open_uploads:
            return too_many("uploads are open", limits.max_open_uploads)
        quota_bytes = limits.quota_bytes
        if quota_bytes is not None and load.size_bytes + digest.size_bytes > quota_bytes:
            return no_room(digest, max(0, quota_bytes - load.size_bytes), quota_bytes=quota_bytes)
        return None

    def _is_old(self) -> bool:
        looked_at = self._looked_at
        return looked_at is None or self._clock() - looked_at > _LOOK_EVERY_S

    def _is_resting(self) -> bool:
        if self._looked_at is None or self._look_took_s <= _LONG_LOOK_S:
            return False
        return self._clock() - self._looked_at < 4 * self._look_took_s

    async def _look(self) -> None:
        """What has no row yet may be counted twice, and is never left out."""
        looks = self._looks
        async with self._looking:
            if self._looks != looks or self._is_resting():
                return  # what somebody else found while this one waited is new enough
            admitted, unwritten = self._admitted, self._unwritten
            began_at = self._clock()
            load = await self._rows.store_load(with_blobs=self._limits.quota_bytes is not None)
            self._seen = _Load(*load) + unwritten
            self._admitted_then = admitted
            self._looked_at = self._clock()
            self._look_took_s = self._looked_at - began_at
            self._looks += 1
