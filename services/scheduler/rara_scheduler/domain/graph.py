"""The graph of a definition's steps: order, cycles, what lies behind a step."""

from collections.abc import Iterable, Mapping, Sequence


def downstream(dependants: Mapping[str, Sequence[str]], names: Iterable[str]) -> set[str]:
    """The steps named and all that depend on them, directly or not."""
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending.extend(dependants.get(name, ()))
    return reached


def find_cycle(depends_on: Mapping[str, Sequence[str]]) -> list[str]:
    """One cycle, its first step repeated at the end (`[a, b, a]`: a depends on b); empty when there is none.

    Dependencies on unknown names are passed over. Linear in steps and edges, without recursion.
    """
    waits_for = {name: sum(1 for up in set(ups) if up in depends_on) for name, ups in depends_on.items()}
    dependants: dict[str, list[str]] = {name: [] for name in depends_on}
    for name, ups in depends_on.items():
        for up in set(ups):
            if up in dependants:
                dependants[up].append(name)
    free = [name for name, count in waits_for.items() if not count]
    for name in free:  # grows while it is read: Kahn's order
        for dependant in dependants[name]:
            waits_for[dependant] -= 1
            if not waits_for[dependant]:
                free.append(dependant)
    stuck = {name for name, count in waits_for.items() if count}
    if not stuck:
        return []
    # Each stuck step waits for a stuck one, so walking up must come round.
    name = next(name for name in depends_on if name in stuck)
    seen: dict[str, int] = {}
    trail: list[str] = []
    while name not in seen:
        seen[name] = len(trail)
        trail.append(name)
        name = next(up for up in depends_on[name] if up in stuck)
    return [*trail[seen[name] :], name]
