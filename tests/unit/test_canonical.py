"""JSON keeps its numbers, and equal content has one form."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rara_scheduler.domain.canonical import canonical, digest, dumps_exact, loads_exact

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.parametrize(
    "number",
    ["1.10", "1e400", "-0", "-0.0", "9007199254740993", "123456789012345678901234567890", "1E+2", "0.1", "7"],
)
def test_a_number_keeps_its_spelling(number: str) -> None:
    data = f'{{"n":[{number}]}}'.encode()
    assert dumps_exact(loads_exact(data)) == data


def test_key_order_and_white_space_make_no_difference() -> None:
    assert canonical(b'{ "b": [1, 2.50], "a": {"d": "\\u00e9", "c": null} }') == (
        '{"a":{"c":null,"d":"é"},"b":[1,2.50]}'.encode()
    )


def test_numbers_that_are_equal_but_spelled_otherwise_stay_apart() -> None:
    assert canonical(b"1.0") != canonical(b"1")
    assert digest(loads_exact(b'{"a":1.0}')) != digest(loads_exact(b'{"a":1}'))


@pytest.mark.parametrize("data", [b"NaN", b"[Infinity]", b"-Infinity", b"{", b"", b"'a'", b'"\xff"'])
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the module's only promise about it
        loads_exact(data)


@given(JSON)
def test_the_canonical_form_is_a_fixed_point(value: object) -> None:
    try:
        data = orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, or a lone surrogate
        return
    once = canonical(data)
    assert canonical(once) == once
    assert orjson.loads(once) == orjson.loads(data)
