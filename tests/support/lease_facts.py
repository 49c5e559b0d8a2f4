"""A lease as the rules about attempts see it."""

from datetime import date

from rara_scheduler.domain.attempt import LeaseFacts

LEASED = LeaseFacts(
    step_run_id="step",
    workflow_run_id="run",
    lease_token=7,
    attempt=2,
    failures=1,
    free_endings=2,
    executor_id="executor",
    granted_on=date(2026, 1, 1),
    accepted=False,
    started=False,
    last_sequence=0,
    gaps=0,
    cancel_reason=None,
    expired=False,
    accept_overdue=False,
    step_name="a",
    idempotency_key="run/a",
)
