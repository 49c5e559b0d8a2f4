# ruff: noqa: N802 - gRPC gives the names of the methods
"""ExecutorService: the scheduler dials this executor, and each job has a stream of its own."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, Final

import grpc
import grpc.aio
import structlog
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from rara.v1 import dispatch_pb2, executor_pb2, executor_pb2_grpc, job_pb2

from rara_executor import protocol
from rara_executor.codes import Code
from rara_executor.door import Door
from rara_executor.errors import ConfigurationError, ExecutorError
from rara_executor.heartbeat import Heartbeats
from rara_executor.lease_clock import lease_now
from rara_executor.outbox import Outbox
from rara_executor.session_side import SessionSide
from rara_executor.supervisor import DEFAULT_LEASE_S, Supervisor

log = structlog.get_logger(__name__)

START_TIMEOUT_S: Final = 5.0  # until a call of Execute says what it is about
DEFAULT_HEARTBEAT_S: Final = 5.0
DEFAULT_SILENCE_S: Final = 15.0
MAX_QUEUED: Final = 10_000  # answers of one stream; its events are bounded by the window

LAST_WORDS_S: Final = 1.0  # for the acknowledgements of what was sent last
SERVER_OPTIONS: Final[list[tuple[str, int]]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_receive_message_length", 64 << 20),  # jobs may be as large as the scheduler's settings say
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),  # each process needs an address of its own
]

# What a refusal says as the status of its call.
STATUS: Final = {
    Code.UNSUPPORTED_KIND: grpc.StatusCode.UNIMPLEMENTED,
    Code.NO_CAPACITY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Code.EXECUTOR_SHUTDOWN: grpc.StatusCode.UNAVAILABLE,
    Code.LEASE_UNKNOWN: grpc.StatusCode.NOT_FOUND,
    Code.FIELD_INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    Code.PROTOCOL_VERSION_UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
}


class DirectRefused(ExecutorError):
    """A call is answered with this code instead of being served."""

    def __init__(self, code: Code, message: str, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.metadata = metadata or {}


class JobStream:
    """One call of Execute: what is queued for the scheduler, and the beat of the one lease."""

    def __init__(self, token: int, terms: dispatch_pb2.SessionTerms) -> None:
        self.token = token
        self.refusal: DirectRefused | None = None
        self.heartbeats = Heartbeats(
            interval_s=terms.heartbeat_interval.ToNanoseconds() / 1e9 or DEFAULT_HEARTBEAT_S,
            silence_s=terms.silence_timeout.ToNanoseconds() / 1e9 or DEFAULT_SILENCE_S,
            now=lease_now(),
        )
        self.given_up = ""  # why the stream ends although its job has more to say
        self._frames: asyncio.Queue[executor_pb2.ExecuteResponse | None] = asyncio.Queue(MAX_QUEUED)

    def send(self, frame: executor_pb2.ExecuteResponse | None) -> None:
        """Queue a frame; None ends the stream: its job has nothing more to say."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self.give_up("nobody reads the stream")

    def give_up(self, why: str) -> None:
        """End the stream at once. The scheduler attaches anew, and is told what it has not acknowledged."""
        self.given_up = why
        while not self._frames.empty():
            self._frames.get_nowait()
        self._frames.put_nowait(None)

    def beat(self, tokens: Collection[int]) -> None:
        heartbeat = self.heartbeats.compose(tokens, lease_now())
        self.send(executor_pb2.ExecuteResponse(heartbeat=heartbeat))

    async def frames(self) -> AsyncIterator[executor_pb2.ExecuteResponse]:
        """Until the stream is ended. Raises DirectRefused for a job that is not taken."""
        while (frame := await self._frames.get()) is not None:
            yield frame
        if self.refusal is not None:
            raise self.refusal


class DirectSession:
    """Stands where a session stands, over any number of streams that come and go."""

    def __init__(self, supervisor: Supervisor, outbox: Outbox) -> None:
        self.streams: dict[int, JobStream] = {}
        self.polled_at = float("-inf")
        self._supervisor = supervisor
        self._outbox = outbox
        self._wake = asyncio.Event()
        self._goodbye = asyncio.Event()
        self._alone_since: dict[int, float] = {}  # tokens without a stream

    # What the supervisor says.

    def wake(self) -> None:
        self._wake.set()

    def set_credit(self, limit: int) -> None:
        """Nothing to do: the scheduler asks for the free slots."""

    def receipt(self, token: int) -> None:
        """Nothing to do: the answer to Cancel is the receipt."""

    def drain(self, finish_within_s: float | None) -> None:
        """Nothing to do: GetCapabilities says so."""

    def reject(self, lease: job_pb2.Lease, code: str, message: str) -> None:
        stream = self.streams.get(lease.lease_token)
        if stream is not None:
            stream.refusal = DirectRefused(Code(code), message)
            stream.send(None)

    def forget(self, token: int) -> None:
        self._alone_since.pop(token, None)
        stream = self.streams.get(token)
        if stream is not None:
            stream.send(None)

    def goodbye(self) -> None:
        self._goodbye.set()

    def is_ready(self, now: float) -> bool:
        """Whether a scheduler has asked lately: jobs can come."""
        return now - self.polled_at <= DEFAULT_SILENCE_S

    # The streams.

    def open(self, stream: JobStream) -> None:
        """Make this the stream of its lease; the one before it, if any, ends."""
        old = self.streams.get(stream.token)
        if old is not None:
            old.give_up("another call has attached to the job")
            self._outbox.pause(stream.token)  # what it has sent may have reached nobody
        self.streams[stream.token] = stream
        self._alone_since.pop(stream.token, None)
        self._outbox.resume(stream.token)

    def close(self, stream: JobStream) -> None:
        if self.streams.get(stream.token) is not stream:
            return
        del self.streams[stream.token]
        if stream.token in self._supervisor.jobs:
            self._alone_since[stream.token] = lease_now()
            self._outbox.pause(stream.token)
        else:
            self._outbox.drop(stream.token)

    async def run(self) -> None:
        """Hand events to their streams until goodbye."""
        pump = asyncio.create_task(self._pump(), name="direct events")
        goodbye = asyncio.create_task(self._goodbye.wait(), name="direct goodbye")
        try:
            await asyncio.wait([pump, goodbye], return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()  # a bug: without it nothing would ever be reported
        finally:
            for task in (pump, goodbye):
                task.cancel()
            await asyncio.wait([pump, goodbye])
            for stream in self.streams.values():
                stream.give_up("the executor stops")

    async def _pump(self) -> None:
        while True:
            due = self._outbox.due_in(lease_now())
            if due == 0.0:
                for event in self._outbox.take(lease_now()):
                    stream = self.streams.get(event.lease.lease_token)
                    if stream is not None:  # else it is sent again when there is one
                        stream.send(executor_pb2.ExecuteResponse(event=event))
                await asyncio.sleep(0)
                continue
            try:
                async with asyncio.timeout(due if due is not None else 1.0):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._forget_abandoned()

    def _forget_abandoned(self) -> None:
        """Jobs whose stream did not come back for a whole lease: the lease is over, and the slot is needed."""
        now = lease_now()
        for token, since in list(self._alone_since.items()):
            job = self._supervisor.jobs.get(token)
            if job is None:
                del self._alone_since[token]
            elif now - since > (job.clock.lease_s or DEFAULT_LEASE_S):
                self._supervisor.lose(token)
                self._supervisor.after_change()


class DirectServer:
    """Serves ExecutorService from `run` until goodbye. `session` is there from the start."""

    goodbye_gives_back = False  # nobody is told: what is still held is somebody's when its lease has expired

    def __init__(
        self, listen: str, side: SessionSide, supervisor: Supervisor, outbox: Outbox, door: Door | None = None
    ) -> None:
        self.session = DirectSession(supervisor, outbox)
        self._door = door or Door()
        self.address = ""
        self._listen = listen
        self._servicer = DirectServicer(self.session, side, supervisor)
        self._supervisor = supervisor

    async def start(self) -> None:
        """Open the port. Raises ConfigurationError."""
        self._server = grpc.aio.server(interceptors=self._door.interceptors(), options=SERVER_OPTIONS)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self._servicer, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            port = self._door.open(self._server, self._listen)
        except (RuntimeError, ValueError) as error:
            raise ConfigurationError(f"cannot listen on {self._listen}: {error}") from error
        self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        self._supervisor.begin_session(self.session)
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def run(self) -> bool:
        """Until goodbye. True: what was said before has been heard, being the end of calls."""
        try:
            await self.session.run()
            await self._health.enter_graceful_shutdown()
            return True
        finally:
            await self._server.stop(LAST_WORDS_S)


class DirectServicer(executor_pb2_grpc.ExecutorServiceServicer):
    def __init__(self, session: DirectSession, side: SessionSide, supervisor: Supervisor) -> None:
        self._session = session
        self._side = side
        self._supervisor = supervisor

    async def GetCapabilities(
        self, request: executor_pb2.GetCapabilitiesRequest, context: Any
    ) -> executor_pb2.GetCapabilitiesResponse:
        if not protocol.is_spoken(request.protocol_version):
            await _abort(
                context,
                DirectRefused(
                    Code.PROTOCOL_VERSION_UNSUPPORTED,
                    f"protocol_version {request.protocol_version} is not spoken here; "
                    f"{protocol.OLDEST} to {protocol.NEWEST} are",
                    {"oldest": str(protocol.OLDEST), "newest": str(protocol.NEWEST)},
                ),
            )
        self._session.polled_at = lease_now()
        self._side.welcomed.set()
        slots = self._supervisor.slots
        return executor_pb2.GetCapabilitiesResponse(
            hello=self._side.hello(request.protocol_version), free_slots=slots.free(), draining=slots.draining
        )

    async def Execute(  # type: ignore[override]  # the stubs know only the iterator style
        self, request_iterator: AsyncIterator[executor_pb2.ExecuteRequest], context: Any
    ) -> None:
        try:
            await self._execute(context)
        except DirectRefused as refused:
            await _abort(context, refused)

    async def Cancel(self, request: executor_pb2.CancelRequest, context: Any) -> executor_pb2.CancelResponse:
        token = request.cancel.lease_token
        known = token in self._supervisor.jobs
        if request.cancel.reason == Code.LEASE_LOST:
            self._supervisor.lose(token)
        else:
            self._supervisor.cancel(request.cancel)
        self._supervisor.after_change()
        return executor_pb2.CancelResponse(known=known)

    async def Drain(self, request: executor_pb2.DrainRequest, context: Any) -> executor_pb2.DrainResponse:
        self._side.on_drain(request.drain)
        return executor_pb2.DrainResponse()

    async def _execute(self, context: Any) -> None:
        start = await _read_start(context)
        stream = JobStream(start.job.lease.lease_token, start.terms)
        self._begin(start, stream)
        tasks = [
            asyncio.create_task(_write(stream, context), name="job stream write"),
            asyncio.create_task(self._read(stream, context), name="job stream read"),
            asyncio.create_task(self._keep_beat(stream), name="job stream beat"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            # Not OK, which would say that the job has nothing more to tell.
            if tasks[2] in done:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the scheduler is silent")
            if stream.given_up:
                await context.abort(grpc.StatusCode.UNAVAILABLE, stream.given_up)
        finally:
            for task in tasks:
                task.cancel()
            self._session.close(stream)
            await asyncio.wait(tasks)

    def _begin(self, start: executor_pb2.ExecuteStart, stream: JobStream) -> None:
        """Attach to the job of this lease, or start it. Raises DirectRefused."""
        job = self._supervisor.jobs.get(stream.token)
        if job is None and start.resume_after_sequence:
            raise DirectRefused(Code.LEASE_UNKNOWN, "no job is held here under this lease")
        if job is not None and job.lease.step_run_id != start.job.lease.step_run_id:
            raise DirectRefused(Code.FIELD_INVALID, "start.job.lease: the token is another step's")
        self._side.take_limits(start.terms.limits)
        self._session.open(stream)
        if job is None:
            self._supervisor.take(start.job)
        else:
            ack = dispatch_pb2.EventAck(lease_token=stream.token, sequence=start.resume_after_sequence)
            self._supervisor.acknowledged(ack)
            stream.beat(self._listed(stream))  # what was held through the gap is renewed at once
        self._supervisor.after_change()

    async def _keep_beat(self, stream: JobStream) -> None:
        while not stream.heartbeats.is_silent(lease_now()):
            await asyncio.sleep(stream.heartbeats.interval_s)
            stream.beat(self._listed(stream))

    def _listed(self, stream: JobStream) -> list[int]:
        return [token for token in self._side.heartbeat_tokens() if token == stream.token]

    async def _read(self, stream: JobStream, context: Any) -> None:
        while True:
            frame = await context.read()
            if frame is grpc.aio.EOF:
                return
            stream.heartbeats.heard(lease_now())
            match frame.WhichOneof("frame"):
                case "acks":
                    self._side.on_acks(_of(stream.token, frame.acks))
                case "heartbeat_ack":
                    renewal = stream.heartbeats.answered(frame.heartbeat_ack)
                    self._side.on_heartbeat_ack(_own(stream.token, frame.heartbeat_ack), renewal)
                case other:
                    log.debug("job_stream.frame_ignored", frame=other or "unknown")


def _of(token: int, acks: dispatch_pb2.EventAcks) -> dispatch_pb2.EventAcks:
    """A stream speaks for its own lease alone."""
    return dispatch_pb2.EventAcks(
        acks=[ack for ack in acks.acks if ack.lease_token == token],
        refusals=[refusal for refusal in acks.refusals if refusal.lease_token == token],
    )


def _own(token: int, ack: dispatch_pb2.HeartbeatAck) -> dispatch_pb2.HeartbeatAck:
    return dispatch_pb2.HeartbeatAck(
        number=ack.number,
        renewed=ack.renewed,
        lost_lease_tokens=[lost for lost in ack.lost_lease_tokens if lost == token],
        cancels=[cancel for cancel in ack.cancels if cancel.lease_token == token],
    )


async def _read_start(context: Any) -> executor_pb2.ExecuteStart:
    reader = asyncio.create_task(context.read(), name="job stream start")
    try:
        done, _ = await asyncio.wait({reader}, timeout=START_TIMEOUT_S)
        first = reader.result() if done else None
    finally:
        reader.cancel()
    if not isinstance(first, executor_pb2.ExecuteRequest) or first.WhichOneof("frame") != "start":
        raise DirectRefused(Code.FIELD_INVALID, "start: must be the first frame")
    lease = first.start.job.lease
    if lease.lease_token < 1 or not lease.step_run_id or first.start.resume_after_sequence < 0:
        raise DirectRefused(Code.FIELD_INVALID, "start.job.lease: must name a step and a token")
    return first.start


async def _write(stream: JobStream, context: Any) -> None:
    async for frame in stream.frames():
        await context.write(frame)


async def _abort(context: Any, refused: DirectRefused) -> None:
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=refused.code, domain="rara.v1", metadata=refused.metadata))
    status = status_pb2.Status(code=STATUS[refused.code].value[0], message=str(refused), details=[info])
    await context.abort_with_status(rpc_status.to_status(status))
