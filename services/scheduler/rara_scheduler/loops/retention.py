"""Keeping a partition of history ready for every day ahead."""

import asyncio

import structlog

from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import Conflict, DataRefused
from rara_scheduler.store.history import HistoryStore

log = structlog.get_logger(__name__)

_EVERY_S = 3600.0
_AFTER_FAILURE_S = 60.0


class RetentionLoop:
    """Creates the partitions of the next days. Without them rows go to the default partition, so nothing fails."""

    def __init__(self, history: HistoryStore, *, days_ahead: int) -> None:
        self._history = history
        self._days_ahead = days_ahead

    async def run(self) -> None:
        """Look each hour until cancelled."""
        while True:
            wait_s = _EVERY_S
            try:
                for name in await self._history.create_partitions(self._days_ahead):
                    log.info("history.partition_created", partition=name)
            except (Fault, Conflict, DataRefused) as error:
                wait_s = _AFTER_FAILURE_S
                log.warning("retention.deferred", error=str(error))
            await asyncio.sleep(wait_s)
