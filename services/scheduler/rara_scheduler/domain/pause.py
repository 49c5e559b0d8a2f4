"""What is paused: kinds and definitions of which nothing is leased."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

MAX_PAUSES: Final = 1000  # at a time, those that are being resumed too
MAX_REASON: Final = 500  # characters
MAX_COUNTED: Final = 100_000  # steps held back, of one pause


@dataclass(frozen=True, slots=True)
class Target:
    """What a call is about: exactly one of the two has a name."""

    kind: str | None = None
    definition: str | None = None

    @property
    def sort(self) -> str:
        return "kind" if self.kind is not None else "definition"

    @property
    def name(self) -> str:
        return self.kind or self.definition or ""

    def __str__(self) -> str:
        return f"{self.sort} {self.name}"


@dataclass(frozen=True, slots=True)
class Pause:
    """resumed_at: it is over, and what stood aside is on its way back; None: it holds."""

    pause_id: int
    target: Target
    reason: str
    paused_by: str  # empty: nobody was asked for a token
    paused_at: datetime
    resumed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class PauseLoad:
    """What a pause holds back, counted up to MAX_COUNTED, and what of it is leased or runs."""

    held: int
    in_flight: int


def similar(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Up to three of the names that a mistyped one may have meant, the closest first."""
    return tuple(difflib.get_close_matches(name, list(known), n=3, cutoff=0.6))


def told(pause: Pause) -> str:
    """A pause in words: what, since when, by whom and why."""
    by = f" by {pause.paused_by}" if pause.paused_by else ""
    why = f": {pause.reason}" if pause.reason else ""
    return f"{pause.target} is paused since {pause.paused_at:%Y-%m-%dT%H:%M:%SZ}{by}{why}"
