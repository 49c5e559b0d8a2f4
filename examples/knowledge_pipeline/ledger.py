"""A file that stands for a system outside Rara: what is written here cannot be taken back.

It does what a careful sink does with what a step hands it: the key makes a repeat harmless, and the lease
token turns an attempt away that has been superseded.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any


class Superseded(Exception):
    """A newer attempt of the same step has written already."""


def record(
    path: Path, *, idempotency_key: str, effect: str, lease_token: int, values: dict[str, object]
) -> dict[str, object]:
    """Write one line for the call; the receipt says which line holds the effect.

    A call whose key and effect are known changes nothing: its line has `applied` false.

    Raises Superseded if a larger lease token has written for this key.
    """
    with path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        written = file.read()
        whole = written[: written.rfind(b"\n") + 1]
        if whole != written:
            file.truncate(len(whole))  # a line that a crash cut off was never written
        lines = _parse(whole)
        own = [line for line in lines if line["idempotency_key"] == idempotency_key]
        if any(line["lease_token"] > lease_token for line in own):
            raise Superseded(f"a newer attempt than lease {lease_token} has written to {path.name}")
        known = next((line for line in own if line["effect"] == effect and line["applied"]), None)
        entry = {
            "number": len(lines) + 1,
            "idempotency_key": idempotency_key,
            "effect": effect,
            "applied": known is None,
            "lease_token": lease_token,
            "values": values,
        }
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return {"number": (known or entry)["number"], "effect": effect}


def entries(path: Path) -> list[dict[str, Any]]:
    """All calls, in their order; none if nothing was ever written."""
    if not path.exists():
        return []
    return _parse(path.read_bytes())


def _parse(lines: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.split(b"\n") if line]
