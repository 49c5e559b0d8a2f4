"""Every blob store keeps the same promises: whole, verified bytes or none, and one writer for an upload."""

import asyncio
import hashlib
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rara_scheduler.blobs import (
    BlobDigest,
    BlobMismatch,
    BlobStore,
    FolderBlobStore,
    UploadBusy,
)
from rara_scheduler.blobs.s3 import S3BlobStore
from support.s3_server import S3Server, s3_server


@dataclass
class Given:
    """A store, and a way around it."""

    store: BlobStore
    folder: Path | None = None  # where it is one
    s3: S3Server | None = None
    bucket: str = ""

    async def damage(self, sha256: str, data: bytes) -> None:
        """Other bytes under a blob's name."""
        if self.folder is not None:
            path = self.folder / "sha256" / sha256[:2] / sha256[2:]
            path.chmod(0o600)
            path.write_bytes(data)
        if self.s3 is not None:
            await self.s3.put(self.bucket, f"a/prefix/sha256/{sha256[:2]}/{sha256[2:]}", data)


@pytest.fixture(scope="module")
async def s3(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    async with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["folder", "s3"])
async def given(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Given]:
    if request.param == "folder":
        given = Given(FolderBlobStore(tmp_path / "blobs", busy_wait_s=0.1), folder=tmp_path / "blobs")
    else:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        bucket = await s3.new_bucket()
        # Pieces and blocks so small that a small blob has many.
        monkeypatch.setattr("rara_scheduler.blobs.s3.BLOCK_BYTES", 90_000)
        store = S3BlobStore(bucket, "a/prefix", piece_bytes=120_000, busy_wait_s=0.1)
        given = Given(store, s3=s3, bucket=bucket)
    await given.store.prepare()
    yield given
    given.store.close()


@pytest.fixture
def store(given: Given) -> BlobStore:
    return given.store


def digest_of(data: bytes) -> BlobDigest:
    return BlobDigest(hashlib.sha256(data).hexdigest(), len(data))


def new_upload() -> str:
    return str(uuid.uuid4())


async def put(store: BlobStore, data: bytes, upload_id: str | None = None, piece: int = 70_000) -> BlobDigest:
    digest = digest_of(data)
    async with store.write(upload_id or new_upload(), digest) as writer:
        for start in range(0, len(data), piece):
            await writer.append(data[start : start + piece])
        await writer.keep()
    return digest


async def get(store: BlobStore, digest: BlobDigest, offset: int = 0, limit: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in store.read(digest.sha256, offset=offset, limit=limit)])


async def put_rest(store: BlobStore, upload_id: str, data: bytes) -> int:
    """Finish an upload; how many bytes were there already."""
    async with store.write(upload_id, digest_of(data)) as writer:
        already = writer.committed_bytes
        await writer.append(data[already:])
        await writer.keep()
    return already


async def blobs_in(store: BlobStore) -> dict[BlobDigest, datetime]:
    return {
        BlobDigest(blob.sha256, blob.size_bytes): blob.modified_at
        async for page in store.stored()
        for blob in page
    }


async def leftovers_in(store: BlobStore) -> dict[str, int]:
    found: dict[str, int] = {}
    async for page in store.leftovers():
        for leftover in page:
            found[leftover.upload_id] = found.get(leftover.upload_id, 0) + leftover.size_bytes
    return found


@pytest.mark.parametrize("size", [0, 1, 255, 70_000, 120_000, 1_000_001])
async def test_what_was_kept_is_read_back(store: BlobStore, size: int) -> None:
    data = random.Random(size).randbytes(size)
    digest = await put(store, data)
    assert await get(store, digest) == data
    assert await store.size(digest.sha256) == size
    assert await store.verify(digest)
    assert list(await blobs_in(store)) == [digest]
    assert await leftovers_in(store) == {}


async def test_a_range_is_read_without_the_rest(store: BlobStore) -> None:
    data = random.Random(1).randbytes(600_000)
    digest = await put(store, data)
    assert await get(store, digest, offset=250_000, limit=300_000) == data[250_000:550_000]
    assert await get(store, digest, offset=599_999) == data[-1:]
    assert await get(store, digest, offset=600_000) == b""
    assert await get(store, digest, offset=599_999, limit=500) == data[-1:]
    assert await get(store, digest, offset=0, limit=0) == b""
    assert all([len(chunk) <= 256 * 1024 async for chunk in store.read(digest.sha256)])


async def test_a_blob_that_is_not_there_is_told_from_one_that_is(store: BlobStore) -> None:
    absent = digest_of(b"never stored")
    assert await store.size(absent.sha256) is None
    assert await store.fingerprint(absent.sha256) is None
    assert not await store.verify(absent)
    assert await store.remove(absent.sha256)
    with pytest.raises(FileNotFoundError):
        await get(store, absent)


async def test_an_upload_goes_on_where_a_broken_call_left_it(store: BlobStore) -> None:
    data = random.Random(2).randbytes(500_000)
    digest, upload_id = digest_of(data), new_upload()
    with suppress(ConnectionError):
        async with store.write(upload_id, digest) as writer:
            await writer.append(data[:123_456])
            raise ConnectionError
    assert await store.uploaded_bytes(upload_id) == 123_456
    async with store.write(upload_id, digest) as writer:
        await writer.append(data[123_456:300_000])
    assert await store.uploaded_bytes(upload_id) == 300_000
    assert await store.size(digest.sha256) is None
    assert await leftovers_in(store) == {upload_id: 300_000}
    assert await put_rest(store, upload_id, data) == 300_000
    assert await get(store, digest) == data
    assert await store.uploaded_bytes(upload_id) == 0


async def test_all_bytes_may_have_come_before_the_call_that_keeps_them(store: BlobStore) -> None:
    data = random.Random(3).randbytes(300_000)
    upload_id = new_upload()
    async with store.write(upload_id, digest_of(data)) as writer:
        await writer.append(data)
    assert await put_rest(store, upload_id, data) == 300_000
    assert await get(store, digest_of(data)) == data


@pytest.mark.parametrize("size", [1_000, 400_000])
async def test_bytes_that_are_not_the_digest_s_are_not_kept(store: BlobStore, size: int) -> None:
    data = random.Random(size).randbytes(size)
    digest = digest_of(data)
    for wrong in (bytes([data[0] ^ 1]) + data[1:], data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
        async with store.write(new_upload(), digest) as writer:
            await writer.append(wrong)
            with pytest.raises(BlobMismatch) as caught:
                await writer.keep()
        assert caught.value.code == "ARTIFACT_MISMATCH"
        assert caught.value.metadata == {"sha256": digest.sha256, "size_bytes": str(size)}
    async with store.write(new_upload(), digest) as writer:
        await writer.append(data)
        with pytest.raises(BlobMismatch, match="more bytes than that"):
            await writer.append(b"z")
    assert await blobs_in(store) == {}
    assert await leftovers_in(store) == {}


async def test_many_writers_of_one_digest_all_succeed(store: BlobStore) -> None:
    data = random.Random(3).randbytes(300_000)
    digests = await asyncio.gather(*(put(store, data) for _ in range(6)))
    assert set(digests) == {digest_of(data)}
    assert await store.verify(digests[0])
    assert await leftovers_in(store) == {}


async def test_an_upload_has_one_writer_at_a_time(store: BlobStore) -> None:
    data = b"abc"
    digest, upload_id = digest_of(data), new_upload()
    async with store.write(upload_id, digest) as writer:
        assert await store.is_being_written(upload_id)
        with pytest.raises(UploadBusy) as caught:
            async with store.write(upload_id, digest):
                pass
        assert (caught.value.code, caught.value.retry_after_s) == ("STORE_UNAVAILABLE", 1.0)
        assert not await store.discard(upload_id)
        await writer.append(data)
        await writer.keep()
    assert not await store.is_being_written(upload_id)
    assert await store.verify(digest)


async def test_a_discarded_upload_starts_from_nothing(store: BlobStore) -> None:
    upload_id = new_upload()
    async with store.write(upload_id, digest_of(b"abc")) as writer:
        await writer.append(b"ab")
    assert await store.discard(upload_id)
    assert await store.discard(upload_id)
    assert await store.uploaded_bytes(upload_id) == 0


async def test_a_cancelled_writer_lets_go_of_the_upload(store: BlobStore) -> None:
    data = random.Random(4).randbytes(500_000)
    digest, upload_id = digest_of(data), new_upload()
    held = asyncio.Event()

    async def hold() -> None:
        async with store.write(upload_id, digest) as writer:
            await writer.append(data[:100_000])
            held.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await held.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await put_rest(store, upload_id, data) == 100_000
    assert await store.verify(digest)


async def test_a_flipped_byte_is_found_and_healed_by_a_new_upload(given: Given) -> None:
    data = random.Random(5).randbytes(100_000)
    digest = await put(given.store, data)
    before = await given.store.fingerprint(digest.sha256)
    assert before == await given.store.fingerprint(digest.sha256)
    await given.damage(digest.sha256, data[:50_000] + bytes([data[50_000] ^ 1]) + data[50_001:])
    damaged = await given.store.fingerprint(digest.sha256)
    assert damaged != before
    assert not await given.store.verify(digest)
    await put(given.store, data)
    assert await given.store.verify(digest)
    assert await given.store.fingerprint(digest.sha256) != damaged


async def test_only_the_blob_that_was_looked_at_is_removed(given: Given) -> None:
    digest = await put(given.store, b"abc")
    looked_at = await given.store.fingerprint(digest.sha256)
    await given.damage(digest.sha256, b"abd")
    assert not await given.store.remove(digest.sha256, only=looked_at)
    assert await given.store.size(digest.sha256) == 3
    assert await given.store.remove(digest.sha256, only=await given.store.fingerprint(digest.sha256))
    assert await given.store.size(digest.sha256) is None


async def test_blobs_and_leftovers_are_listed_page_by_page(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rara_scheduler.blobs.folder.LISTED_AT_ONCE", 3)
    monkeypatch.setattr("rara_scheduler.blobs.s3_objects.LISTED_AT_ONCE", 3)
    began = datetime.now(UTC) - timedelta(seconds=2)  # a store's times may be cut to seconds
    kept = {await put(store, bytes([n])) for n in range(7)}
    begun = {new_upload(): 2 for _ in range(4)}
    for upload_id in begun:
        async with store.write(upload_id, digest_of(b"abc")) as writer:
            await writer.append(b"ab")
    assert [len(page) async for page in store.stored()] == [3, 3, 1]
    assert [len(page) async for page in store.leftovers()] == [3, 1]
    blobs = await blobs_in(store)
    assert set(blobs) == kept
    assert all(began <= modified_at <= datetime.now(UTC) for modified_at in blobs.values())
    assert await leftovers_in(store) == begun


async def test_a_name_that_could_lead_elsewhere_is_refused(store: BlobStore) -> None:
    for sha256 in ("../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"):
        with pytest.raises(ValueError, match="64 lower-case hex"):
            await store.size(sha256)
    for upload_id in ("../x", "", "a/b", "."):
        with pytest.raises(ValueError, match="upload"):
            await store.uploaded_bytes(upload_id)
        with pytest.raises(ValueError, match="upload"):
            async with store.write(upload_id, digest_of(b"")):
                pass
        with pytest.raises(ValueError, match="upload"):
            await store.discard(upload_id)


async def test_a_prepared_store_holds_nothing(store: BlobStore) -> None:
    assert await blobs_in(store) == {}
    assert await leftovers_in(store) == {}
    await store.prepare()
