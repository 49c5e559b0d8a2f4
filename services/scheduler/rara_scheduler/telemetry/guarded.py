"""Listeners that cannot harm whoever tells them something: what they raise is logged once, and dropped."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

import structlog
from google.protobuf.message import Message

from rara_scheduler.telemetry.port import (
    SILENT,
    UNTRACED,
    AttemptFacts,
    CallSpan,
    EndedAttempt,
    Metrics,
    SpanMaker,
    Tracing,
)

log = structlog.get_logger(__name__)

_PORT: Final = {
    port: [name for name, member in vars(port).items() if callable(member) and not name.startswith("_")]
    for port in (Metrics, Tracing)
}


class _Guard:
    """Says once what went wrong: a listener that is broken is broken at each call."""

    def __init__(self) -> None:
        self._has_said = False

    def complain(self, what: str, error: Exception) -> None:
        if not self._has_said:
            self._has_said = True
            log.error("telemetry.failed", told=what, error=f"{type(error).__name__}: {error}")

    def around(
        self, name: str, told: Callable[..., Any], otherwise: Callable[..., Any]
    ) -> Callable[..., Any]:
        def tell(*given: Any, **named: Any) -> Any:
            try:
                return told(*given, **named)
            except Exception as error:
                self.complain(name, error)
                return otherwise(*given, **named)

        return tell


class GuardedMetrics(Metrics):
    def __init__(self, inner: Metrics) -> None:
        self.is_on = inner.is_on
        guard = _Guard()
        for name in _PORT[Metrics]:
            setattr(self, name, guard.around(name, getattr(inner, name), getattr(SILENT, name)))


class GuardedTracing(Tracing):
    """spans: makes the spans of attempts that have ended."""

    def __init__(self, inner: Tracing, spans: SpanMaker) -> None:
        self.is_on = inner.is_on
        self._inner = inner
        self._spans = spans
        self.ended: deque[EndedAttempt] = spans.ended
        self._guard = guard = _Guard()
        for name in _PORT[Tracing]:
            if name != "call":
                setattr(self, name, guard.around(name, getattr(inner, name), getattr(UNTRACED, name)))

    def attempt_span(self, ended: EndedAttempt, facts: AttemptFacts) -> None:
        try:
            self._spans.attempt_span(ended, facts)
        except Exception as error:
            self._guard.complain("attempt_span", error)

    def call(
        self, method: str, request: Message, metadata: Iterable[tuple[str, str | bytes]]
    ) -> AbstractContextManager[CallSpan]:
        return _GuardedCall(self._guard, lambda: self._inner.call(method, request, metadata))


class _GuardedCall(CallSpan):
    """The call goes on without a span where it cannot have one, and ends as it does."""

    def __init__(self, guard: _Guard, begin: Callable[[], AbstractContextManager[CallSpan]]) -> None:
        self._guard = guard
        self._begin = begin
        self._held: AbstractContextManager[CallSpan] | None = None
        self._span = CallSpan()

    def __enter__(self) -> CallSpan:
        try:
            held = self._begin()
            self._span = held.__enter__()
            self._held = held
        except Exception as error:
            self._guard.complain("call", error)
        return self

    def failed(self, code: str) -> None:
        try:
            self._span.failed(code)
        except Exception as error:
            self._guard.complain("failed", error)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held is None:
            return
        try:
            self._held.__exit__(kind, error, trace)
        except Exception as raised:
            if raised is not error:
                self._guard.complain("call", raised)
