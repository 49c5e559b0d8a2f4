"""Which blobs nobody needs, and the claims under which their bytes may go."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query


@dataclass(frozen=True, slots=True)
class Looked:
    """A blob's row. is_unused: nothing refers to it, and nobody has used it for a while."""

    digest: BlobDigest
    is_marked: bool
    is_unused: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """Marked blobs that are nobody's. No upload of them begins before `until`, unless they are given back."""

    blobs: Sequence[BlobDigest]
    until: datetime  # of the database; no two claims of a blob have the same


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

    async def claim(self, sha256s: Collection[str], *, grace_s: float, removal_s: float) -> Claim | None:
        """Claim those that are marked and nobody's, for as long as a removal may take. None: there are none."""
        async with self._database.transaction() as connection:
            free = await connection.fetch(query("garbage_lock_digests"), sorted(sha256s))
            # A statement of its own: it sees whatever was committed before the locks were there.
            rows = await connection.fetch(
                query("garbage_claim"), [row["sha256"] for row in free], grace_s, removal_s
            )
        if not rows:
            return None
        blobs = sorted((BlobDigest(row["sha256"], row["size_bytes"]) for row in rows), key=lambda b: b.sha256)
        return Claim(blobs, rows[0]["removing_until"])

    async def still_claimed(self, claim: Claim) -> set[str]:
        """Those of the claim's digests whose time is not over."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("garbage_still_claimed"), [blob.sha256 for blob in claim.blobs], claim.until
            )
        return {row["sha256"] for row in rows}

    async def settle(self, claim: Claim, *, gone: Collection[str], spared: Collection[str]) -> None:
        """Forget the blobs whose bytes are gone, and give back those that were left. Others stay claimed."""
        async with self._database.transaction() as connection:
            await connection.execute(query("garbage_forget"), sorted(gone), claim.until)
            await connection.execute(query("garbage_release"), sorted(spared), claim.until)

    async def lasting_uploads(self, upload_ids: Collection[str]) -> set[str]:
        """Those that are uploads, and may be gone on with."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("garbage_lasting_uploads"), list(upload_ids))
        return {row["upload_id"] for row in rows}
