"""Processes whose wall clock is wrong, by libfaketime."""

from pathlib import Path


def library() -> Path | None:
    """Where libfaketime is, as its package installs it."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))), None)


def skewed(seconds: int) -> dict[str, str]:
    """The environment of a process, and of its children, whose wall clock is off by so much. Timers run as ever."""
    return {
        "LD_PRELOAD": str(library()),
        "FAKETIME": f"{seconds:+d}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
