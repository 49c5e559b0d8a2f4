"""The one log line that each drain ends with."""

import json
from typing import Any

from rara_testing.processes import Process

FIELDS = {"finished", "handed_back", "lost", "spent", "duration_s"}


def events_of(process: Process, event: str) -> list[dict[str, Any]]:
    """What a process has logged under this name, in JSON."""
    lines = process.stderr.read_text(errors="replace").splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in logged if line.get("event", line.get("msg")) == event]


def drained(process: Process) -> tuple[int, int, int, int]:
    """finished, handed_back, lost and spent of the line, which stands there once, whole."""
    lines = events_of(process, "drain.ended")
    assert len(lines) == 1, process.report()
    assert lines[0].keys() >= FIELDS, lines
    assert 0 <= lines[0]["duration_s"] < 60
    return lines[0]["finished"], lines[0]["handed_back"], lines[0]["lost"], lines[0]["spent"]
