"""Small sets at once while the scheduler has time, gathered where it has not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

LONGEST_S: Final = 0.02


class Pace:
    """A rest behind each small set, as long as the set took.

    Most of a set of a few is the set's own cost. Where sets take long because there are so many, the rest makes fewer
    and larger ones, and all of them end sooner; where one takes a millisecond or two, the next step's word comes later
    than the rest ends. clock: monotonic.
    """

    def __init__(
        self, clock: Callable[[], float], *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._until = float("-inf")

    def took(self, seconds: float) -> None:
        """A small set has just ended."""
        self._until = self._clock() + min(LONGEST_S, seconds)

    async def rest(self) -> None:
        """Return when the rest is over, if there is one."""
        left_s = self._until - self._clock()
        if left_s > 0:
            await self._sleep(left_s)
