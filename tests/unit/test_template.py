"""Input templates: which references they hold, and what becomes of them."""

import pytest
from rara_scheduler.domain.canonical import dumps_exact, loads_exact
from rara_scheduler.domain.template import Reference, TemplateError, references, resolve, resolve_bytes


def test_references_are_found_in_order_with_their_place() -> None:
    template = loads_exact(
        b'{"a": [1, {"$ref": "/run/input/x~1y/0"}], "b": {"$ref": "/steps/clean.up/output"}, "c": "$ref"}'
    )
    assert references(template) == [
        Reference(None, ("x/y", "0"), ("a", 1)),
        Reference("clean.up", (), ("b",)),
    ]


@pytest.mark.parametrize(
    ("ref", "says"),
    [
        ("run/input", "must begin with /"),
        ("", "must begin with /"),
        ("/", "must point below"),
        ("/run", "must point below"),
        ("/run/output", "must point below"),
        ("/steps/a", "must point below"),
        ("/steps/a/input", "must point below"),
        ("/steps//output", "must point below"),
        ("/run/input/~2", "~ must be written ~0"),
        ("/run/input/~", "~ must be written ~0"),
        (7, "must be a string"),
        (None, "must be a string"),
        ({"x": 1}, "must be a string"),
    ],
)
def test_a_bad_reference_is_named_by_its_place(ref: object, says: str) -> None:
    with pytest.raises(TemplateError, match=says) as caught:
        references({"deep": [{"$ref": ref}]})  # type: ignore[dict-item]  # bad on purpose
    assert caught.value.path == "#/deep/0/$ref"


def test_only_an_object_with_nothing_else_is_a_reference() -> None:
    template = loads_exact(b'{"$ref": "not a pointer", "and": "more"}')
    assert references(template) == []
    assert resolve(template, None, {}) == {"$ref": "not a pointer", "and": "more"}


def test_references_are_replaced_by_values_of_any_shape() -> None:
    template = loads_exact(
        b'{"whole": {"$ref": "/run/input"}, "part": {"$ref": "/run/input/list/1/k"},'
        b' "up": [{"$ref": "/steps/a/output/n"}], "fixed": true}'
    )
    run_input = loads_exact(b'{"list": [0, {"k": "v"}]}')
    assert resolve(template, run_input, {"a": {"n": None}}) == {
        "whole": {"list": [0, {"k": "v"}]},
        "part": "v",
        "up": [None],
        "fixed": True,
    }


@pytest.mark.parametrize(
    "pointer",
    [
        "/run/input/missing",
        "/run/input/list/2",
        "/run/input/list/-",
        "/run/input/list/01",
        "/run/input/list/+1",
        "/run/input/list/0/deeper",
        "/run/input/text/0",
        "/steps/gone/output",
    ],
)
def test_what_does_not_resolve_names_the_pointer(pointer: str) -> None:
    template = {"x": {"$ref": pointer}}
    with pytest.raises(TemplateError) as caught:
        resolve_bytes(template, b'{"list": [1, 2], "text": "abc"}', {"other": b"1"})  # type: ignore[arg-type]
    assert caught.value.path == pointer


def test_numbers_pass_through_as_they_were_spelled() -> None:
    run_input = b'{"price": 1.10, "huge": 1e400, "id": 12345678901234567890123, "list": [-0, 2.0]}'
    template = loads_exact(
        b'{"p": {"$ref": "/run/input/price"}, "h": {"$ref": "/run/input/huge"}, "i": {"$ref": "/run/input/id"},'
        b' "l": {"$ref": "/run/input/list"}, "own": 3.140}'
    )
    assert resolve_bytes(template, run_input, {}) == (
        b'{"p":1.10,"h":1e400,"i":12345678901234567890123,"l":[-0,2.0],"own":3.140}'
    )


def test_a_value_taken_whole_is_copied_byte_for_byte() -> None:
    output = b'{ "kept" : [1.0,  2] }'
    assert resolve_bytes({"$ref": "/steps/a/output"}, None, {"a": output}) == output
    assert resolve_bytes([{"$ref": "/steps/a/output"}], None, {"a": output}) == b"[" + output + b"]"


def test_no_input_and_null_input_are_told_apart() -> None:
    template = {"x": {"$ref": "/run/input"}}
    assert resolve_bytes(template, b"null", {}) == b'{"x":null}'  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match="the run has no input"):
        resolve_bytes(template, None, {})  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match="step a has no output"):
        resolve_bytes({"$ref": "/steps/a/output"}, None, {"a": None})


def test_a_template_without_references_stays_as_it_is() -> None:
    data = b'{"a":[1,2.50,{"b":null}],"c":"text"}'
    assert resolve_bytes(loads_exact(data), None, {}) == data
    assert dumps_exact(resolve(loads_exact(data), None, {})) == data


def test_a_value_that_looks_like_a_reference_is_not_followed() -> None:
    run_input = b'{"x": {"$ref": "/run/input/y"}, "y": 1}'
    assert resolve_bytes({"$ref": "/run/input/x"}, run_input, {}) == b'{"$ref":"/run/input/y"}'
