"""What the scheduler needs from a store of blobs, and how such a store fails."""

from collections.abc import AsyncGenerator, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.domain.errors import Code, Fault

LISTED_AT_ONCE: Final = 1000  # the most that a page of a listing holds


@dataclass(frozen=True, slots=True)
class StoredBlob:
    """What lies under a blob's name, unread: its bytes may be others. modified_at: by the store's own clock."""

    sha256: str
    size_bytes: int
    modified_at: datetime


@dataclass(frozen=True, slots=True)
class Leftover:
    """What an upload has stored so far, whether anybody goes on with it or not."""

    upload_id: str
    size_bytes: int
    modified_at: datetime


class BlobMismatch(Fault):
    """The bytes are not what their digest says: nothing of them was kept."""

    def __init__(self, expected: BlobDigest, found: str) -> None:
        super().__init__(
            Code.ARTIFACT_MISMATCH,
            f"blob {expected.sha256} of {expected.size_bytes} bytes: {found}",
            metadata={"sha256": expected.sha256, "size_bytes": str(expected.size_bytes)},
        )


class BlobStoreUnavailable(Fault):
    """The store cannot be read or written now (a full disk, a missing mount): nothing was decided, try again."""

    def __init__(self, cause: str) -> None:
        super().__init__(
            Code.STORE_UNAVAILABLE, f"the blob store does not answer: {cause}", retry_after_s=5.0
        )


class RemovalUnknown(BlobStoreUnavailable):
    """A removal was begun, and had no answer: it may have happened, and may still happen."""


class UploadBusy(Fault):
    """Another call still writes this upload, such as one whose connection has died without a word."""

    def __init__(self, upload_id: str) -> None:
        super().__init__(
            Code.STORE_UNAVAILABLE, f"upload {upload_id} is being written by another call", retry_after_s=1.0
        )


class BlobWriter(Protocol):
    """One upload, held by this caller alone."""

    @property
    def committed_bytes(self) -> int:
        """What is stored so far; bytes of earlier, broken calls are included."""

    async def append(self, data: bytes) -> None:
        """Store the next bytes. Raises BlobMismatch, and keeps nothing, when they exceed the digest's size."""

    async def keep(self) -> None:
        """Make the upload the blob of its digest, durably. Raises BlobMismatch, and keeps nothing, otherwise."""


class BlobStore(Protocol):
    """Bytes by content. Whether a blob counts is told by its row in the database, never by a file alone."""

    removal_s: float
    """Bytes whose removal was begun so long ago are gone or stay, also where its caller died or had no answer."""

    async def prepare(self) -> None:
        """Look whether it can be used, before anything depends on it. Raises BlobStoreUnavailable."""

    def close(self) -> None:
        """Let go of threads and connections."""

    def write(self, upload_id: str, expected: BlobDigest) -> AbstractAsyncContextManager[BlobWriter]:
        """Begin or go on with an upload. Raises UploadBusy when it stays with another caller."""

    async def uploaded_bytes(self, upload_id: str) -> int:
        """What a `write` would start from; 0 for an unknown upload."""

    async def is_being_written(self, upload_id: str) -> bool:
        """Whether a caller holds the upload at this moment, as far as this process can tell."""

    async def discard(self, upload_id: str) -> bool:
        """Drop what an upload has stored, if anything. False: a caller still writes it, and it was left."""

    async def size(self, sha256: str) -> int | None:
        """Size in bytes, or None when there is no such blob. Does not read it."""

    async def fingerprint(self, sha256: str) -> Hashable | None:
        """What differs whenever the stored bytes were written again; None: there is no such blob. Reads nothing."""

    def read(self, sha256: str, *, offset: int = 0, limit: int | None = None) -> AsyncGenerator[bytes, None]:
        """Chunks of at most 256 KiB; close it when done. Raises FileNotFoundError when there is no such blob."""

    async def verify(self, expected: BlobDigest) -> bool:
        """Read the whole blob: False when it is missing or its bytes have changed."""

    async def remove(self, sha256: str, *, only: Hashable | None = None, until: float | None = None) -> bool:
        """Delete a blob; True: there is none now, and no removal is under way. Raises RemovalUnknown.

        only: unless it was stored again and has another fingerprint. until: of time.monotonic(), and none is begun
        after it.
        """

    async def free_bytes(self) -> int | None:
        """Room for more; None: nobody can say, as with an object store."""

    def stored(self) -> AsyncGenerator[Sequence[StoredBlob], None]:
        """Every blob, page by page, in no order. What comes or goes meanwhile is listed or not.

        `keep` renews a blob's time even where the same bytes were there already, so that an old time means that
        no upload is just about to record it.
        """

    def leftovers(self) -> AsyncGenerator[Sequence[Leftover], None]:
        """Every upload that has something stored, page by page; one may come twice, with a part of it each time."""
