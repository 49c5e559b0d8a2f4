"""Every job that this executor holds, by lease token, and what is to happen with it next."""

import asyncio
import logging
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

import structlog
from rara.v1 import dispatch_pb2, job_pb2

from rara_executor import handler_logs, secret_providers, wire
from rara_executor.artifact_files import remove_folder
from rara_executor.artifacts import ArtifactStore
from rara_executor.child_process import ProcessExit
from rara_executor.codes import Code
from rara_executor.drain_tally import DrainTally
from rara_executor.endings import fitting, last_event
from rara_executor.errors import JobFailure
from rara_executor.handler_logs import HandlerLogs
from rara_executor.held_job import HeldJob, Outcome, Phase, Stop, StopKind, names
from rara_executor.job_timers import JobTimers
from rara_executor.lease_clock import LeaseClock, lease_now
from rara_executor.outbox import Entry, Outbox
from rara_executor.redaction import Redactor
from rara_executor.runner import Runner
from rara_executor.runner_pool import RunnerPool
from rara_executor.runner_protocol import (
    Failed,
    FromRunner,
    LeavesChildren,
    LogLine,
    OpenArtifact,
    Progress,
    PutArtifact,
    Ready,
    RecordEffect,
    Reply,
    Stopped,
    Succeeded,
)
from rara_executor.session import JobSession
from rara_executor.slots import NotTaken, Slots
from rara_executor.tracing import UNTRACED, JobTracing

log = structlog.get_logger(__name__)

DEFAULT_LEASE_S = 30.0
MAX_HELD_BYTES = 64 << 20  # of unacknowledged events, beyond which no new job is asked for
MAX_REFUSALS = 3  # of one job, after which it is given up


@dataclass(frozen=True, slots=True)
class SupervisorLimits:
    slots: int
    executor_kind: str
    grace_s: float  # between asking and the kill, where nobody else says
    scratch: Path
    secrets: Path


class Supervisor:
    """Hears the session and the runners; says what it decides to the outbox, the session and the pool.

    All methods run on one loop and none awaits between reading and changing the table, so that no two of
    them ever see it half changed. What takes time runs in tasks of `tasks`, which the caller owns.
    """

    def __init__(
        self,
        events: wire.EventFactory,
        limits: SupervisorLimits,
        outbox: Outbox,
        store: ArtifactStore,
        redactor: Redactor,
        tasks: asyncio.TaskGroup,
        tracing: JobTracing = UNTRACED,
    ) -> None:
        self._tracing = tracing
        self.jobs: dict[int, HeldJob] = {}
        self.changed = asyncio.Event()  # for whoever waits for the table to become something
        self.stopped = asyncio.Event()  # a job that was stopped has ended: its runner's deadline was its own
        self.slots = Slots(limits.slots, executor_kind=limits.executor_kind)
        self.session: JobSession | None = None
        self.pool: RunnerPool | None = None
        self.tally: DrainTally | None = None  # of a drain that is under way
        self._limits = limits
        self._outbox = outbox
        self._store = store
        self._redactor = redactor
        self._logs = HandlerLogs(redactor)
        self._tasks = tasks
        self._events = events
        self._timers = JobTimers(self._on_timeout, self._on_grace_over)
        self.max_payload_bytes = 1 << 20
        self.max_frame_bytes = 4 << 20
        self._loop = asyncio.get_running_loop()
        self._is_telling = False

    @property
    def running(self) -> list[HeldJob]:
        return [job for job in self.jobs.values() if not job.has_ended]

    # The session.

    def begin_session(self, session: JobSession) -> None:
        """Speak through this session."""
        self.session = session
        self.slots.new_session()
        if self.slots.draining:
            session.drain(None)

    def end_session(self) -> None:
        self.session = None

    # What is decided elsewhere.

    def drain(self, finish_within_s: float | None) -> None:
        """Ask for no more jobs and refuse those that still come."""
        self.slots.draining = True
        if self.session is not None:
            self.session.drain(finish_within_s)

    def hand_back(self, grace_s: float) -> None:
        """End what still runs free of cost: the executor stops."""
        for job in self.running:
            # Without a session an event is kept until there is one; of a rejection nobody would hear.
            if job.phase is not Phase.RUNNING and job.stop is None and self.session is not None:
                self._reject(job.request, Code.EXECUTOR_SHUTDOWN, "the executor stops")
                self._withdraw(job)
                self._leave_slot(job)
                self._forget(job)
            else:
                stop = Stop(StopKind.CANCEL, Code.EXECUTOR_SHUTDOWN)
                self.stop(job, stop, grace_s)
        self.after_change()

    def stop(self, job: HeldJob, stop: Stop, grace_s: float) -> None:
        """Ask the handler to stop, and kill its runner after the grace. The first reason stays."""
        if job.has_ended:
            return
        if job.stop is None:
            job.stop = stop
            if job.phase is not Phase.RUNNING or job.runner is None:
                self._withdraw(job)
                self._conclude(job, None, None)
                return
            job.runner.ask_to_stop(job.token, stop.reason)
        elif stop.kind is StopKind.LOST:
            job.stop = stop
        self._timers.kill_within(job, grace_s)

    def fence(self, job: HeldJob, now: float) -> None:
        """The lease is no longer certain: nothing may run under it."""
        if job.phase is Phase.STARTING:
            self._withdraw(job)
            for task in list(job.tasks):
                task.cancel()
            job.phase = Phase.ACCEPTED  # goes on when it is renewed
        elif job.phase is Phase.RUNNING and job.runner is not None:
            log.warning("job.fenced", **job.names)
            message = f"no heartbeat was renewed for {now - job.clock.since:.1f} s"
            grace_s = min(job.clock.lease_s / 12, max(0.0, job.clock.over_at - now) / 2)
            self.stop(job, Stop(StopKind.FAIL, Code.LEASE_EXPIRED, message), grace_s)
            self.after_change()

    def renewed(self, token: int, sent_at: float) -> None:
        """A heartbeat sent at sent_at has renewed the lease."""
        job = self.jobs.get(token)
        if job is not None:
            job.clock.renewed(sent_at)
            self._begin_if_certain(job)

    # What the runners say.

    def on_placed(self, token: int, runner: Runner) -> float:
        job = self.jobs[token]
        job.runner = runner
        job.phase = Phase.RUNNING
        self._emit(self._events.running(job.lease, runner.runner_id))
        self._timers.started(job)
        if job.span is not None:
            job.span.started()
        if log.is_enabled_for(logging.DEBUG):  # the names cost more than the call
            log.debug("job.started", **job.names, runner_id=runner.runner_id)
        return job.clock.over_at

    def on_runner_message(self, runner: Runner, message: FromRunner) -> None:
        if isinstance(message, Ready):
            return
        job = self.jobs.get(message.lease_token)
        if job is None or job.runner is not runner or job.has_ended:
            if isinstance(message, Succeeded | Failed | Stopped):
                self._leave_runner(runner, message.lease_token)
            return
        match message:
            case Progress() | RecordEffect() if job.is_lost:
                pass  # nothing more is reported of it
            case Progress():
                if not self._keeps_secret(job, "checkpoint", message.checkpoint):
                    self._on_progress(job, message)
            case RecordEffect() if not self._keeps_secret(job, f"effect {message.name}", message.result):
                self._timers.progressed(job)  # any event shows that it moves, to the scheduler too
                sequence = self._emit(self._events.effect(job.lease, message))
                job.effects[sequence] = message.request
            case OpenArtifact() | PutArtifact():
                self._run_for(job, self._serve(job, runner, message))
            case LogLine():
                self._logs.said(job, message)
            case LeavesChildren():
                job.leaves_children = True
            case Succeeded() | Failed() | Stopped():
                self._on_outcome(job, runner, message)
        if self.session is not None:
            self.session.wake()

    def on_runner_line(self, runner: Runner, stream: str, line: bytes) -> None:
        # With one job it is that job's; of several nobody can tell whose.
        job = self.jobs.get(next(iter(runner.jobs))) if len(runner.jobs) == 1 else None
        self._logs.line(runner, job, stream, line)

    def on_runner_exit(self, runner: Runner, end: ProcessExit) -> None:
        if runner.jobs:
            log.warning(
                "runner.ended",
                runner_id=runner.runner_id,
                pid=runner.pid,
                how=end.describe(),
                jobs=len(runner.jobs),
            )
        for token in list(runner.jobs):
            job = self.jobs.get(token)
            runner.end_job(token)
            if job is not None and not job.has_ended:
                self._conclude(job, job.outcome, end)
        self.after_change()

    def on_not_started(self, token: int, problem: str, end: ProcessExit | None) -> None:
        job = self.jobs.get(token)
        if job is not None and not job.has_ended:
            self._conclude(job, wire.failed_by_executor(job.lease, Code.RUNNER_CRASHED, problem), end)
            self.after_change()

    # A job's way.

    def take(self, request: job_pb2.JobRequest) -> None:
        if request.lease.lease_token in self.jobs:
            return  # a repeat changes nothing
        taken = self.slots.take(request.kind, request.kind_version, executor_kind=request.executor_kind)
        if isinstance(taken, NotTaken):
            self._reject(request, taken.code, taken.message)
            return
        job = HeldJob(
            request=request,
            operation=taken,
            scratch=f"{self._limits.scratch}/{request.lease.lease_token}",
            clock=LeaseClock(wire.seconds(request, "lease_duration") or DEFAULT_LEASE_S),
            store=self._store,
            limits=wire.time_limits(request),
            received_at=self._loop.time(),
        )
        self.jobs[job.token] = job
        self._timers.received(job)
        self._emit(self._events.accepted(job.lease))

    def acknowledged(self, ack: dispatch_pb2.EventAck) -> None:
        """Events are stored: go on from there, or be done."""
        token = ack.lease_token
        job = self.jobs.get(token)
        for entry in self._outbox.acknowledge(token, ack.sequence, ack.missing):
            if job is not None:
                self._stored(job, entry)
        if job is not None and job.has_ended and not self._outbox.holds(token):
            if self.tally is not None and job.last_event is not None:
                self.tally.stored(job.last_event)
            self._forget(job)

    def _stored(self, job: HeldJob, entry: Entry) -> None:
        if entry.kind == "accepted" and job.phase is Phase.ACCEPTING:
            job.phase = Phase.ACCEPTED
            job.clock.renewed(lease_now() if entry.first_sent_at is None else entry.first_sent_at)
            self._begin_if_certain(job)
        elif entry.kind == "effect":
            request = job.effects.pop(entry.sequence, None)
            if request is not None and job.runner is not None:
                job.runner.send(Reply(job.token, request, "", "", ""))
        elif entry.kind == "progress":
            job.checkpoint_stored(entry.sequence)

    def _begin_if_certain(self, job: HeldJob) -> None:
        if job.phase is not Phase.ACCEPTED or lease_now() >= job.clock.fence_at:
            return
        job.phase = Phase.STARTING
        if job.request.secrets:
            self._run_for(job, self._resolve_secrets(job))
        else:
            self._submit(job, {})

    async def _resolve_secrets(self, job: HeldJob) -> None:
        try:
            secrets = await asyncio.to_thread(
                secret_providers.resolve, job.request.secrets, folder=self._limits.secrets
            )
        except JobFailure as error:
            if not job.has_ended:
                self._conclude(job, wire.failed_by_executor(job.lease, error.code, error.message), None)
                self.after_change()
            return
        for secret in secrets.values():
            self._redactor.add(secret)
        if job.phase is Phase.STARTING:
            self._submit(job, secrets)
            self.after_change()

    def _submit(self, job: HeldJob, secrets: dict[str, str]) -> None:
        assert self.pool is not None  # noqa: S101 - set before the first session
        job.span = job.span or self._tracing.begin(job.request)
        start = wire.start_message(
            job.request,
            secrets=secrets,
            scratch=job.scratch,
            max_payload_bytes=self.max_payload_bytes,
            time_left_s=self._timers.left_s(job),
            span=job.span,
        )
        self.pool.submit(start, is_async=job.operation.is_async)

    def _keeps_secret(self, job: HeldJob, what: str, data: bytes | None) -> bool:
        """Whether what the next attempt would be given holds a secret; then the job fails.

        Redacted it would be another value, and the next attempt would go on with that.
        """
        path = None if data is None else self._redactor.where(data)
        if path is None:
            return False
        message = (
            f"{self._redactor.text(what)} at {path}: holds a secret that was resolved here; leave it out"
        )
        self.stop(job, Stop(StopKind.FAIL, Code.SECRET_IN_PAYLOAD, message), self._limits.grace_s)
        return True

    def _on_progress(self, job: HeldJob, message: Progress) -> None:
        self._timers.progressed(job)
        artifacts = job.artifacts.of_checkpoint(message.artifacts) if message.artifacts else ()
        event = self._events.progress(job.lease, message, artifacts)
        if message.checkpoint is not None:
            job.checkpoint = event.progress
        sequence = self._emit(event)
        if message.artifacts:
            job.artifacts.checkpoint_queued(sequence, message.artifacts)

    def _on_outcome(self, job: HeldJob, runner: Runner, outcome: Outcome) -> None:
        if not runner.is_async and (job.stop is not None or job.leaves_children):
            # Threads and children that the handler has left behind end with the process, and only then may
            # anybody say that it has ended.
            job.outcome = outcome
            runner.leave()
            self._timers.kill_within(job, min(1.0, self._limits.grace_s))
            return
        self._leave_runner(runner, job.token)
        self._conclude(job, outcome, None)
        self.after_change()

    def _conclude(self, job: HeldJob, outcome: Outcome | None, end: ProcessExit | None) -> None:
        """The handler runs no more: say how it ended. end: of its runner, if that has ended."""
        job.cancel_timers()
        for task in list(job.tasks):
            task.cancel()
        self._leave_slot(job)
        job.phase = Phase.ENDED
        if job.stop is not None:
            self.stopped.set()
        if job.is_lost:
            self._end_span(job, None)
            self._pass_on(job)
            return
        job.last_event = event = fitting(
            self._events,
            job,
            last_event(self._events, job, outcome, end, lease_now()),
            max_frame_bytes=self.max_frame_bytes,
        )
        self._end_span(job, event)
        handler_logs.ended(job, event)
        if job.refused_sequence:
            self._outbox.replace(event, job.refused_sequence)
        else:
            self._emit(event)

    def _end_span(self, job: HeldJob, event: job_pb2.ProgressEvent | None) -> None:
        if job.span is not None:
            job.span.ended(event)

    def refused(self, refusal: dispatch_pb2.EventRefusal) -> None:
        job = self.jobs.get(refusal.lease_token)
        if job is None:
            return
        log.warning("event.refused", **job.names, code=refusal.code, sequence=refusal.sequence)
        if refusal.code == Code.LEASE_LOST:
            self.lose(refusal.lease_token)
            return
        if self._outbox.hold(refusal.lease_token, refusal.sequence) is None:
            return
        job.refusals += 1
        if job.refusals > MAX_REFUSALS:
            log.error("job.given_up", **job.names, code=refusal.code, message=refusal.message)
            self.lose(refusal.lease_token)
        elif refusal.code == Code.BLOBS_MISSING:
            self._run_for(job, self._upload_again(job, refusal))
        else:
            self._fail_in_place(job, refusal.sequence, refusal.code, refusal.message)

    async def _upload_again(self, job: HeldJob, refusal: dispatch_pb2.EventRefusal) -> None:
        try:
            await job.artifacts.upload_again(list(refusal.digests))
        except JobFailure as error:
            if error.code == Code.LEASE_LOST:
                self.lose(job.token)
            else:
                self._fail_in_place(job, refusal.sequence, error.code, error.message)
        except OSError as error:  # its scratch folder has gone, or cannot be read
            problem = f"{type(error).__name__}: {error}"
            self._fail_in_place(job, refusal.sequence, Code.DEPENDENCY_UNAVAILABLE, problem)
        else:
            self._outbox.resend(job.token, refusal.sequence)
        self.after_change()

    def _fail_in_place(self, job: HeldJob, sequence: int, code: str, message: str) -> None:
        """Say `failed` under the number of an event that cannot be stored."""
        if job.has_ended:
            failed = wire.failed_by_executor(job.lease, code, message)
            job.last_event = self._events.failed(job.lease, failed, None)
            self._outbox.replace(job.last_event, sequence)
        else:
            job.refused_sequence = sequence
            self.stop(job, Stop(StopKind.FAIL, code, message), self._limits.grace_s)

    def cancel(self, cancel: dispatch_pb2.CancelJob) -> None:
        job = self.jobs.get(cancel.lease_token)
        if job is None:
            return
        if self.session is not None:
            self.session.receipt(job.token)
        if job.has_ended:
            return
        if job.stop is None:
            log.info("job.cancel_requested", **job.names, reason=cancel.reason)
        # Also where it stops already, by our own timer: the request may leave it less time.
        grace_s = cancel.grace.ToNanoseconds() / 1e9 if cancel.HasField("grace") else self._limits.grace_s
        self.stop(job, Stop(StopKind.CANCEL, cancel.reason or Code.CANCELLED), grace_s)

    def lose(self, token: int) -> None:
        """The lease has passed on: stop, report nothing more."""
        job = self.jobs.get(token)
        if job is None:
            return
        log.warning("job.lost", **job.names)
        self._outbox.drop(token)
        if job.has_ended:
            self._pass_on(job)
        else:
            self.stop(job, Stop(StopKind.LOST, Code.LEASE_LOST), job.clock.lease_s / 12)

    def _pass_on(self, job: HeldJob) -> None:
        if self.tally is not None:
            self.tally.passed_on()
        self._forget(job)

    def _forget(self, job: HeldJob) -> None:
        """Nothing more is to be said of the job."""
        self.jobs.pop(job.token, None)
        self._outbox.drop(job.token)
        job.cancel_timers()
        for task in list(job.tasks):
            task.cancel()
        if self.session is not None:
            self.session.forget(job.token)
        if os.access(
            job.scratch, os.F_OK
        ):  # most jobs make none; other ways to ask raise an exception for each
            removal = asyncio.to_thread(remove_folder, Path(job.scratch))
            self._tasks.create_task(removal, name="remove scratch")

    # Small things.

    def _emit(self, event: job_pb2.ProgressEvent) -> int:
        return self._outbox.add(event, lease_now(), connected=self.session is not None)

    def _reject(self, request: job_pb2.JobRequest, code: Code, message: str) -> None:
        # Without a session the next Hello says it: what is not listed is not held.
        log.info("job.rejected", **names(request), code=str(code))
        if self.tally is not None:
            self.tally.rejected(request.lease.lease_token)
        if self.session is not None:
            self.session.reject(request.lease, code, message)

    def _withdraw(self, job: HeldJob) -> None:
        if self.pool is not None:
            self.pool.withdraw(job.token)

    def _leave_runner(self, runner: Runner, token: int) -> None:
        if self.pool is not None:
            self.pool.job_ended(runner, token)

    def _leave_slot(self, job: HeldJob) -> None:
        if not job.has_ended:
            self.slots.leave(job.request.kind)

    def after_change(self) -> None:
        """Have it told, once for all that changes in this turn of the loop."""
        if not self._is_telling:
            self._is_telling = True
            self._loop.call_soon(self._tell_change)

    def _tell_change(self) -> None:
        self._is_telling = False
        self.changed.set()
        if self.session is None:
            return
        if self._outbox.held_bytes < MAX_HELD_BYTES:
            self.session.set_credit(self.slots.credit())
        self.session.wake()

    def _on_timeout(self, job: HeldJob, reason: Code) -> None:
        log.info("job.timed_out", **job.names, reason=str(reason))
        self.stop(job, Stop(StopKind.CANCEL, reason), self._limits.grace_s)
        self.after_change()

    def _on_grace_over(self, job: HeldJob) -> None:
        if job.runner is not None and not job.has_ended:
            log.warning("runner.killed", **job.names, runner_id=job.runner.runner_id, pid=job.runner.pid)
            job.runner.kill(job.token)

    def _run_for(self, job: HeldJob, work: Coroutine[None, None, None]) -> None:
        task = self._tasks.create_task(work, name=f"job {job.token}")
        job.tasks.add(task)
        task.add_done_callback(job.tasks.discard)

    async def _serve(self, job: HeldJob, runner: Runner, message: OpenArtifact | PutArtifact) -> None:
        path, code, problem = "", "", ""
        try:
            if isinstance(message, OpenArtifact):
                path = str(await job.artifacts.open(message.name, of_checkpoint=message.of_checkpoint))
            elif message.for_checkpoint:
                await job.artifacts.keep(message)
            else:
                await job.artifacts.put(message)
        except JobFailure as error:
            code, problem = error.code, error.message
        except OSError as error:  # a full disk is the executor's trouble, and the handler's to hear of
            code, problem = Code.DEPENDENCY_UNAVAILABLE, f"{type(error).__name__}: {error}"
        if code == Code.LEASE_LOST:
            self.lose(job.token)
            self.after_change()
        else:
            runner.send(Reply(job.token, message.request, path, str(code), problem))
