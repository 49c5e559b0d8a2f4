"""Choosing index settings by one half of the documents, and judging the choice by the other."""

import itertools
from dataclasses import dataclass
from typing import Final

from knowledge_pipeline.fulltext import TOKENIZERS, Index, Settings
from knowledge_pipeline.retrieval import MISSED, Scores, rank_of

HEADING_WEIGHTS: Final = (1.0, 3.0, 10.0)
DEPTHS: Final = (1, 2)
# Settings differ by more than what the next hundred queries would tell: the rest of a large corpus is not asked.
MAX_QUERIES: Final = 250


@dataclass(frozen=True, slots=True)
class Tried:
    settings: Settings
    mrr: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two settings on the same queries. better, worse, same: queries whose document moved up, down or not."""

    baseline: Scores
    chosen: Scores
    better: int
    worse: int
    same: int


def grid() -> list[Settings]:
    """All settings that are tried, those of one tokenizer together: they share an index."""
    return [
        Settings(tokenizer, heading_weight, depth)
        for tokenizer, heading_weight, depth in itertools.product(TOKENIZERS, HEADING_WEIGHTS, DEPTHS)
    ]


def best(tried: list[Tried]) -> Tried:
    """The first of those with the highest MRR. Raises ValueError if nothing was tried."""
    return max(tried, key=lambda one: one.mrr)


def score(index: Index, settings: Settings, titles: list[tuple[str, str]]) -> Scores:
    scores = Scores()
    for name, title in titles:
        scores.add(rank_of(name, index.search(title, settings=settings)))
    return scores


def compare(
    titles: list[tuple[str, str]], baseline: tuple[Index, Settings], chosen: tuple[Index, Settings]
) -> Comparison:
    before, after = Scores(), Scores()
    moves = {"better": 0, "worse": 0, "same": 0}
    for name, title in titles:
        old = rank_of(name, baseline[0].search(title, settings=baseline[1]))
        new = rank_of(name, chosen[0].search(title, settings=chosen[1]))
        before.add(old)
        after.add(new)
        moves[_move(old, new)] += 1
    return Comparison(before, after, **moves)


def _move(old: int, new: int) -> str:
    if old == new:
        return "same"
    if new == MISSED:
        return "worse"
    return "better" if old == MISSED or new < old else "worse"
