"""What handlers did, written down outside of Rara by themselves.

Each line is appended by one write, so a kill leaves whole lines; instants are of the machine's monotonic clock, which
all processes share, so that lines of different processes can be compared.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rara_executor import BlockingJob, Job


class What(StrEnum):
    START = "start"  # the handler began
    TICK = "tick"  # it is still at work
    EFFECT = "effect"  # it did what must be done once
    END = "end"  # it returned


@dataclass(frozen=True, slots=True)
class Entry:
    """One line. key: the idempotency key; token: the lease's fencing number."""

    what: What
    key: str
    step_run_id: str
    token: int
    attempt: int
    pid: int
    at_s: float


class Writer:
    """Writes for one attempt."""

    def __init__(self, job: Job | BlockingJob) -> None:
        self._job = job
        self._file = os.open(
            job.input["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
        )

    def write(self, what: What) -> None:
        job = self._job
        entry = Entry(
            what,
            job.idempotency_key,
            job.step_run_id,
            job.lease_token,
            job.attempt,
            os.getpid(),
            time.monotonic(),
        )
        os.write(self._file, json.dumps(asdict(entry)).encode() + b"\n")

    def effect(self) -> dict[str, int]:
        """Do the effect; what is recorded of it names the attempt that did it."""
        self.write(What.EFFECT)
        return {"token": self._job.lease_token}

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Entry]:
    """All lines, in the order in which they were written."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            fields = json.loads(line)
            yield Entry(**(fields | {"what": What(fields["what"])}))
