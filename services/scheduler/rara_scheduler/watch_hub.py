"""Wakes those who watch a run as soon as this scheduler has committed a change of it."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from rara_scheduler.domain.errors import Code, Fault

MAX_WATCHERS: Final = 1000
# The first look at a run that has just been started here: what it finds is over soon, and short runs end before.
FIRST_LOOK_S: Final = 0.05
_STARTED_KEPT: Final = 1000


class Subscription:
    """One watcher's bell. Rings that come while nobody waits are one ring."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._rung = asyncio.Event()
        self._stopping = stopping
        self._hurried = asyncio.Event()  # the run has ended, or the scheduler stops: no pause goes on

    @property
    def told_of_end(self) -> bool:
        """Whether the run has ended, or the scheduler stops."""
        return self._hurried.is_set()

    def ring(self, *, hurry: bool = False) -> None:
        self._rung.set()
        if hurry:
            self._hurried.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when rung, or after the time. Raises Fault SHUTTING_DOWN as soon as the scheduler stops."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._rung.wait()
        except TimeoutError:
            pass
        self._refuse_if_stopping()
        self._rung.clear()

    async def pause(self, seconds: float) -> None:
        """Wait the time out, rings or not, unless the run has ended. Raises as `wait` does."""
        try:
            async with asyncio.timeout(seconds):
                await self._hurried.wait()
        except TimeoutError:
            pass
        self._refuse_if_stopping()
        self._rung.clear()  # the look that follows sees it all

    def _refuse_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise Fault(
                Code.SHUTTING_DOWN, "this scheduler stops; watch through another one", retry_after_s=1.0
            )


class ChangeHub:
    """The watchers of this scheduler, by run. Only a hint: whoever watches polls as well. now_s: a monotonic clock."""

    def __init__(
        self, *, max_watchers: int = MAX_WATCHERS, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_watchers = max_watchers
        self._watchers: dict[str, set[Subscription]] = {}
        self._now_s = now_s
        self._started: dict[str, float] = {}  # when; the oldest first
        self._count = 0
        self._stopping = asyncio.Event()

    def started(self, run_ids: Iterable[str]) -> None:
        """Say that this scheduler has just started these runs."""
        now = self._now_s()
        for run_id in run_ids:
            self._started[run_id] = now
            if len(self._started) > _STARTED_KEPT:
                del self._started[next(iter(self._started))]

    def first_look_in_s(self, run_id: str) -> float:
        """Seconds until a watcher should first look at a run, unless it ends before; 0 or less: now."""
        started_at = self._started.get(run_id)
        return 0.0 if started_at is None else started_at + FIRST_LOOK_S - self._now_s()

    def publish(self, run_ids: Iterable[str]) -> None:
        """Say that a change of these runs, or of their steps, has been committed."""
        for run_id in run_ids:
            for subscription in self._watchers.get(run_id, ()):
                subscription.ring()

    def ended(self, run_ids: Iterable[str]) -> None:
        """Say that these runs have ended: their watchers look at once."""
        for run_id in run_ids:
            self._started.pop(run_id, None)
            for subscription in self._watchers.get(run_id, ()):
                subscription.ring(hurry=True)

    def stop(self) -> None:
        """End every watcher, those to come too."""
        self._stopping.set()
        for subscriptions in self._watchers.values():
            for subscription in subscriptions:
                subscription.ring(hurry=True)

    @contextmanager
    def subscribe(self, run_id: str) -> Iterator[Subscription]:
        """A bell for one run. Raises Fault QUEUE_FULL when too many watch, SHUTTING_DOWN after `stop`."""
        if self._stopping.is_set():
            raise Fault(Code.SHUTTING_DOWN, "this scheduler stops", retry_after_s=1.0)
        if self._count >= self._max_watchers:
            raise Fault(
                Code.QUEUE_FULL,
                f"{self._max_watchers} watchers are connected to this scheduler already",
                metadata={"limit": str(self._max_watchers)},
                retry_after_s=5.0,
            )
        subscription = Subscription(self._stopping)
        self._count += 1
        self._watchers.setdefault(run_id, set()).add(subscription)
        try:
            yield subscription
        finally:
            self._count -= 1
            mine = self._watchers[run_id]
            mine.discard(subscription)
            if not mine:
                del self._watchers[run_id]
