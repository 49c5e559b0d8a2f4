"""`rara-executor` as a process of its own, with the handlers of `case_handlers`, and what those have noted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rara_testing.processes import Process, Processes
from support.running_executor import TESTS


async def start_executor(
    processes: Processes,
    address: str,
    folder: Path,
    *,
    name: str = "exec-1",
    slots: int = 2,
    stop_s: float = 5.0,
) -> Process:
    """Start one and wait until it has connected. Each start needs no folder of its own: the process id tells apart."""
    return await processes.start(
        name,
        [
            "rara-executor", "--scheduler", address, "--module", "support.case_handlers", "--name", name,
            "--dir", str(folder / name), "--slots", str(slots),
        ],
        env={"PYTHONPATH": str(TESTS), "RARA_EXECUTOR_PRESTART": "1", "RARA_EXECUTOR_STOP_S": str(stop_s)},
        ready=f"rara-executor {name} connected to {address}",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Note:
    """at: monotonic seconds, comparable between processes of one machine."""

    key: str
    attempt: int
    lease_token: int
    at: float


def notes(folder: Path, name: str) -> Sequence[Note]:
    """What the handlers wrote into `starts`, `effects` or `counted`."""
    path = folder / name
    if not path.exists():
        return []
    lines = [line.split() for line in path.read_text().splitlines()]
    return [Note(key, int(attempt), int(token), float(at)) for key, attempt, token, at in lines]
