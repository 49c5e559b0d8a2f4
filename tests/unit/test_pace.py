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


async def test_who_has_done_nothing_does_not_rest() -> None:
    time = Time()
    await Pace(time, sleep=time.sleep).rest()
    assert time.slept == []


async def test_a_rest_is_as_long_as_the_set_took_and_counts_what_has_passed_of_it() -> None:
    time = Time()
    pace = Pace(time, sleep=time.sleep)
    pace.took(0.010)
    time.now += 0.004
    await pace.rest()
    assert time.slept == [pytest.approx(0.006)]
    await pace.rest()
    assert len(time.slept) == 1


async def test_a_rest_is_bounded_whatever_a_set_took() -> None:
    time = Time()
    pace = Pace(time, sleep=time.sleep)
    pace.took(30.0)
    await pace.rest()
    assert time.slept == [pytest.approx(LONGEST_S)]
