"""Knowing what is paused, and moving ready steps aside and back in small sets."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from rara_scheduler.domain.errors import Fault
from rara_scheduler.domain.pause import Pause
from rara_scheduler.pauses import Pauses
from rara_scheduler.store.database import Conflict, DataRefused, Lane
from rara_scheduler.store.pauses import FRONT, PauseStore, Place, front_of

log = structlog.get_logger(__name__)

_PAGE: Final = 1000  # steps in one transaction: some 20 ms


@dataclass(slots=True)
class _Restart:
    """How far the waits of a kind were restarted, by route, and how many steps somebody else held."""

    places: dict[int, Place]
    left_out: int = 0


class PauseLoop:
    """Looks each `every_s` and at every hint. Each scheduler does the same, and rows that another moves are left to it.

    While nothing is paused the sweep's look tells so, which asks for nothing more, and this loop does not look itself.

    While a definition is paused, ready steps are walked through: at once from the front to the end when it was paused,
    and from then on one page a turn, or as fast as there are steps to put aside.
    """

    def __init__(
        self,
        store: PauseStore,
        pauses: Pauses,
        *,
        every_s: float,
        wake_dispatch: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._pauses = pauses
        self._every_s = every_s
        self._wake_dispatch = wake_dispatch
        self._clock = clock
        self._wake = asyncio.Event()
        self._place = FRONT
        self._is_urgent = False  # a pause is new: what is ready now was not walked through yet
        self._restarts: dict[int, _Restart] = {}  # by pause

    def wake(self) -> None:
        """Something may have been paused or resumed."""
        self._wake.set()

    async def run(self) -> None:
        """Look and move until cancelled."""
        while True:
            self._wake.clear()
            again = False
            try:
                again = await self.turn()
            except (Fault, Conflict, DataRefused) as error:
                log.warning("pause.deferred", error=str(error))
            if again:
                await asyncio.sleep(0)
                continue
            await self._next_turn()

    async def _next_turn(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._every_s):
                    await self._wake.wait()
                return
            except TimeoutError:
                if not self._pauses.is_quiet(2 * self._every_s):
                    return

    async def turn(self) -> bool:
        """Look, and move one page of each kind. True: there is more to move at once."""
        found = await self.look()
        again = False
        for pause in found:
            if pause.resumed_at is not None:
                again |= await self._undo(pause)
        if self._pauses.definitions:
            again |= await self._hold()
        return again

    async def look(self) -> list[Pause]:
        """Know what is paused now."""
        was_known, before, began_at = self._pauses.are_known, self._pauses.definitions, self._clock()
        found = await self._store.all(Lane.ENGINE)
        if self._pauses.looked(found, began_at) or not was_known:
            self._wake_dispatch()
        if self._pauses.definitions - before:
            self._place, self._is_urgent = FRONT, True
        return found

    async def _hold(self) -> bool:
        seen = await self._store.hold(self._place, _PAGE)
        if seen.held:
            self._wake_dispatch()  # what stood behind them may be leasable now
        if seen.walked < _PAGE or seen.place is None:
            self._place, self._is_urgent = FRONT, False
            return False
        self._place = seen.place
        return bool(seen.held) or self._is_urgent

    async def _undo(self, pause: Pause) -> bool:
        """Put back a page of what a pause that is over held; forget it when that was all. Whether there is more."""
        if pause.target.definition is None:
            restart = await self._restart_waits(pause)
            if restart.places:
                return True
            if restart.left_out:  # somebody held them; the next turn looks at all again
                del self._restarts[pause.pause_id]
                return False
        elif released := await self._store.release(pause.pause_id, _PAGE):
            self._wake_dispatch()
            if released == _PAGE:
                return True
        if await self._store.remove(pause.pause_id):
            log.info("pause.undone", sort=pause.target.sort, name=pause.target.name)
        self._restarts.pop(pause.pause_id, None)
        return False

    async def _restart_waits(self, pause: Pause) -> _Restart:
        """Of a page of steps of a kind that was paused, the wait for an executor begins anew; how far that is."""
        kind, resumed_at = pause.target.kind, pause.resumed_at
        assert kind is not None  # noqa: S101 - asked for those alone
        assert resumed_at is not None  # noqa: S101
        restart = self._restarts.get(pause.pause_id)
        if restart is None:
            routes = await self._store.routes_of(kind)
            restart = self._restarts[pause.pause_id] = _Restart({r: front_of(r) for r in routes})
        for route_id, place in list(restart.places.items()):
            done = await self._store.restart_waits(route_id, place, resumed_at, _PAGE)
            restart.left_out += done.left_out
            if done.renewed:
                self._wake_dispatch()  # who leased meanwhile passed over what we held
            if done.place is not None:
                restart.places[route_id] = done.place
                return restart
            del restart.places[route_id]
        return restart
