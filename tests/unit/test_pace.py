"""The rest behind small sets, on a clock that stands until it is pushed."""

import pytest
from rara_scheduler.loops.pace import LONGEST_S, Pace


class Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def busy(time: Time) -> Pace:
    """One that has ended a set just now."""
    pace = Pace(time, sleep=time.sleep)
    pace.took(0.001)
    return pace


async def test_who_has_done_nothing_does_not_rest() -> None:
    time = Time()
    await Pace(time, sleep=time.sleep).rest()
    assert time.slept == []


async def test_a_rest_is_as_long_as_the_set_took_and_counts_what_has_passed_of_it() -> None:
    time = Time()
    pace = busy(time)
    time.now += 0.010
    pace.took(0.010)
    time.now += 0.004
    await pace.rest()
    assert time.slept == [pytest.approx(0.006)]
    await pace.rest()
    assert len(time.slept) == 1


async def test_a_rest_is_bounded_whatever_a_set_took() -> None:
    time = Time()
    pace = busy(time)
    time.now += 30.0
    pace.took(30.0)
    await pace.rest()
    assert time.slept == [pytest.approx(LONGEST_S)]


async def test_nobody_rests_who_had_nothing_to_do_for_longer_than_the_set_took() -> None:
    time = Time()
    pace = busy(time)
    time.now += 0.011 + 0.010
    pace.took(0.010)
    await pace.rest()
    assert time.slept == []
    time.now += 0.009 + 0.010  # but what comes sooner than that comes often
    pace.took(0.010)
    await pace.rest()
    assert time.slept == [pytest.approx(0.010)]


async def test_the_rest_itself_is_no_time_without_work() -> None:
    time = Time()
    pace = busy(time)
    for _ in range(3):
        time.now += 0.010
        pace.took(0.010)
        await pace.rest()
    assert time.slept == [pytest.approx(0.010)] * 3


async def test_a_large_set_is_followed_at_once_and_counts_as_work() -> None:
    time = Time()
    pace = busy(time)
    time.now += 0.010
    pace.took(0.010, is_small=False)
    await pace.rest()
    assert time.slept == []
    time.now += 0.010
    pace.took(0.010)
    await pace.rest()
    assert time.slept == [pytest.approx(0.010)]
