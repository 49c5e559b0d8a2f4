"""Blobs to and from the scheduler: whole, checked, resumed."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from rara.v1 import common_pb2
from rara_client import ArtifactMismatch, Client, NotFound, Pacing, RaraError, Unavailable
from support.scripted_workflow import Fault, ScriptedServer, scripted_server

DATA = bytes(range(256)) * 4000  # 1,024,000 bytes: several messages


async def no_sleep(_seconds: float) -> None:
    await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[Client]:
    async with Client.connect(server.address, pacing=Pacing(sleep=no_sleep)) as connected:
        yield connected


@pytest.mark.parametrize("size", [0, 1, 256 * 1024, len(DATA)])
async def test_bytes_and_files_arrive_whole_under_their_digest(
    server: ScriptedServer, client: Client, tmp_path: Path, size: int
) -> None:
    data = DATA[:size]
    path = tmp_path / "data"
    path.write_bytes(data)
    for source in (data, path):
        server.artifacts.blobs.clear()
        digest = await client.upload_blob(source, media_type="text/plain")
        assert digest.sha256 == hashlib.sha256(data).hexdigest()
        assert digest.size_bytes == size
        assert server.artifacts.blobs[digest.sha256] == data
    assert server.script.requests("CreateUpload")[0].media_type == "text/plain"


async def test_a_blob_that_is_there_is_not_sent_again(server: ScriptedServer, client: Client) -> None:
    await client.upload_blob(DATA)
    await client.upload_blob(DATA)
    assert len(server.script.requests("WriteBlob")) == 1


async def test_a_broken_upload_goes_on_where_the_stored_part_ends(
    server: ScriptedServer, client: Client
) -> None:
    server.script.plant("WriteBlob", Fault(grpc.StatusCode.UNAVAILABLE, after=300_000))
    digest = await client.upload_blob(DATA)
    assert server.artifacts.blobs[digest.sha256] == DATA
    assert [request.offset for request in server.script.requests("WriteBlob")] == [0, 524_288]


def digest_of(data: bytes) -> common_pb2.Digest:
    return common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


async def test_an_upload_that_another_client_has_left_is_gone_on_with(
    server: ScriptedServer, client: Client
) -> None:
    server.artifacts.uploads["left"] = digest_of(DATA), bytearray(DATA[:400_000])
    await client.upload_blob(DATA)
    assert server.artifacts.blobs[digest_of(DATA).sha256] == DATA
    assert [request.offset for request in server.script.requests("WriteBlob")] == [400_000]


async def test_wrong_bytes_that_were_left_cost_one_more_upload(
    server: ScriptedServer, client: Client
) -> None:
    server.artifacts.uploads["left"] = digest_of(DATA), bytearray(400_000)
    await client.upload_blob(DATA)
    assert server.artifacts.blobs[digest_of(DATA).sha256] == DATA
    assert [request.offset for request in server.script.requests("WriteBlob")] == [400_000, 0]


@pytest.mark.parametrize("call", ["CreateUpload", "WriteBlob", "ReadBlob"])
async def test_a_scheduler_that_moves_too_many_blobs_is_waited_for(
    server: ScriptedServer, client: Client, call: str
) -> None:
    full = Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after_s=1.0)
    server.script.plant(call, full)
    digest = await client.upload_blob(DATA)
    assert b"".join([data async for data in client.download_blob(digest)]) == DATA


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED"),
        (grpc.StatusCode.INVALID_ARGUMENT, "ARTIFACT_TOO_LARGE"),
    ],
)
async def test_a_blob_that_there_is_no_room_for_is_refused_at_once(
    server: ScriptedServer, client: Client, status: grpc.StatusCode, reason: str
) -> None:
    server.script.plant("CreateUpload", Fault(status, reason, retry_after_s=30.0))
    with pytest.raises(RaraError) as refused:
        await client.upload_blob(DATA)
    assert refused.value.reason == reason
    assert len(server.script.requests("CreateUpload")) == 1


async def test_a_file_that_changes_while_it_is_sent_is_refused(
    server: ScriptedServer, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(DATA)
    server.script.plant("CreateUpload", Fault(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"))

    async def change(_seconds: float) -> None:
        path.write_bytes(DATA[::-1])

    async with Client.connect(server.address, pacing=Pacing(sleep=change)) as changing:
        with pytest.raises(ArtifactMismatch):
            await changing.upload_blob(path)
    assert server.artifacts.blobs == {}


async def test_a_file_that_cannot_be_read_is_an_error_of_the_file(client: Client, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await client.upload_blob(tmp_path / "missing")


async def test_a_download_is_checked_and_resumed(server: ScriptedServer, client: Client) -> None:
    digest = server.artifacts.put(DATA)
    server.script.plant("ReadBlob", Fault(grpc.StatusCode.UNAVAILABLE, after=300_000))
    assert b"".join([data async for data in client.download_blob(digest)]) == DATA
    assert [request.offset for request in server.script.requests("ReadBlob")] == [0, 300_000]


@pytest.mark.parametrize("wrong", [DATA[:-1], DATA + b"x", DATA[::-1]], ids=["short", "long", "other"])
async def test_other_bytes_than_were_asked_for_are_a_mismatch_and_leave_no_file(
    server: ScriptedServer, client: Client, tmp_path: Path, wrong: bytes
) -> None:
    digest = server.artifacts.put(DATA)
    server.artifacts.blobs[digest.sha256] = wrong
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with pytest.raises(ArtifactMismatch):
        await client.save_blob(digest, target)
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["out"]  # noqa: PTH208
    server.artifacts.blobs[digest.sha256] = DATA
    await client.save_blob(digest, target)
    assert target.read_bytes() == DATA


async def test_a_download_of_nothing_known_is_not_found(client: Client) -> None:
    with pytest.raises(NotFound):
        _ = [data async for data in client.download_blob(common_pb2.Digest(sha256="0" * 64))]


async def test_a_download_that_never_moves_is_given_up(server: ScriptedServer, client: Client) -> None:
    digest = server.artifacts.put(DATA)
    server.script.plant("ReadBlob", *[Fault(grpc.StatusCode.UNAVAILABLE)] * 6)
    with pytest.raises(Unavailable):
        _ = [data async for data in client.download_blob(digest)]
