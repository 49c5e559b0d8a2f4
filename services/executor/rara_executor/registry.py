"""Which function runs which kind and version."""

import importlib
import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rara_executor import payload
from rara_executor.errors import ConfigurationError

if TYPE_CHECKING:
    from rara_executor.job import BlockingJob, Job

_KIND = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.+-]{0,62})")

AsyncHandler: TypeAlias = "Callable[[Job], Awaitable[Any]]"
BlockingHandler: TypeAlias = "Callable[[BlockingJob], Any]"
Handler: TypeAlias = "AsyncHandler | BlockingHandler"
H = TypeVar("H", bound="Handler")


@dataclass(frozen=True, slots=True)
class Operation:
    """One function under a kind and a version.

    max_concurrency: how many may run at once on one executor; 0: as many as there are slots.
    """

    kind: str
    version: str
    handler: Handler
    input_schema: Mapping[str, object] | None
    max_concurrency: int
    is_async: bool


class Registry:
    """Operations by kind and version, each name once."""

    def __init__(self) -> None:
        self._operations: dict[tuple[str, str], Operation] = {}

    def add(self, operation: Operation) -> None:
        key = operation.kind, operation.version
        known = self._operations.get(key)
        if known is not None and not _same_place(known.handler, operation.handler):
            raise ConfigurationError(
                f"operation {operation.kind} {operation.version} is defined twice: "
                f"{_place(known.handler)} and {_place(operation.handler)}"
            )
        self._operations[key] = operation

    def get(self, kind: str, version: str) -> Operation | None:
        return self._operations.get((kind, version))

    def all(self) -> list[Operation]:
        return [self._operations[key] for key in sorted(self._operations)]


DEFAULT = Registry()


def operation(
    kind: str,
    *,
    version: str,
    input_schema: Mapping[str, object] | None = None,
    max_concurrency: int = 0,
    registry: Registry = DEFAULT,
) -> Callable[[H], H]:
    """Offer the decorated function as the handler of `kind` in `version`.

    An `async def` shares its runner process with other ones; a plain `def` gets a process for itself.
    input_schema: JSON Schema (2020-12 unless it says otherwise); what does not fit never reaches the function.
    """
    if not _KIND.fullmatch(kind):
        raise ConfigurationError(f"operation kind {kind!r}: letters, digits, dots, dashes and underscores")
    if not _VERSION.fullmatch(version):
        raise ConfigurationError(f"operation {kind}: version {version!r} is not a version like 1.2.0")
    if max_concurrency < 0:
        raise ConfigurationError(f"operation {kind}: max_concurrency is negative")
    if input_schema is not None:
        payload.encode(dict(input_schema), what=f"input_schema of {kind}")

    def register(handler: H) -> H:
        registry.add(
            Operation(
                kind=kind,
                version=version,
                handler=handler,
                input_schema=input_schema,
                max_concurrency=max_concurrency,
                is_async=is_async(handler),
            )
        )
        return handler

    return register


def is_async(handler: object) -> bool:
    """Whether a call of the handler gives a coroutine: a function, a method or a callable object."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - its kind is asked for, not whether it is there
    )


def load(modules: Iterable[str], registry: Registry = DEFAULT) -> Registry:
    """Import the modules, whose decorators fill the registry."""
    for name in modules:
        importlib.import_module(name)
    return registry


def _place(handler: object) -> str:
    return f"{getattr(handler, '__module__', '?')}.{getattr(handler, '__qualname__', repr(handler))}"


def _same_place(first: object, second: object) -> bool:
    """A module that is imported under two names, or reloaded, defines the same function again."""
    one = getattr(first, "__code__", None)
    other = getattr(second, "__code__", None)
    return one is not None and other is not None and _origin(one) == _origin(other)


def _origin(code: Any) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno
