"""A full disk, of the blob store or of an executor, costs time and no work: in both languages."""

import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rara.v1 import common_pb2, workflow_pb2
from rara_client import Client
from rara_scheduler.blobs.folder import FolderBlobStore
from rara_testing.processes import Processes
from support.go_executor import spawn_go_executor
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.small_disk import SmallDisk, small_disk
from support.spawned_executor import spawn_executor

pytestmark = pytest.mark.needs("go")

MIB = 1 << 20
SIZES = {"python": 3_000_000, "go": 2_900_000}
LANGUAGES = tuple(SIZES)


def content(size: int) -> bytes:
    """What `probe.artifact` makes."""
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", size_bytes=16 * MIB) as disk:
        yield disk


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as processes:
        yield processes


async def start_both(processes: Processes, world: RunningScheduler, folder: Path) -> None:
    await spawn_executor(
        processes,
        world.address,
        folder,
        module="rara_testing.probes",
        name="python",
        slots=2,
        prestart=0,
        cache_bytes=0,
    )
    await spawn_go_executor(processes, world.address, folder, name="go", slots=2, cache_bytes=0)


async def define(world: RunningScheduler, *, with_source: bool = False, **more: Any) -> None:
    """A step for each language that makes an artifact of its own size."""
    sources = [workflow_pb2.ArtifactBinding(name="source")] if with_source else []
    steps = {
        language: {
            "kind": "probe.artifact",
            "executor_kind": language,
            "input_template": common_pb2.Payload(data=b'{"size": %d}' % size),
            "input_artifacts": sources,
            **more,
        }
        for language, size in SIZES.items()
    }
    await world.define("two", steps)


async def attempts(world: RunningScheduler, run_id: str) -> dict[str, tuple[str, int, int]]:
    rows = await world.raw.fetch(
        "select step_name, state, attempt, failures from rara.step_state where workflow_run_id = $1::uuid",
        run_id,
    )
    return {row["step_name"]: (row["state"], row["attempt"], row["failures"]) for row in rows}


def assert_stored(store: Path) -> None:
    for size in SIZES.values():
        sha256 = hashlib.sha256(content(size)).hexdigest()
        assert (store / "sha256" / sha256[:2] / sha256[2:]).read_bytes() == content(size)


async def test_work_waits_for_room_in_the_blob_store(
    database_url: str,
    tmp_path: Path,
    disk: SmallDisk,
    processes: Processes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk runs full in the middle of both uploads, for longer than a lease. No attempt is spent."""

    async def unknown(self: FolderBlobStore) -> int | None:  # else there would be no middle
        return None

    monkeypatch.setattr(FolderBlobStore, "free_bytes", unknown)
    async with running_scheduler(database_url, tmp_path, blob_store=f"file://{disk.path}") as world:
        await start_both(processes, world, tmp_path)
        await define(world)
        disk.fill(but_bytes=2 * MIB)
        run_id = await world.start("two")

        async def is_full() -> bool:
            return disk.free_bytes < MIB // 2

        await until(is_full, "full disk", 30)
        for size in SIZES.values():
            sha256 = hashlib.sha256(content(size)).hexdigest()
            assert not (disk.path / "sha256" / sha256[:2] / sha256[2:]).exists()
        assert await world.raw.fetchval("select count(*) from rara.blob") == 0
        assert {state for state, _, _ in (await attempts(world, run_id)).values()} <= {"leased", "running"}
        disk.make_room()
        await world.until_run(run_id, "succeeded")
        assert await attempts(world, run_id) == dict.fromkeys(LANGUAGES, ("succeeded", 1, 0))
        assert_stored(disk.path)


async def test_work_waits_for_room_on_the_executors_disk(
    database_url: str, tmp_path: Path, disk: SmallDisk, processes: Processes
) -> None:
    """Inputs are fetched when there is room; no attempt is spent on the wait."""
    async with (
        running_scheduler(database_url, tmp_path) as world,
        Client.connect(world.address) as client,
    ):
        await start_both(processes, world, disk.path)
        await define(world, with_source=True)
        source = await client.upload_blob(content(1_500_000))
        disk.fill(but_bytes=MIB)
        given = common_pb2.Artifact(name="source", digest=source)
        run_id = await world.start("two", input_artifacts=[given])

        async def is_full() -> bool:
            return disk.free_bytes < MIB // 2

        await until(is_full, "full disk", 30)
        disk.make_room()
        await world.until_run(run_id, "succeeded")
        assert await attempts(world, run_id) == dict.fromkeys(LANGUAGES, ("succeeded", 1, 0))
        assert_stored(tmp_path / "blobs")


async def test_an_output_that_finds_no_room_on_the_executors_disk_fails_its_attempt_by_name(
    database_url: str, tmp_path: Path, disk: SmallDisk, processes: Processes
) -> None:
    """The handler hears of it, and a later attempt, which finds room, succeeds."""
    async with running_scheduler(database_url, tmp_path) as world:
        await start_both(processes, world, disk.path)
        retry = workflow_pb2.RetryPolicy(max_attempts=1000)
        await define(world, retry=retry)
        disk.fill(but_bytes=MIB)
        run_id = await world.start("two")

        async def have_failed() -> bool:
            return all(failures > 0 for _, _, failures in (await attempts(world, run_id)).values())

        await until(have_failed, "failure of both", 30)
        disk.make_room()
        await world.until_run(run_id, "succeeded")
        errors = await world.raw.fetch(
            "select distinct a.reason, a.error->>'message' as message from rara.step_attempt a"
            " join rara.step_run s using (step_run_id) where s.workflow_run_id = $1::uuid",
            run_id,
        )
        assert {row["reason"] for row in errors} == {"DEPENDENCY_UNAVAILABLE"}
        assert all("the executor's disk is full (RARA_EXECUTOR_DIR)" in row["message"] for row in errors)
        assert_stored(tmp_path / "blobs")
        assert [file.name for file in disk.path.glob("*/jobs/*/*/out-*")] == []
