"""A system that runs already, at HOST:PORT: load, faults of executors brought along, hooks of the user's, verdict.

Nothing is done to the system itself but by the hooks. Without its database the verdict comes from its answers.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rara_client import Client
from rara_client.security import Security
from rara_testing.fault_proxy import FaultProxy
from rara_testing.processes import Processes, resident_bytes

from rara_chaos import executorfaults, golang
from rara_chaos.answers import judge_answers
from rara_chaos.injector import Faults
from rara_chaos.load import Confirmed
from rara_chaos.schedule import Fault, Kind
from rara_chaos.shapes import MIXED_SHAPES, SHAPES
from rara_chaos.stack import Crash, Service, executor_command
from rara_chaos.target import Target
from rara_chaos.verdict import Verdict, judge

_EXECUTOR_TOKEN: Final = "RARA_CHAOS_EXECUTOR_TOKEN"  # noqa: S105 - its name
_SLOTS: Final = 4
_HOOK_S = 120.0  # beyond its hold
_REPORT_CHARACTERS = 500


@dataclass(slots=True)
class Brought:
    """Executors of ours at an address of somebody's."""

    executors: list[Service]
    executor_links: Sequence[FaultProxy]


class AddressFaults:
    """hooks: commands, each of which does a fault, holds it for HOLD_S seconds and takes it back."""

    inject_s = 30.0

    def __init__(self, brought: Brought, hooks: Sequence[str]) -> None:
        self._brought = brought
        self._hooks = hooks
        self._hook_turn = asyncio.Lock()

    async def do(self, fault: Fault) -> None:
        if fault.kind is Kind.HOOK:
            async with self._hook_turn:
                await _hooked(self._hooks[fault.target // 2 % len(self._hooks)], fault.hold_s)
        else:
            await executorfaults.do(self._brought, fault)

    async def heal(self) -> None:
        for link in self._brought.executor_links:
            link.resume()
        await executorfaults.heal(self._brought.executors)

    def executor_kind(self, fault: Fault) -> str:
        return executorfaults.executor_of(self._brought, fault).command.executor_kind


async def _hooked(command: str, hold_s: float) -> None:
    """Raises OSError when it fails, so that it is tried again."""
    process = await asyncio.create_subprocess_shell(
        command,
        env={**os.environ, "HOLD_S": f"{hold_s:.1f}"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(hold_s + _HOOK_S):
            said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise OSError(f"`{command}` ended with {process.returncode}: {said.decode()[-_REPORT_CHARACTERS:]}")


class Address(Target):
    name = "address"
    deals_all = False
    is_ours = False
    wants_blobs = False
    quiet_s = 180.0  # its leases may be long
    left_out: Mapping[Kind, str] = {}

    def __init__(
        self,
        addresses: Sequence[str],
        brought: Brought,
        crashes: Sequence[Crash],
        folder: Path,
        *,
        database_url: str,
        hooks: Sequence[str],
        ledger: str,
    ) -> None:
        kinds = [*executorfaults.KINDS, *executorfaults.LINK_KINDS] if brought.executors else []
        if not brought.executor_links:
            kinds = [kind for kind in kinds if kind not in executorfaults.LINK_KINDS]
        self.kinds = [*kinds, *([Kind.HOOK] if hooks else [])]
        self.executor_kinds = sorted({one.command.executor_kind for one in brought.executors})
        self.shapes = MIXED_SHAPES if "go" in self.executor_kinds else SHAPES
        self.addresses = addresses
        self.security = Security.from_environment()
        self.ledger = ledger or str(folder / "ledger.jsonl")
        self.database_url = database_url
        self.faults: Faults = AddressFaults(brought, hooks)
        self._brought = brought
        self._crashes = crashes

    async def beside(self) -> None:
        """Nothing."""

    async def memory(self) -> Mapping[str, int]:
        return {
            service.command.name: now
            for service in self._brought.executors
            if service.is_up and (now := resident_bytes(service.process.pid))
        }

    async def judge(self, confirmed: Sequence[Confirmed]) -> Verdict:
        ledger = Path(self.ledger)
        if self.database_url:
            kills = {one.command.name: one.kills for one in self._brought.executors}
            verdict = await judge(self.database_url, ledger, None, confirmed, kills, is_other_clock=True)
        else:
            kinds = {one.command.name: one.command.executor_kind for one in self._brought.executors}
            async with Client.connect(self.addresses[0], security=self.security) as client:
                verdict = await judge_answers(client, ledger, confirmed, kinds)
        verdict.violations += [
            f"{crash.name} ended with {crash.code}: {crash.report}" for crash in self._crashes
        ]
        return verdict


@asynccontextmanager
async def address(
    folder: Path,
    addresses: Sequence[str],
    *,
    executors: int,
    with_go: bool,
    database_url: str = "",
    hooks: Sequence[str] = (),
    ledger: str = "",
) -> AsyncIterator[Address]:
    """With so many executors brought along, every second of them in Go; 0: the system has the load's operations.

    ledger: as executors that were not brought along reach it.
    """
    async with contextlib.AsyncExitStack() as exits:
        processes = await exits.enter_async_context(Processes(folder / "logs"))
        go = await golang.build(folder) if with_go and executors > 1 else None
        brought, crashes = Brought([], []), list[Crash]()
        ways = await _ways(exits, addresses)
        brought.executor_links = [way for way in ways if isinstance(way, FaultProxy)]
        for number in range(executors):
            way = ways[number % len(ways)]
            env = _environment() | {"RARA_SCHEDULER": way.address if isinstance(way, FaultProxy) else way}
            name = f"{folder.name}-{number}"
            command = executor_command(name, folder, env, _SLOTS, go if number % 2 else None)
            service = Service(processes, command, crashes)
            exits.push_async_callback(service.end)
            brought.executors.append(service)
        await asyncio.gather(*(service.start() for service in brought.executors))
        yield Address(
            addresses, brought, crashes, folder, database_url=database_url, hooks=hooks, ledger=ledger
        )


async def _ways(exits: contextlib.AsyncExitStack, addresses: Sequence[str]) -> list[FaultProxy | str]:
    """Through a proxy that can fail, but for TLS, whose certificate is for the address itself."""
    if Security.from_environment().tls_ca:
        return [*addresses]
    ways: list[FaultProxy | str] = []
    for each in addresses:
        host, _, port = each.rpartition(":")
        ways.append(await exits.enter_async_context(FaultProxy(host.strip("[]"), int(port))))
    return ways


def _environment() -> dict[str, str]:
    """How the caller reaches the address, for executors too; a token of theirs has another role."""
    found = {
        name: value for name, value in os.environ.items() if name.startswith(("RARA_T", "RARA_INSECURE"))
    }
    if token := os.environ.get(_EXECUTOR_TOKEN):
        found = {name: value for name, value in found.items() if not name.startswith("RARA_TOKEN")}
        found["RARA_TOKEN"] = token
    return found
