"""Rows of blobs and uploads: what counts, what expires, and whose lease is asked for."""

import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.store.blobs import BlobRows, UploadLease, UploadLeaseLost, UploadNotFound
from rara_scheduler.store.database import Database

A = BlobDigest("a" * 64, 10)
B = BlobDigest("b" * 64, 20)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    database = Database(database_url)
    await database.open()
    yield database
    await database.close()


@pytest.fixture
def rows(database: Database) -> BlobRows:
    return BlobRows(database)


def new_id() -> str:
    return str(uuid.uuid4())


async def add_lease(database: Database, *, token: int) -> str:
    """A row of rara.lease, as a grant leaves it; the id of its step."""
    step_run_id = new_id()
    async with database.connection() as connection:
        await connection.execute(
            "insert into rara.lease (step_run_id, workflow_run_id, route_id, lease_token, attempt, failures,"
            " free_endings, executor_id, released_at, granted_at, granted_on, expires_at, revision)"
            " values ($1, $2, 1, $3, 1, 0, 0, $4, now(), now(), (now() at time zone 'utc')::date,"
            " now() + interval '30 s', 1)",
            step_run_id,
            new_id(),
            token,
            new_id(),
        )
    return step_run_id


async def test_a_blob_counts_by_digest_and_size_until_it_is_marked(rows: BlobRows) -> None:
    await rows.record(A)
    await rows.record(A)
    assert await rows.known([A, B, BlobDigest(A.sha256, 11)]) == {A}
    assert await rows.size_of(A.sha256) == 10
    await rows.mark(A.sha256, await rows.now())
    assert await rows.known([A]) == set()
    assert await rows.size_of(A.sha256) is None
    await rows.record(A)
    assert await rows.known([A]) == {A}


async def test_an_upload_of_a_client_needs_no_lease_and_expires_later(
    rows: BlobRows, database: Database
) -> None:
    upload_id = new_id()
    expires_at = await rows.create_upload(upload_id, A, None, expires_s=3600)
    left = expires_at - datetime.now(UTC)
    assert timedelta(minutes=59) < left <= timedelta(minutes=61)
    upload = await rows.get_upload(upload_id)
    assert (upload.digest, upload.lease_is_current, upload.is_complete) == (A, True, False)
    await rows.record(A, upload_id)
    assert (await rows.get_upload(upload_id)).is_complete  # for a caller who missed the answer
    async with database.connection() as connection:
        expires_at = await connection.fetchval("select expires_at from rara.upload")
    assert expires_at - datetime.now(UTC) <= timedelta(minutes=11)
    await rows.delete_upload(upload_id)
    with pytest.raises(UploadNotFound):
        await rows.get_upload(upload_id)


async def test_an_upload_of_an_executor_needs_the_current_lease(rows: BlobRows, database: Database) -> None:
    step_run_id = await add_lease(database, token=7)
    for stale in (UploadLease(step_run_id, 6), UploadLease(new_id(), 7)):
        with pytest.raises(UploadLeaseLost) as caught:
            await rows.create_upload(new_id(), A, stale, expires_s=60)
        assert caught.value.code == "LEASE_LOST"
        assert caught.value.metadata == {"step_run_id": stale.step_run_id}

    upload_id = new_id()
    await rows.create_upload(upload_id, A, UploadLease(step_run_id, 7), expires_s=60)
    upload = await rows.get_upload(upload_id)
    assert (upload.step_run_id, upload.lease_is_current) == (step_run_id, True)
    async with database.connection() as connection:
        await connection.execute("delete from rara.lease where step_run_id = $1", step_run_id)
    assert not (await rows.get_upload(upload_id)).lease_is_current


async def test_an_expired_upload_is_not_found_and_is_listed_for_removal(rows: BlobRows) -> None:
    fresh, older, oldest = new_id(), new_id(), new_id()
    await rows.create_upload(fresh, A, None, expires_s=60)
    await rows.create_upload(older, A, None, expires_s=-1)
    await rows.create_upload(oldest, A, None, expires_s=-2)
    with pytest.raises(UploadNotFound):
        await rows.get_upload(older)
    assert await rows.expired_uploads(limit=10) == [oldest, older]
    assert await rows.expired_uploads(limit=1) == [oldest]
