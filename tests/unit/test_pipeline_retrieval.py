"""The figures: recall and reciprocal rank by hand, and a choice that is judged on what it has not seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from knowledge_pipeline import adaptation, reports
from knowledge_pipeline.adaptation import Comparison, Tried
from knowledge_pipeline.fulltext import Settings
from knowledge_pipeline.retrieval import MISSED, Scores, halves, rank_of


def scores_of(*ranks: int) -> Scores:
    scores = Scores()
    for rank in ranks:
        scores.add(rank)
    return scores


def test_recall_and_reciprocal_rank_are_over_all_queries() -> None:
    scores = scores_of(1, 2, 10, 11, MISSED)
    assert scores.queries == 5
    assert scores.recall_at(1) == 1 / 5
    assert scores.recall_at(10) == 3 / 5
    assert scores.mrr == pytest.approx((1 + 1 / 2 + 1 / 10 + 1 / 11) / 5)


def test_no_queries_score_nothing() -> None:
    assert (Scores().mrr, Scores().recall_at(10), Scores().queries) == (0.0, 0.0, 0)


@given(st.lists(st.integers(0, 500)), st.integers(0, 400))
def test_scores_survive_a_checkpoint_anywhere(ranks: list[int], cut: int) -> None:
    resumed = Scores.from_json(scores_of(*ranks[:cut]).as_json())
    for rank in ranks[cut:]:
        resumed.add(rank)
    assert resumed == scores_of(*ranks)
    assert resumed.mrr == scores_of(*ranks).mrr


def test_the_rank_counts_from_one() -> None:
    assert rank_of("b", ["a", "b", "c"]) == 2
    assert rank_of("z", ["a", "b"]) == MISSED


@given(st.sets(st.text(max_size=5), max_size=40))
def test_halves_share_nothing_and_leave_nothing_out(names: set[str]) -> None:
    titles = [(name, name.upper()) for name in sorted(names)]
    choosing, judging = halves(titles)
    assert sorted(choosing + judging) == titles
    assert len(choosing) - len(judging) in (0, 1)
    assert halves(titles[::-1]) == (choosing, judging)


def test_the_grid_keeps_what_shares_an_index_together() -> None:
    grid = adaptation.grid()
    assert len(set(grid)) == len(grid) == 12
    tokenizers = [settings.tokenizer for settings in grid]
    assert tokenizers == sorted(tokenizers, key=tokenizers.index)
    assert Settings() in grid


def test_the_first_of_equally_good_settings_is_kept() -> None:
    low, first, second = Tried(Settings(), 0.1), Tried(Settings(depth=2), 0.7), Tried(Settings("porter"), 0.7)
    assert adaptation.best([low, first, second]) is first


def test_a_title_cannot_shape_the_report() -> None:
    report = reports.evaluation_report(Settings(), scores_of(1, MISSED), [(MISSED, "`x`\n# heading")])
    assert "- `'x' # heading`: not found" in report
    assert "| recall@1 | 0.500 |" in report


def test_the_report_of_an_adaptation_says_when_it_made_things_worse() -> None:
    held_out = Comparison(scores_of(1, 1), scores_of(1, 2), better=0, worse=1, same=1)
    tried = [Tried(Settings(), 0.5), Tried(Settings("porter"), 0.6)]
    report = reports.adaptation_report(tried, tried[1], held_out, 2)
    assert "MRR -0.250: 0 documents moved up, 1 down, 1 stayed." in report
    assert "| defaults | 1.000 | 1.000 | 1.000 |" in report
