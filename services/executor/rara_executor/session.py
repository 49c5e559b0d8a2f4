"""One Connect call: one task writes, one reads, and one keeps the beat."""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from rara.v1 import dispatch_pb2, job_pb2

from rara_executor import protocol
from rara_executor.heartbeat import Heartbeats, Renewal
from rara_executor.lease_clock import lease_now
from rara_executor.outbox import Outbox

log = structlog.get_logger(__name__)

# A frame of events is written as bytes: each was serialized when it was taken into the outbox.
Frame: TypeAlias = dispatch_pb2.ConnectRequest | bytes
ConnectCall = grpc.aio.StreamStreamCall[Frame, dispatch_pb2.ConnectResponse]

CONNECT = "/rara.v1.DispatchService/Connect"
WELCOME_TIMEOUT_S = 10.0
LAST_WORDS_S = 5.0  # after GoAway, for the acks of what the scheduler still commits
MAX_REJECTIONS = 10_000


def connect(channel: grpc.aio.Channel) -> ConnectCall:
    """Open the call. The stub that is made from the contract would take no bytes."""
    method: grpc.aio.StreamStreamMultiCallable[Frame, dispatch_pb2.ConnectResponse] = channel.stream_stream(
        CONNECT,
        request_serializer=lambda frame: frame if isinstance(frame, bytes) else frame.SerializeToString(),
        response_deserializer=dispatch_pb2.ConnectResponse.FromString,
    )
    return method()


class JobSession(Protocol):
    """What the holder of the jobs says to the scheduler beside its events. Each call only notes it."""

    def wake(self) -> None: ...

    def set_credit(self, limit: int) -> None: ...

    def reject(self, lease: job_pb2.Lease, code: str, message: str) -> None: ...

    def receipt(self, token: int) -> None: ...

    def forget(self, token: int) -> None: ...

    def drain(self, finish_within_s: float | None) -> None: ...

    def goodbye(self) -> None: ...

    def is_ready(self, now: float) -> bool: ...


class SessionEvents(Protocol):
    """What a session needs from whoever holds the jobs."""

    @property
    def spoken(self) -> protocol.Spoken: ...

    def hello(self) -> dispatch_pb2.Hello: ...

    def on_welcome(self, session: "Session", welcome: dispatch_pb2.Welcome) -> None: ...

    def on_session_end(self) -> None: ...

    def on_jobs(self, jobs: dispatch_pb2.JobBatch) -> None: ...

    def on_acks(self, acks: dispatch_pb2.EventAcks) -> None: ...

    def on_heartbeat_ack(self, ack: dispatch_pb2.HeartbeatAck, renewal: Renewal | None) -> None: ...

    def on_cancels(self, cancels: dispatch_pb2.CancelJobs) -> None: ...

    def on_drain(self, drain: dispatch_pb2.Drain) -> None: ...

    def heartbeat_tokens(self) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """Why a call has ended. went_away: the scheduler's GoAway; said_goodbye: ours, which the scheduler has heard if it
    then ended the call in order; versions: the oldest and the newest that a scheduler speaks that refused ours."""

    reason: str
    welcomed: bool
    went_away: dispatch_pb2.GoAway | None
    said_goodbye: bool
    was_heard: bool = False
    versions: tuple[int, int] | None = None


class Session:
    """Composes each frame at the moment of its writing, so that what waits is state and not a queue."""

    def __init__(self, call: ConnectCall, outbox: Outbox, events: SessionEvents) -> None:
        self.heartbeats: Heartbeats | None = None  # from Welcome on
        self._call = call
        self._outbox = outbox
        self._events = events
        self._wake = asyncio.Event()
        self._credit = 0
        self._credit_sent = -1
        self._beat = False
        self._receipts: list[int] = []
        self._receipted: set[int] = set()
        self._rejections: deque[dispatch_pb2.JobRejection] = deque(maxlen=MAX_REJECTIONS)
        self._drain: dispatch_pb2.Drain | None = None
        self._goodbye = False
        self._said_goodbye = False
        self._went_away: dispatch_pb2.GoAway | None = None
        self._versions: tuple[int, int] | None = None
        self._closing = asyncio.Event()

    # What the holder of the jobs says; each only notes it and wakes the writer.

    def wake(self) -> None:
        self._wake.set()

    def set_credit(self, limit: int) -> None:
        """Jobs allowed since the session began. A smaller limit than before is ignored."""
        if limit > self._credit:
            self._credit = limit
            self._wake.set()

    def reject(self, lease: job_pb2.Lease, code: str, message: str) -> None:
        self._rejections.append(dispatch_pb2.JobRejection(lease=lease, code=code, message=message))
        self._wake.set()

    def receipt(self, token: int) -> None:
        """The cancel request for the token has arrived; said once per session."""
        if token not in self._receipted:
            self._receipted.add(token)
            self._receipts.append(token)
            self._wake.set()

    def forget(self, token: int) -> None:
        self._receipted.discard(token)

    def drain(self, finish_within_s: float | None) -> None:
        self._drain = dispatch_pb2.Drain()
        if finish_within_s is not None:
            self._drain.finish_within.FromNanoseconds(int(finish_within_s * 1e9))
        self._wake.set()

    def goodbye(self) -> None:
        """Everything was said and acknowledged: say so and end."""
        self._goodbye = True
        self._wake.set()

    def close(self) -> None:
        """End the call without more words."""
        self._closing.set()

    def is_ready(self, now: float) -> bool:
        return self.heartbeats is not None and self.heartbeats.is_ready(now)

    # The call.

    async def run(self) -> SessionEnd:
        """Hold the session until it ends, however it ends."""
        tasks: list[asyncio.Task[str]] = []
        try:
            await self._call.write(dispatch_pb2.ConnectRequest(hello=self._events.hello()))
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                frame = await self._call.read()
            if not isinstance(frame, dispatch_pb2.ConnectResponse):
                return self._end(await self._status())
            if frame.WhichOneof("frame") == "go_away":
                self._went_away = frame.go_away
                return self._end("the scheduler sent us away")
            if frame.WhichOneof("frame") != "welcome":
                return self._end(f"the first frame was {frame.WhichOneof('frame')}, not welcome")
            self._welcome(frame.welcome)
            tasks = [
                asyncio.create_task(self._read(), name="session read"),
                asyncio.create_task(self._write(), name="session write"),
                asyncio.create_task(self._keep_beat(), name="session beat"),
                asyncio.create_task(self._closed(), name="session close"),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            reasons = [task.result() for task in tasks if task in done]
            if tasks[1] in done:
                # Nothing more can be said, but what has arrived must be taken in before the next Hello, and
                # a scheduler that goes away still acknowledges what it still commits.
                await asyncio.wait(tasks[:1], timeout=LAST_WORDS_S)
            return self._end(reasons[0], was_heard=await self._ended_in_order())
        except TimeoutError:
            return self._end("no Welcome in time")
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            await self._note_refusal()
            return self._end(_status_text(error))
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, grpc.aio.AioRpcError):
                    raise outcome

    def _welcome(self, welcome: dispatch_pb2.Welcome) -> None:
        terms = welcome.terms
        self.heartbeats = Heartbeats(
            interval_s=terms.heartbeat_interval.ToNanoseconds() / 1e9 or 5.0,
            silence_s=terms.silence_timeout.ToNanoseconds() / 1e9 or 15.0,
            now=lease_now(),
        )
        self._events.on_welcome(self, welcome)
        self._beat = True  # what was held through the gap is renewed at once
        self._wake.set()

    async def _read(self) -> str:
        assert self.heartbeats is not None  # noqa: S101 - _welcome has run
        while True:
            frame = await self._call.read()
            if not isinstance(frame, dispatch_pb2.ConnectResponse):
                return await self._status()
            self.heartbeats.heard(lease_now())
            match frame.WhichOneof("frame"):
                case "jobs":
                    self._events.on_jobs(frame.jobs)
                case "acks":
                    self._events.on_acks(frame.acks)
                case "heartbeat_ack":
                    renewal = self.heartbeats.answered(frame.heartbeat_ack)
                    self._events.on_heartbeat_ack(frame.heartbeat_ack, renewal)
                case "cancels":
                    self._events.on_cancels(frame.cancels)
                case "drain":
                    self._events.on_drain(frame.drain)
                case "go_away":
                    self._went_away = frame.go_away
                    self._wake.set()
                case other:
                    log.debug("session.frame_ignored", frame=other or "unknown")
            self._wake.set()  # an ack makes room in the window

    async def _write(self) -> str:
        try:
            return await self._write_frames()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            return _status_text(error)

    async def _write_frames(self) -> str:
        while True:
            if self._went_away is not None:
                await self._call.done_writing()
                return "the scheduler sent us away"
            for frame in self._control_frames():
                await self._call.write(frame)
            now = lease_now()
            due = self._outbox.due_in(now)
            if due == 0.0:
                frame_of_events = self._outbox.take_frame(now)
                if frame_of_events:
                    await self._call.write(frame_of_events)
                    continue
            if self._goodbye and self._outbox.is_empty():
                await self._say_goodbye()
                return "goodbye"
            await self._wait(due)

    async def _say_goodbye(self) -> None:
        self._said_goodbye = True  # the scheduler may end the call before we hear that it was written
        try:
            await self._call.write(dispatch_pb2.ConnectRequest(goodbye=dispatch_pb2.Goodbye()))
            await self._call.done_writing()
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            self._said_goodbye = await self._ended_in_order()
            raise

    async def _wait(self, due_s: float | None) -> None:
        """Until somebody has something to say, or gathered progress is due."""
        if not self._wake.is_set():
            timer = None
            if due_s is not None:
                timer = asyncio.get_running_loop().call_later(due_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                if timer is not None:
                    timer.cancel()
        self._wake.clear()

    def _control_frames(self) -> list[dispatch_pb2.ConnectRequest]:
        frames = []
        if self._beat and self.heartbeats is not None:
            self._beat = False
            heartbeat = self.heartbeats.compose(self._events.heartbeat_tokens(), lease_now())
            frames.append(dispatch_pb2.ConnectRequest(heartbeat=heartbeat))
        if self._receipts:
            receipts = dispatch_pb2.CancelReceipts(lease_tokens=self._receipts)
            frames.append(dispatch_pb2.ConnectRequest(cancel_receipts=receipts))
            self._receipts = []
        if self._rejections:
            rejections = dispatch_pb2.JobRejections(rejections=self._rejections)
            frames.append(dispatch_pb2.ConnectRequest(rejections=rejections))
            self._rejections.clear()
        if self._drain is not None:
            frames.append(dispatch_pb2.ConnectRequest(drain=self._drain))
            self._drain = None
        if self._credit > self._credit_sent:
            self._credit_sent = self._credit
            frames.append(dispatch_pb2.ConnectRequest(credit=dispatch_pb2.Credit(limit=self._credit)))
        return frames

    async def _keep_beat(self) -> str:
        assert self.heartbeats is not None  # noqa: S101 - _welcome has run
        while True:
            await asyncio.sleep(self.heartbeats.interval_s)
            if self.heartbeats.is_silent(lease_now()):
                return f"silence for {self.heartbeats.silence_s:g} s"
            self._beat = True
            self._wake.set()

    async def _closed(self) -> str:
        await self._closing.wait()
        return "closed by us"

    async def _note_refusal(self) -> None:
        """Whether our version was refused, and which are not."""
        if self._call.done() and await self._call.code() is grpc.StatusCode.FAILED_PRECONDITION:
            with contextlib.suppress(ValueError, DecodeError):  # a status that contradicts itself
                self._versions = protocol.versions_of(await rpc_status.aio.from_call(self._call))

    async def _status(self) -> str:
        await self._note_refusal()
        code = await self._call.code()
        return f"{code.name}: {await self._call.details()}"

    async def _ended_in_order(self) -> bool:
        return self._call.done() and await self._call.code() is grpc.StatusCode.OK

    def _end(self, reason: str, *, was_heard: bool = False) -> SessionEnd:
        return SessionEnd(
            reason=reason,
            welcomed=self.heartbeats is not None,
            went_away=self._went_away,
            said_goodbye=self._said_goodbye,
            was_heard=self._said_goodbye and was_heard,
            versions=self._versions,
        )


def _status_text(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"the call has ended: {error}"
