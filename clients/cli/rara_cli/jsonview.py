"""Messages as JSON for scripts: states are words, payloads are values, numbers are numbers.

Every plain field is there also when it is empty, so that a script need not ask; a message field is there only
when it is set. Instants are ISO 8601 in UTC, durations "1.5s", bytes base64.
"""

import base64
import json
import re
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2

Json = dict[str, object]


def to_json(message: Message) -> Json:
    """A message as an object with the names of the contract."""
    result: Json = {}
    for field in cast("Descriptor", message.DESCRIPTOR).fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            result[field.name] = {key: _value(inner, value[key]) for key in sorted(value)}
        elif field.is_repeated:
            result[field.name] = [_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            result[field.name] = _value(field, value)
    return result


def dumps(value: object) -> str:
    """One line of JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _value(field: FieldDescriptor, value: object) -> object:
    match value:
        case Timestamp():
            return value.ToJsonString()
        case Duration():
            return value.ToJsonString()
        case common_pb2.Payload():
            return _payload(value)
        case Message():
            return to_json(value)
        case bytes():
            return base64.b64encode(value).decode("ascii")
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(cast("int", value))
        prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", field.enum_type.name).upper() + "_"
        return known.name.removeprefix(prefix).lower() if known is not None else value
    if (isinstance(value, float) and value in (float("inf"), float("-inf"))) or value != value:
        return str(value)
    return value


def _payload(payload: common_pb2.Payload) -> object:
    """The value itself; what is left out or no JSON is said to be so."""
    if payload.omitted_bytes:
        return {"omitted_bytes": payload.omitted_bytes}
    if not payload.data:
        return None
    try:
        return json.loads(payload.data)
    except ValueError:
        return {"media_type": payload.media_type, "base64": base64.b64encode(payload.data).decode("ascii")}
