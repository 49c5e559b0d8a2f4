"""The outbox: order, numbers, merging, windows, and what is never lost."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rara.v1 import common_pb2, dispatch_pb2, job_pb2
from rara_executor.outbox import GATHER_S, MAX_BATCH_EVENTS, MAX_UNSENT_PROGRESS, Outbox

T0 = 1000.0


def event(token: int, **kind: Any) -> job_pb2.ProgressEvent:
    return job_pb2.ProgressEvent(lease=job_pb2.Lease(step_run_id=f"s{token}", lease_token=token), **kind)


def accepted(token: int) -> job_pb2.ProgressEvent:
    return event(token, accepted=job_pb2.JobAccepted(executor_id="x"))


def running(token: int) -> job_pb2.ProgressEvent:
    return event(token, running=job_pb2.JobRunning(runner_id="r1"))


def progress(token: int, message: str, checkpoint: str = "") -> job_pb2.ProgressEvent:
    report = job_pb2.JobProgress(message=message)
    if checkpoint:
        report.checkpoint.data = checkpoint.encode()
    return event(token, progress=report)


def succeeded(token: int, size: int = 0) -> job_pb2.ProgressEvent:
    return event(token, succeeded=job_pb2.JobResult(output=common_pb2.Payload(data=b"1" * size)))


def failed(token: int) -> job_pb2.ProgressEvent:
    return event(token, failed=job_pb2.JobError(code="HANDLER_FAILED"))


def names(events: list[job_pb2.ProgressEvent]) -> list[tuple[int, int, str]]:
    return [(one.lease.lease_token, one.sequence, one.WhichOneof("event") or "") for one in events]


def test_events_of_a_lease_are_numbered_from_one_and_leave_in_order() -> None:
    outbox = Outbox()
    assert [outbox.add(accepted(1), T0), outbox.add(accepted(2), T0), outbox.add(succeeded(1), T0)] == [
        1,
        1,
        2,
    ]
    assert outbox.due_in(T0) == 0.0
    assert names(outbox.take(T0)) == [(1, 1, "accepted"), (2, 1, "accepted"), (1, 2, "succeeded")]
    assert outbox.due_in(T0) is None


def test_a_lease_without_a_stream_waits_and_then_leaves_in_order() -> None:
    outbox = Outbox()
    outbox.add(accepted(1), T0)
    assert names(outbox.take(T0)) == [(1, 1, "accepted")]
    outbox.add(progress(1, "queued when its stream ended"), T0)
    outbox.pause(1)
    outbox.add(failed(1), T0)
    assert outbox.due_in(T0) is None
    outbox.resume(1)
    assert names(outbox.take(T0)) == [(1, 1, "accepted"), (1, 2, "progress"), (1, 3, "failed")]
    assert outbox.take(T0) == []


def test_running_and_progress_wait_a_moment_and_anything_else_takes_them_along() -> None:
    outbox = Outbox()
    outbox.add(running(1), T0)
    outbox.add(progress(1, "a"), T0 + 0.0005)
    assert outbox.due_in(T0) == pytest.approx(GATHER_S)
    assert outbox.due_in(T0 + GATHER_S) == 0.0
    outbox.add(accepted(2), T0 + 0.001)
    assert outbox.due_in(T0 + 0.001) == 0.0
    assert names(outbox.take(T0 + 0.001)) == [(1, 1, "running"), (1, 2, "progress"), (2, 1, "accepted")]
    assert outbox.due_in(T0 + 0.001) is None


def test_reports_of_progress_that_fill_a_frame_are_due_at_once() -> None:
    outbox = Outbox()
    for token in range(MAX_BATCH_EVENTS):
        outbox.add(progress(token, "a"), T0)
    assert outbox.due_in(T0) == 0.0


def test_much_progress_by_size_is_due_at_once() -> None:
    outbox = Outbox()
    outbox.add(progress(1, "a", "x" * (256 << 10)), T0)
    assert outbox.due_in(T0) == 0.0


def test_a_frame_holds_at_most_so_many_events_and_a_mebibyte() -> None:
    outbox = Outbox()
    for token in range(MAX_BATCH_EVENTS + 50):
        outbox.add(accepted(token), T0)
    assert len(outbox.take(T0)) == MAX_BATCH_EVENTS == 500
    assert len(outbox.take(T0)) == 50

    for token in (1001, 1002, 1003):
        outbox.add(succeeded(token, 600_000), T0)
    assert [len(outbox.take(T0)) for _ in range(3)] == [1, 1, 1]
    outbox.add(succeeded(1004, 1 << 20), T0)  # a large one goes alone
    assert len(outbox.take(T0)) == 1


@pytest.mark.parametrize("size", [0, 1, 40, 60, 100, 20_000, 300_000])  # on both sides of a varint's lengths
def test_a_frame_is_what_the_contract_calls_a_connect_request(size: int) -> None:
    outbox = Outbox()
    events = [accepted(1), progress(2, "half", "[1]"), succeeded(3, size), failed(1)]
    for one in events:
        outbox.add(one, T0)
    wanted = dispatch_pb2.ConnectRequest(events=dispatch_pb2.EventBatch(events=events))
    assert outbox.take_frame(T0) == wanted.SerializeToString()
    assert outbox.take_frame(T0) == b""


def test_a_merged_report_is_what_the_frame_holds() -> None:
    outbox = Outbox()
    outbox.add(progress(1, "first", "[1]"), T0, connected=False)
    outbox.add(progress(1, "second"), T0, connected=False)
    (event,) = dispatch_pb2.ConnectRequest.FromString(outbox.take_frame(T0)).events.events
    assert (event.sequence, event.progress.message, event.progress.checkpoint.data) == (1, "second", b"[1]")


def test_unsent_progress_is_merged_under_pressure_keeping_number_and_newest_checkpoint() -> None:
    outbox = Outbox()
    for number in range(MAX_UNSENT_PROGRESS):
        assert outbox.add(progress(1, f"m{number}", "old"), T0) == number + 1
    assert outbox.add(progress(1, "newer", "new"), T0) == MAX_UNSENT_PROGRESS
    assert outbox.add(progress(1, "newest"), T0) == MAX_UNSENT_PROGRESS
    last = outbox.take(T0 + 1)[-1]
    assert last.sequence == MAX_UNSENT_PROGRESS
    assert last.progress.message == "newest"
    assert last.progress.checkpoint.data == b"new"


def test_without_a_session_all_progress_of_a_job_becomes_one() -> None:
    outbox = Outbox()
    outbox.add(progress(1, "a", "1"), T0, connected=False)
    outbox.add(progress(1, "b"), T0, connected=False)
    outbox.add(event(1, effect=job_pb2.Effect(name="e")), T0, connected=False)
    outbox.add(progress(1, "c"), T0, connected=False)
    outbox.add(progress(1, "d"), T0, connected=False)
    assert [(one.sequence, one.progress.message) for one in outbox.take(T0)] == [(1, "b"), (2, ""), (3, "d")]


def test_progress_that_was_sent_is_not_changed_any_more() -> None:
    outbox = Outbox()
    outbox.add(progress(1, "a"), T0)
    (sent,) = outbox.take(T0 + 1)
    assert outbox.add(progress(1, "b"), T0 + 1, connected=False) == 2
    assert sent.progress.message == "a"


def test_the_window_bounds_what_is_in_flight() -> None:
    outbox = Outbox(event_window=2)
    for token in (1, 2, 3):
        outbox.add(accepted(token), T0)
    assert len(outbox.take(T0)) == 2
    assert outbox.due_in(T0) is None
    outbox.acknowledge(1, 1)
    assert outbox.due_in(T0) == 0.0
    assert names(outbox.take(T0)) == [(3, 1, "accepted")]


def test_acknowledgements_are_cumulative_and_missing_ones_go_again() -> None:
    outbox = Outbox()
    for made in (accepted(1), progress(1, "a"), progress(1, "b"), succeeded(1)):
        outbox.add(made, T0)
    outbox.take(T0)
    stored = outbox.acknowledge(1, 4, missing=[2, 99])
    assert [entry.sequence for entry in stored] == [1, 3, 4]
    assert outbox.sequences(1) == (4, 4)
    assert outbox.holds(1)
    assert names(outbox.take(T0 + 1)) == [(1, 2, "progress")]
    assert [entry.sequence for entry in outbox.acknowledge(1, 4)] == [2]
    assert outbox.is_empty()
    assert outbox.held_bytes == 0
    assert outbox.in_flight == 0


def test_a_new_session_sends_everything_unacknowledged_again_in_the_old_order() -> None:
    outbox = Outbox()
    outbox.add(accepted(1), T0)
    outbox.add(accepted(2), T0)
    outbox.take(T0)
    outbox.acknowledge(2, 1)
    outbox.add(succeeded(2), T0)
    outbox.rewind()
    assert outbox.in_flight == 0
    assert names(outbox.take(T0)) == [(1, 1, "accepted"), (2, 2, "succeeded")]


def test_a_refused_event_is_held_until_it_may_go_again() -> None:
    outbox = Outbox()
    outbox.add(succeeded(1), T0)
    (sent,) = outbox.take(T0)
    assert outbox.hold(1, 1) is not None
    outbox.rewind()
    assert outbox.due_in(T0) is None
    outbox.resend(1, 1)
    assert outbox.take(T0) == [sent]


def test_an_end_in_the_place_of_a_refused_event_drops_what_came_after() -> None:
    outbox = Outbox()
    for made in (accepted(1), progress(1, "bad"), progress(1, "later"), succeeded(1)):
        outbox.add(made, T0)
    outbox.take(T0)
    outbox.acknowledge(1, 1)
    outbox.hold(1, 2)
    outbox.replace(failed(1), 2)
    assert names(outbox.take(T0)) == [(1, 2, "failed")]
    assert outbox.sequences(1) == (2, 1)
    outbox.acknowledge(1, 2)
    assert (outbox.in_flight, outbox.held_bytes) == (0, 0)


def test_a_dropped_lease_sends_nothing() -> None:
    outbox = Outbox()
    outbox.add(accepted(1), T0)
    outbox.add(accepted(2), T0)
    outbox.drop(1)
    assert names(outbox.take(T0)) == [(2, 1, "accepted")]
    assert outbox.sequences(1) == (0, 0)
    assert outbox.hold(1, 1) is None


class OutboxAgainstAStore(RuleBasedStateMachine):
    """A store that takes or loses frames at random must end with every event once, in order, but for merges."""

    def __init__(self) -> None:
        super().__init__()
        self.outbox = Outbox(event_window=5)
        self.stored: dict[int, dict[int, job_pb2.ProgressEvent]] = {}
        self.made: dict[int, int] = {}
        self.newest_checkpoint: dict[int, bytes] = {}
        self.on_the_way: list[job_pb2.ProgressEvent] = []
        self.now = T0

    @rule(token=st.integers(1, 3), checkpoint=st.booleans(), connected=st.booleans())
    def report(self, token: int, checkpoint: bool, connected: bool) -> None:
        number = self.made.get(token, 0) + 1
        self.made[token] = number
        text = str(number) if checkpoint else ""
        if text:
            self.newest_checkpoint[token] = text.encode()
        self.outbox.add(progress(token, str(number), text), self.now, connected=connected)

    @rule()
    def send(self) -> None:
        self.now += 1
        frame = self.outbox.take(self.now)
        copies = [job_pb2.ProgressEvent() for _ in frame]
        for copy, one in zip(copies, frame, strict=True):
            copy.CopyFrom(one)
        self.on_the_way += copies

    @rule(lose=st.booleans())
    @precondition(lambda self: self.on_the_way)
    def arrive(self, lose: bool) -> None:
        arrived = self.on_the_way.pop(0)
        if not lose:
            known = self.stored.setdefault(arrived.lease.lease_token, {})
            if arrived.sequence in known:
                assert known[arrived.sequence] == arrived  # sent again unchanged
            known[arrived.sequence] = arrived

    @rule(token=st.integers(1, 3))
    def acknowledge(self, token: int) -> None:
        known = self.stored.get(token, {})
        last = max(known, default=0)
        missing = [number for number in range(1, last) if number not in known]
        self.outbox.acknowledge(token, last, missing)

    @rule()
    def reconnect(self) -> None:
        self.on_the_way.clear()
        self.outbox.rewind()

    @invariant()
    def counters_are_never_negative(self) -> None:
        assert 0 <= self.outbox.in_flight <= 5
        assert self.outbox.held_bytes >= 0

    def teardown(self) -> None:
        for _ in range(1000):
            self.reconnect()
            self.send()
            while self.on_the_way:
                self.arrive(lose=False)
            for token in (1, 2, 3):
                self.acknowledge(token)
            if self.outbox.is_empty():
                break
        assert self.outbox.is_empty()
        assert (self.outbox.in_flight, self.outbox.held_bytes) == (0, 0)
        for token, known in self.stored.items():
            numbers = sorted(known)
            assert numbers == list(range(1, len(numbers) + 1))
            messages = [int(known[number].progress.message) for number in numbers]
            assert messages == sorted(messages)
            assert messages[-1] == self.made[token]
            checkpoints = [
                known[n].progress.checkpoint.data for n in numbers if known[n].progress.HasField("checkpoint")
            ]
            newest = self.newest_checkpoint.get(token)
            assert checkpoints[-1:] == ([] if newest is None else [newest])


TestOutboxAgainstAStore = OutboxAgainstAStore.TestCase
TestOutboxAgainstAStore.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
