"""The index: any text may be asked for, the ranking is exact, and the same input gives the same bytes."""

import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from knowledge_pipeline.fulltext import (
    TOKENIZERS,
    Builder,
    CleanDocument,
    CleanPassage,
    Index,
    Settings,
    match_expression,
)


def document(name: str, *texts: tuple[str, str], shared: tuple[str, ...] = ()) -> CleanDocument:
    new = tuple(
        CleanPassage(hashlib.sha256(text.encode()).hexdigest(), heading, text) for heading, text in texts
    )
    known = tuple(hashlib.sha256(text.encode()).hexdigest() for text in shared)
    return CleanDocument(name, name, tuple(passage.sha256 for passage in new) + known, new)


CORPUS = [
    document("cats", ("Pets", "the cat sat on the mat"), ("", "cats purr and sleep")),
    document("dogs", ("Pets", "the dog chased the cat"), ("", "dogs bark at night")),
    document("manual", ("", "a chapter about nothing much"), shared=("cats purr and sleep",)),
    document("night", ("Dog", "stars are seen after sunset")),
]


def build(path: Path, documents: list[CleanDocument], settings: Settings | None = None) -> Path:
    with Builder(path, settings or Settings()) as builder:
        for item in documents:
            builder.add(item)
        builder.finish()
    return path


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Index]:
    with Index(build(tmp_path_factory.mktemp("index") / "index.sqlite", CORPUS)) as opened:
        yield opened


def test_a_document_is_found_by_any_of_its_words(index: Index) -> None:
    assert index.search("purr") == ["cats", "manual"]
    assert sorted(index.search("bark stars")) == ["dogs", "night"]
    assert index.search("zebra") == []


def test_of_two_documents_with_the_same_passage_the_one_with_less_else_comes_first(tmp_path: Path) -> None:
    text = "an answer that two documents hold"
    long = document("a-long", ("", text), ("", "one more"), ("", "and another"))
    short = document("b-short", shared=(text,))
    with Index(build(tmp_path / "i", [long, short])) as opened:
        assert opened.search("answer") == ["b-short", "a-long"]


def test_the_weight_of_headings_decides_between_heading_and_text(index: Index) -> None:
    heavy = index.search("dog", settings=Settings(heading_weight=30))
    light = index.search("dog", settings=Settings(heading_weight=0.01))
    assert heavy == ["night", "dogs"]
    assert light == ["dogs", "night"]


def test_depth_adds_up_the_best_passages(tmp_path: Path) -> None:
    often = document("often", ("", "tide moon one two three four"), ("", "tide moon five six seven eight"))
    once = document("once", ("", "tide moon"), ("", "filler that is about something else entirely"))
    with Index(build(tmp_path / "i", [often, once])) as opened:
        assert opened.search("tide", settings=Settings(depth=1)) == ["once", "often"]
        assert opened.search("tide", settings=Settings(depth=2)) == ["often", "once"]


def test_the_porter_tokenizer_finds_other_forms_of_a_word(tmp_path: Path) -> None:
    documents = [document("a", ("", "assigning values"))]
    with Index(build(tmp_path / "plain", documents)) as plain:
        assert plain.search("assigned") == []
    with Index(build(tmp_path / "porter", documents, Settings("porter"))) as porter:
        assert porter.search("assigned") == ["a"]


def test_an_index_knows_its_settings_and_all_titles(tmp_path: Path) -> None:
    settings = Settings("porter", heading_weight=3.0, depth=2)
    with Index(build(tmp_path / "i", CORPUS, settings)) as opened:
        assert opened.settings == settings
        assert opened.titles() == [(name, name) for name in ("cats", "dogs", "manual", "night")]
        assert opened.search("the", limit=1) in (["cats"], ["dogs"])


@pytest.mark.parametrize(
    "text",
    [
        '"',
        "'",
        "cat NOT",
        "NEAR(cat",
        "heading:cat",
        "cat*",
        "-cat",
        "(cat OR",
        "cat^2",
        "{heading} : cat",
        "\x00cat",
    ],
)
def test_operators_of_the_query_language_are_words_like_all_others(index: Index, text: str) -> None:
    expected = ["cats", "dogs"] if "cat" in text else []
    assert sorted(index.search(text)) == expected


def test_the_expression_quotes_each_word_once() -> None:
    assert match_expression("if in if AND") == '"if" OR "in" OR "AND"'
    assert match_expression("base_events.py") == '"base" OR "events" OR "py"'
    assert match_expression("  *** ") == ""
    assert match_expression(" ".join(f"w{n}" for n in range(100))).count(" OR ") == 31


@given(st.text(max_size=80))
def test_any_text_can_be_asked_for(index: Index, text: str) -> None:
    assert set(index.search(text)) <= {"cats", "dogs", "manual", "night"}


def test_the_same_documents_and_settings_give_the_same_bytes(tmp_path: Path) -> None:
    first = build(tmp_path / "first", CORPUS).read_bytes()
    assert build(tmp_path / "second", CORPUS).read_bytes() == first
    assert build(tmp_path / "other", CORPUS, Settings("porter")).read_bytes() != first


def test_a_file_that_is_no_index_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no-index").write_bytes(b"not a database, whatever its name may say" * 40)
    with pytest.raises(sqlite3.DatabaseError):
        Index(tmp_path / "no-index")


def test_an_unknown_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="is none of unicode61, porter"):
        Settings("trigram'); drop table document; --")
    assert set(TOKENIZERS) == {"unicode61", "porter"}


def test_a_passage_that_was_never_given_is_an_error(tmp_path: Path) -> None:
    with Builder(tmp_path / "i", Settings()) as builder, pytest.raises(KeyError):
        builder.add(document("orphan", shared=("never given",)))
