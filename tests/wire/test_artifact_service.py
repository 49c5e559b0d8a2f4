"""ArtifactService over real gRPC, a real database and a real folder."""

import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rara.v1 import artifact_pb2 as pb
from rara.v1 import artifact_pb2_grpc, common_pb2, job_pb2
from rara_scheduler.blobs.admission import UploadLimits
from rara_scheduler.blobs.transfers import TransferLimits
from rara_scheduler.loops.uploads import UploadLoop
from rara_testing.fault_proxy import FaultProxy
from support.artifact_service import (
    PIECE,
    Refusal,
    Service,
    add_lease,
    committed_bytes,
    create,
    data_of,
    digest_of,
    get,
    missing,
    pieces,
    put,
    refused,
    serving,
)

LIMITS = TransferLimits(uploads=UploadLimits(max_blob_bytes=50_000_000), max_transfers=4, lease_check_s=0.0)


@pytest.fixture
async def service(database_url: str, tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(database_url, tmp_path / "blobs", LIMITS) as service:
        yield service


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("size", [0, 1, PIECE, 1_234_567])
async def test_a_blob_goes_up_counts_and_comes_back(service: Service, size: int) -> None:
    data = data_of(size)
    assert await missing(service, digest_of(data)) == [digest_of(data)]
    digest = await put(service, data)
    assert await missing(service, digest) == []
    assert await get(service, digest) == data
    assert service.path_of(digest).read_bytes() == data
    assert service.partial_files() == []


async def test_a_blob_that_is_there_needs_no_upload(service: Service) -> None:
    digest = await put(service, b"hello")
    response = await service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest))
    assert response.upload_id == ""
    assert not response.HasField("expires_at")


async def test_missing_blobs_are_named_by_digest_and_size_in_the_order_asked(service: Service) -> None:
    there = await put(service, b"there")
    other_size = common_pb2.Digest(sha256=there.sha256, size_bytes=4)
    away = [digest_of(b"a"), digest_of(b"b")]
    assert await missing(service, away[0], there, other_size, away[1]) == [away[0], other_size, away[1]]


async def test_ranges_are_read_in_frames_of_bounded_size(service: Service) -> None:
    data = data_of(1_000_000)
    digest = await put(service, data)
    assert await get(service, digest, offset=300_000, limit=400_000) == data[300_000:700_000]
    assert await get(service, digest, offset=999_999) == data[-1:]
    assert await get(service, digest, offset=1_000_000) == b""
    assert await get(service, digest, limit=5_000_000) == data
    call = service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest))
    assert max([len(response.data) async for response in call]) <= 256 * 1024
    unknown_size = common_pb2.Digest(sha256=digest.sha256)
    assert await get(service, unknown_size) == data


async def test_this_store_has_no_presigned_urls(service: Service) -> None:
    digest = await put(service, b"x")
    assert (await service.stub.GetDownload(pb.GetDownloadRequest(digest=digest))).url == ""
    refusal = await refused(service.stub.CompleteUpload(pb.CompleteUploadRequest(upload_id="x")))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.UNIMPLEMENTED, "FEATURE_DISABLED")


# ---------------------------------------------------------------- resuming


async def test_an_upload_goes_on_from_its_committed_bytes(service: Service) -> None:
    data = data_of(1_000_000)
    upload_id = await create(service, digest_of(data))
    response = await service.stub.WriteBlob(pieces(upload_id, data[:400_000], finish=False))
    assert response.committed_bytes == 400_000
    assert not response.HasField("verified")
    status = await service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id))
    assert (status.committed_bytes, status.complete) == (400_000, False)
    response = await service.stub.WriteBlob(pieces(upload_id, data, start=400_000))
    assert response.verified == digest_of(data)
    status = await service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id))
    assert (status.committed_bytes, status.complete) == (1_000_000, True)


async def test_a_connection_cut_in_the_middle_costs_only_what_was_under_way(service: Service) -> None:
    data = data_of(3_000_000)
    upload_id = await create(service, digest_of(data))
    async with (
        FaultProxy("127.0.0.1", service.port) as proxy,
        grpc.aio.insecure_channel(proxy.address) as channel,
    ):
        call = artifact_pb2_grpc.ArtifactServiceStub(channel).WriteBlob()
        for message in itertools.islice(pieces(upload_id, data), 15):
            await call.write(message)
        async with asyncio.timeout(5):
            while (await committed_bytes(service, upload_id)) < 15 * PIECE:
                pass
        proxy.reset()
        with pytest.raises(grpc.aio.AioRpcError):
            await call
    assert await committed_bytes(service, upload_id) == 15 * PIECE
    response = await service.stub.WriteBlob(pieces(upload_id, data, start=15 * PIECE))
    assert response.verified == digest_of(data)
    assert await get(service, digest_of(data)) == data


async def test_finishing_twice_gives_the_same_answer(service: Service) -> None:
    data = data_of(250_000)
    upload_id = await create(service, digest_of(data))
    first = await service.stub.WriteBlob(pieces(upload_id, data))
    again = await service.stub.WriteBlob(pieces(upload_id, data))
    assert first == again
    assert first.committed_bytes == 250_000


async def test_a_wrong_offset_is_refused_with_the_committed_size(service: Service) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    await service.stub.WriteBlob(pieces(upload_id, data[:PIECE], finish=False))
    for offset in (0, PIECE - 1, PIECE + 1, 300_000):
        message = pb.WriteBlobRequest(upload_id=upload_id, offset=offset, data=b"x")
        refusal = await refused(service.stub.WriteBlob(iter([message])))
        assert (refusal.status, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
        assert refusal.fields == ["offset"]
        assert refusal.metadata == {"committed_bytes": str(PIECE)}
    assert (await service.stub.WriteBlob(pieces(upload_id, data, start=PIECE))).verified == digest_of(data)


async def test_bytes_whose_row_could_not_be_written_need_only_a_finish(service: Service) -> None:
    data = data_of(200_000)
    upload_id = await create(service, digest_of(data))
    digest = await put(service, data)
    async with service.database.connection() as connection:  # as if the database had gone away just before
        await connection.execute("delete from rara.blob where sha256 = $1", digest.sha256)
    assert await missing(service, digest) == [digest]
    status = await service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id))
    assert (status.committed_bytes, status.complete) == (200_000, False)
    finish = pb.WriteBlobRequest(upload_id=upload_id, offset=200_000, finish=True)
    assert (await service.stub.WriteBlob(iter([finish]))).verified == digest
    assert await missing(service, digest) == []


async def test_bytes_that_are_removed_while_they_are_recorded_are_asked_for_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a collection of garbage may do, in a store that removes without a condition."""
    data = data_of(200_000)
    record = service.rows.record

    async def record_too_late(*arguments: Any) -> None:
        await record(*arguments)
        service.path_of(digest_of(data)).unlink()

    upload_id = await create(service, digest_of(data))
    with monkeypatch.context() as patch:
        patch.setattr(service.rows, "record", record_too_late)
        refusal = await refused(service.stub.WriteBlob(pieces(upload_id, data)))
    assert refusal.reason == "STORE_UNAVAILABLE"
    assert await missing(service, digest_of(data)) == [digest_of(data)]
    assert await committed_bytes(service, upload_id) == 0
    assert (await service.stub.WriteBlob(pieces(upload_id, data))).verified == digest_of(data)
    assert await get(service, digest_of(data)) == data


async def test_an_uploader_that_falls_silent_is_let_go_and_can_go_on(service: Service) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    stuck = service.stub.WriteBlob()
    await stuck.write(next(pieces(upload_id, data)))
    refusal = await refused(stuck)
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    status = await service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id))
    assert status.committed_bytes == PIECE
    assert (await service.stub.WriteBlob(pieces(upload_id, data, start=PIECE))).verified == digest_of(data)


async def test_two_calls_do_not_write_one_upload_at_once(service: Service) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    first = service.stub.WriteBlob()
    await first.write(next(pieces(upload_id, data)))
    async with asyncio.timeout(5):
        while not service.partial_files() or service.partial_files()[0].stat().st_size < PIECE:
            await asyncio.sleep(0.01)
    refusal = await refused(service.stub.WriteBlob(pieces(upload_id, data)))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
    first.cancel()


# ---------------------------------------------------------------- wrong bytes, wrong names


@pytest.mark.parametrize("wrong", ["flipped", "short", "long"])
async def test_bytes_that_are_not_what_their_digest_says_leave_nothing_behind(
    service: Service, wrong: str
) -> None:
    data = data_of(300_000)
    sent = {
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "short": data[:-1],
        "long": data + b"x",
    }[wrong]
    upload_id = await create(service, digest_of(data))
    refusal = await refused(service.stub.WriteBlob(pieces(upload_id, sent)))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "ARTIFACT_MISMATCH")
    assert refusal.metadata == {"sha256": digest_of(data).sha256, "size_bytes": "300000"}
    assert service.partial_files() == []
    assert await missing(service, digest_of(data), digest_of(sent)) == [digest_of(data), digest_of(sent)]
    gone = await refused(service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id)))
    assert (gone.status, gone.reason) == (grpc.StatusCode.NOT_FOUND, "UPLOAD_NOT_FOUND")
    await put(service, data)  # the neighbour passes


async def test_a_known_digest_with_another_size_is_a_mismatch(service: Service) -> None:
    digest = await put(service, b"hello")
    digest.size_bytes += 1
    refusal = await refused(service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest)))
    assert refusal.reason == "ARTIFACT_MISMATCH"


@pytest.mark.parametrize("damage", ["flipped", "gone"])
async def test_a_blob_damaged_in_the_store_is_never_given_out_whole_and_can_be_healed(
    service: Service, damage: str
) -> None:
    data = data_of(700_000)
    digest = await put(service, data)
    path = service.path_of(digest)
    if damage == "gone":
        path.unlink()
    else:
        path.chmod(0o600)
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refusal = await refused(service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest)))
    assert refusal.reason == ("ARTIFACT_NOT_FOUND" if damage == "gone" else "ARTIFACT_MISMATCH")
    assert await missing(service, digest) == [digest]
    await put(service, data)
    assert await get(service, digest) == data


async def test_a_blob_marked_for_deletion_counts_as_missing_until_it_is_uploaded_again(
    service: Service,
) -> None:
    data = data_of(1000)
    digest = await put(service, data)
    await service.rows.mark(digest.sha256, await service.rows.now())
    assert await missing(service, digest) == [digest]
    refusal = await refused(service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest)))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "ARTIFACT_NOT_FOUND")
    await put(service, data)
    assert await get(service, digest) == data


_BAD_DIGESTS = [
    (common_pb2.Digest(sha256="abc", size_bytes=1), "sha256"),
    (common_pb2.Digest(sha256="A" * 64, size_bytes=1), "sha256"),
    (common_pb2.Digest(sha256="../" + "a" * 61, size_bytes=1), "sha256"),
    (common_pb2.Digest(sha256="a" * 64, size_bytes=-1), "size_bytes"),
]


@pytest.mark.parametrize(("digest", "field"), _BAD_DIGESTS)
async def test_a_digest_that_is_none_is_refused_by_field(
    service: Service, digest: common_pb2.Digest, field: str
) -> None:
    find = pb.FindMissingBlobsRequest(digests=[digest_of(b""), digest])
    calls: Iterable[tuple[object, str]] = [
        (service.stub.FindMissingBlobs(find), f"digests[1].{field}"),
        (service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest)), f"digest.{field}"),
        (service.stub.GetDownload(pb.GetDownloadRequest(digest=digest)), f"digest.{field}"),
        (service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest)), f"digest.{field}"),
    ]
    for call, path in calls:
        refusal = await refused(call)
        assert (refusal.status, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID")
        assert refusal.fields == [path]


async def test_other_bad_fields_are_refused_by_name(service: Service) -> None:
    digest = await put(service, b"hello")
    at_limit = common_pb2.Digest(sha256="a" * 64, size_bytes=LIMITS.uploads.max_blob_bytes)
    calls: list[tuple[object, str]] = [
        (
            service.stub.CreateUpload(pb.CreateUploadRequest(digest=at_limit, media_type="x" * 256)),
            "media_type",
        ),
        (service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest, offset=-1)), "offset"),
        (service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest, limit=-1)), "limit"),
        (service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest, offset=6)), "offset"),
        (service.stub.FindMissingBlobs(pb.FindMissingBlobsRequest(digests=[digest] * 1001)), "digests"),
        (service.stub.WriteBlob(iter(())), "upload_id"),
        (service.stub.WriteBlob(iter([pb.WriteBlobRequest(data=b"x")])), "upload_id"),
    ]
    for call, field in calls:
        refusal = await refused(call)
        assert (refusal.reason, refusal.fields) == ("FIELD_INVALID", [field])


async def test_a_call_cannot_change_its_upload_on_the_way(service: Service) -> None:
    data = data_of(1000)
    upload_id = await create(service, digest_of(data))
    messages = [
        pb.WriteBlobRequest(upload_id=upload_id, data=data[:500]),
        pb.WriteBlobRequest(upload_id=str(uuid.uuid4()), offset=500, data=data[500:], finish=True),
    ]
    refusal = await refused(service.stub.WriteBlob(iter(messages)))
    assert (refusal.reason, refusal.fields) == ("FIELD_INVALID", ["upload_id"])


@pytest.mark.parametrize(
    "upload_id", ["x", "../../etc", str(uuid.UUID(int=5)), str(uuid.UUID(int=5)).upper()]
)
async def test_an_unknown_upload_is_not_found(service: Service, upload_id: str) -> None:
    for call in (
        service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id)),
        service.stub.WriteBlob(iter([pb.WriteBlobRequest(upload_id=upload_id, finish=True)])),
    ):
        refusal = await refused(call)
        assert (refusal.status, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "UPLOAD_NOT_FOUND")
        assert refusal.metadata == {"upload_id": upload_id}


async def test_an_unknown_blob_is_not_found(service: Service) -> None:
    digest = await put(service, b"hello")
    other_size = common_pb2.Digest(sha256=digest.sha256, size_bytes=4)
    for asked in (digest_of(b"never seen"), other_size):
        for call in (
            service.stub.ReadBlob(pb.ReadBlobRequest(digest=asked)),
            service.stub.GetDownload(pb.GetDownloadRequest(digest=asked)),
        ):
            refusal = await refused(call)
            assert (refusal.status, refusal.reason) == (grpc.StatusCode.NOT_FOUND, "ARTIFACT_NOT_FOUND")


# ---------------------------------------------------------------- leases, expiry, bounds


async def test_an_executor_uploads_only_under_its_current_lease(service: Service) -> None:
    lease = await add_lease(service, token=41)
    data = data_of(300_000)
    stale = job_pb2.Lease(step_run_id=lease.step_run_id, lease_token=40, attempt=1)
    refusal = await refused(
        service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest_of(data), lease=stale))
    )
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")

    upload_id = await create(service, digest_of(data), lease)
    await service.stub.WriteBlob(pieces(upload_id, data[:PIECE], finish=False))
    async with service.database.connection() as connection:  # reclaimed
        await connection.execute("delete from rara.lease where step_run_id = $1", lease.step_run_id)
    refusal = await refused(service.stub.WriteBlob(pieces(upload_id, data, start=PIECE)))
    assert refusal.reason == "LEASE_LOST"
    assert await missing(service, digest_of(data)) == [digest_of(data)]


async def test_a_lease_that_lapses_in_the_middle_ends_the_upload_and_leaves_it_to_the_next_attempt(
    service: Service,
) -> None:
    lease = await add_lease(service, token=41)
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data), lease)
    call = service.stub.WriteBlob()
    await call.write(next(pieces(upload_id, data)))
    async with asyncio.timeout(5):
        while await committed_bytes(service, upload_id) < PIECE:
            await asyncio.sleep(0.01)
    async with service.database.connection() as connection:  # reclaimed, and leased again
        await connection.execute(
            "update rara.lease set lease_token = 42, attempt = 2 where step_run_id = $1", lease.step_run_id
        )
    refusal = await refused(ended(call, pieces(upload_id, data, start=PIECE)))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
    assert await missing(service, digest_of(data)) == [digest_of(data)]
    assert (
        await refused(service.stub.WriteBlob(pieces(upload_id, data, start=PIECE)))
    ).reason == "LEASE_LOST"

    successor = job_pb2.Lease(step_run_id=lease.step_run_id, lease_token=42, attempt=2)
    assert await create(service, digest_of(data), successor) == upload_id
    start = await committed_bytes(service, upload_id)
    assert start >= PIECE
    response = await service.stub.WriteBlob(pieces(upload_id, data, start=start))
    assert response.verified == digest_of(data)
    assert await get(service, digest_of(data)) == data


async def ended(call: Any, messages: Iterable[pb.WriteBlobRequest]) -> pb.WriteBlobResponse:
    """Send the rest, as far as the other side takes it, and wait for the answer."""
    for message in messages:
        try:
            await call.write(message)
        except asyncio.InvalidStateError:
            break
    await call.done_writing()
    response: pb.WriteBlobResponse = await call
    return response


async def test_only_the_same_step_or_another_client_goes_on_with_an_upload(service: Service) -> None:
    """Whoever is somebody else begins at nothing, so that nobody can spoil another one's upload."""
    data = data_of(300_000)
    mine, other = await add_lease(service, token=1), await add_lease(service, token=2)
    upload_id = await create(service, digest_of(data), mine)
    await service.stub.WriteBlob(pieces(upload_id, data[:PIECE], finish=False))
    for lease in (other, None):
        assert await create(service, digest_of(data), lease) != upload_id
    assert await create(service, digest_of(data), mine) == upload_id
    a_clients = await create(service, digest_of(data))
    await service.stub.WriteBlob(pieces(a_clients, data[:PIECE], finish=False))
    assert await create(service, digest_of(data)) == a_clients


async def test_wrong_bytes_that_were_left_behind_are_dropped_and_the_next_upload_is_a_new_one(
    service: Service,
) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    await service.stub.WriteBlob(pieces(upload_id, bytes(PIECE), finish=False))
    assert await create(service, digest_of(data)) == upload_id
    refusal = await refused(service.stub.WriteBlob(pieces(upload_id, data, start=PIECE)))
    assert refusal.reason == "ARTIFACT_MISMATCH"
    assert await put(service, data) == digest_of(data)


async def test_who_waited_for_an_upload_that_was_finished_meanwhile_has_the_answer(service: Service) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    call = service.stub.WriteBlob()
    await call.write(next(pieces(upload_id, data)))
    async with asyncio.timeout(5):
        while not service.partial_files():
            await asyncio.sleep(0.01)
    waiting = asyncio.ensure_future(service.stub.WriteBlob(pieces(upload_id, data)))
    response = await ended(call, pieces(upload_id, data, start=PIECE))
    assert response.verified == digest_of(data)
    [answer] = await asyncio.gather(waiting, return_exceptions=True)
    if isinstance(answer, grpc.aio.AioRpcError):  # it was not done within the wait
        assert Refusal(answer).reason == "STORE_UNAVAILABLE"
    else:
        assert answer == pb.WriteBlobResponse(committed_bytes=len(data), verified=digest_of(data))


async def test_what_comes_after_finish_is_never_part_of_a_blob(service: Service) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    messages = [*pieces(upload_id, data), pb.WriteBlobRequest(offset=len(data), data=b"more", finish=True)]
    response = await service.stub.WriteBlob(iter(messages))
    assert response.verified == digest_of(data)
    assert await get(service, digest_of(data)) == data
    assert service.path_of(digest_of(data)).stat().st_size == len(data)


@pytest.mark.parametrize(
    ("lease", "field"),
    [
        (job_pb2.Lease(step_run_id="x", lease_token=1), "lease.step_run_id"),
        (job_pb2.Lease(step_run_id=str(uuid.UUID(int=1))), "lease.lease_token"),
    ],
)
async def test_a_lease_that_is_none_is_refused_by_field(
    service: Service, lease: job_pb2.Lease, field: str
) -> None:
    call = service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest_of(b"x"), lease=lease))
    assert (await refused(call)).fields == [field]


async def test_an_expired_upload_is_gone_with_its_bytes(service: Service) -> None:
    data = data_of(300_000)
    upload_id = await create(service, digest_of(data))
    kept_id = await create(service, digest_of(b"other"))
    await service.stub.WriteBlob(pieces(upload_id, data[:PIECE], finish=False))
    async with service.database.connection() as connection:
        await connection.execute("update rara.upload set expires_at = now() where upload_id = $1", upload_id)
    refusal = await refused(service.stub.WriteBlob(pieces(upload_id, data, start=PIECE)))
    assert refusal.reason == "UPLOAD_NOT_FOUND"
    loop = asyncio.create_task(UploadLoop(service.transfers).run())
    async with asyncio.timeout(5):
        while await service.rows.expired_uploads(limit=1):
            await asyncio.sleep(0.01)
    loop.cancel()
    assert service.partial_files() == []
    assert (await service.transfers.status(kept_id)).committed_bytes == 0


async def test_more_transfers_than_allowed_are_told_to_wait(service: Service) -> None:
    data = data_of(300_000)
    calls = []
    for _ in range(LIMITS.max_transfers):
        call = service.stub.WriteBlob()
        await call.write(next(pieces(await create(service, digest_of(data)), data)))
        calls.append(call)
    async with asyncio.timeout(5):
        while len(service.partial_files()) < LIMITS.max_transfers:
            await asyncio.sleep(0.01)
    upload_id = await create(service, digest_of(data))
    refusal = await refused(service.stub.WriteBlob(pieces(upload_id, data)))
    assert (refusal.status, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    for call in calls:
        call.cancel()
    async with asyncio.timeout(5):  # the places are given back, which takes a moment to be seen
        while (response := await admitted(service, upload_id, data)) is None:
            pass
    assert response.verified == digest_of(data)


async def admitted(service: Service, upload_id: str, data: bytes) -> pb.WriteBlobResponse | None:
    """None: told to wait."""
    try:
        return await service.stub.WriteBlob(pieces(upload_id, data))
    except grpc.aio.AioRpcError as error:
        if Refusal(error).reason != "QUEUE_FULL":
            raise
        return None


async def test_concurrent_uploads_of_one_digest_all_succeed(service: Service) -> None:
    data = data_of(500_000)
    ids = [await create(service, digest_of(data)) for _ in range(4)]
    answers = await asyncio.gather(*(service.stub.WriteBlob(pieces(one, data)) for one in ids))
    assert [answer.verified for answer in answers] == [digest_of(data)] * 4
    assert await get(service, digest_of(data)) == data
