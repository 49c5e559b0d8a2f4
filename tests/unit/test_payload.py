"""What may be stored as a payload, and what a refusal says."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.payload import MAX_DEPTH, check_payload, clean_text, pointer

LIMIT = 1000


def refusal(data: bytes, media_type: str = "", limit: int = LIMIT) -> Fault:
    with pytest.raises(Fault) as caught:
        check_payload(data, media_type, "input", limit)
    return caught.value


@pytest.mark.parametrize(
    ("data", "path", "says"),
    [
        (b'{"a": ["x", "\\u0000"]}', "input#/a/1", "holds U+0000"),
        (b'{"a":"\\u0000"}', "input#/a", "holds U+0000"),
        (b'{"a":{"b\\u0000c":1}}', "input#/a/b\ufffdc", "holds U+0000 in a key"),
        (b'[[["deep\\u0000"]]]', "input#/0/0/0", "holds U+0000"),
        (b'{"a":"\\ud800"}', "input#/a", "holds a lone surrogate"),
        (b'{"a":"\\udc00\\ud800"}', "input#/a", "holds a lone surrogate"),
        (b'{"x":{"a":1, "a":2}}', "input#/x/a", "is a key given twice in one object"),
        (b"NaN", "input", "NaN is not JSON"),
        (b'{"a":Infinity}', "input", "Infinity is not JSON"),
        (b"[-Infinity]", "input", "-Infinity is not JSON"),
        (b'"\xff\xfe"', "input", "is not valid UTF-8 at byte 1"),
        (b"\xef\xbb\xbf{}", "input", "is not JSON, from character 0 on"),
        (b'"a\x00b"', "input", "is not JSON, from character 2 on"),
        (b"{'a':1}", "input", "is not JSON, from character 1 on"),
        (b'{"a":1,}', "input", "is not JSON"),
        (b"01", "input", "is not JSON"),
        (b"1 2", "input", "is not JSON"),
        (b"hello", "input", "is not JSON, from character 0 on"),
        (b"", "input", "is empty, which is not JSON"),
    ],
)
def test_what_is_not_strict_json_is_refused_by_path(data: bytes, path: str, says: str) -> None:
    fault = refusal(data)
    assert fault.code is Code.PAYLOAD_INVALID
    assert fault.fields[0].field == path
    assert fault.fields[0].description.startswith(says)
    assert fault.metadata == {"path": path}


@pytest.mark.parametrize(
    "data",
    [
        b"null",
        b"0",
        b'""',
        b'{"a": ["x", "\\u0001"]}',
        b'"\\\\u0000 is spelled out"',
        b'"\\ud83d\\ude00"',
        '"😀 é"'.encode(),
        b'{"x":{"a":1}, "y":{"a":2}}',
        b"1e400",
        b"123456789012345678901234567890",
        b'{"NaN":"NaN"}',
        b"  [1,\n 2]\t",
    ],
)
def test_neighbours_of_bad_payloads_pass(data: bytes) -> None:
    check_payload(data, "application/json", "input", LIMIT)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_is_bounded_and_exactly_the_bound_passes(opening: str) -> None:
    closing = "]" if opening == "[" else "}"

    def nested(depth: int) -> bytes:
        return (opening * (depth - 1) + ("[" if opening == "[" else "{") + closing * depth).encode()

    check_payload(nested(MAX_DEPTH), "", "input", 10**6)
    for depth in (MAX_DEPTH + 1, 300, 2000, 100_000):
        fault = refusal(nested(depth), limit=10**6)
        assert fault.code is Code.PAYLOAD_INVALID
        assert "nested deeper than 128 levels" in fault.message


def test_exactly_the_limit_passes_and_a_byte_more_is_too_large() -> None:
    data = json.dumps("x" * (LIMIT - 2)).encode()
    assert len(data) == LIMIT
    check_payload(data, "", "input", LIMIT)
    fault = refusal(data + b" ")
    assert fault.code is Code.PAYLOAD_TOO_LARGE
    assert fault.metadata == {"path": "input", "size_bytes": "1001", "limit_bytes": "1000"}


def test_only_json_is_a_media_type() -> None:
    check_payload(b"{}", "Application/JSON", "input", LIMIT)
    assert refusal(b"{}", "text/plain").fields[0].field == "input.media_type"


def test_no_refusal_repeats_a_value() -> None:
    for data in (b'{"a":"hush-hush\\u0000"}', b'"hush-hush', b'{"a":"hush-hush", "a":1}'):
        fault = refusal(data)
        assert "hush" not in fault.message + fault.fields[0].description


@given(st.binary(max_size=60))
def test_any_bytes_either_pass_as_json_or_are_refused(data: bytes) -> None:
    try:
        check_payload(data, "", "input", LIMIT)
    except Fault:
        return
    json.loads(data)


@given(
    st.recursive(st.none() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=9)
)
def test_json_passes_exactly_if_its_text_is_storable(value: object) -> None:
    data = json.dumps(value).encode()
    texts = json.dumps(value, ensure_ascii=False)
    storable = "\\u0000" not in texts.replace("\\\\", "") and not any(
        0xD800 <= ord(character) < 0xE000 for character in texts
    )
    try:
        check_payload(data, "", "input", 10**6)
        passed = True
    except Fault:
        passed = False
    assert passed is storable


def test_a_pointer_escapes_and_stays_short() -> None:
    assert pointer("input", ("a/b", "~", 0)) == "input#/a~1b/~0/0"
    assert pointer("input", ()) == "input"
    assert len(pointer("input", ("k" * 10_000,) * 50)) == 400


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("plain", "plain"),
        ("a\x00b", "a\ufffdb"),
        ("a\ud800b\udfff", "a\ufffdb\ufffd"),
        ("é😀", "é😀"),
    ],
)
def test_text_is_made_storable(text: str, clean: str) -> None:
    assert clean_text(text, 100) == clean


def test_long_text_is_cut_at_a_character_with_a_mark() -> None:
    assert clean_text("é" * 50, 100) == "é" * 50
    cut = clean_text("é" * 51, 100)
    assert cut == "é" * 40 + "… [cut, 102 bytes]"
    assert len(cut.encode()) <= 100


@given(st.text(), st.integers(64, 300))
def test_clean_text_is_always_storable_and_never_longer(text: str, limit: int) -> None:
    clean = clean_text(text, limit)
    assert len(clean.encode("utf-8")) <= limit
    assert "\x00" not in clean
