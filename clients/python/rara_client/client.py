"""The client: one method for each call of the API, with a deadline, safe retries and typed errors."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import artifact_pb2_grpc, common_pb2, workflow_pb2, workflow_pb2_grpc

from rara_client.blobs import save
from rara_client.bulk import Requests, start_all
from rara_client.calls import AnyQ, AnyR, Calls, UnaryMethod
from rara_client.channel import channel_options, is_loopback, open_channel
from rara_client.cursors import RUN_ENDED, RunCursor, StepCursor
from rara_client.pacing import Pacing
from rara_client.payloads import json_payload
from rara_client.run_ends import MAX_UNTOLD, Call, RunEnd, RunIds, canonical_id, ends_of
from rara_client.security import Security
from rara_client.traces import current_trace
from rara_client.transfers import Transfers
from rara_client.watching import follow

DEFAULT_TARGET: Final = "127.0.0.1:7310"
USER_AGENT: Final = "rara-python/0.1.0"


class Client:
    """A connection to one scheduler; use it as an async context manager.

    Every method raises the faults of `rara_client.errors`. Calls that are safe to repeat (reads, `cancel_run`,
    and what carries an idempotency key) are tried again after `UNAVAILABLE`; no other call ever is.
    `timeout_s` bounds a call together with its retries.

    workflow, artifacts: the generated stubs, for what has no method here; pass them to `call`.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        token: str | None = None,
        pacing: Pacing | None = None,
    ) -> None:
        self._channel = channel
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._calls = Calls(metadata, pacing or Pacing())
        self.workflow = workflow_pb2_grpc.WorkflowServiceStub(channel)
        self.artifacts = artifact_pb2_grpc.ArtifactServiceStub(channel)
        self._transfers = Transfers(self.artifacts, self._calls)

    @classmethod
    def connect(
        cls,
        target: str = DEFAULT_TARGET,
        *,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        security: Security | None = None,
        pacing: Pacing | None = None,
    ) -> Self:
        """A client of the scheduler at HOST:PORT; the connection is made by the first call.

        security: a token and certificates, from files that may change too, in place of `token` and `credentials`;
        `Security.from_environment()` takes what the `rara` command takes. Raises ValueError for a token that would
        leave this machine unencrypted, and for files that cannot be used.
        """
        if security is not None:
            if token or credentials is not None:
                raise ValueError("security comes in place of token and credentials")
            return cls(security.channel(target, channel_options(target, USER_AGENT)), pacing=pacing)
        if token and credentials is None and not is_loopback(target):
            raise ValueError(f"a token for {target} needs TLS: pass credentials")
        channel = open_channel(target, credentials=credentials, user_agent=USER_AGENT)
        return cls(channel, token=token, pacing=pacing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls that are under way end as cancelled."""
        await self._channel.close()

    async def call(
        self,
        method: UnaryMethod[AnyQ, AnyR],
        request: AnyQ,
        *,
        is_repeatable: bool,
        timeout_s: float | None = None,
    ) -> AnyR:
        """Make one call of a generated stub; repeat it after `UNAVAILABLE` if that is safe."""
        return await self._calls.unary(method, request, is_repeatable=is_repeatable, timeout_s=timeout_s)

    # Definitions

    async def register_definition(
        self,
        definition: workflow_pb2.Definition,
        *,
        validate_only: bool = False,
        timeout_s: float | None = None,
    ) -> workflow_pb2.RegisterDefinitionResponse:
        """Store a definition, or find the version that has the same content."""
        request = workflow_pb2.RegisterDefinitionRequest(definition=definition, validate_only=validate_only)
        return await self.call(
            self.workflow.RegisterDefinition, request, is_repeatable=validate_only, timeout_s=timeout_s
        )

    async def get_definition(
        self, definition: str, version: int = 0, *, timeout_s: float | None = None
    ) -> workflow_pb2.Definition:
        """One version; 0: the newest."""
        request = workflow_pb2.GetDefinitionRequest(definition=definition, version=version)
        response = await self.call(
            self.workflow.GetDefinition, request, is_repeatable=True, timeout_s=timeout_s
        )
        return response.definition

    async def list_definitions(
        self, definition: str = "", *, page_size: int = 0, timeout_s: float | None = None
    ) -> AsyncGenerator[workflow_pb2.Definition, None]:
        """The newest version of each definition, or all versions of the one named."""
        request = workflow_pb2.ListDefinitionsRequest(definition=definition, page_size=page_size)
        async for page in self._calls.pages(self.workflow.ListDefinitions, request, timeout_s):
            for item in page.definitions:
                yield item

    # Runs

    async def start_run(
        self,
        definition: str,
        input: object = None,  # noqa: A002 - the API's own name
        *,
        idempotency_key: str = "",
        definition_version: int = 0,
        input_artifacts: Iterable[common_pb2.Artifact] = (),
        run_timeout: timedelta | None = None,
        labels: Mapping[str, str] | None = None,
        trace: common_pb2.TraceContext | None = None,
        timeout_s: float | None = None,
    ) -> workflow_pb2.StartRunResponse:
        """Start a run; with an idempotency key, find the run that the same key and content started.

        input: a JSON value, or a Payload to send as it is; None: no input. trace: None takes that of OpenTelemetry's
        current span, if there is one.
        """
        request = workflow_pb2.StartRunRequest(
            idempotency_key=idempotency_key,
            definition=definition,
            definition_version=definition_version,
            input=_payload(input),
            input_artifacts=input_artifacts,
            run_timeout=_duration(run_timeout),
            labels=labels,
            trace=current_trace() if trace is None else trace,
        )
        return await self.call(
            self.workflow.StartRun, request, is_repeatable=bool(idempotency_key), timeout_s=timeout_s
        )

    async def batch_start_runs(
        self, requests: Iterable[workflow_pb2.StartRunRequest], *, timeout_s: float | None = None
    ) -> workflow_pb2.BatchStartRunsResponse:
        """Start up to 1,000 runs in one transaction: all or none; repeated only if each carries a key.

        A fault about one of them has its `index` in its metadata. Those without a trace take that of OpenTelemetry's
        current span, if there is one.
        """
        request = workflow_pb2.BatchStartRunsRequest(requests=requests)
        if (trace := current_trace()) is not None:
            for each in request.requests:
                if not each.HasField("trace"):
                    each.trace.CopyFrom(trace)
        has_keys = all(each.idempotency_key for each in request.requests)
        return await self.call(
            self.workflow.BatchStartRuns, request, is_repeatable=has_keys, timeout_s=timeout_s
        )

    async def start_runs(
        self,
        requests: Requests,
        *,
        batch_size: int = 500,
        in_flight: int = 4,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[workflow_pb2.StartedRun, None]:
        """Start any number of runs, and tell of each what it started, in order; close it when done.

        Takes requests as it goes, `batch_size` for a call and `in_flight` calls at once: memory stays bounded however
        many there are. A fault ends it; what came before it has been started, what comes after it may have been. Give
        each request an idempotency key, and the whole can be repeated.
        """

        async def start_batch(
            batch: list[workflow_pb2.StartRunRequest],
        ) -> workflow_pb2.BatchStartRunsResponse:
            return await self.batch_start_runs(batch, timeout_s=timeout_s)

        async with aclosing(
            start_all(start_batch, requests, batch_size=batch_size, in_flight=in_flight)
        ) as started:
            async for each in started:
                yield each

    async def get_run(
        self, workflow_run_id: str, *, include_steps: bool = False, timeout_s: float | None = None
    ) -> workflow_pb2.GetRunResponse:
        """A run, and its steps (at most 1,000) if asked for."""
        request = workflow_pb2.GetRunRequest(workflow_run_id=workflow_run_id, include_steps=include_steps)
        return await self.call(self.workflow.GetRun, request, is_repeatable=True, timeout_s=timeout_s)

    async def list_runs(
        self,
        *,
        definition: str = "",
        states: Iterable[workflow_pb2.WorkflowRunState.ValueType] = (),
        labels: Mapping[str, str] | None = None,
        created_from: datetime | None = None,
        created_before: datetime | None = None,
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[workflow_pb2.WorkflowRun, None]:
        """Runs for which all that is given holds, newest first; labels: all of them."""
        request = workflow_pb2.ListRunsRequest(
            definition=definition,
            states=states,
            labels=labels,
            created_from=_timestamp(created_from),
            created_before=_timestamp(created_before),
            page_size=page_size,
        )
        async for page in self._calls.pages(self.workflow.ListRuns, request, timeout_s):
            for item in page.runs:
                yield item

    async def cancel_run(
        self,
        workflow_run_id: str,
        message: str = "",
        *,
        grace: timedelta | None = None,
        timeout_s: float | None = None,
    ) -> workflow_pb2.WorkflowRun:
        """Ask for the run's cancellation; a run that has ended is returned as it is."""
        request = workflow_pb2.CancelRunRequest(
            workflow_run_id=workflow_run_id, message=message, grace=_duration(grace)
        )
        response = await self.call(self.workflow.CancelRun, request, is_repeatable=True, timeout_s=timeout_s)
        return response.run

    async def retry_run(
        self,
        workflow_run_id: str,
        *,
        idempotency_key: str = "",
        step_names: Iterable[str] = (),
        timeout_s: float | None = None,
    ) -> workflow_pb2.RetryRunResponse:
        """Start a new run that repeats what did not succeed, or the steps named and all behind them."""
        request = workflow_pb2.RetryRunRequest(
            workflow_run_id=workflow_run_id, idempotency_key=idempotency_key, step_names=step_names
        )
        return await self.call(
            self.workflow.RetryRun, request, is_repeatable=bool(idempotency_key), timeout_s=timeout_s
        )

    async def watch_run(
        self, workflow_run_id: str, after_revision: int = 0
    ) -> AsyncGenerator[workflow_pb2.WatchRunResponse, None]:
        """Changes of a run and its steps, each once, over dropped connections, until the run has ended.

        after_revision: 0 for a snapshot, its end marked by `snapshot_end`, and then changes. `alive` is left
        out. Changes that are no longer kept one by one come as a snapshot.
        """

        async def fetch() -> workflow_pb2.WorkflowRun:
            return (await self.get_run(workflow_run_id)).run

        cursor = RunCursor(
            lambda after: self.workflow.WatchRun(
                workflow_pb2.WatchRunRequest(workflow_run_id=workflow_run_id, after_revision=after),
                metadata=self._calls.metadata,
            ),
            fetch,
            after_revision,
        )
        async with aclosing(follow(cursor, self._calls.pacing)) as updates:
            async for update in updates:
                yield update

    async def wait_run(
        self, workflow_run_id: str, timeout_s: float | None = None
    ) -> workflow_pb2.WorkflowRun:
        """The run once it has ended. Raises TimeoutError if that takes longer than `timeout_s`."""
        async with asyncio.timeout(timeout_s), aclosing(self.watch_run(workflow_run_id)) as updates:
            async for update in updates:
                if update.WhichOneof("update") == "run" and update.run.state in RUN_ENDED:
                    break
        # A watch leaves out what is large.
        return (await self.get_run(workflow_run_id)).run

    async def watch_runs(
        self, workflow_run_ids: RunIds, *, max_untold: int = MAX_UNTOLD
    ) -> AsyncGenerator[RunEnd, None]:
        """Each of many runs when it has ended, over one stream and dropped connections; close it when done.

        workflow_run_ids: taken as they come, also from an async iterator that goes on for ever; at most `max_untold`
        ahead of what was told. A run that has ended already is told at once, one that does not exist without `run`.
        Ends when all have been told.

            async for end in client.watch_runs(run.workflow_run_id for run in answer.runs):
                print(end.workflow_run_id, end.run and end.run.state)
        """

        def open_call() -> Call:
            return self.workflow.WatchRuns(metadata=self._calls.metadata)

        async with aclosing(
            ends_of(open_call, workflow_run_ids, self._calls.pacing, max_untold=max_untold)
        ) as ends:
            async for end in ends:
                yield end

    async def wait_runs(
        self, workflow_run_ids: Iterable[str], timeout_s: float | None = None
    ) -> list[workflow_pb2.WorkflowRun]:
        """The runs in their order once all have ended, without large payloads.

        Raises NotFound for the first that does not exist, and TimeoutError if it takes longer than `timeout_s`.
        """
        wanted = list(workflow_run_ids)
        found: dict[str, workflow_pb2.WorkflowRun] = {}
        async with asyncio.timeout(timeout_s), aclosing(self.watch_runs(wanted)) as ends:
            async for end in ends:
                if end.run is None:
                    await self.get_run(end.workflow_run_id)  # raises NotFound, as the scheduler words it
                else:
                    found[end.workflow_run_id] = end.run
        return [found[canonical_id(run_id)] for run_id in wanted]

    # Steps

    async def get_step_run(
        self, step_run_id: str, *, timeout_s: float | None = None
    ) -> workflow_pb2.GetStepRunResponse:
        """A step with its attempts, output and manifest."""
        request = workflow_pb2.GetStepRunRequest(step_run_id=step_run_id)
        return await self.call(self.workflow.GetStepRun, request, is_repeatable=True, timeout_s=timeout_s)

    async def list_step_runs(
        self,
        workflow_run_id: str = "",
        *,
        states: Iterable[workflow_pb2.StepRunState.ValueType] = (),
        kind: str = "",
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[workflow_pb2.StepRun, None]:
        """Steps of one run, or of all runs."""
        request = workflow_pb2.ListStepRunsRequest(
            workflow_run_id=workflow_run_id, states=states, kind=kind, page_size=page_size
        )
        async for page in self._calls.pages(self.workflow.ListStepRuns, request, timeout_s):
            for item in page.step_runs:
                yield item

    async def watch_step_run(
        self, step_run_id: str, *, attempt: int = 0, after_sequence: int = 0
    ) -> AsyncGenerator[workflow_pb2.WatchStepRunResponse, None]:
        """The stored events of one attempt, each once, then live ones, with the step's changes between them.

        attempt: 0 for the newest. Ends with the attempt; `alive` is left out.
        """

        async def fetch() -> workflow_pb2.StepRun:
            return (await self.get_step_run(step_run_id)).step_run

        cursor = StepCursor(
            lambda number, after: self.workflow.WatchStepRun(
                workflow_pb2.WatchStepRunRequest(
                    step_run_id=step_run_id, attempt=number, after_sequence=after
                ),
                metadata=self._calls.metadata,
            ),
            fetch,
            attempt=attempt,
            after_sequence=after_sequence,
        )
        async with aclosing(follow(cursor, self._calls.pacing)) as updates:
            async for update in updates:
                yield update

    async def explain_step(
        self, step_run_id: str, *, timeout_s: float | None = None
    ) -> workflow_pb2.ExplainStepResponse:
        """What keeps a step from running or ending, the first in the way first."""
        request = workflow_pb2.ExplainStepRequest(step_run_id=step_run_id)
        return await self.call(self.workflow.ExplainStep, request, is_repeatable=True, timeout_s=timeout_s)

    # Lineage

    async def query_lineage(
        self, request: workflow_pb2.QueryLineageRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[workflow_pb2.LineageEdge, None]:
        """Edges up or down from an artifact, a run or a step: each once, the nearest first, from all pages.

            QueryLineageRequest(artifact=digest, direction=LINEAGE_DIRECTION_DOWNSTREAM, depth=5, page_size=1000)

        An edge says that a step made (`produced`) or used an artifact, and how many steps away that is. What
        happens after the first page was read does not show. `lineage_pages` also tells whether there was too much.
        """
        async for page in self.lineage_pages(request, timeout_s=timeout_s):
            for item in page.edges:
                yield item

    async def lineage_pages(
        self, request: workflow_pb2.QueryLineageRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[workflow_pb2.QueryLineageResponse, None]:
        """The same as it comes, page by page: with the artifact that it began with, and `truncated` on the last."""
        request = workflow_pb2.QueryLineageRequest.FromString(request.SerializeToString())
        async for page in self._calls.pages(self.workflow.QueryLineage, request, timeout_s):
            yield page

    # Executors

    async def list_executors(
        self,
        *,
        states: Iterable[workflow_pb2.ExecutorState.ValueType] = (),
        kind: str = "",
        page_size: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[workflow_pb2.Executor, None]:
        """Executors in these states that serve this kind."""
        request = workflow_pb2.ListExecutorsRequest(states=states, kind=kind, page_size=page_size)
        async for page in self._calls.pages(self.workflow.ListExecutors, request, timeout_s):
            for item in page.executors:
                yield item

    async def drain_executor(
        self, executor_id: str, *, finish_within: timedelta | None = None, timeout_s: float | None = None
    ) -> workflow_pb2.Executor:
        """Give an executor no new job; finish_within: how long the running ones may take, None: no limit."""
        request = workflow_pb2.DrainExecutorRequest(
            executor_id=executor_id, finish_within=_duration(finish_within)
        )
        response = await self.call(
            self.workflow.DrainExecutor, request, is_repeatable=False, timeout_s=timeout_s
        )
        return response.executor

    # Pausing

    async def pause(
        self,
        *,
        kind: str = "",
        definition: str = "",
        reason: str = "",
        allow_unknown: bool = False,
        timeout_s: float | None = None,
    ) -> workflow_pb2.PauseResponse:
        """Have no more steps of a kind, or of a definition's runs, leased until `resume`. What runs goes on.

        Raises RaraError KIND_NOT_FOUND or DEFINITION_NOT_FOUND, unless names that are not known are allowed.
        """
        request = workflow_pb2.PauseRequest(
            **_target(kind, definition), reason=reason, allow_unknown=allow_unknown
        )
        return await self.call(self.workflow.Pause, request, is_repeatable=True, timeout_s=timeout_s)

    async def resume(
        self, *, kind: str = "", definition: str = "", timeout_s: float | None = None
    ) -> workflow_pb2.ResumeResponse:
        """Undo `pause`; without `pause` in the answer, it was not paused."""
        request = workflow_pb2.ResumeRequest(**_target(kind, definition))
        return await self.call(self.workflow.Resume, request, is_repeatable=True, timeout_s=timeout_s)

    async def list_pauses(self, *, timeout_s: float | None = None) -> list[workflow_pb2.Pause]:
        """What is paused, the newest first, with how many steps that holds back."""
        request = workflow_pb2.ListPausesRequest()
        response = await self.call(self.workflow.ListPauses, request, is_repeatable=True, timeout_s=timeout_s)
        return list(response.pauses)

    # By filter

    async def preview_retries(
        self,
        wanted: workflow_pb2.RunFilter,
        as_of: Timestamp | None = None,
        *,
        timeout_s: float | None = None,
    ) -> workflow_pb2.RetryRunsResponse:
        """How many failed or cancelled runs a filter means that were never retried, with a few of them.

        Without states failed ones. as_of: what ended later is left out; without it, what ends after now.
        """
        request = workflow_pb2.RetryRunsRequest(filter=wanted, as_of=as_of, preview=True)
        return await self.call(self.workflow.RetryRuns, request, is_repeatable=True, timeout_s=timeout_s)

    async def retry_runs(
        self, wanted: workflow_pb2.RunFilter, as_of: Timestamp, *, timeout_s: float | None = None
    ) -> AsyncGenerator[workflow_pb2.BulkOutcome, None]:
        """Retry them, a set at a time; as_of: from the preview. Doing so again retries none of them again."""
        request = workflow_pb2.RetryRunsRequest(filter=wanted, as_of=as_of)
        async for page in self._calls.pages(self.workflow.RetryRuns, request, timeout_s):
            for item in page.outcomes:
                yield item

    async def preview_cancels(
        self,
        wanted: workflow_pb2.RunFilter,
        as_of: Timestamp | None = None,
        *,
        timeout_s: float | None = None,
    ) -> workflow_pb2.CancelRunsResponse:
        """How many open runs a filter means, with a few of them."""
        request = workflow_pb2.CancelRunsRequest(filter=wanted, as_of=as_of, preview=True)
        return await self.call(self.workflow.CancelRuns, request, is_repeatable=True, timeout_s=timeout_s)

    async def cancel_runs(
        self,
        wanted: workflow_pb2.RunFilter,
        as_of: Timestamp,
        message: str = "",
        *,
        grace: timedelta | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[workflow_pb2.BulkOutcome, None]:
        """Ask for their cancellation, a set at a time; as_of: from the preview."""
        request = workflow_pb2.CancelRunsRequest(
            filter=wanted, as_of=as_of, message=message, grace=_duration(grace)
        )
        async for page in self._calls.pages(self.workflow.CancelRuns, request, timeout_s):
            for item in page.outcomes:
                yield item

    async def preview_requeues(
        self,
        wanted: workflow_pb2.WaitingStepFilter,
        as_of: Timestamp | None = None,
        *,
        timeout_s: float | None = None,
    ) -> workflow_pb2.RequeueStepsResponse:
        """How many steps that wait for their next attempt a filter means, with a few of them."""
        request = workflow_pb2.RequeueStepsRequest(filter=wanted, as_of=as_of, preview=True)
        return await self.call(self.workflow.RequeueSteps, request, is_repeatable=True, timeout_s=timeout_s)

    async def requeue_steps(
        self, wanted: workflow_pb2.WaitingStepFilter, as_of: Timestamp, *, timeout_s: float | None = None
    ) -> AsyncGenerator[workflow_pb2.BulkOutcome, None]:
        """End their waits, a set at a time; as_of: from the preview."""
        request = workflow_pb2.RequeueStepsRequest(filter=wanted, as_of=as_of)
        async for page in self._calls.pages(self.workflow.RequeueSteps, request, timeout_s):
            for item in page.outcomes:
                yield item

    # Artifacts

    async def upload_blob(self, source: Path | bytes, *, media_type: str = "") -> common_pb2.Digest:
        """Store a file or bytes, unless they are stored already; their digest, to name them by."""
        return await self._transfers.upload(source, media_type)

    def download_blob(self, digest: common_pb2.Digest) -> AsyncGenerator[bytes, None]:
        """The blob in pieces. Raises ArtifactMismatch, at the end, if the bytes are not the right ones."""
        return self._transfers.download(digest)

    async def save_blob(self, digest: common_pb2.Digest, destination: Path) -> None:
        """Download to a file, which appears whole and checked or not at all."""
        await save(self._transfers.download(digest), destination)


def _target(kind: str, definition: str) -> dict[str, str]:
    """Raises ValueError: it is one or the other."""
    if bool(kind) == bool(definition):
        raise ValueError("name either a kind or a definition")
    return {"kind": kind} if kind else {"definition": definition}


def _payload(value: object) -> common_pb2.Payload | None:
    if value is None or isinstance(value, common_pb2.Payload):
        return value
    return json_payload(value)


def _duration(value: timedelta | None) -> Duration | None:
    if value is None:
        return None
    duration = Duration()
    duration.FromTimedelta(value)
    return duration


def _timestamp(value: datetime | None) -> Timestamp | None:
    """Raises ValueError for an instant without a zone: protobuf would take it for UTC."""
    if value is None:
        return None
    if value.tzinfo is None:
        raise ValueError("an instant needs a time zone")
    timestamp = Timestamp()
    timestamp.FromDatetime(value)
    return timestamp
