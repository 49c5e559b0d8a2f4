"""What an ended attempt costs, and how long the next one waits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_scheduler.domain.errors import FINAL, FREE, Code, StepError
from rara_scheduler.domain.retry import Ending, RetryPolicy, Verdict, backoff_s, judge

STEEP = RetryPolicy(initial_backoff_s=2.0, backoff_multiplier=5.0, max_backoff_s=600.0)
POLICY = RetryPolicy(max_attempts=3, initial_backoff_s=2.0, max_backoff_s=600.0, backoff_multiplier=2.0)

SPENDING = [
    Code.HANDLER_FAILED,
    Code.HANDLER_PANIC,
    Code.RUNNER_CRASHED,
    Code.OUT_OF_MEMORY,
    Code.DEPENDENCY_UNAVAILABLE,
    Code.RATE_LIMITED,
    Code.INTERNAL,
    Code.LEASE_EXPIRED,
    Code.ATTEMPT_TIMEOUT,
    Code.PROGRESS_TIMEOUT,
    Code.ARTIFACT_MISMATCH,
]
FREE_ENDINGS = [Code.DISPATCH_LOST, Code.EXECUTOR_SHUTDOWN, Code.UNSUPPORTED_KIND, Code.NO_CAPACITY]
FINAL_ENDINGS = [
    Code.INPUT_INVALID,
    Code.ARTIFACT_MISSING,
    Code.SECRET_UNRESOLVED,
    Code.PAYLOAD_INVALID,
    Code.PAYLOAD_TOO_LARGE,
    Code.ARTIFACT_TOO_LARGE,
    Code.SECRET_IN_PAYLOAD,
]


def verdict(
    error: StepError,
    policy: RetryPolicy = POLICY,
    *,
    failures: int = 0,
    free_endings: int = 0,
    cancel_reason: str | None = None,
    jitter: float = 0.5,
) -> Verdict:
    return judge(
        error,
        policy,
        failures=failures,
        free_endings=free_endings,
        cancel_reason=cancel_reason,
        jitter=jitter,
    )


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_a_backoff_is_between_nothing_and_the_cap(failures: int, jitter: float) -> None:
    delay = backoff_s(STEEP, failures=failures, jitter=jitter)
    assert math.isfinite(delay)
    assert 0 <= delay <= 600


@given(st.integers(1, 9_999), st.floats(0, 1, exclude_max=True))
def test_the_backoff_never_shrinks_as_failures_grow(failures: int, jitter: float) -> None:
    assert backoff_s(STEEP, failures=failures, jitter=jitter) <= backoff_s(
        STEEP, failures=failures + 1, jitter=jitter
    )


@given(st.integers(1, 10_000), st.floats(1, 100), st.floats(0, 1e6), st.floats(0, 1e6))
def test_no_policy_makes_the_backoff_raise(
    failures: int, multiplier: float, initial_s: float, cap_s: float
) -> None:
    policy = RetryPolicy(initial_backoff_s=initial_s, max_backoff_s=cap_s, backoff_multiplier=multiplier)
    assert 0 <= backoff_s(policy, failures=failures, jitter=0.999) <= cap_s


def test_the_ceiling_doubles_from_the_initial_backoff() -> None:
    ceilings = [backoff_s(POLICY, failures=n, jitter=0.5) * 2 for n in (1, 2, 3, 4, 9, 10, 11)]
    assert ceilings == [2, 4, 8, 16, 512, 600, 600]


@pytest.mark.parametrize("code", SPENDING)
def test_these_codes_spend_the_budget_and_are_retried_after_a_backoff(code: Code) -> None:
    assert verdict(StepError(code), free_endings=4) == Verdict(
        Ending.BACKOFF, code, failures=1, free_endings=0, spent=True, delay_s=1.0
    )


@pytest.mark.parametrize("code", FREE_ENDINGS)
def test_these_codes_are_free_and_leasable_at_once(code: Code) -> None:
    assert verdict(StepError(code), failures=2, free_endings=1) == Verdict(
        Ending.AVAILABLE, code, failures=2, free_endings=2, spent=False
    )


@pytest.mark.parametrize("code", FINAL_ENDINGS)
def test_these_codes_close_the_step_with_themselves_as_reason(code: Code) -> None:
    result = verdict(StepError(code))
    assert (result.ending, result.reason) == (Ending.FAILED, code)


def test_the_codes_sort_as_the_contract_lists_them() -> None:
    assert set(FREE_ENDINGS) == FREE
    assert set(FINAL_ENDINGS) == FINAL


@pytest.mark.parametrize(
    ("code", "retryable", "ending"),
    [
        ("MODEL_DIVERGED", None, Ending.BACKOFF),
        ("MODEL_DIVERGED", True, Ending.BACKOFF),
        ("MODEL_DIVERGED", False, Ending.FAILED),
        (Code.HANDLER_FAILED, False, Ending.FAILED),
        (Code.INPUT_INVALID, True, Ending.BACKOFF),
    ],
)
def test_an_error_that_says_whether_it_is_retryable_is_believed(
    code: str, retryable: bool | None, ending: Ending
) -> None:
    result = verdict(StepError(code, retryable=retryable))
    assert (result.ending, result.reason) == (ending, code)


@pytest.mark.parametrize("code", [Code.HANDLER_FAILED, "MODEL_DIVERGED", Code.ATTEMPT_TIMEOUT])
def test_a_terminal_code_of_the_policy_is_never_retried(code: str) -> None:
    policy = RetryPolicy(terminal_codes=frozenset({code}))
    result = verdict(StepError(code, retryable=True), policy)
    assert (result.ending, result.reason, result.spent) == (Ending.FAILED, code, True)


@pytest.mark.parametrize("code", SPENDING)
def test_the_last_failure_of_the_budget_exhausts_it(code: Code) -> None:
    assert verdict(StepError(code), failures=1).ending is Ending.BACKOFF
    result = verdict(StepError(code), failures=2)
    assert (result.ending, result.reason, result.failures) == (Ending.FAILED, Code.ATTEMPTS_EXHAUSTED, 3)


@pytest.mark.parametrize("code", FREE_ENDINGS)
@pytest.mark.parametrize("max_attempts", [1, 3])
def test_consecutive_free_endings_have_a_cap(code: Code, max_attempts: int) -> None:
    policy = RetryPolicy(max_attempts=max_attempts)
    cap = 3 * max_attempts + 5
    assert verdict(StepError(code), policy, free_endings=cap - 2).ending is Ending.AVAILABLE
    result = verdict(StepError(code), policy, free_endings=cap - 1)
    assert (result.ending, result.reason, result.spent) == (Ending.FAILED, Code.ATTEMPTS_EXHAUSTED, False)


@pytest.mark.parametrize("reason", [Code.CANCELLED, Code.SIBLING_FAILED])
@pytest.mark.parametrize("code", [*SPENDING, *FREE_ENDINGS, *FINAL_ENDINGS, "MODEL_DIVERGED"])
def test_after_a_cancel_request_nothing_is_retried(code: str, reason: Code) -> None:
    assert verdict(StepError(code, retryable=True), failures=1, cancel_reason=reason) == Verdict(
        Ending.CANCELLED, reason, failures=1, free_endings=0, spent=False
    )


@pytest.mark.parametrize("code", [*SPENDING, *FREE_ENDINGS, *FINAL_ENDINGS])
def test_after_the_deadline_an_attempt_closes_its_step_as_failed(code: Code) -> None:
    result = verdict(StepError(code), cancel_reason=Code.DEADLINE_EXCEEDED)
    assert (result.ending, result.reason, result.spent) == (Ending.FAILED, Code.DEADLINE_EXCEEDED, False)


@pytest.mark.parametrize("reason", [Code.ATTEMPT_TIMEOUT, Code.PROGRESS_TIMEOUT])
@pytest.mark.parametrize("code", [Code.CANCELLED, Code.LEASE_EXPIRED, Code.DISPATCH_LOST])
def test_an_attempts_own_timeout_ends_the_attempt_only_and_spends(code: Code, reason: Code) -> None:
    result = verdict(StepError(code), cancel_reason=reason)
    assert (result.ending, result.reason, result.failures) == (Ending.BACKOFF, reason, 1)
    assert verdict(StepError(code), failures=2, cancel_reason=reason).reason == Code.ATTEMPTS_EXHAUSTED


@pytest.mark.parametrize(("retry_after_s", "delay_s"), [(None, 1.0), (0.5, 1.0), (7.0, 7.0)])
def test_the_wait_is_the_later_of_backoff_and_retry_after(
    retry_after_s: float | None, delay_s: float
) -> None:
    assert verdict(StepError(Code.RATE_LIMITED, retry_after_s=retry_after_s)).delay_s == delay_s
