"""A whole Rara on this machine: an embedded PostgreSQL, a scheduler and an executor, each its own process.

For trying out and for tests. Everything is kept in one folder: `postgres/`, `blobs/`, `executor/`, `logs/`. The
parts end with the process that started them, also when that is killed (on Linux, by the parent-death signal).
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rara_scheduler.embedded import EmbeddedPostgres, EmbeddedPostgresError

from rara_cli.part import Part, PartFailed, PartSpec
from rara_cli.ports import lasting_port

DEFAULT_MODULES: Final = ("knowledge_pipeline.operations",)
_SCHEDULER_READY: Final = re.compile(r"rara-scheduler listening on (?P<address>\S+)")
_EXECUTOR_READY: Final = re.compile(r"rara-executor (?P<name>\S+) connected to (?P<address>\S+)")
_DATABASE_RESTARTS: Final = 5
_DATABASE_WINDOW_S: Final = 60.0


class PortTaken(Exception):
    """Something else listens on the port that was asked for."""


@dataclass(frozen=True, slots=True)
class StackSettings:
    """What to run.

    directory: where all data is kept.
    port: of the scheduler; 0 takes a free one, which stays free over restarts.
    modules: Python modules with the operations that the executor offers.
    env: settings of the parts, `RARA_LEASE_S` for example; win over those of this process.
    database_url: a PostgreSQL to use instead of the embedded one.
    with_executor: without, only database and scheduler are started.
    """

    directory: Path
    port: int = 0
    modules: tuple[str, ...] = DEFAULT_MODULES
    executor_name: str = "dev"
    slots: int = 4
    env: Mapping[str, str] = field(default_factory=dict)
    database_url: str | None = None
    with_executor: bool = True


class Stack:
    """Starts the parts in order, keeps them running, and stops them in the opposite order.

    A part that dies is started again (see Part). When one is given up, `wait` raises; the others go on until
    `stop`. Use it as an async context manager, or call `start` and `stop`.
    """

    def __init__(self, settings: StackSettings, *, report: Callable[[str], None] | None = None) -> None:
        self.settings = settings
        self.address = ""
        self._report = report or (lambda _line: None)
        self._postgres: EmbeddedPostgres | None = None
        self._scheduler: Part | None = None
        self._executor: Part | None = None
        self._go_executor: Part | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def dsn(self) -> str:
        """Of the database."""
        if self.settings.database_url is not None:
            return self.settings.database_url
        if self._postgres is None:
            raise RuntimeError("the stack is not started")
        return self._postgres.dsn

    @property
    def logs(self) -> Path:
        """The folder with one log for each part."""
        return self.settings.directory / "logs"

    @property
    def scheduler(self) -> Part:
        if self._scheduler is None:
            raise RuntimeError("the stack is not started")
        return self._scheduler

    @property
    def executor(self) -> Part:
        if self._executor is None:
            raise RuntimeError("the stack is not started, or without an executor")
        return self._executor

    async def start(self) -> None:
        """Start all parts; returns when the executor has connected.

        Raises PortTaken, PartFailed and EmbeddedPostgresError, with nothing left running.
        """
        settings = self.settings
        if settings.port:
            _refuse_taken(settings.port)
        settings.directory.mkdir(parents=True, exist_ok=True)
        try:
            if settings.database_url is None:
                self._report("starting PostgreSQL")
                self._postgres = EmbeddedPostgres(settings.directory.absolute() / "postgres")
                await self._postgres.start()
                keep = self._keep_database(self._postgres)
                self._keeper = asyncio.create_task(keep, name="keep PostgreSQL")
            self._report("starting the scheduler")
            self._scheduler = Part(self._scheduler_spec(settings.port or lasting_port()), report=self._report)
            self.address = (await self._scheduler.start())["address"]
            # Executors and clients find it at the same place after a restart.
            self._scheduler.spec = self._scheduler_spec(int(self.address.rpartition(":")[2]))
            if settings.with_executor:
                self._report("starting the executor")
                self._executor = Part(self._executor_spec(), report=self._report)
                await self._executor.start()
        except BaseException:
            await self.stop()
            raise

    async def start_go_executor(self, program: Path) -> None:
        """Start one beside the other parts, named after the Python one; returns when it has connected."""
        self._report("starting the Go executor")
        self._go_executor = Part(self._go_executor_spec(program), report=self._report)
        await self._go_executor.start()

    async def stop(self) -> None:
        """Stop the executors, then the scheduler, then the database. Stopping twice is harmless."""
        go_executor, self._go_executor = self._go_executor, None
        executor, self._executor = self._executor, None
        scheduler, self._scheduler = self._scheduler, None
        postgres, self._postgres = self._postgres, None
        keeper, self._keeper = self._keeper, None
        async with (
            contextlib.AsyncExitStack() as order
        ):  # each is stopped, whatever stopping the others brings
            if postgres is not None:
                order.push_async_callback(postgres.stop)
            if keeper is not None:
                order.push_async_callback(_end, keeper)
            if scheduler is not None:
                order.push_async_callback(scheduler.stop)
            if executor is not None:
                order.push_async_callback(executor.stop)
            if go_executor is not None:
                order.push_async_callback(go_executor.stop)

    def interrupt(self) -> None:
        """Kill scheduler and executors at once; `stop` is still to be called, and is quick then."""
        for part in (self._go_executor, self._executor, self._scheduler):
            if part is not None:
                part.interrupt()

    async def wait(self) -> None:
        """Wait for ever; raises PartFailed when a part is given up."""
        waits = (
            []
            if self._keeper is None
            else [asyncio.create_task(_result(self._keeper), name="end of PostgreSQL")]
        )
        waits += [
            asyncio.create_task(part.ended(), name=f"end of {part.spec.name}")
            for part in (self._scheduler, self._executor, self._go_executor)
            if part is not None
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def kill_executor(self, *, restart: bool = True) -> int:
        """SIGKILL the executor; its process id. It comes back by itself, or with `restart_executor`."""
        return await self.executor.kill(restart=restart)

    async def kill_scheduler(self, *, restart: bool = True) -> int:
        """SIGKILL the scheduler; its process id. It comes back by itself, or with `restart_scheduler`."""
        return await self.scheduler.kill(restart=restart)

    async def restart_executor(self) -> None:
        """Bring back a killed executor, or wait for the one that comes back; returns when it has connected."""
        await self.executor.revive()

    async def restart_scheduler(self) -> None:
        """Bring back a killed scheduler, or wait for the one that comes back; returns when it serves."""
        await self.scheduler.revive()

    async def kill_database(self) -> int:
        """SIGKILL PostgreSQL; its process id. It comes back by itself."""
        if self._postgres is None or self._postgres.pid is None:
            raise RuntimeError("the database does not run")
        pid = self._postgres.pid
        os.kill(pid, signal.SIGKILL)
        await self._postgres.wait()
        return pid

    async def _keep_database(self, postgres: EmbeddedPostgres) -> None:
        """Start PostgreSQL again when it ends; give up when that fails, or at the sixth time within a minute."""
        loop = asyncio.get_running_loop()
        ends: list[float] = []
        while True:
            code = await postgres.wait()
            ends = [*(at for at in ends if loop.time() - at < _DATABASE_WINDOW_S), loop.time()]
            if len(ends) > _DATABASE_RESTARTS:
                raise PartFailed(
                    f"PostgreSQL ended {len(ends)} times within a minute; its log: {postgres.log_path}"
                )
            self._report(f"PostgreSQL ended with code {code}; starting it again")
            try:
                await postgres.start()
            except EmbeddedPostgresError as error:
                raise PartFailed(f"PostgreSQL does not start again: {error}") from error

    def _scheduler_spec(self, port: int) -> PartSpec:
        directory = self.settings.directory.absolute()
        own = {
            "RARA_DATABASE_URL": self.dsn,
            "RARA_LISTEN": f"127.0.0.1:{port}",
            "RARA_MIGRATE": "true",
            "RARA_BLOB_STORE": f"file://{directory / 'blobs'}",
        }
        return self._spec("scheduler", _python("rara_scheduler"), own, _SCHEDULER_READY)

    def _executor_spec(self) -> PartSpec:
        own = self._of_executors(self.settings.executor_name) | {
            "RARA_EXECUTOR_MODULES": ",".join(self.settings.modules)
        }
        return self._spec("executor", _python("rara_executor"), own, _EXECUTOR_READY)

    def _go_executor_spec(self, program: Path) -> PartSpec:
        own = self._of_executors(f"{self.settings.executor_name}-go")
        return self._spec("go-executor", (str(program),), own, _EXECUTOR_READY)

    def _of_executors(self, name: str) -> dict[str, str]:
        """Settings that mean the same in any language."""
        return {
            "RARA_SCHEDULER": self.address,
            "RARA_EXECUTOR_NAME": name,
            "RARA_EXECUTOR_SLOTS": str(self.settings.slots),
            "RARA_EXECUTOR_DIR": str(self.settings.directory.absolute() / "executor"),
        }

    def _spec(
        self, name: str, command: tuple[str, ...], own: Mapping[str, str], ready: re.Pattern[str]
    ) -> PartSpec:
        defaults = {"RARA_LOG_FORMAT": "console", "PYTHONUNBUFFERED": "1"}
        return PartSpec(
            name=name,
            command=command,
            env={**defaults, **os.environ, **own, **self.settings.env},
            ready=ready,
            log=self.logs / f"{name}.log",
        )


def _python(module: str) -> tuple[str, ...]:
    return sys.executable, "-m", module


async def _result(task: "asyncio.Task[None]") -> None:
    """Wait for a task without taking it along when the wait is cancelled."""
    await asyncio.shield(task)


async def _end(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # what it gave up for was said by `wait`, or is of no interest any more


def _refuse_taken(port: int) -> None:
    """gRPC shares a port between servers without a word, so a second scheduler would get half of the calls."""
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as servers do: a closed one's rest is fine
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise PortTaken(f"port {port} is taken ({error.strerror}): choose another with --port") from None


__all__ = ["DEFAULT_MODULES", "PartFailed", "PortTaken", "Stack", "StackSettings"]
