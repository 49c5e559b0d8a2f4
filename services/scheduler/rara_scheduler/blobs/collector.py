"""Garbage collection of blobs: marks what nothing refers to, waits, looks again, and removes bytes before rows."""

import asyncio
import time
import uuid
from collections.abc import Callable, Hashable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum, auto
from typing import Final

import structlog

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.port import BlobStore, RemovalUnknown, StoredBlob
from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.blobs import BlobRows
from rara_scheduler.store.garbage import Claim, GarbageRows, Looked

log = structlog.get_logger(__name__)

_PAGE: Final = 500  # rows looked at in one statement
_CLAIM: Final = 32  # blobs removed at one time, and refused to uploads for a while when their collector dies
BEGIN_S: Final = (
    25.0  # after its claim a removal may begin so long: for two looks at an object, of 10 s at most
)
_GIVE_UP: Final = 10  # claims in a row of which nothing could be removed: the store is away
_SAMPLE: Final = 20  # rows whose bytes are looked for where the store seems to have none of ours
_ERRORS_KEPT: Final = 20


class StrangeStore(Exception):
    """Most of what is stored is unknown to this database, or nothing that it knows is stored: another one's store."""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}: is it the one that this store is for?")


@dataclass(slots=True)
class Amount:
    count: int = 0
    size_bytes: int = 0

    def add(self, blobs: Iterable[BlobDigest]) -> None:
        for blob in blobs:
            self.count += 1
            self.size_bytes += blob.size_bytes


@dataclass(slots=True)
class Collected:
    """What was found and done so far.

    kept: blobs that are needed, or were used lately. unused: blobs that nothing refers to; of a dry run too.
    orphans: stored bytes that no row knows. removed: of both, and of what earlier collections had marked.
    pending: marked, and left for the next collection: an upload of it is open, or somebody else is at it.
    """

    kept: Amount = field(default_factory=Amount)
    unused: Amount = field(default_factory=Amount)
    orphans: Amount = field(default_factory=Amount)
    removed: Amount = field(default_factory=Amount)
    uploads: Amount = field(default_factory=Amount)  # what dead ones have left
    pending: int = 0
    errors: list[str] = field(default_factory=list)
    failures: int = 0
    took_s: float = 0.0

    def fail(self, error: str) -> None:
        self.failures += 1
        if len(self.errors) < _ERRORS_KEPT:
            self.errors.append(error)


@dataclass(frozen=True, slots=True)
class Policy:
    """unused_s: how long a blob must not have been used. grace_s: between marking it and removing its bytes."""

    unused_s: float = 24 * 3600.0
    grace_s: float = 60.0
    is_dry: bool = False
    any_store: bool = False  # also where most of what is stored is unknown


class _Fate(Enum):
    """What became of a claimed blob's bytes."""

    GONE = auto()
    SPARED = auto()  # they are there, and no removal is under way
    UNKNOWN = auto()


class Collector:
    """One collection. Any number may run at once, beside schedulers at work, and end at any moment."""

    def __init__(
        self,
        store: BlobStore,
        garbage: GarbageRows,
        rows: BlobRows,
        policy: Policy,
        *,
        begin_s: float = BEGIN_S,
        say: Callable[[str], None] = log.info,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._garbage = garbage
        self._rows = rows
        self._policy = policy
        self._begin_s = begin_s
        self._say = say
        self._now = now
        self.collected = Collected()

    async def run(self) -> Collected:
        """Raises StrangeStore before anything is removed, and Fault when database or store are away."""
        began = time.monotonic()
        try:
            await self._find_orphans()
            await self._remove_uploads()
            await self._mark_unused()
            if not self._policy.is_dry:
                await self._wait()
                await self._remove_marked()
        finally:
            self.collected.took_s = time.monotonic() - began
        return self.collected

    # ------------------------------------------------------------ mark

    async def _mark_unused(self) -> None:
        found, after = self.collected, ""
        while page := await self._garbage.page(after, limit=_PAGE, unused_s=self._policy.unused_s):
            after = page[-1].digest.sha256
            unused = [row.digest for row in page if row.is_unused and not row.is_marked]
            marked = unused
            if unused and not self._policy.is_dry:
                marked = await self._garbage.mark(
                    [digest.sha256 for digest in unused], unused_s=self._policy.unused_s
                )
            found.unused.add(marked)
            gone = {digest.sha256 for digest in marked}
            found.kept.add(row.digest for row in page if not row.is_marked and row.digest.sha256 not in gone)
            found.pending += sum(row.is_marked for row in page)

    async def _find_orphans(self) -> None:
        """Twice through the list of what is stored: first to see whether it is this database's, then to mark."""
        known, unknown = 0, 0
        async with aclosing(self._store.stored()) as pages:
            async for page in pages:
                strange = await self._garbage.unknown([blob.sha256 for blob in page])
                unknown += len(strange)
                known += len(page) - len(strange)
                if self._policy.is_dry:
                    self.collected.orphans.add(self._old(page, strange))
        if not self._policy.any_store:
            if unknown > known:
                raise StrangeStore(f"of {known + unknown} stored blobs, this database knows {known}")
            if not known and (lost := await self._lost()):
                raise StrangeStore(f"of {lost} blobs that this database knows, none is stored here")
        if unknown and not self._policy.is_dry:
            await self._adopt_orphans()

    async def _lost(self) -> int:
        """How many of a few blobs that count have no bytes here; 0 as soon as one has."""
        rows = {row.digest for row in await self._sample()}
        for digest in rows:
            if await self._store.size(digest.sha256) is not None:
                return 0
        # Another collection may have removed them meanwhile, rows and all.
        return len(rows & {row.digest for row in await self._sample()})

    async def _sample(self) -> list[Looked]:
        page = await self._garbage.page("", limit=_PAGE, unused_s=self._policy.unused_s)
        return [row for row in page if row.digest.size_bytes and not row.is_marked][:_SAMPLE]

    async def _adopt_orphans(self) -> None:
        async with aclosing(self._store.stored()) as pages:
            async for page in pages:
                strange = await self._garbage.unknown([blob.sha256 for blob in page])
                if orphans := list(self._old(page, strange)):
                    self.collected.orphans.add(await self._garbage.adopt(orphans))

    def _old(self, page: Iterable[StoredBlob], wanted: set[str]) -> Iterable[BlobDigest]:
        """Those of a page that lie there long enough. By the store's clock: no lock hangs on it, only patience."""
        limit = self._now() - timedelta(seconds=self._policy.unused_s)
        return (
            BlobDigest(blob.sha256, blob.size_bytes)
            for blob in page
            if blob.sha256 in wanted and blob.modified_at <= limit
        )

    # ------------------------------------------------------------ remove

    async def _wait(self) -> None:
        """Until all that was marked just now is old enough."""
        new = self.collected.unused.count + self.collected.orphans.count
        if new and self._policy.grace_s > 0:
            self._say(f"marked {new} blobs; waiting {self._policy.grace_s:g} s before their bytes go")
            await asyncio.sleep(self._policy.grace_s)

    async def _remove_marked(self) -> None:
        after, seen, done, in_vain = "", 0, 0, 0
        while page := await self._garbage.marked(after, limit=_CLAIM, grace_s=self._policy.grace_s):
            after = page[-1]
            seen += len(page)
            failures = self.collected.failures
            removed = await self._remove(page)
            done += removed
            in_vain = in_vain + 1 if not removed and self.collected.failures > failures else 0
            if in_vain == _GIVE_UP:
                self.collected.fail(f"nothing of {_GIVE_UP * _CLAIM} blobs in a row could be removed")
                break
        self.collected.pending = seen - done

    async def _remove(self, sha256s: list[str]) -> int:
        """Bytes first, then rows: a crash in between leaves rows that are marked, and a later collection goes on.

        No lock is held meanwhile. The claim lasts longer than any removal that was begun in its time.
        """
        until = time.monotonic() + self._begin_s  # before the claim is there
        claim = await self._garbage.claim(
            sha256s, grace_s=self._policy.grace_s, removal_s=self._begin_s + self._store.removal_s
        )
        if claim is None:
            return 0
        fates = await self._remove_claimed(claim, until)
        gone = [blob for blob, fate in fates.items() if fate is _Fate.GONE]
        spared = [blob.sha256 for blob, fate in fates.items() if fate is _Fate.SPARED]
        await self._garbage.settle(claim, gone=[blob.sha256 for blob in gone], spared=spared)
        self.collected.removed.add(gone)
        return len(gone)

    async def _remove_claimed(self, claim: Claim, until: float) -> dict[BlobDigest, _Fate]:
        """All at once, so that two looks at each fit in a claim's time however slow the store is."""
        prints = await asyncio.gather(*(self._look(blob) for blob in claim.blobs))
        # Looked at under the claim, as this shows: whatever is stored under these names later looks different.
        claimed = await self._garbage.still_claimed(claim)
        found = {blob: each for blob, each in zip(claim.blobs, prints, strict=True) if blob.sha256 in claimed}
        fates = await asyncio.gather(*(self._remove_bytes(blob, each, until) for blob, each in found.items()))
        return dict(zip(found, fates, strict=True))

    async def _look(self, blob: BlobDigest) -> Hashable | Fault | None:
        try:
            return await self._store.fingerprint(blob.sha256)
        except Fault as error:
            return error

    async def _remove_bytes(self, blob: BlobDigest, found: Hashable | Fault | None, until: float) -> _Fate:
        """Spared, if its turn comes too late or its store does not tell about it."""
        if found is None:
            return _Fate.GONE
        try:
            if isinstance(found, Fault):
                raise found
            is_gone = await self._store.remove(blob.sha256, only=found, until=until)
            return _Fate.GONE if is_gone else _Fate.SPARED
        except Fault as error:
            self.collected.fail(f"{blob.sha256}: {error.message}")
            return _Fate.UNKNOWN if isinstance(error, RemovalUnknown) else _Fate.SPARED

    # ------------------------------------------------------------ uploads

    async def _remove_uploads(self) -> None:
        """What nobody can go on with: uploads whose time is over, and what is stored of uploads that are not there."""
        limit = self._now() - timedelta(seconds=self._policy.unused_s)
        counted: set[str] = set()  # of the page before: an upload may come twice, with a part of it each time
        async with aclosing(self._store.leftovers()) as pages:
            async for page in pages:
                ids = {each.upload_id for each in page if _is_id(each.upload_id)}
                lasting = await self._garbage.lasting_uploads(ids)
                dead = [
                    each
                    for each in page
                    if each.upload_id in ids and each.upload_id not in lasting and each.modified_at <= limit
                ]
                for each in dead:
                    if self._policy.is_dry or await self._discard(each.upload_id):
                        self.collected.uploads.count += each.upload_id not in counted
                        self.collected.uploads.size_bytes += each.size_bytes
                counted = {each.upload_id for each in dead}

    async def _discard(self, upload_id: str) -> bool:
        """False: somebody writes it still."""
        if not await self._store.discard(upload_id):
            return False
        await self._rows.delete_upload(upload_id)
        return True


def _is_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
