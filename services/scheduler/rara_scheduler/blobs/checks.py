"""Whether stored bytes are still what their digest says, without reading each blob at each commit."""

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Iterable

import structlog

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.port import BlobStore, BlobStoreUnavailable
from rara_scheduler.store.blobs import BlobRows

log = structlog.get_logger(__name__)

MAX_REMEMBERED = 10_000
_CHECKS_AT_ONCE = 4
# A larger blob that this process has not written or read is taken by its size: to read it would hold its step up
# for minutes. Whoever reads it later hashes it all the same.
MAX_UNKNOWN_BYTES = 1 << 30


class BlobChecks:
    """Remembers how a blob's file looked when its bytes were last hashed, and hashes again what looks different.

    A change that leaves no trace in the file's facts, such as a dying disk's, is found when the blob is read.
    """

    def __init__(self, store: BlobStore, rows: BlobRows) -> None:
        self._store = store
        self._rows = rows
        self._hashed: OrderedDict[BlobDigest, Hashable] = OrderedDict()

    async def hashed(self, digest: BlobDigest) -> None:
        """Its bytes have just been hashed, and are right; and its row says so.

        Raises BlobStoreUnavailable when they are gone again: a collection of garbage was about to remove them when
        they came, and no store of objects can be told to remove others than these.
        """
        fingerprint = await self._store.fingerprint(digest.sha256)
        if fingerprint is None and await self.report(
            digest, "its bytes were removed while they were stored again"
        ):
            raise BlobStoreUnavailable("the bytes were removed as garbage just now; upload them again")
        self._remember(digest, fingerprint)

    async def damaged(self, digests: Iterable[BlobDigest]) -> list[BlobDigest]:
        """Of the blobs that count, those whose bytes have changed.

        They count as missing from now on, so that a new upload can heal them; so do those whose bytes are gone.
        """
        wanted = list(dict.fromkeys(digests))
        known = await self._rows.known(wanted)
        slots = asyncio.Semaphore(_CHECKS_AT_ONCE)  # a look at a store of objects takes its milliseconds

        async def is_damaged(digest: BlobDigest) -> bool:
            async with slots:
                return await self._is_damaged(digest)

        looked_at = [digest for digest in wanted if digest in known]
        found = await asyncio.gather(*(is_damaged(digest) for digest in looked_at))
        return [digest for digest, damaged in zip(looked_at, found, strict=True) if damaged]

    async def _is_damaged(self, digest: BlobDigest) -> bool:
        fingerprint = await self._store.fingerprint(digest.sha256)
        before = self._hashed.get(digest)
        if fingerprint is not None and fingerprint == before:
            self._remember(digest, fingerprint)
            return False
        size_bytes = await self._store.size(digest.sha256)
        if size_bytes is None:
            await self.report(digest, "its bytes are gone")
            return False
        is_right = size_bytes == digest.size_bytes
        if is_right and (before is not None or size_bytes <= MAX_UNKNOWN_BYTES):
            is_right = await self._store.verify(digest)
        if not is_right:
            return await self.report(digest, "its bytes have changed")
        self._remember(digest, fingerprint)  # as it looked before it was read
        return False

    async def report(self, digest: BlobDigest, damage: str) -> bool:
        """Count it as missing, so that a new upload heals it. False: it was stored again since somebody looked.

        Looked at once more, since a removed blob may be uploaded and named by a manifest at any moment: the mark is
        for what counted before this look, and not for what counts since.
        """
        before = await self._rows.now()
        if await self._store.verify(digest):
            return False
        log.error("blob.damaged", sha256=digest.sha256, damage=damage)
        self._hashed.pop(digest, None)
        await self._rows.mark(digest.sha256, before)
        return True

    def _remember(self, digest: BlobDigest, fingerprint: Hashable | None) -> None:
        if fingerprint is None:
            return
        self._hashed[digest] = fingerprint
        self._hashed.move_to_end(digest)
        while len(self._hashed) > MAX_REMEMBERED:
            self._hashed.popitem(last=False)
