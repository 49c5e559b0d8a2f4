"""What is shown of runs, steps and executors: plain values between the store's rows and the messages of the API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from rara_scheduler.domain.errors import StepError
from rara_scheduler.domain.pause import Pause
from rara_scheduler.domain.routing import Capability
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.step import StepState


class ExecutorState(StrEnum):
    CONNECTED = "connected"
    SILENT = "silent"  # connected, not heard for two heartbeats, gets no job
    DRAINING = "draining"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class PayloadView:
    """JSON bytes, or None where the value was left out for its size; size_bytes counts it either way."""

    data: bytes | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArtifactView:
    """derived_from: digests and sizes of the inputs that it was made from; empty: all."""

    name: str
    sha256: str
    size_bytes: int
    media_type: str
    type: str
    inline: bytes | None = None
    metadata: PayloadView | None = None
    derived_from: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RunView:
    workflow_run_id: str
    definition: str
    definition_version: int
    state: RunState
    revision: int
    input: PayloadView | None
    input_artifacts: Sequence[ArtifactView]
    step_counts: Mapping[str, int]
    failed_step_run_id: str | None
    error: StepError | None
    labels: Mapping[str, str]
    retry_of_workflow_run_id: str | None
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    deadline: datetime | None
    cancel_requested_at: datetime | None


@dataclass(frozen=True, slots=True)
class CancelView:
    reason: str
    requested_at: datetime
    delivered_at: datetime | None
    confirmed_at: datetime | None


@dataclass(frozen=True, slots=True)
class HandlerView:
    """Which handler ran an attempt. kind_version: empty where it was not recorded."""

    kind_version: str
    executor_kind: str
    sdk: str


@dataclass(frozen=True, slots=True)
class StepView:
    """workflow_run_id: of the run that executed it. progress: a serialised rara.v1.ProgressEvent, or None.

    kind_version: as asked for. handler: of the current or last attempt; None: none yet.
    """

    step_run_id: str
    workflow_run_id: str
    step_name: str
    state: StepState
    reason: str
    attempt: int
    failures: int
    max_attempts: int
    executor_kind: str
    kind: str
    kind_version: str
    executor_id: str | None
    executor_name: str
    handler: HandlerView | None
    revision: int
    progress: bytes | None
    last_sequence: int
    output: PayloadView | None
    manifest: Sequence[ArtifactView] | None
    error: StepError | None
    cancel: CancelView | None
    available_at: datetime | None
    lease_expires_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    deadline: datetime | None


@dataclass(frozen=True, slots=True)
class AttemptView:
    """reason: how it ended; empty while open and after success. error_artifacts: what a failure left behind."""

    step_run_id: str
    attempt: int
    lease_token: int
    executor_id: str
    executor_name: str
    handler: HandlerView | None
    reason: str
    spent: bool
    error: StepError | None
    error_artifacts: Sequence[ArtifactView]
    last_sequence: int
    gaps: int
    leased_at: datetime
    accepted_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class ExecutorView:
    executor_id: str
    executor_name: str
    executor_kind: str
    sdk: str
    capabilities: tuple[Capability, ...]
    schema_digests: Mapping[str, str]  # by kind: of the input schema, where there is one
    labels: Mapping[str, str]
    state: ExecutorState
    direct: bool
    in_flight: int
    free_credit: int
    connected_at: datetime
    last_seen_at: datetime


@dataclass(frozen=True, slots=True)
class NearMiss:
    executor_id: str
    executor_name: str
    lacks: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps a step from running or ending. until: when it goes away by itself. ahead: counted to 10,000.

    pause: of the code PAUSED alone.
    """

    code: str
    message: str
    until: datetime | None = None
    step_run_ids: tuple[str, ...] = ()
    near_misses: tuple[NearMiss, ...] = ()
    ahead: int = 0
    pause: Pause | None = None


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Which runs a list shows; empty or None: any. All labels must hold."""

    definition: str = ""
    states: tuple[RunState, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    created_from: datetime | None = None
    created_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepFilter:
    workflow_run_id: str | None = None
    states: tuple[StepState, ...] = ()
    kind: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorFilter:
    states: tuple[ExecutorState, ...] = ()
    kind: str = ""
