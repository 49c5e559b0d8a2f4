"""Carries out the schedule: does each fault to the running stack, holds it, and takes it back."""

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, NoReturn, TypeVar

import asyncpg
from rara_testing.database_faults import DatabaseFaults, kill_server, stop_immediately
from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.processes import Process

from rara_chaos.schedule import OF_EXECUTORS, Fault, Kind
from rara_chaos.stack import Service, Stack

T = TypeVar("T")

_RETRY_S = 0.2
_DELAY_S = 0.2
_SWALLOW_S = 0.3
_INJECT_S = 30.0  # a fault finds its target within this, in spite of the others
_SCHEDULERS = "rara-scheduler%"
# What a fault meets while another one has PostgreSQL.
_AWAY = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    LookupError,
)

_LOCKS: Final = (
    "select from rara.lease for update",
    "select from rara.ready for update",
    "select from rara.workflow_run where ended_at is null for update",
    "lock table rara.result in share mode",
)
_TABLES: Final = ("rara.lease", "rara.ready", "rara.result", "rara.workflow_run", "rara.step_event")
# Of the machine or of bad luck: never of the data, which a scheduler may blame on a step.
_STATES: Final = ("58030", "53100", "40001", "40P01", "57014")


class Injector:
    """Does faults, each in its own task, and counts those that were really done."""

    def __init__(self, stack: Stack, say: Callable[[str], None]) -> None:
        self.done: Counter[Kind] = Counter()
        self.hit: Counter[str] = Counter()  # faults of one executor, by its kind
        self.failed: list[str] = []
        self._stack = stack
        self._say = say
        self._began = time.monotonic()
        self._database = DatabaseFaults(stack.postgres.dsn)

    async def run(self, faults: list[Fault]) -> None:
        """Return when the last fault was taken back."""
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(max(0.0, self._began + fault.at_s - time.monotonic()))
                tasks.create_task(self._inject(fault), name=str(fault.kind))

    async def heal(self) -> None:
        """Whatever happened: nothing is frozen, cut off or down."""
        stack = self._stack
        for proxy in (*stack.links.values(), *stack.client_links, *stack.database_links):
            proxy.resume()
        await stack.postgres.start()
        for service in stack.services:
            if service.is_up:
                service.process.thaw()
            else:
                await service.start()

    async def _inject(self, fault: Fault) -> None:
        end = time.monotonic() + _INJECT_S
        while True:
            began = time.monotonic()
            try:
                await self._do(fault)
                break
            except _AWAY as error:
                if time.monotonic() > end:
                    self.failed.append(f"{fault.kind}: {error!r}")
                    return
                await asyncio.sleep(_RETRY_S)
        self.done[fault.kind] += 1
        if fault.kind in OF_EXECUTORS:
            self.hit[self._executor(fault).command.executor_kind] += 1
        self._say(f"{fault.kind}, begun {began - self._began:.1f} s, for {fault.hold_s:.1f} s")

    async def _do(self, fault: Fault) -> None:
        stack, hold_s = self._stack, fault.hold_s
        executor = self._executor(fault)
        scheduler = stack.schedulers[fault.target % len(stack.schedulers)]
        match fault.kind:
            case Kind.EXECUTOR_KILLED:
                await _restarted(executor, executor.kill, hold_s)
            case Kind.SCHEDULER_KILLED:
                await _restarted(scheduler, scheduler.kill, hold_s)
            case Kind.EXECUTOR_STOPPED:
                await _restarted(executor, executor.stop, hold_s)
            case Kind.SCHEDULER_STOPPED:
                await _restarted(scheduler, scheduler.stop, hold_s)
            case Kind.EXECUTOR_FROZEN_BRIEFLY | Kind.EXECUTOR_FROZEN_PAST_LEASE:
                await _frozen(executor, hold_s)
            case Kind.SCHEDULER_FROZEN:
                await _frozen(scheduler, hold_s)
            case Kind.RUNNER_KILLED:
                os.kill(_one(stack.runners(), fault.target), signal.SIGKILL)
            case Kind.RUNNER_FROZEN:
                await _runner_frozen(_one(stack.runners(), fault.target), hold_s)
            case Kind.COLLECTOR_KILLED:
                stack.collecting.running.kill()
            case Kind.COLLECTOR_FROZEN:
                await _process_frozen(stack.collecting.running, hold_s)
            case Kind.POSTGRES_KILLED:
                await self._server_ended(kill_server, hold_s)
            case Kind.POSTGRES_RESTARTED:
                await self._server_ended(stop_immediately, hold_s)
            case Kind.ALL_KILLED:
                await self._all_killed(hold_s)
            case Kind.LINK_CUT:
                _used(stack.links.values(), fault.target).cut()
            case Kind.LINK_RESET:
                _used(stack.links.values(), fault.target).reset()
            case Kind.LINK_STALLED_TO_SCHEDULER:
                await _stalled(_used(stack.links.values(), fault.target), hold_s, Direction.TO_SERVER)
            case Kind.LINK_STALLED_TO_EXECUTOR:
                await _stalled(_used(stack.links.values(), fault.target), hold_s, Direction.TO_CLIENT)
            case Kind.LINK_DELAYED:
                await _delayed(_used(stack.links.values(), fault.target), hold_s)
            case Kind.LINK_SWALLOWED:
                await _swallowed(_used(stack.links.values(), fault.target))
            case Kind.CLIENT_LINK_RESET:
                _used(stack.client_links, fault.target).reset()
            case Kind.DATABASE_LINK_CUT:
                _used(stack.database_links, fault.target).cut()
            case Kind.DATABASE_LINK_STALLED:
                link = _used(stack.database_links, fault.target)
                await _stalled(link, hold_s, Direction.TO_SERVER, Direction.TO_CLIENT)
            case Kind.DATABASE_LINK_SWALLOWED:
                await _swallowed(_used(stack.database_links, fault.target))
            case _:
                await self._do_in_database(fault)

    def _executor(self, fault: Fault) -> Service:
        return self._stack.executors[fault.target % len(self._stack.executors)]

    async def _do_in_database(self, fault: Fault) -> None:
        database, hold_s = self._database, fault.hold_s
        match fault.kind:
            case Kind.BACKEND_KILLED:
                await database.kill_backend(_SCHEDULERS)
            case Kind.BACKENDS_TERMINATED:
                _needs(await database.terminate(_SCHEDULERS))
            case Kind.LISTENERS_TERMINATED:
                _needs(await database.terminate(_SCHEDULERS, listening=True))
            case Kind.ROWS_LOCKED:
                await _held(database.locked(_LOCKS[fault.target % len(_LOCKS)]), hold_s)
            case Kind.SNAPSHOT_HELD:
                await _held(database.snapshot(), hold_s)
            case Kind.STATEMENTS_SLOWED:
                await _held(database.slowed(_TABLES[fault.target % len(_TABLES)], seconds=0.3), hold_s)
            case Kind.STATEMENTS_REFUSED:
                state = _STATES[fault.target // len(_TABLES) % len(_STATES)]
                await _held(database.refused(_TABLES[fault.target % len(_TABLES)], sqlstate=state), hold_s)
            case Kind.READ_ONLY:
                await _held(database.read_only(_SCHEDULERS), hold_s)
            case Kind.CONNECTIONS_EXHAUSTED:
                await self._exhausted(hold_s)
            case _:
                raise AssertionError(fault.kind)

    async def _server_ended(self, how: "Callable[..., Awaitable[None]]", hold_s: float) -> None:
        async with self._stack.postgres_turn:
            await how(self._stack.postgres)
            await asyncio.sleep(hold_s)
            await self._stack.postgres.start()

    async def _all_killed(self, hold_s: float) -> None:
        """Every process at once, as when the power fails; then every one comes back."""
        stack = self._stack
        async with contextlib.AsyncExitStack() as turns:
            await turns.enter_async_context(stack.postgres_turn)
            for service in stack.services:
                await turns.enter_async_context(service.turn)
            await asyncio.gather(kill_server(stack.postgres), *(service.kill() for service in stack.services))
            await asyncio.sleep(hold_s)
            await asyncio.gather(stack.postgres.start(), *(service.start() for service in stack.services))

    async def _exhausted(self, hold_s: float) -> None:
        """No connection is left, and those that the schedulers had are gone."""
        async with self._database.session() as session, self._database.exhausted():
            await session.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like $1",
                _SCHEDULERS,
            )
            async with self._database.exhausted():  # those that just became free
                await asyncio.sleep(hold_s)


async def _restarted(service: Service, end: Callable[[], Awaitable[object]], hold_s: float) -> None:
    async with service.turn:
        await end()
        await asyncio.sleep(hold_s)
        await service.start()


async def _frozen(service: Service, hold_s: float) -> None:
    async with service.turn:
        service.process.freeze()
        try:
            await asyncio.sleep(hold_s)
        finally:
            service.process.thaw()


async def _process_frozen(process: Process, hold_s: float) -> None:
    process.freeze()
    try:
        await asyncio.sleep(hold_s)
    finally:
        process.thaw()


async def _runner_frozen(pid: int, hold_s: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(hold_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def _stalled(proxy: FaultProxy, hold_s: float, *directions: Direction) -> None:
    proxy.stall(*directions)
    try:
        await asyncio.sleep(hold_s)
    finally:
        proxy.resume()


async def _swallowed(proxy: FaultProxy) -> None:
    """The open connections are forgotten: nothing arrives any more, and nobody is ever told."""
    proxy.drop_idle(0.0)
    try:
        await asyncio.sleep(_SWALLOW_S)
    finally:
        proxy.resume()


async def _delayed(proxy: FaultProxy, hold_s: float) -> None:
    proxy.delay(_DELAY_S)
    try:
        await asyncio.sleep(hold_s)
    finally:
        proxy.resume()


async def _held(fault: contextlib.AbstractAsyncContextManager[object], hold_s: float) -> None:
    async with fault:
        await asyncio.sleep(hold_s)


def _needs(count: int) -> None:
    if not count:
        _nobody()


def _used(links: Iterable[FaultProxy], target: int) -> FaultProxy:
    """One that carries a connection now."""
    return _one([link for link in links if link.open_links], target)


def _one(those: Sequence[T], target: int) -> T:
    return those[target % len(those)] if those else _nobody()


def _nobody() -> NoReturn:
    raise LookupError("nobody is there to be hit")
