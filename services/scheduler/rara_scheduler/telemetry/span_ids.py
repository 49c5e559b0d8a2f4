"""Ids of spans that are known before the span is made.

An attempt may be granted by one scheduler and closed by another, hours later, and executors make children of its span
from the first moment on. So its id follows from its lease token, which no other attempt of the trace has, and whoever
closes the attempt makes the span.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

_PLANNED: Final[ContextVar[int | None]] = ContextVar("planned span id", default=None)


def attempt_span_id(lease_token: int) -> int:
    digest = hashlib.sha256(f"rara attempt {lease_token}".encode()).digest()
    return int.from_bytes(digest[:8]) or 1  # zero is no id


@contextlib.contextmanager
def planned(span_id: int) -> Iterator[None]:
    """The span that is made in this block gets this id."""
    before = _PLANNED.set(span_id)
    try:
        yield
    finally:
        _PLANNED.reset(before)


class PlannedIds(IdGenerator):
    def __init__(self) -> None:
        self._random = RandomIdGenerator()

    def generate_span_id(self) -> int:
        return _PLANNED.get() or self._random.generate_span_id()

    def generate_trace_id(self) -> int:
        return self._random.generate_trace_id()

    def is_trace_id_random(self) -> bool:
        return True
