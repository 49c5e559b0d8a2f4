"""Explicit-state model checking: visit every state that a small model can reach, and show how it got to a bad one."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Step(Generic[S]):
    """One way on. is_fault: nothing may depend on it happening. broken: the promise that it breaks, if any."""

    label: str
    state: S
    is_fault: bool = False
    broken: str = ""


@dataclass(slots=True)
class Exploration(Generic[S]):
    """What was seen. broken: a promise, with the shortest way to break it in `trace`; empty: none was broken."""

    states: int = 0
    steps: int = 0
    broken: str = ""
    trace: list[str] = field(default_factory=list)

    def story(self) -> str:
        """The way to the bad state, a line each."""
        lines = [f"{number:3d}  {label}" for number, label in enumerate(self.trace, 1)]
        return "\n".join([f"BROKEN: {self.broken}", *lines])


class TooLarge(Exception):
    """The model has more states than were expected."""


def explore(
    start: S,
    ways: Callable[[S], Iterable[Step[S]]],
    is_goal: Callable[[S], bool],
    *,
    limit: int = 1_000_000,
) -> Exploration[S]:
    """Visit all states, breadth first; stop at the first broken promise.

    Then look for stranded states: those from which no goal can be reached without a further fault.
    """
    parents: dict[S, tuple[S, str] | None] = {start: None}
    backwards: dict[S, list[S]] = {}
    goals: list[S] = []
    queue = deque([start])
    seen = Exploration[S]()
    while queue:
        state = queue.popleft()
        seen.states += 1
        if is_goal(state):
            goals.append(state)
        for step in ways(state):
            seen.steps += 1
            if step.broken:
                seen.broken = step.broken
                seen.trace = [*_way(parents, state), step.label]
                return seen
            if not step.is_fault and step.state != state:
                backwards.setdefault(step.state, []).append(state)
            if step.state not in parents:
                if len(parents) >= limit:
                    raise TooLarge(f"more than {limit} states")
                parents[step.state] = (state, step.label)
                queue.append(step.state)
    stranded = next(_not_leading_to(goals, backwards, parents), None)
    if stranded is not None:
        seen.broken = "from here no end can be reached any more"
        seen.trace = _way(parents, stranded)
    return seen


def _not_leading_to(
    goals: list[S], backwards: dict[S, list[S]], parents: dict[S, tuple[S, str] | None]
) -> Iterator[S]:
    """States, in the order in which they were found, from which no goal is reached."""
    leading = set(goals)
    queue = deque(goals)
    while queue:
        for before in backwards.get(queue.popleft(), ()):
            if before not in leading:
                leading.add(before)
                queue.append(before)
    return (state for state in parents if state not in leading)


def _way(parents: dict[S, tuple[S, str] | None], state: S) -> list[str]:
    labels = []
    while (parent := parents[state]) is not None:
        state, label = parent
        labels.append(label)
    return labels[::-1]
