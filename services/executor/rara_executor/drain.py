"""The end of an executor: no new job, running ones finish or are handed back, the last word is Goodbye."""

import asyncio
from collections.abc import Callable
from typing import Protocol

import structlog

from rara_executor.drain_tally import DrainTally
from rara_executor.session import JobSession
from rara_executor.supervisor import Supervisor

log = structlog.get_logger(__name__)

# Of the stop bound, what is kept for asking, killing and the last acknowledgements.
LAST_WORDS_FRACTION = 0.3
MAX_LAST_WORDS_S = 3.0
# Of the last words, what is left when no more acknowledgements are waited for: Goodbye, and the end of the process.
END_FRACTION = 1 / 3
# How long acknowledgements are waited for after an operator's drain, which has no bound of its own.
ACKS_S = 30.0
GOODBYE_S = 5.0


class SessionHolder(Protocol):
    """Whoever has the session of the moment. goodbye_gives_back: with it goes what is still held."""

    goodbye_gives_back: bool

    @property
    def session(self) -> JobSession | None: ...


class Drain:
    """Begun by our own stop, which has a bound, or by an operator, who may give one; each ends with one log line."""

    def __init__(self, supervisor: Supervisor, *, stop_s: float) -> None:
        self._supervisor = supervisor
        self._last_words_s = min(MAX_LAST_WORDS_S, stop_s * LAST_WORDS_FRACTION)
        self._stop_s = stop_s
        self._loop = asyncio.get_running_loop()
        self._stop_by = float("inf")  # by our own stop
        self._finish_by = float("inf")  # by the operator's word
        self._began_at: float | None = None
        self._is_told = False
        self.begun = asyncio.Event()

    def stop(self) -> None:
        """End within the stop bound from now. A repeat changes nothing."""
        self._stop_by = min(self._stop_by, self._loop.time() + self._stop_s)
        self._begin()

    def asked(self, finish_within_s: float | None) -> None:
        """An operator has asked for it. None: what runs may take as long as it needs."""
        if finish_within_s is not None:
            self._finish_by = self._loop.time() + finish_within_s
        self._begin()

    async def run(self, connection: SessionHolder, sessions: asyncio.Task[bool]) -> None:
        """From begun to the end. sessions: the task that ends with Goodbye, and whether that was heard."""
        supervisor = self._supervisor
        supervisor.tally = DrainTally()
        was_heard = False
        try:
            await self._run(connection, sessions)
            was_heard = sessions.done() and not sessions.cancelled() and sessions.result()
        finally:
            self.tell(was_heard=was_heard, gives_back=connection.goodbye_gives_back)

    def tell(self, *, was_heard: bool = False, gives_back: bool = False) -> None:
        """Say what became of the jobs, once, if a stop or a drain was asked for."""
        if self._began_at is None or self._is_told:
            return
        self._is_told = True
        supervisor = self._supervisor
        tally = supervisor.tally or DrainTally()
        tally.close(left=len(supervisor.jobs), was_heard=was_heard, gives_back=gives_back)
        log.info("drain.ended", **tally.fields(self._loop.time() - self._began_at))

    async def _run(self, connection: SessionHolder, sessions: asyncio.Task[bool]) -> None:
        supervisor = self._supervisor
        left_s = self._finish_at() - self._loop.time()
        finish_within_s = None if left_s == float("inf") else max(0.0, left_s)
        log.info("executor.draining", finish_within_s=finish_within_s, running=len(supervisor.running))
        supervisor.drain(finish_within_s)
        await self._until(lambda: not supervisor.running or sessions.done(), self._finish_at)
        supervisor.hand_back(self._last_words_s / 2)
        acks_by = self._loop.time() + ACKS_S
        end_s = self._last_words_s * END_FRACTION
        await self._until(
            lambda: not supervisor.jobs or sessions.done(), lambda: min(acks_by, self._stop_by - end_s)
        )
        if supervisor.jobs:
            log.warning("executor.ended_with_jobs", held_jobs=len(supervisor.jobs))
        if connection.session is not None:
            connection.session.goodbye()
            await asyncio.wait([sessions], timeout=self._goodbye_s(end_s / 2))

    def _goodbye_s(self, least_s: float) -> float:
        """How long an answer to Goodbye is waited for: longer where it says what became of jobs."""
        tally = self._supervisor.tally
        if not self._supervisor.jobs and (tally is None or not tally.awaits_goodbye):
            return least_s
        return max(least_s, min(GOODBYE_S, self._stop_by - self._loop.time() - least_s))

    def _begin(self) -> None:
        if self._began_at is None:
            self._began_at = self._loop.time()
        self.begun.set()
        self._supervisor.changed.set()  # a bound has moved

    def _finish_at(self) -> float:
        return min(self._finish_by, self._stop_by - self._last_words_s)

    async def _until(self, condition: Callable[[], bool], deadline: Callable[[], float]) -> None:
        changed = self._supervisor.changed
        while not condition():
            left_s = deadline() - self._loop.time()
            if left_s <= 0:
                return
            changed.clear()
            try:
                async with asyncio.timeout(None if left_s == float("inf") else left_s):
                    await changed.wait()
            except TimeoutError:
                return
