"""Making the spans of attempts that have ended, beside the work: no commit waits for them."""

import asyncio
from itertools import islice
from typing import Final

import structlog

from rara_scheduler.domain.errors import Fault
from rara_scheduler.store.database import Conflict, DataRefused
from rara_scheduler.store.telemetry import TelemetryStore
from rara_scheduler.telemetry.port import SpanMaker

log = structlog.get_logger(__name__)

_EVERY_S: Final = 0.5
_PAGE: Final = 500


class SpanLoop:
    """maker: None, where nothing is traced: then it does not run at all."""

    def __init__(self, store: TelemetryStore, maker: SpanMaker | None) -> None:
        self._store = store
        self._maker = maker

    async def run(self) -> None:
        """Make spans until cancelled."""
        while self._maker is not None:
            await asyncio.sleep(_EVERY_S)
            await self._all(self._maker)

    async def finish(self, *, timeout_s: float) -> None:
        """Those of the attempts that ended last."""
        if self._maker is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._all(self._maker)
        except TimeoutError:
            log.warning("spans.left_out", attempts=len(self._maker.ended))

    async def _all(self, maker: SpanMaker) -> None:
        while maker.ended:
            # They leave the queue when they are known: a stop in between leaves them to `finish`.
            page = list(islice(maker.ended, _PAGE))
            try:
                found = await self._store.traced(page)
            except (Fault, Conflict, DataRefused) as error:
                # Away with them: a trace with a hole is better than a queue that grows with an outage.
                log.warning("spans.left_out", attempts=len(page), error=str(error))
                _leave(maker, len(page))
                return
            _leave(maker, len(page))
            for ended, facts in found:
                maker.attempt_span(ended, facts)
            await asyncio.sleep(0)


def _leave(maker: SpanMaker, count: int) -> None:
    for _ in range(count):
        maker.ended.popleft()
