"""A full-text index in one SQLite file: FTS5 over passages, ranked by BM25, documents as the answer."""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

MAX_QUERY_WORDS: Final = 32

_SCHEMA: Final = """
create table setting (name text primary key, value) without rowid;
create table document (document_id integer primary key, name text not null unique, title text not null,
                       passages integer not null);
create table passage (passage_id integer primary key, sha256 text not null unique, heading text not null,
                      body text not null);
create table document_passage (document_id integer not null references document,
                               passage_id integer not null references passage,
                               primary key (document_id, passage_id)) without rowid;
create index document_passage_by_passage on document_passage (passage_id);
create virtual table passage_text using fts5(heading, body, content='passage', content_rowid='passage_id',
                                             tokenize='{tokenizer}');
"""

# bm25() is smaller (more negative) for a better match, and may not stand in an aggregate: hence two parts.
# A document counts by its best passages; of two that share them, the one with less else in it comes first.
_SEARCH: Final = """
with hit as materialized (
    select rowid as passage_id, -bm25(passage_text, :heading_weight, 1.0) as score
      from passage_text
     where passage_text match :query
), placed as (
    select dp.document_id, hit.score,
           row_number() over (partition by dp.document_id order by hit.score desc, hit.passage_id) as place
      from hit join document_passage dp using (passage_id)
)
select d.name, sum(placed.score) as score
  from placed join document d using (document_id)
 where placed.place <= :depth
 group by d.document_id
 order by score desc, d.passages, d.name
 limit :limit
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an index is built and asked.

    tokenizer: a tokenizer of FTS5, `porter` for English word stems.
    heading_weight: what a word in a heading counts, next to 1 in the text.
    depth: how many of its best passages make a document's score.
    """

    tokenizer: str = "unicode61"
    heading_weight: float = 1.0
    depth: int = 1

    def __post_init__(self) -> None:
        if self.tokenizer not in TOKENIZERS:
            raise ValueError(f"tokenizer {self.tokenizer!r} is none of {', '.join(TOKENIZERS)}")

    @property
    def label(self) -> str:
        return f"{self.tokenizer}, heading x{self.heading_weight:g}, depth {self.depth}"


TOKENIZERS: Final = {
    "unicode61": "unicode61 remove_diacritics 2",
    "porter": "porter unicode61 remove_diacritics 2",
}


@dataclass(frozen=True, slots=True)
class CleanPassage:
    sha256: str
    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class CleanDocument:
    """passages: their hashes, in order; new_passages: those that no document before this one had."""

    name: str
    title: str
    passages: tuple[str, ...]
    new_passages: tuple[CleanPassage, ...]


class Builder:
    """Writes an index; it is whole after `finish`. The same documents and settings give the same bytes."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._database = sqlite3.connect(path, isolation_level=None)
        self._passage_ids: dict[str, int] = {}
        self._documents = 0
        # Nothing here needs to survive a crash: an unfinished index is thrown away with its attempt.
        self._database.executescript(
            "pragma page_size = 4096; pragma journal_mode = off; pragma synchronous = off;"
        )
        self._database.executescript(_SCHEMA.format(tokenizer=TOKENIZERS[settings.tokenizer]))
        self._database.execute("begin")
        self._database.executemany("insert into setting values (?, ?)", sorted(asdict(settings).items()))

    @property
    def passages(self) -> int:
        return len(self._passage_ids)

    def add(self, document: CleanDocument) -> None:
        """Raises KeyError for a passage that is named and was never given."""
        for passage in document.new_passages:
            passage_id = len(self._passage_ids) + 1
            self._passage_ids[passage.sha256] = passage_id
            row = (passage_id, passage.sha256, passage.heading, passage.text)
            self._database.execute("insert into passage values (?, ?, ?, ?)", row)
            self._database.execute(
                "insert into passage_text (rowid, heading, body) values (?, ?, ?)",
                (passage_id, passage.heading, passage.text),
            )
        own = sorted({self._passage_ids[sha256] for sha256 in document.passages})
        self._documents += 1
        self._database.execute(
            "insert into document values (?, ?, ?, ?)",
            (self._documents, document.name, document.title, len(own)),
        )
        self._database.executemany(
            "insert into document_passage values (?, ?)",
            [(self._documents, passage_id) for passage_id in own],
        )

    def finish(self) -> None:
        self._database.execute("insert into passage_text (passage_text) values ('optimize')")
        self._database.execute("commit")
        self._database.execute("vacuum")

    def __enter__(self) -> "Builder":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()


class Index:
    """A finished index, opened for reading."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.DatabaseError for a file that is no index."""
        self._database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            stored = dict(self._database.execute("select name, value from setting"))
        except sqlite3.DatabaseError:
            self._database.close()
            raise
        self.settings = Settings(**stored)

    def __enter__(self) -> "Index":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()

    def titles(self) -> list[tuple[str, str]]:
        """The name and title of every document, by name."""
        return list(self._database.execute("select name, title from document order by name"))

    def search(self, text: str, *, settings: Settings | None = None, limit: int = -1) -> list[str]:
        """The names of the documents that answer `text`, best first; none if nothing matches.

        settings: ask with another weight or depth than the index was built for. limit: -1 for all.
        """
        asked = settings or self.settings
        query = match_expression(text)
        if not query:
            return []
        parameters = {
            "query": query,
            "heading_weight": asked.heading_weight,
            "depth": asked.depth,
            "limit": limit,
        }
        with closing(self._database.execute(_SEARCH, parameters)) as rows:
            return [name for name, _ in rows]


def match_expression(text: str) -> str:
    """Any text as an FTS5 expression that asks for any of its words; empty if there is no word in it.

    Each word is a quoted string, so that `AND`, `NEAR(`, `"`, `*` and `title:` are words like all others.
    """
    words: Iterable[str] = re.findall(r"\w+", text.replace("_", " "))
    quoted = [f'"{word}"' for word in dict.fromkeys(words)]
    return " OR ".join(quoted[:MAX_QUERY_WORDS])
