"""Blobs that are spoiled between their upload and the commit: the result waits, and no work is lost. Both languages."""

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from rara.v1 import common_pb2
from rara_scheduler.blobs.transfers import BlobTransfers, Progress
from rara_testing.processes import Processes
from support.go_executor import spawn_go_executor
from support.running_scheduler import RunningScheduler, running_scheduler
from support.spawned_executor import spawn_executor

pytestmark = pytest.mark.needs("go")

SIZES = {"python": 300_000, "go": 290_000}


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as processes:
        yield processes


def spoiling(patch: pytest.MonkeyPatch, folder: Path, spoil: Callable[[Path], None]) -> list[int]:
    """Spoils each blob when it is uploaded for the first time; the sizes of all that were uploaded."""
    uploaded: list[int] = []
    write = BlobTransfers.write

    async def write_and_spoil(self: BlobTransfers, upload_id: str, pieces: object) -> Progress:
        progress = await write(self, upload_id, pieces)  # type: ignore[arg-type]  # passed on as it came
        if progress.verified is not None:
            if progress.verified.size_bytes not in uploaded:
                sha256 = progress.verified.sha256
                spoil(folder / "blobs" / "sha256" / sha256[:2] / sha256[2:])
            uploaded.append(progress.verified.size_bytes)
        return progress

    patch.setattr(BlobTransfers, "write", write_and_spoil)
    return uploaded


def flip(path: Path) -> None:
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.write(b"\xff")
    os.utime(path, ns=(0, 0))


async def run_both(
    world: RunningScheduler, processes: Processes, folder: Path
) -> dict[str, tuple[str, int, int]]:
    """Each language makes an artifact; state, attempt and failures of its step in the end."""
    await spawn_executor(
        processes, world.address, folder, module="rara_testing.probes", name="python", slots=1, prestart=0
    )
    await spawn_go_executor(processes, world.address, folder, slots=1)
    steps = {
        language: {
            "kind": "probe.artifact",
            "executor_kind": language,
            "input_template": common_pb2.Payload(data=b'{"size": %d}' % size),
        }
        for language, size in SIZES.items()
    }
    await world.define("two", steps)
    run_id = await world.start("two")
    await world.until_run(run_id, "succeeded")
    rows = await world.raw.fetch("select step_name, state, attempt, failures from rara.step_state")
    return {row["step_name"]: (row["state"], row["attempt"], row["failures"]) for row in rows}


async def test_a_blob_that_is_missing_at_the_commit_is_uploaded_again_by_the_same_attempt(
    database_url: str, tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded = spoiling(monkeypatch, tmp_path, Path.unlink)
    async with running_scheduler(database_url, tmp_path) as world:
        ended = await run_both(world, processes, tmp_path)
        assert ended == dict.fromkeys(SIZES, ("succeeded", 1, 0))
        assert sorted(uploaded) == sorted([*SIZES.values()] * 2)


async def test_a_blob_that_has_changed_at_the_commit_is_made_again_by_the_next_attempt(
    database_url: str, tmp_path: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploaded = spoiling(monkeypatch, tmp_path, flip)
    async with running_scheduler(database_url, tmp_path) as world:
        ended = await run_both(world, processes, tmp_path)
        assert ended == dict.fromkeys(SIZES, ("succeeded", 2, 1))
        reasons = await world.raw.fetch("select reason, error->>'code' as code from rara.step_attempt")
        assert {(row["reason"], row["code"]) for row in reasons} == {
            ("ARTIFACT_MISMATCH", "ARTIFACT_MISMATCH")
        }
        assert sorted(uploaded) == sorted([*SIZES.values()] * 2)
