"""A folder of blobs keeps whole, verified bytes or none, whatever is cut off in between.

What it has in common with other stores is shown by tests/wire/test_blob_stores.py.
"""

import asyncio
import hashlib
import os
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from rara_scheduler.blobs import BlobDigest, BlobStoreUnavailable, FolderBlobStore, UploadBusy
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


async def test_a_blob_is_a_file_named_by_its_digest(store: FolderBlobStore, tmp_path: Path) -> None:
    data = random.Random(7).randbytes(300_000)
    digest = await put(store, data)
    path = tmp_path / "blobs" / "sha256" / digest.sha256[:2] / digest.sha256[2:]
    assert path.read_bytes() == data
    assert files_in(tmp_path / "blobs" / "partial") == []


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


async def put_rest(store: FolderBlobStore, upload_id: str, data: bytes) -> int:
    """Finish an upload; how many bytes were there already."""
    async with store.write(upload_id, digest_of(data)) as writer:
        already = writer.committed_bytes
        await writer.append(data[already:])
        await writer.keep()
    return already


async def test_files_of_others_are_not_listed(store: FolderBlobStore, tmp_path: Path) -> None:
    (tmp_path / "blobs" / "sha256" / "lost+found").mkdir()
    (tmp_path / "blobs" / "sha256" / "ab").mkdir()
    (tmp_path / "blobs" / "sha256" / "ab" / "notes").touch()
    (tmp_path / "blobs" / "partial" / "README").touch()
    assert [page async for page in store.stored()] == []
    assert [page async for page in store.leftovers()] == []


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


async def test_a_store_that_is_away_says_so(store: FolderBlobStore, tmp_path: Path) -> None:
    (tmp_path / "blobs" / "partial").rmdir()
    (tmp_path / "blobs" / "partial").write_bytes(b"not a folder")
    with pytest.raises(BlobStoreUnavailable) as caught:
        await put(store, b"abc")
    assert caught.value.code == "STORE_UNAVAILABLE"
    assert caught.value.retry_after_s == 5.0


async def test_a_mount_that_is_missing_is_no_empty_store(store: FolderBlobStore, tmp_path: Path) -> None:
    """Else every blob would count as lost, and all would be made again."""
    digest = await put(store, b"abc")
    (tmp_path / "blobs").rename(tmp_path / "unmounted")
    (tmp_path / "blobs").mkdir()  # the mount's point
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.size(digest.sha256),
        lambda: store.fingerprint(digest.sha256),
        lambda: store.verify(digest),
        lambda: get(store, digest),
        lambda: put(store, b"abd"),
        lambda: store.uploaded_bytes(new_upload()),
        lambda: anext(store.stored()),
        lambda: anext(store.leftovers()),
    ]
    for call in calls:
        with pytest.raises(BlobStoreUnavailable, match="its folder is gone"):
            await call()
    (tmp_path / "blobs").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "blobs")
    assert await store.verify(digest)


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


_WRITES_ON = """
import asyncio, hashlib, random, sys, uuid
from pathlib import Path
from rara_scheduler.blobs import BlobDigest, FolderBlobStore

async def main(root, seed):
    store = FolderBlobStore(Path(root))
    await store.prepare()
    draw = random.Random(seed)
    while True:
        data = random.Random(draw.randrange(40)).randbytes(60_000)  # others write the same ones
        digest = BlobDigest(hashlib.sha256(data).hexdigest(), len(data))
        async with store.write(str(uuid.uuid4()), digest) as writer:
            for start in range(0, len(data), 20_000):
                await writer.append(data[start : start + 20_000])
            await writer.keep()
        print("kept", digest.sha256)

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.soak)])
async def test_whenever_a_writer_is_killed_every_blob_is_whole(
    store: FolderBlobStore, tmp_path: Path, kills: int
) -> None:
    """Two processes write the same blobs over and over; each kill hits one of them anywhere in append or keep."""
    draw = random.Random(kills)
    root = str(tmp_path / "blobs")
    kept: set[str] = set()
    async with Processes(tmp_path / "logs") as processes:
        other = await processes.python("other", _WRITES_ON, root, "0", ready="kept")
        for seed in range(1, kills + 1):
            writer = await processes.python("writer", _WRITES_ON, root, str(seed), ready="kept")
            await asyncio.sleep(draw.uniform(0, 0.05))  # where the kill falls
            await writer.kill_and_wait()
            kept.update(line.removeprefix("kept ") for line in writer.lines if len(line) == 69)
            found = [blob async for page in store.stored() for blob in page]
            assert kept <= {blob.sha256 for blob in found}
            for blob in found:
                assert await store.verify(BlobDigest(blob.sha256, 60_000)), blob
        await other.kill_and_wait()
    begun = {leftover.upload_id async for page in store.leftovers() for leftover in page}
    assert len(begun) <= kills + 1
    for upload_id in begun:
        assert await store.discard(upload_id)
    assert files_in(tmp_path / "blobs" / "partial") == []


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
