"""What this scheduler wrote last of small runs, so that a commit of one lease need not read it (ADR 0026)."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final

from rara_scheduler.domain.attempt import Decision, LeaseFacts
from rara_scheduler.domain.run import TERMINAL
from rara_scheduler.store.run_ledger import LockedRun

MAX_RUNS: Final = 1000
MAX_STEPS: Final = 32  # of a run that is remembered
# Of larger sets, of starts or of leases, nothing is remembered: what comes next of them comes in sets as well.
MAX_TOGETHER: Final = 32


@dataclass(slots=True)
class _Known:
    run: LockedRun
    leases: dict[str, LeaseFacts] = field(default_factory=dict)  # by step_run_id


class KnownRuns:
    """Runs at the revisions that this scheduler made, and those of their leases that it granted or took reports of.

    Nobody is told what another scheduler, or another part of this one, has done to them since: every change of a run or
    of a lease that a decision depends on raises the run's revision, and whoever decides by what is known here must
    write only where the revision is still the same, on the same server. The exceptions are a renewal and the request
    that a lease end. Runs whose end is asked for are not known. The runs that were of use least lately are forgotten.

    server: when the server was started that all of it was told by; None: not asked yet.
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._runs: OrderedDict[str, _Known | None] = OrderedDict()  # None: others move it as well
        self.server: datetime | None = None
        self.epoch = 0  # another one with each server

    def __len__(self) -> int:
        return len(self._runs)

    def has(self, workflow_run_id: str) -> bool:
        return self._runs.get(workflow_run_id) is not None

    def started(self, runs: Iterable[LockedRun]) -> None:
        """Runs as they were started here."""
        for run in runs:
            if run.total <= MAX_STEPS:
                self._keep(_Known(run))

    def granted(self, leases: Iterable[LeaseFacts], epoch: int) -> None:
        """Leases of known runs that were granted here since `epoch`: no change of their runs."""
        if epoch != self.epoch:
            return
        for lease in leases:
            known = self._runs.get(lease.workflow_run_id)
            if known is not None:
                known.leases[lease.step_run_id] = lease
                self._runs.move_to_end(lease.workflow_run_id)

    def committed(self, runs: Iterable[LockedRun], decisions: Iterable[Decision], epoch: int) -> None:
        """What a transaction that has committed since `epoch` made of runs, which it had locked or found unmoved.

        All of them, and the leases of decisions that go on, are kept: they belong to nobody else from now on.
        """
        if epoch != self.epoch:
            return
        for run in runs:
            run_id = run.workflow_run_id
            if run.cancel_reason is not None or run.state in TERMINAL or run.total > MAX_STEPS:
                self._runs.pop(run_id, None)
                continue
            before = self._runs.get(run_id)
            if before is None and run_id in self._runs:
                continue
            leases = before.leases if before is not None and before.run.revision == run.revision else {}
            if run.touched:
                run.revision = run.next_revision
            run.touched = run.started = False
            self._keep(_Known(run, leases))
        for decision in decisions:
            lease = decision.lease
            known = self._runs.get(lease.workflow_run_id)
            if known is None:
                continue
            if decision.closing is not None or lease.cancel_reason is not None:
                known.leases.pop(lease.step_run_id, None)
            else:
                lease.accepted |= decision.accept
                lease.started |= decision.start
                lease.last_sequence = decision.last_sequence
                lease.gaps = decision.gaps
                known.leases[lease.step_run_id] = lease

    def forget(self, workflow_run_ids: Iterable[str]) -> None:
        for run_id in workflow_run_ids:
            self._runs.pop(run_id, None)

    def contested(self, workflow_run_id: str, revision: int) -> None:
        """It was not at this revision any more. If nobody here has moved it, others do, and it is not remembered again:
        each commit of theirs would cost one of ours a statement for nothing."""
        known = self._runs.get(workflow_run_id)
        if known is not None and known.run.revision == revision:
            self._runs[workflow_run_id] = None

    def told_by(self, server: datetime) -> None:
        """All that is known from now on is known of this server. Of another one, to which not all has come that was
        committed, revisions mean other things."""
        if server != self.server:
            self.server = server
            self._runs.clear()
            self.epoch += 1

    def of(
        self, workflow_run_id: str, step_run_id: str, lease_token: int
    ) -> tuple[LockedRun, LeaseFacts] | None:
        """The run, to be changed at will, and the lease, which is not; None: they are not known."""
        known = self._runs.get(workflow_run_id)
        lease = known.leases.get(step_run_id) if known is not None else None
        if known is None or lease is None or lease.lease_token != lease_token:
            return None
        return replace(known.run), lease

    def _keep(self, known: _Known) -> None:
        run_id = known.run.workflow_run_id
        self._runs[run_id] = known
        self._runs.move_to_end(run_id)
        if len(self._runs) > self._max_runs:
            self._runs.popitem(last=False)
