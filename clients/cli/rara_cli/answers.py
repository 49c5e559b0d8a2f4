"""Answers on stdout, in the format that was asked for."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from rara_cli.jsonview import Json, dumps, to_json
from rara_cli.session import Session
from rara_cli.tables import Column, render

T = TypeVar("T", bound=Message)


def show_list(
    session: Session,
    items: Sequence[T],
    columns: Sequence[Column[T]],
    *,
    name: Callable[[T], str],
    if_empty: str,
    view: Callable[[T], Json] = to_json,
) -> None:
    """A list: a table, one JSON array, a line of JSON for each, or only names.

    if_empty: what a person should do about an empty list; said on stderr.
    """
    match session.output:
        case "json":
            print_document([view(item) for item in items])
        case "jsonl":
            for item in items:
                print(dumps(view(item)))
        case "name":
            for item in items:
                print(name(item))
        case _:
            if not items:
                session.note(if_empty)
                return
            is_wide = session.output == "wide"
            chosen = [column for column in columns if is_wide or not column.wide_only]
            for line in render(items, chosen, width=width(session), in_color=session.in_color):
                print(line)


def show_one(
    session: Session, document: Mapping[str, object], *, name: str, lines: Callable[[], Sequence[str]]
) -> None:
    """One thing: its facts on lines, one JSON document, or its name."""
    match session.output:
        case "json":
            print_document(document)
        case "jsonl":
            print(dumps(document))
        case "name":
            print(name)
        case _:
            for line in lines():
                print(line)


def facts(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Names and values in two columns; those without a value are left out."""
    present = [(key, value) for key, value in pairs if value]
    indent = max((len(key) for key, _ in present), default=0)
    return [f"{key:<{indent}}  {value}" for key, value in present]


def print_document(document: object) -> None:
    """Exactly one JSON document."""
    print(json.dumps(document, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))


def width(session: Session) -> int | None:
    """Of the terminal; None where nobody looks at one, and nothing is to be cut."""
    return shutil.get_terminal_size().columns if session.on_terminal else None
