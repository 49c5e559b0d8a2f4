"""A simple executor that behaves well by itself: it accepts, runs a callable per kind, reports and heartbeats.

    async def shout(job: AutoJob) -> object:
        await job.progress(0.5, "half way")
        return {"text": job.input["text"].upper()}

    async with AutoExecutor(address, {"demo.shout": shout}, slots=4) as executor:
        await executor.finished.wait_for(1)

Handlers run on the loop: they are test code. It does not reconnect: a dropped session ends it.
"""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self, TypeAlias

from rara.v1 import common_pb2, dispatch_pb2, job_pb2

from rara_testing import job_events
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor, capability


class JobFailure(Exception):
    """What a handler raises to end its attempt with a code. retryable None: left to the code's default."""

    def __init__(
        self, code: str, message: str = "failed on purpose", *, retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retryable = retryable


class AutoJob:
    """One leased job, as its handler sees it."""

    def __init__(self, request: job_pb2.JobRequest, executor: "AutoExecutor") -> None:
        self.request = request
        self.lease = request.lease
        self.artifacts: list[common_pb2.Artifact] = []  # becomes the manifest of its success
        self.consumed: list[common_pb2.Digest] = []  # what it says it has read
        self.cancel_reason = ""
        self.sequence = 0
        self._executor = executor

    @property
    def input(self) -> Any:
        return json.loads(self.request.input.data) if self.request.input.data else None

    @property
    def checkpoint(self) -> Any:
        return json.loads(self.request.checkpoint.data) if self.request.checkpoint.data else None

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    async def progress(
        self,
        fraction: float | None = None,
        message: str = "",
        *,
        metrics: Mapping[str, float] | None = None,
        checkpoint: object | None = None,
    ) -> None:
        stored = None if checkpoint is None else job_events.json_payload(checkpoint)
        event = job_events.progress(
            self.lease,
            self.next_sequence(),
            fraction=fraction,
            message=message,
            metrics=metrics,
            checkpoint=stored,
        )
        await self._executor.session.events(event)

    async def effect(self, name: str, result: object) -> None:
        """Record an effect; return when it is acknowledged."""
        sequence = self.next_sequence()
        await self._executor.session.events(job_events.effect(self.lease, sequence, name, result))
        await self._executor.session.expect_ack(self.lease, sequence)


Handler: TypeAlias = Callable[[AutoJob], Awaitable[object] | object]


class AutoExecutor:
    """Runs up to `slots` jobs at once. `outcomes` tells, by lease token, what was reported and acknowledged."""

    def __init__(
        self,
        address: str,
        handlers: Mapping[str, Handler],
        *,
        slots: int = 4,
        executor_id: str | None = None,
        executor_name: str = "auto",
        executor_kind: str = "python",
        versions: tuple[str, ...] = ("1.0.0",),
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.session = ScriptedExecutor(executor_id=executor_id, executor_name=executor_name)
        self.outcomes: dict[
            int, str
        ] = {}  # lease token -> succeeded, failed, cancelled, refused:CODE or lost
        self.requests: list[job_pb2.JobRequest] = []
        self._address = address
        self._handlers = dict(handlers)
        self._hello: dict[str, Any] = {"executor_kind": executor_kind, "labels": dict(labels or {})}
        self._capabilities = [capability(kind, *versions) for kind in handlers]
        self._slots = slots
        self._credit = slots
        self._running: dict[int, tuple[AutoJob, asyncio.Task[None]]] = {}
        self._changed = asyncio.Condition()
        self._owner: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.session.connect(self._address)
        await self.session.hello(self._capabilities, **self._hello)
        welcome = await self.session.expect("welcome")
        await self.session.credit(self._credit)
        self._owner = asyncio.create_task(self._run(welcome.terms), name="auto executor")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owner is not None:
            self._owner.cancel()
            result = (await asyncio.gather(self._owner, return_exceptions=True))[0]
            if isinstance(result, Exception) and kind is None:
                await self.session.close()
                raise result  # a bug in this fake must not look like a quiet executor
        await self.session.close()

    async def wait_for(self, count: int, timeout_s: float = WAIT_S) -> None:
        """Wait until `count` leases have an outcome."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: len(self.outcomes) >= count)
        except TimeoutError:
            raise AssertionError(f"{self.outcomes} within {timeout_s:g} s, wanted {count}") from None

    @property
    def held_tokens(self) -> list[int]:
        return list(self._running)

    # ------------------------------------------------------------ its tasks

    async def _run(self, terms: dispatch_pb2.SessionTerms) -> None:
        async with asyncio.TaskGroup() as group:
            beats = group.create_task(self._beat(terms.heartbeat_interval.ToTimedelta().total_seconds()))
            await self._serve(group)
            beats.cancel()

    async def _beat(self, interval_s: float) -> None:
        while True:
            await self.session.heartbeat(self._running)
            await asyncio.sleep(interval_s)

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        """Take frames in the order in which they came, until the call ends."""
        async for frame in self.session.frames():
            match frame.WhichOneof("frame"):
                case "jobs":
                    for request in frame.jobs.jobs:
                        self._start(request, group)
                case "cancels":
                    await self.session.cancel_receipts(*(one.lease_token for one in frame.cancels.jobs))
                    self._cancel(frame.cancels.jobs)
                case "heartbeat_ack":
                    self._cancel(frame.heartbeat_ack.cancels)
                    await self._lose(frame.heartbeat_ack.lost_lease_tokens)
                case "acks":
                    lost = [r.lease_token for r in frame.acks.refusals if r.code == "LEASE_LOST"]
                    await self._lose(lost)
                case _:
                    pass  # welcome was taken; drain and go_away are a test's business

    def _start(self, request: job_pb2.JobRequest, group: asyncio.TaskGroup) -> None:
        self.requests.append(request)
        job = AutoJob(request, self)
        task = group.create_task(self._work(job), name=f"auto job {request.lease.lease_token}")
        self._running[request.lease.lease_token] = (job, task)

    def _cancel(self, cancels: "list[dispatch_pb2.CancelJob] | Any") -> None:
        for cancel in cancels:
            held = self._running.get(cancel.lease_token)
            if held is not None and not held[0].cancel_reason:
                held[0].cancel_reason = cancel.reason
                held[1].cancel()

    async def _lose(self, tokens: "list[int] | Any") -> None:
        for token in tokens:
            held = self._running.get(token)
            if held is not None:
                held[1].cancel()
                await self._end(held[0], "lost")

    # ------------------------------------------------------------ one job

    async def _work(self, job: AutoJob) -> None:
        token = job.lease.lease_token
        try:
            event = await self._attempt(job)
        except asyncio.CancelledError:
            if not job.cancel_reason:
                raise  # lost, or this executor is closing: nothing is reported
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()  # the cancellation was a request to the job, and has been answered
            event = job_events.cancelled(job.lease, job.next_sequence(), reason=job.cancel_reason)
        await self.session.events(event)
        outcome = await self.session.outcome_of(job.lease, event.sequence)
        if token in self._running:
            await self._end(job, outcome or str(event.WhichOneof("event")))

    async def _attempt(self, job: AutoJob) -> job_pb2.ProgressEvent:
        """Accept, wait for the ack, run the handler; return the terminal event, not sent yet."""
        accepted = job_events.accepted(job.lease, job.next_sequence(), executor_id=self.session.executor_id)
        await self.session.events(accepted)
        await self.session.expect_ack(job.lease, accepted.sequence)
        await self.session.events(job_events.running(job.lease, job.next_sequence()))
        try:
            output = self._handlers[job.request.kind](job)
            if inspect.isawaitable(output):
                output = await output
        except JobFailure as failure:
            return job_events.failed(
                job.lease,
                job.next_sequence(),
                code=failure.code,
                message=str(failure),
                retryable=failure.retryable,
            )
        except Exception as error:  # as an SDK does: a handler's bug is a failure of its attempt
            return job_events.failed(job.lease, job.next_sequence(), message=repr(error))
        return job_events.succeeded(
            job.lease, job.next_sequence(), output=output, artifacts=job.artifacts, consumed=job.consumed
        )

    async def _end(self, job: AutoJob, outcome: str) -> None:
        """Free the slot and raise the credit by it."""
        del self._running[job.lease.lease_token]
        self._credit += 1
        await self.session.credit(self._credit)
        async with self._changed:
            self.outcomes[job.lease.lease_token] = outcome
            self._changed.notify_all()
