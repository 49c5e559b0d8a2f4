"""Garbage collection of blobs: what is kept, what goes, and what a collection that was cut off leaves."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from rara_scheduler.blobs import BlobDigest, FolderBlobStore
from rara_scheduler.blobs.checks import BlobChecks
from rara_scheduler.blobs.collector import Collector, Policy, StrangeStore
from rara_scheduler.blobs.transfers import BlobTransfers
from rara_scheduler.domain.attempt import Checkpoint, EventType, Outcome, Report
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.start_command import RunArtifact
from rara_scheduler.store.blobs import BlobRows, UploadNotFound
from rara_scheduler.store.check import check, check_blob_bytes
from rara_scheduler.store.garbage import GarbageRows
from support.blob_garbage import AT_ONCE, collect, digest_of, facts_of, lies, path_of, pieces_of, upload
from support.stepped_database import Interleaver, SteppedDatabase
from support.store_world import StoreWorld, accepted, failed, running, store_world, succeeded

DAY_AGO = time.time() - 25 * 3600


@dataclass
class Place:
    """Stores, a folder of blobs, and a scheduler's transfers."""

    world: StoreWorld
    root: Path
    store: FolderBlobStore
    transfers: BlobTransfers

    async def put(self, text: str) -> BlobDigest:
        return await upload(self.transfers, text.encode())

    async def remaining(self) -> set[str]:
        """SHA-256 of the rows; equal to what lies in the folder."""
        rows = {row["sha256"] for row in await self.world.raw.fetch("select sha256 from rara.blob")}
        assert rows == {
            blob.parent.name + blob.name for blob in (self.root / "sha256").rglob("*") if blob.is_file()
        }
        return rows


@pytest.fixture
async def place(database_url: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with store_world(database_url) as world:
        store = FolderBlobStore(tmp_path)
        await store.prepare()
        await world.define("one", {"a": {}})
        yield Place(world, tmp_path, store, BlobTransfers(store, BlobRows(world.database)))
        store.close()


def effect(sequence: int, name: str, result: bytes) -> Report:
    return Report(sequence, EventType.EFFECT, b"e", effect=(name, result))


def progress(sequence: int, *blobs: BlobDigest) -> Report:
    kept = Checkpoint(b"{}", tuple(facts_of(f"part-{n}", blob) for n, blob in enumerate(blobs)))
    return Report(sequence, EventType.PROGRESS, b"p", checkpoint=kept)


async def test_what_history_refers_to_is_kept_and_the_rest_goes(place: Place) -> None:
    world = place.world
    made, kept_of_failed, given, part, named, spent_part, lonely = [
        await place.put(text)
        for text in (
            "made",
            "kept of a failed",
            "given",
            "part",
            "named by an effect",
            "spent part",
            "lonely",
        )
    ]
    for _ in range(3):
        await world.start("one", artifacts=(RunArtifact("given", given.sha256, given.size_bytes, "", ""),))
    done, broken, going = await world.lease(3)
    await world.report(
        done, accepted(), running(), progress(3, spent_part), succeeded(4, artifacts=[facts_of("made", made)])
    )
    await world.report(
        broken,
        accepted(),
        running(),
        Report(3, EventType.FAILED, b"f", error=failed(3).error, partial=(facts_of("log", kept_of_failed),)),
    )
    await world.report(
        going,
        accepted(),
        running(),
        progress(3, part),
        effect(4, "index", b'{"digest": "%s"}' % named.sha256.encode()),
    )
    open_upload, _ = await place.transfers.create_upload(digest_of(b"not all here"), None)

    dry = await collect(world.database, place.store, Policy(unused_s=0.0, grace_s=0.0, is_dry=True))
    assert (dry.unused.count, dry.unused.size_bytes) == (2, spent_part.size_bytes + lonely.size_bytes)
    assert (dry.kept.count, dry.removed.count) == (5, 0)
    assert len(await place.remaining()) == 7

    young = await collect(world.database, place.store, Policy(unused_s=3600.0, grace_s=0.0))
    assert (young.kept.count, young.unused.count, young.removed.count) == (7, 0, 0)

    found = await collect(world.database, place.store)
    assert (found.kept.count, found.unused.count, found.removed.count, found.pending) == (5, 2, 2, 0)
    assert found.removed.size_bytes == dry.unused.size_bytes
    assert await place.remaining() == {b.sha256 for b in (made, kept_of_failed, given, part, named)}
    assert (await place.transfers.status(open_upload)).committed_bytes == 0
    assert await lies(world.raw, place.store) == []

    # The step that goes on has succeeded: nobody is given its checkpoint or effect any more.
    await world.report(going, succeeded(5))
    await collect(world.database, place.store)
    assert await place.remaining() == {b.sha256 for b in (made, kept_of_failed, given)}


async def test_a_removed_runs_blobs_go_unless_a_kept_run_has_them_as_input(place: Place) -> None:
    world = place.world
    shared, own = await place.put("shared"), await place.put("own")
    old = await world.start("one")
    grant = await world.lease_one()
    manifest = [facts_of("shared", shared), facts_of("own", own)]
    await world.report(grant, accepted(), running(), succeeded(3, artifacts=manifest))
    young = await world.start(
        "one", artifacts=(RunArtifact("given", shared.sha256, shared.size_bytes, "", ""),)
    )
    await world.raw.execute("set session_replication_role = replica")
    await world.raw.execute(
        "update rara.workflow_run set ended_at = now() - interval '9 days' where ended_at is not null"
    )
    await world.raw.execute("set session_replication_role = origin")
    removed = await world.raw.fetchval(
        "select runs from rara.remove_runs(array[$1::uuid, $2::uuid], now() - interval '1 day')", old, young
    )
    assert removed == 1
    await collect(world.database, place.store)
    assert await place.remaining() == {shared.sha256}
    # What remains is whole: the kept run's step reads what nobody is known to have made.
    (grant,) = await world.lease(1)
    read = Report(
        3, EventType.SUCCEEDED, b"s", outcome=Outcome(b"{}", consumed=((shared.sha256, shared.size_bytes),))
    )
    await world.report(grant, accepted(), running(), read)
    lineage = await world.raw.fetch("select workflow_run_id::text, produced from rara.lineage")
    assert [tuple(row) for row in lineage] == [(young, False)]
    assert (await check(world.raw)).broken == {}
    assert (await check_blob_bytes(world.raw, place.store)).looked_at == 1


async def test_orphans_and_dead_uploads_go_when_they_are_old(place: Place) -> None:
    world = place.world
    orphan, young_orphan = digest_of(b"orphan"), digest_of(b"young")
    for digest, data in ((orphan, b"orphan"), (young_orphan, b"young")):
        path = path_of(place.root, digest)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    os.utime(path_of(place.root, orphan), (DAY_AGO, DAY_AGO))
    dead, _ = await place.transfers.create_upload(digest_of(b"dead!"), None)
    live, _ = await place.transfers.create_upload(digest_of(b"live!"), None)
    rowless = "0198c2a0-0000-7000-8000-000000000001"
    for upload_id in (dead, live, rowless):
        partial = place.root / "partial" / upload_id
        partial.write_bytes(b"dea")
        os.utime(partial, (DAY_AGO, DAY_AGO))
    await world.raw.execute("update rara.upload set expires_at = now() where upload_id = $1::uuid", dead)

    policy = Policy(grace_s=0.0)
    found = await collect(world.database, place.store, policy)
    assert (found.orphans.count, found.orphans.size_bytes, found.removed.count) == (1, 6, 1)
    assert (found.uploads.count, found.uploads.size_bytes) == (2, 6)
    assert not path_of(place.root, orphan).exists()
    assert path_of(place.root, young_orphan).read_bytes() == b"young"
    assert {each.name for each in (place.root / "partial").iterdir()} == {live}
    with pytest.raises(UploadNotFound):
        await place.transfers.status(dead)
    assert (await place.transfers.status(live)).committed_bytes == 3


async def test_a_marked_blob_counts_as_missing_until_it_is_uploaded_again(place: Place) -> None:
    world = place.world
    digest = await place.put("come and gone")
    assert await GarbageRows(world.database).mark([digest.sha256], unused_s=0.0) == [digest]
    assert await place.transfers.missing([digest]) == [digest]
    await world.start("one")
    grant = await world.lease_one()
    last = succeeded(3, artifacts=[facts_of("made", digest)])
    refused = await world.report(grant, accepted(), running(), last)
    assert [r.code for r in refused.decisions[grant.lease_token].refused] == [Code.BLOBS_MISSING]
    with pytest.raises(Fault) as error:
        await world.start("one", artifacts=(RunArtifact("given", digest.sha256, digest.size_bytes, "", ""),))
    assert error.value.code == Code.ARTIFACT_NOT_FOUND
    await place.put("come and gone")
    assert (await world.report(grant, last)).decisions[grant.lease_token].refused == []
    found = await collect(world.database, place.store)
    assert (found.kept.count, found.removed.count) == (1, 0)
    assert await lies(world.raw, place.store) == []


async def test_a_damaged_blob_that_is_needed_stays_to_be_healed(place: Place) -> None:
    world = place.world
    digest = await place.put("whole")
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running(), succeeded(3, artifacts=[facts_of("made", digest)]))
    rows = BlobRows(world.database)
    await rows.mark(digest.sha256, await rows.now())
    found = await collect(world.database, place.store)
    assert (found.removed.count, found.pending) == (0, 1)
    await place.put("whole")
    assert await lies(world.raw, place.store) == []


async def test_a_look_at_the_bytes_does_not_spoil_what_is_stored_after_it(place: Place) -> None:
    """One finds the bytes gone, because they were collected; another uploads them and commits; the first marks."""
    rows = BlobRows(place.world.database)
    digest = await place.put("away and back")
    path_of(place.root, digest).unlink()
    before = await rows.now()
    await place.put("away and back")
    await rows.mark(digest.sha256, before)
    assert await place.transfers.missing([digest]) == []
    assert await BlobChecks(place.store, rows).report(digest, "its bytes are gone") is False
    assert await place.transfers.missing([digest]) == []


async def test_whoever_is_told_that_a_blob_is_there_has_time_to_use_it(place: Place) -> None:
    digest = await place.put("asked for")
    await place.world.raw.execute("update rara.blob set used_at = now() - interval '2 days'")
    policy = Policy(grace_s=0.0)
    assert (await collect(place.world.database, place.store, Policy(is_dry=True))).unused.count == 1
    assert await place.transfers.missing([digest]) == []
    assert (await collect(place.world.database, place.store, policy)).removed.count == 0
    await place.world.raw.execute("update rara.blob set used_at = now() - interval '2 days'")
    assert await place.transfers.create_upload(digest, None) == ("", None)
    assert (await collect(place.world.database, place.store, policy)).removed.count == 0


async def test_bytes_that_were_stored_again_meanwhile_are_not_removed(place: Place) -> None:
    """What a collector that lost its locks, and does not know it, would still do."""
    digest = await place.put("twice")
    before = await place.store.fingerprint(digest.sha256)
    await place.world.raw.execute("update rara.blob set marked_at = now()")
    await place.put("twice")
    assert await place.store.remove(digest.sha256, only=before) is False
    assert await place.store.verify(digest)
    assert await place.store.remove(digest.sha256, only=await place.store.fingerprint(digest.sha256)) is True
    assert await place.store.size(digest.sha256) is None


async def test_an_upload_that_was_removed_under_its_writer_does_not_count(place: Place) -> None:
    digest = digest_of(b"late")
    upload_id, _ = await place.transfers.create_upload(digest, None)
    await place.transfers.write(upload_id, pieces_of(b"late"))
    await place.world.raw.execute("delete from rara.blob")
    await place.world.raw.execute("delete from rara.upload")
    with pytest.raises(UploadNotFound):
        await BlobRows(place.world.database).record(digest, upload_id)
    assert await place.world.raw.fetchval("select count(*) from rara.blob") == 0


async def test_a_store_that_is_mostly_unknown_is_left_alone(place: Place) -> None:
    for number in range(30):
        await place.put(f"number {number}")
    await place.world.raw.execute("delete from rara.blob")
    await place.world.raw.execute("delete from rara.upload")
    with pytest.raises(StrangeStore, match="of 30 stored blobs, this database knows 0"):
        await collect(place.world.database, place.store)
    assert len(list((place.root / "sha256").rglob("??????*"))) == 30
    found = await collect(place.world.database, place.store, Policy(unused_s=0, grace_s=0, any_store=True))
    assert (found.orphans.count, found.removed.count) == (30, 30)
    assert await place.remaining() == set()


async def test_several_collectors_share_the_work(place: Place) -> None:
    for number in range(120):
        await place.put(f"number {number}")
    found = await asyncio.gather(*(collect(place.world.database, place.store) for _ in range(3)))
    assert sum(each.removed.count for each in found) == 120
    assert sum(each.failures for each in found) == 0
    assert await place.remaining() == set()


async def test_a_collection_that_ends_anywhere_leaves_nothing_wrong(
    database_url: str, tmp_path: Path
) -> None:
    """Cut off before each of its statements in turn; the next one finishes."""
    async with store_world(database_url, SteppedDatabase) as world:
        store = FolderBlobStore(tmp_path)
        await store.prepare()
        rows = BlobRows(world.database)
        transfers = BlobTransfers(store, rows)
        await world.define("one", {"a": {}})
        await world.start("one")
        grant = await world.lease_one()
        needed = await upload(transfers, b"needed")
        await world.report(grant, accepted(), running(), succeeded(3, artifacts=[facts_of("made", needed)]))
        cut, steps = 0, 0
        while cut == steps:  # until one comes to its end
            cut, steps = cut + 1, 0
            gone = await upload(transfers, b"gone")
            (tmp_path / "sha256" / "ab").mkdir(exist_ok=True)
            orphan = tmp_path / "sha256" / "ab" / ("0" * 62)
            orphan.write_bytes(b"orphan")
            acts = Interleaver(world.raw)
            await acts.begin("gc", Collector(store, GarbageRows(world.database), rows, AT_ONCE).run())
            while steps < cut and acts.ready():
                await acts.step(acts.ready()[0])
                steps += 1
            await acts.abandon()
            assert await lies(world.raw, store) == [], f"cut off after {steps} statements"
            found = await collect(world.database, store)
            assert (found.pending, found.failures) == (0, 0)
            assert await store.size(gone.sha256) is None
            assert not orphan.exists()
            assert await world.raw.fetchval("select count(*) from rara.blob") == 1
        assert cut > 10
        store.close()
