"""One child process that is kept running: started, awaited until it is ready, restarted, stopped.

A part writes to a file, not to a pipe: what outlives it for a moment (an executor's runners) cannot hold its
end of a pipe open, and a busy terminal cannot make it wait.
"""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO, Final

# A part that lived so long was healthy: its next death starts the count anew.
_HEALTHY_S: Final = 30.0
_BACKOFF_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0)
_POLL_S: Final = 0.05
_OLD_LOG_BYTES: Final = 10 * 1024 * 1024


class PartFailed(Exception):
    """A part did not start, or died too often. The text ends with the end of its log."""


class PartState(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What to run and when it counts as ready.

    ready: matched against whole lines of the part's output.
    """

    name: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    ready: re.Pattern[str]
    log: Path
    ready_within_s: float = 60.0
    stop_within_s: float = 20.0


class Part:
    """Keeps one process running.

    A process that ends before it was ever ready is a fault of its settings: it fails at once. Later deaths are
    answered by a restart, after 0.2 s at first, until it has died six times without 30 healthy seconds
    between. Then the part is failed, and `ended` raises.
    """

    def __init__(self, spec: PartSpec, *, report: Callable[[str], None]) -> None:
        self.spec = spec
        self.restarts = 0
        self._report = report
        self._state = PartState.STOPPED
        self._changed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._match: re.Match[str] | None = None
        self._may_start = asyncio.Event()
        self._is_stopping = False
        self._was_killed = False

    @property
    def state(self) -> PartState:
        return self._state

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> re.Match[str]:
        """Start and wait until ready; the match of the ready line. Raises PartFailed."""
        if self._keeper is not None:
            raise RuntimeError(f"{self.spec.name} is started already")
        self._is_stopping = False
        self._may_start.set()
        self._set(PartState.STARTING)
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")
        return await self.ready()

    async def ready(self) -> re.Match[str]:
        """Wait until the process that runs now, or the next one, is ready. Raises PartFailed."""
        while True:
            changed = self._changed
            if self._state is PartState.READY and self._match is not None:
                return self._match
            if self._state in (PartState.FAILED, PartState.STOPPED):
                await self.ended()
                raise PartFailed(f"{self.spec.name} is stopped")
            await changed.wait()

    async def ended(self) -> None:
        """Wait until the part is stopped; raises PartFailed if it gave up."""
        if self._keeper is not None:
            await asyncio.shield(self._keeper)

    async def kill(self, *, restart: bool = True) -> int:
        """SIGKILL the process and wait until it is gone; its id. Without `restart` it stays down until `revive`."""
        process = self._process
        if process is None or process.returncode is not None:
            raise PartFailed(f"{self.spec.name} does not run")
        if not restart:
            self._may_start.clear()
        self._was_killed = True
        self._set(PartState.STARTING)
        process.kill()
        await process.wait()
        return process.pid

    async def revive(self) -> re.Match[str]:
        """Start a process that was killed to stay down; wait until it is ready."""
        self._may_start.set()
        return await self.ready()

    def interrupt(self) -> None:
        """SIGKILL the process and all in its group, and start no other: the last resort of stopping."""
        self._is_stopping = True
        self._may_start.set()
        self._signal_group(signal.SIGKILL)

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to the whole group after `stop_within_s`. Stopping twice is harmless."""
        keeper = self._keeper
        self._is_stopping = True
        self._may_start.set()
        if keeper is None:
            return
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(self.spec.stop_within_s):
                    await process.wait()
            except TimeoutError:
                self._report(f"{self.spec.name} did not stop within {self.spec.stop_within_s:g} s: killed")
            finally:
                # Also what it left behind: runners end with it, these would be strangers to everybody.
                self._signal_group(signal.SIGKILL)
        with contextlib.suppress(PartFailed):
            await keeper
        self._keeper = None

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def _keep(self) -> None:
        """Run the process again and again, until it is stopped or hopeless."""
        deaths = 0
        try:
            while not self._is_stopping:
                began = time.monotonic()
                code = await self._run_once()
                if self._is_stopping:
                    break
                lived_s = time.monotonic() - began
                deaths = 1 if lived_s >= _HEALTHY_S else deaths + 1
                if self._was_killed:  # by kill(): asked for, so no sign of trouble
                    deaths, self._was_killed = 1, False
                how = _how(code)
                if self._match is None or deaths > len(_BACKOFF_S):
                    often = f" {deaths} times" if deaths > 1 else ""
                    raise PartFailed(f"{self.spec.name} {how}{often}; {self._last_words()}")
                pause_s = _BACKOFF_S[deaths - 1]
                self._report(f"{self.spec.name} {how}; starting it again in {pause_s:g} s")
                await asyncio.sleep(pause_s)
                await self._may_start.wait()
                self.restarts += 1
            self._set(PartState.STOPPED)
        except PartFailed:
            self._set(PartState.FAILED)
            raise

    async def _run_once(self) -> int:
        """Start the process, note when it is ready, and wait for its end; its exit code."""
        self._set(PartState.STARTING)
        spec = self.spec
        with _open_log(spec.log) as log:
            offset = log.seek(0, os.SEEK_END)
            process = self._process = await asyncio.create_subprocess_exec(
                *_bound_to_us(spec.command),
                env=dict(spec.env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C goes to the whole foreground group; these are stopped in their order instead.
                start_new_session=True,
            )
        if self._is_stopping:  # stop() saw no process yet
            process.terminate()
        try:
            match = await self._ready_line(process, offset)
            if match is not None:
                self._match = match
                if process.returncode is None:
                    self._set(PartState.READY)
            return await process.wait()
        except asyncio.CancelledError:
            self.interrupt()
            await process.wait()
            raise

    async def _ready_line(self, process: asyncio.subprocess.Process, offset: int) -> re.Match[str] | None:
        """The line that says the part serves; None if the process ended first. Raises PartFailed when late."""
        deadline = time.monotonic() + self.spec.ready_within_s
        while True:
            has_ended = process.returncode is not None
            for line in _lines(self.spec.log, offset):
                match = self.spec.ready.fullmatch(line)
                if match is not None:
                    return match
            if has_ended or self._is_stopping:
                return None
            if time.monotonic() > deadline:
                self.interrupt()
                await process.wait()
                raise PartFailed(
                    f"{self.spec.name} was not ready within {self.spec.ready_within_s:g} s; {self._last_words()}"
                )
            await asyncio.sleep(_POLL_S)

    def _last_words(self) -> str:
        lines = [line for line in _lines(self.spec.log, max(0, self.spec.log.stat().st_size - 4096)) if line]
        tail = "\n".join(f"  {line}" for line in lines[-5:])
        return f"its log {self.spec.log} ends with:\n{tail}" if tail else f"its log {self.spec.log} is empty"

    def _set(self, state: PartState) -> None:
        self._state = state
        self._changed.set()
        self._changed = asyncio.Event()


def _bound_to_us(command: tuple[str, ...]) -> list[str]:
    """The command through a small program that has the kernel end it when we end, however we do."""
    try:
        from rara_scheduler.embedded import account
    except ImportError as error:
        raise PartFailed("this installation lacks the scheduler: pip install 'rara[all]'") from error
    return account.command(list(command), None, signal.SIGKILL)


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size > _OLD_LOG_BYTES:
        path.replace(path.with_suffix(".old"))
    return path.open("ab")


def _lines(path: Path, offset: int) -> list[str]:
    """Whole lines from this byte on."""
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read(1024 * 1024).decode("utf-8", "replace")
    return text.split("\n")[:-1]


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
