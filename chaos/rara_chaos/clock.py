"""Jumps of the wall clock in processes that were started for it, by libfaketime. Their timers run as ever."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

JUMPS_S: Final = (3600, -3600, 86_400 * 400, -86_400 * 400, 5, -5)
# For processes with several threads, which all of ours are.
_NAME: Final = "faketime/libfaketimeMT.so.1"


def library() -> Path | None:
    """Where libfaketime is, as its package installs it."""
    folder = Path("/usr/lib")
    return next(iter(sorted([*folder.glob(f"*/{_NAME}"), *folder.glob(_NAME)])), None)


def why_not() -> str:
    """Why no clock can jump here; empty: they can."""
    return "" if library() else "libfaketime is not installed (package `faketime`)"


def environment(preloaded: str, told_by: str) -> Mapping[str, str]:
    """Of a process, and of its children, that looks once a second what its clock is off by; no file: by nothing."""
    return {
        "LD_PRELOAD": preloaded,
        "FAKETIME_TIMESTAMP_FILE": told_by,
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


def offset(target: int) -> str:
    """The seed's choice, as libfaketime reads it."""
    return f"{JUMPS_S[target % len(JUMPS_S)]:+d}s"


class Clock:
    """One process's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> Mapping[str, str]:
        return environment(str(library()), str(self._file))

    def jump(self, told: str) -> None:
        draft = self._file.with_suffix(".new")
        draft.write_text(f"{told}\n")
        os.replace(draft, self._file)  # noqa: PTH105 - and at no moment half of it

    def reset(self) -> None:
        self._file.unlink(missing_ok=True)
