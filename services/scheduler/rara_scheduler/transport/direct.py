"""An executor that is dialled: the calls of ExecutorService, made to look like the stream of a session.

Whoever serves sessions reads and writes the same frames here, so that leases, fencing and inventory are one code for
both ways. Each job has a call of Execute, which is made again for as long as the session lives.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from rara.v1 import dispatch_pb2, executor_pb2, executor_pb2_grpc, job_pb2

from rara_scheduler import protocol
from rara_scheduler.domain.errors import REJECTION, Code

log = structlog.get_logger(__name__)

_MAX_FRAMES: Final = 1000  # not read yet; then the executor's streams are read no further
_MAX_UNANSWERED: Final = 1000  # heartbeats whose renewal is still to come
_CALL_TIMEOUT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_MAX_EVENTS: Final = 100  # in one frame

# What a status without a reason of ours says about a job that was not taken.
_REASON: Final = {
    grpc.StatusCode.UNIMPLEMENTED: Code.UNSUPPORTED_KIND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.NO_CAPACITY,
    grpc.StatusCode.NOT_FOUND: Code.LEASE_UNKNOWN,
}

_TERMINAL: Final = frozenset({"succeeded", "failed", "cancelled"})

Request = dispatch_pb2.ConnectRequest
Response = dispatch_pb2.ConnectResponse
ExecuteCall = grpc.aio.StreamStreamCall[executor_pb2.ExecuteRequest, executor_pb2.ExecuteResponse]


@dataclass(slots=True, eq=False)
class _Job:
    """A job behind its own call.

    beat: the newest number it sent. listed_at: when a heartbeat last held its lease. heard: the executor has answered.
    ended: its last event has passed. lost: its lease is somebody else's. stuck: it does not take its answers.
    """

    request: job_pb2.JobRequest
    acked: int = 0
    beat: int = 0
    listed_at: float = float("-inf")
    heard: bool = False
    ended: bool = False
    lost: bool = False
    stuck: asyncio.Event = field(default_factory=asyncio.Event)
    answers: asyncio.Queue[executor_pb2.ExecuteRequest] = field(
        default_factory=lambda: asyncio.Queue(_MAX_FRAMES)
    )

    @property
    def token(self) -> int:
        return self.request.lease.lease_token

    @property
    def names(self) -> dict[str, object]:
        """What every log line about the job says."""
        lease = self.request.lease
        return {
            "workflow_run_id": self.request.workflow_run_id,
            "step_run_id": lease.step_run_id,
            "attempt": lease.attempt,
            "lease_token": lease.lease_token,
        }


class DirectLink:
    """The stream of one dialled executor, from its first answer until it is silent, restarted or replaced.

    `run` polls and holds the calls of its jobs; it ends when the link has ended.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        first: executor_pb2.GetCapabilitiesResponse,
        *,
        terms: dispatch_pb2.SessionTerms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        self._hello = first.hello
        self._terms = terms
        self._heartbeat_s = terms.heartbeat_interval.ToNanoseconds() / 1e9
        self._silence_s = terms.silence_timeout.ToNanoseconds() / 1e9
        self._accept_s = terms.accept_timeout.ToNanoseconds() / 1e9
        self._clock = clock
        self._frames: asyncio.Queue[Request | None] = asyncio.Queue(_MAX_FRAMES)
        self._held_back: Request | None = None
        self._jobs: dict[int, _Job] = {}
        self._calls: asyncio.TaskGroup | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._cancelling: set[int] = set()
        self._slot_free = asyncio.Event()
        self._beat_wanted = asyncio.Event()
        # By our number: the number of each job's own heartbeat in it.
        self._beats: dict[int, dict[int, int]] = {}
        self._number = 0
        self._answered = 0
        self._sent = 0
        self._draining = False
        self._drain_wish: tuple[dispatch_pb2.Drain, float] | None = (
            None  # an operator's, until it is heard; since when
        )
        self._frames.put_nowait(Request(hello=self._hello))

    # As a stream.

    async def read(self) -> Request | object:
        """The next frame of the executor; events that wait together come together."""
        frame, self._held_back = self._held_back or await self._frames.get(), None
        if frame is None:
            return grpc.aio.EOF
        while frame.WhichOneof("frame") == "events" and len(frame.events.events) < _MAX_EVENTS:
            if self._frames.empty():
                break
            following = self._frames.get_nowait()
            if following is None:
                self._frames.put_nowait(None)
                break
            if following.WhichOneof("frame") != "events":
                self._held_back = following
                break
            frame.events.events.extend(following.events.events)
        return frame

    async def write(self, frame: Response) -> None:
        match frame.WhichOneof("frame"):
            case "welcome":
                self._take_welcome(frame.welcome)
            case "jobs":
                for job in frame.jobs.jobs:
                    self._sent += 1
                    self._hold(_Job(job))
            case "acks":
                self._pass_acks(frame.acks)
            case "heartbeat_ack":
                self._pass_heartbeat_ack(frame.heartbeat_ack)
            case "cancels":
                for cancel in frame.cancels.jobs:
                    self._cancel(cancel)
            case "drain":
                self._drain_wish = frame.drain, self._clock()
                self._spawn(self._ask_to_drain(), "direct drain")
            case "go_away":
                self.end()

    def end(self) -> None:
        """Close the link; the executor keeps its jobs. Repeats do nothing."""
        self._ended.set()

    async def run(self) -> None:
        """Hold the calls until the link ends."""
        try:
            async with asyncio.TaskGroup() as calls:
                self._calls = calls
                tasks = [
                    calls.create_task(self._poll(), name="direct poll"),
                    calls.create_task(self._keep_beat(), name="direct beat"),
                ]
                await self._ended.wait()
                self._calls = None
                for task in (*tasks, *self._running):
                    task.cancel()
        finally:
            self._calls = None
            self._ended.set()
            while self._frames.full():
                self._frames.get_nowait()
            self._frames.put_nowait(None)

    # What the scheduler says.

    def _take_welcome(self, welcome: dispatch_pb2.Welcome) -> None:
        """Attach to what the executor holds, from where the database stands; the rest is not its own any more."""
        leases = {job.lease.lease_token: job.lease for job in self._hello.held_jobs}
        for ack in welcome.acks.acks:
            if ack.lease_token in leases:
                request = job_pb2.JobRequest(lease=leases[ack.lease_token])
                self._hold(_Job(request, acked=ack.sequence, heard=True))
        for token in welcome.lost_lease_tokens:
            self._cancel(dispatch_pb2.CancelJob(lease_token=token, reason=Code.LEASE_LOST))
        for cancel in welcome.cancels:
            self._cancel(cancel)
        self._welcomed.set()

    def _pass_acks(self, acks: dispatch_pb2.EventAcks) -> None:
        for ack in acks.acks:
            job = self._jobs.get(ack.lease_token)
            if job is not None:
                job.acked = max(job.acked, ack.sequence)
                self._tell(job, executor_pb2.ExecuteRequest(acks=dispatch_pb2.EventAcks(acks=[ack])))
        for refusal in acks.refusals:
            job = self._jobs.get(refusal.lease_token)
            if job is not None:
                job.lost = job.lost or refusal.code == Code.LEASE_LOST
                self._tell(job, executor_pb2.ExecuteRequest(acks=dispatch_pb2.EventAcks(refusals=[refusal])))

    def _pass_heartbeat_ack(self, ack: dispatch_pb2.HeartbeatAck) -> None:
        self._answered = max(self._answered, ack.number)
        renewed = self._beats.get(ack.renewed, {})
        self._beats = {number: beats for number, beats in self._beats.items() if number > ack.renewed}
        lost = set(ack.lost_lease_tokens)
        for job in list(self._jobs.values()):
            own = dispatch_pb2.HeartbeatAck(number=job.beat, renewed=renewed.get(job.token, 0))
            if job.token in lost:
                job.lost = True
                own.lost_lease_tokens.append(job.token)
            self._tell(job, executor_pb2.ExecuteRequest(heartbeat_ack=own))
        for token in lost - self._jobs.keys():
            self._cancel(dispatch_pb2.CancelJob(lease_token=token, reason=Code.LEASE_LOST))
        for cancel in ack.cancels:
            self._cancel(cancel)

    def _tell(self, job: _Job, frame: executor_pb2.ExecuteRequest) -> None:
        # A stream that does not take its answers is made again, and starts from what is stored.
        try:
            job.answers.put_nowait(frame)
        except asyncio.QueueFull:
            job.stuck.set()

    # The calls.

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        if self._calls is None or self._ended.is_set():
            work.close()
            return
        task = self._calls.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _poll(self) -> None:
        """Ask every heartbeat interval, and when a job has ended, what the executor offers and holds."""
        await self._welcomed.wait()
        heard_at = self._clock()
        while self._clock() - heard_at <= self._silence_s:
            confirmed = self._sent - sum(not job.heard for job in self._jobs.values())
            answer = await capabilities(self._stub, timeout_s=min(self._silence_s, _CALL_TIMEOUT_S))
            if answer is not None:
                if answer.hello.executor_id != self._hello.executor_id:
                    log.info("direct.restarted", executor_id=self._hello.executor_id)
                    break
                heard_at = self._clock()
                await self._take_poll(answer, confirmed)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._slot_free.wait()
            self._slot_free.clear()
        self.end()

    async def _take_poll(self, answer: executor_pb2.GetCapabilitiesResponse, confirmed: int) -> None:
        # Jobs on their way when we asked will take slots that are counted as free.
        await self._frames.put(Request(credit=dispatch_pb2.Credit(limit=confirmed + answer.free_slots)))
        if answer.draining:
            await self._drain()
        if self._drain_wish is not None:
            self._spawn(self._ask_to_drain(), "direct drain")
        self._beat_wanted.set()

    async def _drain(self) -> None:
        if not self._draining:
            self._draining = True
            await self._frames.put(Request(drain=dispatch_pb2.Drain()))

    async def _ask_to_drain(self) -> None:
        """Tell the executor; what it has not heard is told again with the next poll."""
        wish = self._drain_wish
        if wish is None:
            return
        drain = dispatch_pb2.Drain()
        if wish[0].HasField("finish_within"):
            left_s = wish[0].finish_within.ToNanoseconds() / 1e9 - (self._clock() - wish[1])
            drain.finish_within.FromNanoseconds(int(max(0.0, left_s) * 1e9))
        try:
            await self._stub.Drain(executor_pb2.DrainRequest(drain=drain), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                return
            # It is older than the call: it gets no new job, and goes on until somebody stops it.
            log.warning("direct.drain_not_served", executor_id=self._hello.executor_id)
        if self._drain_wish is wish:
            self._drain_wish = None

    async def _keep_beat(self) -> None:
        """Gather the jobs' heartbeats for a moment, and pass them on as one."""
        while True:
            await self._beat_wanted.wait()
            await asyncio.sleep(self._heartbeat_s / 10)
            self._beat_wanted.clear()
            # A job that no beat has held for two intervals is not alive, whatever the executor says of itself.
            since = self._clock() - 2 * self._heartbeat_s
            listed = {job.token: job.beat for job in self._jobs.values() if job.listed_at >= since}
            self._number += 1
            self._beats[self._number] = listed
            while len(self._beats) > _MAX_UNANSWERED:
                del self._beats[next(iter(self._beats))]
            beat = dispatch_pb2.Heartbeat(
                number=self._number, lease_tokens=sorted(listed), answered=self._answered
            )
            await self._frames.put(Request(heartbeat=beat))

    def _hold(self, job: _Job) -> None:
        if job.token not in self._jobs:
            self._jobs[job.token] = job
            self._spawn(self._execute(job), f"direct job {job.token}")

    async def _execute(self, job: _Job) -> None:
        """One call after the other until the job is over, refused, unknown to the executor, or taken back."""
        pause_s = _FIRST_PAUSE_S
        taken_back_at = self._clock() + self._accept_s
        is_refused = False
        try:
            while job.heard or self._clock() < taken_back_at:
                was_heard = job.heard
                job.answers, job.stuck = asyncio.Queue(_MAX_FRAMES), asyncio.Event()
                try:
                    # An end that comes too early is no end: another call took the job, and may not have kept it.
                    if await self._one_call(job, first_s=taken_back_at - self._clock()) and job.ended:
                        return
                except grpc.aio.AioRpcError as error:
                    is_refused = await self._refused(job, error)
                    if is_refused:
                        return
                if job.lost:
                    return
                job.listed_at = float("-inf")
                pause_s = (
                    _FIRST_PAUSE_S if job.heard and not was_heard else min(2 * pause_s, _LONGEST_PAUSE_S)
                )
                await asyncio.sleep(min(pause_s, self._heartbeat_s))
        finally:
            self._jobs.pop(job.token, None)
            self._cancelling.discard(job.token)
            if not is_refused:  # whoever has refused is asked when it is due: it needs a moment
                self._slot_free.set()

    async def _one_call(self, job: _Job, *, first_s: float) -> bool:
        """Until the call ends, falls silent, or does not take its answers. True: it has ended well.

        first_s: for the first answer of all. Raises AioRpcError with the status of a call that did not end well.
        """
        call: ExecuteCall = self._stub.Execute()
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(_write(call, self._start(job), job.answers), name="direct job write")
        ]
        stuck = asyncio.create_task(job.stuck.wait(), name="direct job stuck")
        try:
            while True:
                read = asyncio.create_task(_read(call), name="direct job read")
                tasks.append(read)
                limit_s = self._silence_s if job.heard else max(0.0, first_s)
                await asyncio.wait({read, stuck}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                if not read.done():
                    log.warning("direct.call_silent", **job.names, silence_s=limit_s)
                    return False
                tasks.remove(read)
                frame = read.result()
                if frame is grpc.aio.EOF:
                    break
                if not isinstance(frame, executor_pb2.ExecuteResponse):
                    log.warning("direct.frame_unreadable", **job.names)
                    return False
                await self._take_frame(job, frame)
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(
                    code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
                )
            return True
        finally:
            call.cancel()
            for task in (stuck, *tasks):
                task.cancel()
            await asyncio.gather(stuck, *tasks, return_exceptions=True)

    def _start(self, job: _Job) -> executor_pb2.ExecuteRequest:
        return executor_pb2.ExecuteRequest(
            start=executor_pb2.ExecuteStart(
                job=job.request, terms=self._terms, resume_after_sequence=job.acked if job.heard else 0
            )
        )

    async def _take_frame(self, job: _Job, frame: executor_pb2.ExecuteResponse) -> None:
        job.heard = True
        match frame.WhichOneof("frame"):
            case "event":
                kind = frame.event.WhichOneof("event")
                if kind == "cancelled":
                    await self._before_cancelled(job, frame.event.cancelled.reason)
                job.ended = job.ended or kind in _TERMINAL
                await self._frames.put(Request(events=dispatch_pb2.EventBatch(events=[frame.event])))
            case "heartbeat":
                job.beat = frame.heartbeat.number
                if job.token in frame.heartbeat.lease_tokens:
                    job.listed_at = self._clock()
                self._beat_wanted.set()

    async def _before_cancelled(self, job: _Job, reason: str) -> None:
        """What the end of a job says beside itself: its cancel was delivered, or its executor stops."""
        if reason == Code.EXECUTOR_SHUTDOWN:
            await self._drain()
        elif job.token in self._cancelling:
            await self._receipt(job.token)

    async def _receipt(self, token: int) -> None:
        await self._frames.put(Request(cancel_receipts=dispatch_pb2.CancelReceipts(lease_tokens=[token])))

    async def _refused(self, job: _Job, error: grpc.aio.AioRpcError) -> bool:
        """Whether the status says that the job is not there. What was refused before its start costs nothing."""
        reason = _reason(error)
        if not reason and not job.heard:
            # Of a job that has run it says nothing: a proxy, or a limit of the transport, speaks so too.
            reason = _REASON.get(error.code(), "")
        if reason == Code.EXECUTOR_SHUTDOWN:
            await self._drain()
        if reason in REJECTION:
            rejection = dispatch_pb2.JobRejection(
                lease=job.request.lease, code=reason, message=error.details() or ""
            )
            await self._frames.put(Request(rejections=dispatch_pb2.JobRejections(rejections=[rejection])))
            return True
        log.info("direct.call_ended", **job.names, status=error.code().name, reason=reason)
        return reason == Code.LEASE_UNKNOWN

    def _cancel(self, cancel: dispatch_pb2.CancelJob) -> None:
        self._spawn(self._deliver(cancel), f"direct cancel {cancel.lease_token}")

    async def _deliver(self, cancel: dispatch_pb2.CancelJob) -> None:
        # What is not delivered comes again with the next heartbeat's answer.
        self._cancelling.add(cancel.lease_token)
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await self._stub.Cancel(
                executor_pb2.CancelRequest(cancel=cancel), timeout=_CALL_TIMEOUT_S
            )
            if answer.known and cancel.reason != Code.LEASE_LOST:
                await self._receipt(cancel.lease_token)


async def capabilities(
    stub: executor_pb2_grpc.ExecutorServiceStub, *, timeout_s: float
) -> executor_pb2.GetCapabilitiesResponse | None:
    """What an executor says of itself, in the newest version that both speak; None: it does not, or there is none."""
    for version in protocol.served():
        request = executor_pb2.GetCapabilitiesRequest(protocol_version=version)
        try:
            answer: executor_pb2.GetCapabilitiesResponse = await stub.GetCapabilities(
                request, timeout=timeout_s
            )
            return answer
        except grpc.aio.AioRpcError as error:
            log.debug("direct.not_answered", status=error.code().name, details=error.details())
            if _reason(error) != Code.PROTOCOL_VERSION_UNSUPPORTED:
                return None
    return None


async def _read(call: ExecuteCall) -> executor_pb2.ExecuteResponse | object:
    """A task wants a coroutine, and gRPC gives something else to await. None: bytes that nobody can read."""
    return await call.read()


async def _write(
    call: ExecuteCall, start: executor_pb2.ExecuteRequest, answers: asyncio.Queue[executor_pb2.ExecuteRequest]
) -> None:
    # When the call has ended its reader hears why.
    with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        await call.write(start)
        while True:
            await call.write(await answers.get())


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The code in the status' ErrorInfo; empty: there is none, or nobody can read it."""
    try:
        status = rpc_status.from_call(error)
        for detail in status.details if status is not None else ():
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.reason:
                return str(info.reason)
    except (ValueError, DecodeError) as odd:  # a status that contradicts itself
        log.warning("direct.status_unreadable", error=str(odd))
    return ""
