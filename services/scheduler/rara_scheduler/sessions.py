"""Executors that are connected to this scheduler: their credit, what they hold, and the frames on their way out."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from rara.v1 import dispatch_pb2, job_pb2

from rara_scheduler.domain.routing import Offer
from rara_scheduler.store.run_ledger import CancelOrder
from rara_scheduler.store.sessions import DrainOrder
from rara_scheduler.transport.jobs import duration

log = structlog.get_logger(__name__)

MAX_QUEUED_FRAMES = 10_000
_BATCH_BYTES = 1024 * 1024  # a batch is split at this size
_MAX_LAPSED_GRANTS = 3  # in a row, then the session gets no more until it reconnects


class FrameStream(Protocol):
    """What a session is served over, whoever has dialled. `read` returns grpc.aio.EOF at the end."""

    async def read(self) -> dispatch_pb2.ConnectRequest | object: ...

    async def write(self, frame: dispatch_pb2.ConnectResponse) -> None: ...


@dataclass(slots=True)
class Held:
    """A lease that this session's executor holds."""

    step_run_id: str
    workflow_run_id: str
    lease_token: int
    attempt: int
    kind: str
    kind_version: str

    @property
    def names(self) -> dict[str, object]:
        """What every log line about the lease says."""
        return {
            "workflow_run_id": self.workflow_run_id,
            "step_run_id": self.step_run_id,
            "attempt": self.attempt,
            "lease_token": self.lease_token,
        }


@dataclass(slots=True)
class Session:
    """One executor's stream, as everything but the stream itself sees it.

    heartbeat_s: the interval agreed. clock: monotonic seconds. Frames are queued here and written by one task.
    bearer: whose token it came with; None: without.
    """

    session_id: str
    executor_id: str
    executor_name: str
    offer: Offer
    heartbeat_s: float
    clock: Callable[[], float] = time.monotonic
    bearer: str | None = None
    held: dict[int, Held] = field(default_factory=dict)
    frames: asyncio.Queue[dispatch_pb2.ConnectResponse | None] = field(
        default_factory=lambda: asyncio.Queue(MAX_QUEUED_FRAMES)
    )
    credit_limit: int = 0
    jobs_sent: int = 0
    lapsed_grants: int = 0
    draining: bool = False
    drain_by: float | None = None  # of the order that it was told
    closing: bool = False
    was_told: bool = False  # all that it was sent has been written, its end included
    unlisted: dict[int, int] = field(
        default_factory=dict
    )  # beats in a row that left out a token we think it holds
    unserved: set[tuple[str, str]] = field(default_factory=set)  # kinds and versions that it refused
    withdrawn: set[tuple[str, str]] = field(default_factory=set)  # those of them that its row offers no more
    heartbeat_number: int = 0  # the newest received
    answered: int = 0  # the newest of our answers that it has received
    renewed: int = 0  # the newest heartbeat whose renewal is committed
    last_frame_at: float = 0.0
    last_heartbeat_at: float = 0.0
    tasks: set[asyncio.Task[None]] = field(
        default_factory=set
    )  # what has to be done before an event is submitted
    _overflowed: bool = False

    def __post_init__(self) -> None:
        self.last_frame_at = self.last_heartbeat_at = self.clock()

    def send(self, frame: dispatch_pb2.ConnectResponse) -> None:
        """Queue a frame. A peer that has not read ten thousand frames is given up."""
        if self._overflowed:
            return
        try:
            self.frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._overflowed = self.closing = True

    def run(self, work: Coroutine[None, None, None], *, name: str) -> None:
        """Do something beside the stream, until the session ends."""
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error(
                "session.task_failed", executor_id=self.executor_id, task=task.get_name(), exc_info=error
            )
            self.end()  # the executor comes again with all that is not acknowledged

    def end_tasks(self) -> None:
        for task in list(self.tasks):
            task.cancel()

    def ask_to_drain(self, order: DrainOrder) -> None:
        """Pass on what an operator has asked, again where it is asked anew."""
        self.draining = True
        self.drain_by = order.by
        drain = dispatch_pb2.Drain()
        if order.within_s is not None:
            drain.finish_within.CopyFrom(duration(max(0.0, order.within_s)))
        self.send(dispatch_pb2.ConnectResponse(drain=drain))

    def end(self, reason: str = "", reconnect_after_s: float | None = None) -> None:
        """Say goodbye where there is a reason to tell, and let the writer finish. Repeats do nothing."""
        if self.closing and not self._overflowed:
            return
        self.closing = True
        while self.frames.full():
            self.frames.get_nowait()
        if reason:
            away = dispatch_pb2.GoAway(reason=reason)
            if reconnect_after_s is not None:
                away.reconnect_after.CopyFrom(duration(reconnect_after_s))
            self.frames.put_nowait(dispatch_pb2.ConnectResponse(go_away=away))
        if not self.frames.full():
            self.frames.put_nowait(None)

    @property
    def overflowed(self) -> bool:
        return self._overflowed

    def proven(self) -> bool:
        """Whether both directions have shown themselves lately: only then a job is sent.

        A heartbeat tells of the answer to the one before, so a dead way there shows within two intervals.
        """
        return (
            self.clock() - self.last_heartbeat_at <= 2 * self.heartbeat_s
            and self.heartbeat_number - self.answered <= 1
        )

    @property
    def exhausted(self) -> bool:
        """Whether it let so many grants in a row lapse that it gets no more until it reconnects."""
        return self.lapsed_grants >= _MAX_LAPSED_GRANTS

    def free_credit(self) -> int:
        """Jobs that may be sent now."""
        if self.closing or self.draining or self.exhausted or not self.proven():
            return 0
        return max(0, self.credit_limit - self.jobs_sent)

    def room(self, kind: str, most: int) -> int:
        """How many more of a kind fit under its own concurrency; `most` where the kind has none."""
        limit = next((c.max_concurrency for c in self.offer.capabilities if c.kind == kind), 0)
        if limit <= 0:
            return most
        return max(0, min(most, limit - sum(1 for held in self.held.values() if held.kind == kind)))

    def send_jobs(self, jobs: Sequence[job_pb2.JobRequest]) -> None:
        """Send jobs whose leases are committed, in batches of bounded size."""
        batch = dispatch_pb2.JobBatch()
        size = 0
        for job in jobs:
            size += job.ByteSize()
            if batch.jobs and size > _BATCH_BYTES:
                self.send(dispatch_pb2.ConnectResponse(jobs=batch))
                batch, size = dispatch_pb2.JobBatch(), job.ByteSize()
            batch.jobs.append(job)
        if batch.jobs:
            self.send(dispatch_pb2.ConnectResponse(jobs=batch))

    def send_cancels(self, orders: Iterable[CancelOrder]) -> None:
        cancels = [cancel_message(order) for order in orders if order.lease_token in self.held]
        if cancels:
            self.send(dispatch_pb2.ConnectResponse(cancels=dispatch_pb2.CancelJobs(jobs=cancels)))


def cancel_message(order: CancelOrder) -> dispatch_pb2.CancelJob:
    return dispatch_pb2.CancelJob(
        lease_token=order.lease_token, reason=order.reason, grace=duration(order.grace_s)
    )


class SessionRegistry:
    """The sessions of this scheduler, one per executor_id at most."""

    def __init__(self, *, max_sessions: int) -> None:
        self._sessions: dict[str, Session] = {}
        self._max_sessions = max_sessions

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def most(self) -> int:
        return self._max_sessions

    @property
    def full(self) -> bool:
        return len(self._sessions) >= self._max_sessions

    def get(self, executor_id: str) -> Session | None:
        return self._sessions.get(executor_id)

    def add(self, session: Session) -> Session | None:
        """Make this the executor's session; the one it replaces, if any, is told and returned."""
        old = self._sessions.get(session.executor_id)
        if old is not None:
            old.end("REPLACED")
        self._sessions[session.executor_id] = session
        return old

    def remove(self, session: Session) -> None:
        if self._sessions.get(session.executor_id) is session:
            del self._sessions[session.executor_id]

    def push_cancels(self, orders: Iterable[CancelOrder]) -> bool:
        """Send requests to the sessions that are here. True: some belong to executors that are not."""
        by_executor: dict[str, list[CancelOrder]] = {}
        for order in orders:
            by_executor.setdefault(order.executor_id, []).append(order)
        elsewhere = False
        for executor_id, wanted in by_executor.items():
            session = self._sessions.get(executor_id)
            if session is None:
                elsewhere = True
            else:
                session.send_cancels(wanted)
        return elsewhere

    def in_flight(self) -> Mapping[str, int]:
        return {session.executor_id: len(session.held) for session in self}
