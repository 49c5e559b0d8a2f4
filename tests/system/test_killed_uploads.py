"""Whoever is killed in the middle of a transfer costs what was under way, and no more: the next one goes on."""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rara_client import Client
from rara_scheduler.blobs.folder import FolderWriter
from rara_testing.processes import Process, Processes
from rara_testing.scripted_executor import WAIT_S
from support.go_executor import spawn_go_executor
from support.running_scheduler import RunningScheduler, running_scheduler
from support.spawned_executor import spawn_executor

SIZE = 3_000_000
HALF = SIZE // 2
# What `probe.artifact` makes, in both languages.
CONTENT = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]

UPLOAD = """
import asyncio, sys
from pathlib import Path
from rara_client import Client

async def main():
    async with Client.connect(sys.argv[1]) as client:
        print((await client.upload_blob(Path(sys.argv[2]))).sha256, flush=True)

asyncio.run(main())
"""


class HeldStore:
    """Lets uploads come to their half, and no further while it is shut.

    begun_at: where each writer began; appended_bytes: what each has been told was stored of its own.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.begun_at: list[int] = []
        self.appended_bytes: list[int] = []
        self._writers: list[FolderWriter] = []
        append = FolderWriter.append

        async def held(writer: FolderWriter, data: bytes) -> None:
            if writer not in self._writers:
                self._writers.append(writer)
                self.begun_at.append(writer.committed_bytes)
                self.appended_bytes.append(0)
            if writer.committed_bytes >= HALF and not self.opened.is_set():
                self.reached.set()
                await self.opened.wait()
            await append(writer, data)
            self.appended_bytes[self._writers.index(writer)] += len(data)

        patch.setattr(FolderWriter, "append", held)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HeldStore:
    return HeldStore(monkeypatch)


@pytest.fixture
async def world(database_url: str, tmp_path: Path, store: HeldStore) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as world:
        yield world
        store.opened.set()


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as processes:
        yield processes


def assert_gone_on(store: HeldStore, folder: Path) -> None:
    """The second writer began where the first one was cut, and every byte came once."""
    first, second = store.begun_at
    assert first == 0
    assert second >= HALF
    # Of the first, the bytes that were being stored when it ended may be there, and not be told.
    assert store.appended_bytes[1] == SIZE - second
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    assert (folder / "blobs" / "sha256" / sha256[:2] / sha256[2:]).read_bytes() == CONTENT
    assert list((folder / "blobs" / "partial").iterdir()) == []


@pytest.mark.parametrize(
    ("killed", "next_one"),
    [
        ("python", "python"),
        pytest.param("go", "go", marks=pytest.mark.needs("go")),
        pytest.param("go", "python", marks=[pytest.mark.needs("go"), pytest.mark.soak]),
        pytest.param("python", "go", marks=[pytest.mark.needs("go"), pytest.mark.soak]),
    ],
)
async def test_the_next_attempt_goes_on_with_the_upload_of_a_killed_executor(
    world: RunningScheduler,
    processes: Processes,
    store: HeldStore,
    tmp_path: Path,
    killed: str,
    next_one: str,
) -> None:
    async def start(language: str, name: str) -> Process:
        if language == "go":
            return await spawn_go_executor(processes, world.address, tmp_path, name=name, slots=1)
        return await spawn_executor(
            processes, world.address, tmp_path, module="rara_testing.probes", name=name, slots=1, prestart=0
        )

    await world.define("one", {"a": {"kind": "probe.artifact"}})
    first = await start(killed, "first")
    run_id = await world.start("one", value={"size": SIZE})
    async with asyncio.timeout(WAIT_S):
        await store.reached.wait()
    await first.kill_and_wait()
    store.opened.set()
    await start(next_one, "second")
    await world.until_run(run_id, "succeeded")
    assert_gone_on(store, tmp_path)
    rows = await world.raw.fetch("select attempt, name, size_bytes from rara.artifact")
    assert [tuple(row) for row in rows] == [(2, "out", SIZE)]


async def test_a_client_goes_on_with_the_upload_of_a_killed_one(
    world: RunningScheduler, processes: Processes, store: HeldStore, tmp_path: Path
) -> None:
    path = tmp_path / "input"
    path.write_bytes(CONTENT)
    command = [sys.executable, "-c", UPLOAD, world.address, str(path)]
    first = await processes.start("first", command)
    async with asyncio.timeout(WAIT_S):
        await store.reached.wait()
    await first.kill_and_wait()
    store.opened.set()
    second = await processes.start("second", command)
    await second.expect_line(hashlib.sha256(CONTENT).hexdigest())
    assert_gone_on(store, tmp_path)


async def test_a_second_client_does_not_wait_for_one_that_hangs(
    world: RunningScheduler, processes: Processes, store: HeldStore, tmp_path: Path
) -> None:
    """Somebody else is uploading the digest at this moment: each has an upload of its own."""
    path = tmp_path / "input"
    path.write_bytes(CONTENT)
    await processes.start("hangs", [sys.executable, "-c", UPLOAD, world.address, str(path)])
    async with asyncio.timeout(WAIT_S):
        await store.reached.wait()
    async with Client.connect(world.address) as client:
        upload = asyncio.create_task(client.upload_blob(CONTENT))
        async with asyncio.timeout(WAIT_S):
            while len(store.begun_at) < 2:
                await asyncio.sleep(0.01)
        store.opened.set()
        assert (await upload).sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert store.begun_at == [0, 0]
