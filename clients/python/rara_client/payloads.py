"""JSON values to and from the payloads that carry them."""

import json

from rara.v1 import common_pb2

from rara_client.errors import PayloadInvalid


def json_payload(value: object) -> common_pb2.Payload:
    """The value as JSON bytes. Raises PayloadInvalid for what JSON cannot say: NaN, a lone surrogate, a set."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return common_pb2.Payload(data=text.encode("utf-8"))
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadInvalid(
            f"not a JSON value: {error}", reason="PAYLOAD_INVALID", status="INVALID_ARGUMENT"
        ) from error


def json_value(payload: common_pb2.Payload) -> object:
    """The value that a payload carries; None for an empty one. Raises PayloadInvalid if it is not JSON."""
    if not payload.data:
        return None
    try:
        value: object = json.loads(payload.data)
    except ValueError as error:
        raise PayloadInvalid(
            f"not JSON: {error}", reason="PAYLOAD_INVALID", status="INVALID_ARGUMENT"
        ) from error
    return value
