"""One spawned process: its output line by line, its end with cause and peak memory, its tree's kill."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rara_executor.warden import kill_tree

MAX_LINE_BYTES = 8 << 10
LINES_PER_S = 500
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024
_AFTER_EXIT_S = 1.0  # how long to wait for the end of output that a child of the child still holds open


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended: one of exit_code and signal."""

    exit_code: int | None
    signal: int | None
    out_of_memory: bool
    peak_memory_bytes: int | None

    def describe(self) -> str:
        if self.out_of_memory:
            return "killed for want of memory"
        return f"signal {self.signal}" if self.signal is not None else f"exit code {self.exit_code}"


class ChildProcess:
    """A process in a session and process group of its own.

    mark: what its environment says of it, by which all that comes from it is found.
    on_exit is called once, when the process has been reaped and all that it started killed.
    on_line gets the stream's name and one line without its end; over the limits lines are cut or counted.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        descriptors: Sequence[int],
        mark: str,
        environment: dict[str, str],
        on_line: Callable[[str, bytes], None],
        on_exit: Callable[[ProcessExit], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_exit = on_exit
        self._mark = mark
        self._oom_kills = oom_kills()
        self._killed_by_us = False
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            env=environment,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.exited: asyncio.Future[ProcessExit] = self._loop.create_future()
        self._readers = []
        for name, stream in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            if stream is not None:
                with stream:
                    self._readers.append(_LineReader(self._loop, os.dup(stream.fileno()), name, on_line))
        self._watch()

    def kill(self) -> None:
        """Kill the process and all that it started, unless it has ended."""
        if not self.exited.done():
            self._killed_by_us = True
            kill_tree(self.pid, self._mark)

    def _watch(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # not this system, or this sandbox: a thread waits
            threading.Thread(target=self._wait, name=f"wait {self.pid}", daemon=True).start()
            return
        self._loop.add_reader(descriptor, self._readable, descriptor)

    def _readable(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        self._reap()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._reap)

    def _reap(self) -> None:
        # While the leader is not reaped its number, and so its group's, cannot pass to somebody else.
        kill_tree(self.pid, self._mark)
        _, status, usage = os.wait4(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # Popen must not wait again
        killed = code == -signal.SIGKILL and not self._killed_by_us
        result = ProcessExit(
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            out_of_memory=killed and oom_kills() > self._oom_kills,
            peak_memory_bytes=usage.ru_maxrss * _MAXRSS_BYTES,
        )
        for reader in self._readers:
            reader.finish_soon(_AFTER_EXIT_S)
        self.exited.set_result(result)
        self._on_exit(result)


class _LineReader:
    """Reads a pipe to its end, so that the writer never blocks, and passes on what the limits allow."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        name: str,
        on_line: Callable[[str, bytes], None],
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor  # ours from now on
        os.set_blocking(self._descriptor, False)
        self._name = name
        self._on_line = on_line
        self._rest = b""
        self._window_started = loop.time()
        self._lines_in_window = 0
        self._left_out = 0
        self._open = True
        loop.add_reader(self._descriptor, self._readable)

    def finish_soon(self, within_s: float) -> None:
        self._readable()
        if self._open:
            self._loop.call_later(within_s, self._close)

    def _readable(self) -> None:
        if not self._open:
            return
        try:
            data = os.read(self._descriptor, 1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._pass_on(self._rest)
            self._rest = b""

    def _pass_on(self, line: bytes) -> None:
        now = self._loop.time()
        if now - self._window_started >= 1.0:
            self._tell_left_out()
            self._window_started, self._lines_in_window = now, 0
        self._lines_in_window += 1
        if self._lines_in_window > LINES_PER_S:
            self._left_out += 1
        else:
            self._on_line(self._name, line[:MAX_LINE_BYTES])

    def _tell_left_out(self) -> None:
        if self._left_out:
            self._on_line(self._name, b"[%d lines left out]" % self._left_out)
            self._left_out = 0

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            if self._rest:
                self._pass_on(self._rest)
            self._tell_left_out()


def oom_kills() -> int:
    """How often the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        with open("/proc/vmstat", "rb") as file:  # noqa: PTH123 - a file of the kernel, never long
            for line in file:
                if line.startswith(b"oom_kill "):
                    return int(line.split()[1])
    except OSError:
        pass
    return 0
