"""JSON read without loss, written compactly, hashed in one canonical form.

A number keeps the spelling that it arrived with: 1.10 stays 1.10, 1e400 stays 1e400, and an integer of any length
keeps every digit, because no number goes through a float. Integers of up to 18 digits become `int`; every other
number becomes an `orjson.Fragment` of its own text, which is written back as it is.
"""

import hashlib
import json
from typing import TypeAlias

import orjson

Json: TypeAlias = "bool | int | float | str | orjson.Fragment | list[Json] | dict[str, Json] | None"

_SMALL_DIGITS = 18  # fits into 64 bits with any sign


def _integer(text: str) -> "int | orjson.Fragment":
    if len(text) <= _SMALL_DIGITS and text != "-0":
        return int(text)
    return orjson.Fragment(text)


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(
    parse_int=_integer, parse_float=orjson.Fragment, parse_constant=_refuse_constant, strict=True
)


def loads_exact(data: bytes) -> Json:
    """Parse JSON and keep each number's spelling.

    Of a key given twice the last one counts. Raises ValueError (json.JSONDecodeError, UnicodeDecodeError) for what
    is not JSON, RecursionError beyond about 900 levels.
    """
    value: Json = _decoder.decode(data.decode("utf-8"))
    return value


def dumps_exact(value: Json) -> bytes:
    """Write without white space. Raises TypeError for lone surrogates, and beyond 254 levels."""
    return orjson.dumps(value)


def canonical(data: bytes) -> bytes:
    """The same JSON with sorted keys and without white space; strings and numbers as parsed."""
    return orjson.dumps(loads_exact(data), option=orjson.OPT_SORT_KEYS)


def digest(value: Json) -> str:
    """SHA-256, in lower-case hex, of the canonical form of a value."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()
