"""The executor that is verified: a command that we start, or an address that is served already."""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rara_testing.conformance.scenario import Way
from rara_testing.ports import free_port

SLOTS: Final = 2
SECRET_NAME: Final = "PROBE_SECRET"  # noqa: S105 - the name of a variable
SECRET: Final = "pr0be/s3cret+value"  # noqa: S105 - planted to be looked for
STOP_S: Final = 3.0
_EXIT_S: Final = 15.0
_STDERR_BYTES: Final = 4000


class TargetFailed(Exception):
    """The executor could not be started, or did not end when it had to."""


@dataclass
class Target:
    """command: started by a shell's rules for words, with RARA_* variables. address: where one serves already.

    Exactly one of them is given. way: how it is met; an address is always direct.
    """

    folder: Path
    command: str = ""
    address: str = ""
    way: Way = Way.SESSION
    env: Mapping[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None

    @property
    def is_ours(self) -> bool:
        return bool(self.command)

    async def start(self, scheduler: str) -> None:
        """Start the command, if it is ours and does not run. Raises TargetFailed."""
        if not self.is_ours or (self.process is not None and self.process.returncode is None):
            return
        if self.way is Way.DIRECT:
            self.address = f"127.0.0.1:{free_port()}"
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "executor.log").open("ab") as log:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *shlex.split(self.command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self._environment(scheduler),
                    start_new_session=True,
                )
            except OSError as error:
                raise TargetFailed(f"{self.command}: {error}") from None

    def _environment(self, scheduler: str) -> dict[str, str]:
        mine = {
            "RARA_SCHEDULER": scheduler,
            "RARA_EXECUTOR_NAME": "verified",
            "RARA_EXECUTOR_SLOTS": str(SLOTS),
            "RARA_EXECUTOR_STOP_S": str(STOP_S),
            "RARA_EXECUTOR_DIR": str(self.folder / "executor"),
            "RARA_EXECUTOR_LISTEN": self.address if self.way is Way.DIRECT else "",
            SECRET_NAME: SECRET,
        }
        return {**os.environ, **self.env, **mine}

    def signal(self, name: str) -> None:
        """Send SIGNAME to the process alone."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.Signals[f"SIG{name}"])

    async def exit_code(self, within_s: float) -> int:
        """Raises TargetFailed when it still runs then."""
        assert self.process is not None
        try:
            async with asyncio.timeout(within_s):
                return await self.process.wait()
        except TimeoutError:
            raise TargetFailed(f"still runs after {within_s:g} s") from None

    async def stop(self) -> None:
        """End what was started; by force where it takes longer than it may."""
        process, self.process = self.process, None
        if process is None:
            return
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.terminate()
            try:
                async with asyncio.timeout(_EXIT_S):
                    await process.wait()
            except TimeoutError:
                print("verify: the executor did not end within its stop bound, killed", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def last_words(self) -> str:
        """The end of what it printed."""
        with contextlib.suppress(OSError):
            return (self.folder / "executor.log").read_bytes()[-_STDERR_BYTES:].decode(errors="replace")
        return ""
