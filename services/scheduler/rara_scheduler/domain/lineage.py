"""Lineage: which steps made and used an artifact, and how a walk along these edges goes on."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

MAX_DEPTH: Final = 32
# What one call may look at: some tenths of a second of one database connection.
MAX_EDGES: Final = 20_000
MAX_ORIGINS: Final = 200_000  # of their digests in derived_from, of which one edge may have thousands
MIN_PREFIX: Final = 8


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """produced: the step made the artifact, else it used it. declared: else seen at run time only.

    derived_from: digests and sizes of the inputs that an output was made from; empty: all. depth: how many steps
    away the step is from where the walk began, from 1.
    """

    sha256: str
    size_bytes: int
    name: str
    workflow_run_id: str
    step_run_id: str
    attempt: int
    produced: bool
    declared: bool
    depth: int
    step_name: str
    definition: str
    definition_version: int
    kind: str
    artifact_type: str
    derived_from: tuple[tuple[str, int], ...]


class Half(IntEnum):
    """A walk comes to a step by one edge and leaves it by another; each depth has the first kind before the second."""

    TO_STEP = 0
    FROM_STEP = 1


class Place(NamedTuple):
    """Where an edge stands in the order of a walk. first, second: digest and step, or step and digest."""

    depth: int
    half: Half
    first: str
    second: str
    name: str

    @property
    def sha256(self) -> str:
        return self.first if self.half is Half.TO_STEP else self.second

    @property
    def step_run_id(self) -> str:
        return self.second if self.half is Half.TO_STEP else self.first


class Row(NamedTuple):
    """A stored edge. origins: how many digests it was derived from, which are read where they are needed; 0: all."""

    sha256: str
    step_run_id: str
    name: str
    origins: int
    size_bytes: int
    workflow_run_id: str
    attempt: int
    declared: bool


# By step: the inputs (upstream) or outputs (downstream) that a walk may go on with. None: all.
Through = Mapping[str, AbstractSet[str] | None]


def reached_inputs(to_steps: Iterable[Row]) -> dict[str, set[str]]:
    """By step, by which of its inputs a walk downstream came to it."""
    found: dict[str, set[str]] = {}
    for row in to_steps:
        found.setdefault(row.step_run_id, set()).add(row.sha256)
    return found


def leads_on(
    row: Row, through: AbstractSet[str] | None, *, upstream: bool, of_what_was_reached: AbstractSet[Row]
) -> bool:
    """Whether an edge on the other side of a step belongs to a walk that came to the step so.

    An output that names what it was made from comes from nothing else. of_what_was_reached: outputs that name it.
    """
    if through is None:
        return True
    if upstream:
        return row.sha256 in through
    return not row.origins or row in of_what_was_reached
