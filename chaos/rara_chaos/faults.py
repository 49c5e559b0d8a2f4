"""The faults of the local stack, to each process of which this one is the parent."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from rara_testing.database_faults import kill_server, stop_immediately
from rara_testing.fault_proxy import Direction

from rara_chaos import clock, databasefaults, executorfaults
from rara_chaos.databasefaults import DatabaseSide
from rara_chaos.executorfaults import frozen, one, process_frozen, restarted, stalled, swallowed, used
from rara_chaos.schedule import Fault, Kind
from rara_chaos.stack import Stack


class LocalFaults:
    inject_s = 30.0

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._database = DatabaseSide(stack.postgres.dsn)

    async def heal(self) -> None:
        stack = self._stack
        for proxy in (*stack.links.values(), *stack.client_links, *stack.database_links):
            proxy.resume()
        if stack.disk is not None:
            stack.disk.make_room()
        await stack.postgres.start()
        await executorfaults.heal(stack.services)
        for each in stack.clocks.values():
            each.reset()

    def executor_kind(self, fault: Fault) -> str:
        return executorfaults.executor_of(self._stack, fault).command.executor_kind

    async def do(self, fault: Fault) -> None:
        if fault.kind in (*executorfaults.KINDS, *executorfaults.LINK_KINDS):
            await executorfaults.do(self._stack, fault)
        elif fault.kind in (*databasefaults.KINDS, Kind.BACKEND_KILLED):
            await self._database.do(fault)
        else:
            await self._do(fault)

    async def _do(self, fault: Fault) -> None:
        stack, hold_s = self._stack, fault.hold_s
        scheduler = stack.schedulers[fault.target % len(stack.schedulers)]
        match fault.kind:
            case Kind.SCHEDULER_KILLED:
                await restarted(scheduler, scheduler.kill, hold_s)
            case Kind.SCHEDULER_STOPPED:
                await restarted(scheduler, scheduler.stop, hold_s)
            case Kind.SCHEDULER_FROZEN:
                await frozen(scheduler, hold_s)
            case Kind.COLLECTOR_KILLED:
                stack.collecting.running.kill()
            case Kind.COLLECTOR_FROZEN:
                await process_frozen(stack.collecting.running, hold_s)
            case Kind.POSTGRES_KILLED:
                await self._server_ended(kill_server, hold_s)
            case Kind.POSTGRES_RESTARTED:
                await self._server_ended(stop_immediately, hold_s)
            case Kind.ALL_KILLED:
                await self._all_killed(hold_s)
            case Kind.CLOCK_JUMPED:
                await self._clock_jumped(fault)
            case Kind.DISK_FULL:
                await self._disk_full(hold_s)
            case _:
                await self._do_to_link(fault)

    async def _do_to_link(self, fault: Fault) -> None:
        stack = self._stack
        match fault.kind:
            case Kind.CLIENT_LINK_RESET:
                used(stack.client_links, fault.target).reset()
            case Kind.DATABASE_LINK_CUT:
                used(stack.database_links, fault.target).cut()
            case Kind.DATABASE_LINK_STALLED:
                link = used(stack.database_links, fault.target)
                await stalled(link, fault.hold_s, Direction.TO_SERVER, Direction.TO_CLIENT)
            case Kind.DATABASE_LINK_SWALLOWED:
                await swallowed(used(stack.database_links, fault.target))
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

    async def _clock_jumped(self, fault: Fault) -> None:
        """While it works: forward or back, and then to where it was."""
        stack = self._stack
        name, its_clock = one(sorted(stack.clocks.items()), fault.target)
        service = next(service for service in stack.services if service.command.name == name)
        async with service.turn:
            its_clock.jump(clock.offset(fault.target // len(stack.clocks)))
            try:
                await asyncio.sleep(fault.hold_s)
            finally:
                its_clock.reset()

    async def _disk_full(self, hold_s: float) -> None:
        """Executors can neither fetch nor write down anything more. None is started meanwhile: it would refuse to."""
        if (disk := self._stack.disk) is None:
            raise AssertionError("there is no disk to fill")
        async with contextlib.AsyncExitStack() as turns:
            for executor in self._stack.executors:
                await turns.enter_async_context(executor.turn)
            await asyncio.to_thread(disk.fill)
            try:
                await asyncio.sleep(hold_s)
            finally:
                disk.make_room()
