"""What becomes of the leases of this scheduler's sessions while it stops."""

import time
from collections.abc import Callable, Mapping

import structlog

from rara_scheduler.domain.attempt import Decision
from rara_scheduler.domain.errors import Code
from rara_scheduler.sessions import Session, SessionRegistry

log = structlog.get_logger(__name__)


class Draining:
    """From the request to stop until its one log line, which has the fields that executors use.

    finished: attempts whose end was stored meanwhile. handed_back: leases that go on elsewhere at no cost: left to
    executors that were sent to another scheduler, or given back. lost: leases of executors that could not be told.
    spent: of the attempts that ended, those that cost their step a failure.
    """

    def __init__(self, sessions: SessionRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._sessions = sessions
        self._clock = clock
        self._began_at: float | None = None
        self._seen: dict[str, Session] = {}  # by session_id
        self._ended: dict[int, tuple[bool, bool]] = {}  # by lease token: (given back, spent)
        self._counts: dict[str, int] | None = None
        self._is_told = False

    def begin(self) -> None:
        """A stop was asked for, or a session was found since. A repeat adds what is new."""
        if self._began_at is None:
            self._began_at = self._clock()
        self._seen |= {session.session_id: session for session in self._sessions}

    def committed(self, decisions: Mapping[int, Decision]) -> None:
        """A transaction has ended attempts."""
        if self._began_at is None:
            return
        for token, decision in decisions.items():
            if decision.closing is not None:
                is_back = decision.closing.reason == Code.EXECUTOR_SHUTDOWN
                self._ended[token] = is_back, decision.closing.spent

    def close(self) -> None:
        """Count, before sessions that are still there are cut. A repeat changes nothing."""
        if self._counts is not None:
            return
        given_back = sum(is_back for is_back, _ in self._ended.values())
        untold = {session.session_id for session in self._sessions if not session.was_told}
        left = {
            token: session.session_id not in untold
            for session in self._seen.values()
            for token in session.held
            if token not in self._ended
        }
        self._counts = {
            "finished": len(self._ended) - given_back,
            "handed_back": given_back + sum(left.values()),
            "lost": len(left) - sum(left.values()),
            "spent": sum(spent for _, spent in self._ended.values()),
        }

    def tell(self) -> None:
        """Say it, once, if a stop was asked for."""
        if self._began_at is None or self._is_told:
            return
        self._is_told = True
        self.close()
        log.info("drain.ended", **(self._counts or {}), duration_s=round(self._clock() - self._began_at, 3))
