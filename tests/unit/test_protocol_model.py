"""The lease protocol, every interleaving of it: no promise breaks, and each guard is needed for one of them."""

import pytest
from support.explorer import Exploration, Step, explore
from support.lease_model import GUARDS, Bounds, Model, World

CUT, CRASH = frozenset({"cut"}), frozenset({"scheduler crash"})
CANCEL = Bounds(faults=0, cancels=1)
STRANGER = Bounds(faults=0, strangers=1)
EXECUTOR_CRASH = Bounds(fault_kinds=frozenset({"executor crash"}), victims=(1,))
FREEZE = Bounds(fault_kinds=frozenset({"freeze"}), victims=(1,))
REPEAT = Bounds(fault_kinds=frozenset({"repeat"}), victims=(1,))
CUT_DILIGENT = Bounds(fault_kinds=CUT, victims=(1,), dials=(2,), diligent=True)
ONE_GRANT_CRASH = Bounds(grants=1, fault_kinds=CRASH, victims=(1,), dials=(2,), diligent=True)
STALE_HELLO = Bounds(fault_kinds=CUT, victims=(1,), dials=(2,), dialling=True, diligent=True)

USUAL = {  # and how many states there are at least: a model that lost its states proves nothing
    "nothing fails, a caller may cancel": (CANCEL, 15_000),
    "an executor crashes": (EXECUTOR_CRASH, 8_000),
    "an executor freezes and thaws": (FREEZE, 18_000),
    "a session is cut": (CUT_DILIGENT, 20_000),
    "a scheduler crashes": (ONE_GRANT_CRASH, 1_500),
}
LARGE = {
    "a stranger reports": STRANGER,
    "frames come twice": REPEAT,
    "frames are lost": Bounds(fault_kinds=frozenset({"loss"})),
    "a session is cut and beats may be late": Bounds(fault_kinds=CUT, victims=(1,)),
    "a scheduler crashes and beats may be late": Bounds(fault_kinds=CRASH, victims=(1,), dials=(2,)),
    "an old Hello comes late": STALE_HELLO,
    "anything fails once, everybody beats in time": Bounds(diligent=True),
    "anything fails once": Bounds(),
    "a caller cancels and an executor fails": Bounds(
        cancels=1, fault_kinds=frozenset({"executor crash", "freeze"}), victims=(1,)
    ),
}
# Where the lack of a guard shows; elsewhere it may be hidden by another one.
SHOWN_BY = dict.fromkeys(GUARDS, CANCEL) | {
    "owner": STRANGER,
    "late is classified": REPEAT,
    "reclaim": EXECUTOR_CRASH,
    "present at release": STALE_HELLO,
    "resend": ONE_GRANT_CRASH,
}


def explored(bounds: Bounds, *without: str, limit: int = 3_000_000) -> Exploration[World]:
    model = Model(bounds, without=frozenset(without))
    return explore(model.start(), model.ways, model.is_goal, limit=limit)


@pytest.mark.parametrize(("bounds", "at_least"), USUAL.values(), ids=USUAL)
def test_no_interleaving_breaks_a_promise_or_strands_the_step(bounds: Bounds, at_least: int) -> None:
    seen = explored(bounds)
    print(f"{seen.states} states, {seen.steps} steps")
    assert not seen.broken, seen.story()
    assert seen.states > at_least


@pytest.mark.soak
@pytest.mark.parametrize("bounds", LARGE.values(), ids=LARGE)
def test_no_interleaving_breaks_a_promise_with_wider_bounds(bounds: Bounds) -> None:
    seen = explored(bounds)
    print(f"{seen.states} states, {seen.steps} steps")
    assert not seen.broken, seen.story()
    assert seen.states > 10_000


@pytest.mark.parametrize("guard", GUARDS)
def test_without_any_one_guard_a_promise_breaks(guard: str) -> None:
    seen = explored(SHOWN_BY[guard], guard)
    print(f"without: {GUARDS[guard]}\n{seen.story()}")
    assert seen.broken
    assert 1 <= len(seen.trace) <= 30


def test_a_guard_that_does_not_exist_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no such guard"):
        Model(CANCEL, without=frozenset({"luck"}))


# ------------------------------------------------------------ the explorer itself


def counter(state: int) -> list[Step[int]]:
    """0 to 9 by ones; from 5 a fault leads to 100, where nothing goes on."""
    steps = [Step("one more", state + 1)] if state < 9 else []
    return steps + ([Step("fall", 100, is_fault=True)] if state == 5 else [])


def test_the_explorer_tells_the_shortest_way_to_a_state_without_an_end() -> None:
    seen = explore(0, counter, lambda state: state == 9)
    assert seen.states == 11
    assert seen.trace == ["one more"] * 5 + ["fall"]
    assert seen.story().startswith("BROKEN: from here no end")


def test_the_explorer_stops_at_a_broken_promise() -> None:
    def ways(state: int) -> list[Step[int]]:
        return [Step("jump", state, broken="no jumps")] if state == 3 else [Step("walk", state + 1)]

    seen = explore(0, ways, lambda _: True)
    assert (seen.broken, seen.trace) == ("no jumps", ["walk", "walk", "walk", "jump"])


def test_an_end_that_only_a_fault_leads_to_does_not_count() -> None:
    seen = explore(0, lambda state: [Step("luck", 1, is_fault=True)] if not state else [], lambda s: s == 1)
    assert seen.broken
