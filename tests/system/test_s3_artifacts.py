"""Schedulers with a bucket between them: artifacts of two languages, and an upload that outlives its scheduler."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import grpc.aio
import pytest
from rara.v1 import artifact_pb2 as pb
from rara.v1 import artifact_pb2_grpc, common_pb2
from rara_client import Client
from rara_testing.fault_proxy import FaultProxy
from rara_testing.processes import Processes
from support.command_line import rara
from support.evidence import is_here
from support.go_executor import spawn_go_executor
from support.running_scheduler import LEASE_S, RunningScheduler
from support.s3_server import S3Server, s3_server
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import SpawnedScheduler, spawned_scheduler

WAIT_S = 60.0
MIB = 1024 * 1024
MESSAGE = 512 * 1024


@dataclass
class World:
    """Two schedulers of one database and one bucket, and executors where a test starts them."""

    s3: S3Server
    bucket: str
    proxy: FaultProxy  # between schedulers and bucket
    processes: Processes
    first: SpawnedScheduler
    second: SpawnedScheduler


@pytest.fixture(scope="module")
async def s3(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    async with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
async def world(database_url: str, s3: S3Server, tmp_path: Path) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        host, _, port = s3.address.partition(":")
        proxy = await stack.enter_async_context(FaultProxy(host, int(port)))
        bucket = await s3.new_bucket()
        processes = await stack.enter_async_context(Processes(tmp_path / "logs"))
        first, second = [
            await stack.enter_async_context(
                spawned_scheduler(
                    processes,
                    database_url,
                    tmp_path,
                    env=s3.environment(proxy.address),
                    blob_store=f"s3://{bucket}/artifacts",
                )
            )
            for _ in range(2)
        ]
        yield World(s3, bucket, proxy, processes, first, second)
        proxy.resume()


def digest_of(data: bytes) -> common_pb2.Digest:
    return common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def messages(upload_id: str, data: bytes, offset: int, *, finish: bool) -> Iterator[pb.WriteBlobRequest]:
    for at in range(offset, len(data), MESSAGE):
        piece = data[at : at + MESSAGE]
        last = at + len(piece) == len(data)
        yield pb.WriteBlobRequest(upload_id=upload_id, offset=at, data=piece, finish=finish and last)


async def read(stub: artifact_pb2_grpc.ArtifactServiceStub, digest: common_pb2.Digest) -> bytes:
    request = pb.ReadBlobRequest(digest=digest)
    return b"".join([response.data async for response in stub.ReadBlob(request, timeout=WAIT_S)])


async def test_an_upload_outlives_the_kill_of_its_scheduler(world: World) -> None:
    data = random.Random(1).randbytes(11 * MIB)
    async with (
        grpc.aio.insecure_channel(world.first.address) as one,
        grpc.aio.insecure_channel(world.second.address) as two,
    ):
        first, second = (artifact_pb2_grpc.ArtifactServiceStub(channel) for channel in (one, two))
        created = await first.CreateUpload(pb.CreateUploadRequest(digest=digest_of(data)), timeout=WAIT_S)
        writing = first.WriteBlob()
        for message in messages(created.upload_id, data[: 9 * MIB], 0, finish=False):
            await writing.write(message)
        status = pb.QueryWriteStatusRequest(upload_id=created.upload_id)
        async with asyncio.timeout(WAIT_S):
            while not (await second.QueryWriteStatus(status, timeout=WAIT_S)).committed_bytes:
                await asyncio.sleep(0.05)
        await world.first.kill()
        writing.cancel()
        committed_bytes = (await second.QueryWriteStatus(status, timeout=WAIT_S)).committed_bytes
        assert 8 * MIB <= committed_bytes < 9 * MIB
        written = await second.WriteBlob(
            messages(created.upload_id, data, committed_bytes, finish=True), timeout=WAIT_S
        )
        assert written.verified == digest_of(data)
        assert await read(second, digest_of(data)) == data


async def test_a_pipeline_hands_artifacts_on_through_the_bucket(
    world: World, database_url: str, tmp_path: Path
) -> None:
    """From Python to Go, each at a scheduler of its own; where there is no Go, from Python to Python.

    Afterwards garbage is collected from the bucket, and what is left is checked byte by byte.
    """
    reader = "go" if is_here("go") else "python"
    await spawn_executor(
        world.processes,
        world.first.address,
        tmp_path,
        module="rara_testing.probes",
        name="python",
        prestart=0,
    )
    if reader == "go":
        await spawn_go_executor(world.processes, world.second.address, tmp_path, name="go")
    await world.first.world.define(
        "two",
        {
            "make": {"kind": "probe.artifact", "executor_kind": "python"},
            "use": {
                "kind": "probe.artifact",
                "executor_kind": reader,
                "input_artifacts": [{"name": "source", "from_step": "make", "from_name": "out"}],
            },
        },
    )
    run_id = await world.first.world.start("two", value={"size": 700_000})
    await world.first.world.until_run(run_id, "succeeded")
    content = (bytes(range(251)) * 2789)[:700_000]
    rows = await world.first.world.raw.fetch("select distinct sha256, size_bytes from rara.artifact")
    assert [tuple(row) for row in rows] == [(digest_of(content).sha256, 700_000)]
    async with Client.connect(world.second.address) as client:
        assert b"".join([data async for data in client.download_blob(digest_of(content))]) == content
        unused = await client.upload_blob(b"nobody wants this")

    env = world.s3.environment() | {
        "RARA_DATABASE_URL": database_url,
        "RARA_BLOB_STORE": f"s3://{world.bucket}/artifacts",
    }
    collected = await rara("artifact", "gc", "--older-than", "0s", "--grace", "0s", env=env)
    assert collected.code == 0, collected
    checked = await rara("db", "check", "--blobs", "digest", env=env)
    assert checked.code == 0, checked
    async with grpc.aio.insecure_channel(world.second.address) as channel:
        request = pb.FindMissingBlobsRequest(digests=[unused, digest_of(content)])
        stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
        assert (await stub.FindMissingBlobs(request, timeout=WAIT_S)).missing == [unused]


async def test_a_bucket_that_hangs_costs_no_lease_and_no_artifact(world: World, tmp_path: Path) -> None:
    """While it hangs, steps without artifacts go on; the one that uploads succeeds at its first attempt afterwards."""
    await spawn_executor(
        world.processes,
        world.first.address,
        tmp_path,
        module="rara_testing.probes",
        name="python",
        prestart=0,
    )
    scheduler = world.first.world
    await scheduler.define("blob", {"a": {"kind": "probe.artifact"}})
    await scheduler.define("plain", {"a": {"kind": "probe.echo"}})
    world.proxy.stall()
    blob = await scheduler.start("blob", value={"size": 400_000})
    for _ in range(3):
        plain = await scheduler.start("plain", value={"n": 1})
        await scheduler.until_run(plain, "succeeded")
    first = await _lease_ends_at(scheduler)
    async with asyncio.timeout(WAIT_S):
        while await _lease_ends_at(scheduler) < first + timedelta(
            seconds=2 * LEASE_S
        ):  # renewed all the time
            await asyncio.sleep(0.1)
    assert await scheduler.run_state(blob) == "running"
    world.proxy.resume()
    world.proxy.reset()
    await scheduler.until_run(blob, "succeeded")
    [row] = await scheduler.raw.fetch("select attempt, size_bytes from rara.artifact")
    assert tuple(row) == (1, 400_000)


async def _lease_ends_at(scheduler: RunningScheduler) -> datetime:
    found: datetime = await scheduler.raw.fetchval("select expires_at from rara.lease")
    return found


async def test_a_scheduler_with_a_wrong_bucket_ends_and_says_why(
    database_url: str, s3: S3Server, tmp_path: Path
) -> None:
    settings = {"RARA_DATABASE_URL": database_url, "RARA_LISTEN": "127.0.0.1:0"}
    async with Processes(tmp_path) as processes:
        wrong = await processes.start(
            "wrong",
            ["rara-scheduler"],
            env=s3.environment() | settings | {"RARA_BLOB_STORE": "s3://no-such-bucket/artifacts"},
        )
        assert await wrong.wait(WAIT_S) == 1
        said = wrong.stderr.read_text()
        assert "STORE_UNAVAILABLE" in said
        assert "cannot write at s3://no-such-bucket/artifacts: NoSuchBucket" in said
        assert "a-secret-key" not in said
        assert "an-access-key" not in said
