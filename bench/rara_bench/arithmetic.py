"""Percentiles, medians and ratios."""

import math
from collections.abc import Iterable, Sequence
from statistics import median

from rara_bench.arm import Sample


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed ("nearest rank")."""
    if not values:
        raise ValueError("no values")
    if not 0 < share <= 1:
        raise ValueError(f"{share} is no share")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def medians(samples: Iterable[Sample]) -> dict[str, float]:
    """Of each figure of one arm."""
    rows = [sample.figures for sample in samples]
    return {name: median(row[name] for row in rows) for name in rows[0]} if rows else {}


def value(samples: Sequence[Sample], of: tuple[str, str]) -> float | None:
    """The median over rounds of one figure, (arm, name). None: no round has it."""
    found = [sample.figures[of[1]] for sample in samples if sample.arm == of[0]]
    return median(found) if found else None


def ratio(samples: Sequence[Sample], above: tuple[str, str], below: tuple[str, str]) -> float | None:
    """The median over rounds of one figure divided by another; (arm, figure) each. None: no round has both.

    An arm that is measured twice a round counts where it stands nearer in time, since the machine drifts.
    """
    uppers = [sample for sample in samples if sample.arm == above[0]]
    lowers = [sample for sample in samples if sample.arm == below[0] and sample.figures.get(below[1])]
    found = []
    for number in sorted({sample.round for sample in uppers}):
        pairs = [
            (abs(a.at - b.at), a.figures[above[1]] / b.figures[below[1]])
            for a in uppers
            for b in lowers
            if a.round == b.round == number
        ]
        if pairs:
            found.append(min(pairs)[1])
    return median(found) if found else None
