"""`rara token` against a real database: made once, listed without its text, gone when revoked."""

import hashlib
import re

import asyncpg
import pytest
from support.command_line import rara


async def test_a_token_is_printed_once_and_stored_as_its_hash(database_url: str) -> None:
    env = {"RARA_DATABASE_URL": database_url}
    made = await rara(
        "token", "create", "lab", "--role", "executor", "--kind", "index.*", "--expires", "90d", env=env
    )
    assert made.code == 0
    text = made.out.strip()
    assert re.fullmatch(r"rara_executor_[0-9A-Za-z_-]{43}", text)
    assert text not in made.err
    listed = await rara("token", "list", "-o", "json", env=env)
    assert text not in listed.out
    (row,) = listed.json
    assert (row["name"], row["role"], row["kinds"], row["state"]) == (
        "lab",
        "executor",
        ["index.*"],
        "active",
    )
    assert "expires_at" in row
    raw = await asyncpg.connect(database_url)
    try:
        stored = await raw.fetchval("select token_hash from rara.token")
        assert stored == hashlib.sha256(text.encode()).digest()
        assert text not in str(await raw.fetch("select * from rara.token"))
    finally:
        await raw.close()


async def test_revoking_ends_all_tokens_of_a_name_once(database_url: str) -> None:
    env = {"RARA_DATABASE_URL": database_url}
    for _ in range(2):
        assert (await rara("token", "create", "ci", "--role", "client", env=env)).code == 0
    other = (await rara("token", "create", "ops", "--role", "operator", "-o", "json", env=env)).json
    revoked = await rara("token", "revoke", "ci", env=env)
    assert (revoked.code, len(revoked.lines)) == (0, 2)
    again = await rara("token", "revoke", "ci", other["token_id"], env=env)
    assert (again.code, "TOKEN_NOT_FOUND" in again.err, other["token_id"] in again.out) == (3, True, True)
    assert (await rara("token", "list", env=env)).out == ""
    states = [row["state"] for row in (await rara("token", "list", "--all", "-o", "json", env=env)).json]
    assert states == ["revoked"] * 3


@pytest.mark.parametrize(
    "arguments",
    [
        ("a b", "--role", "client"),
        ("lab", "--role", "executor"),
        ("lab", "--role", "client", "--kind", "a.b"),
        ("lab", "--role", "executor", "--kind", "a b"),
        ("lab", "--role", "root"),
    ],
)
async def test_a_token_that_cannot_be_is_a_usage_error(database_url: str, arguments: tuple[str, ...]) -> None:
    result = await rara("token", "create", *arguments, env={"RARA_DATABASE_URL": database_url})
    assert (result.code, result.out) == (2, "")
