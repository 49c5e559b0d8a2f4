"""Bring a database to the schema that this version of the code needs.

Migrations are the files `db/migrations/NNNN_name.sql` in dbmate's format: SQL after a line `-- migrate:up`,
optionally followed by `-- migrate:down`, which is never run here. A file is one transaction, unless its first
line says `-- migrate:up transaction:false`; such a file holds exactly one statement, written so that it may be
repeated (`create index concurrently if not exists`), since nothing ties it to the row that records it.

A file that only adds (expands) says with a line `-- compatible-from: NNNN` how old code may be that goes on working
beside it: code whose newest migration is NNNN or later. A release that removes (contracts) has no such line.
"""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import asyncpg

from rara_scheduler.domain.errors import Code
from rara_scheduler.store.queries import database_folder

# One number for all versions of Rara: whoever migrates this database holds this advisory lock.
LOCK_KEY = 0x52415241_4D494752
LOCK_POLL_S = 0.2
CONNECT_TIMEOUT_S = 10.0
# Of our questions. A path that swallowed the connection would otherwise keep a start waiting for ever.
ANSWER_TIMEOUT_S = 10.0
# Of a migration itself, which may build an index over everything.
MIGRATION_TIMEOUT_S = 24 * 3600.0
# A DDL statement that waits for its lock makes everybody behind it wait too: give way soon, try again.
LOCK_TIMEOUT_S = 3.0
LOCK_RETRY_S = 0.5

_FILE_NAME = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
_UP = re.compile(r"^-- migrate:up(?P<options>[^\n]*)\n", re.MULTILINE)
_COMPATIBLE = re.compile(r"^-- compatible-from:[ ]*(?P<version>[^\n]*)\n", re.MULTILINE)
_DOWN = re.compile(r"^-- migrate:down[^\n]*(\n|\Z)", re.MULTILINE)


class MigrationError(Exception):
    """The database was not brought to the schema of this version. `code` is stable, the text is for people."""

    code: str


class MigrationFileInvalid(MigrationError):
    """A file in the migrations folder is not one that can be applied."""

    code = "SCHEMA_FILE_INVALID"


class MigrationEdited(MigrationError):
    """A file was changed after it had been applied: what the database holds is unknown."""

    code = "SCHEMA_EDITED"

    def __init__(self, version: str) -> None:
        super().__init__(
            f"migration {version} was edited after it had been applied: restore the file, add a new migration"
        )


class DatabaseNewer(MigrationError):
    """The database was migrated by a version that knows more: this one must not write to it."""

    code = Code.SCHEMA_TOO_NEW

    def __init__(self, versions: Sequence[str]) -> None:
        super().__init__(
            f"the database is newer than this version of rara can work with: migration {', '.join(versions)};"
            " upgrade rara"
        )


class MigrationOutOfOrder(MigrationError):
    """A file that was never applied comes before one that was."""

    code = "SCHEMA_OUT_OF_ORDER"

    def __init__(self, version: str, newest: str) -> None:
        super().__init__(f"migration {version} was not applied, but {newest} was: give it a later number")


class MigrationLocked(MigrationError):
    """Another process kept the migration lock, or the tables, for the whole wait."""

    code = "SCHEMA_LOCKED"

    def __init__(self, what: str, wait_s: float) -> None:
        super().__init__(f"{what} for {wait_s:g} s: gave up; migrate again, and it goes on from there")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: its number, its name, the digest of its text (hex) and the SQL to run.

    compatible_from: code that knows the migrations up to this number works on with it; none: no older code does.
    """

    version: str
    name: str
    sha256: str
    sql: str
    in_transaction: bool
    compatible_from: str | None


@dataclass(frozen=True, slots=True)
class AppliedMigration:
    """One row of rara.schema_migration."""

    version: str
    name: str
    sha256: str
    applied_at: datetime
    compatible_from: str | None


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """Where a database stands. `unknown` is what it has and this version does not know; with those of it that are
    `incompatible` this version cannot work."""

    applied: tuple[AppliedMigration, ...]
    pending: tuple[Migration, ...]
    unknown: tuple[AppliedMigration, ...]
    incompatible: tuple[AppliedMigration, ...]

    @property
    def is_current(self) -> bool:
        return not self.pending and not self.unknown


def load_migrations(directory: Path | None = None) -> tuple[Migration, ...]:
    """All files in order of their number. Raises MigrationFileInvalid."""
    directory = directory or database_folder() / "migrations"
    found: dict[str, Migration] = {}
    for path in sorted(directory.glob("*.sql")):
        migration = _parse(path)
        if migration.version in found:
            raise MigrationFileInvalid(f"two migrations have the number {migration.version}")
        found[migration.version] = migration
    if not found:
        raise MigrationFileInvalid(f"no migrations in {directory}")
    return tuple(found.values())


async def status(dsn: str, *, directory: Path | None = None) -> MigrationStatus:
    """Compare a database with the files. Changes nothing; raises MigrationEdited."""
    known = load_migrations(directory)
    async with _connect(dsn) as connection:
        return await _status(connection, known)


async def migrate(dsn: str, *, wait_s: float = 60, directory: Path | None = None) -> list[Migration]:
    """Apply what is pending, in order, and return it: empty where the database was current.

    dsn: of PostgreSQL itself. The lock lives as long as its session, which a pooler in transaction mode breaks.
    wait_s: longest wait for another process that migrates, or for tables that others hold locked.

    Any number of processes may call this at once: one applies, the others find nothing to do. Raises
    MigrationEdited, DatabaseNewer, MigrationOutOfOrder, MigrationLocked, MigrationFileInvalid.
    """
    known = load_migrations(directory)
    deadline = asyncio.get_running_loop().time() + wait_s
    async with _connect(dsn) as connection:
        # Without a look first, a role that may not create schemas could not even start on a current database.
        if not _pending(await _status(connection, known)):
            return []
        async with _lock(connection, deadline, wait_s):
            await connection.execute(_BOOKKEEPING)
            pending = _pending(await _status(connection, known))
            for migration in pending:
                await _apply(connection, migration, deadline, wait_s)
            return pending


# Digests of texts that did the same, from before the first release: databases that were made with them are as good.
FORMER = {
    "0002": "10ba3f6fc9c50c9691d849519faf94fb0a0980d9290968643fd875f48b0a3ab4"
}  # it asked for a superuser

_BOOKKEEPING = """
    create schema if not exists rara;
    create table if not exists rara.schema_migration (
        version text primary key,
        name text not null,
        sha256 text not null,
        applied_at timestamptz not null default now()
    );
    alter table rara.schema_migration add column if not exists compatible_from text;
"""


def _parse(path: Path) -> Migration:
    matched = _FILE_NAME.fullmatch(path.name)
    if matched is None:
        raise MigrationFileInvalid(f"{path.name}: a migration is called NNNN_name.sql")
    # A checkout that rewrites line ends must not look like an edit.
    text = path.read_bytes().replace(b"\r\n", b"\n").decode("utf-8")
    up = _UP.search(text)
    if up is None:
        raise MigrationFileInvalid(f"{path.name}: no line `-- migrate:up`")
    options = up["options"].split()
    if any(option not in ("transaction:true", "transaction:false") for option in options):
        raise MigrationFileInvalid(f"{path.name}: unknown option in `-- migrate:up {' '.join(options)}`")
    compatible = _COMPATIBLE.search(text, 0, up.start())
    if compatible and not re.fullmatch(r"\d{4}", compatible["version"]):
        raise MigrationFileInvalid(f"{path.name}: not a number of a migration: `{compatible[0].strip()}`")
    if compatible and compatible["version"] >= matched["version"]:
        raise MigrationFileInvalid(f"{path.name}: `{compatible[0].strip()}` does not name an earlier one")
    down = _DOWN.search(text, up.end())
    sql = text[up.end() : down.start() if down else len(text)]
    if not sql.strip():
        raise MigrationFileInvalid(f"{path.name}: nothing after `-- migrate:up`")
    return Migration(
        version=matched["version"],
        name=matched["name"],
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        sql=sql,
        in_transaction="transaction:false" not in options,
        compatible_from=compatible["version"] if compatible else None,
    )


@asynccontextmanager
async def _connect(dsn: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(
        dsn,
        timeout=CONNECT_TIMEOUT_S,
        command_timeout=ANSWER_TIMEOUT_S,
        statement_cache_size=0,  # each statement runs once, and the tables change under it
        server_settings={"application_name": "rara-migrate"},
    )
    try:
        yield connection
    finally:
        try:
            await connection.close(timeout=CONNECT_TIMEOUT_S)
        except (TimeoutError, OSError, asyncpg.PostgresError):
            connection.terminate()


@asynccontextmanager
async def _lock(
    connection: "asyncpg.Connection[asyncpg.Record]", deadline: float, wait_s: float
) -> AsyncIterator[None]:
    """Hold the advisory lock of this database.

    Polled, never awaited in the server: a statement that waits there keeps a snapshot, for which CREATE INDEX
    CONCURRENTLY in the process that holds the lock waits in turn, until the server calls it a deadlock.
    """
    loop = asyncio.get_running_loop()
    while not await connection.fetchval("select pg_try_advisory_lock($1)", LOCK_KEY):
        if loop.time() + LOCK_POLL_S > deadline:
            raise MigrationLocked("another process was migrating this database", wait_s)
        await asyncio.sleep(LOCK_POLL_S)
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("select pg_advisory_unlock($1)", LOCK_KEY)


async def _status(
    connection: "asyncpg.Connection[asyncpg.Record]", known: Iterable[Migration]
) -> MigrationStatus:
    applied: tuple[AppliedMigration, ...] = ()
    if await connection.fetchval("select to_regclass('rara.schema_migration')") is not None:
        rows = await connection.fetch(
            # Through JSON, since the newest column may still be missing.
            "select version, name, sha256, applied_at, to_jsonb(m) ->> 'compatible_from' as compatible_from"
            "  from rara.schema_migration m order by version"
        )
        applied = tuple(AppliedMigration(**dict(row)) for row in rows)
    by_version = {migration.version: migration for migration in known}
    for row in applied:
        file = by_version.get(row.version)
        if file is not None and row.sha256 not in {file.sha256, FORMER.get(row.version)}:
            raise MigrationEdited(row.version)
    done = {row.version for row in applied}
    unknown = tuple(row for row in applied if row.version not in by_version)
    newest = max(by_version)
    return MigrationStatus(
        applied=applied,
        pending=tuple(migration for version, migration in by_version.items() if version not in done),
        unknown=unknown,
        incompatible=tuple(
            row for row in unknown if row.compatible_from is None or row.compatible_from > newest
        ),
    )


def _pending(now: MigrationStatus) -> list[Migration]:
    """What may be applied, or the reason why nothing may."""
    if now.incompatible:
        raise DatabaseNewer([row.version for row in now.incompatible])
    if now.applied and now.pending and now.pending[0].version < now.applied[-1].version:
        raise MigrationOutOfOrder(now.pending[0].version, now.applied[-1].version)
    return list(now.pending)


async def _apply(
    connection: "asyncpg.Connection[asyncpg.Record]", migration: Migration, deadline: float, wait_s: float
) -> None:
    if not migration.in_transaction:
        # It holds up nobody while it waits, and an index build that gives up leaves an invalid index behind:
        # so it may use the whole wait, once.
        await connection.execute(f"set lock_timeout = {int(wait_s * 1000)}")
        try:
            await _drop_unfinished(connection, migration)
            await connection.execute(migration.sql, timeout=MIGRATION_TIMEOUT_S)
        except asyncpg.LockNotAvailableError as error:
            raise MigrationLocked(f"migration {migration.version} waited for a lock", wait_s) from error
        finally:
            if not connection.is_closed():
                await connection.execute("reset lock_timeout")
        await _record(connection, migration)
        return
    loop = asyncio.get_running_loop()
    while True:
        try:
            async with connection.transaction():
                await connection.execute(f"set local lock_timeout = {int(LOCK_TIMEOUT_S * 1000)}")
                await connection.execute(migration.sql, timeout=MIGRATION_TIMEOUT_S)
                await _record(connection, migration)
            return
        except asyncpg.LockNotAvailableError as error:
            if loop.time() + LOCK_RETRY_S > deadline:
                raise MigrationLocked(f"migration {migration.version} waited for a lock", wait_s) from error
            await asyncio.sleep(LOCK_RETRY_S)


async def _drop_unfinished(connection: "asyncpg.Connection[asyncpg.Record]", migration: Migration) -> None:
    """An index whose build gave up or was cut stays, invalid, and `if not exists` would take it for done."""
    rows = await connection.fetch(
        "select c.relname from pg_index i join pg_class c on c.oid = i.indexrelid"
        " where not i.indisvalid and c.relnamespace = to_regnamespace('rara')"
    )
    for row in rows:
        if re.search(rf"\b{re.escape(row['relname'])}\b", migration.sql):
            await connection.execute(
                f'drop index concurrently rara."{row["relname"]}"', timeout=MIGRATION_TIMEOUT_S
            )


async def _record(connection: "asyncpg.Connection[asyncpg.Record]", migration: Migration) -> None:
    await connection.execute(
        "insert into rara.schema_migration (version, name, sha256, compatible_from) values ($1, $2, $3, $4)",
        migration.version,
        migration.name,
        migration.sha256,
        migration.compatible_from,
    )
