"""Keeping the stored history from growing without end: days made ahead, and what is past retention removed."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import Conflict, DataRefused, StoreUnavailable
from rara_scheduler.store.history import HistoryStore
from rara_scheduler.store.retention import ExpiredRun, RetentionStore

log = structlog.get_logger(__name__)

_AFTER_FAILURE_S = 60.0
_BATCH_STEPS = 1000
_DEFAULT_ROWS = 5000


@dataclass(frozen=True, slots=True)
class Pruned:
    """What one pass removed and made. `left`: a run that is past retention and could not go, and why."""

    runs: int = 0
    steps: int = 0
    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    left: tuple[str, StoreUnavailable] | None = None


class Pruner:
    """One pass: makes the partitions of the next days, then removes until nothing is left to go.

    Without partitions rows go to the default one, so nothing fails. keep_days: None removes nothing.
    """

    def __init__(
        self,
        history: HistoryStore,
        retention: RetentionStore,
        *,
        days_ahead: int,
        keep_days: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._retention = retention
        self._days_ahead = days_ahead
        self.keep_days = keep_days
        self._clock = clock

    async def prune(self) -> Pruned:
        """Do all that is to be done now. Raises Fault, Conflict, DataRefused."""
        created = await self._history.create_partitions(self._days_ahead)
        if self.keep_days is None:
            return Pruned(created=tuple(created))
        runs, steps, left = await self._remove_runs(self.keep_days)
        dropped = []
        while gone := await self._retention.drop_partition(self.keep_days):
            dropped.append(gone)
        return Pruned(runs, steps, tuple(created), tuple(dropped), left)

    async def _remove_runs(self, keep_days: int) -> tuple[int, int, tuple[str, StoreUnavailable] | None]:
        """Runs and steps removed, and the last run that had to be left: it hides none behind it."""
        before = await self._retention.limit(keep_days)
        runs = steps = 0
        left: tuple[str, StoreUnavailable] | None = None
        behind: ExpiredRun | None = None
        size = _BATCH_STEPS
        while page := await self._retention.expired_runs(before, behind, steps=size):
            began_at = self._clock()
            try:
                removed = await self._retention.remove(page, before)
            except StoreUnavailable as error:
                # Perhaps only too much for one statement: try less, until one run alone is refused.
                if len(page) > 1:
                    size = max(1, size // 4)
                else:
                    behind = page[-1]
                    left = behind.workflow_run_id, error
                continue
            runs, steps = runs + removed[0], steps + removed[1]
            behind = page[-1]
            await asyncio.sleep(self._clock() - began_at)  # half of the time is everybody else's
        while await self._retention.remove_default_history(before, rows=_DEFAULT_ROWS) >= _DEFAULT_ROWS:
            pass
        return runs, steps, left


class RetentionLoop:
    """Prunes every `every_s`. report: told after each pass whether it did all of its work."""

    def __init__(
        self,
        pruner: Pruner,
        retention: RetentionStore,
        *,
        every_s: float,
        report: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._pruner = pruner
        self._retention = retention
        self._every_s = every_s
        self._report = report

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            wait_s = self._every_s
            try:
                pruned = await self._pruner.prune()
                _log(pruned, self._pruner.keep_days)
                if pruned.left is not None:
                    raise pruned.left[1]
                await self._retention.succeeded()
                await self._report(True)
            except (Fault, Conflict, DataRefused) as error:
                wait_s = min(wait_s, _AFTER_FAILURE_S)
                log.warning("retention.failed", error=str(error))
                await self._report(False)
                with contextlib.suppress(Fault, Conflict, DataRefused):
                    await self._retention.failed(str(error))
            await asyncio.sleep(wait_s)


def _log(pruned: Pruned, keep_days: int | None) -> None:
    for name in pruned.created:
        log.info("history.partition_created", partition=name)
    for name in pruned.dropped:
        log.info("history.partition_dropped", partition=name)
    if pruned.left is not None:
        log.warning("retention.run_left", workflow_run_id=pruned.left[0], error=str(pruned.left[1]))
    if keep_days is not None:
        log.info("retention.done", runs=pruned.runs, steps=pruned.steps, partitions=len(pruned.dropped))
