"""`rara artifact gc` as people and cron run it, on folders and buckets."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rara_scheduler.blobs import FolderBlobStore, open_blob_store
from rara_scheduler.blobs.transfers import BlobTransfers
from rara_scheduler.domain.start_command import RunArtifact
from rara_scheduler.store.blobs import BlobRows
from support.blob_garbage import digest_of, lies, path_of, upload
from support.command_line import ended, rara, rara_process
from support.s3_server import s3_server
from support.store_world import StoreWorld, store_world

GC = ("artifact", "gc", "-o", "json")
AT_ONCE = ("--older-than", "0s", "--grace", "0s")


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as world:
        await world.define("one", {"a": {}})
        yield world


async def _needed_and_not(world: StoreWorld, transfers: BlobTransfers) -> None:
    needed = await upload(transfers, b"needed")
    await world.start("one", artifacts=(RunArtifact("given", needed.sha256, needed.size_bytes),))
    await upload(transfers, b"needless")


async def test_it_says_what_would_go_and_then_lets_it_go(
    database_url: str, world: StoreWorld, tmp_path: Path
) -> None:
    store = FolderBlobStore(tmp_path)
    await store.prepare()
    await _needed_and_not(world, BlobTransfers(store, BlobRows(world.database)))
    env = {"RARA_DATABASE_URL": database_url, "RARA_BLOB_STORE": f"file://{tmp_path}"}

    dry = await rara(*GC, *AT_ONCE, "--dry-run", env=env)
    assert (dry.code, dry.json["unused"], dry.json["removed"]) == (
        0,
        {"count": 1, "bytes": 8},
        {"count": 0, "bytes": 0},
    )
    assert path_of(tmp_path, digest_of(b"needless")).exists()
    patient = await rara(*GC, env=env)
    assert (patient.json["kept"]["count"], patient.json["removed"]["count"]) == (2, 0)

    table = await rara("artifact", "gc", *AT_ONCE, env=env)
    assert table.code == 0
    assert [line.split()[:2] for line in table.lines[:2]] == [["kept", "1"], ["unused", "1"]]
    assert not path_of(tmp_path, digest_of(b"needless")).exists()
    again = await rara(*GC, *AT_ONCE, env=env)
    assert (again.json["kept"]["count"], again.json["removed"]["count"]) == (1, 0)
    assert await lies(world.raw, store) == []
    store.close()


async def test_one_that_is_killed_in_the_middle_is_finished_by_the_next(
    database_url: str, world: StoreWorld, tmp_path: Path
) -> None:
    store = FolderBlobStore(tmp_path)
    await store.prepare()
    await _needed_and_not(world, BlobTransfers(store, BlobRows(world.database)))
    env = {"RARA_DATABASE_URL": database_url, "RARA_BLOB_STORE": f"file://{tmp_path}"}
    process = await rara_process(*GC, "--older-than", "0s", "--grace", "1h", env=env)
    assert process.stderr is not None
    async with asyncio.timeout(60):
        assert b"marked 1 blobs" in await process.stderr.readline()
    process.kill()
    await ended(process)
    assert path_of(tmp_path, digest_of(b"needless")).exists()
    found = await rara(*GC, *AT_ONCE, env=env)
    assert (found.json["unused"]["count"], found.json["removed"]["count"]) == (0, 1)
    assert not path_of(tmp_path, digest_of(b"needless")).exists()
    store.close()


async def test_a_store_that_is_another_databases_is_refused(
    database_url: str, world: StoreWorld, tmp_path: Path
) -> None:
    old = time.time() - 48 * 3600
    for number in range(25):
        data = str(number).encode()
        path = path_of(tmp_path, digest_of(data))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (old, old))
    (tmp_path / "partial").mkdir()
    env = {"RARA_DATABASE_URL": database_url, "RARA_BLOB_STORE": f"file://{tmp_path}"}
    refused = await rara(*GC, "--grace", "0s", env=env)
    assert (refused.code, "STORE_MISMATCH: of 25 stored blobs, this database knows 0" in refused.err) == (
        5,
        True,
    )
    forced = await rara(*GC, "--grace", "0s", "--force", env=env)
    assert (forced.code, forced.json["removed"]["count"]) == (0, 25)


async def test_what_cannot_be_reached_is_said(database_url: str, tmp_path: Path) -> None:
    env = {"RARA_DATABASE_URL": database_url, "RARA_BLOB_STORE": f"file://{tmp_path}/none"}
    gone = await rara(*GC, env=env)
    assert (gone.code, "STORE_UNAVAILABLE" in gone.err) == (6, True)
    assert not (tmp_path / "none").exists()
    url = "postgresql://rara:hunter2@127.0.0.1:1/rara"
    away = await rara(*GC, env=env | {"RARA_DATABASE_URL": url})
    assert (away.code, "hunter2" in away.err) == (6, False)


async def test_a_bucket_is_collected_as_a_folder_is(
    database_url: str, world: StoreWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with s3_server(tmp_path) as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        bucket = await s3.new_bucket()
        url = f"s3://{bucket}/some/where"
        env = {"RARA_DATABASE_URL": database_url, "RARA_BLOB_STORE": url}
        store = open_blob_store(url)
        await store.prepare()
        await _needed_and_not(world, BlobTransfers(store, BlobRows(world.database)))
        orphan = digest_of(b"orphan")
        key = f"some/where/sha256/{orphan.sha256[:2]}/{orphan.sha256[2:]}"
        await s3.put(bucket, key, b"orphan")
        assert await store.verify(orphan)

        await s3.fail("503 SlowDown", method="POST", count=100)
        await s3.fail("503 SlowDown", method="DELETE", count=100)
        broken = await rara(*GC, *AT_ONCE, env=env)
        assert (broken.code, broken.json["removed"]["count"]) == (6, 0)
        assert broken.json["failures"] >= 1
        await s3.heal()
        found = await rara(*GC, *AT_ONCE, env=env)
        assert (found.code, found.json["removed"]) == (0, {"count": 2, "bytes": 14})
        assert await store.size(digest_of(b"needless").sha256) is None
        assert await store.size(orphan.sha256) is None
        assert await lies(world.raw, store) == []
        store.close()
