"""WorkflowService, thin: convert, call, convert back."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol, assert_never

from google.protobuf.message import Message
from rara.v1 import common_pb2, job_pb2, workflow_pb2

from rara_scheduler.bulk import Bulk
from rara_scheduler.domain import ids
from rara_scheduler.domain.errors import Fault, field_invalid
from rara_scheduler.domain.run import TERMINAL
from rara_scheduler.domain.start_command import MAX_BATCH, StartCommand, of_request
from rara_scheduler.domain.views import RunView, StepView
from rara_scheduler.pausing import Pausing
from rara_scheduler.run_ends import RunEnds
from rara_scheduler.store.database import DataRefused
from rara_scheduler.store.definitions import DefinitionStore
from rara_scheduler.store.explain import Explainer
from rara_scheduler.store.lineage import LineageReads, Start
from rara_scheduler.store.reads import LEAN_BYTES, Reads
from rara_scheduler.store.retry_run import RunRetrier
from rara_scheduler.store.start import RunStarter
from rara_scheduler.telemetry.port import SILENT, UNTRACED, Metrics, Tracing
from rara_scheduler.transport import convert, convert_requests, ends, lineage
from rara_scheduler.transport.operating import OperatorCalls
from rara_scheduler.transport.page_token import decode_token, invalid_token, page_size
from rara_scheduler.transport.paging import fit_steps, in_batches, page
from rara_scheduler.transport.status import answers, streams
from rara_scheduler.watching import Alive, RunUpdate, SnapshotEnd, StepUpdate, StoredStepEvent, Watching

Context = Any  # grpc.aio's generic context differs between its stubs and its run-time class
_VERSION = re.compile(r"[0-9]{1,9}")
_BREATH = 50  # requests of a batch that are read without a pause


class Canceller(Protocol):
    """What acts on executors and runs beyond reading: implemented by the engine."""

    async def cancel_run(self, workflow_run_id: str, *, message: str, grace_s: float | None) -> None: ...

    async def drain_executor(self, executor_id: str, *, finish_within_s: float | None) -> bool: ...


class WorkflowServicer(OperatorCalls):
    def __init__(
        self,
        *,
        definitions: DefinitionStore,
        starter: RunStarter,
        retrier: RunRetrier,
        reads: Reads,
        lineage_reads: LineageReads,
        watching: Watching,
        run_ends: RunEnds,
        explainer: Explainer,
        canceller: Canceller,
        pausing: Pausing,
        bulk: Bulk,
        max_payload_bytes: int,
        tracing: Tracing = UNTRACED,
        metrics: Metrics = SILENT,
    ) -> None:
        self._tracing = tracing
        self._metrics = metrics
        self._definitions = definitions
        self._starter = starter
        self._retrier = retrier
        self._reads = reads
        self._lineage = lineage_reads
        self._watching = watching
        self._run_ends = run_ends
        self._explainer = explainer
        self._canceller = canceller
        self._pausing = pausing
        self._bulk = bulk
        self._max_payload_bytes = max_payload_bytes

    # ------------------------------------------------------------ definitions

    @answers
    async def RegisterDefinition(
        self, request: workflow_pb2.RegisterDefinitionRequest, context: Context
    ) -> workflow_pb2.RegisterDefinitionResponse:
        message, existed = await self._definitions.register(
            request.definition, validate_only=request.validate_only
        )
        return workflow_pb2.RegisterDefinitionResponse(definition=message, already_existed=existed)

    @answers
    async def GetDefinition(
        self, request: workflow_pb2.GetDefinitionRequest, context: Context
    ) -> workflow_pb2.GetDefinitionResponse:
        name = convert_requests.definition_name(request.definition)
        if request.version < 0:
            raise field_invalid("version", "must not be negative; 0 is the newest")
        message, _ = await self._definitions.get(name, request.version)
        response = workflow_pb2.GetDefinitionResponse(definition=message)
        await self._tell_paused([response.definition])
        return response

    @answers
    async def ListDefinitions(
        self, request: workflow_pb2.ListDefinitionsRequest, context: Context
    ) -> workflow_pb2.ListDefinitionsResponse:
        size = page_size(request.page_size)
        name = convert_requests.definition_name(request.definition, optional=True)
        position = decode_token(request, request.page_token, 1)
        if name:
            below = _version_position(position)

            async def versions(
                last: workflow_pb2.Definition | None, limit: int
            ) -> list[workflow_pb2.Definition]:
                return await self._definitions.versions(
                    name, below=below if last is None else last.version, limit=limit
                )

            found = await in_batches(versions, size, lambda each: each.ByteSize())
        else:
            first = position[0] if position else ""

            async def newest(
                last: workflow_pb2.Definition | None, limit: int
            ) -> list[workflow_pb2.Definition]:
                return await self._definitions.newest(
                    after=first if last is None else last.definition, limit=limit
                )

            found = await in_batches(newest, size, lambda each: each.ByteSize())
        rows, token = page(
            request,
            found,
            size,
            lambda each: convert.lean_definition(each, LEAN_BYTES),
            lambda each: (str(each.version) if name else each.definition,),
        )
        await self._tell_paused(rows)
        return workflow_pb2.ListDefinitionsResponse(definitions=rows, next_page_token=token)

    async def _tell_paused(self, definitions: Sequence[workflow_pb2.Definition]) -> None:
        pauses = await self._pausing.of_definitions()
        for definition in definitions:
            if definition.definition in pauses:
                definition.pause.CopyFrom(convert.pause(pauses[definition.definition]))

    # ------------------------------------------------------------ runs

    @answers
    async def StartRun(
        self, request: workflow_pb2.StartRunRequest, context: Context
    ) -> workflow_pb2.StartRunResponse:
        started = await self._starter.start(self._start_command(request))
        if not started.already:
            self._metrics.run_started()
        view = started.view
        run = await self._run(started.run_id) if view is None else convert.workflow_run(view)
        return workflow_pb2.StartRunResponse(run=run, already_started=started.already)

    @answers
    async def BatchStartRuns(
        self, request: workflow_pb2.BatchStartRunsRequest, context: Context
    ) -> workflow_pb2.BatchStartRunsResponse:
        if not 1 <= len(request.requests) <= MAX_BATCH:
            raise field_invalid("requests", f"must be 1 to {MAX_BATCH}, not {len(request.requests)}")
        commands = []
        for index, each in enumerate(request.requests):
            try:
                commands.append(self._start_command(each, keeps_trace=True))
            except Fault as fault:
                raise of_request(index, fault) from fault
            if index % _BREATH == _BREATH - 1:
                await asyncio.sleep(0)  # sessions and heartbeats are served by the same loop
        started = await self._starter.start_batch(commands)
        for run in started:
            if not run.already:
                self._metrics.run_started()
        return workflow_pb2.BatchStartRunsResponse(
            runs=[
                workflow_pb2.StartedRun(workflow_run_id=run.run_id, already_started=run.already)
                for run in started
            ]
        )

    def _start_command(
        self, request: workflow_pb2.StartRunRequest, *, keeps_trace: bool = False
    ) -> StartCommand:
        """keeps_trace: a trace that the request names is not continued by the span of this call."""
        command = convert_requests.start_command(request, self._max_payload_bytes)
        if keeps_trace and command.traceparent:
            return command
        traceparent, tracestate = self._tracing.run_context(command.traceparent, command.tracestate)
        return replace(command, traceparent=traceparent, tracestate=tracestate)

    @answers
    async def GetRun(
        self, request: workflow_pb2.GetRunRequest, context: Context
    ) -> workflow_pb2.GetRunResponse:
        run_id = ids.run_id(request.workflow_run_id)
        if not request.include_steps:
            return workflow_pb2.GetRunResponse(run=await self._run(run_id))
        run, views = await self._reads.get_run_with_steps(run_id)
        steps = [convert.step_run(each, lean=True) for each in views]
        fit_steps(steps, "manifest", "progress", "output", "error")
        return workflow_pb2.GetRunResponse(run=convert.workflow_run(run, lean=True), steps=steps)

    @answers
    async def ListRuns(
        self, request: workflow_pb2.ListRunsRequest, context: Context
    ) -> workflow_pb2.ListRunsResponse:
        size = page_size(request.page_size)
        wanted = convert_requests.run_filter(request)
        position = decode_token(request, request.page_token, 2)
        after = None
        if position is not None:
            try:
                after = datetime.fromisoformat(position[0]), ids.run_id(position[1])
            except (ValueError, Fault):
                raise invalid_token() from None
        found = await self._reads.list_runs(wanted, after=after, limit=size + 1)
        rows, token = page(
            request,
            found,
            size,
            lambda each: convert.workflow_run(each, lean=True),
            lambda each: (each.created_at.isoformat(), each.workflow_run_id),
        )
        return workflow_pb2.ListRunsResponse(runs=rows, next_page_token=token)

    @answers
    async def CancelRun(
        self, request: workflow_pb2.CancelRunRequest, context: Context
    ) -> workflow_pb2.CancelRunResponse:
        run_id = ids.run_id(request.workflow_run_id)
        message, grace_s = convert_requests.cancel_terms(request)
        run = await self._reads.get_run(run_id)
        if run.state not in TERMINAL:
            await self._canceller.cancel_run(run_id, message=message, grace_s=grace_s)
            run = await self._reads.get_run(run_id)
        return workflow_pb2.CancelRunResponse(run=convert.workflow_run(run))

    @answers
    async def RetryRun(
        self, request: workflow_pb2.RetryRunRequest, context: Context
    ) -> workflow_pb2.RetryRunResponse:
        run_id = ids.run_id(request.workflow_run_id)
        key = convert_requests.retry_key(request)
        new_id, already_started = await self._retrier.retry(
            run_id, tuple(request.step_names), idempotency_key=key
        )
        if not already_started:
            self._metrics.run_started()
        return workflow_pb2.RetryRunResponse(run=await self._run(new_id), already_started=already_started)

    @streams
    async def WatchRun(
        self, request: workflow_pb2.WatchRunRequest, context: Context
    ) -> AsyncIterator[workflow_pb2.WatchRunResponse]:
        run_id = ids.run_id(request.workflow_run_id)
        async with aclosing(self._watching.run(run_id, request.after_revision)) as updates:
            async for update in updates:
                yield _run_update(update)

    @streams
    async def WatchRuns(
        self, requests: AsyncIterator[workflow_pb2.WatchRunsRequest], context: Context
    ) -> AsyncIterator[workflow_pb2.WatchRunsResponse]:
        with self._run_ends.watch() as watch:
            intake = asyncio.create_task(ends.take(requests, watch), name="runs to wait for")
            try:
                async with aclosing(watch.news()) as news:
                    async for told in news:
                        for response in ends.responses(told):
                            yield response
            finally:
                intake.cancel()
                await asyncio.wait({intake})

    # ------------------------------------------------------------ steps

    @answers
    async def GetStepRun(
        self, request: workflow_pb2.GetStepRunRequest, context: Context
    ) -> workflow_pb2.GetStepRunResponse:
        step, attempts = await self._reads.get_step_with_attempts(ids.step_id(request.step_run_id))
        return workflow_pb2.GetStepRunResponse(
            step_run=convert.step_run(step), attempts=[convert.step_attempt(each) for each in attempts]
        )

    @answers
    async def ListStepRuns(
        self, request: workflow_pb2.ListStepRunsRequest, context: Context
    ) -> workflow_pb2.ListStepRunsResponse:
        size = page_size(request.page_size)
        run_id = ids.run_id(request.workflow_run_id) if request.workflow_run_id else None
        wanted = convert_requests.step_filter(request, run_id)
        below = _id_position(request, request.page_token)
        found = await self._reads.list_steps(wanted, below=below, limit=size + 1)
        rows, token = page(
            request,
            found,
            size,
            lambda each: convert.step_run(each, lean=True),
            lambda each: (each.step_run_id,),
        )
        return workflow_pb2.ListStepRunsResponse(step_runs=rows, next_page_token=token)

    @streams
    async def WatchStepRun(
        self, request: workflow_pb2.WatchStepRunRequest, context: Context
    ) -> AsyncIterator[workflow_pb2.WatchStepRunResponse]:
        step_id = ids.step_id(request.step_run_id)
        watch = self._watching.step(step_id, request.attempt, request.after_sequence)
        async with aclosing(watch) as updates:
            async for update in updates:
                yield _step_update(update)

    @answers
    async def ExplainStep(
        self, request: workflow_pb2.ExplainStepRequest, context: Context
    ) -> workflow_pb2.ExplainStepResponse:
        step_id = ids.step_id(request.step_run_id)
        obstacles = await self._explainer.obstacles(step_id)
        step = await self._reads.get_step(step_id)
        return workflow_pb2.ExplainStepResponse(
            step_run=convert.step_run(step, lean=True),
            obstacles=[convert.obstacle(each) for each in obstacles],
        )

    # ------------------------------------------------------------ lineage and executors

    @answers
    async def QueryLineage(
        self, request: workflow_pb2.QueryLineageRequest, context: Context
    ) -> workflow_pb2.QueryLineageResponse:
        size = page_size(request.page_size)
        wanted = lineage.query_of(request)
        after = lineage.position_of(request)
        start = wanted.start
        began: common_pb2.Digest | None = None
        if request.HasField("artifact_prefix"):
            sha256, size_bytes = await self._lineage.digest_beginning(start.what)
            start, began = Start("artifact", sha256), common_pb2.Digest(sha256=sha256, size_bytes=size_bytes)
        elif request.HasField("artifact"):
            began = common_pb2.Digest(sha256=start.what)
        try:
            found = await self._lineage.page(
                start, upstream=wanted.upstream, depth=wanted.depth, after=after, size=size
            )
        except DataRefused:  # nothing else that was sent can be: it was checked
            raise invalid_token() from None
        if began is not None and not began.size_bytes:
            began.size_bytes = await self._lineage.size_of(start.what, found.edges)
        rows, token = lineage.lineage_page(request, found, size)
        return workflow_pb2.QueryLineageResponse(
            edges=rows, next_page_token=token, truncated=found.truncated and not token, artifact=began
        )

    @answers
    async def ListExecutors(
        self, request: workflow_pb2.ListExecutorsRequest, context: Context
    ) -> workflow_pb2.ListExecutorsResponse:
        size = page_size(request.page_size)
        wanted = convert_requests.executor_filter(request)
        below = _id_position(request, request.page_token)
        found = await self._reads.list_executors(wanted, below=below, limit=size + 1)
        rows, token = page(request, found, size, convert.executor, lambda each: (each.executor_id,))
        return workflow_pb2.ListExecutorsResponse(executors=rows, next_page_token=token)

    @answers
    async def DrainExecutor(
        self, request: workflow_pb2.DrainExecutorRequest, context: Context
    ) -> workflow_pb2.DrainExecutorResponse:
        executor_id = ids.executor_id(request.executor_id)
        within_s = convert_requests.drain_bound(request)
        if not await self._canceller.drain_executor(executor_id, finish_within_s=within_s):
            raise ids.executor_not_found(executor_id)
        return workflow_pb2.DrainExecutorResponse(
            executor=convert.executor(await self._reads.get_executor(executor_id))
        )

    async def _run(self, workflow_run_id: str) -> workflow_pb2.WorkflowRun:
        return convert.workflow_run(await self._reads.get_run(workflow_run_id))


def _version_position(position: Sequence[str] | None) -> int | None:
    """The version that a page of one definition begins below; None: the first page."""
    if position is None:
        return None
    if not _VERSION.fullmatch(position[0]):
        raise invalid_token()
    return int(position[0])


def _id_position(request: Message, token: str) -> str | None:
    """The id that a page begins below; None: the first page."""
    position = decode_token(request, token, 1)
    if position is None:
        return None
    try:
        return ids.step_id(position[0])
    except Fault:
        raise invalid_token() from None


def _run_update(update: RunUpdate) -> workflow_pb2.WatchRunResponse:
    response = workflow_pb2.WatchRunResponse(revision=update.revision)
    match update.update:
        case SnapshotEnd():
            response.snapshot_end.SetInParent()
        case Alive():
            response.alive.SetInParent()
        case RunView() as run:
            response.run.CopyFrom(convert.workflow_run(run, lean=True))
        case StepView() as step:
            response.step_run.CopyFrom(convert.step_run(step, lean=True))
    return response


def _step_update(update: StepUpdate) -> workflow_pb2.WatchStepRunResponse:
    match update:
        case Alive():
            return workflow_pb2.WatchStepRunResponse(alive=workflow_pb2.Alive())
        case StepView():
            return workflow_pb2.WatchStepRunResponse(step_run=convert.step_run(update, lean=True))
        case StoredStepEvent():
            return workflow_pb2.WatchStepRunResponse(event=_event(update))
        case _:
            assert_never(update)


def _event(stored: StoredStepEvent) -> job_pb2.ProgressEvent:
    """Whole again: see `read_event` for what is not stored of it."""
    event = job_pb2.ProgressEvent.FromString(stored.event.body)
    event.sequence = stored.event.sequence
    event.lease.step_run_id = stored.step_run_id
    event.lease.attempt = stored.attempt
    event.lease.lease_token = stored.mark.lease_token
    if event.WhichOneof("event") == "accepted":
        event.accepted.executor_id = stored.mark.executor_id
        event.accepted.executor_name = stored.mark.executor_name
    return event
