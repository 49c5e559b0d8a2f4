"""Sessions: credit, proof of life in both directions, concurrency by kind, and bounded queues."""

from collections.abc import Callable

import pytest
from rara.v1 import dispatch_pb2, job_pb2
from rara_scheduler.domain.routing import Capability, Offer
from rara_scheduler.sessions import MAX_QUEUED_FRAMES, Held, Session, SessionRegistry
from rara_scheduler.store.run_ledger import CancelOrder

NOW = [100.0]


@pytest.fixture(autouse=True)
def _clock() -> None:
    NOW[0] = 100.0


def session(executor_id: str = "e1", **limits: int) -> Session:
    kinds = limits or {"work.do": 0}
    offer = Offer("python", tuple(Capability(k, ("1.0.0",), n) for k, n in kinds.items()), {})
    return Session("s-" + executor_id, executor_id, "name", offer, 5.0, clock=lambda: NOW[0])


def hold(one: Session, token: int, kind: str = "work.do") -> None:
    one.held[token] = Held(f"step-{token}", "run", token, 1, kind, "1.0.0")


def queued(one: Session) -> list[dispatch_pb2.ConnectResponse | None]:
    return [one.frames.get_nowait() for _ in range(one.frames.qsize())]


def test_credit_is_what_is_allowed_less_what_was_sent() -> None:
    one = session()
    assert one.free_credit() == 0
    one.credit_limit = 5
    one.jobs_sent = 3
    assert one.free_credit() == 2
    one.jobs_sent = 7
    assert one.free_credit() == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda s: setattr(s, "closing", True),
        lambda s: setattr(s, "draining", True),
        lambda s: setattr(s, "lapsed_grants", 3),
    ],
)
def test_who_leaves_or_lets_grants_lapse_gets_nothing(spoil: Callable[[Session], None]) -> None:
    one = session()
    one.credit_limit = 5
    one.lapsed_grants = 2
    assert one.free_credit() == 5
    spoil(one)
    assert one.free_credit() == 0


def test_a_session_unheard_of_for_two_heartbeats_gets_nothing() -> None:
    one = session()
    one.credit_limit = 1
    NOW[0] += 10.0
    assert one.proven()
    NOW[0] += 0.1
    assert not one.proven()
    assert one.free_credit() == 0


def test_a_session_that_has_not_heard_an_answer_for_an_interval_gets_nothing() -> None:
    one = session()
    one.credit_limit = 1
    one.heartbeat_number, one.answered = 7, 6
    assert one.free_credit() == 1
    one.heartbeat_number = 8
    assert one.free_credit() == 0


def test_room_is_the_kinds_own_concurrency_less_what_is_held() -> None:
    one = session(gpu=2, cpu=0)
    hold(one, 1, "gpu")
    hold(one, 2, "cpu")
    assert one.room("gpu", 10) == 1
    assert one.room("cpu", 10) == 10
    hold(one, 3, "gpu")
    hold(one, 4, "gpu")
    assert one.room("gpu", 10) == 0


def test_a_peer_that_reads_nothing_is_given_up_when_the_queue_is_full() -> None:
    one = session()
    for _ in range(MAX_QUEUED_FRAMES):
        one.send(dispatch_pb2.ConnectResponse())
    assert not one.overflowed
    one.send(dispatch_pb2.ConnectResponse())
    assert one.overflowed
    assert one.closing
    one.end("SHUTTING_DOWN")  # makes room for the last words


def test_an_end_is_said_once_and_comes_last() -> None:
    one = session()
    one.end("REPLACED")
    one.end("SHUTTING_DOWN")
    away, last = queued(one)
    assert away is not None
    assert away.go_away.reason == "REPLACED"
    assert not away.go_away.HasField("reconnect_after")
    assert last is None


def test_cancels_go_only_to_leases_that_are_held() -> None:
    one = session()
    hold(one, 1)
    one.send_cancels([CancelOrder("e1", 1, "CANCELLED", 2.5), CancelOrder("e1", 2, "CANCELLED", 2.5)])
    (frame,) = queued(one)
    assert frame is not None
    (cancel,) = frame.cancels.jobs
    assert (cancel.lease_token, cancel.reason, cancel.grace.ToMilliseconds()) == (1, "CANCELLED", 2500)
    one.send_cancels([CancelOrder("e1", 2, "CANCELLED", 2.5)])
    assert queued(one) == []


def test_jobs_are_split_into_batches_of_bounded_size() -> None:
    one = session()
    jobs = [job_pb2.JobRequest(kind=f"k{i}") for i in range(5)]
    for job in jobs:
        job.input.data = b"x" * 400_000
    one.send_jobs(jobs)
    sizes = [len(frame.jobs.jobs) for frame in queued(one) if frame is not None]
    assert sizes == [2, 2, 1]


def test_a_newer_session_of_an_executor_takes_the_place_of_the_older() -> None:
    registry = SessionRegistry(max_sessions=2)
    old, new, other = session(), session(), session("e2")
    assert registry.add(old) is None
    assert registry.add(new) is old
    assert old.closing
    registry.remove(old)  # the old one's end does not take the new one away
    assert registry.get("e1") is new
    assert not registry.full
    registry.add(other)
    assert registry.full


def test_cancels_for_executors_elsewhere_are_told() -> None:
    registry = SessionRegistry(max_sessions=2)
    here = session()
    hold(here, 1)
    registry.add(here)
    assert not registry.push_cancels([CancelOrder("e1", 1, "CANCELLED", 1.0)])
    assert registry.push_cancels([CancelOrder("e9", 1, "CANCELLED", 1.0)])
    assert len(queued(here)) == 1
    assert registry.in_flight() == {"e1": 1}
