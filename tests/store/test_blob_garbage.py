"""Garbage collection of blobs: what is kept, what goes, and what a collection that was cut off leaves."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rara_scheduler.blobs import BlobDigest, FolderBlobStore
from rara_scheduler.blobs.checks import BlobChecks
from rara_scheduler.blobs.collector import BEGIN_S, Collector, Policy, StrangeStore
from rara_scheduler.blobs.port import BlobStoreUnavailable, RemovalUnknown
from rara_scheduler.blobs.transfers import BlobTransfers, TransferLimits
from rara_scheduler.domain.attempt import Checkpoint, EventType, Outcome, Report
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.start_command import RunArtifact
from rara_scheduler.store.blobs import BlobBeingRemoved, BlobRows, UploadNotFound
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

    policy = Policy(grace_s=0.0, any_store=True)
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


@pytest.mark.parametrize(("stored", "known"), [(1, 0), (5, 2), (30, 0)])
async def test_a_store_that_is_mostly_unknown_is_left_alone(place: Place, stored: int, known: int) -> None:
    digests = [await place.put(f"number {number}") for number in range(stored)]
    ours = [digest.sha256 for digest in digests[:known]]
    await place.world.raw.execute("delete from rara.blob where sha256 <> all ($1::text[])", ours)
    await place.world.raw.execute("delete from rara.upload")
    with pytest.raises(StrangeStore, match=f"of {stored} stored blobs, this database knows {known}"):
        await collect(place.world.database, place.store)
    assert len(list((place.root / "sha256").rglob("??????*"))) == stored
    found = await collect(place.world.database, place.store, Policy(unused_s=0, grace_s=0, any_store=True))
    assert (found.orphans.count, found.removed.count) == (stored - known, stored)
    assert await place.remaining() == set()


async def test_a_store_that_has_nothing_of_what_is_known_is_another_one(place: Place, tmp_path: Path) -> None:
    digest = await place.put("stored elsewhere")
    (tmp_path / "empty").mkdir()
    other = FolderBlobStore(tmp_path / "empty")
    await other.prepare()
    with pytest.raises(StrangeStore, match="of 1 blobs that this database knows, none is stored here"):
        await collect(place.world.database, other)
    assert (
        await place.world.raw.fetchval("select sha256 from rara.blob where marked_at is null")
        == digest.sha256
    )


# ---------------------------------------------------------------- removals without an answer


async def expire_claims(world: StoreWorld) -> None:
    """As if the time were over in which a removal that was begun may still happen."""
    await world.raw.execute("update rara.blob set removing_until = now() where removing_until is not null")


class LateStore(FolderBlobStore):
    """Carries out a removal when its caller has long given up, as a service of objects may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun = asyncio.Event()
        self.answers = True

    async def remove(self, sha256: str, *, only: Hashable | None = None, until: float | None = None) -> bool:
        self.begun.set()
        if not self.answers:
            await asyncio.Event().wait()
        raise RemovalUnknown("no answer in time")


@pytest.mark.parametrize("ending", ["has no answer", "is cut off"])
async def test_nobody_uploads_what_a_removal_may_still_take_away(place: Place, ending: str) -> None:
    world, store = place.world, LateStore(place.root)
    digest = await place.put("precious")
    await world.raw.execute("delete from rara.upload")
    if ending == "is cut off":
        store.answers = False
        task = asyncio.create_task(collect(world.database, store))
        await store.begun.wait()
        task.cancel()
        await asyncio.wait({task})
    else:
        found = await collect(world.database, store)
        assert (found.failures, found.pending, found.removed.count) == (1, 1, 0)

    transfers = BlobTransfers(store, BlobRows(world.database), TransferLimits(removal_wait_s=0.0))
    with pytest.raises(BlobBeingRemoved) as refused:
        await upload(transfers, b"precious")
    assert (refused.value.code, refused.value.retry_after_s) == (Code.STORE_UNAVAILABLE, 5.0)
    again = await collect(world.database, place.store)
    assert (again.removed.count, again.pending) == (0, 1)  # nor does another collection say that it is over
    left_s = await world.raw.fetchval("select extract(epoch from removing_until - now()) from rara.blob")
    assert store.removal_s < left_s <= BEGIN_S + store.removal_s
    path_of(place.root, digest).unlink()  # only now

    await expire_claims(world)
    await upload(transfers, b"precious")
    await world.start("one")
    grant = await world.lease_one()
    last = succeeded(3, artifacts=[facts_of("made", digest)])
    done = await world.report(grant, accepted(), running(), last)
    assert done.decisions[grant.lease_token].refused == []
    assert await lies(world.raw, store) == []
    store.close()


async def test_an_upload_waits_for_a_removal_that_ends_soon(place: Place) -> None:
    digest = await place.put("away and back")
    rows = place.world.raw
    await rows.execute("delete from rara.upload")
    await rows.execute("update rara.blob set marked_at = now()")
    garbage = GarbageRows(place.world.database)
    claim = await garbage.claim([digest.sha256], grace_s=0.0, removal_s=60.0)
    assert claim is not None
    waiting = asyncio.create_task(place.put("away and back"))
    await asyncio.wait({waiting}, timeout=0.3)
    assert not waiting.done()
    await place.store.remove(digest.sha256)
    await garbage.settle(claim, gone=[digest.sha256], spared=[])
    await waiting
    assert await lies(rows, place.store) == []
    assert await garbage.still_claimed(claim) == set()


class SlowStore(FolderBlobStore):
    """Takes its time for each look."""

    async def fingerprint(self, sha256: str) -> tuple[int, ...] | None:
        await asyncio.sleep(0.25)
        return await super().fingerprint(sha256)


async def test_slow_looks_do_not_stop_a_collection(place: Place) -> None:
    """One after the other they would take 10 s."""
    store = SlowStore(place.root)
    for number in range(40):
        await place.put(f"number {number}")
    await place.world.raw.execute("delete from rara.upload")
    database = place.world.database
    late = await Collector(store, GarbageRows(database), BlobRows(database), AT_ONCE, begin_s=0.0).run()
    assert (late.removed.count, late.pending, late.failures) == (0, 40, 0)
    assert len(await place.remaining()) == 40
    found = await Collector(store, GarbageRows(database), BlobRows(database), AT_ONCE, begin_s=5.0).run()
    assert (found.removed.count, found.pending, found.failures) == (40, 0, 0)
    assert await place.remaining() == set()
    store.close()


class PartlyAway(FolderBlobStore):
    """Tells nothing about some blobs, and does not remove others."""

    async def fingerprint(self, sha256: str) -> tuple[int, ...] | None:
        if sha256[0] in "01":
            raise BlobStoreUnavailable("503")
        return await super().fingerprint(sha256)

    async def remove(self, sha256: str, *, only: Hashable | None = None, until: float | None = None) -> bool:
        if sha256[0] in "23":
            raise BlobStoreUnavailable("403")
        return await super().remove(sha256, only=only, until=until)


async def test_what_the_store_refuses_is_told_and_the_rest_goes(place: Place) -> None:
    store = PartlyAway(place.root)
    kept = {b.sha256 for b in [await place.put(f"number {n}") for n in range(40)] if b.sha256[0] in "0123"}
    found = await collect(place.world.database, store)
    assert 0 < len(kept) == found.failures == found.pending
    assert (found.removed.count, await place.remaining()) == (40 - len(kept), kept)
    again = await collect(place.world.database, place.store)
    assert (again.removed.count, await place.remaining()) == (len(kept), set())
    store.close()


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
            await expire_claims(world)
            assert await lies(world.raw, store) == [], f"cut off after {steps} statements"
            found = await collect(world.database, store)
            assert (found.pending, found.failures) == (0, 0)
            assert await store.size(gone.sha256) is None
            assert not orphan.exists()
            assert await world.raw.fetchval("select count(*) from rara.blob") == 1
        assert cut > 10
        store.close()
