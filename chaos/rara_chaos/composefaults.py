"""The faults of a compose project: to containers and networks through the engine, to PostgreSQL through a login."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from rara_chaos import clock, databasefaults
from rara_chaos.databasefaults import DatabaseSide
from rara_chaos.docker import Node, Project, docker
from rara_chaos.executorfaults import nobody, one
from rara_chaos.schedule import Fault, Kind
from rara_chaos.stack import LEASE_S as LOCAL_LEASE_S

KINDS: Final = (
    Kind.EXECUTOR_KILLED,
    Kind.EXECUTOR_FROZEN_BRIEFLY,
    Kind.EXECUTOR_FROZEN_PAST_LEASE,
    Kind.EXECUTOR_STOPPED,
    Kind.EXECUTOR_CUT_OFF,
    Kind.RUNNER_KILLED,
    Kind.RUNNER_FROZEN,
    Kind.SCHEDULER_KILLED,
    Kind.SCHEDULER_FROZEN,
    Kind.SCHEDULER_STOPPED,
    Kind.SCHEDULER_CUT_OFF,
    Kind.POSTGRES_KILLED,
    Kind.POSTGRES_RESTARTED,
    Kind.POSTGRES_FROZEN,
    Kind.POSTGRES_CUT_OFF,
    Kind.POSTGRES_STARVED,
    *databasefaults.KINDS,
    Kind.ALL_KILLED,
    Kind.CLOCK_JUMPED,
    Kind.DISK_FULL,
)
CLOCK_FILE: Final = "/tmp/rara-chaos-clock"  # noqa: S108 - a tmpfs of the container's own
_DISKS: Final = ("database", "blobs")
_STARVED_CPUS = "0.1"
LEASE_S: Final = 5.0  # as chaos/compose.yml has it
READY_S = 300.0  # of all containers, on a machine that is busy
_POSTGRES_S = 120.0
_LOOK_S = 0.3
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)
# A child of what process 1, the engine's init, has started: a runner.
_RUNNER: Final = """
main=$(cat /proc/1/task/1/children)
set -- $(cat /proc/${main%% *}/task/*/children)
[ $# -gt 0 ] || exit 3
shift $((TURN % $#))
kill -SIGNAL "$1" && echo "$1"
"""


@dataclass(slots=True)
class Nodes:
    """The containers that faults are about. disks: the one that fills disks; None: there is none."""

    schedulers: Sequence[Node]
    executors: Sequence[Node]  # languages in turns
    database: Node
    disks: Node | None = None

    @property
    def all(self) -> list[Node]:
        return [self.database, *self.schedulers, *self.executors]

    @property
    def python_executors(self) -> list[Node]:
        return [node for node in self.executors if node.service == "python-executor"]


@contextlib.asynccontextmanager
async def turn_of(*nodes: Node) -> AsyncIterator[None]:
    """One fault of these at a time; what ends meanwhile was meant to."""
    async with contextlib.AsyncExitStack() as turns:
        for node in nodes:
            await turns.enter_async_context(node.turn)
        try:
            yield
        finally:
            for node in nodes:
                node.ended_at = time.monotonic()


class ComposeFaults:
    inject_s = 120.0

    def __init__(self, project: Project, nodes: Nodes, database_url: str, cpus: int) -> None:
        self._project = project
        self._nodes = nodes
        self._database_url = database_url
        self._database = DatabaseSide(database_url)
        self._cpus = str(cpus)
        self.frozen: list[tuple[float, float]] = []  # executors, from and to, monotonic

    def executor_kind(self, fault: Fault) -> str:
        return self._executor(fault).service.removesuffix("-executor")

    def _executor(self, fault: Fault) -> Node:
        return self._nodes.executors[fault.target % len(self._nodes.executors)]

    async def do(self, fault: Fault) -> None:
        scheduler = self._nodes.schedulers[fault.target % len(self._nodes.schedulers)]
        executor, database, hold_s = self._executor(fault), self._nodes.database, fault.hold_s
        match fault.kind:
            case Kind.EXECUTOR_KILLED:
                await _killed(executor, hold_s)
            case Kind.EXECUTOR_STOPPED:
                await _stopped(executor, hold_s)
            case Kind.EXECUTOR_FROZEN_BRIEFLY:
                self.frozen.append(await _frozen(executor, hold_s))
            case Kind.EXECUTOR_FROZEN_PAST_LEASE:
                self.frozen.append(await _frozen(executor, hold_s * LEASE_S / LOCAL_LEASE_S))
            case Kind.EXECUTOR_CUT_OFF:
                await _cut_off(executor, "default", hold_s)
            case Kind.SCHEDULER_KILLED:
                await _killed(scheduler, hold_s)
            case Kind.SCHEDULER_STOPPED:
                await _stopped(scheduler, hold_s)
            case Kind.SCHEDULER_FROZEN:
                await _frozen(scheduler, hold_s)
            case Kind.SCHEDULER_CUT_OFF:
                await _cut_off(scheduler, "default", hold_s)
            case Kind.POSTGRES_FROZEN:
                await _frozen(database, hold_s)
            case Kind.POSTGRES_CUT_OFF:
                await _cut_off(database, "database", hold_s)
            case _:
                await self._do_more(fault)

    async def _do_more(self, fault: Fault) -> None:
        nodes, hold_s = self._nodes, fault.hold_s
        match fault.kind:
            case Kind.POSTGRES_KILLED:
                await self._postgres_down(nodes.database.kill, hold_s)
            case Kind.POSTGRES_RESTARTED:
                await self._postgres_down(nodes.database.stop, hold_s)
            case Kind.POSTGRES_STARVED:
                await self._starved(hold_s)
            case Kind.ALL_KILLED:
                await self._all_killed(hold_s)
            case Kind.RUNNER_KILLED:
                await _signalled(one(nodes.python_executors, fault.target), fault, "KILL")
            case Kind.RUNNER_FROZEN:
                await _runner_frozen(one(nodes.python_executors, fault.target), fault)
            case Kind.CLOCK_JUMPED:
                await _clock_jumped(one([*nodes.schedulers, *nodes.python_executors], fault.target), fault)
            case Kind.DISK_FULL:
                await self._disk_full(_DISKS[fault.target % len(_DISKS)], hold_s)
            case _:
                await self._database.do(fault)

    async def _postgres_down(self, end: Callable[[], Awaitable[None]], hold_s: float) -> None:
        async with turn_of(self._nodes.database):
            await end()
            await asyncio.sleep(hold_s)
            await self._nodes.database.start()
            await self._until_postgres()

    async def _starved(self, hold_s: float) -> None:
        """A slow database: next to no processor for it."""
        database = self._nodes.database
        async with turn_of(database):
            try:
                await docker("update", "--cpus", _STARVED_CPUS, database.id)
                await asyncio.sleep(hold_s)
            finally:
                await self._fed()

    async def _fed(self) -> None:
        await docker("update", "--cpus", self._cpus, self._nodes.database.id)

    async def _all_killed(self, hold_s: float) -> None:
        """Every container at once, as when the power fails; then every one comes back, in any order."""
        nodes = self._nodes.all
        async with turn_of(*nodes):
            await asyncio.gather(*(node.kill() for node in nodes))
            await asyncio.sleep(hold_s)
            await asyncio.gather(*(node.start() for node in nodes))
            await self._until_postgres()

    async def _disk_full(self, disk: str, hold_s: float) -> None:
        """Of PostgreSQL, which may end for that and must come back by itself; or of the blob store."""
        disks = self._nodes.disks or nobody()
        async with turn_of(disks, *([self._nodes.database] if disk == "database" else [])):
            try:
                if not await _filled(disks, _filler(disk)):
                    nobody()
                await asyncio.sleep(hold_s)
            finally:
                await self._make_room()
            await self._until_postgres()

    async def _make_room(self) -> None:
        if self._nodes.disks is not None:
            await self._nodes.disks.exec("rm", "-f", *map(_filler, _DISKS))

    async def _until_postgres(self) -> None:
        """It answers; TimeoutError when it does not for long."""
        async with asyncio.timeout(_POSTGRES_S):
            while True:
                with contextlib.suppress(*_AWAY):
                    connection = await asyncpg.connect(self._database_url, timeout=_LOOK_S * 10)
                    connection.terminate()
                    return
                await asyncio.sleep(_LOOK_S)

    # ------------------------------------------------------------ healing

    async def heal(self) -> None:
        """And every service is healthy again."""
        await self._make_room()
        await self._fed()
        states = await self._project.states(self._nodes.all)
        for node in self._nodes.all:
            await _healed(node, states[node.id])
        await self._until_postgres()
        await self._project.until_healthy(self._nodes.all, READY_S)


async def _healed(node: Node, shown: Mapping[str, Any]) -> None:
    state = shown["State"]
    if state["Paused"]:
        await docker("unpause", node.id)
    for network in node.networks:
        if network not in shown["NetworkSettings"]["Networks"]:
            await node.connect(network)
    if not state["Running"]:
        await node.start()
    elif node.has_clock:
        await node.exec("rm", "-f", CLOCK_FILE)


async def _killed(node: Node, hold_s: float) -> None:
    async with turn_of(node):
        await node.kill()
        await asyncio.sleep(hold_s)
        await node.start()


async def _stopped(node: Node, hold_s: float) -> None:
    async with turn_of(node):
        await node.stop()
        await asyncio.sleep(hold_s)
        await node.start()


async def _frozen(node: Node, hold_s: float) -> tuple[float, float]:
    """From when to when, at most."""
    began_s = time.monotonic()
    async with turn_of(node):
        try:  # also where the engine did it and has not answered in time
            await docker("pause", node.id)
            await asyncio.sleep(hold_s)
        finally:
            await docker("unpause", node.id)
    return began_s, time.monotonic()


async def _cut_off(node: Node, network: str, hold_s: float) -> None:
    """From one network, with whom it shares it; when it is back it may have another address."""
    name = next(name for name in node.networks if name.endswith(f"_{network}"))
    async with turn_of(node):
        try:
            await docker("network", "disconnect", name, node.id)
            await asyncio.sleep(hold_s)
        finally:
            await node.connect(name)


async def _signalled(node: Node, fault: Fault, signal: str) -> str:
    """A runner's process id."""
    script = _RUNNER.replace("TURN", str(fault.target // 2)).replace("SIGNAL", signal)
    return (await node.exec("sh", "-c", script)).strip()


async def _runner_frozen(node: Node, fault: Fault) -> None:
    async with turn_of(node):
        pid = await _signalled(node, fault, "STOP")
        try:
            await asyncio.sleep(fault.hold_s)
        finally:
            await node.exec("sh", "-c", f"kill -CONT {int(pid)} || true")  # its executor may have ended it


async def _clock_jumped(node: Node, fault: Fault) -> None:
    """While it works: forward or back, and then to where it was."""
    told = clock.offset(fault.target // 2)
    async with turn_of(node):
        await node.exec("sh", "-c", f"echo '{told}' > {CLOCK_FILE}.new && mv {CLOCK_FILE}.new {CLOCK_FILE}")
        try:
            await asyncio.sleep(fault.hold_s)
        finally:
            await node.exec("rm", "-f", CLOCK_FILE)


async def _filled(disks: Node, filler: str) -> int:
    """All room that was left, in bytes."""
    return int(await disks.exec("sh", "-c", f"cat /dev/zero > {filler} || true; wc -c < {filler}"))


def _filler(disk: str) -> str:
    return f"/disks/{disk}/rara-chaos-filler"
