"""Renewing, in one statement per beat, exactly the leases that executors' heartbeats list."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from rara.v1 import dispatch_pb2

from rara_scheduler.domain.errors import Fault
from rara_scheduler.sessions import Session, SessionRegistry, cancel_message
from rara_scheduler.store.database import Conflict, DataRefused
from rara_scheduler.store.leases import LeaseStore
from rara_scheduler.store.run_ledger import CancelOrder
from rara_scheduler.store.sessions import DrainOrder, SessionStore
from rara_scheduler.telemetry.port import SILENT, Metrics

log = structlog.get_logger(__name__)

_DOUBTFUL_BEATS = 3
_HELD_RETRIES = 3  # for leases that a committer held at that moment


@dataclass(slots=True)
class _Owed:
    """A beat of which some leases, by token, could not be renewed at once."""

    session: Session
    number: int
    tokens: dict[int, str]  # and their steps


class HeartbeatLoop:
    """Gathers heartbeats for a fraction of their interval, renews, and answers.

    `number` is answered at once: it proves that this process lives. `renewed` follows when the database has taken
    the renewal: it keeps the executor's lease clock.
    """

    def __init__(
        self,
        leases: LeaseStore,
        store: SessionStore,
        sessions: SessionRegistry,
        *,
        heartbeat_s: float,
        wake_dispatch: Callable[[], None],
        metrics: Metrics = SILENT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._leases = leases
        self._store = store
        self._sessions = sessions
        self._heartbeat_s = heartbeat_s
        self._wake_dispatch = wake_dispatch
        self._clock = clock
        self._pending: dict[str, tuple[Session, int, Sequence[int]]] = {}
        self._doubtful: set[str] = set()
        self._arrived = asyncio.Event()
        self._owed: dict[str, _Owed] = {}  # by executor, what its newest beat waits for
        self._owing = asyncio.Event()
        self._seen_at = clock()

    def take(self, session: Session, beat: dispatch_pb2.Heartbeat) -> None:
        """A heartbeat came in. A newer one of the same session takes the place of one that still waits."""
        was_proven = session.proven()
        session.heartbeat_number = beat.number
        session.answered = beat.answered
        session.last_heartbeat_at = self._clock()
        self._compare(session, set(beat.lease_tokens))
        if beat.lease_tokens:
            self._pending[session.executor_id] = (session, beat.number, list(beat.lease_tokens))
            self._arrived.set()
        else:
            session.renewed = beat.number  # nothing to renew
        session.send(
            dispatch_pb2.ConnectResponse(
                heartbeat_ack=dispatch_pb2.HeartbeatAck(number=beat.number, renewed=session.renewed)
            )
        )
        if not was_proven:
            self._wake_dispatch()

    def _compare(self, session: Session, listed: set[int]) -> None:
        """Count the beats that leave out a lease which we think the executor holds."""
        session.unlisted = {
            token: session.unlisted.get(token, 0) + 1 for token in session.held if token not in listed
        }
        if any(beats >= _DOUBTFUL_BEATS for beats in session.unlisted.values()):
            self._doubtful.add(session.executor_id)
            self._arrived.set()

    async def _settle_doubts(self) -> None:
        """Forget leases that ended elsewhere and that their executor lists no more: they would hold its room."""
        doubtful, self._doubtful = self._doubtful, set()
        for executor_id in doubtful:
            session = self._sessions.get(executor_id)
            if session is None:
                continue
            held = [
                session.held[t]
                for t, beats in session.unlisted.items()
                if beats >= _DOUBTFUL_BEATS and t in session.held
            ]
            current = await self._leases.current([(h.step_run_id, h.lease_token) for h in held])
            for lease in held:
                if lease.lease_token not in current:
                    session.held.pop(lease.lease_token, None)
                    self._wake_dispatch()

    async def run(self) -> None:
        """Renew until cancelled. A failed renewal is tried again by the next beat: leases outlast several."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew_beats(), name="heartbeats")
            tasks.create_task(self._renew_held(), name="heartbeats of held leases")

    async def _renew_held(self) -> None:
        """Stand in line for leases that a committer holds whenever a beat comes.

        One at a time, so that no transaction waits for a second row while it holds a first.
        """
        while True:
            await self._owing.wait()
            self._owing.clear()
            for executor_id, owed in list(self._owed.items()):
                if self._sessions.get(executor_id) is not owed.session:
                    del self._owed[executor_id]  # whoever has no session renews nothing
                    continue
                for token, step_run_id in list(owed.tokens.items()):
                    try:
                        is_renewed = await self._leases.renew_held(step_run_id, token, executor_id)
                    except (Fault, Conflict, DataRefused):
                        self._owing.set()  # the committer is at it still
                        await asyncio.sleep(self._heartbeat_s / 10)
                        continue
                    self._metrics.renewed(int(is_renewed))
                    self._settle(executor_id, token, is_renewed=is_renewed)

    def _settle(self, executor_id: str, token: int, *, is_renewed: bool) -> None:
        """What the newest beat waited for is renewed by now, also where the wait began with an older one."""
        owed = self._owed.get(executor_id)
        if owed is None:
            return
        if not is_renewed:
            del self._owed[executor_id]  # the next beat tells
            return
        owed.tokens.pop(token, None)
        if owed.tokens:
            return
        del self._owed[executor_id]
        session = owed.session
        session.renewed = max(session.renewed, owed.number)
        session.send(
            dispatch_pb2.ConnectResponse(
                heartbeat_ack=dispatch_pb2.HeartbeatAck(
                    number=session.heartbeat_number, renewed=session.renewed
                )
            )
        )

    async def _renew_beats(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._arrived.wait()
            except TimeoutError:
                pass
            self._arrived.clear()
            pending, self._pending = self._pending, {}
            try:
                if pending:
                    await self._renew(list(pending.values()))
                if self._doubtful:
                    await self._settle_doubts()
                if self._clock() - self._seen_at >= self._heartbeat_s and len(self._sessions):
                    await self._note_seen()
            except (Fault, Conflict, DataRefused) as error:
                log.warning("heartbeat.deferred", error=str(error), sessions=len(pending))
            if pending:
                # Beats of many executors are spread over the interval: gather some, far below what a lease allows.
                await asyncio.sleep(self._heartbeat_s / 10)

    async def _renew(self, beats: Sequence[tuple[Session, int, Sequence[int]]]) -> None:
        wanted = []
        unknown: dict[str, list[int]] = {}
        for session, _, tokens in beats:
            for token in tokens:
                held = session.held.get(token)
                if held is None:
                    unknown.setdefault(session.executor_id, []).append(token)
                else:
                    wanted.append((held.step_run_id, token, session.executor_id))
        steps = {token: step_run_id for step_run_id, token, _ in wanted}
        renewed, lost, busy = await self._leases.renew(wanted)
        for _ in range(_HELD_RETRIES):
            if not busy:
                break
            await asyncio.sleep(0.01)
            again, gone, busy = await self._leases.renew([beat for beat in wanted if beat[1] in busy])
            renewed |= again
            lost |= gone
        self._metrics.renewed(len(renewed))
        for session, number, tokens in beats:
            held_up = {token: steps[token] for token in tokens if token in busy}
            if held_up:
                self._owed[session.executor_id] = _Owed(session, number, held_up)
                self._owing.set()
            else:
                self._owed.pop(session.executor_id, None)
                session.renewed = max(session.renewed, number)
            mine_lost = [token for token in tokens if token in lost]
            for token in mine_lost:
                session.held.pop(token, None)
            cancels = [
                cancel_message(
                    CancelOrder(
                        session.executor_id, token, answer.cancel_reason, answer.cancel_grace_s or 0.0
                    )
                )
                for token in tokens
                if (answer := renewed.get(token)) is not None and answer.cancel_reason is not None
            ]
            session.send(
                dispatch_pb2.ConnectResponse(
                    heartbeat_ack=dispatch_pb2.HeartbeatAck(
                        number=session.heartbeat_number,
                        renewed=session.renewed,
                        lost_lease_tokens=mine_lost + unknown.get(session.executor_id, []),
                        cancels=cancels,
                    )
                )
            )

    async def _note_seen(self) -> None:
        self._seen_at = self._clock()
        noted = [
            (s.executor_id, s.session_id, len(s.held), s.free_credit())
            for s in self._sessions
            if self._clock() - s.last_heartbeat_at <= 2 * self._heartbeat_s
        ]
        alive = await self._store.seen(noted)
        for one in self._sessions:
            if refused := one.unserved - one.withdrawn:
                await self._store.withdraw(one.executor_id, one.session_id, sorted(refused))
                one.withdrawn |= refused
            row = alive.get(one.executor_id)
            if one.draining and row is not None and row.is_newest and row.drain is None:
                await self._store.drain(one.executor_id)  # its own word: who looks at its row has to know
        for executor_id, session_id, _, _ in noted:
            session = self._sessions.get(executor_id)
            if session is None or session.session_id != session_id:
                continue
            seen = alive.get(executor_id)
            if seen is None:
                continue  # its row is gone; that says nothing about another session
            if not seen.is_newest:
                session.end("REPLACED")
            elif seen.drain is not None and _is_news(session, seen.drain):
                session.ask_to_drain(seen.drain)


def _is_news(session: Session, order: DrainOrder) -> bool:
    """Whether an operator has asked elsewhere for what this session's executor was not told."""
    return not session.draining or (order.by is not None and order.by != session.drain_by)
