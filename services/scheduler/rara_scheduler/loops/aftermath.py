"""What follows a commit: answers to executors, cancels on their way, watchers and loops woken."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import structlog
from rara.v1 import common_pb2, dispatch_pb2

from rara_scheduler.domain.attempt import Decision, Refusal
from rara_scheduler.domain.errors import Code
from rara_scheduler.draining import Draining
from rara_scheduler.sessions import SessionRegistry
from rara_scheduler.store.cancel import CancelResult
from rara_scheduler.store.commit import BatchResult, Late
from rara_scheduler.store.run_ledger import CancelOrder
from rara_scheduler.telemetry.port import SILENT, Metrics

log = structlog.get_logger(__name__)


class Hub(Protocol):
    def publish(self, workflow_run_ids: Iterable[str]) -> None: ...

    def ended(self, workflow_run_ids: Iterable[str]) -> None: ...


class Ends(Protocol):
    def ended(self, workflow_run_ids: Iterable[str]) -> None: ...


class Aftermath:
    """Carries out what commits ask for. Synchronous: nothing here may wait.

    wake_dispatch: steps became leasable. credit_freed: a session can take more. wake_sweep: a step waits for a time.
    tell_others: cancels belong to executors of other schedulers.
    """

    def __init__(
        self,
        sessions: SessionRegistry,
        hub: Hub,
        *,
        wake_dispatch: Callable[[], None],
        credit_freed: Callable[[], None],
        wake_sweep: Callable[[], None],
        tell_others: Callable[[], None],
        metrics: Metrics = SILENT,
        draining: Draining | None = None,
        ends: Ends | None = None,
    ) -> None:
        self._sessions = sessions
        self._metrics = metrics
        self._draining = draining or Draining(sessions)
        self._hub = hub
        self._ends = ends
        self._wake_dispatch = wake_dispatch
        self._credit_freed = credit_freed
        self._wake_sweep = wake_sweep
        self.tell_others = tell_others

    def committed(self, result: BatchResult, reporters: dict[int, str]) -> None:
        """A batch was committed. reporters: executor_id by lease token, of those who wait for an answer."""
        self._runs_ended(result.ended_runs)  # first, since somebody may be waiting for just that
        answers: dict[str, dispatch_pb2.EventAcks] = {}
        credit_freed = False
        for token, decision in result.decisions.items():
            executor_id = reporters.get(token, decision.lease.executor_id)
            session = self._sessions.get(executor_id)
            if session is not None:
                if decision.accept:
                    session.lapsed_grants = 0
                if decision.closing is not None and session.held.pop(token, None) is not None:
                    credit_freed = True
                    # Only what was really sent on this session, and not taken up, says something about it.
                    if decision.closing.reason == Code.DISPATCH_LOST and not decision.lease.accepted:
                        session.lapsed_grants += 1
            if token in reporters:
                _answer(answers.setdefault(executor_id, dispatch_pb2.EventAcks()), token, decision)
            if decision.closing is not None:
                _log_ending(decision)
        for token, late in result.late.items():
            if token in reporters:
                session = self._sessions.get(reporters[token])
                credit_freed |= session is not None and session.held.pop(token, None) is not None
                _answer_late(answers.setdefault(reporters[token], dispatch_pb2.EventAcks()), token, late)
        for executor_id, acks in answers.items():
            session = self._sessions.get(executor_id)
            if session is not None and (acks.acks or acks.refusals):
                session.send(dispatch_pb2.ConnectResponse(acks=acks))
        self._follow_up(result.orders, result.changed_runs)
        if result.made_ready:
            self._wake_dispatch()
        elif credit_freed:
            self._credit_freed()
        if result.made_waiting:
            self._wake_sweep()
        self._metrics.attempts_ended(result.decisions.values())
        self._draining.committed(result.decisions)
        self._metrics.steps_cancelled(result.closed_unheld)

    def cancelled(self, result: CancelResult) -> None:
        self._follow_up(result.orders, result.changed_runs)
        self._runs_ended(result.ended_runs)
        self._metrics.steps_cancelled(result.closed_unheld)

    def _runs_ended(self, runs: Mapping[str, str]) -> None:
        """runs: how they ended, by id."""
        self._metrics.runs_ended(runs.values())
        self._hub.ended(runs)
        if runs and self._ends is not None:
            self._ends.ended(runs)

    def _follow_up(self, orders: list[CancelOrder], changed_runs: set[str]) -> None:
        if orders and self._sessions.push_cancels(orders):
            self.tell_others()
        if changed_runs:
            self._hub.publish(changed_runs)


def _answer(acks: dispatch_pb2.EventAcks, token: int, decision: Decision) -> None:
    if decision.last_sequence:
        acks.acks.add(lease_token=token, sequence=decision.last_sequence, missing=decision.missing)
    acks.refusals.extend(refusal_message(token, refusal) for refusal in decision.refused)


def _answer_late(acks: dispatch_pb2.EventAcks, token: int, late: Late) -> None:
    if late.stored:
        acks.acks.add(lease_token=token, sequence=max(late.stored))
    for sequence in late.lost:
        acks.refusals.add(
            lease_token=token,
            sequence=sequence,
            code=Code.LEASE_LOST,
            message="the lease has passed on: stop, and drop the result",
        )


def refusal_message(token: int, refusal: Refusal) -> dispatch_pb2.EventRefusal:
    return dispatch_pb2.EventRefusal(
        lease_token=token,
        sequence=refusal.sequence,
        code=refusal.code,
        message=refusal.message,
        digests=[common_pb2.Digest(sha256=s, size_bytes=n) for s, n in refusal.digests],
    )


def _log_ending(decision: Decision) -> None:
    lease, closing = decision.lease, decision.closing
    if closing is None or not closing.reason:
        return  # successes are told by the metrics and the history; a line each would drown the rest
    log.info(
        "step.attempt_ended",
        workflow_run_id=lease.workflow_run_id,
        step_run_id=lease.step_run_id,
        attempt=lease.attempt,
        lease_token=lease.lease_token,
        state=closing.to.value,
        reason=str(closing.reason),
        code=str(closing.error.code) if closing.error else "",
    )
