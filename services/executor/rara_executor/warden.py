"""A small process that kills runners whose supervisor is dead, or too long frozen to renew their leases.

Started as `python -I -S warden.py FD`; it imports nothing of ours, so that it is small and starts at once.
Lines from the supervisor: `PGID DEADLINE` (on the lease clock, seconds; `-` for none), and `PGID gone`.
"""

import contextlib
import os
import select
import signal
import sys
import time

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def main(descriptor: int) -> None:
    # A stop signal to the whole process group is the supervisor's to answer; we leave when it has.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    deadlines: dict[int, float] = {}
    rest = b""
    while True:
        now = time.clock_gettime(CLOCK)
        for group in [group for group, deadline in deadlines.items() if deadline <= now]:
            kill(group)
            deadlines[group] = float("inf")
        wait_s = min(deadlines.values(), default=float("inf")) - now
        readable, _, _ = select.select([descriptor], [], [], min(max(wait_s, 0.0), 60.0))
        if not readable:
            continue
        data = os.read(descriptor, 65536)
        if not data:
            for group in deadlines:
                kill(group)
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            name, _, word = line.partition(b" ")
            if word == b"gone":
                deadlines.pop(int(name), None)
            else:
                deadlines[int(name)] = float("inf") if word == b"-" else float(word)


def kill(group: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
