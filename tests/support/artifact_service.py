"""A served ArtifactService with a real database and a real folder behind it, and what its callers send and read."""

import hashlib
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from rara.v1 import artifact_pb2 as pb
from rara.v1 import artifact_pb2_grpc, common_pb2, job_pb2
from rara_scheduler.blobs import FolderBlobStore
from rara_scheduler.blobs.transfers import BlobTransfers, TransferLimits
from rara_scheduler.store.blobs import BlobRows
from rara_scheduler.store.database import Database
from rara_scheduler.transport import connections
from rara_scheduler.transport.artifacts import ArtifactServicer

PIECE = 100_000


@dataclass(frozen=True)
class Service:
    """A served ArtifactService, and what a test may look at behind it."""

    stub: artifact_pb2_grpc.ArtifactServiceStub
    port: int
    transfers: BlobTransfers
    rows: BlobRows
    database: Database
    folder: Path

    def path_of(self, digest: common_pb2.Digest) -> Path:
        return self.folder / "sha256" / digest.sha256[:2] / digest.sha256[2:]

    def partial_files(self) -> list[Path]:
        return list((self.folder / "partial").iterdir())


@asynccontextmanager
async def serving(database_url: str, folder: Path, limits: TransferLimits) -> AsyncIterator[Service]:
    database = Database(database_url)
    await database.open()
    store = FolderBlobStore(folder, busy_wait_s=0.2)
    await store.prepare()
    rows = BlobRows(database)
    transfers = BlobTransfers(store, rows, limits)
    server = grpc.aio.server(options=connections.keepalive_options())
    artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(
        ArtifactServicer(transfers, piece_wait_s=2.0), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
        yield Service(stub, port, transfers, rows, database, folder)
    await server.stop(0)
    store.close()
    await database.close()


def data_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def digest_of(data: bytes) -> common_pb2.Digest:
    return common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def pieces(
    upload_id: str, data: bytes, *, start: int = 0, finish: bool = True
) -> Iterator[pb.WriteBlobRequest]:
    """Messages as a client sends them: the upload's id in the first, `finish` in the last."""
    ends = range(start, len(data), PIECE) or [start]
    for number, offset in enumerate(ends):
        yield pb.WriteBlobRequest(
            upload_id=upload_id if number == 0 else "",
            offset=offset,
            data=data[offset : offset + PIECE],
            finish=finish and offset + PIECE >= len(data),
        )


async def create(service: Service, digest: common_pb2.Digest, lease: job_pb2.Lease | None = None) -> str:
    response = await service.stub.CreateUpload(pb.CreateUploadRequest(digest=digest, lease=lease))
    return response.upload_id


async def put(service: Service, data: bytes) -> common_pb2.Digest:
    upload_id = await create(service, digest_of(data))
    response = await service.stub.WriteBlob(pieces(upload_id, data))
    assert response.verified == digest_of(data)
    return response.verified


async def get(service: Service, digest: common_pb2.Digest, offset: int = 0, limit: int = 0) -> bytes:
    call = service.stub.ReadBlob(pb.ReadBlobRequest(digest=digest, offset=offset, limit=limit))
    return b"".join([response.data async for response in call])


async def missing(service: Service, *digests: common_pb2.Digest) -> list[common_pb2.Digest]:
    return list((await service.stub.FindMissingBlobs(pb.FindMissingBlobsRequest(digests=digests))).missing)


async def committed_bytes(service: Service, upload_id: str) -> int:
    status = await service.stub.QueryWriteStatus(pb.QueryWriteStatusRequest(upload_id=upload_id))
    return status.committed_bytes


class Refusal:
    """What a caller can read from a failed call."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.status = error.code()
        status = rpc_status.from_call(error)
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details:
            detail.Unpack(info)
            detail.Unpack(bad)
            detail.Unpack(retry)
        self.reason = info.reason
        self.metadata = dict(info.metadata)
        self.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()
        self.fields = [violation.field for violation in bad.field_violations]


async def finished(call: Any) -> None:
    """Wait for a unary call, or read a streamed answer to its end."""
    if isinstance(call, grpc.aio.UnaryStreamCall):
        async for _ in call:
            pass
    else:
        await call


async def refused(call: object) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finished(call)
    return Refusal(caught.value)


async def add_lease(service: Service, token: int) -> job_pb2.Lease:
    step_run_id = str(uuid.uuid4())
    async with service.database.connection() as connection:
        await connection.execute(
            "insert into rara.lease (step_run_id, workflow_run_id, route_id, lease_token, attempt, failures,"
            " free_endings, executor_id, released_at, granted_at, granted_on, expires_at, revision)"
            " values ($1, $2, 1, $3, 1, 0, 0, $4, now(), now(), (now() at time zone 'utc')::date,"
            " now() + interval '30 s', 1)",
            step_run_id,
            str(uuid.uuid4()),
            token,
            str(uuid.uuid4()),
        )
    return job_pb2.Lease(step_run_id=step_run_id, lease_token=token, attempt=1)
