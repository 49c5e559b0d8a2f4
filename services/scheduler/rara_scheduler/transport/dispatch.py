"""DispatchService: one call of Connect is one executor's session."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import grpc
import structlog
import uuid_utils.compat
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc, job_pb2

from rara_scheduler import protocol
from rara_scheduler.blobs.checks import BlobChecks
from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.domain.attempt import AttemptEnding, CancelReceipt, Guard, Refusal, Report
from rara_scheduler.domain.canonical import Json
from rara_scheduler.domain.errors import REJECTION, Code, Fault, FieldViolation, StepError
from rara_scheduler.domain.ids import is_uuid
from rara_scheduler.domain.payload import clean_text
from rara_scheduler.domain.routing import Capability, Offer
from rara_scheduler.domain.secrets import find_secret, redact_text
from rara_scheduler.loops.aftermath import refusal_message
from rara_scheduler.loops.committer import Committer, Submission
from rara_scheduler.loops.dispatch import DispatchLoop, RouteTable
from rara_scheduler.loops.heartbeat import HeartbeatLoop
from rara_scheduler.sessions import (
    FrameStream,
    Held,
    Session,
    SessionRegistry,
    cancel_message,
)
from rara_scheduler.store.database import Conflict, DataRefused
from rara_scheduler.store.run_ledger import CancelOrder
from rara_scheduler.store.sessions import HeldLease, SessionStore
from rara_scheduler.transport.auth import CALLER, bearer, require_bearer, require_claim
from rara_scheduler.transport.events import MESSAGE_BYTES, PayloadLimits, read_event
from rara_scheduler.transport.jobs import duration
from rara_scheduler.transport.status import abort

log = structlog.get_logger(__name__)

_HELLO_WAIT_S = 5.0
_CHECK_AGAIN_S = 0.5
_NOBODY = str(UUID(int=0))
_MAX_CAPABILITIES = 1000
_MAX_LABELS = 64

Context = Any  # grpc.aio's generic context differs between its stubs and its run-time class


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session agrees on; seconds and bytes."""

    heartbeat_s: float
    silence_s: float
    accept_timeout_s: float
    max_frame_bytes: int
    max_payload_bytes: int
    max_inline_bytes: int
    event_window: int
    max_attempt_bytes: int = 1 << 40  # of all artifacts of one manifest

    def message(self) -> dispatch_pb2.SessionTerms:
        return dispatch_pb2.SessionTerms(
            heartbeat_interval=duration(self.heartbeat_s),
            silence_timeout=duration(self.silence_s),
            accept_timeout=duration(self.accept_timeout_s),
            limits=dispatch_pb2.Limits(
                max_frame_bytes=self.max_frame_bytes,
                max_payload_bytes=self.max_payload_bytes,
                max_inline_bytes=self.max_inline_bytes,
                event_window=self.event_window,
            ),
        )


def read_offer(hello: dispatch_pb2.Hello) -> tuple[Offer, dict[str, str]]:
    """What an executor offers, and its input schemas' hashes by kind. Raises Fault for what cannot be taken."""
    wrong: list[FieldViolation] = []
    if not is_uuid(hello.executor_id):
        wrong.append(
            FieldViolation("hello.executor_id", "must be a UUID in lower case, new at each process start")
        )
    if not 1 <= len(hello.executor_name) <= 255:
        wrong.append(FieldViolation("hello.executor_name", "must have 1 to 255 characters"))
    if not 1 <= len(hello.executor_kind) <= 63:
        wrong.append(FieldViolation("hello.executor_kind", "must have 1 to 63 characters"))
    if not 1 <= len(hello.capabilities) <= _MAX_CAPABILITIES:
        wrong.append(FieldViolation("hello.capabilities", f"must be 1 to {_MAX_CAPABILITIES}"))
    if len(hello.labels) > _MAX_LABELS:
        wrong.append(FieldViolation("hello.labels", f"at most {_MAX_LABELS}"))
    for index, capability in enumerate(hello.capabilities[:_MAX_CAPABILITIES]):
        if not 1 <= len(capability.kind) <= 255:
            wrong.append(FieldViolation(f"hello.capabilities[{index}].kind", "must have 1 to 255 characters"))
        if not capability.versions:
            wrong.append(
                FieldViolation(f"hello.capabilities[{index}].versions", "must name one version at least")
            )
        if capability.max_concurrency < 0:
            wrong.append(
                FieldViolation(f"hello.capabilities[{index}].max_concurrency", "must not be negative")
            )
    texts: Json = [*_texts(hello)]
    if found := find_secret(dict(hello.labels)) or find_secret(texts):
        where = ".labels" if found.parts and isinstance(found.parts[0], str) else ""
        wrong.append(FieldViolation(f"hello{where}", f"holds a raw secret (rule {found.rule})"))
    if any("\0" in text for text in _texts(hello)):
        wrong.append(FieldViolation("hello", "must not contain U+0000"))
    if wrong:
        first = wrong[0]
        raise Fault(Code.FIELD_INVALID, f"{first.field}: {first.description}", fields=tuple(wrong[:20]))
    capabilities = tuple(Capability(c.kind, tuple(c.versions), c.max_concurrency) for c in hello.capabilities)
    schemas = {c.kind: c.input_schema_sha256 for c in hello.capabilities}
    return Offer(hello.executor_kind, capabilities, dict(hello.labels)), schemas


def _texts(hello: dispatch_pb2.Hello) -> Iterator[str]:
    yield from (hello.executor_name, hello.executor_kind, hello.sdk)
    for capability in hello.capabilities:
        yield from (capability.kind, capability.input_schema_sha256, *capability.versions)
    for key, value in hello.labels.items():
        yield from (key, value)


class DispatchServicer(dispatch_pb2_grpc.DispatchServiceServicer):
    """Reads frames and hands them on; one task writes what the session has queued."""

    def __init__(
        self,
        *,
        scheduler_id: str,
        terms: Terms,
        store: SessionStore,
        sessions: SessionRegistry,
        routes: RouteTable,
        committer: Committer,
        dispatch: DispatchLoop,
        heartbeats: HeartbeatLoop,
        blobs: BlobChecks,
        rebalance_after_s: float,
        stopping: Callable[[], bool],
    ) -> None:
        self._scheduler_id = scheduler_id
        self._terms = terms
        self._limits = PayloadLimits(terms.max_payload_bytes, terms.max_inline_bytes, terms.max_attempt_bytes)
        self._store = store
        self._sessions = sessions
        self._routes = routes
        self._committer = committer
        self._dispatch = dispatch
        self._heartbeats = heartbeats
        self._blobs = blobs
        self._rebalance_after_s = rebalance_after_s
        self._stopping = stopping
        self._open = 0
        self._notes: set[asyncio.Task[None]] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def all_closed(self) -> None:
        """Return when no session's handler is left, and the end of each is noted."""
        await self._none_open.wait()
        if self._notes:
            await asyncio.wait(self._notes)

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[dispatch_pb2.ConnectRequest], context: Context
    ) -> None:
        try:
            await self.serve(context)
        except Fault as fault:
            await abort(context, fault)

    async def serve(self, stream: FrameStream, *, direct: bool = False) -> None:
        """Hold the session of one executor until its stream ends. Raises Fault for what the executor did wrong.

        direct: we dialled it, so that it came with no token.
        """
        self._open += 1
        self._none_open.clear()
        try:
            await self._serve(stream, direct=direct)
        except Conflict as conflict:
            raise Fault(Code.STORE_UNAVAILABLE, "met other transactions", retry_after_s=0.2) from conflict
        except DataRefused as refused:
            log.warning("session.refused_by_database", sqlstate=refused.sqlstate)
            raise Fault(Code.FIELD_INVALID, f"hello: cannot be stored ({refused.sqlstate})") from refused
        finally:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    async def _serve(self, stream: FrameStream, *, direct: bool) -> None:
        if self._stopping():
            raise Fault(Code.SHUTTING_DOWN, "this scheduler is stopping", retry_after_s=0.2)
        if self._sessions.full or self._open > 2 * self._sessions.most:
            raise Fault(Code.QUEUE_FULL, "this scheduler has as many sessions as it may", retry_after_s=5.0)
        reader = asyncio.create_task(_read(stream), name="hello")
        try:
            done, _ = await asyncio.wait({reader}, timeout=_HELLO_WAIT_S)
            if not done:
                raise Fault(Code.FIELD_INVALID, f"hello: did not come within {_HELLO_WAIT_S:g} s")
            first = reader.result()
        finally:
            _abandon(reader)
        if first is grpc.aio.EOF or first.WhichOneof("frame") != "hello":
            raise Fault(Code.FIELD_INVALID, "hello: must be the first frame")
        hello = first.hello
        protocol.require(hello.protocol_version)
        offer, schemas = read_offer(hello)
        require_claim(offer)
        session = Session(
            session_id=str(uuid_utils.compat.uuid7()),
            executor_id=hello.executor_id,
            executor_name=clean_text(hello.executor_name, 255),
            offer=offer,
            heartbeat_s=self._terms.heartbeat_s,
            bearer=bearer(),
        )
        old = self._sessions.get(session.executor_id)
        if old is not None:
            require_bearer(old.bearer)
            old.end("REPLACED")
            self._sessions.remove(old)
        facts = {"executor_id": session.executor_id, "executor_name": session.executor_name}
        said_goodbye = False
        try:
            # In here too: the stream may end after the row is stored and before we hear of it.
            drain = await self._store.open(
                executor_id=session.executor_id,
                executor_name=session.executor_name,
                sdk=hello.sdk[:255],
                offer=offer,
                schemas=schemas,
                session_id=session.session_id,
                scheduler_id=self._scheduler_id,
                bearer=CALLER.get(),
                direct=direct,
                silence_s=self._terms.silence_s,
            )
            left_out = await self._welcome(session, hello)
            if drain is not None:
                session.ask_to_drain(drain)  # it may not have heard
            self._sessions.add(session)
            log.info("session.opened", session_id=session.session_id, held=len(session.held), **facts)
            said_goodbye = await self._run(session, stream, left_out)
        finally:
            session.closing = True  # before anything else: no work goes to a stream that ends
            session.end_tasks()  # their events are not acknowledged, and come again
            self._sessions.remove(session)
            self._routes.forget(session)
            if said_goodbye:
                self._release_rest(session)
            log.info("session.ended", session_id=session.session_id, goodbye=said_goodbye, **facts)
            # A call that breaks is cancelled as well, and that may come in the middle of this.
            note = asyncio.create_task(self._note_end(session, for_good=said_goodbye), name="end of session")
            self._notes.add(note)
            note.add_done_callback(self._notes.discard)
            await asyncio.shield(note)

    async def _note_end(self, session: Session, *, for_good: bool) -> None:
        try:
            await self._store.close(session.executor_id, session.session_id, for_good=for_good)
        except (Fault, Conflict) as fault:
            # Only what people see: the leases do not depend on it, and `last_seen_at` tells as well.
            log.warning("session.end_not_noted", executor_id=session.executor_id, error=str(fault))

    async def _welcome(self, session: Session, hello: dispatch_pb2.Hello) -> list[HeldLease]:
        """Compare inventories, and answer every held token. Returns the leases that the executor has left out."""
        leases = {lease.lease_token: lease for lease in await self._store.leases(session.executor_id)}
        listed = {job.lease.lease_token: job for job in hello.held_jobs}
        closed = await self._store.closed(
            [
                (job.lease.step_run_id, token)
                for token, job in listed.items()
                if token not in leases and is_uuid(job.lease.step_run_id)
            ]
        )
        welcome = dispatch_pb2.Welcome(
            protocol_version=hello.protocol_version,
            session_id=session.session_id,
            terms=self._terms.message(),
        )
        for token, job in listed.items():
            lease = leases.get(token)
            if lease is not None:
                welcome.acks.acks.add(lease_token=token, sequence=lease.last_sequence, missing=lease.missing)
                session.held[token] = Held(
                    lease.step_run_id, lease.workflow_run_id, token, lease.attempt, lease.kind, ""
                )
                if lease.cancel_reason is not None:
                    welcome.cancels.append(
                        cancel_message(
                            CancelOrder(
                                session.executor_id, token, lease.cancel_reason, lease.cancel_grace_s or 0.0
                            )
                        )
                    )
            elif closed.get(token, -1) >= job.last_sequence:
                welcome.acks.acks.add(lease_token=token, sequence=closed[token])
            else:
                welcome.lost_lease_tokens.append(token)
        session.send(dispatch_pb2.ConnectResponse(welcome=welcome))
        return [lease for token, lease in leases.items() if token not in listed]

    def _release(self, lease: HeldLease) -> None:
        """The executor does not hold it: it never arrived, or it is gone with a process."""
        code = Code.LEASE_EXPIRED if lease.accepted else Code.DISPATCH_LOST
        error = StepError(code, "the executor reconnected without it")
        self._committer.submit(
            Submission(
                lease.step_run_id, lease.workflow_run_id, lease.lease_token, None, AttemptEnding(error)
            )
        )

    def _release_rest(self, session: Session) -> None:
        for held in list(session.held.values()):
            error = StepError(Code.EXECUTOR_SHUTDOWN, "the executor said goodbye")
            self._committer.submit(
                Submission(
                    held.step_run_id, held.workflow_run_id, held.lease_token, None, AttemptEnding(error)
                )
            )

    async def _run(self, session: Session, stream: FrameStream, left_out: list[HeldLease]) -> bool:
        """Read and write until one side ends. True: the executor said goodbye.

        left_out: released when the executor speaks again in this session. Its Hello alone may be an old one, read
        late: the executor is elsewhere by now, and at work on what it was given there.
        """
        writer = asyncio.create_task(_write(session, stream), name="session writer")
        reader: asyncio.Task[Any] | None = None
        aging = asyncio.get_running_loop().call_later(self._rebalance_after_s, session.end, "REBALANCE")
        try:
            while True:
                reader = asyncio.create_task(_read(stream), name="session reader")
                wait_s = session.last_frame_at + self._terms.silence_s - session.clock()
                done, _ = await asyncio.wait(
                    {reader, writer}, timeout=max(0.0, wait_s), return_when=asyncio.FIRST_COMPLETED
                )
                if writer in done:
                    writer.result()
                    return False
                if not done:
                    log.warning(
                        "session.silent", executor_id=session.executor_id, silence_s=self._terms.silence_s
                    )
                    return False
                frame = reader.result()
                if frame is grpc.aio.EOF:
                    return False
                session.last_frame_at = session.clock()
                while left_out:
                    self._release(left_out.pop())
                if self._handle(session, frame):
                    session.end()
                    await writer
                    return True
        finally:
            aging.cancel()
            for task in (reader, writer):
                if task is not None:
                    _abandon(task)

    def _handle(self, session: Session, frame: dispatch_pb2.ConnectRequest) -> bool:
        """Act on one frame. True: it was the last."""
        match frame.WhichOneof("frame"):
            case "events":
                self._take_events(session, frame.events)
            case "heartbeat":
                self._heartbeats.take(session, frame.heartbeat)
            case "credit":
                if frame.credit.limit > session.credit_limit:
                    session.credit_limit = frame.credit.limit
                    self._dispatch.credit_freed()
            case "rejections":
                self._take_rejections(session, frame.rejections)
            case "cancel_receipts":
                for token in frame.cancel_receipts.lease_tokens:
                    held = session.held.get(token)
                    if held is not None:
                        self._submit(session, held, CancelReceipt())
            case "drain":
                session.draining = True
            case "goodbye":
                return True
            case "hello":
                raise Fault(Code.FIELD_INVALID, "hello: came twice")
            case _:
                log.info("session.unknown_frame", executor_id=session.executor_id)
        return False

    def _take_events(self, session: Session, batch: dispatch_pb2.EventBatch) -> None:
        # Looked at before anything is taken: each new session could bring one more frame.
        waiting = self._committer.queued(session.executor_id) + len(session.tasks)
        if waiting + len(batch.events) > 2 * self._terms.event_window:
            raise Fault(
                Code.QUEUE_FULL,
                f"more than twice the event_window of {self._terms.event_window} is unacknowledged",
                retry_after_s=1.0,
            )
        refused = dispatch_pb2.EventAcks()
        for event in batch.events:
            token = event.lease.lease_token
            held = session.held.get(token) or _unknown(event.lease)
            if held is None:
                lost = Refusal(event.sequence, Code.LEASE_LOST, "no such lease")
                refused.refusals.append(refusal_message(token, lost))
                continue
            report = read_event(event, self._limits)
            if isinstance(report, Refusal):
                refused.refusals.append(refusal_message(token, report))
            elif digests := _stored_digests(report):
                check = self._submit_when_whole(session, held, report, digests)
                session.run(check, name=f"blobs of lease {token}")
            else:
                self._submit(session, held, report)
        if refused.refusals:
            session.send(dispatch_pb2.ConnectResponse(acks=refused))

    async def _submit_when_whole(
        self, session: Session, held: Held, report: Report, digests: list[BlobDigest]
    ) -> None:
        """Submit a last event when the stored blobs of its manifest were looked at, or refuse it.

        Before the commit and not in it: reading takes its time, and neighbours would wait for it under locks. So bytes
        may still go in between. The artifacts of checkpoints and a run's inputs are taken by their rows alone.
        """
        while True:
            try:
                damaged = await self._blobs.damaged(digests)
                break
            except (Fault, Conflict) as error:  # the blob store or the database is away: the event is kept
                log.warning("blobs.check_deferred", **held.names, error=str(error))
                await asyncio.sleep(_CHECK_AGAIN_S)
        if not damaged:
            self._submit(session, held, report)
            return
        refusal = Refusal(
            report.sequence,
            Code.ARTIFACT_MISMATCH,
            "the stored bytes do not have the digest that the manifest names",
            tuple((digest.sha256, digest.size_bytes) for digest in damaged),
        )
        acks = dispatch_pb2.EventAcks(refusals=[refusal_message(held.lease_token, refusal)])
        session.send(dispatch_pb2.ConnectResponse(acks=acks))

    def _take_rejections(self, session: Session, rejections: dispatch_pb2.JobRejections) -> None:
        for rejection in rejections.rejections:
            held = session.held.get(rejection.lease.lease_token)
            if held is None:
                continue
            code = rejection.code if rejection.code in REJECTION else Code.NO_CAPACITY
            if code == Code.UNSUPPORTED_KIND and held.kind_version:
                session.unserved.add((held.kind, held.kind_version))
                self._routes.forget(session)
            elif code == Code.NO_CAPACITY:
                session.credit_limit = min(session.credit_limit, session.jobs_sent)
            error = StepError(code, clean_text(redact_text(rejection.message), MESSAGE_BYTES))
            self._submit(session, held, AttemptEnding(error, Guard.NOT_RUNNING))

    def _submit(self, session: Session, held: Held, item: Any) -> None:
        self._committer.submit(
            Submission(held.step_run_id, held.workflow_run_id, held.lease_token, session.executor_id, item)
        )


def _stored_digests(report: Report) -> list[BlobDigest]:
    """Of a manifest, what is not in the event itself."""
    artifacts = report.outcome.artifacts if report.outcome else report.partial
    return [BlobDigest(a.sha256, a.size_bytes) for a in artifacts if a.inline is None]


def _unknown(lease: job_pb2.Lease) -> Held | None:
    """A lease that this session does not hold: stored already or lost, as the database will tell."""
    if not is_uuid(lease.step_run_id) or lease.lease_token < 1:
        return None
    return Held(lease.step_run_id, _NOBODY, lease.lease_token, lease.attempt, "", "")


async def _read(stream: FrameStream) -> Any:
    """A task wants a coroutine, and gRPC gives something else to await."""
    return await stream.read()


async def _write(session: Session, stream: FrameStream) -> None:
    """The one writer of a stream: two at once would break it."""
    while not session.overflowed:
        frame = await session.frames.get()
        if frame is None:
            session.was_told = True
            return
        try:
            await stream.write(frame)
        except grpc.aio.InternalError:  # the other side went away in the middle of it
            return
    log.warning("session.not_read", executor_id=session.executor_id)


def _abandon(task: asyncio.Task[Any]) -> None:
    """End a task whose outcome nobody asks for any more."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
