"""Stands between executors and a scheduler, frame by frame, so that a fault can hit exactly one point of a step.

    relay = FrameRelay(scheduler.address, folder)
    async with relay:
        ... executors dial relay.address ...
        relay.arm("ack effect", fault)     # awaited before that frame passes; returns what becomes of it

Points of a step, in order: see POINTS. Events travel one to a frame here, so that each is a point of its own. For
handlers that are to wait until something of theirs is stored the relay touches `<folder>/<token> <kind>`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc

Request = dispatch_pb2.ConnectRequest
Response = dispatch_pb2.ConnectResponse

POINTS = (
    "job",
    "accepted",
    "ack accepted",
    "running",
    "ack running",
    "progress",
    "ack progress",
    "effect",
    "ack effect",
    "succeeded",
    "ack succeeded",
)


class Then(Enum):
    """What becomes of the frame that a fault has stopped at."""

    PASS = auto()
    CUT = auto()  # it is lost, and the stream ends with UNAVAILABLE


Fault = Callable[[], Awaitable[Then]]


class _CutError(Exception):
    pass


class FrameRelay(dispatch_pb2_grpc.DispatchServiceServicer):
    def __init__(self, target: str, folder: Path) -> None:
        self.address = ""
        self.fired = asyncio.Event()  # the armed fault has been carried out
        self._target = target
        self._folder = folder
        self._point = ""
        self._fault: Fault | None = None
        self._kinds: dict[tuple[int, int], str] = {}  # of events that passed, by token and sequence
        self._acked: dict[int, int] = {}
        self._work: asyncio.Task[Then] | None = None
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.stop(0)

    def arm(self, point: str, fault: Fault) -> None:
        """Carry the fault out before the next frame of this point passes. Once."""
        assert point in POINTS
        self.fired.clear()
        self._point, self._fault = point, fault

    async def Connect(  # type: ignore[override] # noqa: N802 - gRPC's name; it writes to the context instead
        self, request_iterator: AsyncIterator[Request], context: Any
    ) -> None:
        async with grpc.aio.insecure_channel(
            self._target, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            call = dispatch_pb2_grpc.DispatchServiceStub(channel).Connect()
            ways = [
                asyncio.create_task(self._to_scheduler(request_iterator, call), name="relay to scheduler"),
                asyncio.create_task(self._to_executor(call, context), name="relay to executor"),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                if ways[0].done() and ways[0].exception() is None:
                    await asyncio.wait(ways[1:], timeout=5)  # a half-close: the last answers still pass
            finally:
                for way in ways:
                    way.cancel()
                call.cancel()
                ends = await asyncio.gather(*ways, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception) and not isinstance(end, _CutError | grpc.aio.AioRpcError):
                raise end
        if any(isinstance(end, BaseException) for end in ends):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    async def _to_scheduler(self, requests: AsyncIterator[Request], call: Any) -> None:
        async for frame in requests:
            if frame.WhichOneof("frame") != "events":
                await self._write(call, frame)
                continue
            for event in frame.events.events:
                kind = str(event.WhichOneof("event"))
                self._kinds[event.lease.lease_token, event.sequence] = kind
                await self._reach(kind)
                await self._write(call, Request(events=dispatch_pb2.EventBatch(events=[event])))
        await call.done_writing()

    async def _to_executor(self, call: Any, context: Any) -> None:
        while isinstance(frame := await call.read(), Response):
            acked = self._newly_acked(frame)
            if frame.WhichOneof("frame") == "jobs":
                await self._reach("job")
            elif frame.WhichOneof("frame") == "acks":
                for _, _, kind in acked:
                    await self._reach(f"ack {kind}")
            for token, sequence, kind in acked:
                self._acked[token] = sequence
                (self._folder / f"{token} {kind}").touch()
            await self._write(context, frame)
        if await call.code() is not grpc.StatusCode.OK:
            raise _CutError

    async def _write(self, stream: Any, frame: Any) -> None:
        try:
            await stream.write(frame)
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise _CutError from error

    def _newly_acked(self, frame: Response) -> list[tuple[int, int, str]]:
        """Token, sequence and kind of each event that this frame is the first to acknowledge."""
        acks = frame.welcome.acks.acks if frame.HasField("welcome") else frame.acks.acks
        return [
            (ack.lease_token, sequence, self._kinds[ack.lease_token, sequence])
            for ack in acks
            for sequence in range(self._acked.get(ack.lease_token, 0) + 1, ack.sequence + 1)
            if (ack.lease_token, sequence) in self._kinds
        ]

    async def _reach(self, point: str) -> None:
        if self._fault is None or point != self._point:
            return
        # The fault may end the call that we are in, and must not end with it.
        self._work = asyncio.create_task(self._carry_out(self._fault), name=f"fault at {point}")
        self._fault = None
        if await asyncio.shield(self._work) is Then.CUT:
            raise _CutError

    async def _carry_out(self, fault: Fault) -> Then:
        then = await fault()
        self.fired.set()
        return then
