"""Bearer tokens for tests, made as `rara token create` makes them."""

from collections.abc import Sequence

import asyncpg
import uuid_utils.compat
from rara_scheduler.domain.tokens import Role, new_token, token_hash
from rara_scheduler.store.queries import query


async def make_token(
    raw: "asyncpg.Connection[asyncpg.Record]",
    role: str,
    *,
    name: str = "somebody",
    kinds: Sequence[str] = ("*",),
    executor_kind: str | None = None,
    expires_s: float | None = None,
) -> str:
    """A new token's text. kinds: of an executor alone."""
    text = new_token(Role(role))
    await raw.fetchval(
        query("create_token"),
        str(uuid_utils.compat.uuid7()),
        name,
        role,
        token_hash(text),
        list(kinds) if role == Role.EXECUTOR else [],
        executor_kind,
        expires_s,
    )
    return text


async def revoke(raw: "asyncpg.Connection[asyncpg.Record]", name: str) -> None:
    assert await raw.fetch(query("revoke_tokens"), [name])


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that carries a token."""
    return (("authorization", f"Bearer {token}"),)
