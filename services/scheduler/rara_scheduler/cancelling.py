"""Cancelling runs and draining executors, as callers of the API ask for it."""

from rara_scheduler.domain.errors import Code
from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.sessions import SessionRegistry
from rara_scheduler.store.cancel import CancelStore
from rara_scheduler.store.sessions import SessionStore


class Cancelling:
    """Stores the wish first, then pushes it to the executors that are connected here; others learn by hint or poll."""

    def __init__(
        self, cancels: CancelStore, store: SessionStore, sessions: SessionRegistry, aftermath: Aftermath
    ) -> None:
        self._cancels = cancels
        self._store = store
        self._sessions = sessions
        self._aftermath = aftermath

    async def cancel_run(self, workflow_run_id: str, *, message: str, grace_s: float | None) -> None:
        """Cancel a run. One that is closed, or already being cancelled, stays as it is."""
        result = await self._cancels.cancel_run(
            workflow_run_id, reason=Code.CANCELLED, message=message, grace_s=grace_s
        )
        self._aftermath.cancelled(result)

    async def drain_executor(self, executor_id: str, *, finish_within_s: float | None) -> bool:
        """Ask an executor to finish and take nothing new. False: there is none of that id."""
        order = await self._store.drain(executor_id, within_s=finish_within_s)
        if order is None:
            return False
        session = self._sessions.get(executor_id)
        if session is not None:
            session.ask_to_drain(order)
        return True
