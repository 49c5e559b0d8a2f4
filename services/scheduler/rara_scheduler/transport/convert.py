"""Values of the domain as messages of the API."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, dispatch_pb2, job_pb2, workflow_pb2

from rara_scheduler.domain.errors import StepError
from rara_scheduler.domain.lineage import LineageEdge
from rara_scheduler.domain.pause import Pause, PauseLoad
from rara_scheduler.domain.payload import clean_text
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.step import StepState
from rara_scheduler.domain.views import (
    ArtifactView,
    AttemptView,
    CancelView,
    ExecutorState,
    ExecutorView,
    HandlerView,
    Obstacle,
    PayloadView,
    RunView,
    StepView,
)

RUN_STATES: Final = {
    state: workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{state.name}") for state in RunState
}
STEP_STATES: Final = {
    state: workflow_pb2.StepRunState.Value(f"STEP_RUN_STATE_{state.name}") for state in StepState
}
EXECUTOR_STATES: Final = {
    state: workflow_pb2.ExecutorState.Value(f"EXECUTOR_STATE_{state.name}") for state in ExecutorState
}

_LEAN_TEXT_BYTES: Final = 1024  # of a message where stack traces are left out


def timestamp(instant: datetime | None) -> Timestamp | None:
    if instant is None:
        return None
    made = Timestamp()
    made.FromDatetime(instant)
    return made


def duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    made = Duration()
    made.FromNanoseconds(round(seconds * 1_000_000) * 1000)
    return made


def _payload(view: PayloadView | None) -> common_pb2.Payload | None:
    if view is None:
        return None
    if view.data is None:
        return common_pb2.Payload(omitted_bytes=view.size_bytes)
    return common_pb2.Payload(data=view.data)


def _artifact(view: ArtifactView) -> common_pb2.Artifact:
    return common_pb2.Artifact(
        name=view.name,
        digest=common_pb2.Digest(sha256=view.sha256, size_bytes=view.size_bytes),
        media_type=view.media_type,
        type=view.type,
        inline=view.inline or b"",
        metadata=_payload(view.metadata),
        derived_from=[
            common_pb2.Digest(sha256=sha256, size_bytes=size_bytes)
            for sha256, size_bytes in view.derived_from
        ],
    )


def _manifest(views: Sequence[ArtifactView] | None) -> common_pb2.ArtifactManifest | None:
    if views is None:
        return None
    return common_pb2.ArtifactManifest(artifacts=[_artifact(view) for view in views])


def _error(
    error: StepError | None, *, lean: bool, artifacts: Sequence[ArtifactView] = ()
) -> job_pb2.JobError | None:
    """lean: without stack trace, and without long texts."""
    if error is None:
        return None
    made = job_pb2.JobError(
        code=error.code,
        message=clean_text(error.message, _LEAN_TEXT_BYTES) if lean else error.message,
        retry_after=duration(error.retry_after_s),
        stack_trace="" if lean else error.stack_trace,
        manifest=_manifest(artifacts) if artifacts else None,
    )
    if error.retryable is not None:
        made.retryable = error.retryable
    if error.details is not None:
        data = error.details.encode("utf-8")
        large = lean and len(data) > _LEAN_TEXT_BYTES
        made.details.CopyFrom(
            common_pb2.Payload(omitted_bytes=len(data)) if large else common_pb2.Payload(data=data)
        )
    if error.runner_exit:
        # A set-but-empty message says: the runner ended, nobody knows how.
        made.runner_exit.SetInParent()
        for name, value in error.runner_exit.items():
            if value is not None and name in job_pb2.RunnerExit.DESCRIPTOR.fields_by_name:
                setattr(made.runner_exit, name, value)
    return made


def workflow_run(view: RunView, *, lean: bool = False) -> workflow_pb2.WorkflowRun:
    return workflow_pb2.WorkflowRun(
        workflow_run_id=view.workflow_run_id,
        definition=view.definition,
        definition_version=view.definition_version,
        state=RUN_STATES[view.state],
        input=_payload(view.input),
        input_artifacts=[_artifact(each) for each in view.input_artifacts],
        step_counts=view.step_counts,
        failed_step_run_id=view.failed_step_run_id or "",
        error=_error(view.error, lean=lean),
        labels=view.labels,
        revision=view.revision,
        retry_of_workflow_run_id=view.retry_of_workflow_run_id or "",
        created_at=timestamp(view.created_at),
        started_at=timestamp(view.started_at),
        ended_at=timestamp(view.ended_at),
        deadline=timestamp(view.deadline),
        cancel_requested_at=timestamp(view.cancel_requested_at),
    )


def _cancel(view: CancelView | None) -> workflow_pb2.CancelFacts | None:
    if view is None:
        return None
    return workflow_pb2.CancelFacts(
        reason=view.reason,
        requested_at=timestamp(view.requested_at),
        delivered_at=timestamp(view.delivered_at),
        confirmed_at=timestamp(view.confirmed_at),
    )


def _progress(body: bytes | None, *, lean: bool) -> job_pb2.JobProgress | None:
    if body is None:
        return None
    progress = job_pb2.ProgressEvent.FromString(body).progress
    if lean and len(progress.checkpoint.data) > _LEAN_TEXT_BYTES:
        size = len(progress.checkpoint.data)
        progress.checkpoint.CopyFrom(common_pb2.Payload(omitted_bytes=size))
    return progress


def _handler(view: HandlerView | None) -> workflow_pb2.Handler | None:
    if view is None:
        return None
    return workflow_pb2.Handler(
        kind_version=view.kind_version, executor_kind=view.executor_kind, sdk=view.sdk
    )


def step_run(view: StepView, *, lean: bool = False) -> workflow_pb2.StepRun:
    return workflow_pb2.StepRun(
        step_run_id=view.step_run_id,
        workflow_run_id=view.workflow_run_id,
        step_name=view.step_name,
        state=STEP_STATES[view.state],
        reason=view.reason,
        attempt=view.attempt,
        failures=view.failures,
        max_attempts=view.max_attempts,
        executor_kind=view.executor_kind,
        kind=view.kind,
        kind_version=view.kind_version,
        executor_id=view.executor_id or "",
        executor_name=view.executor_name,
        progress=_progress(view.progress, lean=lean),
        last_sequence=view.last_sequence,
        output=_payload(view.output),
        manifest=_manifest(view.manifest),
        error=_error(view.error, lean=lean),
        cancel=_cancel(view.cancel),
        available_at=timestamp(view.available_at),
        lease_expires_at=timestamp(view.lease_expires_at),
        started_at=timestamp(view.started_at),
        ended_at=timestamp(view.ended_at),
        deadline=timestamp(view.deadline),
        handler=_handler(view.handler),
    )


def step_attempt(view: AttemptView) -> workflow_pb2.StepAttempt:
    return workflow_pb2.StepAttempt(
        lease=job_pb2.Lease(step_run_id=view.step_run_id, lease_token=view.lease_token, attempt=view.attempt),
        executor_id=view.executor_id,
        executor_name=view.executor_name,
        reason=view.reason,
        spent=view.spent,
        # Many attempts share one answer, the last one's error stands whole in the step.
        error=_error(view.error, lean=True, artifacts=view.error_artifacts),
        last_sequence=view.last_sequence,
        gaps=view.gaps,
        leased_at=timestamp(view.leased_at),
        accepted_at=timestamp(view.accepted_at),
        started_at=timestamp(view.started_at),
        ended_at=timestamp(view.ended_at),
        handler=_handler(view.handler),
    )


def executor(view: ExecutorView) -> workflow_pb2.Executor:
    return workflow_pb2.Executor(
        executor_id=view.executor_id,
        executor_name=view.executor_name,
        executor_kind=view.executor_kind,
        sdk=view.sdk,
        capabilities=[
            dispatch_pb2.Capability(
                kind=each.kind,
                versions=each.versions,
                max_concurrency=each.max_concurrency,
                input_schema_sha256=view.schema_digests.get(each.kind, ""),
            )
            for each in view.capabilities
        ],
        labels=view.labels,
        state=EXECUTOR_STATES[view.state],
        direct=view.direct,
        in_flight=view.in_flight,
        free_credit=view.free_credit,
        connected_at=timestamp(view.connected_at),
        last_seen_at=timestamp(view.last_seen_at),
    )


def lineage_edge(edge: LineageEdge) -> workflow_pb2.LineageEdge:
    return workflow_pb2.LineageEdge(
        artifact=common_pb2.Digest(sha256=edge.sha256, size_bytes=edge.size_bytes),
        artifact_name=edge.name,
        workflow_run_id=edge.workflow_run_id,
        step_run_id=edge.step_run_id,
        attempt=edge.attempt,
        produced=edge.produced,
        declared=edge.declared,
        depth=edge.depth,
        step_name=edge.step_name,
        definition=edge.definition,
        definition_version=edge.definition_version,
        kind=edge.kind,
        artifact_type=edge.artifact_type,
        derived_from=[
            common_pb2.Digest(sha256=digest, size_bytes=size) for digest, size in edge.derived_from
        ],
    )


def obstacle(view: Obstacle) -> workflow_pb2.Obstacle:
    return workflow_pb2.Obstacle(
        code=view.code,
        message=view.message,
        until=timestamp(view.until),
        step_run_ids=view.step_run_ids,
        near_misses=[
            workflow_pb2.NearMiss(
                executor_id=each.executor_id, executor_name=each.executor_name, lacks=each.lacks
            )
            for each in view.near_misses
        ],
        ahead=view.ahead,
        pause=None if view.pause is None else pause(view.pause),
    )


def pause(of: Pause, load: PauseLoad | None = None) -> workflow_pb2.Pause:
    return workflow_pb2.Pause(
        **{of.target.sort: of.target.name},
        reason=of.reason,
        paused_by=of.paused_by,
        paused_at=timestamp(of.paused_at),
        steps_held=load.held if load else 0,
        steps_in_flight=load.in_flight if load else 0,
    )


def lean_definition(message: workflow_pb2.Definition, max_bytes: int) -> workflow_pb2.Definition:
    """A copy for lists: templates over `max_bytes` leave only their size."""
    made = workflow_pb2.Definition()
    made.CopyFrom(message)
    for step in made.steps:
        size = len(step.input_template.data)
        if size > max_bytes:
            step.input_template.CopyFrom(common_pb2.Payload(omitted_bytes=size))
    return made
