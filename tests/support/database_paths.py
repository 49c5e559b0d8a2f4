"""Ways to a test's database that can be made to fail: a proxy before it, a pooler before it, its processes frozen."""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg
from rara_testing.fault_proxy import FaultProxy
from rara_testing.ports import free_port
from rara_testing.processes import Processes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a database is. host: a name, or the folder of a Unix socket."""

    user: str
    host: str
    port: int
    database: str

    @classmethod
    def of(cls, dsn: str) -> "Place":
        parts = urlsplit(dsn)
        asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
        return cls(
            unquote(parts.username or ""),
            asked.get("host") or parts.hostname or "127.0.0.1",
            int(asked.get("port") or parts.port or 5432),
            unquote(parts.path.lstrip("/")),
        )


@contextlib.asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[tuple[FaultProxy, str]]:
    """A fault proxy before the database, and the address through it."""
    place = Place.of(dsn)
    async with FaultProxy(place.host, place.port) as proxy:
        yield proxy, f"postgresql://{place.user}@{proxy.address}/{place.database}"


@contextlib.asynccontextmanager
async def pgbouncer(
    dsn: str, folder: Path, mode: str, *options: str, pool_size: int = 3
) -> AsyncIterator[str]:
    """The address of the database through a PgBouncer in this pool mode. options: more lines of its ini."""
    place = Place.of(dsn)
    lines = [
        "[databases]",
        f"{place.database} = host={place.host} port={place.port} dbname={place.database} user={place.user}",
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        "unix_socket_dir =",
        "auth_type = any",
        f"pool_mode = {mode}",
        f"default_pool_size = {pool_size}",
        *options,
    ]
    binary = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    assert binary is not None
    user = ["-u", "nobody"] if os.geteuid() == 0 else []  # it refuses to be root
    ini = folder / "pgbouncer.ini"
    async with Processes(folder) as processes:
        port = free_port()
        ini.write_text("\n".join([*lines, f"listen_port = {port}"]))
        process = await processes.start("pgbouncer", [binary, *user, ini])
        async with asyncio.timeout(10):
            while not await _answers(port):
                assert process.returncode is None, process.report()
                await asyncio.sleep(0.02)
        yield f"postgresql://{place.user}@127.0.0.1:{port}/{place.database}"


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@contextlib.contextmanager
def frozen(pids: Iterable[int]) -> Iterator[None]:
    """Processes of the same machine that stand still for as long as the block lasts."""
    stopped = list(pids)
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def sessions(raw: "asyncpg.Connection[asyncpg.Record]", application: str) -> list[int]:
    """Process numbers of the database's sessions whose application name begins so."""
    rows = await raw.fetch(
        "select pid from pg_stat_activity where datname = current_database() and application_name like $1 || '%'",
        application,
    )
    return [row["pid"] for row in rows]
