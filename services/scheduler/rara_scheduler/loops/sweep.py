"""Looking, once in a while, for what falls due by itself: expired leases, waits that are over, deadlines."""

import asyncio
import time
from collections.abc import Callable
from uuid import UUID

import structlog

from rara_scheduler.domain.attempt import AttemptEnding, Guard
from rara_scheduler.domain.errors import Code, Fault, StepError
from rara_scheduler.domain.routing import Miss, match
from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.loops.committer import Committer
from rara_scheduler.loops.dispatch import RouteTable
from rara_scheduler.pauses import Pauses
from rara_scheduler.sessions import SessionRegistry
from rara_scheduler.store.cancel import CancelStore
from rara_scheduler.store.commit import LeaseReports
from rara_scheduler.store.database import Conflict, DataRefused, LockTimeout
from rara_scheduler.store.definitions import DefinitionStore, UnusableDefinition
from rara_scheduler.store.sessions import SessionStore
from rara_scheduler.store.sweeps import BEFORE_ALL, FIRST, OverdueLease, SweepStore

log = structlog.get_logger(__name__)

_SHORTEST_WAIT_S = 0.01


class SweepLoop:
    """One cheap look each `sweep_s`, or earlier when a waiting step is due; work only where the look found some.

    After a start or an outage nothing is reclaimed for `settle_s`: executors with finished results are on their
    way back.
    """

    def __init__(
        self,
        sweeps: SweepStore,
        cancels: CancelStore,
        session_store: SessionStore,
        definitions: DefinitionStore,
        sessions: SessionRegistry,
        routes: RouteTable,
        committer: Committer,
        aftermath: Aftermath,
        pauses: Pauses,
        *,
        sweep_s: float,
        lease_s: float,
        settle_s: float,
        silence_s: float,
        cancel_grace_s: float,
        wake_dispatch: Callable[[], None],
        wake_pauses: Callable[[], None],
        nothing_ready: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sweeps = sweeps
        self._cancels = cancels
        self._session_store = session_store
        self._definitions = definitions
        self._sessions = sessions
        self._routes = routes
        self._committer = committer
        self._aftermath = aftermath
        self._pauses = pauses
        self._sweep_s = sweep_s
        self._lease_s = lease_s
        self._settle_s = settle_s
        self._silence_s = silence_s
        self._cancel_grace_s = cancel_grace_s
        self._wake_dispatch = wake_dispatch
        self._wake_pauses = wake_pauses
        self._nothing_ready = nothing_ready
        self._was_ready = True
        self._clock = clock
        self._settled_at = clock() + settle_s
        self._wake = asyncio.Event()
        self.healthy = False  # whether the database answered the last look
        self._answered_at = clock()
        self.others_known = False  # whether executors are connected to other schedulers, too

    def wake(self) -> None:
        """A step waits for a time: look when it is due."""
        self._wake.set()

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            next_due_s: float | None = None
            self._wake.clear()  # before looking: a wake that comes meanwhile is another look
            try:
                next_due_s = await self.sweep()
                self.healthy = True
            except (Fault, Conflict, DataRefused) as error:
                self.healthy = False
                self._settled_at = self._clock() + self._settle_s
                log.warning("sweep.deferred", error=str(error))
                self._release_hostages()
            wait_s = self._sweep_s
            if next_due_s is not None:
                wait_s = min(wait_s, max(_SHORTEST_WAIT_S, next_due_s))
            try:
                async with asyncio.timeout(wait_s):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def _release_hostages(self) -> None:
        """Cut off from the database for half a lease, with another scheduler at work: send the executors there."""
        if self.others_known and self._clock() - self._answered_at > self._lease_s / 2:
            for session in self._sessions:
                session.end("REBALANCE")

    async def sweep(self) -> float | None:
        """Look once and do what is due. Returns seconds until the next waiting step is due; None: none waits."""
        began_at = self._clock()
        outlook = await self._sweeps.look_around()
        self._answered_at = self._clock()
        if not self._pauses.confirmed(outlook.pauses, began_at):
            self._wake_pauses()
        if not outlook.any_ready:
            self._nothing_ready(began_at)
        elif not self._was_ready:
            self._wake_dispatch()
        self._was_ready = outlook.any_ready
        self.others_known = outlook.others_known
        if outlook.newest_route_id > self._routes.newest:
            self._routes.add(await self._definitions.routes_after(self._routes.newest))
            self._wake_dispatch()
        next_due_s = outlook.next_due_s
        if next_due_s is not None and next_due_s <= 0:
            try:
                if await self._sweeps.promote_due():
                    self._wake_dispatch()
            except (Conflict, DataRefused, LockTimeout) as error:
                log.warning("sweep.stage_deferred", stage="promote_due", error=str(error))
            next_due_s = None
        settled = self._clock() >= self._settled_at
        for is_due, stage in (
            (outlook.runs_overdue, self._cancel_overdue_runs),
            (outlook.leases_overdue, self._mark_overdue_leases),
            (outlook.ready_overdue or outlook.waiting_overdue, self._close_overdue_steps),
            (outlook.reclaimable and settled, self._reclaim),
            (any(session.held for session in self._sessions), self._repeat_cancels),
        ):
            if is_due:
                try:
                    await stage()
                except (Fault, Conflict, DataRefused) as error:
                    # One stage that cannot go on must not keep the others from their work.
                    log.warning("sweep.stage_deferred", stage=stage.__name__.strip("_"), error=str(error))
        return next_due_s

    async def _repeat_cancels(self) -> None:
        orders = await self._session_store.undelivered_cancels([s.executor_id for s in self._sessions])
        self._sessions.push_cancels(orders)

    async def _reclaim(self) -> None:
        after = FIRST
        while page := await self._sweeps.reclaimable(after):
            await self._committer.commit_found(
                [
                    LeaseReports(
                        lease.step_run_id,
                        lease.workflow_run_id,
                        lease.lease_token,
                        None,
                        (
                            AttemptEnding(
                                StepError(Code.DISPATCH_LOST, "not accepted in time"), Guard.UNACCEPTED
                            ),
                            AttemptEnding(
                                StepError(Code.LEASE_EXPIRED, "not renewed in time, and reclaimed"),
                                Guard.EXPIRED,
                            ),
                        ),
                    )
                    for lease in page
                    if not self._committer.has_queued(lease.lease_token)
                ]
            )
            after = page[-1].step_run_id

    async def _mark_overdue_leases(self) -> None:
        after = FIRST
        while page := await self._sweeps.overdue_leases(after):
            marks = [(lease, await self._grace_s(lease)) for lease in page]
            if self._sessions.push_cancels(await self._sweeps.mark_leases(marks)):
                self._aftermath.tell_others()
            after = page[-1].step_run_id

    async def _grace_s(self, lease: OverdueLease) -> float:
        try:
            spec = await self._definitions.spec(lease.definition, lease.definition_version)
            own = spec.steps[lease.step_name].cancel_grace_s
        except (LookupError, UnusableDefinition):
            own = None
        return self._cancel_grace_s if own is None else own

    async def _cancel_overdue_runs(self) -> None:
        after = BEFORE_ALL
        while page := await self._sweeps.overdue_runs(after):
            for run in page:
                try:
                    await self._cancel_overdue_run(run.workflow_run_id)
                except (Conflict, DataRefused, LockTimeout) as error:
                    # Its own trouble: those behind it have waited long enough.
                    log.warning("sweep.run_deferred", workflow_run_id=run.workflow_run_id, error=str(error))
            after = (page[-1].deadline, UUID(page[-1].workflow_run_id))

    async def _cancel_overdue_run(self, workflow_run_id: str) -> None:
        result = await self._cancels.cancel_run(
            workflow_run_id,
            reason=Code.DEADLINE_EXCEEDED,
            message="the run's deadline has passed",
            grace_s=None,
            skip_locked=True,
        )
        self._aftermath.cancelled(result)

    async def _close_overdue_steps(self) -> None:
        unserved = await self._unserved_routes()
        after = FIRST
        while page := await self._sweeps.overdue_steps(after, unserved):
            spared = self._pauses.sparing_definitions
            self._aftermath.cancelled(await self._cancels.close_overdue(page, spared=spared))
            after = page[-1].step_run_id

    async def _unserved_routes(self) -> list[int]:
        """Routes that no executor can serve which is connected, here or elsewhere, or may be on its way back.

        A step that is paused waits for the pause, not for an executor.
        """
        if self._clock() < self._settled_at or not self._pauses.are_known:
            return []  # executors are on their way back
        paused = self._pauses.sparing_kinds
        offers = await self._sweeps.live_offers(max(self._silence_s, self._lease_s))
        return [
            route_id
            for route_id, route in self._routes.routes.items()
            if route.kind not in paused and all(isinstance(match(route, offer), Miss) for offer in offers)
        ]
