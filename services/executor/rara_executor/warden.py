"""Kills runners with all that they started: a small process of its own, for when their supervisor cannot.

Started as `python -I -S warden.py FD`; it imports nothing of ours, so that it is small and starts at once. It kills
what a supervisor leaves that is dead, or too long frozen to renew its leases.
Lines from the supervisor: `PGID MARK DEADLINE` (on the lease clock, seconds; `-` for none), and `PGID gone`.
"""

import contextlib
import os
import select
import signal
import sys
import time

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
MARK = "RARA_RUNNER"  # in a runner's environment, and so in that of all that it starts, wherever that goes
MAX_PASSES = 20  # of killing, against what forks meanwhile


def main(descriptor: int) -> None:
    # A stop signal to the whole process group is the supervisor's to answer; we leave when it has.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deadlines: dict[int, float] = {}
    marks: dict[int, str] = {}
    rest = b""
    while True:
        now = time.clock_gettime(CLOCK)
        for group in [group for group, deadline in deadlines.items() if deadline <= now]:
            kill_tree(group, marks[group])
            deadlines[group] = float("inf")
        wait_s = min(deadlines.values(), default=float("inf")) - now
        readable, _, _ = select.select([descriptor], [], [], min(max(wait_s, 0.0), 60.0))
        if not readable:
            continue
        data = os.read(descriptor, 65536)
        if not data:
            for group, mark in marks.items():
                kill_tree(group, mark)
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            name, *words = line.decode().split()
            if words == ["gone"]:
                deadlines.pop(int(name), None)
                marks.pop(int(name), None)
            else:
                marks[int(name)] = words[0]
                deadlines[int(name)] = float("inf") if words[1] == "-" else float(words[1])


def kill_tree(leader: int, mark: str) -> None:
    """Kill the leader's process group, and all that descends from it or carries its mark in whatever group.

    The leader may have ended, if its number cannot be another's yet. Where there is no /proc the group has to do.
    """
    for _ in range(MAX_PASSES):
        found = strays(leader, mark)  # before the first kill, while it shows who descends from whom
        with contextlib.suppress(OSError):  # it has ended, or is not yet a group
            os.killpg(leader, signal.SIGKILL)
        for pid in [leader, *found]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def strays(leader: int, mark: str) -> list[int]:
    """The living processes below the leader, in its session, or marked as its own, and all below those."""
    wanted = f"\0{MARK}={mark}\0".encode()
    children: dict[int, list[int]] = {}
    roots = [leader]
    for pid, (state, parent, session) in processes().items():
        if state in "ZX" or pid == leader:
            continue
        children.setdefault(parent, []).append(pid)
        if session == leader or wanted in b"\0" + _read(f"/proc/{pid}/environ"):
            roots.append(pid)
    found: set[int] = set()
    while roots:
        pid = roots.pop()
        if pid not in found:
            found.add(pid)
            roots += children.get(pid, [])
    return sorted(found - {leader, os.getpid()})


def processes() -> dict[int, tuple[str, int, int]]:
    """State, parent and session by process number; empty where there is no /proc."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208 - no pathlib: it is slow to import
            if name.isdigit() and (stat := _read(f"/proc/{name}/stat")):
                state, parent, _, session = stat.rpartition(b")")[2].split()[:4]
                found[int(name)] = state.decode(), int(parent), int(session)
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a file of the kernel
            return file.read()
    except OSError:  # it has ended meanwhile, or is another user's
        return b""


if __name__ == "__main__":
    main(int(sys.argv[1]))
