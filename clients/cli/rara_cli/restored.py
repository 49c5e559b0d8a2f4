"""`rara db restored`: what a database needs that came back from a backup."""

import asyncpg
from rara_scheduler.store import migrate
from rara_scheduler.store.queries import query

from rara_cli.answers import show_one
from rara_cli.dbcheck import refuse_other_schemas
from rara_cli.session import Session

_TIMEOUT_S = 10.0


async def raise_lease_tokens(session: Session, database_url: str) -> None:
    """Let the next lease have a token above every one that was granted since the backup."""
    refuse_other_schemas(await migrate.status(database_url))
    connection = await asyncpg.connect(
        database_url,
        timeout=_TIMEOUT_S,
        command_timeout=_TIMEOUT_S,
        server_settings={"application_name": "rara db restored"},
    )
    try:
        token: int = await connection.fetchval(query("raise_lease_tokens"))
    finally:
        await connection.close(timeout=_TIMEOUT_S)
    show_one(
        session,
        {"lease_tokens_above": str(token)},
        name=str(token),
        lines=lambda: [f"lease tokens go on above {token}"],
    )
