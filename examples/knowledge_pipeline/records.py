"""The data sets between the steps, as JSON lines: one document a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knowledge_pipeline.corpus import Document
from knowledge_pipeline.fulltext import CleanDocument, CleanPassage

MEDIA_TYPE = "application/jsonl"


def document_line(document: Document) -> bytes:
    return _line(
        {
            "name": document.name,
            "title": document.title,
            "is_markdown": document.is_markdown,
            "size_bytes": document.size_bytes,
            "text": document.text,
        }
    )


def read_corpus(path: Path) -> Iterator[Document]:
    for record in _records(path):
        yield Document(
            name=record["name"],
            title=record["title"],
            text=record["text"],
            is_markdown=record["is_markdown"],
            size_bytes=record["size_bytes"],
        )


def clean_line(document: CleanDocument) -> bytes:
    """A passage's text stands with the first document that has it; the others name its hash."""
    return _line(
        {
            "name": document.name,
            "title": document.title,
            "passages": list(document.passages),
            "new_passages": [
                {"sha256": passage.sha256, "heading": passage.heading, "text": passage.text}
                for passage in document.new_passages
            ],
        }
    )


def read_clean(path: Path) -> Iterator[CleanDocument]:
    for record in _records(path):
        yield CleanDocument(
            name=record["name"],
            title=record["title"],
            passages=tuple(record["passages"]),
            new_passages=tuple(
                CleanPassage(passage["sha256"], passage["heading"], passage["text"])
                for passage in record["new_passages"]
            ),
        )


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _records(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:  # bytes: a text file would also end lines at U+2028
        for line in file:
            yield json.loads(line)
