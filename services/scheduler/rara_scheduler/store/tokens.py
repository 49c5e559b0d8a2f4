"""Bearer tokens as the database keeps them: by hash."""

from collections.abc import Collection
from dataclasses import dataclass
from uuid import UUID

from rara_scheduler.domain.tokens import Role, Token, allows_kind
from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query


@dataclass(frozen=True, slots=True)
class StoredToken:
    """expires_in_s: by the database's clock, from when it was read; None: it does not expire."""

    token: Token
    hash: bytes
    is_revoked: bool
    expires_in_s: float | None


class TokenStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, token_hash: bytes) -> StoredToken | None:
        """The token with this hash, whatever its state; None: there is none."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("find_token"), token_hash)
        if row is None:
            return None
        token = Token(
            row["token_id"], row["name"], Role(row["role"]), tuple(row["kinds"]), row["executor_kind"]
        )
        return StoredToken(token, bytes(row["token_hash"]), row["is_revoked"], row["expires_in_s"])

    async def valid(self, token_ids: Collection[str]) -> set[str]:
        """Those that are neither revoked nor expired."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("valid_tokens"), [UUID(token_id) for token_id in token_ids])
        return {row["token_id"] for row in rows}

    async def note_use(self, token_ids: Collection[str]) -> None:
        async with self._database.connection() as connection:
            await connection.execute(query("note_token_use"), [UUID(token_id) for token_id in token_ids])

    async def holds_lease(self, step_run_id: str, lease_token: int, token: Token) -> bool:
        """Whether that lease is held by an executor of this token's name.

        Who was dialled came with no token. Its lease is anybody's whose token is for what the lease is for.
        """
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("lease_bearer"), step_run_id, lease_token)
        if row is None:
            return False
        if row["token_name"] is not None or not row["direct"]:
            return bool(row["token_name"] == token.name)
        return allows_kind(token.kinds, row["kind"]) and token.executor_kind in (None, row["executor_kind"])
