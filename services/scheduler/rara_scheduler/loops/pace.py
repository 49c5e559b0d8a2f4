"""Small sets at once while the scheduler has time, gathered where it has not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

LONGEST_S: Final = 0.02


class Pace:
    """A rest behind each small set, as long as the set took, where sets follow each other closely.

    Most of a set of a few is the set's own cost. Where sets take long because there are so many, the rest makes fewer
    and larger ones, and all of them end sooner. Where nothing was to be done before a set for longer than it took,
    there is nothing to gather, and the next begins at once. clock: monotonic.
    """

    def __init__(
        self, clock: Callable[[], float], *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._until = float("-inf")  # the end of the last set, or of the rest behind it

    def took(self, seconds: float, *, is_small: bool = True) -> None:
        """A set has just ended."""
        now = self._clock()
        idle_s = now - seconds - self._until
        self._until = now + (min(LONGEST_S, seconds) if is_small and idle_s <= seconds else 0.0)

    async def rest(self) -> None:
        """Return when the rest is over, if there is one."""
        left_s = self._until - self._clock()
        if left_s > 0:
            await self._sleep(left_s)
