"""Removing uploads that were begun and never finished."""

import asyncio

import structlog

from rara_scheduler.blobs.transfers import BlobTransfers
from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import Conflict

log = structlog.get_logger(__name__)

_BATCH = 100


class UploadLoop:
    """Any scheduler removes what any other began. An upload that somebody writes at the moment is left."""

    def __init__(self, transfers: BlobTransfers, *, every_s: float = 60.0) -> None:
        self._transfers = transfers
        self._every_s = every_s

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                while removed := await self._transfers.expire_uploads(limit=_BATCH):
                    log.info("uploads.expired", count=removed)
                    if removed < _BATCH:
                        break
            except (Fault, Conflict) as error:
                log.warning("uploads.deferred", error=str(error))
            await asyncio.sleep(self._every_s)
