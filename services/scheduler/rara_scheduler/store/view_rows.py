"""Rows of the reading statements, turned into values."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from rara_scheduler.domain.errors import StepError
from rara_scheduler.domain.routing import Capability, Offer
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.step import StepState
from rara_scheduler.domain.views import (
    ArtifactView,
    AttemptView,
    CancelView,
    ExecutorState,
    ExecutorView,
    HandlerView,
    PayloadView,
    RunView,
    StepView,
)


def _payload(data: bytes | None, size_bytes: int | None) -> PayloadView | None:
    return None if size_bytes is None else PayloadView(data, size_bytes)


def _error(text: str | None) -> StepError | None:
    """The stored error of an attempt."""
    if text is None:
        return None
    stored: dict[str, Any] = json.loads(text)
    return StepError(
        code=stored.get("code", ""),
        message=stored.get("message", ""),
        retryable=stored.get("retryable"),
        details=stored.get("details"),
        retry_after_s=stored.get("retry_after_s"),
        stack_trace=stored.get("stack_trace") or "",
        runner_exit=stored.get("runner_exit") or {},
    )


def artifact_view(row: asyncpg.Record, sizes: Mapping[str, int] | None = None) -> ArtifactView:
    """sizes: of the digests in derived_from, for manifests."""
    derived_from = row["derived_from"] if sizes is not None else ()
    return ArtifactView(
        name=row["name"],
        sha256=row["sha256"],
        size_bytes=row["size_bytes"],
        media_type=row["media_type"],
        type=row["type"],
        inline=row["inline"],
        metadata=_payload(row["metadata"], row["metadata_bytes"]),
        derived_from=tuple((digest, (sizes or {}).get(digest, 0)) for digest in derived_from),
    )


def _counts(row: asyncpg.Record) -> dict[str, int]:
    """Steps by state: what no table tells a state of is pending."""
    counts: dict[str, int] = json.loads(row["step_counts"] or "{}")
    pending = row["steps_total"] - sum(counts.values())
    return counts | {StepState.PENDING: pending} if pending else counts


def run_view(row: asyncpg.Record, artifacts: Sequence[ArtifactView]) -> RunView:
    error = _error(row["error"])
    if error is None and row["failed_reason"]:  # closed by the database alone: a deadline, nobody to run it
        error = StepError(code=row["failed_reason"])
    return RunView(
        workflow_run_id=row["workflow_run_id"],
        definition=row["definition"],
        definition_version=row["definition_version"],
        state=RunState(row["state"]),
        revision=row["revision"],
        input=_payload(row["input"], row["input_bytes"]),
        input_artifacts=artifacts,
        step_counts=_counts(row),
        failed_step_run_id=row["failed_step_run_id"],
        error=error,
        labels=json.loads(row["labels"]),
        retry_of_workflow_run_id=row["retry_of_workflow_run_id"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        deadline=row["deadline"],
        cancel_requested_at=row["cancel_requested_at"],
    )


def _handler(row: asyncpg.Record) -> HandlerView | None:
    if row["executor_id"] is None:
        return None
    return HandlerView(row["ran_version"] or "", row["ran_by_kind"] or "", row["ran_by_sdk"] or "")


def step_view(row: asyncpg.Record, *, max_attempts: int, manifest: Sequence[ArtifactView] | None) -> StepView:
    cancel = None
    if row["cancel_requested_at"] is not None:
        cancel = CancelView(
            row["cancel_reason"],
            row["cancel_requested_at"],
            row["cancel_delivered_at"],
            row["cancel_confirmed_at"],
        )
    return StepView(
        step_run_id=row["step_run_id"],
        workflow_run_id=row["workflow_run_id"],
        step_name=row["step_name"],
        state=StepState(row["state"]),
        reason=row["reason"],
        attempt=row["attempt"],
        failures=row["failures"],
        max_attempts=max_attempts,
        executor_kind=row["executor_kind"],
        kind=row["kind"],
        kind_version=row["kind_version"],
        executor_id=row["executor_id"],
        executor_name=row["executor_name"] or "",
        handler=_handler(row),
        revision=row["revision"],
        progress=row["progress"],
        last_sequence=row["last_sequence"],
        output=_payload(row["output"], row["output_bytes"]),
        manifest=manifest,
        error=_error(row["error"]),
        cancel=cancel,
        available_at=row["available_at"],
        lease_expires_at=row["lease_expires_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        deadline=row["deadline"],
    )


def attempt_view(
    step_run_id: str, row: asyncpg.Record, error_artifacts: Sequence[ArtifactView]
) -> AttemptView:
    return AttemptView(
        step_run_id=step_run_id,
        attempt=row["attempt"],
        lease_token=row["lease_token"],
        executor_id=row["executor_id"],
        executor_name=row["executor_name"] or "",
        handler=_handler(row),
        reason=row["reason"],
        spent=row["spent"],
        error=_error(row["error"]),
        error_artifacts=error_artifacts,
        last_sequence=row["last_sequence"],
        gaps=row["gaps"],
        leased_at=row["granted_at"],
        accepted_at=row["accepted_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )


def _capabilities(text: str) -> tuple[tuple[Capability, ...], dict[str, str]]:
    """Capabilities, and by kind the digest of its input schema."""
    stored: list[dict[str, Any]] = json.loads(text)
    found = tuple(
        Capability(each["kind"], tuple(each.get("versions", ())), each.get("max_concurrency", 0))
        for each in stored
    )
    return found, {
        each["kind"]: each["input_schema_sha256"] for each in stored if each.get("input_schema_sha256")
    }


def executor_view(row: asyncpg.Record) -> ExecutorView:
    capabilities, digests = _capabilities(row["capabilities"])
    return ExecutorView(
        executor_id=row["executor_id"],
        executor_name=row["executor_name"],
        executor_kind=row["executor_kind"],
        sdk=row["sdk"],
        capabilities=capabilities,
        schema_digests=digests,
        labels=json.loads(row["labels"]),
        state=ExecutorState(row["state"]),
        direct=row["direct"],
        in_flight=row["in_flight"],
        free_credit=row["free_credit"],
        connected_at=row["connected_at"],
        last_seen_at=row["last_seen_at"],
    )


def offer_of(executor: ExecutorView) -> Offer:
    return Offer(executor.executor_kind, executor.capabilities, executor.labels)
