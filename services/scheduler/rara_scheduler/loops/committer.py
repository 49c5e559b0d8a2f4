"""Two commits at a time: lanes that share no run."""

import asyncio
import time
from collections.abc import Callable
from zlib import crc32

from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.loops.commit_lane import CommitLane, Submission
from rara_scheduler.store.commit import BatchResult, CommitStore, LeaseReports
from rara_scheduler.telemetry.port import SILENT, UNTRACED, Metrics, Tracing
from rara_scheduler.telemetry.span_clock import epoch_ns

__all__ = ["Committer", "Submission"]

# While one commit waits for the database, the other is decided on and encoded: more would make the sets smaller, and
# find no processor idle (ADR 0022).
_LANES = 2


class Committer:
    """Commits submissions in the order in which each lease's arrived.

    Each run has its lane, so that two commits never wait for each other's run. What is not committed stays here and
    unacknowledged: an outage of the database only makes the queues longer, up to the events that the executors'
    windows allow.
    """

    def __init__(
        self,
        store: CommitStore,
        aftermath: Aftermath,
        *,
        batch: int,
        metrics: Metrics = SILENT,
        tracing: Tracing = UNTRACED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._aftermath = aftermath
        self._tracing = tracing
        self._lanes = tuple(
            CommitLane(self._commit, aftermath, batch=batch, metrics=metrics, clock=clock)
            for _ in range(_LANES)
        )

    def submit(self, submission: Submission) -> None:
        self._lane(submission).submit(submission)

    def _lane(self, submission: Submission) -> CommitLane:
        """The run's lane; but nothing overtakes what is queued of its lease, even under the name of another run."""
        for lane in self._lanes:
            if lane.has_queued(submission.lease_token):
                return lane
        return self._lanes[crc32(submission.workflow_run_id.encode()) % _LANES]

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self._lanes)

    def queued(self, executor_id: str) -> int:
        """How many reports of one executor are not committed yet."""
        return sum(lane.queued(executor_id) for lane in self._lanes)

    def has_queued(self, lease_token: int) -> bool:
        """Whether something about this lease is on its way to the database: then nobody may judge it by its row."""
        return any(lane.has_queued(lease_token) for lane in self._lanes)

    async def drained(self) -> None:
        """Return when everything submitted so far has been committed."""
        while not all(lane.is_idle for lane in self._lanes):
            for lane in self._lanes:
                await lane.drained()

    async def run(self) -> None:
        """Commit until cancelled."""
        async with asyncio.TaskGroup() as lanes:
            for number, lane in enumerate(self._lanes):
                lanes.create_task(lane.run(), name=f"commit lane {number}")

    async def commit_found(self, batch: list[LeaseReports]) -> BatchResult:
        """Commit what a sweep found, beside the queues; leases that somebody is at work on are left out."""
        result = await self._commit(batch, skip_locked=True)
        self._aftermath.committed(result, {})
        return result

    async def _commit(self, batch: list[LeaseReports], *, skip_locked: bool) -> BatchResult:
        if not self._tracing.is_on:
            return await self._store.commit(batch, skip_locked=skip_locked)
        began_ns = epoch_ns()
        result = await self._store.commit(batch, skip_locked=skip_locked)
        self._tracing.attempts_ended(result.decisions.values(), began_ns, epoch_ns())
        return result
