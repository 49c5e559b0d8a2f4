"""A conditional upsert: the row keeps the largest lease token that has written it."""

from collections.abc import Mapping
from typing import Any, Protocol

from rara_executor.sinks.token import Superseded, Tokened, token_of

MAX_IDENTIFIER_BYTES = 63  # PostgreSQL cuts longer ones without an error


class Connection(Protocol):
    """asyncpg's Connection or Pool."""

    async def fetchval(self, query: str, *args: Any) -> Any: ...


async def upsert(
    connection: Connection,
    job: Tokened,
    *,
    table: str,
    key: Mapping[str, object],
    values: Mapping[str, object],
    fence_column: str = "lease_token",
) -> None:
    """Insert the row, or update the one with this key if no newer attempt has written it. Raises Superseded.

    table: perhaps with its schema, as in "results.scores". key: columns with a primary key or unique constraint on
    exactly them. The table has a column `lease_token bigint`; nothing is created here.

    Within a transaction of READ COMMITTED, the default, a writer waits for another one's commit and then looks again.
    """
    query, arguments = upsert_statement(
        token_of(job), table=table, key=key, values=values, fence_column=fence_column
    )
    if await connection.fetchval(query, *arguments) is None:
        raise Superseded(f"table {table}", job.lease_token)


def upsert_statement(
    lease_token: int,
    *,
    table: str,
    key: Mapping[str, object],
    values: Mapping[str, object],
    fence_column: str = "lease_token",
    placeholder: str = "$n",
) -> tuple[str, list[object]]:
    """The statement and its arguments, for other drivers; no row back: superseded.

    placeholder: "$n" as PostgreSQL has it, or "%s" for psycopg and other drivers of the DB-API.
    """
    if not key:
        raise ValueError("key: must name at least one column")
    columns = [*key, *values, fence_column]
    if len(set(columns)) < len(columns):
        raise ValueError(f"columns {', '.join(columns)}: one is there twice")
    if placeholder not in ("$n", "%s"):
        raise ValueError(f"placeholder {placeholder!r}: must be $n or %s")
    names = [_quoted(column, placeholder) for column in columns]
    places = ["%s"] * len(names) if placeholder == "%s" else [f"${n}" for n in range(1, len(names) + 1)]
    held = ".".join(_quoted(part, placeholder) for part in table.split("."))
    fence = names[-1]
    changed = ", ".join(f"{name} = excluded.{name}" for name in names[len(key) :])
    query = (
        f"insert into {held} as held ({', '.join(names)}) values ({', '.join(places)})"  # noqa: S608 - names are quoted
        f" on conflict ({', '.join(names[: len(key)])}) do update set {changed}"
        f" where held.{fence} is null or held.{fence} <= excluded.{fence} returning 1"
    )
    return query, [*key.values(), *values.values(), lease_token]


def _quoted(identifier: str, placeholder: str) -> str:
    if not 0 < len(identifier.encode()) <= MAX_IDENTIFIER_BYTES or "\0" in identifier:
        raise ValueError(f"{identifier!r} is no name of a table or column")
    doubled = identifier.replace('"', '""')
    return f'"{doubled.replace("%", "%%") if placeholder == "%s" else doubled}"'
