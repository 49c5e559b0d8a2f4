"""Blobs with their rows, uploads that go through a scheduler's own code, and collections of what nobody needs."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
from rara_scheduler.blobs import BlobDigest, BlobStore
from rara_scheduler.blobs.collector import Collected, Collector, Policy
from rara_scheduler.blobs.transfers import BlobTransfers, Piece
from rara_scheduler.domain.attempt import ArtifactFacts
from rara_scheduler.store.blobs import BlobRows
from rara_scheduler.store.database import Database
from rara_scheduler.store.garbage import GarbageRows

AT_ONCE = Policy(unused_s=0.0, grace_s=0.0)


def digest_of(data: bytes) -> BlobDigest:
    return BlobDigest(hashlib.sha256(data).hexdigest(), len(data))


def facts_of(name: str, digest: BlobDigest) -> ArtifactFacts:
    return ArtifactFacts(name, digest.sha256, digest.size_bytes, "application/octet-stream", "blob")


def path_of(root: Path, digest: BlobDigest) -> Path:
    """Where a folder keeps it."""
    return root / "sha256" / digest.sha256[:2] / digest.sha256[2:]


async def pieces_of(data: bytes, piece_bytes: int = 1 << 20) -> AsyncIterator[Piece]:
    for offset in range(0, len(data), piece_bytes):
        end = offset + piece_bytes
        yield Piece(offset, data[offset:end], finish=end >= len(data))


async def upload(transfers: BlobTransfers, data: bytes, piece_bytes: int = 1 << 20) -> BlobDigest:
    """As a careful client does: ask first, send what is missing."""
    digest = digest_of(data)
    if await transfers.missing([digest]):
        upload_id, _ = await transfers.create_upload(digest, None)
        if upload_id:
            await transfers.write(upload_id, pieces_of(data, piece_bytes))
    return digest


async def collect(database: Database, store: BlobStore, policy: Policy = AT_ONCE) -> Collected:
    return await Collector(store, GarbageRows(database), BlobRows(database), policy).run()


async def lies(connection: "asyncpg.Connection[asyncpg.Record]", store: BlobStore) -> list[str]:
    """Rows that count without their bytes, and manifests and inputs without a row that counts."""
    counting = [
        BlobDigest(row["sha256"], row["size_bytes"])
        for row in await connection.fetch("select sha256, size_bytes from rara.blob where marked_at is null")
    ]
    found = [
        f"{blob.sha256} counts, and its bytes do not" for blob in counting if not await store.verify(blob)
    ]
    needed = await connection.fetch(
        "select n.sha256 from (select sha256 from rara.artifact where inline is null union"
        " select sha256 from rara.run_artifact where inline is null union"
        " select a.sha256 from rara.checkpoint_artifact a join rara.checkpoint c using (idempotency_key) where"
        " not exists (select from rara.result x where x.step_run_id = c.step_run_id and x.state = 'succeeded'))"
        " n left join rara.blob b on b.sha256 = n.sha256"
        " where b.sha256 is null or b.marked_at is not null"
    )
    return found + [f"{row['sha256']} is needed, and does not count" for row in needed]
