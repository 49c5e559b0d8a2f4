"""JSON as payload, texts that can be sent, and secrets that cannot."""

import base64
import json
import math
from collections import OrderedDict, namedtuple
from enum import StrEnum
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_executor import payload, text
from rara_executor.codes import is_handler_code
from rara_executor.errors import PayloadInvalid, PayloadTooLarge
from rara_executor.redaction import Redactor

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT.filter(lambda text: "\0" not in text),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT.filter(lambda text: "\0" not in text), inner),
    max_leaves=20,
)


@given(JSON)
def test_what_is_json_comes_back_as_it_was(value: Any) -> None:
    encoded = payload.encode(value, what="v")
    assert payload.decode(encoded) == value
    assert json.loads(encoded) == value


class Colour(StrEnum):
    RED = "red"


Pair = namedtuple("Pair", "a b")


def test_close_relatives_of_json_types_are_taken_for_them() -> None:
    assert payload.encode({"c": Colour.RED, "p": Pair(1, 2.5), "o": OrderedDict(a=1)}, what="v") == (
        b'{"c":"red","p":[1,2.5],"o":{"a":1}}'
    )


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [0, math.nan]}, "/a/1"),
        (-math.inf, "/"),
        ({"a/b": {"c~d": "\0"}}, "/a~1b/c~0d"),
        (["ok", "\udc80"], "/1"),
        ({"\ud800": 1}, "/"),
        ({"k": {1: 2}}, "/k"),
        ({"k": {2, 3}}, "/k"),
        (object(), "/"),
        ({"d": b""}, "/d"),
    ],
)
def test_what_is_not_strict_json_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(PayloadInvalid) as caught:
        payload.encode(value, what="output")
    assert caught.value.message.startswith(f"output at {path}: ")
    assert caught.value.code == "PAYLOAD_INVALID"


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(PayloadInvalid, match="nested deeper"):
        payload.encode(value, what="output")


def test_the_limit_passes_and_one_byte_more_does_not() -> None:
    assert len(payload.encode("x" * 8, what="v", limit_bytes=10)) == 10
    with pytest.raises(PayloadTooLarge, match="v has 11 bytes, the limit is 10"):
        payload.encode("x" * 9, what="v", limit_bytes=10)


def test_equal_values_have_one_canonical_hash() -> None:
    assert payload.canonical({"b": [1, 2.50], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()
    assert payload.canonical_sha256({"a": 1, "b": 2}) == payload.canonical_sha256({"b": 2, "a": 1})
    assert payload.canonical_sha256({"a": 2**53}) != payload.canonical_sha256({"a": 2**53 + 1})


@given(st.text())
def test_any_text_can_be_made_valid(anything: str) -> None:
    made = text.valid(anything)
    assert "\0" not in made
    assert made.encode().decode() == made
    assert len(made) <= len(anything) * 2 + 1


def test_bytes_that_were_no_text_become_replacement_characters() -> None:
    assert text.valid(b"\xff\xfeok".decode("utf-8", "surrogateescape")) == "\ufffd\ufffdok"
    assert text.valid("plain") == "plain"
    assert text.valid("\N{GRINNING FACE}") == "\N{GRINNING FACE}"


@given(TEXT, st.integers(40, 200))
def test_a_cut_text_fits_and_says_so(whole: str, limit: int) -> None:
    for cut in (text.cut(whole, limit), text.cut_middle(whole, limit)):
        assert len(cut.encode()) <= limit
        assert (cut == whole) == (len(whole.encode()) <= limit)
        assert (cut == whole) or f"[cut: {len(whole.encode())} bytes]" in cut


def test_a_cut_stack_trace_keeps_its_end() -> None:
    cut = text.cut_middle("Traceback\n" + "x" * 1000 + "\nValueError: boom", 200)
    assert cut.startswith("Traceback")
    assert cut.endswith("ValueError: boom")


@pytest.mark.parametrize(
    ("code", "is_one"),
    [
        ("TOOL_FAILED", True), ("A_1", True), ("INPUT_INVALID", True), ("RATE_LIMITED", True),
        ("A" * 31 + "_" + "B" * 31, True), ("A" * 31 + "_" + "B" * 32, False), ("FAILED", False),
        ("_A", False), ("A__B", False), ("a_b", False), ("LEASE_LOST", False), ("CANCELLED", False), (7, False),
    ],
)  # fmt: skip
def test_a_handlers_code_is_two_words_in_upper_case_that_are_not_ours(code: object, is_one: bool) -> None:
    assert is_handler_code(code) is is_one


SECRET = "s3cr3t-7f/ä b"


def redactor(*secrets: str) -> Redactor:
    made = Redactor()
    for secret in secrets:
        made.add(secret)
    return made


def test_a_secret_is_replaced_in_the_forms_it_takes() -> None:
    redact = redactor(SECRET)
    data = SECRET.encode()
    for form in (
        SECRET,
        quote(SECRET),
        quote(SECRET, safe=""),
        quote_plus(SECRET),
        quote(SECRET, safe="").lower(),
        base64.b64encode(data).decode(),
        base64.urlsafe_b64encode(data).decode(),
        repr(SECRET)[1:-1],
    ):
        assert redact.text(f"before {form} after") == "before *** after"


@given(st.binary(max_size=5), st.binary(max_size=5))
def test_a_secret_inside_of_longer_base64_does_not_show(before: bytes, after: bytes) -> None:
    encoded = base64.b64encode(before + b"correct-horse-battery" + after).decode()
    assert "***" in redactor("correct-horse-battery").text(encoded)


def test_the_longest_secret_wins_and_short_ones_are_left() -> None:
    redact = redactor("12345678", "12345678-and-more", "short")
    assert redact.text("12345678-and-more, 12345678, short") == "***, ***, short"


def test_json_stays_json_when_a_secret_leaves_it() -> None:
    redact = redactor('pass"word\\1', "12345678")
    value = {'pass"word\\1': ['x pass"word\\1 y', 12345678, 2**70, True, None, 1.5]}
    assert json.loads(redact.json(json.dumps(value).encode())) == {
        "***": ["x *** y", "***", 2**70, True, None, 1.5]
    }
    untouched = b'{ "kept" : "as it is" }'
    assert redact.json(untouched) is untouched
    assert Redactor().text("anything") == "anything"
