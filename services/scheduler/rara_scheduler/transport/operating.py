"""The calls of WorkflowService that operators act on many steps with."""

from collections.abc import Sequence
from typing import Any, Final

from rara.v1 import workflow_pb2, workflow_pb2_grpc

from rara_scheduler.bulk import Bulk
from rara_scheduler.domain import names
from rara_scheduler.domain.bulk import CANCELLABLE, RETRYABLE
from rara_scheduler.domain.errors import field_invalid
from rara_scheduler.domain.pause import MAX_REASON, Target
from rara_scheduler.domain.payload import clean_text
from rara_scheduler.domain.secrets import redact_text
from rara_scheduler.pausing import Pausing
from rara_scheduler.store.reads import LEAN_BYTES, Reads
from rara_scheduler.transport import bulk, convert, convert_requests
from rara_scheduler.transport.auth import bearer
from rara_scheduler.transport.status import answers

Context = Any  # as in transport.workflow
_MAX_REASON_BYTES: Final = 4 * MAX_REASON


class OperatorCalls(workflow_pb2_grpc.WorkflowServiceServicer):
    """Thin, as the servicer that it is part of."""

    _pausing: Pausing
    _bulk: Bulk
    _reads: Reads

    @answers
    async def Pause(self, request: workflow_pb2.PauseRequest, context: Context) -> workflow_pb2.PauseResponse:
        target = _target(request)
        if len(request.reason) > MAX_REASON:
            raise field_invalid("reason", f"must be at most {MAX_REASON} characters")
        pause, already = await self._pausing.pause(
            target,
            reason=clean_text(redact_text(request.reason), _MAX_REASON_BYTES)[:MAX_REASON],
            paused_by=bearer() or "",
            allow_unknown=request.allow_unknown,
        )
        return workflow_pb2.PauseResponse(pause=convert.pause(pause), already_paused=already)

    @answers
    async def Resume(
        self, request: workflow_pb2.ResumeRequest, context: Context
    ) -> workflow_pb2.ResumeResponse:
        ended = await self._pausing.resume(_target(request), resumed_by=bearer() or "")
        return workflow_pb2.ResumeResponse(pause=None if ended is None else convert.pause(ended))

    @answers
    async def ListPauses(
        self, request: workflow_pb2.ListPausesRequest, context: Context
    ) -> workflow_pb2.ListPausesResponse:
        found = await self._pausing.all()
        return workflow_pb2.ListPausesResponse(pauses=[convert.pause(each, load) for each, load in found])

    @answers
    async def RetryRuns(
        self, request: workflow_pb2.RetryRunsRequest, context: Context
    ) -> workflow_pb2.RetryRunsResponse:
        wanted = bulk.run_selection(request.filter, RETRYABLE)
        size, as_of, after = bulk.bulk_size(request.page_size), bulk.as_of(request), bulk.place_of(request)
        if request.preview or as_of is None:
            seen = await self._bulk.preview_retries(wanted, as_of)
            return workflow_pb2.RetryRunsResponse(
                count=seen.count,
                more=seen.more,
                sample=await self._runs(seen.sample),
                as_of=convert.timestamp(seen.as_of),
                state_counts=bulk.state_counts(seen.states),
            )
        done, end = await self._bulk.retry_runs(wanted, as_of, after, size, by=bearer() or "")
        return workflow_pb2.RetryRunsResponse(
            outcomes=bulk.outcomes(done), next_page_token=bulk.token_of(request, end)
        )

    @answers
    async def CancelRuns(
        self, request: workflow_pb2.CancelRunsRequest, context: Context
    ) -> workflow_pb2.CancelRunsResponse:
        wanted = bulk.run_selection(request.filter, CANCELLABLE)
        message, grace_s = convert_requests.cancel_terms(request)
        size, as_of, after = bulk.bulk_size(request.page_size), bulk.as_of(request), bulk.place_of(request)
        if request.preview or as_of is None:
            seen = await self._bulk.preview_cancels(wanted, as_of)
            return workflow_pb2.CancelRunsResponse(
                count=seen.count,
                more=seen.more,
                sample=await self._runs(seen.sample),
                as_of=convert.timestamp(seen.as_of),
            )
        done, end = await self._bulk.cancel_runs(
            wanted, as_of, after, size, message=message, grace_s=grace_s, by=bearer() or ""
        )
        return workflow_pb2.CancelRunsResponse(
            outcomes=bulk.outcomes(done), next_page_token=bulk.token_of(request, end)
        )

    @answers
    async def RequeueSteps(
        self, request: workflow_pb2.RequeueStepsRequest, context: Context
    ) -> workflow_pb2.RequeueStepsResponse:
        wanted = bulk.step_selection(request.filter)
        size, as_of, after = bulk.bulk_size(request.page_size), bulk.as_of(request), bulk.place_of(request)
        if request.preview or as_of is None:
            seen = await self._bulk.preview_requeues(wanted, as_of)
            steps = await self._reads.steps(seen.sample, LEAN_BYTES)
            return workflow_pb2.RequeueStepsResponse(
                count=seen.count,
                more=seen.more,
                sample=[convert.step_run(each, lean=True) for each in steps],
                as_of=convert.timestamp(seen.as_of),
            )
        done, end = await self._bulk.requeue_steps(wanted, as_of, after, size, by=bearer() or "")
        return workflow_pb2.RequeueStepsResponse(
            outcomes=bulk.outcomes(done), next_page_token=bulk.token_of(request, end)
        )

    async def _runs(self, ids: Sequence[str]) -> list[workflow_pb2.WorkflowRun]:
        """A sample of runs, as lists show them."""
        return [convert.workflow_run(each, lean=True) for each in await self._reads.lean_runs(ids)]


def _target(request: workflow_pb2.PauseRequest | workflow_pb2.ResumeRequest) -> Target:
    """Raises FIELD_INVALID: a whole name, of one or the other."""
    match request.WhichOneof("target"):
        case "kind":
            _check("kind", request.kind, names.KIND)
            return Target(kind=request.kind)
        case "definition":
            _check("definition", request.definition, names.DEFINITION)
            return Target(definition=request.definition)
        case _:
            raise field_invalid("target", "is empty; name a kind or a definition")


def _check(field: str, name: str, rule: names.Rule) -> None:
    if "*" in name or "?" in name:
        raise field_invalid(field, "is a pattern; one whole name is paused at a time, without * or ?")
    said = rule.refuses(name)
    if said is not None:
        raise field_invalid(field, said)
