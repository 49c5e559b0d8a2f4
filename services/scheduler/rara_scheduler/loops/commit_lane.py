"""Adaptive group commit: at once when idle, else gather while a commit runs, and where they follow each other closely
as long again behind a small one; what nobody waits for starts none."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import structlog

from rara_scheduler.domain.attempt import EventType, Item, Report
from rara_scheduler.domain.errors import Fault
from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.loops.pace import Pace
from rara_scheduler.store.commit import BatchResult, LeaseReports
from rara_scheduler.store.database import Conflict, DataRefused, LockTimeout
from rara_scheduler.telemetry.port import Metrics

log = structlog.get_logger(__name__)

Key = TypeVar("Key")

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0
_LONGEST_COMMIT_S = 0.5
_LEAST_SHORTENED = 50  # items
_SMALL = 512  # items: behind fewer a lane rests where sets follow each other closely
# `running` of a short step is soon followed by its end, and progress by more of it, and nobody waits for their commit:
# so long they stand aside for what else comes of their lease, and the row is written once. A runner that was given some
# hundred jobs at once takes about as long to answer the last; where commits are slow, everything is.
_LINGER_S = 0.05
_LONGEST_LINGER_S = 0.5
_LINGER_COMMITS = 2
_CAN_WAIT = frozenset({EventType.RUNNING, EventType.PROGRESS})


@dataclass(slots=True)
class Submission:
    """One item about one lease. executor_id: who reported it and is answered; None: the scheduler itself."""

    step_run_id: str
    workflow_run_id: str
    lease_token: int
    executor_id: str | None
    item: Item


class Commit(Protocol):
    async def __call__(self, batch: list[LeaseReports], *, skip_locked: bool) -> BatchResult: ...


class CommitLane:
    """Gathers submissions and commits them in sets, in the order in which each lease's arrived.

    commit: one transaction; `skip_locked` leaves out leases and runs that somebody is at work on.
    """

    def __init__(
        self,
        commit: Commit,
        aftermath: Aftermath,
        *,
        batch: int,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self._store_commit = commit
        self._aftermath = aftermath
        self._metrics = metrics
        self._batch = batch
        self._size = batch  # of the next transaction, by how long the last ones took
        self._clock = clock
        self._pace = Pace(clock)
        self._queue: deque[Submission] = deque()
        self._queued: dict[str, int] = {}
        self._tokens: dict[int, int] = {}
        self._arrived = asyncio.Event()
        self._aside: dict[int, _Aside] = {}  # by token, the oldest first
        self._timer: asyncio.TimerHandle | None = None
        self._linger_s = _LINGER_S
        self._idle = asyncio.Event()
        self._idle.set()
        self._held_up: set[int] = set()  # tokens of which somebody else held the rows when last tried

    def submit(self, submission: Submission) -> None:
        token, executor_id = submission.lease_token, submission.executor_id
        self._tokens[token] = self._tokens.get(token, 0) + 1
        if executor_id is not None:
            self._queued[executor_id] = self._queued.get(executor_id, 0) + 1
        self._idle.clear()
        if _can_wait(submission.item):
            self._put_aside(submission)
            return
        if (aside := self._aside.pop(token, None)) is not None:
            self._queue.extend(aside.submissions)
        self._queue.append(submission)
        self._arrived.set()

    @property
    def waiting(self) -> int:
        return len(self._queue) + sum(len(aside.submissions) for aside in self._aside.values())

    def queued(self, executor_id: str) -> int:
        return self._queued.get(executor_id, 0)

    @property
    def is_idle(self) -> bool:
        return self._idle.is_set()

    async def drained(self) -> None:
        await self._idle.wait()

    async def run(self) -> None:
        """Commit until cancelled."""
        wait_s = _FIRST_WAIT_S
        while True:
            await self._arrived.wait()
            if not self._queue:
                self._arrived.clear()
                if not self._aside:
                    self._idle.set()
                continue
            if len(self._queue) < _SMALL:
                await self._pace.rest()
            batch, reporters, taken = self._gather()
            began_at = self._clock()
            try:
                result = await self._commit(batch)
            except (Fault, Conflict, DataRefused) as error:
                # Nothing was stored. Keep it all and try again.
                self._queue.extendleft(reversed(taken))
                self._size = max(1, len(taken) // 2)  # it may have been too much for one transaction
                log.warning("commit.deferred", error=str(error), waiting=len(self._queue), wait_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            wait_s = _FIRST_WAIT_S
            took_s = self._clock() - began_at
            self._resize(len(taken), took_s)
            self._linger_s = min(_LONGEST_LINGER_S, max(_LINGER_S, _LINGER_COMMITS * took_s))
            self._pace.took(took_s, is_small=len(taken) < _SMALL)
            self._metrics.committed(len(taken), took_s)
            self._put_behind([submission for submission in taken if submission.lease_token in result.busy])
            self._held_up -= {reports.lease_token for reports in batch}
            self._held_up |= result.busy
            self._uncount([submission for submission in taken if submission.lease_token not in result.busy])
            self._aftermath.committed(result, reporters)
            if len(result.busy) == len(batch):
                await asyncio.sleep(_FIRST_WAIT_S)  # nothing could be done: look again, but not at once

    def _put_aside(self, submission: Submission) -> None:
        aside = self._aside.get(submission.lease_token)
        if aside is None:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._take_back)
            aside = self._aside[submission.lease_token] = _Aside(self._clock())
        aside.submissions.append(submission)

    def _take_back(self) -> None:
        """Queue what has stood aside for long enough."""
        self._timer = None
        until = self._clock() - self._linger_s
        for token, aside in list(self._aside.items()):
            if aside.since > until:
                self._timer = asyncio.get_running_loop().call_later(aside.since - until, self._take_back)
                break
            self._queue.extend(aside.submissions)
            del self._aside[token]
        if self._queue:
            self._arrived.set()

    def _resize(self, taken: int, took_s: float) -> None:
        """Where the database is slow, transactions get shorter: what one has written cannot be renewed before its end.

        Not ever shorter: of a few events most of the time is the transaction's own, or this process was kept waiting,
        and with one event each everything that waits would wait for ever. After a failure it grows with care.
        """
        if took_s > _LONGEST_COMMIT_S:
            shorter = int(taken * _LONGEST_COMMIT_S / took_s)
            self._size = min(self._batch, max(shorter, min(_LEAST_SHORTENED, self._size + 1)))
        elif taken >= self._size:
            self._size = min(self._batch, 2 * self._size)

    async def _commit(self, batch: list[LeaseReports]) -> BatchResult:
        """Somebody may hold a run of the batch: others wait for that once, and not again."""
        if not self._held_up:
            try:
                return await self._store_commit(batch, skip_locked=False)
            except LockTimeout:
                pass
        return await self._store_commit(batch, skip_locked=True)

    def _put_behind(self, held_up: list[Submission]) -> None:
        """Let the others pass, each lease's own in the order in which they came: a whole batch may be held up."""
        if not held_up:
            return
        tokens = {submission.lease_token for submission in held_up}
        others = [submission for submission in self._queue if submission.lease_token not in tokens]
        later = [submission for submission in self._queue if submission.lease_token in tokens]
        self._queue = deque([*others, *held_up, *later])

    def has_queued(self, lease_token: int) -> bool:
        return lease_token in self._tokens

    def _uncount(self, taken: list[Submission]) -> None:
        for submission in taken:
            _count_down(self._tokens, submission.lease_token)
            if submission.executor_id is not None:
                _count_down(self._queued, submission.executor_id)

    def _gather(self) -> tuple[list[LeaseReports], dict[int, str], list[Submission]]:
        taken: list[Submission] = []
        by_token: dict[int, _Gathered] = {}
        deferred: list[Submission] = []
        while self._queue and len(taken) + len(deferred) < self._size:
            submission = self._queue.popleft()
            gathered = by_token.setdefault(submission.lease_token, _Gathered(submission))
            if gathered.take(submission):
                taken.append(submission)
            else:
                deferred.append(submission)
        self._queue.extendleft(reversed(deferred))
        batch = []
        reporters = {}
        for token, gathered in by_token.items():
            if gathered.executor_id is not None and any(isinstance(i, Report) for i in gathered.items):
                reporters[token] = gathered.executor_id
            batch.append(
                LeaseReports(
                    gathered.first.step_run_id,
                    gathered.first.workflow_run_id,
                    token,
                    gathered.executor_id,
                    tuple(gathered.items),
                )
            )
        return batch, reporters, taken


@dataclass(slots=True)
class _Aside:
    """What has come of one lease and can wait."""

    since: float
    submissions: list[Submission] = field(default_factory=list)


def _can_wait(item: Item) -> bool:
    return isinstance(item, Report) and item.type in _CAN_WAIT and item.checkpoint is None


def _count_down(counts: dict[Key, int], key: Key) -> None:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]


@dataclass(slots=True)
class _Gathered:
    """What one reporter, and the scheduler itself, say about one token in one batch.

    Anybody may name any token: somebody else's submission waits for a batch of its own, where it is answered as
    lost, and neither takes the owner's along nor is mixed with them.
    """

    first: Submission
    executor_id: str | None = None
    items: list[Item] = field(default_factory=list)
    full: bool = False

    def take(self, submission: Submission) -> bool:
        """False: it belongs to a later batch, and so does all that follows under this token."""
        of_same_step = (submission.step_run_id, submission.workflow_run_id) == (
            self.first.step_run_id,
            self.first.workflow_run_id,
        )
        of_another = None not in (submission.executor_id, self.executor_id) and (
            submission.executor_id != self.executor_id
        )
        if self.full or not of_same_step or of_another:
            self.full = True
            return False
        self.executor_id = self.executor_id or submission.executor_id
        self.items.append(submission.item)
        return True
