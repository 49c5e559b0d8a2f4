"""How long to wait, and how often: the client's retries and reconnects as plain numbers."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pacing:
    """Bounds of retrying. The functions at the end are there to be replaced in tests.

    retries: how often a call is repeated after `UNAVAILABLE`, at most.
    call_timeout_s: for one call with all its retries, where the caller names no other.
    silence_s: a watch without a word for so long is taken for dead; the scheduler says "alive" every 15 s.
    resume_within_s: a watch that had been heard gives up after so long without a word.
    """

    retries: int = 5
    initial_s: float = 0.1
    max_s: float = 5.0
    call_timeout_s: float = 15.0
    silence_s: float = 45.0
    resume_within_s: float = 60.0
    jitter: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic

    def pause_s(self, failures: int, retry_after_s: float | None) -> float:
        """Seconds until the next try after so many failures in a row, from 1: full jitter.

        What the other side asked for is a floor, not a replacement: many callers were told the same.
        """
        ceiling_s = min(self.max_s, self.initial_s * 2.0 ** min(failures - 1, 32))
        return (retry_after_s or 0.0) + self.jitter() * ceiling_s
