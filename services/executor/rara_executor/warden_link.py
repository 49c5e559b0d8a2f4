"""The supervisor's end of the warden: which runners exist, and until when their leases hold."""

import os
import subprocess
import sys
from pathlib import Path

from rara_executor import warden


class Warden:
    """Runs the warden process. If it dies it is started again with all that it has to know."""

    def __init__(self) -> None:
        self._marks: dict[int, str] = {}
        self._deadlines: dict[int, float | None] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def start(self) -> None:
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        path = Path(warden.__file__)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(path), str(reader)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[reader],
                start_new_session=True,
            )
        finally:
            os.close(reader)
        for group, deadline in self._deadlines.items():
            self._tell(group, deadline)

    def add(self, group: int, mark: str) -> None:
        """A runner has started, with its mark in its environment; its life has no end yet."""
        self._marks[group] = mark
        self.watch(group, None)

    def watch(self, group: int, deadline: float | None) -> None:
        """Kill the runner and its tree at the deadline (on the lease clock), or never while we live."""
        if group in self._marks and self._deadlines.get(group, -1.0) != deadline:
            self._deadlines[group] = deadline
            self._tell(group, deadline)

    def watch_if_free(self, group: int, deadline: float) -> None:
        """Give a deadline to a group that has none: its first job must not wait for the next look at all."""
        if self._deadlines.get(group, 0.0) is None:
            self.watch(group, deadline)

    def forget(self, group: int) -> None:
        """The group has ended."""
        if self._marks.pop(group, None) is not None:
            del self._deadlines[group]
            self._write(f"{group} gone\n")

    def check(self) -> bool:
        """Start it again if it has died; False: it had."""
        if self._process is None or self._process.poll() is None:
            return True
        self._close_pipe()
        self.start()
        return False

    def stop(self) -> None:
        """Let it end: it kills what is still there."""
        self._close_pipe()
        if self._process is not None:
            try:
                self._process.wait(timeout=2)
            except (subprocess.TimeoutExpired, OSError):  # a clock that jumps makes the wait itself fail
                self._process.kill()
                self._process.wait()
            self._process = None

    def _tell(self, group: int, deadline: float | None) -> None:
        self._write(f"{group} {self._marks[group]} {'-' if deadline is None else f'{deadline:.3f}'}\n")

    def _write(self, line: str) -> None:
        if self._pipe < 0:
            return
        try:
            os.write(self._pipe, line.encode())  # shorter than PIPE_BUF: whole or not at all
        except BlockingIOError:
            # A warden that reads nothing is stopped or stuck: check() replaces it, told everything anew.
            if self._process is not None:
                self._process.kill()
        except BrokenPipeError:
            pass  # check() starts it again

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
