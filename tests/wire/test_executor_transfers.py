"""How the executor's transfers meet trouble: resumed where they were cut, waited for, given up with the right code."""

import asyncio
import errno
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_status import rpc_status
from rara.v1 import common_pb2, job_pb2
from rara_executor.artifact_files import keep_bytes, keep_file
from rara_executor.artifacts import ArtifactStore, JobArtifacts
from rara_executor.blob_cache import BlobCache
from rara_executor.blob_client import BlobClient
from rara_executor.errors import JobFailure
from rara_executor.runner_protocol import PutArtifact
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.transport.status import status_of
from rara_testing.scripted_scheduler import ScriptedScheduler, digest_of, job

DATA = os.urandom(1_500_000)
LEASE = job_pb2.Lease(step_run_id="step", lease_token=1, attempt=1)


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler() as scheduler:
        yield scheduler


@pytest_asyncio.fixture
async def channel(scheduler: ScriptedScheduler) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(scheduler.address) as channel:
        yield channel


def patient(channel: grpc.aio.Channel, patience_s: float = 60.0) -> BlobClient:
    return BlobClient(channel, patience_s=patience_s, jitter=lambda: 0.01)


@pytest.fixture
def client(channel: grpc.aio.Channel) -> BlobClient:
    return patient(channel)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def statuses(*faults: Fault) -> list[grpc.StatusCode | grpc.Status]:
    """What the next calls end with, as the scheduler says it."""
    return [rpc_status.to_status(status_of(fault)) for fault in faults]


async def upload(client: BlobClient, source: Path) -> None:
    await client.upload(LEASE, digest_of(DATA), "", source)


async def test_a_download_goes_on_where_it_was_cut(
    scheduler: ScriptedScheduler, client: BlobClient, tmp_path: Path
) -> None:
    digest = scheduler.blobs.add(DATA)
    scheduler.blobs.cut_reads_at = [400_000, 900_000]
    target = tmp_path / "target"
    await client.download(digest, target)
    assert target.read_bytes() == DATA
    assert scheduler.blobs.read_from == [0, 400_000, 900_000]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Code.QUEUE_FULL, "64 blobs", retry_after_s=0.01),
        Fault(Code.QUOTA_EXCEEDED, "no room", retry_after_s=0.01),
        Fault(Code.STORE_UNAVAILABLE, "no space left on device", retry_after_s=0.01),
        Fault(Code.UPLOAD_NOT_FOUND, "its time is over"),
        Fault(Code.FIELD_INVALID, "offset", metadata={"committed_bytes": "7"}),
    ],
    ids=lambda fault: str(fault.code),
)
async def test_what_may_pass_is_waited_for(
    scheduler: ScriptedScheduler, client: BlobClient, source: Path, fault: Fault
) -> None:
    scheduler.blobs.fail = statuses(fault, fault)
    await upload(client, source)
    assert scheduler.blobs.fail == []
    assert scheduler.blobs.blobs[digest_of(DATA).sha256] == DATA


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(Code.ARTIFACT_TOO_LARGE, "1001 bytes"), "ARTIFACT_TOO_LARGE"),
        (Fault(Code.ARTIFACT_MISMATCH, "other bytes"), "ARTIFACT_MISMATCH"),
        (Fault(Code.LEASE_LOST, "it has passed on"), "LEASE_LOST"),
        (Fault(Code.INTERNAL, "log id 7"), "INTERNAL"),
    ],
    ids=lambda value: str(getattr(value, "code", value)),
)
async def test_what_is_final_is_told_at_once(
    scheduler: ScriptedScheduler, client: BlobClient, source: Path, fault: Fault, code: str
) -> None:
    scheduler.blobs.fail = statuses(fault, fault)
    with pytest.raises(JobFailure) as failed:
        await upload(client, source)
    assert (failed.value.code, failed.value.retryable) == (code, None)
    assert fault.message in failed.value.message
    assert len(scheduler.blobs.fail) == 1


@pytest.mark.parametrize(
    ("reason", "code"),
    [(Code.QUOTA_EXCEEDED, "QUOTA_EXCEEDED"), (Code.STORE_UNAVAILABLE, "DEPENDENCY_UNAVAILABLE")],
)
async def test_patience_ends_with_the_last_cause(
    scheduler: ScriptedScheduler, channel: grpc.aio.Channel, source: Path, reason: Code, code: str
) -> None:
    scheduler.blobs.fail = statuses(Fault(reason, "no room", retry_after_s=30.0))
    with pytest.raises(JobFailure) as failed:
        await upload(patient(channel, 1.0), source)
    assert failed.value.code == code


async def test_wrong_bytes_that_were_left_behind_cost_one_more_upload(
    scheduler: ScriptedScheduler, client: BlobClient, source: Path
) -> None:
    digest = digest_of(DATA)
    scheduler.blobs.uploads[f"upload-{digest.sha256}"] = digest, bytearray(100_000)
    await upload(client, source)
    assert scheduler.blobs.blobs[digest.sha256] == DATA


# ---------------------------------------------------------------- a full disk


async def test_a_full_disk_is_waited_for_and_only_the_rest_is_fetched(
    scheduler: ScriptedScheduler, client: BlobClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room comes while the download waits. No byte that was on the disk is fetched again."""
    digest = scheduler.blobs.add(DATA)
    written, refusals, pwrite = 0, [0, 0], os.pwrite

    def full_in_the_middle(descriptor: int, data: Any, offset: int) -> int:
        nonlocal written
        if offset > 500_000 and refusals:
            refusals.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        written += len(data)
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr("rara_executor.blob_client.os.pwrite", full_in_the_middle)
    target = tmp_path / "target"
    await client.download(digest, target)
    assert hashlib.sha256(target.read_bytes()).hexdigest() == digest.sha256
    assert written == len(DATA)
    assert scheduler.blobs.reads == 3


async def test_a_disk_that_stays_full_is_named(
    scheduler: ScriptedScheduler, channel: grpc.aio.Channel
) -> None:
    digest = scheduler.blobs.add(DATA)
    with pytest.raises(JobFailure, match="RARA_EXECUTOR_DIR") as failed:
        await patient(channel, 0.2).download(digest, Path("/dev/full"))
    assert failed.value.code == "DEPENDENCY_UNAVAILABLE"


@pytest.mark.parametrize("keep", ["file", "bytes"])
def test_a_copy_that_finds_no_room_says_so(source: Path, keep: str) -> None:
    with pytest.raises(JobFailure, match="RARA_EXECUTOR_DIR") as failed:
        keep_file(source, FullDisk("/dev/full")) if keep == "file" else keep_bytes(
            DATA, FullDisk("/dev/full")
        )
    assert failed.value.code == "DEPENDENCY_UNAVAILABLE"


class FullDisk(type(Path())):  # type: ignore[misc]  # the class that paths have here
    """Is never removed: `/dev/full` is needed again."""

    def unlink(self, missing_ok: bool = False) -> None:
        assert missing_ok


async def test_the_cache_makes_room_when_the_disk_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the cache may hold: what it holds is worth less than the blob that a job waits for."""

    async def fetch(digest: common_pb2.Digest, target: Path) -> None:
        target.write_bytes(by_digest[digest.sha256])

    cache = BlobCache(tmp_path / "cache", parts=tmp_path, limit_bytes=1 << 30, fetch=fetch)
    (tmp_path / "cache").mkdir()
    blobs = [bytes([number]) * 1000 for number in range(3)]
    by_digest = {digest_of(data).sha256: data for data in blobs}
    free = [10_000, 10_000, 500]

    def disk_usage(path: Path) -> Any:
        return type("usage", (), {"free": free[0] + sum(1000 for _ in removed(path))})

    def removed(path: Path) -> list[str]:
        kept = {file.name for file in path.glob("??/*")}
        return [sha256 for sha256 in placed if sha256 not in kept]

    placed: list[str] = []
    monkeypatch.setattr("rara_executor.blob_cache.shutil.disk_usage", disk_usage)
    for number, data in enumerate(blobs):
        await cache.place(digest_of(data), tmp_path / f"in-{number}")
        placed.append(digest_of(data).sha256)
        free.pop(0) if len(free) > 1 else None
    kept = {file.name for file in (tmp_path / "cache").glob("??/*")}
    assert kept == {digest_of(blobs[1]).sha256, digest_of(blobs[2]).sha256}
    assert (tmp_path / "in-0").read_bytes() == blobs[0]  # in use: it survives


async def test_what_is_being_fetched_is_nothing_to_remove(tmp_path: Path) -> None:
    """Two executors share a cache that may keep nothing: the one's download does not end the other's."""
    half, finish = asyncio.Event(), asyncio.Event()

    async def slowly(digest: common_pb2.Digest, target: Path) -> None:
        target.write_bytes(DATA[:10])
        half.set()
        await finish.wait()
        target.write_bytes(DATA)

    async def at_once(digest: common_pb2.Digest, target: Path) -> None:
        target.write_bytes(b"other")

    folder = tmp_path / "cache"
    folder.mkdir()
    caches = []
    for number, fetch in enumerate((slowly, at_once)):
        (tmp_path / f"jobs-{number}").mkdir()
        caches.append(BlobCache(folder, parts=tmp_path / f"jobs-{number}", limit_bytes=0, fetch=fetch))
    slow = asyncio.create_task(caches[0].place(digest_of(DATA), tmp_path / "slow"))
    await half.wait()
    await caches[1].place(digest_of(b"other"), tmp_path / "quick")
    finish.set()
    await slow
    assert (tmp_path / "slow").read_bytes() == DATA
    assert (tmp_path / "quick").read_bytes() == b"other"


# ---------------------------------------------------------------- manifests


def job_artifacts(client: BlobClient, folder: Path) -> JobArtifacts:
    cache = BlobCache(folder / "cache", parts=folder, limit_bytes=0, fetch=client.download)
    return JobArtifacts(ArtifactStore(client, cache, transfers=2), job(1, "any"), folder)


def output(folder: Path, name: str, data: bytes, metadata: str = "") -> PutArtifact:
    path = folder / f"out-{name}"
    path.write_bytes(data)
    digest = digest_of(data)
    return PutArtifact(1, 1, name, str(path), digest.sha256, len(data), "text/plain", "blob", metadata, [])


async def test_a_manifest_that_would_fit_into_no_message_is_refused_at_the_output_that_is_too_much(
    client: BlobClient, tmp_path: Path
) -> None:
    artifacts = job_artifacts(client, tmp_path)
    metadata = '"' + "m" * 16_000 + '"'
    for number in range(64):
        await artifacts.put(output(tmp_path, f"a{number}", b"x", metadata))
    with pytest.raises(JobFailure, match="1048576") as failed:
        await artifacts.put(output(tmp_path, "large", b"y", metadata + " " * 20_000))
    assert failed.value.code == "ARTIFACT_TOO_LARGE"
    await artifacts.put(output(tmp_path, "small", b"x"))  # what was refused does not count
    assert len(artifacts.manifest) == 65
    assert not (tmp_path / "out-large").exists()


async def test_equal_outputs_are_kept_once_and_refused_ones_not_at_all(
    scheduler: ScriptedScheduler, client: BlobClient, tmp_path: Path
) -> None:
    artifacts = job_artifacts(client, tmp_path)
    await artifacts.put(output(tmp_path, "one", DATA))
    await artifacts.put(output(tmp_path, "two", DATA))
    scheduler.blobs.fail = statuses(Fault(Code.ARTIFACT_TOO_LARGE, "as scripted"))
    with pytest.raises(JobFailure):
        await artifacts.put(output(tmp_path, "three", DATA[::-1]))
    assert [path.name for path in tmp_path.glob("out-*")] == ["out-one"]
    scheduler.blobs.blobs.clear()
    await artifacts.upload_again([digest_of(DATA)])
    assert scheduler.blobs.blobs[digest_of(DATA).sha256] == DATA
