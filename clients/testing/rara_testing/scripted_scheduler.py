# ruff: noqa: N802 - gRPC gives the names of the methods
"""A scheduler that does what a test tells it to, and remembers every frame: a real server, without a database.

    async with ScriptedScheduler() as scheduler:
        ... start an executor that dials scheduler.address ...
        session = await scheduler.session()
        session.send_jobs(job(1, "demo.echo", input={"a": 1}))
        event = await scheduler.event(1, "succeeded")

By itself it answers Hello, acknowledges every event and every heartbeat, and keeps what it acknowledged. The
attributes switch that off; `Session.send` says anything else.
"""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias

import grpc
import grpc.aio
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, dispatch_pb2, dispatch_pb2_grpc, job_pb2

# A bound on everything that a test waits for: far above what works, far below a hung suite.
WAIT_S = 15.0

Context: TypeAlias = (
    "grpc.aio.ServicerContext[AsyncIterator[dispatch_pb2.ConnectRequest], "
    "AsyncIterator[dispatch_pb2.ConnectResponse]]"
)
Refuse = Callable[[job_pb2.ProgressEvent], dispatch_pb2.EventRefusal | None]


@dataclass
class Terms:
    """What Welcome says. Durations in seconds."""

    heartbeat_s: float = 5.0
    silence_s: float = 15.0
    event_window: int = 1000
    max_payload_bytes: int = 1 << 20
    max_inline_bytes: int = 16 << 10

    def message(self) -> dispatch_pb2.SessionTerms:
        terms = dispatch_pb2.SessionTerms()
        terms.heartbeat_interval.FromNanoseconds(int(self.heartbeat_s * 1e9))
        terms.silence_timeout.FromNanoseconds(int(self.silence_s * 1e9))
        terms.accept_timeout.FromNanoseconds(int(10e9))
        terms.limits.max_frame_bytes = 4 << 20
        terms.limits.event_window = self.event_window
        terms.limits.max_payload_bytes = self.max_payload_bytes
        terms.limits.max_inline_bytes = self.max_inline_bytes
        return terms


def job(
    token: int,
    kind: str,
    *,
    version: str = "1.0.0",
    input: object = None,  # noqa: A002 - the contract's name
    attempt: int = 1,
    lease_s: float = 30.0,
    attempt_timeout_s: float | None = None,
    progress_timeout_s: float | None = None,
    time_remaining_s: float | None = None,
    secrets: Mapping[str, common_pb2.SecretRef] | None = None,
    artifacts: tuple[common_pb2.Artifact, ...] = (),
    checkpoint: object = None,
    effects: Mapping[str, object] | None = None,
) -> job_pb2.JobRequest:
    """A request as the scheduler makes it; the step's id follows from the token."""
    request = job_pb2.JobRequest(
        lease=job_pb2.Lease(step_run_id=f"step-{token}", lease_token=token, attempt=attempt),
        workflow_run_id="run-1",
        idempotency_key=f"key-{token}",
        executor_kind="python",
        kind=kind,
        kind_version=version,
        input=common_pb2.Payload(data=json.dumps(input).encode()),
        input_artifacts=artifacts,
        secrets=secrets,
        definition="demo",
        definition_version=1,
        step_name="step",
        max_attempts=3,
        effects=[
            job_pb2.Effect(name=name, result=common_pb2.Payload(data=json.dumps(value).encode()))
            for name, value in (effects or {}).items()
        ],
    )
    request.lease_duration.FromNanoseconds(int(lease_s * 1e9))
    if attempt_timeout_s is not None:
        request.attempt_timeout.FromNanoseconds(int(attempt_timeout_s * 1e9))
    if progress_timeout_s is not None:
        request.progress_timeout.FromNanoseconds(int(progress_timeout_s * 1e9))
    if time_remaining_s is not None:
        request.time_remaining.FromNanoseconds(int(time_remaining_s * 1e9))
    if checkpoint is not None:
        request.checkpoint.data = json.dumps(checkpoint).encode()
    return request


def blob_artifact(name: str, data: bytes, *, inline: bool = False, **values: Any) -> common_pb2.Artifact:
    artifact = common_pb2.Artifact(name=name, digest=digest_of(data), **values)
    if inline:
        artifact.inline = data
    return artifact


def digest_of(data: bytes) -> common_pb2.Digest:
    return common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


class Session:
    """One Connect call, from the scheduler's side."""

    def __init__(self, scheduler: "ScriptedScheduler") -> None:
        self.frames: list[dispatch_pb2.ConnectRequest] = []
        self.ended = asyncio.Event()  # the executor's side is over
        self._scheduler = scheduler
        self._outgoing: asyncio.Queue[dispatch_pb2.ConnectResponse | grpc.StatusCode | None] = asyncio.Queue()

    @property
    def hello(self) -> dispatch_pb2.Hello:
        return self.frames[0].hello

    def send(self, **frame: Any) -> None:
        """One frame, like send(drain=dispatch_pb2.Drain())."""
        self._outgoing.put_nowait(dispatch_pb2.ConnectResponse(**frame))

    def send_raw(self, frame: dispatch_pb2.ConnectResponse) -> None:
        """One frame as it is, unknown fields included."""
        self._outgoing.put_nowait(frame)

    def send_jobs(self, *jobs: job_pb2.JobRequest) -> None:
        self.send(jobs=dispatch_pb2.JobBatch(jobs=jobs))

    def cancel_job(self, token: int, *, reason: str = "CANCELLED", grace_s: float = 1.0) -> None:
        self.send(cancels=dispatch_pb2.CancelJobs(jobs=[cancel(token, reason=reason, grace_s=grace_s)]))

    def acknowledge(self, token: int, sequence: int, missing: tuple[int, ...] = ()) -> None:
        ack = dispatch_pb2.EventAck(lease_token=token, sequence=sequence, missing=missing)
        self.send(acks=dispatch_pb2.EventAcks(acks=[ack]))

    def end(self, status: grpc.StatusCode | None = None) -> None:
        """End the call, with a status if there is one."""
        self._outgoing.put_nowait(status)

    def of(self, name: str) -> list[Any]:
        """The received frames of one sort: of("heartbeat")."""
        return [getattr(frame, name) for frame in self.frames if frame.WhichOneof("frame") == name]

    @property
    def events(self) -> list[job_pb2.ProgressEvent]:
        """Every event of this session, in the order of arrival, repeats included."""
        return [event for batch in self.of("events") for event in batch.events]

    async def frame(self, name: str, matches: Callable[[Any], bool] = lambda _: True) -> Any:
        """The first frame of one sort that matches; waits for it."""
        return await self._scheduler.until(
            lambda: next((frame for frame in self.of(name) if matches(frame)), None), f"frame {name}"
        )

    async def run(
        self, requests: AsyncIterator[dispatch_pb2.ConnectRequest], context: Context
    ) -> AsyncGenerator[dispatch_pb2.ConnectResponse]:
        reader = asyncio.create_task(self._read(requests), name="scripted session")
        try:
            while True:
                frame = await self._outgoing.get()
                if frame is None:
                    return
                if isinstance(frame, grpc.StatusCode):
                    await context.abort(frame, "the script says so")
                else:
                    yield frame
        finally:
            reader.cancel()
            self.ended.set()
            await self._scheduler.notify()

    async def _read(self, requests: AsyncIterator[dispatch_pb2.ConnectRequest]) -> None:
        async for request in requests:
            self.frames.append(request)
            self._scheduler.answer(self, request)
            await self._scheduler.notify()
        self.ended.set()
        self._outgoing.put_nowait(None)
        await self._scheduler.notify()


def cancel(token: int, *, reason: str = "CANCELLED", grace_s: float = 1.0) -> dispatch_pb2.CancelJob:
    message = dispatch_pb2.CancelJob(lease_token=token, reason=reason)
    message.grace.FromNanoseconds(int(grace_s * 1e9))
    return message


@dataclass
class ScriptedScheduler:
    """acknowledge: which events are stored. refuse: which are refused. beat, renew: answers to heartbeats."""

    terms: Terms = field(default_factory=Terms)
    welcome: bool = True
    acknowledge: Callable[[job_pb2.ProgressEvent], bool] = lambda _: True
    refuse: Refuse = lambda _: None
    beat: bool = True
    renew: bool = True
    lost: set[int] = field(default_factory=set)
    stored: dict[int, dict[int, job_pb2.ProgressEvent]] = field(default_factory=dict)
    sessions: list[Session] = field(default_factory=list)
    blobs: "ScriptedBlobs" = field(default_factory=lambda: ScriptedBlobs())
    address: str = ""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None
        self._taken = 0

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self._server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0)]
        )
        dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(_Dispatch(self), self._server)
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(self.blobs, self._server)
        port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        for session in self.sessions:
            session.end()
        if self._server is not None:
            await self._server.stop(0.5)

    async def session(self) -> Session:
        """The next session that was welcomed; waits for it."""
        index = self._taken
        self._taken += 1
        await self.until(
            lambda: len(self.sessions) > index and bool(self.sessions[index].frames), "a session"
        )
        return self.sessions[index]

    def events(self, token: int) -> list[job_pb2.ProgressEvent]:
        """What is stored of a lease, by sequence."""
        return [event for _, event in sorted(self.stored.get(token, {}).items())]

    def kinds(self, token: int) -> list[str]:
        return [event.WhichOneof("event") or "" for event in self.events(token)]

    async def event(self, token: int, kind: str, *, bound_s: float = WAIT_S) -> job_pb2.ProgressEvent:
        """The first stored event of one kind; waits for it. Its neighbours are in `events`."""
        event = await self.until(
            lambda: next((event for event in self.events(token) if event.WhichOneof("event") == kind), None),
            f"{kind} of {token}",
            bound_s=bound_s,
        )
        assert isinstance(event, job_pb2.ProgressEvent)
        return event

    async def until(self, ask: Callable[[], Any], what: str, *, bound_s: float = WAIT_S) -> Any:
        """Wait until ask gives something; what it gives."""
        try:
            async with asyncio.timeout(bound_s), self._changed:
                while not (answer := ask()):
                    await self._changed.wait()
        except TimeoutError:
            seen = {token: self.kinds(token) for token in self.stored}
            raise AssertionError(f"waited {bound_s:g} s for {what}; stored: {seen}") from None
        return answer

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def answer(self, session: Session, request: dispatch_pb2.ConnectRequest) -> None:
        match request.WhichOneof("frame"):
            case "hello" if self.welcome:
                session.send(welcome=self._welcome(request.hello))
            case "events":
                acks = self._store(request.events)
                if acks.acks or acks.refusals:
                    session.send(acks=acks)
            case "heartbeat" if self.beat:
                number = request.heartbeat.number
                ack = dispatch_pb2.HeartbeatAck(number=number, renewed=number if self.renew else 0)
                ack.lost_lease_tokens.extend(self.lost & set(request.heartbeat.lease_tokens))
                session.send(heartbeat_ack=ack)
            case _:
                pass

    def _welcome(self, hello: dispatch_pb2.Hello) -> dispatch_pb2.Welcome:
        welcome = dispatch_pb2.Welcome(
            protocol_version=1, session_id=f"session-{len(self.sessions)}", terms=self.terms.message()
        )
        for held in hello.held_jobs:
            token = held.lease.lease_token
            if token in self.lost:
                welcome.lost_lease_tokens.append(token)
            else:
                welcome.acks.acks.append(self._ack(token, held.last_sequence))
        return welcome

    def _store(self, batch: dispatch_pb2.EventBatch) -> dispatch_pb2.EventAcks:
        acks = dispatch_pb2.EventAcks()
        touched: dict[int, int] = {}
        for event in batch.events:
            token = event.lease.lease_token
            refusal = self.refuse(event)
            if token in self.lost:
                refusal = dispatch_pb2.EventRefusal(code="LEASE_LOST")
            if refusal is not None:
                refusal.lease_token, refusal.sequence = token, event.sequence
                acks.refusals.append(refusal)
            elif self.acknowledge(event):
                self.stored.setdefault(token, {}).setdefault(event.sequence, event)
                touched[token] = event.sequence
        acks.acks.extend(self._ack(token, newest) for token, newest in touched.items())
        return acks

    def _ack(self, token: int, newest: int) -> dispatch_pb2.EventAck:
        stored = self.stored.get(token, {})
        last = max(stored, default=0)
        missing = [number for number in range(1, last) if number not in stored]
        return dispatch_pb2.EventAck(
            lease_token=token, sequence=min(last, max(newest, last)), missing=missing
        )


class _Dispatch(dispatch_pb2_grpc.DispatchServiceServicer):
    def __init__(self, scheduler: ScriptedScheduler) -> None:
        self._scheduler = scheduler

    async def Connect(
        self, request_iterator: AsyncIterator[dispatch_pb2.ConnectRequest], context: Context
    ) -> AsyncIterator[dispatch_pb2.ConnectResponse]:
        session = Session(self._scheduler)
        self._scheduler.sessions.append(session)
        async with contextlib.aclosing(session.run(request_iterator, context)) as frames:
            async for frame in frames:
                yield frame


UnaryContext: TypeAlias = "grpc.aio.ServicerContext[Any, Awaitable[Any]]"


class ScriptedBlobs(artifact_pb2_grpc.ArtifactServiceServicer):
    """ArtifactService over a dictionary.

    fail: statuses that the next calls end with, first ones first. cut_reads_at: where the next reads are cut.
    read_from: the offsets at which reads began.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[common_pb2.Digest, bytearray]] = {}
        self.created: list[artifact_pb2.CreateUploadRequest] = []
        self.reads = 0
        self.fail: list[grpc.StatusCode | grpc.Status] = []
        self.cut_reads_at: list[int] = []
        self.read_from: list[int] = []

    def add(self, data: bytes) -> common_pb2.Digest:
        digest = digest_of(data)
        self.blobs[digest.sha256] = data
        return digest

    async def _maybe_fail(self, context: Any) -> None:
        if not self.fail:
            return
        failure = self.fail.pop(0)
        if isinstance(failure, grpc.StatusCode):
            await context.abort(failure, "the script says so")
        await context.abort_with_status(failure)

    async def FindMissingBlobs(
        self, request: artifact_pb2.FindMissingBlobsRequest, context: UnaryContext
    ) -> artifact_pb2.FindMissingBlobsResponse:
        missing = [digest for digest in request.digests if digest.sha256 not in self.blobs]
        return artifact_pb2.FindMissingBlobsResponse(missing=missing)

    async def CreateUpload(
        self, request: artifact_pb2.CreateUploadRequest, context: UnaryContext
    ) -> artifact_pb2.CreateUploadResponse:
        await self._maybe_fail(context)
        self.created.append(request)
        if request.digest.sha256 in self.blobs:
            return artifact_pb2.CreateUploadResponse()
        upload_id = f"upload-{request.digest.sha256}"
        self.uploads.setdefault(upload_id, (request.digest, bytearray()))
        return artifact_pb2.CreateUploadResponse(upload_id=upload_id)

    async def WriteBlob(
        self, request_iterator: AsyncIterator[artifact_pb2.WriteBlobRequest], context: Any
    ) -> artifact_pb2.WriteBlobResponse:
        upload_id = ""
        async for request in request_iterator:
            await self._maybe_fail(context)
            upload_id = request.upload_id or upload_id
            digest, data = self.uploads[upload_id]
            assert request.offset == len(data)
            data += request.data
            if request.finish:
                del self.uploads[upload_id]
                if digest_of(bytes(data)) != digest:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "digest or size differ")
                self.blobs[digest.sha256] = bytes(data)
                return artifact_pb2.WriteBlobResponse(committed_bytes=len(data), verified=digest)
        return artifact_pb2.WriteBlobResponse()

    async def QueryWriteStatus(
        self, request: artifact_pb2.QueryWriteStatusRequest, context: UnaryContext
    ) -> artifact_pb2.QueryWriteStatusResponse:
        upload = self.uploads.get(request.upload_id)
        if upload is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such upload")
            raise AssertionError
        return artifact_pb2.QueryWriteStatusResponse(committed_bytes=len(upload[1]))

    async def CompleteUpload(
        self, request: artifact_pb2.CompleteUploadRequest, context: UnaryContext
    ) -> artifact_pb2.CompleteUploadResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no parts here")
        raise AssertionError

    async def GetDownload(
        self, request: artifact_pb2.GetDownloadRequest, context: UnaryContext
    ) -> artifact_pb2.GetDownloadResponse:
        return artifact_pb2.GetDownloadResponse()

    async def ReadBlob(
        self, request: artifact_pb2.ReadBlobRequest, context: Any
    ) -> AsyncIterator[artifact_pb2.ReadBlobResponse]:
        await self._maybe_fail(context)
        self.reads += 1
        data = self.blobs.get(request.digest.sha256)
        if data is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such blob")
            raise AssertionError
        self.read_from.append(request.offset)
        end = self.cut_reads_at.pop(0) if self.cut_reads_at else len(data)
        for start in range(request.offset, end, 64 << 10):
            yield artifact_pb2.ReadBlobResponse(data=data[start : min(end, start + (64 << 10))])
        if end < len(data):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
