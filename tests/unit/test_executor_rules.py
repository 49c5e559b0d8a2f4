"""Heartbeats, lease clocks, slots, capabilities, and the frames between supervisor and runner."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara.v1 import dispatch_pb2
from rara_executor import registry
from rara_executor.app import capabilities
from rara_executor.errors import ConfigurationError
from rara_executor.heartbeat import Heartbeats
from rara_executor.lease_clock import LeaseClock
from rara_executor.runner_protocol import (
    Decoder,
    Failed,
    InputInfo,
    Message,
    OperationInfo,
    Progress,
    ProtocolError,
    Ready,
    StartJob,
    encode,
)
from rara_executor.scratch import ScratchFolder
from rara_executor.settings import load
from rara_executor.slots import NotTaken, Slots

T0 = 1000.0


def ack(number: int, renewed: int) -> dispatch_pb2.HeartbeatAck:
    return dispatch_pb2.HeartbeatAck(number=number, renewed=renewed)


def test_a_heartbeat_lists_leases_and_the_newest_answer() -> None:
    beats = Heartbeats(interval_s=5, silence_s=15, now=T0)
    first = beats.compose([3, 1], T0)
    assert (first.number, list(first.lease_tokens), first.answered) == (1, [1, 3], 0)
    beats.answered(ack(1, 1))
    assert beats.compose([], T0 + 5).answered == 1


def test_a_renewal_counts_from_the_sending_of_the_newest_renewed_heartbeat() -> None:
    beats = Heartbeats(interval_s=5, silence_s=15, now=T0)
    for number in range(3):
        beats.compose([number], T0 + number)
    assert beats.answered(ack(3, 0)) is None  # the scheduler lives, the database does not
    renewal = beats.answered(ack(3, 2))
    assert renewal is not None
    assert (renewal.sent_at, renewal.tokens) == (T0 + 1, frozenset({1}))
    assert beats.answered(ack(3, 2)) is None
    assert beats.answered(ack(3, 1)) is None


def test_an_answer_to_what_was_never_sent_renews_nothing() -> None:
    beats = Heartbeats(interval_s=5, silence_s=15, now=T0)
    beats.compose([1], T0)
    assert beats.answered(ack(9, 9)) is None
    assert beats.compose([1], T0 + 5).answered == 0


def test_readiness_lasts_two_intervals_from_the_sending_of_what_was_answered() -> None:
    beats = Heartbeats(interval_s=5, silence_s=15, now=T0)
    assert beats.is_ready(T0 + 10)
    beats.compose([], T0 + 5)
    assert not beats.is_ready(T0 + 11)
    beats.answered(ack(1, 0))
    assert beats.is_ready(T0 + 15)
    assert not beats.is_ready(T0 + 15.1)


def test_any_frame_ends_the_silence() -> None:
    beats = Heartbeats(interval_s=5, silence_s=15, now=T0)
    assert not beats.is_silent(T0 + 15)
    assert beats.is_silent(T0 + 15.1)
    beats.heard(T0 + 15.1)
    assert not beats.is_silent(T0 + 30)


def test_the_fence_stands_at_five_sixths_of_the_lease() -> None:
    clock = LeaseClock(30)
    assert clock.fence_at == float("-inf")
    clock.renewed(T0)
    clock.renewed(T0 - 5)  # an older answer that came late
    assert (clock.fence_at, clock.over_at) == (T0 + 25, T0 + 30)


def operation(kind: str, version: str = "1.0.0", max_concurrency: int = 0, schema: str = "") -> OperationInfo:
    return OperationInfo(kind, version, True, max_concurrency, schema)


def test_credit_never_falls_and_rises_with_free_slots() -> None:
    slots = Slots(2)
    slots.offer([operation("a")])
    seen = [slots.credit()]
    for _ in range(2):
        assert isinstance(slots.take("a", "1.0.0"), OperationInfo)
        seen.append(slots.credit())
    refused = slots.take("a", "1.0.0")
    assert isinstance(refused, NotTaken)
    assert refused.code == "NO_CAPACITY"
    seen.append(slots.credit())
    slots.leave("a")
    seen.append(slots.credit())
    assert seen == [2, 2, 2, 3, 4]
    slots.new_session()
    assert slots.credit() == 1


def test_a_rejected_job_does_not_cost_a_slot() -> None:
    slots = Slots(1)
    slots.offer([operation("a", max_concurrency=1), operation("b")])
    unknown = slots.take("c", "1.0.0")
    assert isinstance(unknown, NotTaken)
    assert unknown.code == "UNSUPPORTED_KIND"
    assert slots.credit() == 2
    slots.draining = True
    drained = slots.take("a", "1.0.0")
    assert isinstance(drained, NotTaken)
    assert drained.code == "EXECUTOR_SHUTDOWN"
    assert slots.credit() == 2


def test_capabilities_gather_the_versions_of_a_kind() -> None:
    made = capabilities([operation("a", "1.0.0", 2, "x"), operation("a", "1.1.0", 3, "x"), operation("b")])
    assert [(one.kind, list(one.versions), one.max_concurrency, one.input_schema_sha256) for one in made] == [
        ("a", ["1.0.0", "1.1.0"], 3, "x"),
        ("b", ["1.0.0"], 0, ""),
    ]


START = StartJob(
    lease_token=2**62,
    step_run_id="s",
    workflow_run_id="w",
    step_name="n",
    definition="d",
    attempt=1,
    idempotency_key="k",
    failures=0,
    max_attempts=3,
    kind="k",
    kind_version="1",
    time_left_s=None,
    inputs=[InputInfo("a", "0" * 64, 1, "", "", "{}")],
    secrets={"k": "v"},
    effects={},
    scratch="/x",
    max_payload_bytes=1,
    input=b"\x00\xffany",
    checkpoint=None,
)
MESSAGES: list[Message] = [
    START,
    dataclasses.replace(START, checkpoint=b"", input=b""),
    Ready([operation("a")], ""),
    Progress(1, 0.5, "é", {"m": 1.0}, b"{}"),
    Failed(1, "C", "m", None, None, "", None),
]


@given(st.lists(st.integers(1, 50), max_size=40))
def test_messages_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    decoder = Decoder()
    got = []
    for cut in cuts:
        piece, stream = stream[:cut], stream[cut:]
        got += decoder.feed(piece)
    got += decoder.feed(stream)
    assert got == MESSAGES


@pytest.mark.parametrize("noise", [b"\xff" * 16, b"\0\0\0\x08\0\0\0\x04[99]", b"\0\0\0\x08\0\0\0\x04abcd"])
def test_noise_on_the_link_is_no_message(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(noise)


def test_an_operation_is_offered_once_per_kind_and_version() -> None:
    offered = registry.Registry()

    @registry.operation("a.b", version="1.0.0", registry=offered)
    def first(job: object) -> None: ...

    @registry.operation("a.b", version="1.1.0", registry=offered)
    async def second(job: object) -> None: ...

    assert [(one.version, one.is_async) for one in offered.all()] == [("1.0.0", False), ("1.1.0", True)]
    with pytest.raises(ConfigurationError, match=r"a\.b 1\.0\.0 is defined twice"):
        registry.operation("a.b", version="1.0.0", registry=offered)(second)


@pytest.mark.parametrize(("kind", "version"), [("", "1"), ("a b", "1"), ("a", ""), ("a", "1 0"), (".a", "1")])
def test_kinds_and_versions_have_a_form(kind: str, version: str) -> None:
    with pytest.raises(ConfigurationError):
        registry.operation(kind, version=version)


def test_settings_come_from_the_environment_and_flags_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RARA_EXECUTOR_MODULES", "a, b.c,")
    monkeypatch.setenv("RARA_EXECUTOR_LABELS", "zone=x, gpu=")
    monkeypatch.setenv("RARA_EXECUTOR_SLOTS", "7")
    loaded = load({"executor_slots": 9})
    assert loaded.executor_modules == ("a", "b.c")
    assert loaded.executor_labels == {"zone": "x", "gpu": ""}
    assert loaded.executor_slots == 9


@pytest.mark.parametrize(
    ("name", "value"), [("SLOTS", "0"), ("LABELS", "zone"), ("STOP_S", "-1"), ("GRACE_S", "soon")]
)
def test_a_setting_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv("RARA_EXECUTOR_MODULES", "a")
    monkeypatch.setenv(f"RARA_EXECUTOR_{name}", value)
    with pytest.raises(ConfigurationError, match=f"^RARA_EXECUTOR_{name}: "):
        load({})


def test_what_a_dead_executor_left_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    living = ScratchFolder(tmp_path / "dir", "living")
    living.open()
    (living.jobs / "1").mkdir()
    dead = tmp_path / "dir" / "jobs" / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "left").touch()
    newer = ScratchFolder(tmp_path / "dir", "newer")
    newer.open()
    assert not dead.exists()
    assert (living.jobs / "1").exists()
    for folder in (living, newer):
        folder.close()
        assert not folder.jobs.exists()
