"""Where two JSON values differ."""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Final, Literal

from rara_cli.words import clean

_TEXT_CHARS: Final = 40
_NUMBER_CHARS: Final = 9
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class Absent(Enum):
    """There is no value."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


@dataclass(frozen=True, slots=True)
class Unread:
    """A value that is not at hand: too large for a list, or no JSON; of that its bytes are known by their digest."""

    size_bytes: int
    why: Literal["large", "no JSON"] = "large"
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """path: a JSON pointer, empty for the whole. a, b: JSON values, ABSENT or Unread."""

    path: str
    a: object
    b: object


def parse(data: bytes) -> object:
    """A JSON value; fractions as they are written, so that their difference is exact."""
    try:
        return json.loads(data, parse_float=Decimal, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return Unread(len(data), "no JSON", hashlib.sha256(data).hexdigest())


def _no_json(text: str) -> object:
    raise ValueError(text)


def differences(a: object, b: object) -> Iterator[Difference]:
    """The innermost places that differ, in a's order. Lists of different lengths differ as a whole."""
    todo = [("", a, b)]
    while todo:
        path, left, right = todo.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            names = [*left, *(name for name in right if name not in left)]
            todo.extend(
                (f"{path}/{_escaped(name)}", left.get(name, ABSENT), right.get(name, ABSENT))
                for name in reversed(names)
            )
        elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            todo.extend((f"{path}/{n}", left[n], right[n]) for n in reversed(range(len(left))))
        elif not _is_same(left, right):
            yield Difference(path, left, right)


def is_equal(a: object, b: object) -> bool:
    return next(differences(a, b), None) is None


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, bool) or isinstance(b, bool):  # which Python takes for numbers
        return a is b
    return a == b


def delta(a: object, b: object) -> Decimal | None:
    """How much more b is; None where one of them is no number."""
    if isinstance(a, bool) or isinstance(b, bool):
        return None
    if isinstance(a, int | Decimal) and isinstance(b, int | Decimal):
        return Decimal(b) - Decimal(a)
    return None


def at(value: object, parts: list[str]) -> object:
    """What stands there; ABSENT: nothing. Of what was not read nothing more is known."""
    for part in parts:
        match value:
            case dict():
                value = value.get(part, ABSENT)
            case list() if part.isascii() and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            case Unread():
                return value
            case _:
                return ABSENT
    return value


def split(pointer: str) -> list[str]:
    """The parts of a JSON pointer."""
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def short(value: object) -> str:
    """A value in a few words: text is cut, and of what has parts only their number is told."""
    match value:
        case Absent():
            return "none"
        case Unread():
            what = "left out" if value.why == "large" else "that are no JSON"
            return f"{value.size_bytes:,} bytes {what}"
        case dict():
            return f"{{{len(value):,} keys}}"
        case list():
            return f"[{len(value):,} items]"
        case str() if _DIGEST.fullmatch(value):
            return value[:12]
        case str():
            text = clean(value)
            return f'"{text}"' if len(text) <= _TEXT_CHARS else f'"{text[:_TEXT_CHARS]}…"'
        case Decimal() | int() if not isinstance(value, bool):
            return _number_text(value)
        case _:
            return json.dumps(value)


def _number_text(value: Decimal | int) -> str:
    text = str(value)
    return text if len(text) <= _NUMBER_CHARS else f"{Decimal(value):.6g}"


def short_pair(a: object, b: object) -> tuple[str, str]:
    """Two values that differ, in a few words that differ, too."""
    left, right = short(a), short(b)
    if left != right:
        return left, right
    if isinstance(a, str) and isinstance(b, str):
        pairs = enumerate(zip(a, b, strict=False))
        same = next((n for n, (one, other) in pairs if one != other), min(len(a), len(b)))
        start = max(same - 8, 0)
        return f"…{short(a[start:])}", f"…{short(b[start:])}"
    return str(a)[:_TEXT_CHARS], str(b)[:_TEXT_CHARS]


def delta_text(value: Decimal) -> str:
    """`+0.02`, `-3`."""
    return f"{value:+}" if len(str(value)) <= _NUMBER_CHARS else f"{value:+.3g}"


def plain(value: object) -> object:
    """A value for JSON, as short: scalars as they are."""
    match value:
        case Decimal():
            number = float(value)
            return number if abs(number) != float("inf") else str(value)
        case bool() | int() | None:
            return value
        case str() if len(value) <= _TEXT_CHARS * 4:
            return value
        case _:
            return short(value)
