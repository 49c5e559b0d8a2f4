"""The migration runner: order, one at a time, and what it refuses."""

import asyncio
import sys
from pathlib import Path

import asyncpg
import pytest
from rara_scheduler.domain.errors import Code
from rara_scheduler.store import migrate as runner
from rara_scheduler.store.migrate import (
    DatabaseNewer,
    MigrationEdited,
    MigrationFileInvalid,
    MigrationLocked,
    MigrationOutOfOrder,
    load_migrations,
    migrate,
    status,
)

PROCESSES = 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three migrations: a table, an index built without a lock, and a function with semicolons in it."""
    write(
        tmp_path, "0001_book", "create table book (title text not null);\n-- migrate:down\ndrop table book;"
    )
    write(
        tmp_path,
        "0002_book_title",
        "create index concurrently if not exists book_title on book (title);",
        options=" transaction:false",
    )
    write(
        tmp_path,
        "0003_shout",
        "create function shout(text) returns text language plpgsql as $$ begin return upper($1); end $$;\n"
        "insert into book values (shout('a;b'));",
    )
    return tmp_path


def write(folder: Path, name: str, sql: str, *, options: str = "") -> Path:
    path = folder / f"{name}.sql"
    path.write_text(f"-- migrate:up{options}\n{sql}\n")
    return path


def use_windows_line_ends(folder: Path) -> None:
    for path in folder.glob("*.sql"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


async def execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def fetch(url: str, statement: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(url)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


async def test_an_empty_database_gets_every_migration_in_order(empty_database_url: str, folder: Path) -> None:
    applied = await migrate(empty_database_url, directory=folder)

    assert [(each.version, each.name) for each in applied] == [
        ("0001", "book"),
        ("0002", "book_title"),
        ("0003", "shout"),
    ]
    assert await fetch(empty_database_url, "select title from book") == [("A;B",)]
    rows = await fetch(
        empty_database_url, "select version, name, sha256 from rara.schema_migration order by 1"
    )
    assert rows == [(each.version, each.name, each.sha256) for each in load_migrations(folder)]


async def test_a_current_database_is_left_alone(empty_database_url: str, folder: Path) -> None:
    await migrate(empty_database_url, directory=folder)

    assert await migrate(empty_database_url, directory=folder) == []
    now = await status(empty_database_url, directory=folder)
    assert now.is_current
    assert [each.version for each in now.applied] == ["0001", "0002", "0003"]


async def test_the_status_of_an_empty_database_changes_nothing(empty_database_url: str, folder: Path) -> None:
    now = await status(empty_database_url, directory=folder)

    assert [each.version for each in now.pending] == ["0001", "0002", "0003"]
    assert (now.applied, now.unknown, now.is_current) == ((), (), False)
    assert await fetch(empty_database_url, "select 1 from pg_namespace where nspname = 'rara'") == []


async def test_a_current_database_needs_no_right_to_create(empty_database_url: str, folder: Path) -> None:
    await migrate(empty_database_url, directory=folder)
    await fetch(empty_database_url, "create role reader login")
    try:
        await fetch(empty_database_url, "grant usage on schema rara to reader")
        await fetch(empty_database_url, "grant select on rara.schema_migration to reader")

        assert await migrate(empty_database_url.replace("rara@", "reader@"), directory=folder) == []
    finally:
        await fetch(empty_database_url, "drop owned by reader")
        await fetch(empty_database_url, "drop role reader")


async def test_four_processes_at_once_apply_each_migration_once(
    empty_database_url: str, folder: Path
) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from rara_scheduler.store.migrate import migrate;"
        "print('ready', flush=True); sys.stdin.readline();"
        "print(len(asyncio.run(migrate(sys.argv[1], directory=Path(sys.argv[2])))))"
    )
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            program,
            empty_database_url,
            str(folder),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(PROCESSES)
    ]
    async with asyncio.timeout(60):
        for process in processes:
            assert process.stdout is not None
            assert await process.stdout.readline() == b"ready\n"
        outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))

    assert [(process.returncode, error) for process, (_, error) in zip(processes, outputs, strict=True)] == [
        (0, b"")
    ] * PROCESSES
    assert sorted(int(output) for output, _ in outputs) == [0, 0, 0, 3]
    assert await fetch(empty_database_url, "select count(*) from book") == [(1,)]
    assert await fetch(
        empty_database_url, "select indisvalid from pg_index where indexrelid = 'book_title'::regclass"
    ) == [(True,)]


async def test_an_edited_file_is_refused(empty_database_url: str, folder: Path) -> None:
    await migrate(empty_database_url, directory=folder)
    write(folder, "0001_book", "create table book (title text, author text);")

    for call in (migrate, status):
        with pytest.raises(
            MigrationEdited, match="migration 0001 was edited after it had been applied"
        ) as refused:
            await call(empty_database_url, directory=folder)
        assert refused.value.code == "SCHEMA_EDITED"


async def test_other_line_ends_are_no_edit(empty_database_url: str, folder: Path) -> None:
    await migrate(empty_database_url, directory=folder)
    use_windows_line_ends(folder)

    assert (await status(empty_database_url, directory=folder)).is_current


async def test_a_database_newer_than_the_code_is_refused(empty_database_url: str, folder: Path) -> None:
    await migrate(empty_database_url, directory=folder)
    (folder / "0003_shout.sql").unlink()
    write(folder, "0004_more", "create table more ();")

    with pytest.raises(DatabaseNewer, match="can work with: migration 0003") as refused:
        await migrate(empty_database_url, directory=folder)
    assert refused.value.code is Code.SCHEMA_TOO_NEW
    now = await status(empty_database_url, directory=folder)
    assert [each.version for each in now.incompatible] == ["0003"]
    assert await fetch(empty_database_url, "select to_regclass('more')") == [(None,)]


async def test_an_index_whose_build_gave_up_is_built_anew(empty_database_url: str, folder: Path) -> None:
    write(folder, "0004_shelf", "create table rara.shelf (title text);")
    await migrate(empty_database_url, directory=folder)
    write(
        folder,
        "0005_shelf_title",
        "create index concurrently if not exists shelf_title on rara.shelf (title);",
        options=" transaction:false",
    )
    writer = await asyncpg.connect(empty_database_url)
    try:
        async with writer.transaction():
            await writer.execute("insert into rara.shelf values ('a')")
            with pytest.raises(MigrationLocked, match="migrate again"):
                await migrate(empty_database_url, directory=folder, wait_s=0.5)
    finally:
        await writer.close()
    valid = "select indisvalid from pg_index where indexrelid = 'rara.shelf_title'::regclass"
    assert await fetch(empty_database_url, valid) == [(False,)]
    (applied,) = await migrate(empty_database_url, directory=folder)
    assert applied.version == "0005"
    assert await fetch(empty_database_url, valid) == [(True,)]


@pytest.mark.parametrize(("compatible_from", "works"), [("0002", True), ("0001", True), ("0003", False)])
async def test_older_code_works_on_where_a_migration_says_from_which_one(
    empty_database_url: str, folder: Path, compatible_from: str, works: bool
) -> None:
    newest = folder / "0004_more.sql"
    newest.write_text(f"-- compatible-from: {compatible_from}\n-- migrate:up\ncreate table more ();\n")
    await migrate(empty_database_url, directory=folder)
    newest.unlink()
    (folder / "0003_shout.sql").unlink()
    await execute(
        empty_database_url, "update rara.schema_migration set compatible_from = '0002' where version = '0003'"
    )

    now = await status(empty_database_url, directory=folder)
    assert [each.version for each in now.unknown] == ["0003", "0004"]
    assert [each.version for each in now.incompatible] == ([] if works else ["0004"])
    if works:
        assert await migrate(empty_database_url, directory=folder) == []
    else:
        with pytest.raises(DatabaseNewer, match="migration 0004;"):
            await migrate(empty_database_url, directory=folder)


async def test_a_database_from_before_compatibility_was_kept_gets_its_column(
    empty_database_url: str, folder: Path
) -> None:
    newest = write(folder, "0004_more", "create table more ();")
    text = newest.read_text()
    newest.unlink()
    await migrate(empty_database_url, directory=folder)
    await execute(empty_database_url, "alter table rara.schema_migration drop column compatible_from")
    assert (await status(empty_database_url, directory=folder)).is_current
    newest.write_text(f"-- compatible-from: 0003\n{text}")
    await migrate(empty_database_url, directory=folder)
    assert await fetch(
        empty_database_url, "select version, compatible_from from rara.schema_migration order by 1"
    ) == [("0001", None), ("0002", None), ("0003", None), ("0004", "0003")]


async def test_a_file_that_comes_too_late_is_refused(empty_database_url: str, folder: Path) -> None:
    path = folder / "0002_book_title.sql"
    text = path.read_text()
    path.unlink()
    await migrate(empty_database_url, directory=folder)
    path.write_text(text)

    with pytest.raises(MigrationOutOfOrder, match="migration 0002 was not applied, but 0003 was"):
        await migrate(empty_database_url, directory=folder)


async def test_a_migration_that_fails_leaves_nothing_and_keeps_the_earlier_ones(
    empty_database_url: str, folder: Path
) -> None:
    write(folder, "0003_shout", "create table half (); select 1 / 0;")

    with pytest.raises(asyncpg.DivisionByZeroError):
        await migrate(empty_database_url, directory=folder)

    assert await fetch(empty_database_url, "select to_regclass('half')") == [(None,)]
    assert [each.version for each in (await status(empty_database_url, directory=folder)).pending] == ["0003"]
    write(folder, "0003_shout", "create table whole ();")
    assert [each.version for each in await migrate(empty_database_url, directory=folder)] == ["0003"]


async def test_the_wait_for_another_process_has_an_end(empty_database_url: str, folder: Path) -> None:
    holder = await asyncpg.connect(empty_database_url)
    try:
        await holder.execute("select pg_advisory_lock($1)", runner.LOCK_KEY)
        with pytest.raises(MigrationLocked, match=r"another process was migrating this database for 0\.3 s"):
            await migrate(empty_database_url, directory=folder, wait_s=0.3)
    finally:
        await holder.close()


async def test_a_locked_table_is_tried_again_and_blocks_nobody_for_long(
    empty_database_url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await migrate(empty_database_url, directory=folder)
    write(folder, "0004_wide", "alter table book add column author text;")
    monkeypatch.setattr(runner, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(runner, "LOCK_RETRY_S", 0.05)
    reader = await asyncpg.connect(empty_database_url)
    try:
        transaction = reader.transaction()
        await transaction.start()
        await reader.execute("select * from book")
        with pytest.raises(MigrationLocked, match=r"migration 0004 waited for a lock for 0\.3 s"):
            await migrate(empty_database_url, directory=folder, wait_s=0.3)

        migrating = asyncio.create_task(migrate(empty_database_url, directory=folder, wait_s=30))
        await transaction.rollback()
        assert [each.version for each in await migrating] == ["0004"]
    finally:
        await reader.close()


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("1_book.sql", "-- migrate:up\nselect 1;\n", "1_book.sql: a migration is called NNNN_name.sql"),
        ("0001_book.sql", "select 1;\n", "0001_book.sql: no line `-- migrate:up`"),
        ("0001_book.sql", "-- migrate:up\n\n-- migrate:down\nselect 1;", "0001_book.sql: nothing after"),
        ("0002_book.sql", "-- compatible-from: 1\n-- migrate:up\nselect 1;", "not a number of a migration"),
        ("0002_book.sql", "-- compatible-from: 0002\n-- migrate:up\nselect 1;", "not name an earlier one"),
        ("0001_book.sql", "-- migrate:up transaktion:false\nselect 1;", "unknown option in"),
    ],
)
def test_a_file_that_cannot_be_applied_is_named(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(MigrationFileInvalid, match=complaint):
        load_migrations(tmp_path)


def test_two_files_with_one_number_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "0001_one", "select 1;")
    write(tmp_path, "0001_two", "select 2;")

    with pytest.raises(MigrationFileInvalid, match="two migrations have the number 0001"):
        load_migrations(tmp_path)


async def test_the_real_migrations_build_the_schema(database_url: str) -> None:
    now = await status(database_url)

    assert now.is_current
    assert [each.version for each in now.applied] == [each.version for each in load_migrations()]
    assert await fetch(database_url, "select count(*) from rara.workflow_run") == [(0,)]


def test_every_migration_of_today_says_how_old_the_code_beside_it_may_be() -> None:
    """From the first that knew the line; one that contracts is named here, with its release."""
    contracts: set[str] = set()
    said = {each.version for each in load_migrations() if each.compatible_from is not None}
    expected = {each.version for each in load_migrations() if each.version >= "0010"}
    assert said == expected - contracts
