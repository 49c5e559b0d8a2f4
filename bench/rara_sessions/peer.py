"""One scripted executor: it takes jobs, holds them, beats, and notes how long each answer took.

As lean as can be, and with nothing that grows: a thousand of them share a process.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc
import grpc.aio
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc, job_pb2
from rara_testing import job_events
from rara_testing.scripted_executor import CHANNEL_OPTIONS, Call, capability

KIND = "bench.hold"


@dataclass(slots=True)
class Fleet:
    """What all peers note. times: monotonic seconds by lease token or workflow run."""

    answered: Callable[[float], None]  # seconds from a heartbeat to its first answer
    renewed: Callable[[float], None]  # to the answer that says that its leases are renewed
    jobs: int = 0
    running: int = 0  # jobs whose `running` is acknowledged
    lost: int = 0  # leases that passed on
    ended: int = 0  # streams that ended by themselves
    job_came: dict[str, float] = field(default_factory=dict)
    cancel_came: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)


class Peer:
    """A session over a connection of its own, until `close`."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.held: dict[int, job_pb2.JobRequest] = {}
        self._fleet = fleet
        self._name = f"peer-{number}"
        self._credit = 0
        self._ending: set[int] = set()  # ended by us, and not yet acknowledged
        self._unanswered: dict[int, float] = {}  # heartbeats, and when they were sent
        self._unrenewed: dict[int, float] = {}
        self._beats = self._answered = 0
        self._outgoing: asyncio.Queue[dispatch_pb2.ConnectRequest] = asyncio.Queue(1000)
        self._tasks: list[asyncio.Task[None]] = []
        self._channel: grpc.aio.Channel | None = None

    async def connect(self, address: str, timeout_s: float) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        call = dispatch_pb2_grpc.DispatchServiceStub(self._channel).Connect(wait_for_ready=True)
        hello = dispatch_pb2.Hello(
            protocol_version=1,
            executor_id=str(uuid.uuid4()),
            executor_name=self._name,
            executor_kind="python",
            sdk="rara-bench/1",
            capabilities=[capability(KIND)],
        )
        async with asyncio.timeout(timeout_s):
            await call.write(dispatch_pb2.ConnectRequest(hello=hello))
            welcome = await call.read()
        if not isinstance(welcome, dispatch_pb2.ConnectResponse):
            raise RuntimeError(f"{self._name} was not welcome: {await call.code()}")
        beat_s = welcome.welcome.terms.heartbeat_interval.ToNanoseconds() / 1e9
        self._tasks = [
            asyncio.create_task(work, name=f"{self._name} {what}")
            for what, work in (
                ("reads", self._read(call)),
                ("writes", self._write(call)),
                ("beats", self._beat(beat_s)),
            )
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):  # a fault of this bench, not of what it measures
                raise ended
        if self._channel is not None:
            await self._channel.close()

    async def allow(self, more: int) -> None:
        """So many more jobs."""
        self._credit += more
        frame = dispatch_pb2.ConnectRequest(credit=dispatch_pb2.Credit(limit=self._credit))
        await self._outgoing.put(frame)

    async def finish(self, count: int) -> None:
        """Let so many held jobs succeed, and take as many new ones."""
        done = [self.held.pop(token) for token in list(self.held)[:count]]
        self._ending.update(job.lease.lease_token for job in done)
        events = [job_events.succeeded(job.lease, 3) for job in done]
        await self._outgoing.put(dispatch_pb2.ConnectRequest(events=dispatch_pb2.EventBatch(events=events)))
        await self.allow(len(done))

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self._beats += 1
            beat = dispatch_pb2.Heartbeat(
                number=self._beats, lease_tokens=[*self.held, *self._ending], answered=self._answered
            )
            self._unanswered[self._beats] = self._unrenewed[self._beats] = time.monotonic()
            await self._outgoing.put(dispatch_pb2.ConnectRequest(heartbeat=beat))

    async def _write(self, call: Call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await call.write(await self._outgoing.get())

    async def _read(self, call: Call) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(frame := await call.read(), dispatch_pb2.ConnectResponse):
                await self._take(frame)
        self._fleet.ended += 1

    async def _take(self, frame: dispatch_pb2.ConnectResponse) -> None:
        fleet = self._fleet
        match frame.WhichOneof("frame"):
            case "jobs":
                await self._take_jobs(frame.jobs)
            case "acks":
                fleet.running += sum(ack.sequence == 2 for ack in frame.acks.acks)
                self._ending -= {ack.lease_token for ack in frame.acks.acks if ack.sequence > 2}
            case "cancels":
                await self._take_cancels(frame.cancels.jobs)
            case "heartbeat_ack":
                await self._take_answer(frame.heartbeat_ack)
        async with fleet.changed:
            fleet.changed.notify_all()

    async def _take_answer(self, ack: dispatch_pb2.HeartbeatAck) -> None:
        """A beat is answered at once, and again when its renewals are committed."""
        now_s = time.monotonic()
        self._answered = max(self._answered, ack.number)
        for known, newest, note in (
            (self._unanswered, ack.number, self._fleet.answered),
            (self._unrenewed, ack.renewed, self._fleet.renewed),
        ):
            for number in [number for number in known if number <= newest]:
                note(now_s - known.pop(number))
        lost = sum(self.held.pop(token, None) is not None for token in ack.lost_lease_tokens)
        if lost:
            self._fleet.lost += lost
            await self.allow(lost)  # as an executor does that has stopped a job
        await self._take_cancels(ack.cancels)

    async def _take_jobs(self, batch: dispatch_pb2.JobBatch) -> None:
        now_s = time.monotonic()
        events = []
        for job in batch.jobs:
            self.held[job.lease.lease_token] = job
            self._fleet.job_came[job.workflow_run_id] = now_s
            events += [job_events.accepted(job.lease), job_events.running(job.lease)]
        self._fleet.jobs += len(batch.jobs)
        await self._outgoing.put(dispatch_pb2.ConnectRequest(events=dispatch_pb2.EventBatch(events=events)))

    async def _take_cancels(self, cancels: Iterable[dispatch_pb2.CancelJob]) -> None:
        """Confirmed at once, the first time."""
        known = [one for one in cancels if one.lease_token in self.held]
        if not known:
            return
        receipts = dispatch_pb2.CancelReceipts(lease_tokens=[one.lease_token for one in known])
        await self._outgoing.put(dispatch_pb2.ConnectRequest(cancel_receipts=receipts))
        events = []
        for one in known:
            job = self.held.pop(one.lease_token)
            self._ending.add(one.lease_token)
            self._fleet.cancel_came.setdefault(job.workflow_run_id, time.monotonic())
            events.append(job_events.cancelled(job.lease, 3))
        await self._outgoing.put(dispatch_pb2.ConnectRequest(events=dispatch_pb2.EventBatch(events=events)))
