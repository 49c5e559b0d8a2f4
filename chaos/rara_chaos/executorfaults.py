"""Faults of executors that are processes of this machine, and of the proxies on their ways to the schedulers."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn, Protocol, TypeVar

from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.processes import Process, children

from rara_chaos.schedule import Fault, Kind
from rara_chaos.stack import Service

T = TypeVar("T")

KINDS = (
    Kind.EXECUTOR_KILLED,
    Kind.EXECUTOR_FROZEN_BRIEFLY,
    Kind.EXECUTOR_FROZEN_PAST_LEASE,
    Kind.EXECUTOR_STOPPED,
    Kind.RUNNER_KILLED,
    Kind.RUNNER_FROZEN,
)
LINK_KINDS = (
    Kind.LINK_CUT,
    Kind.LINK_RESET,
    Kind.LINK_STALLED_TO_SCHEDULER,
    Kind.LINK_STALLED_TO_EXECUTOR,
    Kind.LINK_DELAYED,
    Kind.LINK_SWALLOWED,
)
_DELAY_S = 0.2
_SWALLOW_S = 0.3


class Executors(Protocol):
    """Where they are."""

    executors: list[Service]

    @property
    def executor_links(self) -> Sequence[FaultProxy]: ...


def executor_of(stack: Executors, fault: Fault) -> Service:
    return stack.executors[fault.target % len(stack.executors)]


def runners(executors: Iterable[Service]) -> list[int]:
    """The ids of the processes that executors started."""
    return [pid for executor in executors if executor.is_up for pid in children(executor.process.pid)]


async def do(stack: Executors, fault: Fault) -> None:
    """One of KINDS or LINK_KINDS. Raises LookupError when nobody is there to be hit."""
    hold_s, executor = fault.hold_s, executor_of(stack, fault)
    match fault.kind:
        case Kind.EXECUTOR_KILLED:
            await restarted(executor, executor.kill, hold_s)
        case Kind.EXECUTOR_STOPPED:
            await restarted(executor, executor.stop, hold_s)
        case Kind.EXECUTOR_FROZEN_BRIEFLY | Kind.EXECUTOR_FROZEN_PAST_LEASE:
            await frozen(executor, hold_s)
        case Kind.RUNNER_KILLED:
            os.kill(one(runners(stack.executors), fault.target), signal.SIGKILL)
        case Kind.RUNNER_FROZEN:
            await _runner_frozen(one(runners(stack.executors), fault.target), hold_s)
        case _:
            await _do_to_link(used(stack.executor_links, fault.target), fault)


async def _do_to_link(link: FaultProxy, fault: Fault) -> None:
    match fault.kind:
        case Kind.LINK_CUT:
            link.cut()
        case Kind.LINK_RESET:
            link.reset()
        case Kind.LINK_STALLED_TO_SCHEDULER:
            await stalled(link, fault.hold_s, Direction.TO_SERVER)
        case Kind.LINK_STALLED_TO_EXECUTOR:
            await stalled(link, fault.hold_s, Direction.TO_CLIENT)
        case Kind.LINK_DELAYED:
            await _delayed(link, fault.hold_s)
        case Kind.LINK_SWALLOWED:
            await swallowed(link)
        case _:
            raise AssertionError(fault.kind)


async def heal(services: Iterable[Service]) -> None:
    """None of them is frozen or down."""
    for service in services:
        if service.is_up:
            service.process.thaw()
        else:
            await service.start()


async def restarted(service: Service, end: Callable[[], Awaitable[object]], hold_s: float) -> None:
    async with service.turn:
        await end()
        await asyncio.sleep(hold_s)
        await service.start()


async def frozen(service: Service, hold_s: float) -> None:
    async with service.turn:
        service.process.freeze()
        try:
            await asyncio.sleep(hold_s)
        finally:
            service.process.thaw()


async def process_frozen(process: Process, hold_s: float) -> None:
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


async def stalled(proxy: FaultProxy, hold_s: float, *directions: Direction) -> None:
    proxy.stall(*directions)
    try:
        await asyncio.sleep(hold_s)
    finally:
        proxy.resume()


async def swallowed(proxy: FaultProxy) -> None:
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


def used(links: Iterable[FaultProxy], target: int) -> FaultProxy:
    """One that carries a connection now."""
    return one([link for link in links if link.open_links], target)


def one(those: Sequence[T], target: int) -> T:
    return those[target % len(those)] if those else nobody()


def nobody() -> NoReturn:
    raise LookupError("nobody is there to be hit")
