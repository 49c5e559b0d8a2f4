"""When an attempt that ended may be followed by another one, and how long to wait for it."""

from dataclasses import dataclass
from enum import StrEnum

from rara_scheduler.domain.errors import FREE, Code, StepError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """max_attempts: the budget that failures spend, at least 1. Backoffs in seconds, multiplier at least 1."""

    max_attempts: int = 3
    initial_backoff_s: float = 1.0
    max_backoff_s: float = 300.0
    backoff_multiplier: float = 2.0
    terminal_codes: frozenset[str] = frozenset()

    @property
    def max_free_endings(self) -> int:
        """Consecutive endings that spend nothing, after which a step that never gets anywhere is closed."""
        return 3 * self.max_attempts + 5


def backoff_s(policy: RetryPolicy, *, failures: int, jitter: float) -> float:
    """Seconds to wait after a failed attempt: from 0 up to the capped exponential ceiling.

    failures: what has spent the budget so far, this time included, from 1.
    jitter: the caller's draw from [0, 1), so that this function stays pure.

    "Full jitter": M. Brooker, Exponential Backoff and Jitter, AWS Architecture Blog, 2015.
    """
    ceiling = policy.initial_backoff_s
    if policy.backoff_multiplier > 1 and ceiling > 0:
        # A float power raises OverflowError instead of becoming inf: clamp the exponent first. 2,000 doublings
        # are beyond any cap, and a multiplier near 1 reaches the cap in as many as it needs.
        try:
            ceiling *= policy.backoff_multiplier ** (max(failures, 1) - 1)
        except OverflowError:
            ceiling = policy.max_backoff_s
    return jitter * min(policy.max_backoff_s, ceiling)


class Ending(StrEnum):
    """How an attempt that did not succeed leaves its step."""

    AVAILABLE = "available"  # spent nothing; leasable at once
    BACKOFF = "backoff"  # spent; leasable later
    FAILED = "failed"  # terminal_failed
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an ended attempt means for its step. `reason` is the step's reason, in the state that follows."""

    ending: Ending
    reason: str
    failures: int
    free_endings: int
    spent: bool
    delay_s: float = 0.0


def judge(
    error: StepError,
    policy: RetryPolicy,
    *,
    failures: int,
    free_endings: int,
    cancel_reason: str | None,
    jitter: float,
) -> Verdict:
    """Decide what follows an attempt that ended without success.

    failures, free_endings: before this ending. cancel_reason: of a stored cancel request, which dominates: after
    it nothing is retried. ATTEMPT_TIMEOUT and PROGRESS_TIMEOUT are cancels of the attempt alone, so they are
    judged as failures with that code.
    """
    code = error.code
    if cancel_reason in (Code.ATTEMPT_TIMEOUT, Code.PROGRESS_TIMEOUT):
        code, cancel_reason = cancel_reason, None
    free = code in FREE
    if cancel_reason == Code.DEADLINE_EXCEEDED:
        return Verdict(Ending.FAILED, Code.DEADLINE_EXCEEDED, failures, free_endings, spent=False)
    if cancel_reason is not None:
        return Verdict(Ending.CANCELLED, cancel_reason, failures, free_endings, spent=False)
    if free:
        if free_endings + 1 >= policy.max_free_endings:
            return Verdict(Ending.FAILED, Code.ATTEMPTS_EXHAUSTED, failures, free_endings + 1, spent=False)
        return Verdict(Ending.AVAILABLE, code, failures, free_endings + 1, spent=False)
    failures += 1
    retryable = error.may_retry() and code not in policy.terminal_codes
    if code in (Code.ATTEMPT_TIMEOUT, Code.PROGRESS_TIMEOUT):
        retryable = code not in policy.terminal_codes
    if not retryable:
        return Verdict(Ending.FAILED, code, failures, 0, spent=True)
    if failures >= policy.max_attempts:
        return Verdict(Ending.FAILED, Code.ATTEMPTS_EXHAUSTED, failures, 0, spent=True)
    delay = max(backoff_s(policy, failures=failures, jitter=jitter), error.retry_after_s or 0.0)
    return Verdict(Ending.BACKOFF, code, failures, 0, spent=True, delay_s=delay)
