"""Which blobs count, and who is uploading what."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query


@dataclass(frozen=True, slots=True)
class UploadLease:
    """The lease under which an executor uploads."""

    step_run_id: str
    lease_token: int


@dataclass(frozen=True, slots=True)
class Upload:
    """lease_is_current: also true for an upload that needs no lease. is_complete: its blob counts."""

    digest: BlobDigest
    step_run_id: str | None
    lease_is_current: bool
    is_complete: bool


class UploadNotFound(Fault):
    def __init__(self, upload_id: str) -> None:
        super().__init__(
            Code.UPLOAD_NOT_FOUND,
            f"there is no upload {upload_id}, or its time is over",
            metadata={"upload_id": upload_id},
        )


class BlobBeingRemoved(Fault):
    """A collection of garbage is deleting these very bytes, or was when it ended: what is stored now could go, too."""

    def __init__(self, sha256: str) -> None:
        super().__init__(
            Code.STORE_UNAVAILABLE,
            f"blob {sha256} is being removed as garbage; upload it again in a while",
            retry_after_s=5.0,
            metadata={"sha256": sha256},
        )


class UploadLeaseLost(Fault):
    def __init__(self, step_run_id: str) -> None:
        super().__init__(
            Code.LEASE_LOST,
            f"step {step_run_id}: the lease has passed on, so nothing more is uploaded under it",
            metadata={"step_run_id": step_run_id},
        )


class BlobRows:
    """The tables rara.blob and rara.upload. Ids are canonical UUIDs; the caller has checked them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def known(self, digests: Collection[BlobDigest]) -> set[BlobDigest]:
        """Those that count, by SHA-256 and size."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("known_blobs"),
                [digest.sha256 for digest in digests],
                [digest.size_bytes for digest in digests],
            )
        return {BlobDigest(row["sha256"], row["size_bytes"]) for row in rows}

    async def size_of(self, sha256: str) -> int | None:
        """The size in bytes under which it counts; None: it does not."""
        async with self._database.connection() as connection:
            size: int | None = await connection.fetchval(query("use_blob"), sha256)
        return size

    async def record(self, digest: BlobDigest, upload_id: str | None = None) -> None:
        """From now on it counts, and its upload is over. The caller has hashed the bytes, and they are durable.

        Raises UploadNotFound when the upload was removed meanwhile: its bytes may be, too.
        """
        async with self._database.connection() as connection:
            recorded = await connection.fetchval(
                query("record_blob"), digest.sha256, digest.size_bytes, upload_id
            )
        if recorded is None:
            raise UploadNotFound(upload_id or "")

    async def now(self) -> datetime:
        """The database's time."""
        async with self._database.connection() as connection:
            found = await connection.fetchval(query("blob_time"))
        assert isinstance(found, datetime)  # noqa: S101 - now() is one
        return found

    async def mark(self, sha256: str, before: datetime) -> None:
        """What was uploaded before an instant of the database counts as missing, until it is uploaded again."""
        async with self._database.connection() as connection:
            await connection.execute(query("mark_blob"), sha256, before)

    async def create_upload(
        self, upload_id: str, digest: BlobDigest, lease: UploadLease | None, *, expires_s: float
    ) -> datetime:
        """Register an upload; when it expires. Raises UploadLeaseLost and BlobBeingRemoved."""
        async with self._database.connection() as connection:
            [row] = await connection.fetch(
                query("create_upload"),
                upload_id,
                digest.sha256,
                digest.size_bytes,
                lease.step_run_id if lease else None,
                lease.lease_token if lease else None,
                expires_s,
            )
        if not row["is_free"]:
            raise BlobBeingRemoved(digest.sha256)
        expires_at: datetime | None = row["expires_at"]
        if expires_at is None:
            raise UploadLeaseLost(lease.step_run_id if lease else "")
        return expires_at

    async def resumable_uploads(
        self, digest: BlobDigest, lease: UploadLease | None, *, limit: int
    ) -> list[str]:
        """Ids of open uploads of the digest by the same step, or by clients, newest first."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("resumable_uploads"),
                digest.sha256,
                digest.size_bytes,
                lease.step_run_id if lease else None,
                limit,
            )
        return [row["upload_id"] for row in rows]

    async def adopt_upload(
        self, upload_id: str, lease: UploadLease | None, *, expires_s: float
    ) -> datetime | None:
        """Hand an open upload to the lease that goes on with it; when it expires. None: one of them is gone."""
        async with self._database.connection() as connection:
            expires_at: datetime | None = await connection.fetchval(
                query("adopt_upload"),
                upload_id,
                lease.step_run_id if lease else None,
                lease.lease_token if lease else None,
                expires_s,
            )
        return expires_at

    async def lease_load(self, lease_token: int) -> tuple[int, int]:
        """How many uploads a lease has open, and how many bytes all of its uploads have named."""
        async with self._database.connection() as connection:
            [row] = await connection.fetch(query("lease_load"), lease_token)
        return row["open_uploads"], row["named_bytes"]

    async def store_load(self, *, with_blobs: bool) -> tuple[int, int]:
        """How many uploads are open, and their bytes; with_blobs: and those of all blobs, which takes a while."""
        async with self._database.connection() as connection:
            [row] = await connection.fetch(query("store_load"), with_blobs)
        return row["open_uploads"], row["used_bytes"]

    async def get_upload(self, upload_id: str) -> Upload:
        """Raises UploadNotFound."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("get_upload"), upload_id)
        if row is None:
            raise UploadNotFound(upload_id)
        return Upload(
            digest=BlobDigest(row["sha256"], row["size_bytes"]),
            step_run_id=row["step_run_id"],
            lease_is_current=row["lease_is_current"],
            is_complete=row["is_complete"],
        )

    async def delete_upload(self, upload_id: str) -> None:
        async with self._database.connection() as connection:
            await connection.execute(query("delete_upload"), upload_id)

    async def expired_uploads(self, *, limit: int) -> list[str]:
        """Ids of uploads whose time is over, oldest first."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("expired_uploads"), limit)
        return [row["upload_id"] for row in rows]
