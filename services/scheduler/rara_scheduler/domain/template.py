"""Input templates: JSON in which an object whose only member is `$ref` stands for a value known at run time.

References are JSON pointers (RFC 6901) into {"run": {"input": ...}, "steps": {NAME: {"output": ...}}}. Numbers pass
through as they were spelled (`canonical.loads_exact`), and a value taken whole is copied byte for byte.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import orjson

from rara_scheduler.domain.canonical import Json, dumps_exact, loads_exact
from rara_scheduler.domain.payload import pointer

REF: Final = "$ref"
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}")
_BAD_ESCAPE = re.compile(r"~(?![01])")


@dataclass(frozen=True, slots=True)
class Reference:
    """One `$ref`: `step` is None for the run's input; `rest` goes on from there, unescaped; `at` is its place."""

    step: str | None
    rest: tuple[str, ...]
    at: tuple[str | int, ...]


class TemplateError(Exception):
    """A reference that is no pointer, points elsewhere, or does not resolve. `path` is the pointer or its place."""

    def __init__(self, path: str, description: str) -> None:
        super().__init__(f"{path}: {description}")
        self.path = path
        self.description = description


def _is_reference(value: Json) -> bool:
    return isinstance(value, dict) and len(value) == 1 and REF in value


def parse_reference(text: Json, at: tuple[str | int, ...]) -> Reference:
    """Read one `$ref`. Raises TemplateError, `path` being its place in the template."""

    def refuse(description: str) -> TemplateError:
        return TemplateError(pointer("", (*at, REF)), description)

    if not isinstance(text, str):
        raise refuse("must be a string, a JSON pointer")
    if not text.startswith("/"):
        raise refuse("is no JSON pointer: it must begin with /")
    if _BAD_ESCAPE.search(text):
        raise refuse("is no JSON pointer: ~ must be written ~0, and / inside a name ~1")
    parts = [part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:]]
    match parts:
        case ["run", "input", *rest]:
            return Reference(None, tuple(rest), at)
        case ["steps", name, "output", *rest] if name:
            return Reference(name, tuple(rest), at)
    raise refuse("must point below /run/input or /steps/NAME/output")


def references(template: Json) -> list[Reference]:
    """All references in order. Raises TemplateError on the first that is malformed."""
    found: list[Reference] = []
    stack: list[tuple[tuple[str | int, ...], Json]] = [((), template)]
    while stack:
        at, here = stack.pop()
        if isinstance(here, dict):
            if _is_reference(here):
                found.append(parse_reference(here[REF], at))
            else:
                stack.extend(((*at, key), inner) for key, inner in reversed(here.items()))
        elif isinstance(here, list):
            stack.extend(((*at, index), here[index]) for index in range(len(here) - 1, -1, -1))
    return found


def _spell(reference: Reference) -> str:
    base = "/run/input" if reference.step is None else f"/steps/{reference.step}/output"
    return base + "".join(f"/{part.replace('~', '~0').replace('/', '~1')}" for part in reference.rest)


def _follow(value: Json, reference: Reference) -> Json:
    for depth, part in enumerate(reference.rest):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and _INDEX.fullmatch(part) and int(part) < len(value):
            value = value[int(part)]
        else:
            missing = Reference(reference.step, reference.rest[: depth + 1], ())
            raise TemplateError(_spell(reference), f"there is nothing at {_spell(missing)}")
    return value


def _fill(template: Json, lookup: Callable[[Reference], Json]) -> Json:
    if isinstance(template, dict):
        if _is_reference(template):
            return lookup(parse_reference(template[REF], ()))
        return {key: _fill(inner, lookup) for key, inner in template.items()}
    if isinstance(template, list):
        return [_fill(inner, lookup) for inner in template]
    return template


def resolve(template: Json, run_input: Json, outputs: Mapping[str, Json]) -> Json:
    """The template with every reference replaced by its value.

    run_input: None where the run has none, so that JSON's null and no input are one here (`resolve_bytes` tells them
    apart). outputs: by step name. Raises TemplateError for what does not resolve.
    """

    def lookup(reference: Reference) -> Json:
        if reference.step is None:
            return _follow(run_input, reference)
        if reference.step not in outputs:
            raise TemplateError(_spell(reference), f"step {reference.step} has no output")
        return _follow(outputs[reference.step], reference)

    return _fill(template, lookup)


def resolve_bytes(template: Json, run_input: bytes | None, outputs: Mapping[str, bytes | None]) -> bytes:
    """As `resolve`, from and to JSON bytes; a document is parsed only if a reference goes into it, and once.

    None: the run has no input, or the step no output; both are an error only where they are referred to. The result
    may be larger than a payload may be. Raises TemplateError for what does not resolve.
    """
    parsed: dict[str | None, Json] = {}

    def lookup(reference: Reference) -> Json:
        data = run_input if reference.step is None else outputs.get(reference.step)
        if data is None:
            what = (
                "the run has no input" if reference.step is None else f"step {reference.step} has no output"
            )
            raise TemplateError(_spell(reference), what)
        if not reference.rest:
            return orjson.Fragment(data)
        if reference.step not in parsed:
            parsed[reference.step] = loads_exact(data)
        return _follow(parsed[reference.step], reference)

    return dumps_exact(_fill(template, lookup))
