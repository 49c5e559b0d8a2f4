"""What a payload must be before it is stored: strict JSON, of bounded size and depth, that any reader can take."""

import json
import re
from collections.abc import Iterator
from typing import Final

import orjson

from rara_scheduler.domain.canonical import Json, loads_exact
from rara_scheduler.domain.errors import Code, Fault, FieldViolation

MAX_DEPTH: Final = 128  # levels of arrays and objects; writers of JSON commonly stop at about 250
_PATH_KEY_CHARS: Final = 64
_PATH_CHARS: Final = 400

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def pointer(path: str, parts: tuple[str | int, ...]) -> str:
    """`path` of a field followed by a JSON pointer into its value: `input#/users/3/name`."""
    if not parts:
        return path
    steps = (
        str(part)
        if isinstance(part, int)
        else _cut(_UNSTORABLE.sub("\ufffd", part).replace("~", "~0").replace("/", "~1"), _PATH_KEY_CHARS)
        for part in parts
    )
    return _cut(f"{path}#/{'/'.join(steps)}", _PATH_CHARS)


def walk_texts(value: Json) -> Iterator[tuple[tuple[str | int, ...], str, bool]]:
    """Every string in a value, in order: where it stands, the string, and whether it is a key."""
    stack: list[tuple[tuple[str | int, ...], Json]] = [((), value)]
    while stack:
        parts, here = stack.pop()
        if isinstance(here, str):
            yield parts, here, False
        elif isinstance(here, dict):
            for key in here:
                yield (*parts, key), key, True
            stack.extend(((*parts, key), inner) for key, inner in reversed(here.items()))
        elif isinstance(here, list):
            stack.extend(((*parts, index), here[index]) for index in range(len(here) - 1, -1, -1))


class _RepeatedKey(Exception):
    pass


def _pairs(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _RepeatedKey
    return made


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


# Numbers need no value here: what they are is not looked at.
_strict = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_no_constant, parse_int=lambda _: 0, parse_float=lambda _: 0
)


def _repeated_key_path(data: bytes) -> tuple[str | int, ...]:
    class Pairs(list[tuple[str, Json]]):
        pass

    stack: list[tuple[tuple[str | int, ...], object]] = [
        ((), json.JSONDecoder(object_pairs_hook=Pairs).decode(data.decode("utf-8")))
    ]
    while stack:
        parts, here = stack.pop()
        if isinstance(here, Pairs):
            seen: set[str] = set()
            for key, inner in here:
                if key in seen:
                    return (*parts, key)
                seen.add(key)
                stack.append(((*parts, key), inner))
        elif isinstance(here, list):
            stack.extend(((*parts, index), inner) for index, inner in enumerate(here))
    return ()


def _is_too_deep(value: Json) -> bool:
    level: list[Json] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for here in level
            if isinstance(here, (dict, list))
            for inner in (here.values() if isinstance(here, dict) else here)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _invalid(path: str, description: str) -> Fault:
    return Fault(
        Code.PAYLOAD_INVALID,
        f"{path}: {description}",
        fields=(FieldViolation(path, description),),
        metadata={"path": path},
    )


def _check_texts(value: Json, path: str) -> None:
    for parts, text, is_key in walk_texts(value):
        found = _UNSTORABLE.search(text)
        if found is not None:
            what = "U+0000" if found.group() == "\x00" else "a lone surrogate"
            raise _invalid(pointer(path, parts), f"holds {what}{' in a key' if is_key else ''}")


def _look_closer(data: bytes, path: str) -> None:
    """Decide what the fast parser would not: raise with the cause, or return since the data is fine."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(path, f"is not valid UTF-8 at byte {error.start}") from None
    try:
        value: Json = _strict.decode(text)
    except _RepeatedKey:
        place = _repeated_key_path(data)
        raise _invalid(pointer(path, place), "is a key given twice in one object") from None
    except RecursionError:
        raise _invalid(path, f"is nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise _invalid(path, f"is not JSON, from character {error.pos} on") from None
    except ValueError as error:  # NaN, Infinity
        raise _invalid(path, str(error)) from None
    if _is_too_deep(value):
        raise _invalid(path, f"is nested deeper than {MAX_DEPTH} levels")
    if b"\\u" in data:
        _check_texts(value, path)


def check_payload(data: bytes, media_type: str, path: str, max_bytes: int) -> None:
    """Refuse what is not strict JSON that every reader can take.

    path: of the field, as the caller spells it; faults name it and the JSON pointer inside (`input#/a/0`).
    Raises Fault PAYLOAD_TOO_LARGE above `max_bytes` (exactly the limit passes), else PAYLOAD_INVALID: not JSON, not
    UTF-8, NaN or Infinity, U+0000 or a lone surrogate in a string or key (escaped ones too), a key given twice, or
    nested deeper than MAX_DEPTH. No message holds a part of a value.
    """
    if media_type and media_type.lower() != "application/json":
        raise _invalid(f"{path}.media_type", "must be empty or application/json")
    if len(data) > max_bytes:
        description = f"has {len(data)} bytes, over the limit of {max_bytes}; use an artifact"
        raise Fault(
            Code.PAYLOAD_TOO_LARGE,
            f"{path}: {description}",
            fields=(FieldViolation(path, description),),
            metadata={"path": path, "size_bytes": str(len(data)), "limit_bytes": str(max_bytes)},
        )
    if not data:
        raise _invalid(path, "is empty, which is not JSON; leave it out for no value")
    try:
        value = orjson.loads(data)
        # Written back byte for byte the same: no key was given twice, nothing is escaped that need not be.
        # The writer stops at 254 levels, which ends this path too.
        same = orjson.dumps(value) == data
    except (orjson.JSONDecodeError, TypeError):
        _look_closer(data, path)
        return
    if not same:
        _look_closer(data, path)
        return
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _is_too_deep(value):
        raise _invalid(path, f"is nested deeper than {MAX_DEPTH} levels")
    if b"\\u0000" in data:
        _check_texts(value, path)


def parse_payload(data: bytes) -> Json:
    """A payload that `check_payload` passed, its numbers as they were spelled."""
    return loads_exact(data)


def clean_text(text: str, max_bytes: int) -> str:
    """Text for people that can always be stored: U+0000 and surrogates become U+FFFD, what is too long is cut.

    The result has at most `max_bytes` bytes of UTF-8 (64 or more), its mark "… [cut, N bytes]" included, where N is
    the full length.
    """
    if not text.isascii() or "\x00" in text:
        text = _UNSTORABLE.sub("\ufffd", text)
    data = text.encode("utf-8")
    if len(data) <= max_bytes:
        return text
    mark = f"… [cut, {len(data)} bytes]"
    kept = data[: max(0, max_bytes - len(mark.encode("utf-8")))]
    return kept.decode("utf-8", errors="ignore") + mark
