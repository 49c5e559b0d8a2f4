"""What a document says that commands print, held to what they print: words as they stand, figures by their form.

In a document a block of the language `console` has commands after `$ `, each followed by what it prints. A line `...`
stands for any number of lines. Ids, digests, times, sizes and numbers of more than one digit may be others each time.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

ANY_LINES = "..."
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# In this order: a time holds numbers, an id holds digests.
_FORMS = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "<id>"),
        (r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z", "<time>"),
        (r"\b[0-9a-f]{12}\b", "<hex>"),
        (r"\b(?:\d+m ?)?\d+(?:\.\d+)? ?s\b", "<seconds>"),
        (r"\b\d+(?:\.\d+)? (?:B|KiB|MiB)(?!\w)", "<size>"),
        (r"\b\d+\.\d+\b|\b\d[\d,]*\d\b", "<n>"),
    )
)
_ONE_DIGIT = re.compile(r"\b\d\b")


@dataclass(frozen=True, slots=True)
class Typed:
    """A command of a document, and the lines below it."""

    command: str
    shown: tuple[str, ...]


def typed(document: str) -> Iterator[Typed]:
    """The commands of its `console` blocks, in their order. ValueError for a block that begins with output."""
    for block in _CONSOLE.findall(document):
        first, *parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
        if first:
            raise ValueError(f"output of no command: {first!r}")
        for part in parts:
            command, *shown = part.replace("\\\n", "").splitlines()
            yield Typed(command, tuple(shown))


def commands(document: str) -> list[str]:
    """Every line that it tells the reader to type, whatever the block's language."""
    found: list[str] = []
    for block in _SHELL.findall(document):
        lines = block.replace("\\\n", "").splitlines()
        is_console = any(line.startswith("$ ") for line in lines)
        found += [line.removeprefix("$ ") for line in lines if line.startswith("$ ") or not is_console]
    return [line for line in found if line.strip()]


def differences(shown: tuple[str, ...], printed: str, *, figures_vary: bool = False) -> str:
    """Why the output is not what is shown; empty where it is.

    figures_vary: numbers of one digit may be others, too, as where it counts what time allowed.
    """
    wanted = [_form(line, figures_vary) for line in shown]
    lines = [_form(line, figures_vary) for line in printed.splitlines()]
    missing = _missing(wanted, lines) if wanted else None
    if missing is None:
        return ""
    return "\n".join([f"not printed there: {missing}", "shown:", *wanted, "printed:", *lines])


def _form(line: str, figures_vary: bool) -> str:
    for pattern, name in _FORMS:
        line = pattern.sub(name, line)
    if figures_vary:
        line = _ONE_DIGIT.sub("<n>", line)
    return " ".join(line.split())  # columns are as wide as what stands in them


def _missing(wanted: list[str], lines: list[str]) -> str | None:
    """The first line of the pattern that does not fit; None where it takes all lines. `...` takes any."""
    reached = {0}  # how many lines may have been taken
    for want in wanted:
        if want == ANY_LINES:
            reached = set(range(min(reached), len(lines) + 1))
        else:
            reached = {at + 1 for at in reached if at < len(lines) and lines[at] == want}
        if not reached:
            return want
    return None if len(lines) in reached else "the end"
