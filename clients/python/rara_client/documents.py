"""YAML and JSON text as plain values, without the surprises of either.

YAML is read by the rules of version 1.2, the ones that JSON shares: `yes`, `on`, 1:30 and dates are text, `1e5`
is a number, `0755` is refused. Both refuse a key that stands twice, keys that are not text, NaN and infinity.
"""

import json
import re
from typing import TYPE_CHECKING, Any, Final, NoReturn

import yaml

MAX_DEPTH: Final = 100
# Aliases let a small file stand for a huge value.
MAX_NODES: Final = 1_000_000


class DocumentInvalid(ValueError):
    """The text does not parse; the message has line and column where the parser knows them."""


def parse_json(text: str) -> object:
    """The value of a JSON text. Raises DocumentInvalid."""
    try:
        value: object = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise DocumentInvalid("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise DocumentInvalid(f"line {error.lineno}, column {error.colno}: {error.msg}") from None
    except DocumentInvalid:
        raise
    except ValueError:  # Python's own bound
        raise DocumentInvalid("a number of more than 4,300 digits") from None
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise DocumentInvalid(f"the key {twice!r} stands twice in one object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise DocumentInvalid(f"{name} is not JSON")


def parse_yaml(text: str) -> object:
    """The value of a YAML text of one document. Raises DocumentInvalid."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise DocumentInvalid("the file is empty")
        _measure(node)
        loader = _Loader("")
        try:
            value: object = loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise DocumentInvalid(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise DocumentInvalid(" ".join(str(error).split())) from None
    except RecursionError:
        raise DocumentInvalid("nested too deeply") from None
    return value


def _measure(root: yaml.Node) -> None:
    """Refuse what aliases blow up, before anything is built of it."""
    count = 0
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise DocumentInvalid(f"nested more than {MAX_DEPTH} deep, or an alias that holds itself")
        if count > MAX_NODES:
            raise DocumentInvalid(f"more than {MAX_NODES:,} values, aliases counted as often as they stand")
        if isinstance(node, yaml.SequenceNode):
            stack.extend((child, depth + 1) for child in node.value)
        elif isinstance(node, yaml.MappingNode):
            stack.extend((child, depth + 1) for pair in node.value for child in pair)


if TYPE_CHECKING:
    _Base = yaml.SafeLoader
else:  # libyaml's parser, where PyYAML was built with it, takes a tenth of the time
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):
    """SafeLoader with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_unique_mapping(self, node: yaml.MappingNode) -> dict[str, object]:
        names: set[str] = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                self._refuse(key, f"the key {key.value!r} is not text: put it in quotes")
            if key.value in names:
                self._refuse(key, f"the key {key.value!r} stands twice in one mapping")
            names.add(key.value)
        self.flatten_mapping(node)
        return {key.value: self.construct_object(value, deep=True) for key, value in node.value}

    def construct_number(self, node: yaml.ScalarNode) -> int:
        text = node.value
        if re.fullmatch(r"[-+]?0[0-9]+", text):
            self._refuse(node, f"{text}: put it in quotes if it is text, else leave out the leading zero")
        if len(text) > 4300:
            self._refuse(node, "a number of more than 4,300 digits")
        return int(text, 0)

    def construct_fraction(self, node: yaml.ScalarNode) -> float:
        value = float(node.value)
        if value in (float("inf"), float("-inf")):
            self._refuse(node, f"{node.value} is larger than any number that JSON can carry here")
        return value

    def construct_nonfinite(self, node: yaml.ScalarNode) -> NoReturn:
        self._refuse(node, f"{node.value} cannot be said in JSON")

    def construct_unknown(self, node: yaml.Node) -> NoReturn:
        self._refuse(node, f"the tag {node.tag} is not allowed here")

    def _refuse(self, node: yaml.Node, problem: str) -> NoReturn:
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _core(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_core("null", r"^(?:~|null|Null|NULL)?$", "~nN")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])
_core("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_core("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789")
_core("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_core("nonfinite", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.")
_core("merge", r"^<<$", "<")


def _register() -> None:
    constructors: dict[str | None, Any] = {
        "tag:yaml.org,2002:null": _Loader.construct_yaml_null,
        "tag:yaml.org,2002:bool": _Loader.construct_yaml_bool,
        "tag:yaml.org,2002:int": _Loader.construct_number,
        "tag:yaml.org,2002:float": _Loader.construct_fraction,
        "tag:yaml.org,2002:nonfinite": _Loader.construct_nonfinite,
        "tag:yaml.org,2002:str": _Loader.construct_yaml_str,
        "tag:yaml.org,2002:seq": lambda loader, node: loader.construct_sequence(node, deep=True),
        "tag:yaml.org,2002:map": _Loader.construct_unique_mapping,
        None: _Loader.construct_unknown,
    }
    _Loader.yaml_constructors = constructors


_register()
