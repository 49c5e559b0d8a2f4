"""Looking, once in a while, at what metrics show as it is now."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from rara_scheduler.domain.errors import Fault
from rara_scheduler.sessions import SessionRegistry
from rara_scheduler.store.database import Conflict, DataRefused
from rara_scheduler.telemetry.port import Metrics, Outlook, Queues

log = structlog.get_logger(__name__)

_TICK_S: Final = 1.0
_LAG_TICKS: Final = 15


class _Store(Protocol):
    async def queues(self) -> Queues: ...


class LookLoop:
    """Ticks each second, which shows how late the event loop is; asks the database each `every_s`.

    With metrics off it does not run at all. commit_queue: how many events wait for their commit.
    """

    def __init__(
        self,
        store: _Store,
        sessions: SessionRegistry,
        metrics: Metrics,
        *,
        commit_queue: Callable[[], int],
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._metrics = metrics
        self._commit_queue = commit_queue
        self._every_s = every_s
        self._clock = clock
        self._queues: Queues | None = None
        self._asked_at = float("-inf")
        self._lags_s: deque[float] = deque(maxlen=_LAG_TICKS)

    async def run(self) -> None:
        """Look until cancelled."""
        if not self._metrics.is_on:
            return
        while True:
            if self._clock() - self._asked_at >= self._every_s:
                await self._ask()
            self._tell()
            began_at = self._clock()
            await asyncio.sleep(_TICK_S)
            self._lags_s.append(max(0.0, self._clock() - began_at - _TICK_S))

    async def _ask(self) -> None:
        self._asked_at = self._clock()
        try:
            self._queues = await self._store.queues()
        except (Fault, Conflict, DataRefused) as error:
            self._queues = None  # no number says more than an old one
            log.warning("metrics.look_failed", error=str(error))

    def _tell(self) -> None:
        in_flight = Counter(held.kind for session in self._sessions for held in session.held.values())
        self._metrics.looks(
            Outlook(
                queues=self._queues,
                in_flight=in_flight,
                sessions=len(self._sessions),
                commit_queue=self._commit_queue(),
                loop_lag_s=max(self._lags_s, default=0.0),
            )
        )
