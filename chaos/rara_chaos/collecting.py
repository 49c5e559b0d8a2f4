"""Collects garbage beside the load, one short collection after the other, with next to no patience.

What an attempt has uploaded may be gone before its manifest is committed: then it is asked to upload it again.
"""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import Sequence

import orjson
from rara_scheduler.embedded import account
from rara_testing.processes import Process, Processes

_PAUSE_S = 1.0
_END_S = 120.0  # on a machine that is busy, with a database that is frozen
_KILLED = -signal.SIGKILL
_UNREACHABLE = 6


class Collecting:
    """removed: blobs. violations: what a collection should never end with."""

    def __init__(self, processes: Processes, database_url: str, blob_store: str) -> None:
        self.ended: Counter[int] = Counter()  # by exit code
        self.removed = 0
        self.violations: list[str] = []
        self._processes = processes
        self._env = {"RARA_DATABASE_URL": database_url, "RARA_BLOB_STORE": blob_store}
        self._process: Process | None = None

    @property
    def running(self) -> Process:
        """The process of the collection that is under way. Raises LookupError between two of them."""
        if self._process is None or self._process.returncode is not None:
            raise LookupError("no collection is under way")
        return self._process

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            # Few blobs, and many crashes: what they leave may be most of it.
            await self.once("--older-than", "0.5s", "--grace", "0.2s", "--force")
            await asyncio.sleep(_PAUSE_S)

    async def once(self, *options: str) -> int:
        """One collection; its exit code."""
        self._process = await self._start(options)
        try:
            code = await self._process.wait(_END_S)
        except AssertionError as error:
            self.violations.append(f"a collection hangs: {error}")
            self._process.thaw()
            await self._process.kill_and_wait()
            return _KILLED
        self.ended[code] += 1
        if code == 0:
            lines = await self._process.output()
            self.removed += orjson.loads(lines[-1])["removed"]["count"]
        elif code not in (_UNREACHABLE, _KILLED) and "DATABASE_" not in self._process.report():
            self.violations.append(f"a collection ended with {code}: {self._process.report()}")
        return code

    async def _start(self, options: Sequence[str]) -> Process:
        program = [sys.executable, "-m", "rara_cli", "artifact", "gc", "-o", "json", *options]
        return await self._processes.start(
            "collector", account.command(program, None, signal.SIGKILL), env=self._env
        )
