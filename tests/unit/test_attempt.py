"""How reports about one leased attempt fold into one decision."""

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_scheduler.domain.attempt import (
    MAX_JUMP,
    MAX_MISSING,
    ArtifactFacts,
    CancelReceipt,
    Decision,
    EventType,
    Guard,
    Item,
    LeaseFacts,
    Outcome,
    Report,
    decide,
    missing_blobs,
)
from rara_scheduler.domain.errors import Code, StepError
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.step import StepState
from support.lease_facts import LEASED
from support.store_world import accepted, cancelled, ending, failed, progress, running, succeeded

RUNNING = dataclasses.replace(LEASED, accepted=True, started=True, last_sequence=2)
BLOB = ArtifactFacts("model", "ab" * 32, 100, "application/octet-stream", "model")


def fold(
    lease: LeaseFacts,
    *items: Item,
    known: frozenset[int] = frozenset(),
    blobs: Mapping[str, int] | None = None,
) -> Decision:
    return decide(lease, items, RetryPolicy(), known=known, blobs=blobs or {}, jitter=0.5)


def sequences(decision: Decision) -> list[int]:
    return [report.sequence for report in decision.stored]


def test_accepting_stores_and_accepts_and_does_not_start() -> None:
    decision = fold(LEASED, accepted())
    assert (decision.accept, decision.start, decision.moved, decision.closing) == (True, False, False, None)
    assert decision.last_sequence == 1


def test_running_starts() -> None:
    decision = fold(LEASED, accepted(), running())
    assert (decision.accept, decision.start, decision.last_sequence) == (True, True, 2)


@pytest.mark.parametrize(
    "item", [progress(1), Report(1, EventType.EFFECT, b"", effect=("paid", b"1")), succeeded(1)]
)
def test_what_overtakes_running_is_applied_through_it(item: Report) -> None:
    decision = fold(LEASED, item)
    assert decision.accept
    assert decision.start
    assert sequences(decision) == [1]


def test_success_closes_with_its_outcome_and_keeps_the_counts() -> None:
    decision = fold(RUNNING, succeeded(3, b"[1]"))
    closing = decision.closing
    assert closing is not None
    assert (closing.to, closing.reason, closing.confirmed) == (StepState.SUCCEEDED, "", True)
    assert (closing.failures, closing.spent) == (1, False)
    assert closing.outcome == Outcome(b"[1]")


def test_a_failure_before_running_is_a_failure_and_not_a_start() -> None:
    decision = fold(LEASED, accepted(), failed(2))
    assert decision.closing is not None
    assert decision.closing.to is StepState.RETRYABLE_FAILED
    assert (decision.closing.failures, decision.start) == (2, False)


def test_a_success_beats_a_cancel_request_and_a_failure_does_not() -> None:
    asked = dataclasses.replace(RUNNING, cancel_reason="CANCELLED")
    assert (c := fold(asked, succeeded(3)).closing) is not None
    assert c.to is StepState.SUCCEEDED
    assert (c := fold(asked, failed(3)).closing) is not None
    assert (c.to, c.reason) == (StepState.CANCELLED, "CANCELLED")


@pytest.mark.parametrize(
    ("asked", "said", "to", "reason"),
    [
        (None, "CANCELLED", StepState.RETRYABLE_FAILED, "HANDLER_FAILED"),
        (None, "SIBLING_FAILED", StepState.RETRYABLE_FAILED, "HANDLER_FAILED"),
        (None, "EXECUTOR_SHUTDOWN", StepState.RETRYABLE_FAILED, "EXECUTOR_SHUTDOWN"),
        (None, "ATTEMPT_TIMEOUT", StepState.RETRYABLE_FAILED, "ATTEMPT_TIMEOUT"),
        (None, "PROGRESS_TIMEOUT", StepState.RETRYABLE_FAILED, "PROGRESS_TIMEOUT"),
        (None, "DEADLINE_EXCEEDED", StepState.TERMINAL_FAILED, "DEADLINE_EXCEEDED"),
        ("CANCELLED", "CANCELLED", StepState.CANCELLED, "CANCELLED"),
        ("CANCELLED", "EXECUTOR_SHUTDOWN", StepState.CANCELLED, "CANCELLED"),
        ("SIBLING_FAILED", "CANCELLED", StepState.CANCELLED, "SIBLING_FAILED"),
        ("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", StepState.TERMINAL_FAILED, "DEADLINE_EXCEEDED"),
        ("ATTEMPT_TIMEOUT", "CANCELLED", StepState.RETRYABLE_FAILED, "ATTEMPT_TIMEOUT"),
    ],
)
def test_cancelled_means_what_was_asked_for_or_a_failure(
    asked: str | None, said: str, to: StepState, reason: str
) -> None:
    closing = fold(dataclasses.replace(RUNNING, cancel_reason=asked), cancelled(3, said)).closing
    assert closing is not None
    assert (closing.to, closing.reason, closing.confirmed) == (to, reason, True)


def test_repeats_are_neither_stored_nor_refused() -> None:
    decision = fold(RUNNING, accepted(1), running(2), progress(3), progress(3), known=frozenset({1, 2}))
    assert sequences(decision) == [3]
    assert decision.refused == []
    assert not fold(RUNNING, accepted(1), running(2), known=frozenset({1, 2})).changed


def test_a_gap_is_named_and_what_comes_late_in_the_same_batch_is_not_asked_for() -> None:
    decision = fold(RUNNING, progress(5), progress(7), progress(4))
    assert sequences(decision) == [5, 7, 4]
    assert (decision.missing, decision.gaps, decision.last_sequence) == ([3, 6], 2, 7)


def test_an_old_gap_that_is_filled_lowers_the_count() -> None:
    lease = dataclasses.replace(RUNNING, last_sequence=9, gaps=2)
    decision = fold(lease, progress(4))
    assert (decision.gaps, decision.missing, decision.last_sequence) == (1, [], 9)


def test_a_huge_gap_names_a_bounded_list() -> None:
    decision = fold(RUNNING, progress(2 + MAX_JUMP))
    assert decision.missing == list(range(3, 3 + MAX_MISSING))
    assert decision.gaps == MAX_JUMP - 1


def test_a_number_beyond_all_bounds_is_refused() -> None:
    decision = fold(RUNNING, progress(3 + MAX_JUMP), progress(3))
    assert [(r.sequence, r.code) for r in decision.refused] == [(3 + MAX_JUMP, Code.FIELD_INVALID)]
    assert (decision.last_sequence, decision.gaps, decision.missing) == (3, 0, [])


def test_after_the_end_news_is_refused_and_repeats_are_not() -> None:
    decision = fold(RUNNING, progress(3), succeeded(4), progress(5), succeeded(4), failed(6), progress(3))
    assert sequences(decision) == [3, 4]
    assert [(r.sequence, r.code) for r in decision.refused] == [
        (5, Code.LEASE_LOST),
        (6, Code.LEASE_LOST),
    ]
    assert decision.closing is not None
    assert decision.closing.to is StepState.SUCCEEDED


def test_the_first_of_two_terminal_events_counts() -> None:
    decision = fold(RUNNING, failed(3), succeeded(4))
    assert decision.closing is not None
    assert decision.closing.to is StepState.RETRYABLE_FAILED


def test_the_schedulers_word_spends_as_its_code_says_and_is_no_confirmation() -> None:
    closing = fold(RUNNING, ending("LEASE_EXPIRED")).closing
    assert closing is not None
    assert (closing.to, closing.reason, closing.failures) == (
        StepState.RETRYABLE_FAILED,
        "LEASE_EXPIRED",
        2,
    )
    assert (closing.at_once, closing.confirmed) == (False, False)
    closing = fold(LEASED, ending("DISPATCH_LOST")).closing
    assert closing is not None
    assert (closing.at_once, closing.failures, closing.free_endings) == (True, 1, 3)


@pytest.mark.parametrize(
    ("guard", "lease", "before", "ends"),
    [
        (Guard.NONE, RUNNING, [], True),
        (Guard.EXPIRED, RUNNING, [], False),
        (Guard.EXPIRED, dataclasses.replace(RUNNING, expired=True), [], True),
        (Guard.EXPIRED, dataclasses.replace(RUNNING, expired=True), [progress(3)], False),
        (Guard.UNACCEPTED, LEASED, [], False),
        (Guard.UNACCEPTED, dataclasses.replace(LEASED, accept_overdue=True), [], True),
        (Guard.UNACCEPTED, dataclasses.replace(LEASED, accept_overdue=True), [accepted()], False),
        (Guard.UNACCEPTED, dataclasses.replace(RUNNING, accept_overdue=True), [], False),
        (Guard.NOT_RUNNING, LEASED, [], True),
        (Guard.NOT_RUNNING, LEASED, [accepted()], True),
        (Guard.NOT_RUNNING, LEASED, [accepted(), running()], False),
        (Guard.NOT_RUNNING, RUNNING, [], False),
    ],
)
def test_a_guard_is_looked_at_again_under_the_lock(
    guard: Guard, lease: LeaseFacts, before: list[Item], ends: bool
) -> None:
    decision = fold(lease, *before, ending("DISPATCH_LOST", guard))
    assert (decision.closing is not None) is ends


def test_a_receipt_is_noted() -> None:
    decision = fold(RUNNING, CancelReceipt())
    assert (decision.receipt, decision.changed, decision.closing) == (True, True, None)


@pytest.mark.parametrize(
    ("blobs", "code"),
    [({}, Code.BLOBS_MISSING), ({BLOB.sha256: 99}, Code.ARTIFACT_MISMATCH), ({BLOB.sha256: 100}, None)],
)
def test_a_success_whose_blobs_are_not_there_does_not_close(blobs: dict[str, int], code: Code | None) -> None:
    decision = fold(RUNNING, succeeded(3, artifacts=[BLOB]), blobs=blobs)
    if code is None:
        assert decision.closing is not None
        assert decision.refused == []
    else:
        assert (decision.closing, decision.stored, decision.last_sequence) == (None, [], 2)
        (refusal,) = decision.refused
        assert (refusal.sequence, refusal.code, refusal.digests) == (3, code, ((BLOB.sha256, 100),))


def test_a_refused_success_may_be_followed_by_a_failure_under_its_number() -> None:
    decision = fold(RUNNING, succeeded(3, artifacts=[BLOB]), failed(3))
    assert sequences(decision) == [3]
    assert decision.closing is not None
    assert decision.closing.to is StepState.RETRYABLE_FAILED


def test_inline_artifacts_need_no_blob() -> None:
    assert missing_blobs([dataclasses.replace(BLOB, inline=b"x")], {}) == ((), ())


EVENTS = st.sampled_from([accepted, running, progress, succeeded, failed, cancelled])


@given(
    st.lists(st.tuples(EVENTS, st.integers(1, 12)), max_size=25),
    st.sampled_from([None, "CANCELLED", "DEADLINE_EXCEEDED", "ATTEMPT_TIMEOUT"]),
)
def test_whatever_comes_numbers_are_stored_once_and_gaps_add_up(
    script: list[tuple[object, int]], asked: str | None
) -> None:
    items = [build(sequence) for build, sequence in script]  # type: ignore[operator]  # a builder of reports
    decision = fold(dataclasses.replace(LEASED, cancel_reason=asked), *items)
    numbers = sequences(decision)
    assert len(numbers) == len(set(numbers))
    assert decision.last_sequence == max(numbers, default=0)
    assert decision.gaps == decision.last_sequence - len(numbers)
    assert decision.missing == sorted(set(range(1, decision.last_sequence + 1)) - set(numbers))
    ends = [r for r in decision.stored if r.type in ("succeeded", "failed", "cancelled")]
    assert len(ends) <= 1
    assert (decision.closing is not None) == bool(ends)
    assert {r.sequence for r in decision.refused}.isdisjoint(numbers)


def test_an_error_without_a_code_of_its_own_spends_as_handler_failed() -> None:
    bare = Report(3, EventType.FAILED, b"")
    closing = fold(RUNNING, bare).closing
    assert closing is not None
    assert closing.error == StepError(Code.HANDLER_FAILED)
