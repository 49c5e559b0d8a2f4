"""An arm of the benchmark: one thing that is measured once a round."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from rara_bench.options import Options
from rara_bench.server import Server

Figures: TypeAlias = Mapping[str, float]


class CannotMeasure(Exception):
    """Something that the arm needs is not on this machine; the text says what."""


@dataclass(slots=True)
class Bench:
    """What the arms share, and what each keeps from round to round: `kept`, closed in the end by `stack`."""

    options: Options
    folder: Path
    server: Server
    stack: AsyncExitStack
    kept: dict[str, object] = field(default_factory=dict)


Measure: TypeAlias = Callable[[Bench], Awaitable[Figures]]


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    measure: Measure
    what: str  # in a few words, for the table


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement. at: seconds since the run began, in the middle of it. others: the processors' share."""

    arm: str
    round: int
    at: float
    figures: Figures
    busy: float
    others: float
    tries: int
