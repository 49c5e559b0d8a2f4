"""Two releases on one database: the older goes on working with a schema that a newer one has expanded.

The previous release is the newest tag `v*` before this commit, or what RARA_PREVIOUS_RELEASE names.
"""

import io
import os
import shutil
import subprocess
import tarfile
import tomllib
from pathlib import Path

import pytest
from rara_scheduler.store.migrate import load_migrations, migrate
from rara_scheduler.store.queries import database_folder
from rara_testing.processes import Processes
from support.command_line import rara
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

ROOT = Path(__file__).resolve().parents[2]
EXPAND = """-- compatible-from: {known}
-- migrate:up
alter table rara.workflow_run add column priority int not null default 0;
create table rara.next_release (workflow_run_id uuid primary key);
"""
CONTRACT = """-- migrate:up
alter table rara.workflow_run drop column failed_step_run_id;
"""


def next_release(folder: Path, text: str) -> Path:
    """The migrations of this version and one more."""
    migrations = folder / "migrations"
    shutil.copytree(database_folder() / "migrations", migrations)
    (migrations / "9999_next.sql").write_text(text.format(known=load_migrations()[-1].version))
    return migrations


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def previous_release() -> str:
    """Its name for Git; skips where there is none."""
    if named := os.environ.get("RARA_PREVIOUS_RELEASE"):
        return named
    try:
        return git("describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^").decode().strip()
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("no release before this one: no tag v*, and no RARA_PREVIOUS_RELEASE")


def unpacked(release: str, folder: Path) -> dict[str, str]:
    """The environment in which Python finds that release's packages before ours."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", release))) as archive:
        archive.extractall(folder, filter="data")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["dev-mode-dirs"]
    return {"PYTHONPATH": os.pathsep.join(str(folder / package) for package in packages)}


async def run_to_its_end(
    processes: Processes, database_url: str, folder: Path, env: dict[str, str], *, migrates: bool
) -> tuple[str, str]:
    """A run of three steps by a scheduler and an executor with that environment; its state, the scheduler's log."""
    async with spawned_scheduler(processes, database_url, folder, env=env, migrate=migrates) as scheduler:
        await spawn_executor(
            processes, scheduler.address, folder, module="rara_testing.probes", prestart=1, env=env
        )
        world = scheduler.world
        await world.define("beside", {name: {"kind": "probe.echo"} for name in ("a", "b", "c")})
        state = await world.until_run(await world.start("beside"), "succeeded", "failed")
        assert scheduler.process is not None
        scheduler.process.terminate()
        assert await scheduler.process.wait() == 0
        return state, scheduler.process.stderr.read_text()


async def test_this_release_works_on_a_schema_that_the_next_one_expanded(
    empty_database_url: str, tmp_path: Path
) -> None:
    await migrate(empty_database_url, directory=next_release(tmp_path, EXPAND))
    async with Processes(tmp_path) as processes:
        state, logged = await run_to_its_end(processes, empty_database_url, tmp_path, {}, migrates=True)
    assert state == "succeeded"
    assert "schema.newer" in logged
    shown = await rara("db", "status", "--database-url", empty_database_url)
    assert shown.lines[-1].startswith("9999  next  newer")
    assert "goes on working with it" in shown.err
    assert (await rara("db", "migrate", "--database-url", empty_database_url)).out == (
        "the database is up to date\n"
    )
    # What it cannot know in full it does not judge, and removes nothing from.
    refused = await rara("db", "check", "--database-url", empty_database_url)
    assert (refused.code, "SCHEMA_TOO_NEW" in refused.err) == (5, True)


async def test_this_release_refuses_a_schema_that_the_next_one_contracted(
    empty_database_url: str, tmp_path: Path
) -> None:
    await migrate(empty_database_url, directory=next_release(tmp_path, CONTRACT))
    async with Processes(tmp_path) as processes:
        process = await processes.start(
            "scheduler",
            ["rara-scheduler"],
            env={
                "RARA_DATABASE_URL": empty_database_url,
                "RARA_LISTEN": "127.0.0.1:0",
                "RARA_BLOB_STORE": f"file://{tmp_path / 'blobs'}",
            },
        )
        assert await process.wait() != 0
    assert "SCHEMA_TOO_NEW" in process.stderr.read_text()
    assert "9999" in process.stderr.read_text()
    shown = await rara("db", "status", "--database-url", empty_database_url)
    assert shown.lines[-1].startswith("9999  next  incompatible")


async def test_the_previous_release_works_on_this_schema(database_url: str, tmp_path: Path) -> None:
    release = tmp_path / "previous"
    release.mkdir()
    env = unpacked(previous_release(), release)
    async with Processes(tmp_path) as processes:
        state, _ = await run_to_its_end(processes, database_url, tmp_path, env, migrates=False)
    assert state == "succeeded"
    checked = await rara("db", "check", "--database-url", database_url)
    assert (checked.code, checked.err) == (0, "")
