"""Leasing ready steps for the free credit of this scheduler's sessions, and sending them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import structlog
from rara.v1 import job_pb2

from rara_scheduler.domain.attempt import AttemptEnding
from rara_scheduler.domain.errors import Code, Fault, StepError
from rara_scheduler.domain.routing import Capability, Miss, Offer, Route, match
from rara_scheduler.loops.committer import Committer, Submission
from rara_scheduler.loops.pace import Pace
from rara_scheduler.sessions import Held, Session, SessionRegistry
from rara_scheduler.store.database import Conflict, DataRefused
from rara_scheduler.store.definitions import UnusableDefinition
from rara_scheduler.store.leases import Cursor, Grant, HeldElsewhere, HeldInFront, LeaseStore
from rara_scheduler.store.run_ledger import Specs
from rara_scheduler.store.sweeps import BEFORE_ALL
from rara_scheduler.telemetry.port import SILENT, UNTRACED, Metrics, Sent, Tracing
from rara_scheduler.telemetry.span_clock import epoch_ns
from rara_scheduler.transport.jobs import UnfitJob, build_job

log = structlog.get_logger(__name__)

_CURSOR_LIFE_S = 3.0  # then probes begin at the front again
_FEW_ROUTES = 4
# Slots that a statement is offered: four times what the last turn gave, since each costs to deal and to send, or four
# times as many where it left something; that is followed by the next at once.
_LEAST_OFFERED = 16
_OFFERED_TIMES = 4
_NEWLY = 1.5  # polls
# Room that becomes free where nothing was left to lease: what came since wakes us by itself, other schedulers tell what
# they cannot serve, and a look would only be in the way of what comes next.
_NO_HURRY_S = 0.2


@dataclass(slots=True)
class _Group:
    """Sessions that serve the same routes with the same concurrency."""

    routes: dict[int, str]  # route_id -> the version of its kind to run
    sessions: list[Session]


@dataclass(frozen=True, slots=True)
class _Granted:
    """When a grant's statement began and ended, in epoch nanoseconds; at: its end on the monotonic clock."""

    began_ns: int
    ended_ns: int
    at: float


class Pauses(Protocol):
    """What nothing may be leased of. are_known: false while it cannot be told; then nothing is leased at all."""

    @property
    def are_known(self) -> bool: ...
    @property
    def kinds(self) -> frozenset[str]: ...
    @property
    def definitions(self) -> frozenset[str]: ...


class RouteTable:
    """All routes that exist, and what each distinct offer serves of them."""

    def __init__(self) -> None:
        self.routes: dict[int, Route] = {}
        self.newest = 0
        self._served: dict[str, dict[int, str]] = {}
        self._checked: dict[str, int] = {}

    def add(self, routes: Sequence[Route]) -> None:
        for route in routes:
            self.routes[route.route_id] = route
            self.newest = max(self.newest, route.route_id)

    def served(self, session: Session) -> dict[int, str]:
        """route_id -> kind_version, for the routes that the session's executor can run."""
        key = session.session_id
        served = self._served.setdefault(key, {})
        checked = self._checked.get(key, 0)
        if checked < self.newest:
            offer = _still_offered(session)
            for route_id, route in self.routes.items():
                if route_id > checked:
                    found = match(route, offer)
                    if not isinstance(found, Miss):
                        served[route_id] = found
            self._checked[key] = self.newest
        return served

    def forget(self, session: Session) -> None:
        """The session ended, or no longer serves what it offered."""
        self._served.pop(session.session_id, None)
        self._checked.pop(session.session_id, None)


def _still_offered(session: Session) -> Offer:
    """The offer less what the executor has refused since."""
    offer = session.offer
    if not session.unserved:
        return offer
    kept = []
    for capability in offer.capabilities:
        versions = tuple(v for v in capability.versions if (capability.kind, v) not in session.unserved)
        if versions:
            kept.append(Capability(capability.kind, versions, capability.max_concurrency))
    return Offer(offer.executor_kind, tuple(kept), offer.labels)


class DispatchLoop:
    """Wakes on work, credit and hints; a poll alone finds everything, too.

    while_idle_s: the poll. A step is leased only when it can be sent at once.
    """

    def __init__(
        self,
        leases: LeaseStore,
        specs: Specs,
        sessions: SessionRegistry,
        routes: RouteTable,
        committer: Committer,
        pauses: Pauses,
        *,
        lease_s: float,
        poll_s: float,
        lease_batch: int,
        max_payload_bytes: int,
        tell_others: Callable[[], None],
        metrics: Metrics = SILENT,
        tracing: Tracing = UNTRACED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leases = leases
        self._specs = specs
        self._sessions = sessions
        self._routes = routes
        self._committer = committer
        self._pauses = pauses
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._lease_batch = lease_batch
        self._max_payload_bytes = max_payload_bytes
        self._tell_others = tell_others
        self._metrics = metrics
        self._tracing = tracing
        self._clock = clock
        self._wake = asyncio.Event()
        self._turning = asyncio.Lock()  # held during a turn
        self._asked = False  # by more than free credit
        self._emptied: set[int] = set()  # routes of which the last turn left nothing
        self._no_hurry: asyncio.TimerHandle | None = None
        self._local_work = False
        self._none_ready_at = float("-inf")
        self._cursors: dict[int, Cursor] = {}
        self._cursors_at = clock()
        self._turn = 0
        self._first = 0
        self._granted = 0  # leases, by the largest statement of this turn
        self._offered = _LEAST_OFFERED
        self._pace = Pace(clock)
        self.stopping = False

    def wake(self) -> None:
        """Steps may have become leasable, or somebody may serve them now."""
        self._asked = True
        self._wake.set()

    def credit_freed(self) -> None:
        """A session can take more: a look is due at once only where the last one may have left something."""
        self._wake.set()

    def nothing_ready(self, at: float) -> None:
        """A look that began at `at` found no ready step at all."""
        self._none_ready_at = at

    def work_submitted(self) -> None:
        """A step became leasable by an act of this process; other schedulers may have to be told."""
        self._local_work = True
        self.wake()

    def look_from_front(self) -> None:
        """Steps came back, or stepped aside, that cursors may have passed."""
        self._cursors.clear()
        self.wake()

    async def turn_over(self) -> None:
        """Return when the turn that is under way, if any, has ended: what it leases it has leased."""
        async with self._turning:
            pass

    async def run(self) -> None:
        """Lease and send until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._wake.wait()
            except TimeoutError:
                if self._clock() - self._none_ready_at <= _NEWLY * self._poll_s:
                    continue  # the sweep has looked
                self._asked = True
            if self._offered == _LEAST_OFFERED:
                await self._pace.rest()
            self._wake.clear()
            if self.stopping:
                continue
            asked, self._asked = self._asked, False
            if not asked and self._is_emptied():
                if self._no_hurry is None:
                    self._no_hurry = asyncio.get_running_loop().call_later(_NO_HURRY_S, self._hurry)
                continue
            if self._no_hurry is not None:
                self._no_hurry.cancel()
                self._no_hurry = None
            local, self._local_work = self._local_work, False
            began_at = self._clock()
            try:
                again = True
                while again:
                    async with self._turning:
                        again = await self._dispatch_once()
                    await asyncio.sleep(
                        0
                    )  # others run between two full turns: acks and heartbeats are due as well
                self._pace.took(self._clock() - began_at)
                if local and self._cannot_serve_all():
                    self._tell_others()
            except (Fault, Conflict, DataRefused) as error:
                log.warning("dispatch.deferred", error=str(error))

    def _hurry(self) -> None:
        self._no_hurry = None
        self.wake()

    def _is_emptied(self) -> bool:
        """Whether nothing was left of all that could be leased now."""
        return bool(self._emptied) and all(group.routes.keys() <= self._emptied for group in self._groups())

    def _cannot_serve_all(self) -> bool:
        free = [session for session in self._sessions if session.free_credit()]
        if not free:
            return True
        served: set[int] = set()
        for session in free:
            served |= self._routes.served(session).keys()
        return len(served) < len(self._routes.routes)

    async def _dispatch_once(self) -> bool:
        """One turn over all sessions with free credit. True: a statement came back full, so look again at once."""
        if not self._pauses.are_known:
            return False
        if self._clock() - self._cursors_at > _CURSOR_LIFE_S:
            self._cursors.clear()
            self._cursors_at = self._clock()
        self._turn += 1
        self._emptied.clear()
        again = False
        self._granted = 0
        for group in self._groups():
            again |= await self._serve(group)
        if self._granted:
            self._first += 1
        self._offered = min(self._lease_batch, max(_LEAST_OFFERED, _OFFERED_TIMES * self._granted))
        return again

    def _groups(self) -> list[_Group]:
        groups: dict[tuple[object, ...], _Group] = {}
        sessions = list(self._sessions)
        # One after the other comes first, else the same one would always have its pick of what several can run.
        first = self._first % len(sessions) if sessions else 0
        for session in sessions[first:] + sessions[:first]:
            if session.free_credit() <= 0:
                continue
            served = self._unpaused(self._routes.served(session))
            if not served:
                continue
            limited = any(c.max_concurrency for c in session.offer.capabilities)
            key: tuple[object, ...] = (session.executor_id,) if limited else tuple(sorted(served.items()))
            groups.setdefault(key, _Group(served, [])).sessions.append(session)
        return list(groups.values())

    def _unpaused(self, served: dict[int, str]) -> dict[int, str]:
        """Without the routes of paused kinds."""
        kinds = self._pauses.kinds
        if not kinds:
            return served
        return {
            route_id: version
            for route_id, version in served.items()
            if self._routes.routes[route_id].kind not in kinds
        }

    async def _serve(self, group: _Group) -> bool:
        slots = _deal(group.sessions, min(self._offered, self._lease_batch))
        limits = self._limits(group, len(slots))
        if not slots or not limits:
            return False
        probes = [
            (route_id, most, self._cursors.get(route_id, BEFORE_ALL), group.routes[route_id])
            for route_id, most in limits.items()
        ]
        granting_ns = epoch_ns()
        try:
            grants = await self._leases.grant(probes, slots, barred=self._pauses.definitions)
        except HeldInFront:
            return True
        except HeldElsewhere:
            return False
        granted = _Granted(granting_ns, epoch_ns(), self._clock())
        for grant in {
            grant.route_id: grant for grant in grants
        }.values():  # of each route the last: they are in order
            seen = (grant.available_at, UUID(grant.step_run_id))
            if seen > self._cursors.get(grant.route_id, BEFORE_ALL):
                self._cursors[grant.route_id] = seen
        if grants:
            self._granted = max(self._granted, len(grants))
            try:
                await self._send(group, grants, granted)
            except (Fault, Conflict, DataRefused):
                # Leased, and what the jobs need could not be loaded: back at once, not after the accept timeout.
                for grant in grants:
                    self._give_back(
                        grant, StepError(Code.DISPATCH_LOST, "the database went away while leasing")
                    )
                raise
        taken = Counter(grant.route_id for grant in grants)
        is_short = len(grants) < min(len(slots), sum(limits.values()))
        if is_short and not any(taken[route_id] >= most for route_id, most in limits.items()):
            had_cursors = any(cursor is not BEFORE_ALL for _, _, cursor, _ in probes)
            for route_id in limits:  # what comes next is found from the front by one look
                self._cursors.pop(route_id, None)
            if had_cursors:
                return True  # a cursor must not hide what was committed late or put in behind it
            self._emptied |= limits.keys()
            return False
        if grants:
            self._granted = max(self._granted, len(slots))  # more is left: the offer must not stay as it is
        return bool(grants)

    def _limits(self, group: _Group, slots: int) -> dict[int, int]:
        """How many steps of each route may be taken in this turn."""
        most = slots if len(group.routes) <= _FEW_ROUTES else max(1, -(-2 * slots // len(group.routes)))
        limits = dict.fromkeys(group.routes, most)
        if len(group.sessions) > 1 or not any(
            c.max_concurrency for c in group.sessions[0].offer.capabilities
        ):
            return limits
        by_kind: dict[str, list[int]] = {}
        for route_id in group.routes:
            by_kind.setdefault(self._routes.routes[route_id].kind, []).append(route_id)
        for kind, route_ids in by_kind.items():
            room = group.sessions[0].room(kind, most)
            if room >= most and len(route_ids) == 1:
                continue
            for route_id in route_ids:
                limits.pop(route_id)
            if room:
                # Routes of one kind share its room: one of them gets it, another one in the next turn.
                limits[route_ids[self._turn % len(route_ids)]] = room
        return limits

    async def _send(self, group: _Group, grants: Sequence[Grant], granted: "_Granted") -> None:
        specs = []
        for grant in grants:
            try:
                definition = await self._specs.spec(grant.definition, grant.definition_version)
                specs.append((grant, definition.steps[grant.step_name]))
            except (LookupError, UnusableDefinition) as error:
                # A row that somebody changed by hand: its own step's trouble, not its neighbours'.
                log.error("dispatch.definition_unreadable", **_names(grant), error=repr(error))
                self._give_back(
                    grant,
                    StepError(Code.PAYLOAD_INVALID, "its definition cannot be read", retryable=False),
                )
        materials = await self._leases.materials(specs)
        sessions = {session.executor_id: session for session in group.sessions}
        jobs: dict[str, list[job_pb2.JobRequest]] = {}
        sent: list[tuple[Grant, job_pb2.JobRequest]] = []
        for grant, spec in specs:
            session = sessions[grant.executor_id]
            try:
                job = build_job(
                    grant,
                    spec,
                    materials,
                    executor_kind=session.offer.executor_kind,
                    kind_version=group.routes[grant.route_id],
                    lease_s=self._lease_s,
                    max_payload_bytes=self._max_payload_bytes,
                    trace=self._tracing.attempt_context(
                        grant.traceparent, grant.tracestate, grant.lease_token
                    ),
                )
            except UnfitJob as unfit:
                self._give_back(grant, unfit.error)
                continue
            except Exception as error:
                log.error("dispatch.unbuildable", **_names(grant), error=repr(error))
                self._give_back(
                    grant,
                    StepError(Code.PAYLOAD_INVALID, "the job cannot be put together", retryable=False),
                )
                continue
            if session.closing or session.exhausted or self._sessions.get(session.executor_id) is not session:
                # The stream ended, or proved deaf, while the lease was being committed: nobody will read this.
                self._give_back(
                    grant, StepError(Code.DISPATCH_LOST, "the session ended before the job was sent")
                )
                continue
            session.held[grant.lease_token] = Held(
                grant.step_run_id,
                grant.workflow_run_id,
                grant.lease_token,
                grant.attempt,
                spec.kind,
                group.routes[grant.route_id],
            )
            jobs.setdefault(session.executor_id, []).append(job)
            sent.append((grant, job))
        for executor_id, batch in jobs.items():
            session = sessions[executor_id]
            session.jobs_sent += len(batch)
            session.send_jobs(batch)
        self._tell_sent(sent, granted)

    def _tell_sent(self, sent: Sequence[tuple[Grant, job_pb2.JobRequest]], granted: "_Granted") -> None:
        if self._metrics.is_on:
            since_s = self._clock() - granted.at
            self._metrics.dispatched((job.kind, grant.waited_s + since_s) for grant, job in sent)
        if self._tracing.is_on:
            now_ns = epoch_ns()
            self._tracing.sent(
                Sent(
                    job.trace.traceparent,
                    job.trace.tracestate,
                    grant.lease_token,
                    job.kind,
                    granted.began_ns,
                    granted.ended_ns,
                    now_ns,
                )
                for grant, job in sent
                if job.trace.traceparent
            )

    def _give_back(self, grant: Grant, error: StepError) -> None:
        self._committer.submit(
            Submission(
                grant.step_run_id, grant.workflow_run_id, grant.lease_token, None, AttemptEnding(error)
            )
        )


def _names(grant: Grant) -> dict[str, object]:
    """What every log line about a grant says."""
    return {
        "workflow_run_id": grant.workflow_run_id,
        "step_run_id": grant.step_run_id,
        "attempt": grant.attempt,
        "lease_token": grant.lease_token,
    }


def _deal(sessions: Sequence[Session], most: int) -> list[str]:
    """An executor_id per free slot, dealt in turn so that load spreads; `most` in all."""
    free = {each.executor_id: credit for each in sessions if (credit := each.free_credit()) > 0}
    slots: list[str] = []
    while free and len(slots) < most:
        for executor_id in list(free):
            slots.append(executor_id)
            free[executor_id] -= 1
            if not free[executor_id]:
                del free[executor_id]
            if len(slots) == most:
                break
    return slots
