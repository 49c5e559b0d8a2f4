"""A folder of blobs keeps whole, verified bytes or none, whatever is cut off in between."""

import asyncio
import hashlib
import os
import random
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rara_scheduler.blobs import BlobDigest, BlobMismatch, BlobStoreUnavailable, FolderBlobStore, UploadBusy
from rara_testing.processes import Processes


def digest_of(data: bytes) -> BlobDigest:
    return BlobDigest(hashlib.sha256(data).hexdigest(), len(data))


def new_upload() -> str:
    return str(uuid.uuid4())


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FolderBlobStore]:
    store = FolderBlobStore(tmp_path / "blobs", busy_wait_s=0.1)
    await store.prepare()
    yield store
    store.close()


async def put(
    store: FolderBlobStore, data: bytes, upload_id: str | None = None, piece: int = 70_000
) -> BlobDigest:
    digest = digest_of(data)
    async with store.write(upload_id or new_upload(), digest) as writer:
        for start in range(0, len(data), piece):
            await writer.append(data[start : start + piece])
        await writer.keep()
    return digest


async def get(store: FolderBlobStore, digest: BlobDigest, offset: int = 0, limit: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in store.read(digest.sha256, offset=offset, limit=limit)])


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("size", [0, 1, 255, 70_000, 1_000_001])
async def test_what_was_kept_is_read_back(store: FolderBlobStore, tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    digest = await put(store, data)
    assert await get(store, digest) == data
    assert await store.size(digest.sha256) == size
    assert await store.verify(digest)
    path = tmp_path / "blobs" / "sha256" / digest.sha256[:2] / digest.sha256[2:]
    assert path.read_bytes() == data
    assert files_in(tmp_path / "blobs" / "partial") == []


async def test_a_range_is_read_without_the_rest(store: FolderBlobStore) -> None:
    data = random.Random(1).randbytes(600_000)
    digest = await put(store, data)
    assert await get(store, digest, offset=250_000, limit=300_000) == data[250_000:550_000]
    assert await get(store, digest, offset=599_999) == data[-1:]
    assert await get(store, digest, offset=600_000) == b""
    assert await get(store, digest, offset=0, limit=0) == b""
    assert all([len(chunk) <= 256 * 1024 async for chunk in store.read(digest.sha256)])


async def test_an_upload_goes_on_where_a_broken_call_left_it(store: FolderBlobStore) -> None:
    data = random.Random(2).randbytes(500_000)
    digest, upload_id = digest_of(data), new_upload()
    async with store.write(upload_id, digest) as writer:
        await writer.append(data[:123_456])
    assert await store.uploaded_bytes(upload_id) == 123_456
    assert await store.size(digest.sha256) is None
    async with store.write(upload_id, digest) as writer:
        assert writer.committed_bytes == 123_456
        await writer.append(data[123_456:])
        await writer.keep()
    assert await get(store, digest) == data
    assert await store.uploaded_bytes(upload_id) == 0


async def test_bytes_that_are_not_the_digest_s_are_not_kept(store: FolderBlobStore, tmp_path: Path) -> None:
    data = b"x" * 1000
    digest = digest_of(data)
    for wrong in (b"y" + data[1:], data[:-1]):
        async with store.write(new_upload(), digest) as writer:
            await writer.append(wrong)
            with pytest.raises(BlobMismatch) as caught:
                await writer.keep()
        assert caught.value.code == "ARTIFACT_MISMATCH"
        assert caught.value.metadata == {"sha256": digest.sha256, "size_bytes": "1000"}
    async with store.write(new_upload(), digest) as writer:
        await writer.append(data)
        with pytest.raises(BlobMismatch):
            await writer.append(b"z")
    assert files_in(tmp_path / "blobs") == []


async def test_many_writers_of_one_digest_all_succeed(store: FolderBlobStore) -> None:
    data = random.Random(3).randbytes(300_000)
    digests = await asyncio.gather(*(put(store, data) for _ in range(8)))
    assert set(digests) == {digest_of(data)}
    assert await store.verify(digests[0])


async def test_a_reader_keeps_its_bytes_while_the_same_blob_is_written_or_removed(
    store: FolderBlobStore,
) -> None:
    data = random.Random(4).randbytes(600_000)
    digest = await put(store, data)
    reading = store.read(digest.sha256)
    first = await anext(reading)
    await put(store, data)
    await store.remove(digest.sha256)
    assert first + b"".join([chunk async for chunk in reading]) == data
    assert await store.size(digest.sha256) is None
    await store.remove(digest.sha256)


async def test_an_upload_has_one_writer_at_a_time(store: FolderBlobStore) -> None:
    data = b"abc"
    digest, upload_id = digest_of(data), new_upload()
    async with store.write(upload_id, digest) as writer:
        with pytest.raises(UploadBusy):
            async with store.write(upload_id, digest):
                pass
        assert not await store.discard(upload_id)
        await writer.append(data)
        await writer.keep()
    assert await store.verify(digest)


async def test_a_discarded_upload_starts_from_nothing(store: FolderBlobStore) -> None:
    upload_id = new_upload()
    async with store.write(upload_id, digest_of(b"abc")) as writer:
        await writer.append(b"ab")
    assert await store.discard(upload_id)
    assert await store.discard(upload_id)
    assert await store.uploaded_bytes(upload_id) == 0


async def test_a_cancelled_writer_lets_go_of_the_upload(store: FolderBlobStore) -> None:
    data = b"q" * 5_000_000
    digest, upload_id = digest_of(data), new_upload()
    held = asyncio.Event()

    async def hold() -> None:
        async with store.write(upload_id, digest) as writer:
            await writer.append(data[:1_000_000])
            held.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await held.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await put_rest(store, upload_id, data)
    assert await store.verify(digest)


async def put_rest(store: FolderBlobStore, upload_id: str, data: bytes) -> int:
    """Finish an upload; how many bytes were there already."""
    async with store.write(upload_id, digest_of(data)) as writer:
        already = writer.committed_bytes
        await writer.append(data[already:])
        await writer.keep()
    return already


async def test_a_flipped_byte_is_found(store: FolderBlobStore, tmp_path: Path) -> None:
    data = random.Random(5).randbytes(100_000)
    digest = await put(store, data)
    path = tmp_path / "blobs" / "sha256" / digest.sha256[:2] / digest.sha256[2:]
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(bytes([data[50_000] ^ 1]))
    assert not await store.verify(digest)
    await put(store, data)  # a new upload heals it
    assert await store.verify(digest)
    assert not await store.verify(BlobDigest("0" * 64, 0))


async def test_blobs_and_leftovers_are_listed_page_by_page(
    store: FolderBlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rara_scheduler.blobs.folder.LISTED_AT_ONCE", 3)
    began = datetime.now(UTC) - timedelta(seconds=1)  # a file's time may be a little behind
    kept = {await put(store, bytes([n])) for n in range(7)}
    begun = {new_upload() for _ in range(4)}
    for upload_id in begun:
        async with store.write(upload_id, digest_of(b"abc")) as writer:
            await writer.append(b"ab")
    (tmp_path / "blobs" / "sha256" / "lost+found").mkdir()
    (tmp_path / "blobs" / "partial" / "README").touch()
    blobs = [page async for page in store.stored()]
    uploads = [page async for page in store.leftovers()]
    assert [len(page) for page in blobs] == [3, 3, 1]
    assert [len(page) for page in uploads] == [3, 1]
    assert {BlobDigest(blob.sha256, blob.size_bytes) for page in blobs for blob in page} == kept
    assert {(upload.upload_id, upload.size_bytes) for page in uploads for upload in page} == {
        (upload_id, 2) for upload_id in begun
    }
    times = [blob.modified_at for page in blobs for blob in page]
    times += [upload.modified_at for page in uploads for upload in page]
    assert began <= min(times) <= max(times) <= datetime.now(UTC)


async def test_to_keep_bytes_again_renews_the_time_of_their_blob(
    store: FolderBlobStore, tmp_path: Path
) -> None:
    digest = await put(store, b"abc")
    for upload_id in (new_upload(), new_upload()):
        async with store.write(upload_id, digest) as writer:
            await writer.append(b"abc")
        os.utime(tmp_path / "blobs" / "partial" / upload_id, (0, 0))  # stored long ago
        async with store.write(upload_id, digest) as writer:
            await writer.keep()
        [[blob]] = [page async for page in store.stored()]
        assert blob.modified_at > datetime.now(UTC) - timedelta(hours=1)


async def test_a_name_that_could_leave_the_folder_is_refused(store: FolderBlobStore) -> None:
    for sha256 in ("../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"):
        with pytest.raises(ValueError, match="64 lower-case hex"):
            await store.size(sha256)
    for upload_id in ("../x", "", "a/b", "."):
        with pytest.raises(ValueError, match="upload"):
            await store.uploaded_bytes(upload_id)


async def test_a_store_that_is_away_says_so(store: FolderBlobStore, tmp_path: Path) -> None:
    (tmp_path / "blobs" / "partial").rmdir()
    (tmp_path / "blobs" / "partial").write_bytes(b"not a folder")
    with pytest.raises(BlobStoreUnavailable) as caught:
        await put(store, b"abc")
    assert caught.value.code == "STORE_UNAVAILABLE"
    assert caught.value.retry_after_s == 5.0


_WRITER = """
import asyncio, hashlib, random, sys
from pathlib import Path
from rara_scheduler.blobs import BlobDigest, FolderBlobStore

async def main(root, upload_id, half_only):
    store = FolderBlobStore(Path(root))
    await store.prepare()
    data = random.Random(6).randbytes(2_000_000)
    digest = BlobDigest(hashlib.sha256(data).hexdigest(), len(data))
    async with store.write(upload_id, digest) as writer:
        while writer.committed_bytes < len(data) // (2 if half_only else 1):
            await writer.append(data[writer.committed_bytes : writer.committed_bytes + 100_000])
            print("at", writer.committed_bytes)
        if half_only:
            await asyncio.Event().wait()
        await writer.keep()
    print("kept")

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] == "half"))
"""


async def test_an_upload_survives_the_kill_of_its_writer(store: FolderBlobStore, tmp_path: Path) -> None:
    data = random.Random(6).randbytes(2_000_000)
    upload_id = new_upload()
    root = str(tmp_path / "blobs")
    async with Processes(tmp_path / "logs") as processes:
        writer = await processes.python("writer", _WRITER, root, upload_id, "half", ready="at 1000000")
        with pytest.raises(UploadBusy):
            await put_rest(store, upload_id, data)  # its lock holds across processes
        await writer.kill_and_wait()
    assert await store.size(digest_of(data).sha256) is None
    assert await put_rest(store, upload_id, data) == 1_000_000
    assert await get(store, digest_of(data)) == data


async def test_whenever_a_writer_is_killed_every_blob_is_whole(
    store: FolderBlobStore, tmp_path: Path
) -> None:
    data = random.Random(6).randbytes(2_000_000)
    digest = digest_of(data)
    root = str(tmp_path / "blobs")
    async with Processes(tmp_path / "logs") as processes:
        for kill_at in (100_000, 1_900_000, 2_000_000, 2_000_000):  # the last two: around the publishing
            writer = await processes.python(
                "writer", _WRITER, root, new_upload(), "all", ready=f"at {kill_at}"
            )
            await writer.kill_and_wait()
            if await store.size(digest.sha256) is not None:
                assert await store.verify(digest)
                await store.remove(digest.sha256)
    await put(store, data)
    assert await store.verify(digest)


def test_blobs_are_durable_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recording_fsync(fd: int) -> None:
        calls.append("fsync " + Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    def recording_rename(self: Path, target: Path) -> Path:
        calls.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(Path, "rename", recording_rename)
    store = FolderBlobStore(tmp_path)
    asyncio.run(store.prepare())
    upload_id = new_upload()
    digest = asyncio.run(put(store, b"abc", upload_id))
    store.close()
    assert calls == [
        f"fsync {upload_id}",
        "fsync sha256",
        "rename",
        f"fsync {digest.sha256[:2]}",
        "fsync partial",
    ]
