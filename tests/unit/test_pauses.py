"""What a scheduler knows of pauses: how long, and in which order a call lets it go by them."""

from datetime import UTC, datetime, timedelta

import pytest
from rara_scheduler.domain.pause import Pause, Target, similar, told
from rara_scheduler.pauses import Pauses
from rara_scheduler.pausing import Pausing

NOON = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)


def pause(number: int, **target: str) -> Pause:
    return Pause(number, Target(**target), "", "", NOON)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_known_before_the_first_look_and_long_after_the_last() -> None:
    clock = Clock()
    pauses = Pauses(stale_s=5.0, clock=clock)
    assert not pauses.are_known
    assert not pauses.looked([], clock.now)  # nothing has changed: nothing is paused
    assert pauses.are_known
    clock.now += 5.1  # a process that was frozen
    assert not pauses.are_known
    assert pauses.looked([pause(1, kind="a"), pause(2, definition="d")], clock.now)
    assert pauses.are_known
    assert pauses.kinds == {"a"}
    assert pauses.definitions == {"d"}


def test_a_look_that_began_earlier_and_ends_later_changes_nothing() -> None:
    clock = Clock()
    pauses = Pauses(stale_s=5.0, clock=clock)
    assert pauses.looked([pause(1, kind="a")], clock.now)
    assert not pauses.looked([], clock.now - 1)
    assert pauses.kinds == {"a"}


def test_a_mark_confirms_what_is_known_and_nothing_else() -> None:
    clock = Clock()
    pauses = Pauses(stale_s=5.0, clock=clock)
    assert not pauses.confirmed("", clock.now)  # before the first look nothing is known
    pauses.looked([], clock.now)
    clock.now += 4.0
    assert pauses.confirmed("", clock.now)
    assert pauses.is_quiet(1.0)
    clock.now += 4.0
    assert pauses.are_known
    assert not pauses.is_quiet(1.0)
    assert not pauses.confirmed("1", clock.now)
    over = Pause(1, Target(kind="a"), "", "", NOON, resumed_at=NOON)
    pauses.looked([pause(2, definition="d"), over], clock.now)
    assert not pauses.is_quiet(1.0)
    assert not pauses.confirmed("1 2", clock.now)
    assert pauses.confirmed("1- 2", clock.now - 1)  # a look that began earlier makes nothing younger
    clock.now += 5.1
    assert not pauses.are_known


def test_what_is_being_resumed_may_be_leased_and_is_spared_from_waiting_in_vain() -> None:
    clock = Clock()
    pauses = Pauses(stale_s=5.0, clock=clock)
    over = Pause(1, Target(kind="a"), "", "", NOON, resumed_at=NOON + timedelta(hours=1))
    assert pauses.looked([over, pause(2, definition="d")], clock.now)
    assert not pauses.kinds
    assert pauses.sparing_kinds == {"a"}
    assert pauses.definitions == pauses.sparing_definitions == {"d"}


def test_a_pause_in_words_says_what_is_known() -> None:
    assert told(pause(1, kind="a")) == "kind a is paused since 2026-03-04T12:00:00Z"
    full = Pause(1, Target(definition="d"), "bad input", "ops", NOON)
    assert told(full) == "definition d is paused since 2026-03-04T12:00:00Z by ops: bad input"


def test_names_that_may_have_been_meant() -> None:
    assert similar("index.biuld", ["index.build", "clean"]) == ("index.build",)
    assert similar("zzz", ["index.build"]) == ()


class _Store:
    def __init__(self, steps: list[str]) -> None:
        self._steps = steps

    async def current(self, target: Target) -> Pause:
        return pause(1, kind=target.name)

    async def pause(self, target: Target, *, reason: str, paused_by: str) -> tuple[Pause, bool]:
        self._steps.append("stored")
        return pause(1, kind=target.name), True


@pytest.mark.asyncio
async def test_a_pause_is_answered_when_the_leasing_under_way_has_ended() -> None:
    steps: list[str] = []

    async def look() -> None:
        steps.append("looked")

    async def turn_over() -> None:
        steps.append("turn over")

    pausing = Pausing(
        _Store(steps),  # type: ignore[arg-type] # what a pause asks of it
        look=look,
        turn_over=turn_over,
        wake=lambda: steps.append("woken"),
        tell_others=lambda: steps.append("told"),
    )
    await pausing.pause(Target(kind="a"), reason="", paused_by="", allow_unknown=False)
    assert steps == ["stored", "looked", "turn over", "woken", "told"]
