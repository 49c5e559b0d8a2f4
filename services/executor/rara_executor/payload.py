"""JSON that every store and language keeps as it is: strict on the way out, exact on the way in."""

import hashlib
import json
import math
import re
from collections.abc import Mapping

import orjson

from rara_executor.errors import PayloadInvalid, PayloadTooLarge

MAX_PAYLOAD_BYTES = 1 << 20
MAX_EFFECT_BYTES = 16 << 10
MAX_EFFECTS = 64
MAX_DEPTH = 250  # orjson's own limit is 254

# orjson reads an integer beyond 64 bits as a float; only text with so many digits can hold one.
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_INT64 = range(-(1 << 63), 1 << 63)


def encode(value: object, *, what: str, limit_bytes: int = MAX_PAYLOAD_BYTES) -> bytes:
    """The value as JSON in UTF-8. Raises PayloadInvalid or PayloadTooLarge, naming `what`."""
    exact = _check(value, what, "", 0)
    data: bytes
    try:
        data = orjson.dumps(value) if exact else _dumps(value)
    except TypeError:  # subclasses that orjson does not know, like a named tuple
        data = _dumps(value)
    if len(data) > limit_bytes:
        raise PayloadTooLarge(what, len(data), limit_bytes)
    return data


def decode(data: bytes) -> object:
    """The value of JSON bytes, integers of any size exact; empty data is null. Raises ValueError."""
    if not data:
        return None
    value: object = json.loads(data) if _LONG_NUMBER.search(data) else orjson.loads(data)
    return value


def canonical(value: object) -> bytes:
    """One spelling for equal values: keys sorted, no white space, for hashing."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def canonical_sha256(value: object) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def pointer(path: str, key: object) -> str:
    """The JSON pointer of a member: RFC 6901."""
    return f"{path}/{str(key).replace('~', '~0').replace('/', '~1')}"


def _dumps(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _check(value: object, what: str, path: str, depth: int) -> bool:
    """Raise on what is not strict JSON; tell whether every integer fits into 64 bits."""
    match value:
        case None | bool():
            return True
        case str():
            _check_text(value, what, path)
            return True
        case int():
            return value in _INT64
        case float():
            if not math.isfinite(value):
                raise PayloadInvalid(what, path, f"{value} is not a JSON number")
            return True
        case list() | tuple():
            _check_depth(what, path, depth)
            exact = True
            for index, item in enumerate(value):
                exact &= _check(item, what, f"{path}/{index}", depth + 1)
            return exact
        case Mapping():
            _check_depth(what, path, depth)
            if not isinstance(value, dict):
                raise PayloadInvalid(what, path, f"{type(value).__name__} is not a JSON type; use dict()")
            exact = True
            for key, item in value.items():
                if not isinstance(key, str):
                    raise PayloadInvalid(what, path, f"a key is {type(key).__name__}, not a string")
                if not key.isascii() or "\0" in key:
                    _check_text(key, what, path)
                exact &= _check(item, what, pointer(path, key), depth + 1)
            return exact
        case _:
            raise PayloadInvalid(what, path, f"{type(value).__name__} is not a JSON type")


def _check_depth(what: str, path: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise PayloadInvalid(what, path[:200], f"nested deeper than {MAX_DEPTH}")


def _check_text(text: str, what: str, path: str) -> None:
    if "\0" in text:
        raise PayloadInvalid(what, path, "U+0000 cannot be stored")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise PayloadInvalid(what, path, "a lone surrogate cannot be stored") from None
