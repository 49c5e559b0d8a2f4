"""When turns are due in an open loop: planned ahead of time, so that a slow system cannot thin them out."""

import random
from collections.abc import Iterator


def arrivals(rate: float, *, poisson: bool, draw: random.Random) -> Iterator[float]:
    """Seconds from the beginning, rising without end: at random with that mean rate, or evenly."""
    at_s = 0.0
    number = 0
    while True:
        if poisson:
            at_s += draw.expovariate(rate)
        else:
            at_s = number / rate  # not summed up: errors would add
        yield at_s
        number += 1
