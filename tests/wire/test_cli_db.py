"""`rara db` against real databases."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest
from rara_scheduler.store.check import RULES
from support.command_line import rara
from support.mixed_history import BIG, PART, mixed_history
from support.store_world import store_world


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


async def test_a_check_names_what_is_broken_and_exits_with_7(database_url: str, tmp_path: Path) -> None:
    where = ("db", "check", "--database-url", database_url)
    async with store_world(database_url) as world:
        history = await mixed_history(world)
        clean = await rara(*where, "--overdue", "1h", "--max-attempts", "3")
        assert (clean.err, clean.code) == ("", 0)
        assert clean.out == f"history breaks none of {len(RULES)} rules\n"

        await world.raw.execute(
            "update rara.workflow_run set steps_total = steps_total + 1 where ended_at is null"
        )
        await world.raw.execute("delete from rara.ready where step_run_id = $1", history.ids["fresh.b"])
        broken = await rara(*where)
        assert broken.code == 7
        assert broken.lines[1].split() == ["step_nowhere", history.ids["fresh.b"], '{"step_name":"b"}']
        wide = await rara(*where, "-o", "wide")
        assert wide.lines[1].split()[:3] == ["step_nowhere", history.ids["fresh.b"], history.ids["fresh"]]
        assert "run_total: 3 against: a run has all of its steps\n" in broken.err
        document = (await rara(*where, "-o", "json", "--limit", "1")).json
        assert (document["is_clean"], document["total"]) == (False, 4)
        assert {rule["name"]: rule["total"] for rule in document["rules"] if rule["total"]} == {
            "run_total": 3,
            "step_nowhere": 1,
        }
        assert len(document["violations"]) == 2
        lines = (await rara(*where, "-o", "jsonl")).lines
        assert {json.loads(line)["rule"] for line in lines} == {"run_total", "step_nowhere"}
        assert (await rara(*where, "-o", "name")).lines == ["step_nowhere", "run_total"]


@dataclass(frozen=True)
class Damage:
    problem: str
    size_finds_it: bool
    plant: Callable[[Path], object]


@pytest.mark.parametrize(
    "damage",
    [
        Damage("missing", True, Path.unlink),
        Damage("size", True, lambda blob: os.truncate(blob, 10)),
        Damage("digest", False, lambda blob: blob.write_bytes(BIG[:-1] + bytes([BIG[-1] ^ 1]))),
    ],
    ids=lambda damage: damage.problem,
)
async def test_a_check_finds_blobs_whose_bytes_are_not_theirs(
    database_url: str, tmp_path: Path, damage: Damage
) -> None:
    where = ("db", "check", "--database-url", database_url, "-o", "json")
    env = {"RARA_BLOB_STORE": f"file://{tmp_path}"}
    async with store_world(database_url) as world:
        await mixed_history(world)
        stored = {}
        for data in (BIG, PART):
            digest = hashlib.sha256(data).hexdigest()
            blob = stored[digest] = tmp_path / "sha256" / digest[:2] / digest[2:]
            blob.parent.mkdir(parents=True)
            blob.write_bytes(data)
        (tmp_path / "sha256" / "ab").mkdir(exist_ok=True)
        (tmp_path / "sha256" / "ab" / ("0" * 62)).write_bytes(b"bytes without a row are no violation")
        clean = (await rara(*where, "--blobs", "digest", env=env)).json
        assert (clean["is_clean"], clean["rules"][-1]["name"]) == (True, "blob_bytes")

        digest = hashlib.sha256(BIG).hexdigest()
        damage.plant(stored[digest])
        found = await rara(*where, "--blobs", "digest", env=env)
        assert found.code == 7
        (violation,) = found.json["violations"]
        assert violation["rule"] == "blob_bytes"
        assert violation["step_run_id"] or violation["workflow_run_id"]
        assert (violation["facts"]["sha256"], violation["facts"]["problem"]) == (digest, damage.problem)
        by_default = await rara(*where, env=env)
        assert by_default.code == (7 if damage.size_finds_it else 0)
        assert (await rara(*where, "--blobs", "none", env=env)).json["is_clean"]


async def test_a_check_of_blobs_needs_a_store_that_is_there(database_url: str, tmp_path: Path) -> None:
    where = ("db", "check", "--database-url", database_url)
    without = await rara(*where, "--blobs", "size")
    assert (without.code, "--blobs size needs --blob-store" in without.err) == (2, True)
    nowhere = await rara(*where, "--blob-store", f"file://{tmp_path}/none")
    assert (nowhere.code, "its folder is gone" in nowhere.err) == (6, True)
    assert not (tmp_path / "none").exists()
    strange = await rara(*where, "--blob-store", "ftp://somewhere")
    assert strange.code == 2


async def test_a_check_needs_this_versions_schema_and_ends_after_its_timeout(
    empty_database_url: str, database_url: str
) -> None:
    result = await rara("db", "check", "--database-url", empty_database_url)
    assert result.code == 5
    assert result.err.startswith("rara: SCHEMA_TOO_OLD: ")
    assert "rara db migrate" in result.err
    blocker = await asyncpg.connect(database_url)
    try:
        async with blocker.transaction():
            await blocker.execute("lock table rara.lineage")
            result = await rara("db", "check", "--database-url", database_url, "--timeout", "0.2")
    finally:
        await blocker.close()
    assert result.code == 8
    assert result.err.startswith("rara: CHECK_TIMEOUT: ")
