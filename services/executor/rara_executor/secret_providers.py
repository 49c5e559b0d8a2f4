"""Secret references resolved here, with this process's own credentials."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from rara.v1 import common_pb2

from rara_executor.codes import Code
from rara_executor.errors import JobFailure
from rara_executor.text import valid

MAX_SECRET_BYTES = 64 << 10


class SecretUnresolved(JobFailure):
    """The reference leads nowhere. The message names the reference, never a value."""

    def __init__(self, name: str, provider: str, reference: str, problem: str) -> None:
        super().__init__(Code.SECRET_UNRESOLVED, f"secret {name!r} ({provider}: {reference!r}): {problem}")


def resolve(
    references: Mapping[str, common_pb2.SecretRef],
    *,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The values by the names that the handler asks for. Raises SecretUnresolved.

    env: an environment variable, but none of our own settings. file: a file in `folder`, without its last
    line end. May block on a slow file system.
    """
    return {name: _one(name, reference, folder, environment) for name, reference in references.items()}


def _one(name: str, reference: common_pb2.SecretRef, folder: Path, environment: Mapping[str, str]) -> str:
    def unresolved(problem: str) -> SecretUnresolved:
        return SecretUnresolved(name, reference.provider, reference.name, problem)

    if reference.version:
        raise unresolved("this provider knows no versions")
    match reference.provider:
        case "env":
            if reference.name.startswith("RARA_"):
                raise unresolved("the executor's own settings are no secrets of a step")
            if reference.name not in environment:
                raise unresolved("the variable is not set")
            return _valid(environment[reference.name], unresolved)
        case "file":
            root = folder.resolve()
            path = (root / reference.name).resolve()
            if not path.is_relative_to(root):
                raise unresolved(f"it leads out of {root}")
            try:
                with path.open("rb") as file:
                    data = file.read(MAX_SECRET_BYTES + 1)
                if len(data) > MAX_SECRET_BYTES:
                    raise unresolved(f"over {MAX_SECRET_BYTES} bytes")
                return (
                    _valid(data.decode("utf-8", "surrogateescape"), unresolved)
                    .removesuffix("\n")
                    .removesuffix("\r")
                )
            except OSError as error:
                raise unresolved(error.strerror or type(error).__name__) from error
        case _:
            raise unresolved("no such provider here; there are env and file")


def _valid(value: str, unresolved: Callable[[str], SecretUnresolved]) -> str:
    """Python keeps bytes that are no UTF-8 as lone surrogates, which no JSON can carry to the handler."""
    if not value.isascii() and valid(value) != value:
        raise unresolved("it is not UTF-8")
    return value
