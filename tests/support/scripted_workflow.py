# ruff: noqa: N802 - gRPC gives the names of the methods
"""A scheduler's client side for tests: a real gRPC server over messages in memory, with faults on order.

What a test puts into `runs`, `steps`, `definitions` and so on is what calls answer. `plant` makes the next calls
of a method fail; streams can be cut after any number of messages.
"""

import asyncio
import hashlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as PackedAny
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, job_pb2, workflow_pb2, workflow_pb2_grpc
from rara_client.cursors import RUN_ENDED, STEP_ENDED

# A stream of a test that waits longer than this for news has a bug in its test.
_NEWS_S = 20.0


@dataclass(frozen=True, slots=True)
class Fault:
    """How a call ends. Without a reason the status is bare, as from a proxy or a broken connection.

    Status OK ends a watch of a run well, but early.
    after: messages (of a stream) or bytes (of a blob) that still pass.
    """

    status: grpc.StatusCode
    reason: str = ""
    message: str = "planted"
    metadata: Mapping[str, str] = field(default_factory=dict)
    violations: Sequence[tuple[str, str]] = ()
    retry_after_s: float | None = None
    after: int = 0

    def to_status(self) -> Any:
        details: list[Message] = []
        if self.reason:
            info = error_details_pb2.ErrorInfo(
                reason=self.reason, domain="rara.v1", metadata=dict(self.metadata)
            )
            details.append(info)
        if self.violations:
            fields = [
                error_details_pb2.BadRequest.FieldViolation(field=name, description=text)
                for name, text in self.violations
            ]
            details.append(error_details_pb2.BadRequest(field_violations=fields))
        if self.retry_after_s is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromNanoseconds(round(self.retry_after_s * 1e9))
            details.append(retry)
        packed = []
        for detail in details:
            item = PackedAny()
            item.Pack(detail)
            packed.append(item)
        code: int = self.status.value[0]
        return rpc_status.to_status(status_pb2.Status(code=code, message=self.message, details=packed))


UNAVAILABLE = Fault(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", "the database is away")
CUT = Fault(grpc.StatusCode.UNAVAILABLE)


class Context(Protocol):
    """The part of grpc.aio's context that is needed here."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> Any: ...

    async def abort_with_status(self, status: Any) -> Any: ...

    def invocation_metadata(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Call:
    """A call that arrived."""

    method: str
    request: Message
    metadata: dict[str, str]


class Script:
    """What both services share: faults to come, calls that came."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)

    def plant(self, method: str, *faults: Fault) -> None:
        """The next calls of this method end so, one after the other."""
        self._faults[method].extend(faults)

    def requests(self, method: str) -> list[Any]:
        return [call.request for call in self.calls if call.method == method]

    async def arrive(self, method: str, request: Message, context: Context) -> None:
        """Note a unary call, and abort it if a fault is due."""
        fault = self.note(method, request, context)
        if fault is not None:
            await self.fail(fault, context)

    def note(self, method: str, request: Message, context: Context) -> Fault | None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        self.calls.append(Call(method, request, metadata))
        return self._faults[method].popleft() if self._faults[method] else None

    async def fail(self, fault: Fault, context: Context) -> None:
        if fault.reason or fault.violations or fault.retry_after_s is not None:
            await context.abort_with_status(fault.to_status())
        await context.abort(fault.status, fault.message)


class ScriptedWorkflow(workflow_pb2_grpc.WorkflowServiceServicer):
    """Runs and steps in memory; a change of them is pushed to those who watch."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.page_size = 1000
        self.definitions: list[workflow_pb2.Definition] = []
        self.runs: dict[str, workflow_pb2.WorkflowRun] = {}
        self.steps: dict[str, workflow_pb2.StepRun] = {}
        self.attempts: dict[str, list[workflow_pb2.StepAttempt]] = defaultdict(list)
        self.events: dict[tuple[str, int], list[job_pb2.ProgressEvent]] = defaultdict(list)
        self.obstacles: dict[str, list[workflow_pb2.Obstacle]] = defaultdict(list)
        self.executors: list[workflow_pb2.Executor] = []
        self.keys: dict[str, str] = {}
        self.compacted_before = 0
        self._history: dict[str, list[workflow_pb2.WatchRunResponse]] = defaultdict(list)
        self._news = asyncio.Event()

    # What tests call

    def put_run(self, run: workflow_pb2.WorkflowRun) -> None:
        """Store a run as it is now, under the next revision of its history."""
        revision = self._next_revision(run.workflow_run_id)
        run.revision = revision
        self.runs[run.workflow_run_id] = run
        self._tell(run.workflow_run_id, workflow_pb2.WatchRunResponse(revision=revision, run=run))

    def put_step(self, step: workflow_pb2.StepRun, *, is_same_revision: bool = False) -> None:
        """Store a step as it is now. is_same_revision: in one transaction with the change before."""
        self.steps[step.step_run_id] = step
        run_id = step.workflow_run_id
        revision = self._next_revision(run_id) - is_same_revision
        if run_id in self.runs:
            self.runs[run_id].revision = revision
        self._tell(run_id, workflow_pb2.WatchRunResponse(revision=revision, step_run=step))

    def put_event(self, event: job_pb2.ProgressEvent) -> None:
        self.events[event.lease.step_run_id, event.lease.attempt].append(event)
        self._wake()

    def _next_revision(self, run_id: str) -> int:
        history = self._history[run_id]
        return history[-1].revision + 1 if history else 1

    def _tell(self, run_id: str, update: workflow_pb2.WatchRunResponse) -> None:
        kept = workflow_pb2.WatchRunResponse.FromString(update.SerializeToString())
        self._history[run_id].append(kept)
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # Definitions

    async def RegisterDefinition(
        self, request: workflow_pb2.RegisterDefinitionRequest, context: Any
    ) -> workflow_pb2.RegisterDefinitionResponse:
        await self.script.arrive("RegisterDefinition", request, context)
        given = request.definition
        stored = [item for item in self.definitions if item.definition == given.definition]
        content = hashlib.sha256(given.SerializeToString(deterministic=True)).hexdigest()
        for item in stored:
            if item.content_sha256 == content:
                return workflow_pb2.RegisterDefinitionResponse(definition=item, already_existed=True)
        given.version = len(stored) + 1
        given.content_sha256 = content
        if not request.validate_only:
            self.definitions.append(given)
        return workflow_pb2.RegisterDefinitionResponse(definition=given)

    async def GetDefinition(
        self, request: workflow_pb2.GetDefinitionRequest, context: Any
    ) -> workflow_pb2.GetDefinitionResponse:
        await self.script.arrive("GetDefinition", request, context)
        found = [
            item
            for item in self.definitions
            if item.definition == request.definition and request.version in (0, item.version)
        ]
        if not found:
            await self._not_found(
                "DEFINITION_NOT_FOUND", f"there is no definition {request.definition}", context
            )
        return workflow_pb2.GetDefinitionResponse(definition=found[-1])

    async def ListDefinitions(
        self, request: workflow_pb2.ListDefinitionsRequest, context: Any
    ) -> workflow_pb2.ListDefinitionsResponse:
        await self.script.arrive("ListDefinitions", request, context)
        found = [item for item in self.definitions if request.definition in ("", item.definition)]
        page, token = self._page(found, request.page_size, request.page_token)
        return workflow_pb2.ListDefinitionsResponse(definitions=page, next_page_token=token)

    # Runs

    async def StartRun(
        self, request: workflow_pb2.StartRunRequest, context: Any
    ) -> workflow_pb2.StartRunResponse:
        await self.script.arrive("StartRun", request, context)
        if all(item.definition != request.definition for item in self.definitions):
            await self._not_found(
                "DEFINITION_NOT_FOUND", f"there is no definition {request.definition}", context
            )
        if request.idempotency_key in self.keys:
            run = self.runs[self.keys[request.idempotency_key]]
            return workflow_pb2.StartRunResponse(run=run, already_started=True)
        run = workflow_pb2.WorkflowRun(
            workflow_run_id=f"00000000-0000-7000-8000-{len(self.runs) + 1:012x}",
            definition=request.definition,
            definition_version=request.definition_version or 1,
            state=workflow_pb2.WORKFLOW_RUN_STATE_PENDING,
            input=request.input,
            input_artifacts=request.input_artifacts,
            labels=request.labels,
        )
        if request.idempotency_key:
            self.keys[request.idempotency_key] = run.workflow_run_id
        self.put_run(run)
        return workflow_pb2.StartRunResponse(run=run)

    async def BatchStartRuns(
        self, request: workflow_pb2.BatchStartRunsRequest, context: Any
    ) -> workflow_pb2.BatchStartRunsResponse:
        answer = workflow_pb2.BatchStartRunsResponse()
        for each in request.requests:
            started = await self.StartRun(each, context)
            answer.runs.add(
                workflow_run_id=started.run.workflow_run_id, already_started=started.already_started
            )
        return answer

    async def GetRun(self, request: workflow_pb2.GetRunRequest, context: Any) -> workflow_pb2.GetRunResponse:
        await self.script.arrive("GetRun", request, context)
        run = await self._run(request.workflow_run_id, context)
        steps = self._steps_of(run.workflow_run_id) if request.include_steps else []
        return workflow_pb2.GetRunResponse(run=run, steps=steps)

    async def ListRuns(
        self, request: workflow_pb2.ListRunsRequest, context: Any
    ) -> workflow_pb2.ListRunsResponse:
        await self.script.arrive("ListRuns", request, context)
        found = [
            run
            for run in reversed(self.runs.values())
            if request.definition in ("", run.definition)
            and (not request.states or run.state in request.states)
            and all(run.labels.get(key) == value for key, value in request.labels.items())
        ]
        page, token = self._page(found, request.page_size, request.page_token)
        return workflow_pb2.ListRunsResponse(runs=page, next_page_token=token)

    async def CancelRun(
        self, request: workflow_pb2.CancelRunRequest, context: Any
    ) -> workflow_pb2.CancelRunResponse:
        await self.script.arrive("CancelRun", request, context)
        run = await self._run(request.workflow_run_id, context)
        if run.state not in RUN_ENDED:
            run.state = workflow_pb2.WORKFLOW_RUN_STATE_CANCELLING
            self.put_run(run)
        return workflow_pb2.CancelRunResponse(run=run)

    async def RetryRun(
        self, request: workflow_pb2.RetryRunRequest, context: Any
    ) -> workflow_pb2.RetryRunResponse:
        await self.script.arrive("RetryRun", request, context)
        old = await self._run(request.workflow_run_id, context)
        if old.state not in (
            workflow_pb2.WORKFLOW_RUN_STATE_FAILED,
            workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED,
        ):
            refusal = Fault(
                grpc.StatusCode.FAILED_PRECONDITION, "RUN_NOT_RETRYABLE", "the run has not failed"
            )
            await self.script.fail(refusal, context)
        run = workflow_pb2.WorkflowRun(
            workflow_run_id=f"00000000-0000-7000-8000-{len(self.runs) + 1:012x}",
            definition=old.definition,
            definition_version=old.definition_version,
            state=workflow_pb2.WORKFLOW_RUN_STATE_PENDING,
            retry_of_workflow_run_id=old.workflow_run_id,
        )
        self.put_run(run)
        return workflow_pb2.RetryRunResponse(run=run)

    async def WatchRun(
        self, request: workflow_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[workflow_pb2.WatchRunResponse]:
        fault = self.script.note("WatchRun", request, context)
        run = await self._run(request.workflow_run_id, context)
        if 0 < request.after_revision < self.compacted_before:
            compacted = Fault(grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED", "too old")
            await self.script.fail(compacted, context)
        sent = 0
        async for update in self._updates(run.workflow_run_id, request.after_revision):
            if fault is not None and sent >= fault.after:
                if fault.status is grpc.StatusCode.OK:
                    return
                await self.script.fail(fault, context)
            yield update
            sent += 1
        if fault is not None:
            await self.script.fail(fault, context)

    async def WatchRuns(
        self, requests: AsyncIterator[workflow_pb2.WatchRunsRequest], context: Any
    ) -> AsyncIterator[workflow_pb2.WatchRunsResponse]:
        """One run in a message. The requests of a call are noted as they come; a fault counts messages."""
        fault = self.script.note("WatchRuns", workflow_pb2.WatchRunsRequest(), context)
        awaited: dict[str, None] = {}
        closed = asyncio.Event()

        async def take() -> None:
            async for request in requests:
                self.script.note("WatchRuns request", request, context)
                awaited.update(dict.fromkeys(request.workflow_run_ids))
                self._wake()
            closed.set()
            self._wake()

        taking = asyncio.create_task(take())
        sent = 0
        try:
            while awaited or not closed.is_set():
                news = self._news
                for run_id in list(awaited):
                    run = self.runs.get(run_id)
                    if run is not None and run.state not in RUN_ENDED:
                        continue
                    if fault is not None and sent >= fault.after:
                        await self.script.fail(fault, context)
                    del awaited[run_id]
                    sent += 1
                    if run is None:
                        yield workflow_pb2.WatchRunsResponse(not_found=[run_id])
                    else:
                        yield workflow_pb2.WatchRunsResponse(ended=[run])
                if awaited or not closed.is_set():
                    await asyncio.wait_for(news.wait(), _NEWS_S)
        finally:
            taking.cancel()

    async def _updates(self, run_id: str, after: int) -> AsyncIterator[workflow_pb2.WatchRunResponse]:
        history = self._history[run_id]
        if after == 0:
            after = history[-1].revision if history else 0
            run = workflow_pb2.WorkflowRun.FromString(self.runs[run_id].SerializeToString())
            yield workflow_pb2.WatchRunResponse(revision=after, run=run)
            for step in self._steps_of(run_id):
                yield workflow_pb2.WatchRunResponse(revision=after, step_run=step)
            yield workflow_pb2.WatchRunResponse(revision=after, snapshot_end=workflow_pb2.SnapshotEnd())
            yield workflow_pb2.WatchRunResponse(revision=after, alive=workflow_pb2.Alive())
        place = next((index for index, update in enumerate(history) if update.revision > after), len(history))
        while True:
            news = self._news
            while place < len(history):
                yield history[place]
                place += 1
            if self.runs[run_id].state in RUN_ENDED:
                return
            await asyncio.wait_for(news.wait(), _NEWS_S)

    # Steps

    async def GetStepRun(
        self, request: workflow_pb2.GetStepRunRequest, context: Any
    ) -> workflow_pb2.GetStepRunResponse:
        await self.script.arrive("GetStepRun", request, context)
        step = await self._step(request.step_run_id, context)
        return workflow_pb2.GetStepRunResponse(step_run=step, attempts=self.attempts[step.step_run_id])

    async def ListStepRuns(
        self, request: workflow_pb2.ListStepRunsRequest, context: Any
    ) -> workflow_pb2.ListStepRunsResponse:
        await self.script.arrive("ListStepRuns", request, context)
        found = [
            step
            for step in self.steps.values()
            if request.workflow_run_id in ("", step.workflow_run_id)
            and (not request.states or step.state in request.states)
            and request.kind in ("", step.kind)
        ]
        page, token = self._page(found, request.page_size, request.page_token)
        return workflow_pb2.ListStepRunsResponse(step_runs=page, next_page_token=token)

    async def WatchStepRun(
        self, request: workflow_pb2.WatchStepRunRequest, context: Any
    ) -> AsyncIterator[workflow_pb2.WatchStepRunResponse]:
        fault = self.script.note("WatchStepRun", request, context)
        step = await self._step(request.step_run_id, context)
        attempt = request.attempt or step.attempt
        events = self.events[step.step_run_id, attempt]
        sent = place = 0
        while True:
            news = self._news
            for event in sorted(events[place:], key=lambda item: item.sequence):
                if event.sequence <= request.after_sequence:
                    continue
                if fault is not None and sent >= fault.after:
                    await self.script.fail(fault, context)
                yield workflow_pb2.WatchStepRunResponse(event=event)
                sent += 1
            place = len(events)
            step = self.steps[step.step_run_id]
            is_over = step.state == workflow_pb2.STEP_RUN_STATE_RETRYABLE_FAILED or step.attempt > attempt
            if step.state in STEP_ENDED or is_over:
                yield workflow_pb2.WatchStepRunResponse(step_run=step)
                return
            if fault is not None:
                await self.script.fail(fault, context)
            await asyncio.wait_for(news.wait(), _NEWS_S)

    async def ExplainStep(
        self, request: workflow_pb2.ExplainStepRequest, context: Any
    ) -> workflow_pb2.ExplainStepResponse:
        await self.script.arrive("ExplainStep", request, context)
        step = await self._step(request.step_run_id, context)
        return workflow_pb2.ExplainStepResponse(step_run=step, obstacles=self.obstacles[step.step_run_id])

    # The rest

    async def QueryLineage(
        self, request: workflow_pb2.QueryLineageRequest, context: Any
    ) -> workflow_pb2.QueryLineageResponse:
        await self.script.arrive("QueryLineage", request, context)
        return workflow_pb2.QueryLineageResponse()

    async def ListExecutors(
        self, request: workflow_pb2.ListExecutorsRequest, context: Any
    ) -> workflow_pb2.ListExecutorsResponse:
        await self.script.arrive("ListExecutors", request, context)
        page, token = self._page(self.executors, request.page_size, request.page_token)
        return workflow_pb2.ListExecutorsResponse(executors=page, next_page_token=token)

    async def DrainExecutor(
        self, request: workflow_pb2.DrainExecutorRequest, context: Any
    ) -> workflow_pb2.DrainExecutorResponse:
        await self.script.arrive("DrainExecutor", request, context)
        return workflow_pb2.DrainExecutorResponse(executor=self.executors[0])

    def _steps_of(self, run_id: str) -> list[workflow_pb2.StepRun]:
        return [step for step in self.steps.values() if step.workflow_run_id == run_id]

    def _page(self, items: Sequence[Any], size: int, token: str) -> tuple[Sequence[Any], str]:
        start = int(token or 0)
        end = start + min(size or 50, self.page_size)
        return items[start:end], str(end) if end < len(items) else ""

    async def Pause(self, request: workflow_pb2.PauseRequest, context: Any) -> workflow_pb2.PauseResponse:
        await self.script.arrive("Pause", request, context)
        return workflow_pb2.PauseResponse()

    async def Resume(self, request: workflow_pb2.ResumeRequest, context: Any) -> workflow_pb2.ResumeResponse:
        await self.script.arrive("Resume", request, context)
        return workflow_pb2.ResumeResponse()

    async def ListPauses(
        self, request: workflow_pb2.ListPausesRequest, context: Any
    ) -> workflow_pb2.ListPausesResponse:
        await self.script.arrive("ListPauses", request, context)
        return workflow_pb2.ListPausesResponse()

    async def RetryRuns(
        self, request: workflow_pb2.RetryRunsRequest, context: Any
    ) -> workflow_pb2.RetryRunsResponse:
        await self.script.arrive("RetryRuns", request, context)
        return workflow_pb2.RetryRunsResponse()

    async def CancelRuns(
        self, request: workflow_pb2.CancelRunsRequest, context: Any
    ) -> workflow_pb2.CancelRunsResponse:
        await self.script.arrive("CancelRuns", request, context)
        return workflow_pb2.CancelRunsResponse()

    async def RequeueSteps(
        self, request: workflow_pb2.RequeueStepsRequest, context: Any
    ) -> workflow_pb2.RequeueStepsResponse:
        await self.script.arrive("RequeueSteps", request, context)
        return workflow_pb2.RequeueStepsResponse()

    async def _run(self, run_id: str, context: Context) -> workflow_pb2.WorkflowRun:
        if run_id not in self.runs:
            await self._not_found("RUN_NOT_FOUND", f"there is no run {run_id}", context)
        return self.runs[run_id]

    async def _step(self, step_run_id: str, context: Context) -> workflow_pb2.StepRun:
        if step_run_id not in self.steps:
            await self._not_found("STEP_NOT_FOUND", f"there is no step {step_run_id}", context)
        return self.steps[step_run_id]

    async def _not_found(self, reason: str, message: str, context: Context) -> None:
        await self.script.fail(Fault(grpc.StatusCode.NOT_FOUND, reason, message), context)


class ScriptedArtifacts(artifact_pb2_grpc.ArtifactServiceServicer):
    """Blobs in memory."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.blobs: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[common_pb2.Digest, bytearray]] = {}
        self.chunk_bytes = 100_000

    def put(self, data: bytes) -> common_pb2.Digest:
        digest = common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
        self.blobs[digest.sha256] = data
        return digest

    async def FindMissingBlobs(
        self, request: artifact_pb2.FindMissingBlobsRequest, context: Any
    ) -> artifact_pb2.FindMissingBlobsResponse:
        await self.script.arrive("FindMissingBlobs", request, context)
        missing = [digest for digest in request.digests if digest.sha256 not in self.blobs]
        return artifact_pb2.FindMissingBlobsResponse(missing=missing)

    async def CreateUpload(
        self, request: artifact_pb2.CreateUploadRequest, context: Any
    ) -> artifact_pb2.CreateUploadResponse:
        await self.script.arrive("CreateUpload", request, context)
        if request.digest.sha256 in self.blobs:
            return artifact_pb2.CreateUploadResponse()
        for upload_id, (digest, data) in self.uploads.items():
            if data and digest == request.digest:  # left by somebody who was cut off
                return artifact_pb2.CreateUploadResponse(upload_id=upload_id)
        upload_id = f"upload-{len(self.uploads) + 1}"
        self.uploads[upload_id] = (request.digest, bytearray())
        return artifact_pb2.CreateUploadResponse(upload_id=upload_id)

    async def WriteBlob(
        self, request_iterator: AsyncIterator[artifact_pb2.WriteBlobRequest], context: Any
    ) -> artifact_pb2.WriteBlobResponse:
        upload_id = ""
        fault: Fault | None = None
        received = 0
        async for request in request_iterator:
            if not upload_id:
                upload_id = request.upload_id
                fault = self.script.note("WriteBlob", request, context)
            if fault is not None and received >= fault.after:
                await self.script.fail(fault, context)
            digest, data = self.uploads[upload_id]
            if request.offset != len(data):
                wrong = Fault(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID", f"offset {request.offset}")
                await self.script.fail(wrong, context)
            data.extend(request.data)
            received += len(request.data)
            if request.finish:
                actual = hashlib.sha256(data).hexdigest()
                if actual != digest.sha256:
                    data.clear()
                    wrong = Fault(grpc.StatusCode.INVALID_ARGUMENT, "ARTIFACT_MISMATCH", "not what was named")
                    await self.script.fail(wrong, context)
                self.blobs[actual] = bytes(data)
                return artifact_pb2.WriteBlobResponse(committed_bytes=len(data), verified=digest)
        return artifact_pb2.WriteBlobResponse(committed_bytes=received)

    async def QueryWriteStatus(
        self, request: artifact_pb2.QueryWriteStatusRequest, context: Any
    ) -> artifact_pb2.QueryWriteStatusResponse:
        await self.script.arrive("QueryWriteStatus", request, context)
        digest, data = self.uploads[request.upload_id]
        return artifact_pb2.QueryWriteStatusResponse(
            committed_bytes=len(data), complete=digest.sha256 in self.blobs
        )

    async def CompleteUpload(
        self, request: artifact_pb2.CompleteUploadRequest, context: Any
    ) -> artifact_pb2.CompleteUploadResponse:
        await self.script.arrive("CompleteUpload", request, context)
        return artifact_pb2.CompleteUploadResponse()

    async def GetDownload(
        self, request: artifact_pb2.GetDownloadRequest, context: Any
    ) -> artifact_pb2.GetDownloadResponse:
        await self.script.arrive("GetDownload", request, context)
        return artifact_pb2.GetDownloadResponse()

    async def ReadBlob(
        self, request: artifact_pb2.ReadBlobRequest, context: Any
    ) -> AsyncIterator[artifact_pb2.ReadBlobResponse]:
        fault = self.script.note("ReadBlob", request, context)
        if request.digest.sha256 not in self.blobs:
            missing = Fault(grpc.StatusCode.NOT_FOUND, "ARTIFACT_NOT_FOUND", "there is no such blob")
            await self.script.fail(missing, context)
        data = self.blobs[request.digest.sha256][request.offset :]
        for start in range(0, len(data), self.chunk_bytes):
            if fault is not None and start >= fault.after:
                await self.script.fail(fault, context)
            yield artifact_pb2.ReadBlobResponse(data=data[start : start + self.chunk_bytes])


@dataclass(frozen=True, slots=True)
class ScriptedServer:
    """The server while it serves."""

    address: str
    script: Script
    workflow: ScriptedWorkflow
    artifacts: ScriptedArtifacts


@asynccontextmanager
async def scripted_server() -> AsyncIterator[ScriptedServer]:
    """Serve on a free port until the block ends."""
    script = Script()
    workflow, artifacts = ScriptedWorkflow(script), ScriptedArtifacts(script)
    server = grpc.aio.server()
    workflow_pb2_grpc.add_WorkflowServiceServicer_to_server(workflow, server)
    artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(artifacts, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield ScriptedServer(f"127.0.0.1:{port}", script, workflow, artifacts)
    finally:
        await server.stop(None)
