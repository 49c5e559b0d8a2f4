"""The chaos runner's schedule: nothing is left out, and the seed is all that it depends on."""

from collections import Counter

import pytest
from rara_chaos.composefaults import KINDS as COMPOSE_KINDS
from rara_chaos.schedule import MACHINE_KINDS, OF_EXECUTORS, PROCESS_KINDS, Kind, schedule


def test_the_same_seed_gives_the_same_schedule() -> None:
    assert schedule(7, 60, 3) == schedule(7, 60, 3)
    assert schedule(7, 60, 3) != schedule(8, 60, 3)


@pytest.mark.parametrize(("duration_s", "every_s"), [(5, 3), (60, 3), (600, 3), (60, 1)])
def test_every_kind_comes_and_none_is_preferred(duration_s: float, every_s: float) -> None:
    for seed in range(5):
        faults = schedule(seed, duration_s, every_s)
        assert len(set(Counter(fault.kind for fault in faults).values())) == 1
        assert {fault.kind for fault in faults} == set(PROCESS_KINDS)
        assert all(0 < fault.at_s < duration_s for fault in faults)
        assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)


def test_every_other_executor_is_hit_as_often_as_its_neighbour() -> None:
    for seed in range(20):
        one_deck = Counter(fault.target % 2 for fault in schedule(seed, 60, 3) if fault.kind in OF_EXECUTORS)
        assert one_deck[0] == one_deck[1] == len(OF_EXECUTORS.intersection(PROCESS_KINDS)) / 2
        two_decks = {(fault.kind, fault.target % 2) for fault in schedule(seed, 200, 3)}
        assert len(two_decks) == 2 * len(PROCESS_KINDS)


def test_a_longer_run_has_more_faults() -> None:
    assert len(schedule(1, 600, 3)) == pytest.approx(600 / 3, rel=0.2)


def test_a_second_deck_changes_nothing_in_the_first() -> None:
    both = schedule(3, 200, 3, also=MACHINE_KINDS)
    assert [fault for fault in both if fault.kind not in MACHINE_KINDS] == schedule(3, 200, 3)
    assert Counter(fault.kind for fault in both if fault.kind in MACHINE_KINDS) == dict.fromkeys(
        MACHINE_KINDS, 2
    )
    assert [fault.at_s for fault in both] == sorted(fault.at_s for fault in both)


def test_a_seed_deals_what_it_always_did() -> None:
    first = schedule(42, 60, 3)[0]
    assert (first.kind, first.target) == (Kind.SCHEDULER_KILLED, 2334)


def test_a_short_run_has_so_many_of_other_kinds_as_there_is_time_for() -> None:
    for seed in range(5):
        faults = schedule(seed, 20, 5, COMPOSE_KINDS, at_most=4)
        assert len({fault.kind for fault in faults}) == len(faults) == 4
    assert {fault.kind for fault in schedule(1, 300, 5, COMPOSE_KINDS, at_most=60)} == set(COMPOSE_KINDS)
