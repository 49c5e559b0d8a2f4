"""Uploads, commits and collections of the same few blobs at once: what a manifest names is there, and right."""

import asyncio
import random
from collections.abc import AsyncIterator, Hashable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rara_scheduler.blobs import BlobDigest, BlobWriter, FolderBlobStore
from rara_scheduler.blobs.collector import Collector
from rara_scheduler.blobs.transfers import BlobTransfers, TransferLimits
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.start_command import RunArtifact
from rara_scheduler.store.blobs import BlobBeingRemoved, BlobRows
from rara_scheduler.store.database import Conflict, Database
from rara_scheduler.store.garbage import GarbageRows
from support.blob_garbage import AT_ONCE, digest_of, facts_of, lies, upload
from support.postgres import PostgresServer
from support.stepped_database import Interleaver, SteppedDatabase, gate
from support.store_world import StoreWorld, accepted, running, store_world, succeeded

# With a blob or two, what a crash has left is soon most of all.
OURS = replace(AT_ONCE, any_store=True)
DATA = b"the one blob that everybody wants"
DIGEST = digest_of(DATA)
ORDERS = 20


class _Nobody:
    """For a gate that stands before work on files."""

    def get_server_pid(self) -> int:
        return 0


class _GatedWriter:
    def __init__(self, writer: BlobWriter) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    async def keep(self) -> None:
        await gate(_Nobody())  # type: ignore[arg-type]  # only its number is asked for
        await self._writer.keep()


class GatedStore(FolderBlobStore):
    """A folder in which storing and removing a blob's bytes are steps of an Act, too."""

    @asynccontextmanager
    async def write(self, upload_id: str, expected: BlobDigest) -> AsyncIterator[Any]:
        async with super().write(upload_id, expected) as writer:
            yield _GatedWriter(writer)

    async def fingerprint(self, sha256: str) -> tuple[int, ...] | None:
        await gate(_Nobody())  # type: ignore[arg-type]
        return await super().fingerprint(sha256)

    async def remove(self, sha256: str, *, only: Hashable | None = None, until: float | None = None) -> bool:
        await gate(_Nobody())  # type: ignore[arg-type]
        return await super().remove(sha256, only=only, until=until)


@dataclass
class Scene:
    """Two schedulers with one database and one folder."""

    worlds: tuple[StoreWorld, StoreWorld]
    store: GatedStore

    def transfers(self, at: int) -> BlobTransfers:
        database = self.worlds[at].database
        # Step by step, who waits for a removal would wait for a step of it.
        wait_s = 0.0 if isinstance(database, SteppedDatabase) else 5.0
        return BlobTransfers(self.store, BlobRows(database), TransferLimits(removal_wait_s=wait_s))

    async def upload(self, at: int) -> None:
        """Twice over, as an executor does when its blob is missing."""
        await upload(self.transfers(at), DATA)

    async def commit(self, at: int) -> None:
        """A success that names the blob; uploaded again as long as it is missing."""
        world = self.worlds[at]
        for _ in range(20):
            if grants := await world.lease(1):
                break
            await world.start("one")
        grant = grants[0]
        last = succeeded(3, artifacts=[facts_of("made", DIGEST)])
        for _ in range(20):
            await upload(self.transfers(at), DATA)
            result = await world.report(grant, accepted(), running(), last)
            decision = result.decisions.get(grant.lease_token)
            if decision is None or not decision.refused:
                return
            assert [r.code for r in decision.refused] == [Code.BLOBS_MISSING]
        raise AssertionError("20 uploads in turn were collected before their commit")

    async def start(self, at: int) -> None:
        """A run that is given the blob."""
        given = RunArtifact("given", DIGEST.sha256, DIGEST.size_bytes)
        for _ in range(20):
            await upload(self.transfers(at), DATA)
            try:
                await self.worlds[at].start("one", artifacts=(given,))
                return
            except Fault as error:
                if error.code != Code.ARTIFACT_NOT_FOUND:
                    raise
        raise AssertionError("20 uploads in turn were collected before the start")

    async def collect(self, at: int) -> None:
        database = self.worlds[at].database
        await Collector(self.store, GarbageRows(database), BlobRows(database), OURS).run()

    async def forget(self) -> None:
        """Nothing needs the blob any more."""
        raw = self.worlds[0].raw
        for table in ("artifact", "run_artifact", "lineage"):
            await raw.execute(f"delete from rara.{table}")


@asynccontextmanager
async def scene(url: str, root: Path, open_database: Any = SteppedDatabase) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        worlds = [await stack.enter_async_context(store_world(url, open_database)) for _ in range(2)]
        store = GatedStore(root, busy_wait_s=0.05)  # who holds an upload may stand at a gate
        stack.callback(store.close)
        await store.prepare()
        await worlds[0].define("one", {"a": {}})
        yield Scene((worlds[0], worlds[1]), store)


# ---------------------------------------------------------------- statement by statement


async def _in_some_order(scene: Scene, seed: int) -> None:
    """An upload, a commit and two collections; the seed says whose statement or file work is next."""
    draw = random.Random(seed)
    acts = Interleaver(scene.worlds[0].raw)
    before = draw.choice(("there", "marked", "orphan", "nothing"))
    raw = scene.worlds[0].raw
    await scene.forget()
    await raw.execute("delete from rara.upload")
    if before != "nothing":
        await upload(scene.transfers(0), DATA)
    if before == "marked":
        await raw.execute("update rara.blob set marked_at = now() - interval '1 s'")
    if before == "orphan":
        await raw.execute("delete from rara.blob")
    await raw.execute("delete from rara.upload")
    works = [(scene.collect, 0), (draw.choice((scene.commit, scene.start, scene.upload)), 1)]
    works += draw.sample([(scene.collect, 1), (scene.commit, 0), (scene.start, 0)], draw.randrange(3))

    for work, at in works:
        await acts.begin(work.__name__, work(at))
    favourite = draw.random()
    for _ in range(200):
        ready = acts.ready()
        if not ready:
            break
        # Runs of one act's statements, so that one stands still while another does much.
        chosen = ready[0] if draw.random() < favourite else draw.choice(ready)

        await acts.step(chosen)
        if draw.random() < 0.3:
            favourite = draw.random()
            acts.acts.reverse()
    await acts.finish()
    assert await lies(raw, scene.store) == [], f"seed {seed}"


async def test_in_any_order_of_statements_no_manifest_lies(database_url: str, tmp_path: Path) -> None:
    async with scene(database_url, tmp_path) as where:
        for seed in range(ORDERS):
            await _in_some_order(where, seed)


async def test_an_upload_that_begins_while_its_bytes_are_removed_is_put_off(
    database_url: str, tmp_path: Path
) -> None:
    """The critical pair: a collection has found no upload and stands before the bytes; now one comes."""
    async with scene(database_url, tmp_path) as where:
        raw = where.worlds[0].raw
        await upload(where.transfers(0), DATA)
        await raw.execute("delete from rara.upload")
        acts = Interleaver(raw)
        await acts.begin("gc", where.collect(0))
        collecting = acts.acts[0]
        while collecting.pid:  # until it is to look at the bytes that it removes
            await acts.step(collecting)
        await acts.begin("upload", where.upload(1))
        uploading = acts.acts[1]
        while others := [act for act in acts.ready() if act is not collecting]:
            await acts.step(others[0])
        assert isinstance(uploading.refused, BlobBeingRemoved)
        await acts.finish()
        await upload(where.transfers(1), DATA)
        assert await lies(raw, where.store) == []
        assert await where.store.verify(DIGEST)


@pytest.mark.soak
async def test_in_many_orders_of_statements_no_manifest_lies(database_url: str, tmp_path: Path) -> None:
    async with scene(database_url, tmp_path) as where:
        for seed in range(10_000, 11_000):
            await _in_some_order(where, seed)


# ---------------------------------------------------------------- as fast as they can


async def _race(server: PostgresServer, root: Path, seconds: float, seed: int) -> dict[str, int]:
    """Four uploaders who commit, three collectors, two schedulers; how often each came through."""
    draw = random.Random(seed)
    done = {"commit": 0, "start": 0, "collect": 0, "removed": 0}
    async with server.database() as url, scene(url, root, Database) as where:
        end = asyncio.get_running_loop().time() + seconds

        async def going() -> bool:
            late_s = asyncio.get_running_loop().time() - end
            # On a busy machine until each has come through.
            return late_s < 0 or (late_s < 20 and not all(done.values()))

        async def commit(at: int) -> None:
            while await going():
                await _insist(where.commit if draw.random() < 0.5 else where.start, at, done)

        async def collect(at: int) -> None:
            database = where.worlds[at].database
            while await going():
                collector = Collector(where.store, GarbageRows(database), BlobRows(database), OURS)
                try:
                    found = await collector.run()
                except (Fault, Conflict):
                    continue
                done["collect"] += 1
                done["removed"] += found.removed.count

        async def forget() -> None:
            while await going():
                await where.forget()
                # What was cut off would keep the blob for a day.
                await where.worlds[0].raw.execute(
                    "delete from rara.upload where created_at < now() - interval '0.1 s'"
                )
                await asyncio.sleep(0.02)

        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(commit(number % 2))
            for number in range(3):
                tasks.create_task(collect(number % 2))
            tasks.create_task(forget())
        assert await lies(where.worlds[0].raw, where.store) == []
    return done


async def _insist(work: Any, at: int, done: dict[str, int]) -> None:
    try:
        await work(at)
    except (Fault, Conflict, AssertionError) as error:
        # Starved by three collectors without any patience: allowed here, and nothing lies for it.
        if isinstance(error, AssertionError) and "in turn" not in str(error):
            raise
    else:
        done[work.__name__] += 1


async def test_racing_collectors_spoil_no_manifest(postgres_server: PostgresServer, tmp_path: Path) -> None:
    done = await _race(postgres_server, tmp_path, 1.0, 1)
    assert all(done.values()), done


@pytest.mark.soak
async def test_racing_collectors_spoil_no_manifest_fifty_times(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    for seed in range(50):
        done = await _race(postgres_server, tmp_path / str(seed), 1.0, seed)
        assert done["collect"], done
