"""Keeping the stored history from growing without end: days made ahead, and what is past retention removed."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import structlog

from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import Conflict, DataRefused, StoreUnavailable
from rara_scheduler.store.history import HistoryStore
from rara_scheduler.store.retention import ExpiredRun, RetentionStore

log = structlog.get_logger(__name__)

_AFTER_FAILURE_S = 60.0
_BATCH_STEPS = 1000
_DEFAULT_ROWS = 5000


class RetentionLoop:
    """One cycle each `every_s`: makes the partitions of the next days, then removes until nothing is left to go.

    Without partitions rows go to the default one, so nothing fails. keep_days: None removes nothing.
    report: told after each cycle whether it did all of its work.
    """

    def __init__(
        self,
        history: HistoryStore,
        retention: RetentionStore,
        *,
        days_ahead: int,
        keep_days: int | None,
        every_s: float,
        report: Callable[[bool], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._retention = retention
        self._days_ahead = days_ahead
        self._keep_days = keep_days
        self._every_s = every_s
        self._report = report
        self._clock = clock

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            wait_s = self._every_s
            try:
                await self.cycle()
                await self._retention.succeeded()
                await self._report(True)
            except (Fault, Conflict, DataRefused) as error:
                wait_s = min(wait_s, _AFTER_FAILURE_S)
                log.warning("retention.failed", error=str(error))
                await self._report(False)
                with contextlib.suppress(Fault, Conflict, DataRefused):
                    await self._retention.failed(str(error))
            await asyncio.sleep(wait_s)

    async def cycle(self) -> tuple[int, int]:
        """Do all that is to be done now; the runs and steps removed."""
        for name in await self._history.create_partitions(self._days_ahead):
            log.info("history.partition_created", partition=name)
        if self._keep_days is None:
            return 0, 0
        runs, steps, failure = await self._remove_runs(self._keep_days)
        dropped = 0
        while gone := await self._retention.drop_partition(self._keep_days):
            dropped += 1
            log.info("history.partition_dropped", partition=gone)
        log.info("retention.done", runs=runs, steps=steps, partitions=dropped)
        if failure is not None:
            raise failure
        return runs, steps

    async def _remove_runs(self, keep_days: int) -> tuple[int, int, StoreUnavailable | None]:
        """Runs and steps removed, and why the last run that had to be left was left: it hides none behind it."""
        before = await self._retention.limit(keep_days)
        runs = steps = 0
        failure: StoreUnavailable | None = None
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
                    failure, behind = error, page[-1]
                    log.warning(
                        "retention.run_left", workflow_run_id=behind.workflow_run_id, error=str(error)
                    )
                continue
            runs, steps = runs + removed[0], steps + removed[1]
            behind = page[-1]
            await asyncio.sleep(self._clock() - began_at)  # half of the time is everybody else's
        while await self._retention.remove_default_history(before, rows=_DEFAULT_ROWS) >= _DEFAULT_ROWS:
            pass
        return runs, steps, failure
