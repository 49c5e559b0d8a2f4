"""An executor that does exactly what a test tells it to: it speaks frames, and remembers every frame it got.

    async with ScriptedExecutor() as executor:
        await executor.connect(address)
        await executor.hello(["demo.echo"])
        await executor.expect("welcome")
        await executor.credit(1)
        job = (await executor.expect("jobs")).jobs[0]
        await executor.events(accepted(job.lease))
        await executor.expect("acks", lambda acks: acks.acks[0].sequence == 1)

Builders of events are in `rara_testing.job_events`; one that behaves by itself is in `rara_testing.auto_executor`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, TypeVar, overload

import grpc
import grpc.aio
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc, job_pb2

# A bound on everything that a test waits for: far above what works, far below a hung suite.
WAIT_S = 15.0

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", -1),  # a test may send what is too large
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
    ("grpc.use_local_subchannel_pool", 1),  # each executor has a connection of its own, as processes do
)

Call: TypeAlias = "grpc.aio.StreamStreamCall[dispatch_pb2.ConnectRequest, dispatch_pb2.ConnectResponse]"
T = TypeVar("T")
Capabilities: TypeAlias = Iterable[str | dispatch_pb2.Capability]
FrameName: TypeAlias = Literal["welcome", "jobs", "acks", "heartbeat_ack", "cancels", "drain", "go_away"]


def capability(kind: str, *versions: str, max_concurrency: int = 0) -> dispatch_pb2.Capability:
    return dispatch_pb2.Capability(
        kind=kind, versions=versions or ("1.0.0",), max_concurrency=max_concurrency
    )


class ScriptedExecutor:
    """One session at most. For a second one of the same process, hand `executor_id` to a second object."""

    def __init__(self, *, executor_id: str | None = None, executor_name: str = "scripted") -> None:
        self.executor_id = executor_id or str(uuid.uuid4())
        self.executor_name = executor_name
        self.received: list[dispatch_pb2.ConnectResponse] = []
        self.ended = asyncio.Event()  # the scheduler's side of the call is over
        self._taken: set[int] = set()  # indexes of `received` that an `expect` has returned
        self._acks: dict[int, dispatch_pb2.EventAck] = {}  # the newest of each lease token
        self._refusals: dict[tuple[int, int], dispatch_pb2.EventRefusal] = {}  # by token and sequence
        self._arrived = asyncio.Condition()
        self._outgoing: asyncio.Queue[dispatch_pb2.ConnectRequest | None] = asyncio.Queue(maxsize=10_000)
        self._beats = 0
        self._channel: grpc.aio.Channel | None = None
        self._call: Call | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------ the call

    async def connect(
        self,
        address: str,
        *,
        metadata: Iterable[tuple[str, str]] = (),
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Open the stream. Nothing is sent yet, so the scheduler waits for `hello`."""
        if self._call is not None:
            raise RuntimeError("a ScriptedExecutor is one session: make another one with its executor_id")
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        stub = dispatch_pb2_grpc.DispatchServiceStub(self._channel)
        call: Call = stub.Connect(metadata=tuple(metadata), wait_for_ready=True)
        self._call = call
        self._tasks = [
            asyncio.create_task(self._read(call), name="scripted executor reads"),
            asyncio.create_task(self._write(call), name="scripted executor writes"),
        ]

    async def _read(self, call: Call) -> None:
        try:
            while True:
                frame = await call.read()
                if not isinstance(frame, dispatch_pb2.ConnectResponse):  # the end of the stream
                    break
                async with self._arrived:
                    self._remember(frame)
                    self._arrived.notify_all()
        except grpc.aio.AioRpcError:
            pass  # its status is what `status` returns
        finally:
            self.ended.set()
            async with self._arrived:
                self._arrived.notify_all()

    def _remember(self, frame: dispatch_pb2.ConnectResponse) -> None:
        self.received.append(frame)
        answers = frame.welcome.acks if frame.HasField("welcome") else frame.acks
        for ack in answers.acks:
            known = self._acks.get(ack.lease_token)
            if known is None or ack.sequence >= known.sequence:
                self._acks[ack.lease_token] = ack
        for refusal in answers.refusals:
            self._refusals[refusal.lease_token, refusal.sequence] = refusal

    async def _write(self, call: Call) -> None:
        """The only writer: concurrent writes on one stream kill the call."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (frame := await self._outgoing.get()) is not None:
                await call.write(frame)
            await call.done_writing()

    async def half_close(self) -> None:
        """End our side after all that was sent; the scheduler may go on."""
        await self._outgoing.put(None)

    def cancel(self) -> None:
        """Cancel the call: to the scheduler, the same sudden silence as a killed process."""
        if self._call is not None:
            self._call.cancel()

    async def status(self, timeout_s: float = WAIT_S) -> grpc.StatusCode:
        """The status that the call ended with; raises TimeoutError while it lives."""
        if self._call is None:
            raise RuntimeError("not connected")
        async with asyncio.timeout(timeout_s):
            await self.ended.wait()
            return await self._call.code()

    async def failure(self, timeout_s: float = WAIT_S) -> tuple[grpc.StatusCode, str, grpc.aio.Metadata]:
        """Status, details and trailers of the ended call."""
        code = await self.status(timeout_s)
        assert self._call is not None
        trailers = await self._call.trailing_metadata()
        return code, await self._call.details() or "", trailers or grpc.aio.Metadata()

    async def close(self) -> None:
        """Cancel what is open and end both tasks. Harmless when repeated."""
        self.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    # ------------------------------------------------------------ what is sent

    async def send(self, *frames: dispatch_pb2.ConnectRequest) -> None:
        """Any frames, in any order, legal or not."""
        for frame in frames:
            await self._outgoing.put(frame)

    def hello_frame(self, capabilities: Capabilities = (), **overrides: Any) -> dispatch_pb2.ConnectRequest:
        """capabilities: kinds (offered as version 1.0.0) or whole messages. overrides: fields of Hello."""
        hello = dispatch_pb2.Hello(
            protocol_version=overrides.pop("protocol_version", 1),
            executor_id=overrides.pop("executor_id", self.executor_id),
            executor_name=overrides.pop("executor_name", self.executor_name),
            executor_kind=overrides.pop("executor_kind", "python"),
            sdk=overrides.pop("sdk", "rara-scripted/1"),
            capabilities=[capability(one) if isinstance(one, str) else one for one in capabilities],
            **overrides,
        )
        return dispatch_pb2.ConnectRequest(hello=hello)

    async def hello(self, capabilities: Capabilities = (), **overrides: Any) -> None:
        await self.send(self.hello_frame(capabilities, **overrides))

    async def credit(self, limit: int) -> None:
        """Jobs allowed since the session began."""
        await self.send(dispatch_pb2.ConnectRequest(credit=dispatch_pb2.Credit(limit=limit)))

    async def events(self, *events: job_pb2.ProgressEvent) -> None:
        """All events in one batch."""
        await self.send(dispatch_pb2.ConnectRequest(events=dispatch_pb2.EventBatch(events=events)))

    async def heartbeat(
        self, lease_tokens: Iterable[int] = (), *, number: int | None = None, answered: int | None = None
    ) -> int:
        """Send the next heartbeat and return its number. answered: default, the newest answer received."""
        self._beats = self._beats + 1 if number is None else number
        newest = max(
            (f.heartbeat_ack.number for f in self.received if f.HasField("heartbeat_ack")), default=0
        )
        beat = dispatch_pb2.Heartbeat(
            number=self._beats,
            lease_tokens=list(lease_tokens),
            answered=newest if answered is None else answered,
        )
        await self.send(dispatch_pb2.ConnectRequest(heartbeat=beat))
        return self._beats

    async def reject(self, lease: job_pb2.Lease, code: str, message: str = "") -> None:
        rejection = dispatch_pb2.JobRejection(lease=lease, code=code, message=message)
        frame = dispatch_pb2.JobRejections(rejections=[rejection])
        await self.send(dispatch_pb2.ConnectRequest(rejections=frame))

    async def cancel_receipts(self, *lease_tokens: int) -> None:
        receipts = dispatch_pb2.CancelReceipts(lease_tokens=lease_tokens)
        await self.send(dispatch_pb2.ConnectRequest(cancel_receipts=receipts))

    async def drain(self) -> None:
        await self.send(dispatch_pb2.ConnectRequest(drain=dispatch_pb2.Drain()))

    async def goodbye(self) -> None:
        await self.send(dispatch_pb2.ConnectRequest(goodbye=dispatch_pb2.Goodbye()))

    # ------------------------------------------------------------ what comes back

    @overload
    async def expect(
        self,
        name: Literal["welcome"],
        predicate: Callable[[dispatch_pb2.Welcome], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.Welcome: ...
    @overload
    async def expect(
        self,
        name: Literal["jobs"],
        predicate: Callable[[dispatch_pb2.JobBatch], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.JobBatch: ...
    @overload
    async def expect(
        self,
        name: Literal["acks"],
        predicate: Callable[[dispatch_pb2.EventAcks], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.EventAcks: ...
    @overload
    async def expect(
        self,
        name: Literal["heartbeat_ack"],
        predicate: Callable[[dispatch_pb2.HeartbeatAck], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.HeartbeatAck: ...
    @overload
    async def expect(
        self,
        name: Literal["cancels"],
        predicate: Callable[[dispatch_pb2.CancelJobs], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.CancelJobs: ...
    @overload
    async def expect(
        self,
        name: Literal["drain"],
        predicate: Callable[[dispatch_pb2.Drain], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.Drain: ...
    @overload
    async def expect(
        self,
        name: Literal["go_away"],
        predicate: Callable[[dispatch_pb2.GoAway], bool] | None = None,
        timeout_s: float = WAIT_S,
    ) -> dispatch_pb2.GoAway: ...

    async def expect(
        self, name: FrameName, predicate: Callable[[Any], bool] | None = None, timeout_s: float = WAIT_S
    ) -> Any:
        """The oldest frame of that name that satisfies the predicate and that no earlier call returned.

        Raises AssertionError, with all that was received, when the call ends or `timeout_s` passes first.
        """
        return await self._until(lambda: self._take(name, predicate), name, timeout_s)

    def _take(self, name: FrameName, predicate: Callable[[Any], bool] | None) -> Any:
        for index, frame in enumerate(self.received):
            if index in self._taken or frame.WhichOneof("frame") != name:
                continue
            message = getattr(frame, name)
            if predicate is None or predicate(message):
                self._taken.add(index)
                return message
        return None

    def all(self, name: FrameName) -> list[Any]:
        """Every frame of that name so far, taken or not."""
        return [getattr(f, name) for f in self.received if f.WhichOneof("frame") == name]

    async def expect_job(self, timeout_s: float = WAIT_S) -> job_pb2.JobRequest:
        """The only job of the next JobBatch."""
        batch = await self.expect("jobs", timeout_s=timeout_s)
        assert len(batch.jobs) == 1, f"{len(batch.jobs)} jobs in one batch"
        return batch.jobs[0]

    async def expect_ack(
        self, lease: job_pb2.Lease, sequence: int, timeout_s: float = WAIT_S
    ) -> dispatch_pb2.EventAck:
        """Wait until the lease's events up to `sequence` are acknowledged: its newest ack, taken or not."""

        def acked() -> dispatch_pb2.EventAck | None:
            ack = self._acks.get(lease.lease_token)
            return ack if ack is not None and ack.sequence >= sequence else None

        return await self._until(acked, f"ack of event {sequence} of {lease.lease_token}", timeout_s)

    async def expect_refusal(
        self, lease: job_pb2.Lease, sequence: int, timeout_s: float = WAIT_S
    ) -> dispatch_pb2.EventRefusal:
        """Wait until that event is refused."""
        key = (lease.lease_token, sequence)
        what = f"refusal of event {sequence} of {lease.lease_token}"
        return await self._until(lambda: self._refusals.get(key), what, timeout_s)

    async def outcome_of(self, lease: job_pb2.Lease, sequence: int, timeout_s: float = WAIT_S) -> str:
        """Empty when the event is acknowledged, `refused:CODE` when it is refused."""

        def outcome() -> str | None:
            refusal = self._refusals.get((lease.lease_token, sequence))
            if refusal is not None:
                return f"refused:{refusal.code}"
            ack = self._acks.get(lease.lease_token)
            return "" if ack is not None and ack.sequence >= sequence else None

        return await self._until(outcome, f"answer to event {sequence} of {lease.lease_token}", timeout_s)

    async def frames(self) -> AsyncIterator[dispatch_pb2.ConnectResponse]:
        """Every frame in order, from the first, until the call ends. Takes nothing away from `expect`."""
        seen = 0
        while True:
            async with self._arrived:
                while seen == len(self.received) and not self.ended.is_set():
                    await self._arrived.wait()
            if seen == len(self.received):
                return
            yield self.received[seen]
            seen += 1

    async def _until(self, look: Callable[[], T | None], what: str, timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                while (found := look()) is None:
                    if self.ended.is_set():
                        raise AssertionError(f"the call ended without {what}: {self._story()}")
                    await self._arrived.wait()
                return found
        except TimeoutError:
            raise AssertionError(f"no {what} within {timeout_s:g} s: {self._story()}") from None

    def _story(self) -> str:
        frames = ", ".join(_brief(frame) for frame in self.received) or "nothing"
        ended = ""
        if self.ended.is_set() and self._call is not None:
            ended = "; the call has ended"
        return f"received {frames}{ended}"


def _brief(frame: dispatch_pb2.ConnectResponse) -> str:
    text = str(frame).replace("\n", " ")
    return text if len(text) <= 300 else text[:300] + "..."
