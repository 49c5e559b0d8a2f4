"""What the PID file of a data directory stands for: a server, the trace of one, or nothing.

PostgreSQL takes "a process with that number lives" for "a server runs here". After a crash the number may be a
zombie that nobody has reaped, or by now belong to an unrelated program: common in containers, where numbers are
small. Deleting the file would be a race with a server that is starting. Instead the number is given to the new
server in PG_GRANDPARENT_PID, as one that it may disregard; its check of shared memory still protects the data.
"""

import subprocess
from pathlib import Path

PS_TIMEOUT_S = 5.0


def recorded_pid(data: Path) -> int | None:
    """The number in the PID file; None where there is no file, 0 where it holds no number."""
    try:
        first = (data / "postmaster.pid").read_text(errors="replace").partition("\n")[0].strip()
    except FileNotFoundError:
        return None
    return int(first) if first.isdecimal() else 0


def is_server_of(pid: int, data: Path) -> bool:
    """Whether that process is a living PostgreSQL server of this data directory."""
    proc = Path("/proc") / str(pid)
    if not Path("/proc/self/stat").exists():
        return _is_postgres_by_ps(pid)
    try:
        # PID (NAME) STATE ...; the name may hold anything, so look from the last bracket
        head, _, tail = (proc / "stat").read_text(errors="replace").rpartition(")")
        if tail.split()[0] in ("Z", "X") or not head.partition("(")[2].startswith("postgres"):
            return False
        return (proc / "cwd").samefile(data)
    except (OSError, IndexError):
        return False  # gone, or another account's: PostgreSQL does not take that for its own either


def _is_postgres_by_ps(pid: int) -> bool:
    done = subprocess.run(
        ["ps", "-p", str(pid), "-o", "stat=,comm="],  # noqa: S607 - its place differs between systems
        capture_output=True,
        text=True,
        timeout=PS_TIMEOUT_S,
        check=False,
    )
    state, _, name = done.stdout.strip().partition(" ")
    return bool(state) and not state.startswith("Z") and Path(name.strip()).name.startswith("postgres")
