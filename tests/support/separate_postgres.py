"""A PostgreSQL beside everything else, as operators have one, which a test may kill and hold up.

async with separate_postgres(tmp_path) as server: ...   # in a container of the official image where an engine answers

In the container it is reached over TCP with a password. Where no engine answers the same tests run on a process of
this machine.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import asyncpg
import psutil
from rara_scheduler.embedded import EmbeddedPostgres
from rara_testing.database_faults import kill_server
from rara_testing.ports import free_port
from support.evidence import is_here

IMAGE = "postgres:17"
USER, PASSWORD = "rara", "of-a-test"
START_S = 60.0


class SeparatePostgres(Protocol):
    """One server, with a superuser."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def dsn_of(self, database: str, user: str = USER) -> str: ...
    async def kill(self) -> None: ...
    async def freeze(self) -> None: ...
    async def thaw(self) -> None: ...


class ContainerPostgres:
    """The official image, on a port of 127.0.0.1 that it keeps over restarts. Roles have one password."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        from testcontainers.community.postgres import PostgresContainer
        from testcontainers.core.config import testcontainers_config

        # Its reaper is one more image to pull, and has to reach the engine's socket. We stop what we start.
        testcontainers_config.ryuk_disabled = True
        self._port = free_port()
        arguments = [word for name, value in (settings or {}).items() for word in ("-c", f"{name}={value}")]
        made = PostgresContainer(IMAGE, username=USER, password=PASSWORD, dbname="postgres", driver=None)
        made.with_command(["postgres", *arguments])
        # Docker's SDK takes an address with the port, for which the library has no method.
        made.ports["5432"] = cast("Any", ("127.0.0.1", self._port))
        self._container = made
        self._is_made = False

    async def start(self) -> None:
        """For the first time, or again after a kill."""
        if self._is_made:
            await self._told("start")
            await self._until_it_answers()
            return
        self._is_made = True
        try:
            await asyncio.to_thread(self._container.start)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Remove the container, and what it stored."""
        if self._is_made:
            await asyncio.to_thread(self._container.stop)

    def dsn_of(self, database: str, user: str = USER) -> str:
        return f"postgresql://{user}:{PASSWORD}@127.0.0.1:{self._port}/{database}?sslmode=disable"

    async def kill(self) -> None:
        await self._told("kill")

    async def freeze(self) -> None:
        await self._told("pause")

    async def thaw(self) -> None:
        await self._told("unpause")

    async def _told(self, command: str) -> None:
        container = self._container.get_wrapped_container()
        await asyncio.to_thread(cast("Callable[[], None]", getattr(container, command)))

    async def _until_it_answers(self) -> None:
        async with asyncio.timeout(START_S):
            while True:
                try:
                    connection = await asyncpg.connect(self.dsn_of("postgres"), timeout=5)
                except (OSError, TimeoutError, asyncpg.PostgresError):
                    await asyncio.sleep(0.1)
                else:
                    await connection.close()
                    return


class LocalPostgres:
    """A process of this machine."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self._server = EmbeddedPostgres(folder, settings=dict(settings or {}))
        self._frozen: list[psutil.Process] = []

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self.thaw()
        await self._server.stop()

    def dsn_of(self, database: str, user: str = USER) -> str:
        return self._server.dsn_of(database).replace(f"//{USER}@", f"//{user}@", 1)

    async def kill(self) -> None:
        await kill_server(self._server)

    async def freeze(self) -> None:
        postmaster = psutil.Process(self._server.pid)
        self._frozen = [postmaster, *postmaster.children(recursive=True)]
        self._signal(signal.SIGSTOP)

    async def thaw(self) -> None:
        self._signal(signal.SIGCONT)
        self._frozen = []

    def _signal(self, number: signal.Signals) -> None:
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@contextlib.asynccontextmanager
async def separate_postgres(
    folder: Path, settings: Mapping[str, str] | None = None
) -> AsyncIterator[SeparatePostgres]:
    """A server that runs."""
    server = ContainerPostgres(settings) if is_here("containers") else LocalPostgres(folder, settings)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()
