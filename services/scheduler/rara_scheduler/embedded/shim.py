"""Become another program that ends when its owner does.

    python -I -S shim.py UID GID OWNER SIGNAL PROGRAM ARGUMENT...

Run by path, not by name: it starts before privileges are dropped, from an interpreter that the account may be
unable to reach, and needs nothing but the standard library. UID and GID of -1 keep the account; SIGNAL 0 asks
for no signal. Exits with 126 where it cannot become PROGRAM.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    uid, gid, owner, death_signal = (int(argument) for argument in arguments[:4])
    program = arguments[4:]
    if uid != -1:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if death_signal and sys.platform == "linux":
        # After the change of user, which clears it. The kernel sends it when the thread that started us ends.
        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != owner:  # it ended before the request was made
            raise ProcessLookupError("the owner has ended")
    os.execv(program[0], program)  # noqa: S606 - the point of this file


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.stderr.write(f"cannot start {' '.join(sys.argv[5:6])}: {error}\n")
        sys.exit(126)
