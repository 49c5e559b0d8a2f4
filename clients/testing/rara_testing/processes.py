"""Real processes for system tests: started with a bound, signalled by pid, and gone when the test is over.

    async with Processes(tmp_path) as processes:
        scheduler = await processes.start("scheduler", ["rara-scheduler"], env={...}, ready="listening on")
        scheduler.kill()            # SIGKILL
        await scheduler.wait()

Signals: `kill`, `terminate`, `interrupt`, `freeze`, `thaw`. Memory: `limit_memory`, `resident_bytes`.

Standard error goes to `<folder>/<name>-<n>.stderr`, and its end into every failure's message.
"""

import asyncio
import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

READY_S = 30.0
EXIT_S = 15.0
_REPORT_BYTES = 4000
_LOOK_S = 0.01


class Process:
    """One started process, in a process group (and session) of its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, stderr: Path) -> None:
        self.name = name
        self.stderr = stderr
        self.lines: list[str] = []  # of standard output, so far
        self._process = process
        self._arrived = asyncio.Condition()
        self._closed = False  # standard output has ended
        self._reader = asyncio.create_task(self._read(), name=f"stdout of {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    async def _read(self) -> None:
        """Keep standard output empty, so that the process never blocks on it."""
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                async with self._arrived:
                    self.lines.append(line.decode(errors="replace").rstrip("\n"))
                    self._arrived.notify_all()
        finally:
            async with self._arrived:
                self._closed = True
                self._arrived.notify_all()

    async def expect_line(self, pattern: str, timeout_s: float = READY_S) -> re.Match[str]:
        """The first line of standard output, from the start on, in which the pattern is found."""
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                looked_at = 0
                while True:
                    for line in self.lines[looked_at:]:
                        if match := re.search(pattern, line):
                            return match
                    looked_at = len(self.lines)
                    if self._closed:
                        raise AssertionError(f"{self.name} ended without {pattern!r}\n{self.report()}")
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(
                f"no {pattern!r} from {self.name} in {timeout_s:g} s\n{self.report()}"
            ) from None

    def report(self) -> str:
        """What a failed test should show: exit code, last lines of both outputs."""
        with contextlib.suppress(FileNotFoundError):
            text = self.stderr.read_bytes()[-_REPORT_BYTES:].decode(errors="replace")
            out = "\n".join(self.lines[-20:])
            return f"--- {self.name}: pid {self.pid}, exit {self.returncode}\n--- stdout\n{out}\n--- stderr\n{text}"
        return f"--- {self.name}: pid {self.pid}, exit {self.returncode}"

    # ------------------------------------------------------------ signals

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL to this process alone: its children are its own business, and a test may look at them."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def interrupt(self) -> None:
        self._signal(signal.SIGINT)

    def freeze(self) -> None:
        """SIGSTOP."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    # ------------------------------------------------------------ memory and children (Linux)

    def limit_memory(self, size_bytes: int) -> None:
        """Let its address space grow no further than this; what it starts from now on inherits the limit.

        Allocations beyond fail in the process, as MemoryError in Python. Nothing is taken from it.
        """
        resource.prlimit(self.pid, resource.RLIMIT_AS, (size_bytes, size_bytes))

    def resident_bytes(self) -> int:
        """The memory that it occupies now; 0 when it is gone."""
        return resident_bytes(self.pid)

    def children(self) -> list[int]:
        """The ids of the processes that it started and that are there now."""
        return children(self.pid)

    async def wait(self, timeout_s: float = EXIT_S) -> int:
        """The exit code. Raises AssertionError, with the output, when it is still running after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exit()
        except TimeoutError:
            raise AssertionError(f"{self.name} still runs after {timeout_s:g} s\n{self.report()}") from None

    async def output(self, timeout_s: float = EXIT_S) -> list[str]:
        """All lines of standard output, when it has ended by itself. For a process that leaves no children."""
        await self.wait(timeout_s)
        async with asyncio.timeout(timeout_s):
            await self._reader
        return self.lines

    async def _exit(self) -> int:
        # Not Process.wait(): that waits for the end of standard output too, which a surviving child holds open.
        while (code := self._process.returncode) is None:
            await asyncio.sleep(_LOOK_S)
        return code

    async def kill_and_wait(self) -> None:
        self.kill()
        await self.wait()

    async def stop(self, timeout_s: float = EXIT_S) -> int:
        """SIGTERM, then the exit code."""
        self.terminate()
        return await self.wait(timeout_s)

    async def _clean_up(self) -> None:
        """Kill it and what is left of its process group; it led the group, so the id is its pid."""
        if self._process.returncode is None:
            self.thaw()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        async with asyncio.timeout(EXIT_S):
            await self._exit()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class Processes:
    """Owns processes: whatever happens in the test, they are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[Process] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for process in self._started:
                print(process.report(), file=sys.stderr)
        for process in reversed(self._started):
            await process._clean_up()

    async def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        ready: str | None = None,
        ready_s: float = READY_S,
        cwd: Path | None = None,
    ) -> Process:
        """Start a command and wait for a line of its standard output that matches `ready`.

        env: added to a small base (PATH, HOME, the interpreter's folder first), not to the caller's environment.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        stderr = self._folder / f"{name}-{len(self._started)}.stderr"
        with stderr.open("wb") as sink:
            started = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=sink,
                env=base_environment() | dict(env or {}),
                cwd=cwd,
                start_new_session=True,
            )
        process = Process(name, started, stderr)
        self._started.append(process)
        if ready is not None:
            await process.expect_line(ready, ready_s)
        return process

    async def python(self, name: str, code: str, *arguments: str, ready: str | None = None) -> Process:
        """A Python process that runs `code`."""
        return await self.start(name, [sys.executable, "-u", "-c", code, *arguments], ready=ready)


def resident_bytes(pid: int) -> int:
    """The memory that a process occupies; 0 when there is none (Linux)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def children(pid: int) -> list[int]:
    """The ids of a process's children; empty when it is gone (Linux)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return sorted(found)


def base_environment() -> dict[str, str]:
    """What a process of the suite sees: this interpreter's scripts first, nothing of RARA_* that is set outside."""
    scripts = str(Path(sys.executable).parent)
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
    path = os.environ.get("PATH", os.defpath)
    return kept | {"PATH": f"{scripts}{os.pathsep}{path}", "PYTHONUNBUFFERED": "1"}
