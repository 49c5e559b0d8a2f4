"""Page tokens: where the next page begins, bound to the filter that the first one was asked with."""

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Final

from google.protobuf.message import Message

from rara_scheduler.domain.errors import Code, Fault, FieldViolation, field_invalid

DEFAULT_PAGE_SIZE: Final = 50
MAX_PAGE_SIZE: Final = 1000
_MAX_TOKEN_CHARS: Final = 2048


def page_size(asked: int) -> int:
    """0: 50; more than 1,000 is taken as 1,000. Raises FIELD_INVALID for a negative one."""
    if asked < 0:
        raise field_invalid("page_size", "must not be negative")
    return min(asked or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def _filter_of(request: Message) -> str:
    """The name and the hash of everything in a list request but its page."""
    wanted = type(request)()
    wanted.CopyFrom(request)
    wanted.ClearField("page_size")
    wanted.ClearField("page_token")
    data = request.DESCRIPTOR.full_name.encode() + b"\0" + wanted.SerializeToString(deterministic=True)
    return hashlib.sha256(data).hexdigest()[:16]


def encode_token(request: Message, position: Sequence[str]) -> str:
    """The token of the page behind a keyset position."""
    data = json.dumps({"filter": _filter_of(request), "position": list(position)}, separators=(",", ":"))
    return base64.urlsafe_b64encode(data.encode()).decode().rstrip("=")


def decode_token(request: Message, token: str, parts: int) -> tuple[str, ...] | None:
    """The position of `parts` strings that a token holds, None for the first page.

    Raises PAGE_TOKEN_INVALID for a token that is not ours, or that was given for another filter.
    """
    if not token:
        return None
    try:
        if len(token) > _MAX_TOKEN_CHARS:
            raise ValueError
        data = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        held = json.loads(data)
        position = tuple(held["position"])
        known_filter = held["filter"]
        if len(position) != parts or not all(isinstance(part, str) for part in position):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _invalid("is not a token of this list") from None
    if known_filter != _filter_of(request):
        raise _invalid("belongs to another filter: begin again without a token")
    return position


def _invalid(description: str) -> Fault:
    return Fault(
        Code.PAGE_TOKEN_INVALID,
        f"page_token: {description}",
        fields=(FieldViolation("page_token", description),),
    )


def invalid_token() -> Fault:
    """For a token whose position cannot be read as what it should be."""
    return _invalid("is not a token of this list")
