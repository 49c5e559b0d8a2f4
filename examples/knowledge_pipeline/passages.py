"""Clean text in passages: what is indexed, and what duplicates are found by."""

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

PASSAGE_CHARS: Final = 1_000

# A line of one punctuation mark under a line of text, as reStructuredText and pydoc write headings.
_UNDERLINE: Final = re.compile(r"([=\-~^*#\"'`+.])\1{2,}")
_ATX_HEADING: Final = re.compile(r"#{1,6}[ \t]+(?P<text>.*?)[ \t]*#*")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\ufeff]")
_MARKDOWN_LINK: Final = re.compile(r"!?\[(?P<text>[^\[\]\n]{0,400})\]\([^()\s]{0,2000}\)")
# Underscores are left alone: `__init__` is a name far more often than it is emphasis.
_EMPHASIS: Final = re.compile(
    r"(?<![\w*`_])(?P<mark>\*\*|\*|``|`)(?=\S)(?P<text>[^*`\n]{1,400}?)(?<=\S)(?P=mark)(?![\w*`_])"
)
_BLANKS: Final = re.compile(r"[^\S\n]+")
_SENTENCE_END: Final = re.compile(r"[.!?:;]\s+")


@dataclass(frozen=True, slots=True)
class Passage:
    """Up to PASSAGE_CHARS or so of consecutive text below one heading ('' before the first)."""

    heading: str
    text: str

    @property
    def sha256(self) -> str:
        """What makes two passages the same: the clean text. The heading is where it stands."""
        return hashlib.sha256(self.text.encode()).hexdigest()


def normalise(text: str) -> str:
    """NFC, `\\n` for every line end, no control characters, single blanks, no blanks at the ends of lines."""
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _CONTROL.sub("", text)
    return "\n".join(_BLANKS.sub(" ", line).strip() for line in text.split("\n"))


def split(text: str, *, is_markdown: bool, limit: int = PASSAGE_CHARS) -> Iterator[Passage]:
    """Cut a text at headings and empty lines into passages of at most `limit` characters.

    Short neighbours under the same heading share a passage; a longer paragraph is cut at the end of a
    sentence or word. Headings are no part of the text.
    """
    heading = ""
    gathered = ""
    for block in _blocks(normalise(text), is_markdown):
        if block.is_heading:
            if gathered:
                yield Passage(heading, gathered)
            heading, gathered = block.text, ""
            continue
        for piece in _pieces(block.text, limit):
            if gathered and len(gathered) + 1 + len(piece) > limit:
                yield Passage(heading, gathered)
                gathered = piece
            else:
                gathered = f"{gathered} {piece}" if gathered else piece
    if gathered:
        yield Passage(heading, gathered)


@dataclass(frozen=True, slots=True)
class _Block:
    text: str
    is_heading: bool


def _blocks(text: str, is_markdown: bool) -> Iterator[_Block]:
    """Headings and paragraphs in their order, without markup, each on one line."""
    paragraph: list[str] = []

    def take() -> Iterator[_Block]:
        if body := _plain(" ".join(paragraph), is_markdown):
            yield _Block(body, is_heading=False)
        paragraph.clear()

    for line in text.split("\n"):
        atx = _ATX_HEADING.fullmatch(line) if is_markdown else None
        if atx and atx["text"]:
            yield from take()
            yield _Block(_plain(atx["text"], is_markdown), is_heading=True)
        elif _UNDERLINE.fullmatch(line):
            above = paragraph[-1] if len(paragraph) == 1 else ""
            if 0 < len(above) <= len(line) + 3:
                paragraph.clear()
                yield _Block(_plain(above, is_markdown), is_heading=True)
            else:
                yield from take()  # a rule across the page
        elif line:
            paragraph.append(line)
        else:
            yield from take()
    yield from take()


def _plain(text: str, is_markdown: bool) -> str:
    if is_markdown:
        text = _MARKDOWN_LINK.sub(lambda link: link["text"], text)
    return _EMPHASIS.sub(lambda marked: marked["text"], text).strip()


def _pieces(text: str, limit: int) -> Iterator[str]:
    while len(text) > limit:
        ends = [match.end() for match in _SENTENCE_END.finditer(text, limit // 2, limit)]
        cut = ends[-1] if ends else text.rfind(" ", 1, limit) + 1
        cut = cut or limit  # one word longer than a passage
        yield text[:cut].strip()
        text = text[cut:].strip()
    if text:
        yield text
