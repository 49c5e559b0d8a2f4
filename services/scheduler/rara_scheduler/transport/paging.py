"""Pages of list answers: as many rows as were asked for, as far as they fit into one frame."""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from rara_scheduler.transport.page_token import encode_token

# A receiver's usual limit is 4 MiB for one message.
ANSWER_BYTES: Final = 3 * 1024 * 1024
_BATCH: Final = 20  # rows read at once, where one row may have megabytes

_View = TypeVar("_View")
_Made = TypeVar("_Made", bound=Message)


def page(
    request: Message,
    found: Iterable[_View],
    size: int,
    make: Callable[[_View], _Made],
    position: Callable[[_View], Sequence[str]],
) -> tuple[list[_Made], str]:
    """The messages of a page, and the token of the next one; empty: this is the last.

    found: in order, more than `size` rows when there is a next page. A page ends early when its messages have
    ANSWER_BYTES, but never empty.
    """
    made: list[_Made] = []
    used = 0
    last: _View | None = None
    for view in found:
        if last is not None and (len(made) == size or used >= ANSWER_BYTES):
            return made, encode_token(request, position(last))
        message = make(view)
        if made and used + message.ByteSize() > ANSWER_BYTES and last is not None:
            return made, encode_token(request, position(last))
        made.append(message)
        used += message.ByteSize()
        last = view
    return made, ""


async def in_batches(
    read: Callable[[_View | None, int], Awaitable[Sequence[_View]]], size: int, weigh: Callable[[_View], int]
) -> list[_View]:
    """Read large rows a few at a time, until there are `size` and one more, or enough bytes for a page.

    read: up to so many rows from behind one that was read (None: from where the page begins).
    """
    found: list[_View] = []
    used = 0
    while len(found) <= size and used <= ANSWER_BYTES:
        wanted = min(_BATCH, size + 1 - len(found))
        rows = await read(found[-1] if found else None, wanted)
        found.extend(rows)
        used += sum(weigh(row) for row in rows)
        if len(rows) < wanted:
            break
    return found


def fit_steps(steps: Sequence[_Made], *fields: str) -> None:
    """Make a list that has no next page fit: drop whole fields of all, one after the other, while it is too large."""
    for field in fields:
        if sum(step.ByteSize() for step in steps) <= ANSWER_BYTES:
            return
        for step in steps:
            step.ClearField(field)
