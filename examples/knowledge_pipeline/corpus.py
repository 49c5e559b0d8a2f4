"""Where documents come from: a folder of text files, or the reference that ships with Python.

Whatever a folder holds, reading it ends in documents or in a count: nothing is followed in circles, read
without bound, or dropped without being counted. The order is that of the relative paths, on any machine.
"""

import codecs
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SUFFIXES: Final = (".md", ".markdown", ".rst", ".txt")
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
MAX_DOCUMENTS: Final = 200_000
LANGUAGE_REFERENCE: Final = "pydoc_data.topics"

_MARKDOWN: Final = frozenset({".md", ".markdown"})
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class CorpusNotFound(Exception):
    """The path is not a folder that can be listed."""


class CorpusTooLarge(Exception):
    """The folder holds more documents than one run takes."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text as it was found.

    name: its path below the corpus folder, with slashes; unique in a corpus.
    title: the name that people would ask for; unique in a corpus, and no part of the text.
    """

    name: str
    title: str
    text: str
    is_markdown: bool
    size_bytes: int


@dataclass(slots=True)
class Tally:
    """What became of everything that was met on the way."""

    documents: int = 0
    size_bytes: int = 0
    decoded_with_replacement: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, why: str) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + 1


def read_language_reference(tally: Tally) -> Iterator[Document]:
    """The topics of Python's language reference, as every CPython carries them for `help()`."""
    from pydoc_data import topics  # half a megabyte that only this source needs

    for name, text in sorted(topics.topics.items()):
        size_bytes = len(text.encode())
        tally.documents += 1
        tally.size_bytes += size_bytes
        yield Document(name=name, title=words(name), text=text, is_markdown=False, size_bytes=size_bytes)


def find_files(root: Path, suffixes: tuple[str, ...], tally: Tally) -> list[Path]:
    """The regular files below `root` with one of the suffixes, by relative path.

    Symbolic links below the root are counted and not followed: they lead in circles, or out of the folder
    that the caller named.

    Raises CorpusNotFound, and CorpusTooLarge above MAX_DOCUMENTS.
    """
    if not root.is_dir():
        raise CorpusNotFound(f"{root} is not a folder")
    found: list[Path] = []
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            if folder == root:
                raise CorpusNotFound(f"{root} cannot be listed: {error.strerror}") from error
            tally.skip("unreadable")
            continue
        for entry in entries:
            if entry.is_symlink():
                tally.skip("symbolic_link")
            elif entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
            elif Path(entry.name).suffix.lower() not in suffixes:
                tally.skip("other_suffix")
            elif not entry.is_file(follow_symlinks=False):
                tally.skip("not_a_file")  # opening a FIFO would wait for a writer, for ever
            elif len(found) == MAX_DOCUMENTS:
                raise CorpusTooLarge(f"{root} holds more than {MAX_DOCUMENTS:,} documents")
            else:
                found.append(Path(entry.path))
    return sorted(found, key=lambda path: os.fsencode(path.relative_to(root).as_posix()))


def read_files(root: Path, files: list[Path], max_file_bytes: int, tally: Tally) -> Iterator[Document]:
    """Read the files of `find_files`, in their order; what cannot be used is counted in `tally`."""
    titles = distinct_titles([_valid(path.relative_to(root).with_suffix("").as_posix()) for path in files])
    names: set[str] = set()
    for path, title in zip(files, titles, strict=True):
        try:
            with path.open("rb") as file:
                data = file.read(max_file_bytes + 1)  # a file may have grown since it was listed
        except OSError:
            tally.skip("unreadable")
            continue
        if len(data) > max_file_bytes:
            tally.skip("too_large")
            continue
        text, is_exact = decode(data)
        if not text.strip():
            tally.skip("empty")
            continue
        name = _valid(path.relative_to(root).as_posix())
        while name in names:  # two names that differ only in bytes that are not UTF-8
            name += "'"
        names.add(name)
        tally.documents += 1
        tally.size_bytes += len(data)
        tally.decoded_with_replacement += not is_exact
        yield Document(name, title, text, path.suffix.lower() in _MARKDOWN, len(data))


def decode(data: bytes) -> tuple[str, bool]:
    """The text, and whether every byte of it could be read. UTF-8 unless a byte order mark says UTF-16."""
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    try:
        return data.decode(encoding), True
    except UnicodeDecodeError:
        return data.decode(encoding, errors="replace"), False


def distinct_titles(stems: list[str]) -> list[str]:
    """A title for each path without its suffix: the last part, or as many parts as make it the only one."""
    depth = [1] * len(stems)
    while True:
        titles = [words("/".join(stem.split("/")[-n:])) for stem, n in zip(stems, depth, strict=True)]
        seen: dict[str, int] = {}
        for title in titles:
            seen[title.casefold()] = seen.get(title.casefold(), 0) + 1
        longer = [
            n + 1 if seen[title.casefold()] > 1 and n <= stem.count("/") else n
            for title, stem, n in zip(titles, stems, depth, strict=True)
        ]
        if longer == depth:
            return _numbered(titles)
        depth = longer


def words(name: str) -> str:
    """A file's or topic's name as words: `base_events` is asked for as `base events`."""
    return " ".join(name.translate(_AS_SPACE).split()) or name


_AS_SPACE: Final = str.maketrans(dict.fromkeys("_-./\\", " "))


def _numbered(titles: list[str]) -> list[str]:
    """Whole paths can still agree in their words, as `a-b.txt` and `a_b.txt` do."""
    taken: set[str] = set()
    numbered = []
    for title in titles:
        number = 1
        candidate = title
        while candidate.casefold() in taken:
            number += 1
            candidate = f"{title} {number}"
        taken.add(candidate.casefold())
        numbered.append(candidate)
    return numbered


def _valid(name: str) -> str:
    """File names are bytes: what is not UTF-8 in them becomes U+FFFD, as JSON holds no lone surrogates."""
    return os.fsencode(name).decode("utf-8", errors="replace")
