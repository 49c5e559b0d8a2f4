"""Become another program that ends when its owner does.

    python -I -S shim.py UID GID OWNER SIGNAL LIFELINE PROGRAM ARGUMENT...

Run by path, not by name: it starts before privileges are dropped, from an interpreter that the account may be
unable to reach, and needs nothing but the standard library. UID and GID of -1 keep the account. SIGNAL is what
PROGRAM gets when the owner ends; 0: nothing. LIFELINE of -1 leaves that to the kernel, which only Linux can do;
else it is the reading end of a pipe whose other end the owner keeps, and a small process watches it.
Exits with 126 where it cannot become PROGRAM.
"""

import ctypes
import os
import select
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    uid, gid, owner, death_signal, lifeline = (int(argument) for argument in arguments[:5])
    program = arguments[5:]
    if uid != -1:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if death_signal and lifeline != -1:
        leave_watcher(lifeline, death_signal)
    elif death_signal:
        ask_kernel(owner, death_signal)
    os.execv(program[0], program)  # noqa: S606 - the point of this file


def ask_kernel(owner: int, death_signal: int) -> None:
    """After the change of user, which clears it. The kernel signals when the thread that started us ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != owner:  # it ended before the request was made
        raise ProcessLookupError("the owner has ended")


def leave_watcher(lifeline: int, death_signal: int) -> None:
    """Leave a process behind that waits for the end of the owner, or of the program, and signals the latter."""
    program = os.getpid()
    ended, held = os.pipe()  # the program and all its children hold one end: it closes with the last of them
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(ended)
        os.close(lifeline)
        os.set_inheritable(held, True)
        return
    if os.fork():
        os._exit(0)  # so that the watcher is no child of the program, which would wonder about it
    os.close(held)
    if ended not in select.select([lifeline, ended], [], [])[0]:
        os.kill(program, death_signal)
    os._exit(0)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.stderr.write(f"cannot start {' '.join(sys.argv[6:7])}: {error}\n")
        sys.exit(126)
