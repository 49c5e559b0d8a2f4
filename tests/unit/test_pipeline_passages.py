"""Cleaning: markup goes, words stay, and passages are of bounded size."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from knowledge_pipeline.passages import Passage, normalise, split

# Read by Go's test of its own clean step, too.
SHARED = Path(__file__).parents[2] / "executors/go/internal/passages/testdata/passages.jsonl"


def parts(text: str, *, is_markdown: bool = False, limit: int = 1000) -> list[tuple[str, str]]:
    return [(part.heading, part.text) for part in split(text, is_markdown=is_markdown, limit=limit)]


def test_text_is_composed_and_its_white_space_is_single() -> None:
    decomposed = "cafe\u0301  au\u00a0lait\t\r\nnext\rlast\x00\x1b\ufeff"
    assert normalise(decomposed) == "caf\u00e9 au lait\nnext\nlast"


def test_underlined_headings_head_the_text_below_them() -> None:
    text = "Coroutines\n**********\n\nA coroutine is\nawaited.\n\nExamples\n========\n\nFirst.\n\nSecond.\n"
    assert parts(text) == [("Coroutines", "A coroutine is awaited."), ("Examples", "First. Second.")]


def test_number_signs_are_headings_in_markdown_alone() -> None:
    text = "# The title #\nSome *emphasised* and **strong** `code` and [a link](http://x.example/y).\n"
    assert parts(text, is_markdown=True) == [("The title", "Some emphasised and strong code and a link.")]
    assert parts("# a comment\nx = 1\n") == [("", "# a comment x = 1")]


def test_a_rule_below_a_paragraph_is_no_heading() -> None:
    assert parts("One line.\nAnother line.\n----\nRest.") == [("", "One line. Another line. Rest.")]
    assert parts("----\nText") == [("", "Text")]


def test_stars_that_are_no_emphasis_stay() -> None:
    assert parts("a * b * c and **kwargs and 2*3*4") == [("", "a * b * c and **kwargs and 2*3*4")]
    assert parts("snake_case_name and __init__") == [("", "snake_case_name and __init__")]


def test_long_text_is_cut_at_the_ends_of_sentences_and_words() -> None:
    assert parts("One two. Three four. Five six.", limit=22) == [
        ("", "One two. Three four."),
        ("", "Five six."),
    ]
    assert parts("aaaa bbbb cccc dddd", limit=10) == [("", "aaaa bbbb"), ("", "cccc dddd")]
    assert parts("x" * 25, limit=10) == [("", "x" * 10), ("", "x" * 10), ("", "x" * 5)]


def test_equal_text_under_another_heading_is_the_same_passage() -> None:
    assert Passage("A", "same").sha256 == Passage("B", "same").sha256
    assert Passage("A", "same").sha256 != Passage("A", "other").sha256


def test_nothing_in_gives_nothing_out() -> None:
    assert parts("") == parts(" \n\n") == parts("Only a heading\n==============\n") == []


@given(st.text(st.characters(codec="utf-8"), max_size=400), st.booleans(), st.integers(1, 50))
def test_passages_stay_within_the_limit_and_are_never_empty(text: str, is_markdown: bool, limit: int) -> None:
    for part in split(text, is_markdown=is_markdown, limit=limit):
        assert 0 < len(part.text) <= limit
        assert part.text == part.text.strip()


@given(st.lists(st.from_regex(r"[a-z]{1,9}", fullmatch=True), max_size=60), st.integers(10, 80))
def test_no_word_is_lost_or_moved(words: list[str], limit: int) -> None:
    found = [
        word for part in split(" ".join(words), is_markdown=False, limit=limit) for word in part.text.split()
    ]
    assert found == words


def test_the_cases_that_go_is_held_to() -> None:
    with SHARED.open("rb") as lines:
        for line in lines:
            case = json.loads(line)
            cut = parts(case["text"], is_markdown=case["is_markdown"], limit=case["limit"])
            assert cut == [tuple(passage) for passage in case["passages"]], case["text"]
