"""The stack of one's own on this machine, as a target."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from rara_testing.processes import resident_bytes

from rara_chaos import clock, disk, golang
from rara_chaos.faults import LocalFaults
from rara_chaos.load import Confirmed
from rara_chaos.schedule import MACHINE_KINDS, PROCESS_KINDS, Kind
from rara_chaos.shapes import MIXED_SHAPES, SHAPES
from rara_chaos.stack import Stack
from rara_chaos.target import Target
from rara_chaos.verdict import Verdict, judge


class Local(Target):
    name = "local"
    kinds = PROCESS_KINDS

    def __init__(self, stack: Stack, left_out: Mapping[Kind, str]) -> None:
        self._stack = stack
        self.left_out = left_out
        self.also = [kind for kind in MACHINE_KINDS if kind not in left_out]
        self.shapes = MIXED_SHAPES if stack.go else SHAPES
        self.addresses = [link.address for link in stack.client_links]
        self.ledger = str(stack.ledger)
        self.database_url = stack.postgres.dsn
        self.executor_kinds = sorted({one.command.executor_kind for one in stack.executors})
        self.faults = LocalFaults(stack)

    async def beside(self) -> None:
        await self._stack.collecting.run()

    async def memory(self) -> Mapping[str, int]:
        return {
            service.command.name: now
            for service in self._stack.services
            if service.is_up and (now := resident_bytes(service.process.pid))
        }

    async def judge(self, confirmed: Sequence[Confirmed]) -> Verdict:
        stack = self._stack
        await stack.collecting.once("--older-than", "0s", "--grace", "0s", "--force")
        verdict = await judge(stack.postgres.dsn, stack.ledger, stack.blob_folder, confirmed, stack.kills)
        verdict.removed = stack.collecting.removed
        verdict.violations += stack.collecting.violations
        verdict.violations += [
            f"{crash.name} ended with {crash.code}: {crash.report}" for crash in stack.crashes
        ]
        return verdict


@asynccontextmanager
async def local(folder: Path, *, with_go: bool) -> AsyncIterator[Local]:
    """Started, and stopped at the end."""
    reasons = {
        Kind.CLOCK_JUMPED: clock.why_not(),
        Kind.DISK_FULL: await asyncio.to_thread(disk.why_not, folder),
    }
    left_out = {kind: why for kind, why in reasons.items() if why}
    async with contextlib.AsyncExitStack() as exits:
        go = await golang.build(folder) if with_go else None
        stack = Stack(
            folder,
            go=go,
            with_clocks=Kind.CLOCK_JUMPED not in left_out,
            with_disk=Kind.DISK_FULL not in left_out,
        )
        yield Local(await exits.enter_async_context(stack), left_out)
