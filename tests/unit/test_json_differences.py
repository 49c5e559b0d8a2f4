"""Where two JSON values differ, and how little of them is shown."""

import hashlib
import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_cli.jsondiff import (
    ABSENT,
    Difference,
    Unread,
    at,
    delta,
    delta_text,
    differences,
    is_equal,
    parse,
    plain,
    short,
    short_pair,
    split,
)


def found(a: str, b: str) -> list[tuple[str, object, object]]:
    return [(each.path, each.a, each.b) for each in differences(parse(a.encode()), parse(b.encode()))]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("{}", "{}", []),
        ("1", "2", [("", 1, 2)]),
        ("1", "1.0", []),  # the same number
        ("1", "true", [("", 1, True)]),
        ("0", "false", [("", 0, False)]),
        ("null", "false", [("", None, False)]),
        ('"1"', "1", [("", "1", 1)]),
        ('{"a": {"b": 1, "c": 2}}', '{"a": {"c": 3, "b": 1}}', [("/a/c", 2, 3)]),
        ('{"a": 1}', '{"b": 1}', [("/a", 1, ABSENT), ("/b", ABSENT, 1)]),
        ('{"a/b~": 1}', '{"a/b~": 2}', [("/a~1b~0", 1, 2)]),
        ("[1, 2, 3]", "[1, 5, 3]", [("/1", 2, 5)]),
        ("[1, 2]", "[1]", [("", [1, 2], [1])]),
        ('{"a": [1]}', '{"a": {"0": 1}}', [("/a", [1], {"0": 1})]),
        ("0.1", "0.10", []),
        ("9007199254740993", "9007199254740992", [("", 9007199254740993, 9007199254740992)]),
        ('{"b": 1, "a": 1}', '{"b": 2, "a": 2}', [("/b", 1, 2), ("/a", 1, 2)]),  # in a's order
    ],
)
def test_the_innermost_places_are_told(a: str, b: str, expected: list[tuple[str, object, object]]) -> None:
    assert found(a, b) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(VALUES, VALUES)
def test_each_difference_stands_where_its_path_says(a: object, b: object) -> None:
    assert is_equal(a, a)
    for each in differences(a, b):
        assert at(a, split(each.path)) == each.a
        assert at(b, split(each.path)) == each.b
    assert is_equal(a, b) == (json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True))


def test_depth_is_no_limit() -> None:
    deep: object = 1
    other: object = 2
    for _ in range(5_000):
        deep, other = [deep], [other]
    assert list(differences(deep, other)) == [Difference("/0" * 5_000, 1, 2)]


def test_what_is_no_json_is_known_by_its_size_and_digest() -> None:
    for data in (b"\xff\x00", b"NaN", b"[" * 200_000):
        assert parse(data) == Unread(len(data), "no JSON", hashlib.sha256(data).hexdigest())
    assert not is_equal(parse(b"\xff\x00"), parse(b"\xff\x01"))
    assert at(Unread(9), ["a"]) == Unread(9)


@pytest.mark.parametrize(
    ("value", "parts", "expected"),
    [
        ({"a": [10, 20]}, ["a", "1"], 20),
        ({"a": [10]}, ["a", "1"], ABSENT),
        ({"a": [10]}, ["a", "x"], ABSENT),
        ({"a": 1}, ["a", "b"], ABSENT),
        ({"a": None}, ["a"], None),
        (ABSENT, ["a"], ABSENT),
        (5, [], 5),
    ],
)
def test_a_path_leads_to_a_value_or_to_nothing(value: object, parts: list[str], expected: object) -> None:
    assert at(value, parts) == expected


def test_only_numbers_have_a_difference_and_it_is_exact() -> None:
    assert delta(parse(b"0.81"), parse(b"0.83")) == Decimal("0.02")
    assert delta(3, 5) == 2
    assert delta(True, 2) is None
    assert delta("1", 2) is None
    assert delta(ABSENT, 2) is None
    assert delta_text(Decimal("0.02")) == "+0.02"
    assert delta_text(Decimal(-3)) == "-3"
    assert delta_text(Decimal("0.037974683544303")) == "+0.0380"


@pytest.mark.parametrize(
    ("a", "b", "texts"),
    [
        (1, 2, ("1", "2")),
        (Decimal("0.12345678901"), Decimal("0.12345678902"), ("0.12345678901", "0.12345678902")),
        ("x" * 50 + "left", "x" * 50 + "right", ('…"xxxxxxxxleft"', '…"xxxxxxxxright"')),
        ("ab" * 32, "ab" * 31 + "cd", ('…"ababababab"', '…"ababababcd"')),
        ([1], [1, 2], ("[1 items]", "[2 items]")),
    ],
)
def test_two_values_that_differ_look_different(a: object, b: object, texts: tuple[str, str]) -> None:
    assert short_pair(a, b) == texts


@pytest.mark.parametrize(
    ("value", "text", "in_json"),
    [
        (ABSENT, "none", "none"),
        (None, "null", None),
        (True, "true", True),
        (12, "12", 12),
        (Decimal("0.50"), "0.50", 0.5),
        (Decimal("1e999"), "1E+999", "1E+999"),
        (10**40, "1.00000e+40", 10**40),
        (Decimal("0.810126582278481"), "0.810127", 0.810126582278481),
        ("ab" * 32, "abababababab", "ab" * 32),
        ("a\x1b[31m", '"a\ufffd[31m"', "a\x1b[31m"),
        ("x" * 500, '"' + "x" * 40 + '…"', '"' + "x" * 40 + '…"'),
        ({"a": 1, "b": 2}, "{2 keys}", "{2 keys}"),
        ([1], "[1 items]", "[1 items]"),
        (Unread(5000), "5,000 bytes left out", "5,000 bytes left out"),
        (Unread(7, "no JSON"), "7 bytes that are no JSON", "7 bytes that are no JSON"),
    ],
)
def test_values_are_short(value: object, text: str, in_json: object) -> None:
    assert short(value) == text
    assert plain(value) == in_json
