"""Bearer tokens in the database, and on the screen. The text of a token is printed once and kept nowhere."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import asyncpg
import uuid_utils.compat
from rara_scheduler.domain import tokens
from rara_scheduler.store.queries import query

from rara_cli.answers import print_document
from rara_cli.answers import width as screen_width
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json, dumps
from rara_cli.session import Session
from rara_cli.tables import Column, render

_CONNECT_TIMEOUT_S = 10.0
_HELP = "rara token create --help"


async def create_token(
    session: Session,
    database_url: str,
    *,
    name: str,
    role: str,
    kinds: Sequence[str],
    executor_kind: str | None,
    expires_s: float | None,
) -> None:
    """Store a new token's hash and print the token. Raises CommandError for what cannot be."""
    _check(name, role, kinds, executor_kind)
    text = tokens.new_token(tokens.Role(role))
    token_id = str(uuid_utils.compat.uuid7())
    connection = await _connect(database_url)
    try:
        expires_at: datetime | None = await connection.fetchval(
            query("create_token"),
            token_id,
            name,
            role,
            tokens.token_hash(text),
            list(kinds),
            executor_kind,
            expires_s,
        )
    finally:
        await connection.close()
    if session.output in ("json", "jsonl"):
        shown = {"token_id": token_id, "name": name, "role": role, "token": text}
        print_document(shown if expires_at is None else shown | {"expires_at": expires_at.isoformat()})
        return
    print(text)
    until = "" if expires_at is None else f", until {expires_at.isoformat(timespec='seconds')}"
    session.note(f"token {token_id} for {name} ({role}{until}); it is not shown again")


def _check(name: str, role: str, kinds: Sequence[str], executor_kind: str | None) -> None:
    if not tokens.is_name(name):
        problem = f"NAME: {name!r} must be 1 to 63 letters, digits and . _ - @, a letter or digit first"
        raise CommandError(Exit.USAGE, "USAGE", problem, _HELP)
    if role != tokens.Role.EXECUTOR and (kinds or executor_kind):
        problem = f"--kind and --executor-kind are for executors, not for a {role}"
        raise CommandError(Exit.USAGE, "USAGE", problem, _HELP)
    if role == tokens.Role.EXECUTOR and not kinds:
        problem = "--kind: an executor's token names what it may offer; '*' allows all"
        raise CommandError(Exit.USAGE, "USAGE", problem, _HELP)
    for kind in kinds:
        if not tokens.is_kind_pattern(kind):
            raise CommandError(
                Exit.USAGE, "USAGE", f"--kind: {kind!r} is neither a kind nor PREFIX.* nor *", _HELP
            )


async def show_tokens(session: Session, database_url: str, *, with_ended: bool) -> None:
    connection = await _connect(database_url)
    try:
        rows = [dict(row) for row in await connection.fetch(query("list_tokens"), with_ended)]
    finally:
        await connection.close()
    match session.output:
        case "json":
            print_document([_view(row) for row in rows])
        case "jsonl":
            for row in rows:
                print(dumps(_view(row)))
        case "name":
            for row in rows:
                print(row["token_id"])
        case _ if not rows:
            session.note("no tokens; make one: rara token create NAME --role client")
        case _:
            shown = [c for c in _COLUMNS if session.output == "wide" or not c.wide_only]
            for line in render(rows, shown, width=screen_width(session), in_color=session.in_color):
                print(line)


async def revoke_tokens(session: Session, database_url: str, wanted: Sequence[str]) -> None:
    """Raises CommandError when one of those named is not there, or revoked already; the others are revoked."""
    connection = await _connect(database_url)
    try:
        rows = await connection.fetch(query("revoke_tokens"), [_id_or_name(text) for text in wanted])
    finally:
        await connection.close()
    revoked = {value for row in rows for value in row.values()}
    if session.output == "json":
        print_document([dict(row) for row in rows])
    else:
        for row in rows:
            print(
                row["token_id"] if session.output == "name" else f"{row['token_id']}  {row['name']}  revoked"
            )
    if missing := [text for text in wanted if _id_or_name(text) not in revoked]:
        raise CommandError(
            Exit.NOT_FOUND,
            "TOKEN_NOT_FOUND",
            f"no token in use has the id or name {', '.join(missing)}",
            "rara token list --all",
        )


def _id_or_name(text: str) -> str:
    try:
        return str(UUID(text))
    except ValueError:
        return text


async def _connect(database_url: str) -> "asyncpg.Connection[asyncpg.Record]":
    return await asyncpg.connect(database_url, timeout=_CONNECT_TIMEOUT_S)


def _view(row: Mapping[str, Any]) -> Json:
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in row.items()
        if value is not None
    }


def _instant(value: datetime | None) -> str:
    return "" if value is None else value.isoformat(timespec="seconds")


_COLUMNS: list[Column[dict[str, Any]]] = [
    Column("ID", lambda row: str(row["token_id"]), is_whole=True),
    Column("NAME", lambda row: str(row["name"])),
    Column("ROLE", lambda row: str(row["role"])),
    Column("STATE", lambda row: str(row["state"])),
    Column("KINDS", lambda row: ", ".join(row["kinds"])),
    Column("EXPIRES", lambda row: _instant(row["expires_at"]) or "never"),
    Column("LAST USED", lambda row: _instant(row["last_used_at"]) or "never"),
    Column("CREATED", lambda row: _instant(row["created_at"]), wide_only=True),
    Column("EXECUTOR KIND", lambda row: row["executor_kind"] or "any", wide_only=True),
]
