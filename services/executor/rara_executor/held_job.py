"""One job from its request to the acknowledgement of its last event."""

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rara.v1 import common_pb2, job_pb2

from rara_executor.artifacts import ArtifactStore, JobArtifacts
from rara_executor.lease_clock import LeaseClock
from rara_executor.runner import Runner
from rara_executor.runner_protocol import Failed, OperationInfo, Stopped, Succeeded
from rara_executor.tracing import JobSpan, trace_id
from rara_executor.wire import TimeLimits


class Phase(StrEnum):
    ACCEPTING = "accepting"  # a slot is reserved; `accepted` is not acknowledged, no user code may run
    ACCEPTED = "accepted"  # acknowledged, but the lease is not certain: a renewal is waited for
    STARTING = "starting"  # waits for its secrets or for a runner
    RUNNING = "running"  # in a runner
    ENDED = "ended"  # its terminal event is in the outbox


class StopKind(StrEnum):
    CANCEL = "cancel"  # ends as `cancelled` with the reason
    FAIL = "fail"  # ends as `failed` with the reason as its code
    LOST = "lost"  # ends without a word


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a job is being stopped. reason: a code of the contract."""

    kind: StopKind
    reason: str
    message: str = ""


Outcome = Succeeded | Failed | Stopped


def names(request: job_pb2.JobRequest) -> dict[str, object]:
    """What every log line about a job says."""
    found: dict[str, object] = {
        "workflow_run_id": request.workflow_run_id,
        "step_run_id": request.lease.step_run_id,
        "attempt": request.lease.attempt,
        "lease_token": request.lease.lease_token,
        "kind": request.kind,
    }
    trace = trace_id(request.trace.traceparent)
    return found | {"trace_id": trace} if trace else found


@dataclass(slots=True, eq=False)
class HeldJob:
    request: job_pb2.JobRequest
    operation: OperationInfo
    scratch: str  # a folder that need not be there
    clock: LeaseClock
    store: ArtifactStore
    limits: TimeLimits
    received_at: float  # on the loop's clock, like the next
    phase: Phase = Phase.ACCEPTING
    progressed_at: float = 0.0
    runner: Runner | None = None
    stop: Stop | None = None
    leaves_children: bool = False  # processes that end with its runner
    outcome: Outcome | None = None  # what the handler said, while its runner still has to end
    checkpoint: job_pb2.JobProgress | None = None  # the newest report that had one
    last_event: job_pb2.ProgressEvent | None = None  # terminal, from its making on
    refused_sequence: int = 0  # of the event that a terminal one has to replace
    refusals: int = 0
    kill_timer: asyncio.TimerHandle | None = None
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    span: JobSpan | None = None  # from the first time that it went to a runner
    effects: dict[int, int] = field(default_factory=dict)  # sequence to the runner's request
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    lease: job_pb2.Lease = field(init=False)
    token: int = field(init=False)
    _artifacts: JobArtifacts | None = None

    def __post_init__(self) -> None:
        self.lease = self.request.lease
        self.token = self.lease.lease_token

    @property
    def artifacts(self) -> JobArtifacts:
        """Made when it is asked for: most jobs have none."""
        if self._artifacts is None:
            self._artifacts = JobArtifacts(self.store, self.request, Path(self.scratch))
        return self._artifacts

    def checkpoint_stored(self, sequence: int) -> None:
        """A report is stored: its own checkpoint, or an older one that was merged into it, is not asked for again."""
        if self._artifacts is not None:
            self._artifacts.checkpoint_stored(sequence)

    def outputs(self) -> tuple[list[common_pb2.Artifact], list[common_pb2.Digest]]:
        """The manifest, and the inputs that were opened."""
        if self._artifacts is None:
            return [], []
        return self._artifacts.manifest, list(self._artifacts.consumed.values())

    @property
    def names(self) -> dict[str, object]:
        """What every log line about the job says."""
        return names(self.request)

    @property
    def has_ended(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def is_lost(self) -> bool:
        """The lease is somebody else's; only the handler is still to be stopped."""
        return self.stop is not None and self.stop.kind is StopKind.LOST

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        if self.kill_timer is not None:
            self.kill_timer.cancel()
            self.kill_timer = None
