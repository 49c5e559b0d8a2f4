"""Rows in columns: as wide as the terminal and no wider, or as wide as they are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import click
from rich.cells import cell_len, set_cell_size

from rara_cli.words import clean, color_of

T = TypeVar("T")

_GAP = "  "
_NARROWEST = 8


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """One column.

    wide_only: shown with `-o wide`. is_whole: an id, never cut. is_state: coloured by its word.
    """

    title: str
    text: Callable[[T], str]
    wide_only: bool = False
    is_whole: bool = False
    is_state: bool = False
    is_number: bool = False


def render(
    items: Sequence[T], columns: Sequence[Column[T]], *, width: int | None, in_color: bool
) -> list[str]:
    """Lines, the titles first. width: of the terminal; None: nothing is cut."""
    rows = [[clean(column.text(item)) for column in columns] for item in items]
    widths = [
        max([cell_len(column.title), *(cell_len(row[index]) for row in rows)])
        for index, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    if width is not None:
        shown = _fit(columns, widths, width)
    lines = [_line([columns[index].title for index in shown], shown, columns, widths, None)]
    if in_color:
        lines[0] = click.style(lines[0], bold=True)
    for row in rows:
        paint = color_of if in_color else None
        lines.append(_line([row[index] for index in shown], shown, columns, widths, paint))
    return lines


def _fit(columns: Sequence[Column[T]], widths: list[int], width: int) -> list[int]:
    """Cut the widest columns that may be cut; when that is not enough leave out the last ones."""
    shown = list(range(len(columns)))
    while True:
        excess = sum(widths[index] for index in shown) + len(_GAP) * (len(shown) - 1) - width
        if excess <= 0:
            return shown
        flexible = [index for index in shown if not columns[index].is_whole and widths[index] > _NARROWEST]
        if flexible:
            widest = max(flexible, key=lambda index: widths[index])
            others = [widths[index] for index in flexible if index != widest]
            floor = max([_NARROWEST, *(size for size in others if size < widths[widest])])
            widths[widest] -= min(excess, max(widths[widest] - floor, 1))
        elif droppable := [index for index in shown[1:] if not columns[index].is_whole]:
            shown.remove(droppable[-1])
        else:
            return shown


def _line(
    cells: list[str],
    shown: list[int],
    columns: Sequence[Column[T]],
    widths: list[int],
    paint: Callable[[str], str | None] | None,
) -> str:
    parts = []
    for cell, index in zip(cells, shown, strict=True):
        text = cell
        if cell_len(text) > widths[index]:
            text = set_cell_size(text, widths[index] - 1) + "…"
        padding = " " * (widths[index] - cell_len(text))
        if paint is not None and columns[index].is_state and (color := paint(cell)):
            text = click.style(text, fg=color)
        parts.append(padding + text if columns[index].is_number else text + padding)
    return _GAP.join(parts).rstrip()
