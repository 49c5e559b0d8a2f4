"""Reading a corpus: whatever a folder holds ends in a document or in a count."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from knowledge_pipeline import corpus
from knowledge_pipeline.corpus import CorpusNotFound, Document, Tally


def read(root: Path, *, max_file_bytes: int = corpus.MAX_FILE_BYTES) -> tuple[list[Document], Tally]:
    tally = Tally()
    files = corpus.find_files(root, corpus.SUFFIXES, tally)
    return list(corpus.read_files(root, files, max_file_bytes, tally)), tally


def write(root: Path, name: str, data: bytes = b"some text") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_the_language_reference_is_read_in_order_with_its_topics_as_titles() -> None:
    tally = Tally()
    documents = list(corpus.read_language_reference(tally))
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert tally.documents == len(documents) > 50
    assert tally.size_bytes == sum(document.size_bytes for document in documents) > 300_000
    by_name = {document.name: document for document in documents}
    assert by_name["attribute-access"].title == "attribute access"
    assert "__getattr__" in by_name["attribute-access"].text


def test_documents_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", "C.markdown", "a/b/c.rst"):
        write(tmp_path, name)
    documents, _ = read(tmp_path)
    assert [document.name for document in documents] == [
        "C.markdown",
        "a.txt",
        "a/b/c.rst",
        "a/z.md",
        "b.txt",
    ]
    assert [document.is_markdown for document in documents] == [True, False, False, True, False]


def test_what_is_no_document_is_counted_by_its_reason(tmp_path: Path) -> None:
    write(tmp_path, "kept.txt")
    write(tmp_path, "empty.txt", b"")
    write(tmp_path, "blank.txt", b" \n\t\n")
    write(tmp_path, "huge.txt", b"x" * 101)
    write(tmp_path, "limit.txt", b"y" * 100)
    write(tmp_path, "picture.png")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "again.txt").symlink_to(tmp_path / "kept.txt")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    documents, tally = read(tmp_path, max_file_bytes=100)
    assert [document.name for document in documents] == ["kept.txt", "limit.txt"]
    assert tally.documents == 2
    assert tally.size_bytes == 109
    assert tally.skipped == {
        "empty": 2,
        "too_large": 1,
        "other_suffix": 1,
        "not_a_file": 1,
        "symbolic_link": 3,
    }


def test_a_file_that_goes_away_between_listing_and_reading_is_counted(tmp_path: Path) -> None:
    gone = write(tmp_path, "gone.txt")
    write(tmp_path, "kept.txt")
    tally = Tally()
    files = corpus.find_files(tmp_path, corpus.SUFFIXES, tally)
    gone.unlink()
    documents = list(corpus.read_files(tmp_path, files, 100, tally))
    assert [document.name for document in documents] == ["kept.txt"]
    assert tally.skipped == {"unreadable": 1}


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path: Path) -> None:
    write(tmp_path, "latin.txt", b"caf\xe9 au lait")
    write(tmp_path, "plain.txt", "café".encode())
    write(tmp_path, "marked.txt", b"\xef\xbb\xbfcaf\xc3\xa9")
    write(tmp_path, "wide.txt", "café".encode("utf-16"))
    documents, tally = read(tmp_path)
    texts = {document.name: document.text for document in documents}
    assert texts == {
        "latin.txt": "caf\ufffd au lait",
        "plain.txt": "café",
        "marked.txt": "café",
        "wide.txt": "café",
    }
    assert tally.decoded_with_replacement == 1


def test_names_that_are_not_utf8_stay_apart_and_can_be_written(tmp_path: Path) -> None:
    for raw in (b"n\xe9.txt", b"n\xe8.txt"):
        (tmp_path / os.fsdecode(raw)).write_text("text")
    documents, _ = read(tmp_path)
    assert [document.name for document in documents] == ["n\ufffd.txt", "n\ufffd.txt'"]
    assert [document.title for document in documents] == ["n\ufffd", "n\ufffd 2"]


def test_documents_of_the_same_name_get_titles_that_tell_them_apart(tmp_path: Path) -> None:
    for name in ("json/readme.md", "xml/readme.md", "readme.md", "xml/tree_walk.txt", "a-b.txt", "a_b.txt"):
        write(tmp_path, name)
    documents, _ = read(tmp_path)
    assert {document.name: document.title for document in documents} == {
        "a-b.txt": "a b",
        "a_b.txt": "a b 2",
        "json/readme.md": "json readme",
        "readme.md": "readme",
        "xml/readme.md": "xml readme",
        "xml/tree_walk.txt": "tree walk",
    }


@given(st.lists(st.text("abA_-/.", min_size=1, max_size=8), max_size=12))
def test_titles_are_distinct_whatever_the_paths(stems: list[str]) -> None:
    titles = corpus.distinct_titles(stems)
    assert len(titles) == len(stems)
    assert len({title.casefold() for title in titles}) == len(stems)


@pytest.mark.parametrize("name", ["missing", "file.txt"])
def test_a_path_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, "file.txt")
    with pytest.raises(CorpusNotFound, match="is not a folder"):
        corpus.find_files(tmp_path / name, corpus.SUFFIXES, Tally())


def test_a_folder_of_more_documents_than_allowed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MAX_DOCUMENTS", 3)
    for number in range(3):
        write(tmp_path, f"{number}.txt")
    assert len(read(tmp_path)[0]) == 3
    write(tmp_path, "4.txt")
    with pytest.raises(corpus.CorpusTooLarge, match="more than 3 documents"):
        read(tmp_path)
