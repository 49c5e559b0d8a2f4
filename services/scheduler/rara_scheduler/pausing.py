"""Pausing and resuming kinds and definitions, as operators ask for it."""

from collections.abc import Awaitable, Callable

import structlog

from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.pause import Pause, PauseLoad, Target, similar
from rara_scheduler.store.pauses import PauseStore

log = structlog.get_logger(__name__)


class Pausing:
    """Stores the wish first, then lets this scheduler go by it, and tells the others.

    look: know what is paused now. turn_over: wait for the leasing that is under way.
    """

    def __init__(
        self,
        store: PauseStore,
        *,
        look: Callable[[], Awaitable[object]],
        turn_over: Callable[[], Awaitable[None]],
        wake: Callable[[], None],
        tell_others: Callable[[], None],
    ) -> None:
        self._store = store
        self._look = look
        self._turn_over = turn_over
        self._wake = wake
        self._tell_others = tell_others

    async def pause(
        self, target: Target, *, reason: str, paused_by: str, allow_unknown: bool
    ) -> tuple[Pause, bool]:
        """The pause, and whether it was there before. Afterwards this scheduler leases nothing of it.

        Raises Fault KIND_NOT_FOUND or DEFINITION_NOT_FOUND, unless names that are not known are allowed.
        """
        if not allow_unknown and await self._store.current(target) is None:
            await self._require_known(target)
        pause, already = await self._store.pause(target, reason=reason, paused_by=paused_by)
        await self._look()
        await self._turn_over()
        self._wake()
        self._tell_others()
        if not already:
            log.info("pause.stored", sort=target.sort, name=target.name, paused_by=paused_by, reason=reason)
        return pause, already

    async def resume(self, target: Target, *, resumed_by: str) -> Pause | None:
        """The pause that has ended; None: there was none, and the name is known."""
        ended = await self._store.resume(target)
        if ended is None:
            await self._require_known(target)
            return None
        await self._look()
        self._wake()
        self._tell_others()
        log.info("pause.ended", sort=target.sort, name=target.name, resumed_by=resumed_by)
        return ended

    async def of_definitions(self) -> dict[str, Pause]:
        """The pauses of definitions, by name."""
        return {
            pause.target.name: pause
            for pause in await self._store.all()
            if pause.resumed_at is None and pause.target.definition is not None
        }

    async def all(self) -> list[tuple[Pause, PauseLoad]]:
        """What is paused, the newest first, with what that holds back."""
        pauses = [pause for pause in await self._store.all() if pause.resumed_at is None]
        loads = await self._store.loads([pause.pause_id for pause in pauses])
        return [(pause, loads.get(pause.pause_id, PauseLoad(0, 0))) for pause in pauses]

    async def _require_known(self, target: Target) -> None:
        known = await self._store.known(target.sort)
        if target.name not in known:
            raise _unknown(target, similar(target.name, known))


def _unknown(target: Target, meant: tuple[str, ...]) -> Fault:
    code, where = Code.DEFINITION_NOT_FOUND, "there is no definition"
    if target.kind is not None:
        code, where = Code.KIND_NOT_FOUND, "no registered definition uses the kind"
    ask = f"; did you mean {' or '.join(meant)}?" if meant else ""
    return Fault(
        code,
        f"{where} {target.name}{ask}",
        metadata={target.sort: target.name} | ({"similar": ", ".join(meant)} if meant else {}),
    )
