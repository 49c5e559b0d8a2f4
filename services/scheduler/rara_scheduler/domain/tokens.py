"""Bearer tokens: what they look like, what is kept of them, and what their bearers may claim."""

import hashlib
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from rara_scheduler.domain import names

_RANDOM_BYTES: Final = 32
# The prefix lets scanners of code and logs, ours too, know a token when they see one.
_SHAPE: Final = re.compile(r"rara_(client|executor|operator)_[0-9A-Za-z_-]{43}")
_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.@-]{0,62}")


class Role(StrEnum):
    """What a bearer is: starts runs, runs steps, or looks after the whole."""

    CLIENT = "client"
    EXECUTOR = "executor"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Token:
    """What a token stands for.

    name: whose it is; tokens of one name stand for the same bearer, so that one can follow the other.
    kinds: patterns of what an executor may offer. executor_kind: the only one it may claim; None: any.
    """

    token_id: str
    name: str
    role: Role
    kinds: tuple[str, ...] = ()
    executor_kind: str | None = None


def new_token(role: Role) -> str:
    """The text of a new token: 256 random bits."""
    return f"rara_{role}_{secrets.token_urlsafe(_RANDOM_BYTES)}"


def is_token(text: str) -> bool:
    """Whether a text has the shape of a token."""
    return _SHAPE.fullmatch(text) is not None


def token_hash(text: str) -> bytes:
    """What is stored of a token. One SHA-256 is enough: nobody can try 2^256 texts, however fast each is."""
    return hashlib.sha256(text.encode()).digest()


def is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def is_kind_pattern(text: str) -> bool:
    """A kind, `prefix.*` for all kinds below it, or `*` for all."""
    return text == "*" or names.KIND.refuses(text.removesuffix(".*")) is None


def allows_kind(patterns: Iterable[str], kind: str) -> bool:
    return any(
        pattern in ("*", kind) or (pattern.endswith(".*") and kind.startswith(pattern[:-1]))
        for pattern in patterns
    )
