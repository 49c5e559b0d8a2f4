"""Carries out the schedule: injects each fault in a task of its own, and counts those that were really done."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import asyncpg

from rara_chaos.schedule import OF_EXECUTORS, Fault, Kind

_RETRY_S = 0.2
# What a fault meets while another one has what it is about.
_AWAY = (
    OSError,
    TimeoutError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    LookupError,
)


class Faults(Protocol):
    """What can be done to one kind of stack."""

    inject_s: float  # within this a fault finds its target, in spite of the others

    async def do(self, fault: Fault) -> None:
        """Do it, hold it, take it back. Raises LookupError or OSError when it cannot be done just now."""

    async def heal(self) -> None:
        """Whatever happened: nothing is frozen, cut off, full or down."""

    def executor_kind(self, fault: Fault) -> str:
        """Of the executor that a fault of one executor hits."""


class Injector:
    def __init__(self, faults: Faults, say: Callable[[str], None]) -> None:
        self.done: Counter[Kind] = Counter()
        self.hit: Counter[str] = Counter()  # faults of one executor, by its kind
        self.failed: list[str] = []
        self._faults = faults
        self._say = say
        self._began = time.monotonic()

    async def run(self, schedule: list[Fault]) -> None:
        """Return when the last fault was taken back."""
        self._began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in schedule:
                await asyncio.sleep(max(0.0, self._began + fault.at_s - time.monotonic()))
                tasks.create_task(self._inject(fault), name=str(fault.kind))

    async def _inject(self, fault: Fault) -> None:
        end = time.monotonic() + self._faults.inject_s
        while True:
            began = time.monotonic()
            try:
                await self._faults.do(fault)
                break
            except _AWAY as error:
                if time.monotonic() > end:
                    self.failed.append(f"{fault.kind}: {error!r}")
                    return
                await asyncio.sleep(_RETRY_S)
        self.done[fault.kind] += 1
        if fault.kind in OF_EXECUTORS:
            self.hit[self._faults.executor_kind(fault)] += 1
        self._say(f"{fault.kind}, begun {began - self._began:.1f} s, for {fault.hold_s:.1f} s")


async def held(fault: contextlib.AbstractAsyncContextManager[object], hold_s: float) -> None:
    async with fault:
        await asyncio.sleep(hold_s)
