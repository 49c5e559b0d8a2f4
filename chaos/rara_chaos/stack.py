"""The stack that is put under faults: PostgreSQL, schedulers, executors, and a proxy on each way between them.

Each is a process of its own with short timings. Executor i reaches scheduler s through `links[i, s]`, clients do
through `client_links[s]`, and scheduler s reaches the database through `database_links[s]`.
"""

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import parse_qs, urlsplit

from rara_cli.ports import lasting_port
from rara_scheduler.embedded import EmbeddedPostgres, account
from rara_testing.fault_proxy import FaultProxy
from rara_testing.processes import Process, Processes

from rara_chaos.clock import Clock
from rara_chaos.collecting import Collecting
from rara_chaos.disk import SmallDisk, mounted

LEASE_S: Final = 2.0
SWEEP_S: Final = 0.5
TIMINGS: Final[Mapping[str, str]] = {
    "RARA_LEASE_S": "2",
    "RARA_HEARTBEAT_S": "0.5",
    "RARA_SILENCE_S": "1.5",
    "RARA_ACCEPT_TIMEOUT_S": "1",
    "RARA_CANCEL_GRACE_S": "0.5",
    "RARA_SWEEP_S": "0.5",
    "RARA_POLL_S": "0.5",
    "RARA_STOP_S": "4",
    "RARA_STATEMENT_TIMEOUT_S": "3",
    "RARA_LOCK_TIMEOUT_S": "1.5",
    "RARA_ACQUIRE_TIMEOUT_S": "1.5",
    "RARA_CALL_CONNECTIONS": "3",
    "RARA_ENGINE_CONNECTIONS": "4",
}
_POSTGRES: Final[Mapping[str, str]] = {
    "max_connections": "60",
    "fsync": "off",  # processes are killed, never the machine: what was written stays written
    "full_page_writes": "off",
}
_READY_S = 60.0  # a start may meet any fault
_STOP_S = 15.0
_STARTS = 5  # in a row, before a service counts as hopeless
_LOOK_S = 0.1
_DISK_BYTES = 128 * 1024 * 1024
_CACHE_BYTES = 8 * 1024 * 1024  # of an executor on the small disk


@dataclass(slots=True)
class Crash:
    """A process that ended unasked."""

    name: str
    code: int | None  # None: it never became ready
    report: str


@dataclass(frozen=True, slots=True)
class Command:
    name: str
    program: Sequence[str]
    env: Mapping[str, str]
    ready: str
    executor_kind: str = ""  # empty: it is no executor


class Service:
    """One process that comes back: by `start` after what was asked for, by itself after a crash, which is noted."""

    def __init__(self, processes: Processes, command: Command, crashes: list[Crash]) -> None:
        self.command = command
        self.turn = asyncio.Lock()  # one fault of it at a time
        self.kills: list[float] = []  # wall time
        self._processes = processes
        self._crashes = crashes
        self._process: Process | None = None
        self._asked: Process | None = None  # to end
        self._watch: asyncio.Task[None] | None = None

    @property
    def process(self) -> Process:
        if self._process is None:
            raise RuntimeError(f"{self.command.name} was never started")
        return self._process

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> str:
        """Start it and wait until it is ready; what its ready line names."""
        for tries in range(_STARTS):
            command = account.command([*self.command.program], None, signal.SIGKILL)
            process = self._process = await self._processes.start(
                self.command.name, command, env=self.command.env
            )
            try:
                ready = await process.expect_line(self.command.ready, _READY_S)
            except AssertionError:
                self._crashed(process)
                if tries + 1 == _STARTS:
                    raise
                continue
            self._watch = asyncio.create_task(self._notice(process), name=f"watch {self.command.name}")
            return ready.group(1)
        raise AssertionError("unreachable")

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._asked = self._process
        self.kills.append(time.time())
        self.process.kill()
        await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM, and wait until it is gone; its exit code."""
        self._asked = self._process
        return await self.process.stop(_STOP_S)

    async def end(self) -> None:
        """Stop it for good."""
        self._asked = self._process
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self.is_up:
            self.process.thaw()
            self.process.terminate()
            with contextlib.suppress(AssertionError):
                await self.process.wait(_STOP_S)

    async def _notice(self, process: Process) -> None:
        while process.returncode is None:
            await asyncio.sleep(_LOOK_S)
        async with self.turn:
            if process is self._process and process is not self._asked:
                self._crashed(process)
                await self.start()

    def _crashed(self, process: Process) -> None:
        code = process.returncode
        self._crashes.append(Crash(self.command.name, code, process.report()))


@dataclass(slots=True)
class Stack:
    """Everything, in one folder. Use it as an async context manager."""

    folder: Path
    schedulers_count: int = 2
    executors_count: int = 4
    slots: int = 4
    go: Path | None = None  # the program of Go executors: then every second executor is one
    with_clocks: bool = False  # of processes in Python: libfaketime is there
    with_disk: bool = False  # a small one for the executors: a tmpfs can be mounted
    settings: Mapping[str, str] = field(default_factory=dict)
    schedulers: list[Service] = field(default_factory=list)
    executors: list[Service] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    links: dict[tuple[int, int], FaultProxy] = field(default_factory=dict)
    database_links: list[FaultProxy] = field(default_factory=list)
    client_links: list[FaultProxy] = field(default_factory=list)
    crashes: list[Crash] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=dict)  # by the name of the process that it is of
    disk: SmallDisk | None = None
    postgres: EmbeddedPostgres = field(init=False)
    collecting: Collecting = field(init=False)
    postgres_turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _exits: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exits.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exits.aclose()

    @property
    def services(self) -> list[Service]:
        return [*self.schedulers, *self.executors]

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def logs(self) -> Path:
        """The folder with what each process said."""
        return self.folder / "logs"

    @property
    def executor_links(self) -> list[FaultProxy]:
        return list(self.links.values())

    @property
    def kills(self) -> dict[str, list[float]]:
        """When each executor was killed, by its name."""
        return {executor.command.name: executor.kills for executor in self.executors}

    @property
    def blob_folder(self) -> Path:
        return self.folder / "blobs"

    async def _start(self) -> None:
        self.postgres = EmbeddedPostgres(self.folder / "postgres", settings=_POSTGRES)
        self._exits.push_async_callback(self.postgres.stop)
        await self.postgres.start()
        if self.with_disk:
            made = mounted(self.folder / "disk", size_bytes=_DISK_BYTES)
            self.disk = self._exits.enter_context(made)
        processes = await self._exits.enter_async_context(Processes(self.logs))
        self.collecting = Collecting(processes, self.postgres.dsn, f"file://{self.blob_folder}")
        for number in range(self.schedulers_count):
            await self._add_scheduler(processes, number)
        for number in range(self.executors_count):
            await self._add_executor(processes, number)
        await asyncio.gather(*(executor.start() for executor in self.executors))

    async def _add_scheduler(self, processes: Processes, number: int) -> None:
        host = parse_qs(urlsplit(self.postgres.dsn).query)["host"][0]
        proxy = await self._exits.enter_async_context(FaultProxy(host, 5432))
        self.database_links.append(proxy)
        env = {
            "RARA_DATABASE_URL": f"postgresql://rara@{proxy.address}/rara?sslmode=disable",
            "RARA_BLOB_STORE": f"file://{self.blob_folder}",
            "RARA_MIGRATE": "true",
        }
        ready = r"rara-scheduler listening on (\S+)"
        name = f"scheduler-{number}"
        env |= self._env("RARA_LISTEN", f"127.0.0.1:{lasting_port()}") | self._clock_of(name)
        command = Command(name, _python("rara_scheduler"), env, ready)
        service = Service(processes, command, self.crashes)
        self._exits.push_async_callback(service.end)
        self.schedulers.append(service)
        address = await service.start()
        self.addresses.append(address)
        self.client_links.append(await self._proxy_to(address))

    async def _add_executor(self, processes: Processes, number: int) -> None:
        ways = []
        for scheduler, address in enumerate(self.addresses):
            proxy = self.links[number, scheduler] = await self._proxy_to(address)
            ways.append(proxy.address)
        # Each scheduler is the first choice of some, in both languages.
        turn = (number + number // 2) % len(ways)
        go = self.go if number % 2 else None
        target = "ipv4:" + ",".join(ways[turn:] + ways[:turn])
        name = f"executor-{number}"
        env = self._env("RARA_SCHEDULER", target)
        if go is None:
            env |= self._clock_of(name)
        if self.disk is not None:
            env["RARA_EXECUTOR_CACHE_BYTES"] = str(_CACHE_BYTES)
        folder = self.folder if self.disk is None else self.disk.path
        command = executor_command(name, folder, env, self.slots, go)
        service = Service(processes, command, self.crashes)
        self._exits.push_async_callback(service.end)
        self.executors.append(service)

    async def _proxy_to(self, address: str) -> FaultProxy:
        host, _, port = address.rpartition(":")
        return await self._exits.enter_async_context(FaultProxy(host, int(port)))

    def _env(self, name: str, value: str) -> dict[str, str]:
        return {**TIMINGS, **self.settings, name: value}

    def _clock_of(self, name: str) -> dict[str, str]:
        if not self.with_clocks:
            return {}
        self.clocks[name] = Clock(self.folder / "clocks" / name)
        return dict(self.clocks[name].environment)


def executor_command(
    name: str, folder: Path, env: Mapping[str, str], slots: int, go: Path | None = None
) -> Command:
    """An executor of the load, with its files in a folder within this one."""
    own = {
        "RARA_EXECUTOR_MODULES": "rara_chaos.operations",
        "RARA_EXECUTOR_NAME": name,
        "RARA_EXECUTOR_SLOTS": str(slots),
        "RARA_EXECUTOR_PRESTART": "1",
        "RARA_EXECUTOR_STOP_S": "3",
        "RARA_EXECUTOR_DIR": str(folder / name),
    }
    return Command(
        name,
        [str(go)] if go else _python("rara_executor"),
        own | dict(env),
        r"rara-executor \S+ connected to (\S+)",
        "go" if go else "python",
    )


def _python(module: str) -> list[str]:
    return [sys.executable, "-m", module]
