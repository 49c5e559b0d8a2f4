"""Which blobs nobody needs, and the locks under which their bytes may go."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.store.database import Connection, Database
from rara_scheduler.store.queries import query


@dataclass(frozen=True, slots=True)
class Looked:
    """A blob's row. is_unused: nothing refers to it, and nobody has used it for a while."""

    digest: BlobDigest
    is_marked: bool
    is_unused: bool


class Claim:
    """Marked blobs that are nobody's, and stay so until the claim's transaction ends."""

    def __init__(self, connection: Connection, blobs: Sequence[BlobDigest]) -> None:
        self._connection = connection
        self.blobs = blobs

    async def is_held(self) -> None:
        """Return if the locks are held at this moment; raise what the database raises if they may be lost."""
        await self._connection.fetchval(query("garbage_claim_is_held"))

    async def forget(self, gone: Collection[str]) -> None:
        """Remove the rows of blobs whose bytes are gone."""
        await self._connection.execute(query("garbage_forget"), sorted(gone))


class GarbageRows:
    """Any number of collectors may be at it; what one works on, the others pass over."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, after: str, *, limit: int, unused_s: float) -> list[Looked]:
        """The next rows in order of the digest; none: that was the last page."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("garbage_page"), after, limit, unused_s)
        return [
            Looked(BlobDigest(row["sha256"], row["size_bytes"]), row["is_marked"], row["is_unused"])
            for row in rows
        ]

    async def mark(self, sha256s: Collection[str], *, unused_s: float) -> list[BlobDigest]:
        """Those that are unused still: from now on they count as missing."""
        async with self._database.transaction() as connection:
            locked = await connection.fetch(query("garbage_lock"), sorted(sha256s))
            rows = await connection.fetch(query("garbage_mark"), [row["sha256"] for row in locked], unused_s)
        return [BlobDigest(row["sha256"], row["size_bytes"]) for row in rows]

    async def unknown(self, sha256s: Collection[str]) -> set[str]:
        """Those that no row and no upload knows."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("garbage_unknown"), list(sha256s))
        return {row["sha256"] for row in rows}

    async def adopt(self, found: Sequence[BlobDigest]) -> list[BlobDigest]:
        """Give bytes that nobody knows a row that is marked; those that were unknown still."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("garbage_adopt"), [each.sha256 for each in found], [each.size_bytes for each in found]
            )
        return [BlobDigest(row["sha256"], row["size_bytes"]) for row in rows]

    async def marked(self, after: str, *, limit: int, grace_s: float) -> list[str]:
        """The next digests, in order, that were marked so long ago."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("garbage_marked"), after, limit, grace_s)
        return [row["sha256"] for row in rows]

    @asynccontextmanager
    async def claim(self, sha256s: Collection[str], *, grace_s: float) -> AsyncIterator[Claim]:
        """Lock those that are marked and nobody's. The one transaction that is held over work on the blob store."""
        async with self._database.transaction() as connection:
            free = await connection.fetch(query("garbage_claim"), sorted(sha256s))
            rows = await connection.fetch(query("garbage_recheck"), [row["sha256"] for row in free], grace_s)
            yield Claim(connection, [BlobDigest(row["sha256"], row["size_bytes"]) for row in rows])

    async def lasting_uploads(self, upload_ids: Collection[str]) -> set[str]:
        """Those that are uploads, and may be gone on with."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("garbage_lasting_uploads"), list(upload_ids))
        return {row["upload_id"] for row in rows}
