"""How long an executor waits before it dials again."""

import pytest
from rara_executor.connection import MAX_BACKOFF_S, pause_s


@pytest.mark.parametrize(("failures", "ceiling_s"), [(0, 0.2), (1, 0.4), (3, 1.6), (5, 5.0), (10_000, 5.0)])
def test_the_pause_doubles_up_to_its_cap(failures: int, ceiling_s: float) -> None:
    assert pause_s(failures, 1.0, MAX_BACKOFF_S) == pytest.approx(ceiling_s)
    assert pause_s(failures, 0.5, MAX_BACKOFF_S) == pytest.approx(ceiling_s / 2)
    assert pause_s(failures, 0.0, MAX_BACKOFF_S) == 0.0


def test_an_executor_with_short_heartbeats_is_back_within_one_of_them() -> None:
    assert pause_s(50, 1.0, 1.0) == 1.0
