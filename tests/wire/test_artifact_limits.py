"""What ArtifactService takes at most, each bound met exactly and passed by one."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from rara.v1 import artifact_pb2 as pb
from rara.v1 import common_pb2, job_pb2
from rara_scheduler.blobs.admission import UploadLimits
from rara_scheduler.blobs.folder import FolderWriter
from rara_scheduler.blobs.transfers import TransferLimits
from rara_scheduler.transport.connections import STREAM_WINDOW_BYTES
from support.artifact_service import (
    PIECE,
    Refusal,
    Service,
    add_lease,
    create,
    data_of,
    digest_of,
    missing,
    pieces,
    put,
    refused,
    serving,
)

MIB = 1 << 20
Serve = Callable[..., Awaitable[Service]]


@pytest.fixture
async def serve(database_url: str, tmp_path: Path) -> AsyncIterator[Serve]:
    """Starts the service with bounds of a test's own."""
    opened = []

    async def start(**limits: int) -> Service:
        context = serving(database_url, tmp_path / "blobs", TransferLimits(uploads=UploadLimits(**limits)))
        opened.append(context)
        return await context.__aenter__()

    yield start
    for context in opened:
        await context.__aexit__(None, None, None)


def sized(size_bytes: int, number: int = 0) -> common_pb2.Digest:
    """The digest of a blob that nobody has, of any size."""
    return common_pb2.Digest(sha256=f"{number:064x}", size_bytes=size_bytes)


async def refusal_of(
    service: Service, digest: common_pb2.Digest, lease: job_pb2.Lease | None = None
) -> Refusal:
    return await refused(service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest, lease=lease)))


async def test_a_blob_has_a_largest_size(serve: Serve) -> None:
    service = await serve(max_blob_bytes=1000)
    assert await create(service, sized(1000))
    refusal = await refusal_of(service, sized(1001))
    assert (refusal.status, refusal.reason, refusal.fields) == (
        grpc.StatusCode.INVALID_ARGUMENT, "ARTIFACT_TOO_LARGE", ["digest.size_bytes"],
    )  # fmt: skip
    assert refusal.metadata == {"size_bytes": "1001", "limit_bytes": "1000"}


async def test_an_attempt_has_a_largest_sum(serve: Serve) -> None:
    service = await serve(max_attempt_bytes=1000)
    lease, other = await add_lease(service, token=1), await add_lease(service, token=2)
    assert await create(service, sized(400, 1), lease)
    assert (await refusal_of(service, sized(601, 2), lease)).reason == "ARTIFACT_TOO_LARGE"
    assert await create(service, sized(600, 3), lease)
    assert await create(service, sized(1000, 4), other)
    assert await create(service, sized(5000, 5))  # a client's has no attempt


async def test_a_lease_has_so_many_open_uploads(serve: Serve) -> None:
    service = await serve(max_lease_uploads=2)
    lease = await add_lease(service, token=1)
    first = await create(service, digest_of(b"first"), lease)
    assert await create(service, sized(1, 1), lease)
    refusal = await refusal_of(service, sized(1, 2), lease)
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert refusal.retry_after_s == 1.0
    await service.stub.WriteBlob(pieces(first, b"first"))  # finished: one less is open
    assert await create(service, sized(1, 2), lease)


async def test_all_together_have_so_many_open_uploads(serve: Serve) -> None:
    service = await serve(max_open_uploads=2)
    first = await create(service, digest_of(b"first"))
    assert await create(service, sized(1, 1))
    assert (await refusal_of(service, sized(1, 2))).reason == "QUEUE_FULL"
    await service.stub.WriteBlob(pieces(first, b"first"))
    assert await create(service, sized(1, 2))


async def test_the_store_has_a_quota(serve: Serve) -> None:
    """Stored blobs and those being uploaded count; what is there already is no new byte."""
    service = await serve(quota_bytes=1000)
    kept = await put(service, data_of(300))
    assert await create(service, sized(500, 1))
    refusal = await refusal_of(service, sized(201, 2))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert refusal.metadata == {"size_bytes": "201", "free_bytes": "200", "quota_bytes": "1000"}
    assert refusal.retry_after_s == 30.0
    assert await create(service, sized(200, 3))
    assert await create(service, kept) == ""
    async with service.database.connection() as connection:  # room is made
        await connection.execute("delete from rara.upload where size_bytes = 500")
    assert await create(service, sized(201, 2))


async def test_a_blob_that_the_disk_has_no_room_for_is_refused_before_its_bytes(
    serve: Serve, tmp_path: Path
) -> None:
    service = await serve(max_blob_bytes=1 << 62)
    disk = os.statvfs(tmp_path)
    more_than_there_is = disk.f_blocks * disk.f_frsize + 1
    refusal = await refusal_of(service, sized(more_than_there_is))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    assert refusal.metadata["size_bytes"] == str(more_than_there_is)


async def test_refused_uploads_leave_no_trace(serve: Serve) -> None:
    service = await serve(max_blob_bytes=10)
    digest = digest_of(data_of(11))
    await refusal_of(service, digest)
    assert await missing(service, digest) == [digest]
    assert service.partial_files() == []
    async with service.database.connection() as connection:
        assert await connection.fetchval("select count(*) from rara.upload") == 0


async def test_uploads_admitted_at_once_keep_the_bound(serve: Serve) -> None:
    service = await serve(max_open_uploads=8)
    await create(service, sized(1, 99))
    requests = [
        service.stub.CreateUpload(pb.CreateUploadRequest(digest=sized(PIECE, number))) for number in range(16)
    ]
    answers = await asyncio.gather(*requests, return_exceptions=True)
    assert sum(isinstance(answer, pb.CreateUploadResponse) for answer in answers) == 7


async def test_a_sender_is_not_far_ahead_of_a_slow_disk(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is ahead is in the scheduler's memory. gRPC's own estimate of how much may be, once it has seen a fast way,
    is 5 MiB on an idle machine and hundreds on a busy one.
    """
    service = await serve()
    slow, reached = asyncio.Event(), asyncio.Event()
    taken = 0
    append = FolderWriter.append

    async def until_slow(writer: FolderWriter, data: bytes) -> None:
        nonlocal taken
        if taken >= 16 * MIB:
            reached.set()
            await slow.wait()
        taken += len(data)
        await append(writer, data)

    monkeypatch.setattr(FolderWriter, "append", until_slow)
    data, sent = os.urandom(256 * 1024), 0
    upload_id = await create(service, sized(100 * MIB))
    call = service.stub.WriteBlob()

    async def send() -> None:
        nonlocal sent
        while True:
            await call.write(pb.WriteBlobRequest(upload_id=upload_id, offset=sent, data=data))
            sent += len(data)

    sending = asyncio.create_task(send())
    async with asyncio.timeout(30):
        await reached.wait()
        before = -1
        while before != sent:  # until nothing more is taken from the sender
            before = sent
            await asyncio.sleep(0.3)
    assert 0 < sent - taken < 2 * STREAM_WINDOW_BYTES
    sending.cancel()
    call.cancel()
    slow.set()
