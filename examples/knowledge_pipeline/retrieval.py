"""Known-item retrieval: each document is asked for by its title, and the figures say at which rank it came."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MISSED = 0
HARDEST_KEPT = 10


@dataclass(slots=True)
class Scores:
    """How often the wanted document came at which rank, from 1; MISSED for not at all.

    A count per rank, and not a list of ranks, so that a checkpoint stays small for any number of queries.
    """

    ranks: dict[int, int] = field(default_factory=dict)

    def add(self, rank: int) -> None:
        self.ranks[rank] = self.ranks.get(rank, 0) + 1

    @property
    def queries(self) -> int:
        return sum(self.ranks.values())

    def recall_at(self, cutoff: int) -> float:
        """The share of queries whose document is among the first `cutoff`; 0.0 without queries."""
        found = sum(count for rank, count in self.ranks.items() if MISSED < rank <= cutoff)
        return found / self.queries if self.queries else 0.0

    @property
    def mrr(self) -> float:
        """Mean reciprocal rank over all queries, without a cutoff; a missed document counts 0."""
        total = sum(count / rank for rank, count in sorted(self.ranks.items()) if rank != MISSED)
        return total / self.queries if self.queries else 0.0

    def as_json(self) -> dict[str, int]:
        return {str(rank): count for rank, count in sorted(self.ranks.items())}

    @classmethod
    def from_json(cls, ranks: Mapping[str, int]) -> "Scores":
        return cls({int(rank): count for rank, count in ranks.items()})


def rank_of(wanted: str, answers: Iterable[str]) -> int:
    for rank, answer in enumerate(answers, start=1):
        if answer == wanted:
            return rank
    return MISSED


def halves(titles: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Two halves of the documents, one to choose settings by and one held out to judge the choice.

    By the hash of the name: the same for every run, and without a pattern that the names could have.
    """
    shuffled = sorted(titles, key=lambda item: hashlib.sha256(item[0].encode()).digest())
    middle = (len(shuffled) + 1) // 2
    return shuffled[:middle], shuffled[middle:]
