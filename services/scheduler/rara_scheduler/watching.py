"""Following a run or an attempt: what is sent, in which order, and when it ends."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.domain.run import TERMINAL as RUN_TERMINAL
from rara_scheduler.domain.step import TERMINAL as STEP_TERMINAL
from rara_scheduler.domain.views import RunView, StepView
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.watch import STEP_PAGE, AttemptMark, RunLook, StoredEvent, WatchReads
from rara_scheduler.watch_hub import ChangeHub, Subscription

POLL_S: Final = 1.0  # for changes that other schedulers commit
ALIVE_S: Final = 15.0
# Looks at a busy run: one per PACE_S in the long run, so that what changes in between is sent as one; the first
# BURST_LOOKS after a quiet time nearly at once.
PACE_S: Final = 0.1
BURST_LOOKS: Final = 10
# Even then so long, unless the run has ended: its next change is often on its way, and a look takes time from that.
GATHER_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class SnapshotEnd:
    """All that was there when the watch began has been sent."""


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing has changed for a while."""


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """revision: who resumes after it misses nothing, and may see again what came since."""

    revision: int
    update: RunView | StepView | SnapshotEnd | Alive


@dataclass(frozen=True, slots=True)
class StoredStepEvent:
    step_run_id: str
    attempt: int
    mark: AttemptMark
    event: StoredEvent


StepUpdate: TypeAlias = StoredStepEvent | StepView | Alive


def _pages(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), STEP_PAGE):
        yield ids[start : start + STEP_PAGE]


def _looks(step: StepView) -> tuple[object, ...]:
    """What a watcher sees of a step: two equal looks are one."""
    cancel = step.cancel
    return (
        step.state,
        step.reason,
        step.attempt,
        step.failures,
        step.last_sequence,
        step.executor_id,
        step.started_at,
        step.available_at,
        cancel and (cancel.requested_at, cancel.delivered_at, cancel.confirmed_at),
    )


class Watching:
    """now_s: a monotonic clock, for `Alive` alone."""

    def __init__(
        self,
        watch: WatchReads,
        reads: Reads,
        hub: ChangeHub,
        *,
        poll_s: float = POLL_S,
        alive_s: float = ALIVE_S,
        gather_s: float = GATHER_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watch = watch
        self._reads = reads
        self._hub = hub
        self._poll_s = poll_s
        self._alive_s = alive_s
        self._gather_s = gather_s
        self._now_s = now_s

    async def run(self, workflow_run_id: str, after_revision: int) -> AsyncGenerator[RunUpdate, None]:
        """Every change of a run after a revision; from 0 first all that is there, then SnapshotEnd.

        Ends after the terminal state was sent. Steps come before the run whose revision tells of them. Raises Fault:
        RUN_NOT_FOUND, FIELD_INVALID, REVISION_COMPACTED for a revision that the run has not reached, QUEUE_FULL,
        SHUTTING_DOWN.
        """
        if after_revision < 0:
            raise field_invalid("after_revision", "must not be negative")
        with self._hub.subscribe(workflow_run_id) as bell:
            follower = _RunFollower(self._watch, workflow_run_id, after_revision)
            if after_revision == 0:
                if (wait_s := self._hub.first_look_in_s(workflow_run_id)) > 0:
                    await bell.pause(wait_s)
                async for update in follower.snapshot(told_of_end=bell.told_of_end):
                    yield update
                if follower.has_ended:
                    return
            last_sent_s = self._now_s()
            pace = _Pace(self._now_s)
            if after_revision == 0:
                await self._next_look(bell, pace)  # what came meanwhile has rung
            while True:
                if bell.told_of_end:
                    async for update in follower.end():
                        yield update
                    if follower.has_ended:
                        return
                pace.look()
                look = await self._watch.look(workflow_run_id, follower.revision)
                if look.revision < follower.revision:
                    raise Fault(
                        Code.REVISION_COMPACTED,
                        f"run {workflow_run_id} is at revision {look.revision}: watch from 0",
                        metadata={"workflow_run_id": workflow_run_id, "revision": str(look.revision)},
                    )
                async for update in follower.changes(look):
                    last_sent_s = self._now_s()
                    yield update
                if follower.has_ended:
                    return
                if self._now_s() - last_sent_s >= self._alive_s:
                    last_sent_s = self._now_s()
                    yield RunUpdate(follower.revision, Alive())
                await self._next_look(bell, pace)

    async def step(
        self, step_run_id: str, attempt: int, after_sequence: int
    ) -> AsyncGenerator[StepUpdate, None]:
        """The stored events of one attempt (0: the newest) behind a sequence number, in order, then live ones.

        The step itself comes first, and again whenever its state has changed. Ends when the attempt is over and all
        its events have been sent. A number that arrives late, below one that was sent, is stored and not sent. Raises
        Fault: STEP_NOT_FOUND, FIELD_INVALID, QUEUE_FULL, SHUTTING_DOWN.
        """
        if attempt < 0:
            raise field_invalid("attempt", "must not be negative; 0 is the newest")
        if after_sequence < 0:
            raise field_invalid("after_sequence", "must not be negative")
        step = await self._reads.get_step(step_run_id)
        if attempt > max(step.attempt, 1):
            raise field_invalid("attempt", f"must be at most {step.attempt}, the newest")
        with self._hub.subscribe(step.workflow_run_id) as bell:
            watched = attempt or max(step.attempt, 1)  # before the first lease: the first attempt to come
            seen: tuple[object, ...] | None = None
            last_sent_s = self._now_s()
            pace = _Pace(self._now_s)
            while True:
                pace.look()
                # First the standing, then the events: what ended the attempt was stored with its standing.
                mark = await self._watch.attempt_mark(step_run_id, watched)
                step = (await self._watch.steps([step_run_id]))[0]
                looks = (step.state, step.reason, step.attempt)
                is_over = mark.is_over if mark is not None else step.state in STEP_TERMINAL
                if looks != seen and not (is_over and seen is not None):
                    seen, last_sent_s = looks, self._now_s()
                    yield step
                while mark is not None:
                    page = await self._watch.events(step_run_id, watched, mark.granted_on, after_sequence)
                    for event in page:
                        last_sent_s = self._now_s()
                        yield StoredStepEvent(step_run_id, watched, mark, event)
                        after_sequence = event.sequence
                    if not page:
                        break
                if is_over:
                    if looks != seen:
                        yield step
                    return
                if self._now_s() - last_sent_s >= self._alive_s:
                    last_sent_s = self._now_s()
                    yield Alive()
                await self._next_look(bell, pace)

    async def _next_look(self, bell: Subscription, pace: "_Pace") -> None:
        """Wait for a change or the poll; a burst of changes becomes one look. The end of a run waits for nothing."""
        await bell.wait(self._poll_s)
        await bell.pause(max(self._gather_s, pace.early_s()))


class _Pace:
    """A token bucket of looks. now_s: a monotonic clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._looks = float(BURST_LOOKS)
        self._at = now_s()

    def look(self) -> None:
        self._refill()
        self._looks -= 1

    def early_s(self) -> float:
        """Seconds until the next look is due; 0 or less: now."""
        self._refill()
        return (1 - self._looks) * PACE_S

    def _refill(self) -> None:
        now = self._now_s()
        self._looks = min(float(BURST_LOOKS), self._looks + (now - self._at) / PACE_S)
        self._at = now


class _RunFollower:
    """What one watcher was sent of a run, and what it lacks."""

    def __init__(self, watch: WatchReads, workflow_run_id: str, after_revision: int) -> None:
        self._watch = watch
        self._run_id = workflow_run_id
        self._knows_all = False  # every step was sent at least once
        self._sent: dict[str, tuple[object, ...]] = {}
        self.revision = after_revision
        self.has_ended = False

    async def snapshot(self, *, told_of_end: bool) -> AsyncIterator[RunUpdate]:
        """The run and its steps. What changes while they are sent comes again afterwards."""
        if told_of_end:  # both are as they will stay
            run, steps = await asyncio.gather(
                self._watch.run(self._run_id), self._watch.first_steps(self._run_id)
            )
        else:
            run, steps = await self._watch.run(self._run_id), []
        if run.state not in RUN_TERMINAL or not steps:
            # Later than the run, whose revision they are complete up to.
            steps = await self._watch.first_steps(self._run_id)
        # Read before the first is sent: who has seen the end of a run leaves, in the middle of a statement.
        yield RunUpdate(0, run)
        for update in self._unsent(steps):
            yield update
        if len(steps) == STEP_PAGE:
            for page in _pages((await self._watch.all_step_ids(self._run_id))[STEP_PAGE:]):
                for update in self._unsent(await self._watch.steps(page)):
                    yield update
        self.revision = run.revision
        self._knows_all = True
        self.has_ended = run.state in RUN_TERMINAL  # and then so were all its steps
        yield RunUpdate(self.revision, SnapshotEnd())

    async def end(self) -> AsyncIterator[RunUpdate]:
        """What is new of a run that has ended, without a look at what has: the steps that were open when last sent.

        Nothing where that is not all that is missing, or not what the database says.
        """
        open_ids = [step_id for step_id, (state, *_) in self._sent.items() if state not in STEP_TERMINAL]
        if not self._knows_all or len(open_ids) > STEP_PAGE:
            return
        steps, run = await asyncio.gather(self._watch.steps(open_ids), self._watch.run(self._run_id))
        if run.state not in RUN_TERMINAL or any(step.state not in STEP_TERMINAL for step in steps):
            return
        for update in self._unsent(sorted(steps, key=lambda step: (step.revision, step.step_run_id))):
            yield update
        self.revision = run.revision
        self.has_ended = True
        yield RunUpdate(self.revision, run)

    async def changes(self, look: RunLook) -> AsyncIterator[RunUpdate]:
        """What a look from this follower's revision on has found; steps first, then the run."""
        moved = look.revision > self.revision
        ended = look.state in RUN_TERMINAL
        *pages, last = [*_pages(look.step_run_ids)] or [()]
        for page in pages:
            for update in self._unsent(await self._watch.steps(page)):
                yield update
        if not (moved or ended):
            for update in self._unsent(await self._watch.steps(last)):
                yield update
            return
        # Read now, it may be newer than the look, whose revision is up to where the steps are complete.
        steps, run = await asyncio.gather(self._watch.steps(last), self._watch.run(self._run_id))
        for update in self._unsent(steps):
            yield update
        self.revision = look.revision
        if run.state in RUN_TERMINAL and not ended:
            # Closed in between: its last steps come first, so that who stops at the end has seen them.
            async for update in self.changes(await self._watch.look(self._run_id, self.revision)):
                yield update
            return
        self.has_ended = ended
        yield RunUpdate(self.revision, run)

    def _unsent(self, steps: Iterable[StepView]) -> Iterator[RunUpdate]:
        """Those that look otherwise than when they were sent."""
        for step in steps:
            if self._sent.get(step.step_run_id) != _looks(step):
                self._sent[step.step_run_id] = _looks(step)
                yield RunUpdate(self.revision, step)
