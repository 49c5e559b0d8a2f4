"""What a handler starts and leaves behind stays below its runner, which so knows of it."""

import contextlib
import ctypes
import os
import signal
import sys

from rara_executor.warden import MARK, processes, strays

_PR_SET_CHILD_SUBREAPER = 36
# Processes that the standard library keeps for later use: they do nothing by themselves and end with the runner.
_HELPERS = (b"resource_tracker", b"multiprocessing.forkserver")


def adopt_orphans() -> None:
    """Have the kernel give this process the children of its dead descendants. Linux; elsewhere nothing happens."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def has_children() -> bool:
    """Whether this process has any child, dead or alive, but the library's helpers."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # there is none, or this system cannot tell
        return False
    own = os.getpid()
    return any(parent == own and not _is_helper(pid) for pid, (_, parent, _) in processes().items())


def kill_descendants() -> None:
    """While this process lives they are found whatever their environment, session or group."""
    for pid in strays(os.getpid(), os.environ.get(MARK, "")):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _is_helper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123 - a file of the kernel
            line = file.read()
    except OSError:
        return False
    return any(helper in line for helper in _HELPERS)
