"""Token buckets by caller, with a clock of the test's own."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara.v1 import artifact_pb2, dispatch_pb2, workflow_pb2
from rara_scheduler.transport.rate import LIMITED, MAX_CALLERS, Rates, peer_host


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_passes_and_then_as_much_as_flows_in() -> None:
    clock = Clock()
    rates = Rates(2.0, 3, clock=clock)
    assert [rates.take("a") for _ in range(5)] == [0.0, 0.0, 0.0, 0.5, 0.5]
    assert rates.take("b") == 0.0
    clock.now = 0.5
    assert [rates.take("a"), rates.take("a")] == [0.0, 0.5]
    clock.now = 100.0
    assert [rates.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_batch_costs_its_runs_and_at_most_a_full_bucket() -> None:
    clock = Clock()
    rates = Rates(10.0, 100, clock=clock)
    assert [rates.take("a", 60), rates.take("a", 60)] == [0.0, 2.0]
    assert rates.take("a", 40) == 0.0
    assert rates.take("a", 1000) == 10.0  # more than ever fits: when the bucket is full
    clock.now = 10.0
    assert [rates.take("a", 1000), rates.take("a")] == [0.0, 0.1]
    assert rates.take("b", 0) == 0.0


@given(st.lists(st.floats(0.0, 0.3), min_size=1, max_size=200))
def test_no_span_of_time_passes_more_than_its_share_and_a_burst(pauses: list[float]) -> None:
    clock = Clock()
    rates = Rates(10.0, 5, clock=clock)
    passed = 0
    for pause in pauses:
        clock.now += pause
        wait_s = rates.take("a")
        passed += wait_s == 0.0
        assert 0.0 <= wait_s <= 0.1 + 1e-9
        assert passed <= 5 + clock.now * 10.0 + 1e-6


def test_the_table_stays_bounded() -> None:
    rates = Rates(1.0, 1, clock=Clock())
    for number in range(MAX_CALLERS + 50):
        rates.take(f"caller {number}")
    assert len(rates._buckets) == MAX_CALLERS
    assert rates.take(f"caller {MAX_CALLERS + 49}") > 0.0


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.5:4711", "ipv4:10.0.0.5"),
        ("ipv6:[::1]:4711", "ipv6:[::1]"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_a_peer_is_its_address_without_the_port(peer: str, host: str) -> None:
    assert peer_host(peer) == host


def test_what_is_limited_is_served_and_unary() -> None:
    methods = {
        f"/{service.full_name}/{method.name}": method
        for file in (workflow_pb2, artifact_pb2, dispatch_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert set(methods) >= LIMITED
    assert not any(methods[path].client_streaming or methods[path].server_streaming for path in LIMITED)
