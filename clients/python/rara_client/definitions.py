"""Workflow definitions from YAML or JSON files, every fault with its file and the path of its field.

A file has the field names of the message `Definition`. Durations are written as in "1.5s",
`input_template` as a plain value, `on_failure` as `fail_fast` or `continue`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from rara.v1 import common_pb2, workflow_pb2

from rara_client.documents import DocumentInvalid, parse_json, parse_yaml
from rara_client.errors import DefinitionInvalid, FieldViolation

MAX_FILE_BYTES: Final = 8 * 1024 * 1024
# More are found, but a person mends a few at a time.
_MAX_VIOLATIONS: Final = 20

_GIVEN_BY_SCHEDULER: Final = frozenset({"version", "content_sha256", "created_at"})
_DURATION: Final = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,9}))?s")


def load_definition(path: Path) -> workflow_pb2.Definition:
    """Read a definition; a name that ends in `.json` is read as JSON, every other one as YAML.

    Raises DefinitionInvalid, with all faults found (up to 20) in `violations`, and OSError.
    """
    data = path.read_bytes()
    try:
        if len(data) > MAX_FILE_BYTES:
            raise DocumentInvalid(f"larger than {MAX_FILE_BYTES:,} bytes")
        text = data.decode("utf-8-sig")
        value = parse_json(text) if path.suffix.lower() == ".json" else parse_yaml(text)
    except (DocumentInvalid, UnicodeDecodeError) as error:
        raise _invalid(f"{path}: {error}", ()) from None
    return definition_from(value, source=str(path))


def definition_from(value: object, *, source: str = "definition") -> workflow_pb2.Definition:
    """The message of a plain value. `source` is what faults call it."""
    definition = workflow_pb2.Definition()
    faults: list[FieldViolation] = []
    if isinstance(value, Mapping):
        _Filler(faults).fill(definition, value, "")
    else:
        faults.append(FieldViolation("", f"must be an object with fields, not {_kind(value)}"))
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        where = f"{faults[0].field}: " if faults[0].field else ""
        raise _invalid(f"{source}: {where}{faults[0].description}{more}", tuple(faults[:_MAX_VIOLATIONS]))
    return definition


def _invalid(message: str, violations: tuple[FieldViolation, ...]) -> DefinitionInvalid:
    return DefinitionInvalid(
        message, reason="DEFINITION_INVALID", status="INVALID_ARGUMENT", violations=violations
    )


class _Filler:
    """Fills messages from plain values, and collects what does not fit."""

    def __init__(self, faults: list[FieldViolation]) -> None:
        self._faults = faults

    def fill(self, message: Message, value: Mapping[object, object], path: str) -> None:
        fields = _fields(cast("Descriptor", message.DESCRIPTOR))
        for name, item in value.items():
            where = f"{path}.{name}" if path else str(name)
            field = fields.get(str(name))
            if field is None:
                self._fault(where, f"there is no such field; known: {', '.join(_writable(fields, path))}")
            elif not path and name in _GIVEN_BY_SCHEDULER:
                self._fault(where, "is given by the scheduler: leave it out")
            elif item is None and field.message_type is not common_pb2.Payload.DESCRIPTOR:
                self._fault(where, "is empty: give it a value, or leave it out")
            else:
                self._set(message, field, item, where)

    def _set(self, message: Message, field: FieldDescriptor, value: object, path: str) -> None:
        if _is_map(field):
            self._set_map(message, field, value, path)
        elif field.is_repeated:
            if not isinstance(value, list):
                self._fault(path, f"must be a list, not {_kind(value)}")
                return
            for index, item in enumerate(value):
                self._add(message, field, item, f"{path}[{index}]")
        elif field.message_type is not None:
            self._fill_message(getattr(message, field.name), value, path)
        elif (scalar := self._scalar(field, value, path)) is not None:
            setattr(message, field.name, scalar)

    def _add(self, message: Message, field: FieldDescriptor, value: object, path: str) -> None:
        if field.message_type is not None:
            self._fill_message(getattr(message, field.name).add(), value, path)
        elif (scalar := self._scalar(field, value, path)) is not None:
            getattr(message, field.name).append(scalar)

    def _set_map(self, message: Message, field: FieldDescriptor, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            self._fault(path, f"must be an object, not {_kind(value)}")
            return
        target = getattr(message, field.name)
        value_field = _fields(cast("Descriptor", field.message_type))["value"]
        for key, item in value.items():
            where = f"{path}.{key}"
            if value_field.message_type is not None:
                self._fill_message(target[str(key)], item, where)
            elif (scalar := self._scalar(value_field, item, where)) is not None:
                target[str(key)] = scalar

    def _fill_message(self, message: Message, value: object, path: str) -> None:
        message.SetInParent()
        if isinstance(message, Duration):
            self._fill_duration(message, value, path)
        elif isinstance(message, common_pb2.Payload):
            self._fill_payload(message, value, path)
        elif isinstance(value, Mapping):
            self.fill(message, value, path)
        else:
            self._fault(path, f"must be an object, not {_kind(value)}")

    def _fill_duration(self, message: Duration, value: object, path: str) -> None:
        match = _DURATION.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            self._fault(path, f'must be seconds in quotes, such as "30s" or "1.5s", not {_shown(value)}')
            return
        message.seconds = int(match[1])
        message.nanos = int((match[2] or "0").ljust(9, "0"))

    def _fill_payload(self, message: common_pb2.Payload, value: object, path: str) -> None:
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            message.data = text.encode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            self._fault(path, f"is not a JSON value: {error}")

    def _scalar(self, field: FieldDescriptor, value: object, path: str) -> object:
        """The value to set, or None after a fault."""
        try:
            return _scalar(field, value)
        except _Misfit as misfit:
            self._fault(path, str(misfit))
            return None

    def _fault(self, path: str, problem: str) -> None:
        self._faults.append(FieldViolation(path, problem))


class _Misfit(ValueError):
    """The value does not fit the field; the message says what would."""


def _scalar(field: FieldDescriptor, value: object) -> object:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return _text(value)
        case FieldDescriptor.CPPTYPE_INT32:
            if isinstance(value, int) and not isinstance(value, bool) and -(2**31) <= value < 2**31:
                return value
            raise _Misfit(f"must be a whole number of 32 bits, not {_shown(value)}")
        case FieldDescriptor.CPPTYPE_DOUBLE:
            if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308:
                return float(value)
            raise _Misfit(f"must be a number, not {_shown(value)}")
        case FieldDescriptor.CPPTYPE_ENUM:
            words = _words(cast("EnumDescriptor", field.enum_type))
            if isinstance(value, str) and value in words:
                return words[value]
            raise _Misfit(f"must be one of {', '.join(words)}, not {_shown(value)}")
        case _:  # a type that the messages of a definition do not use today
            raise _Misfit("cannot be given in a file")


def _text(value: object) -> str:
    if not isinstance(value, str):
        hint = "" if isinstance(value, list | Mapping) else ": put it in quotes"
        raise _Misfit(f"must be text, not {_shown(value)}{hint}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _Misfit("holds half a character (a lone surrogate)") from None
    return value


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _fields(message: Descriptor) -> Mapping[str, FieldDescriptor]:
    return message.fields_by_name


def _writable(fields: Mapping[str, FieldDescriptor], path: str) -> list[str]:
    return sorted(name for name in fields if path or name not in _GIVEN_BY_SCHEDULER)


def _words(enum: EnumDescriptor) -> dict[str, int]:
    """ON_FAILURE_FAIL_FAST is written fail_fast."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    return {value.name.removeprefix(prefix).lower(): value.number for value in enum.values if value.number}


def _kind(value: object) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "an object"


def _shown(value: object) -> str:
    """The value itself where it is short enough to help."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float | str) and len(str(value)) <= 40:
        return repr(value)
    return _kind(value)
