"""`rara db` against real databases."""

import pytest
from support.command_line import rara


async def test_status_and_migrate_bring_an_empty_database_up_to_date(empty_database_url: str) -> None:
    before = await rara("db", "status", "--database-url", empty_database_url)
    assert before.code == 0
    assert before.lines[0].startswith("0001  runs_and_steps  pending")
    assert "rara db migrate" in before.err
    first = await rara("db", "migrate", env={"RARA_DATABASE_URL": empty_database_url})
    assert first.lines[0] == "0001  runs_and_steps  applied"
    again = await rara("db", "migrate", "--database-url", empty_database_url)
    assert again.out == "the database is up to date\n"
    document = (await rara("db", "status", "--database-url", empty_database_url, "-o", "json")).json
    assert document["is_current"] is True
    assert document["migrations"][0]["state"] == "applied"


@pytest.mark.parametrize(
    ("url", "code", "reason"),
    [
        ("postgresql://rara:hunter2@127.0.0.1:1/rara", 6, "DATABASE_UNREACHABLE"),
        ("mysql://127.0.0.1/rara", 2, "USAGE"),
    ],
)
async def test_a_database_that_cannot_be_used_is_said_without_its_password(
    url: str, code: int, reason: str
) -> None:
    result = await rara("db", "status", "--database-url", url)
    assert result.code == code
    assert result.err.startswith(f"rara: {reason}: ")
    assert "hunter2" not in result.err
    assert result.err.count("\n") == 1


async def test_a_database_that_is_not_there_is_3(empty_database_url: str) -> None:
    head, _, query = empty_database_url.partition("?")
    url = f"{head.rpartition('/')[0]}/missing?{query}"
    result = await rara("db", "status", "--database-url", url)
    assert (result.code, "DATABASE_NOT_FOUND" in result.err) == (3, True)
