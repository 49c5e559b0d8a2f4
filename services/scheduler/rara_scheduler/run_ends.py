"""Tells those who wait for the ends of many runs: at once of what this scheduler commits, by looking of the rest."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import structlog

from rara_scheduler.domain.errors import Code, Fault, FieldViolation
from rara_scheduler.domain.views import RunView
from rara_scheduler.store.database import Conflict, DataRefused

log = structlog.get_logger(__name__)

MAX_IDS: Final = 1000  # in one message
MAX_UNTOLD: Final = 100_000  # of one stream
MAX_UNTOLD_IN_ALL: Final = 300_000
MAX_STREAMS: Final = 1000
POLL_S: Final = 1.0  # for what other schedulers commit
ALIVE_S: Final = 15.0
TOLD_AT_ONCE: Final = 200  # runs read by one statement
LOOK_PAGE: Final = 5000  # runs looked for by one statement
# Looks: one per PACE_S in the long run, so that runs which are added meanwhile are looked for as one; the first
# BURST_LOOKS after a quiet time at once.
PACE_S: Final = 0.2
BURST_LOOKS: Final = 5
# A short run has often ended before it is waited for. So many that ended here lately need no look.
REMEMBERED: Final = 20_000
_FIELD: Final = "workflow_run_ids"
_LATER: Final = (Code.STORE_UNAVAILABLE, Code.POOL_TIMEOUT)


class Store(Protocol):
    async def settled_runs(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those of the runs that have ended, and those that do not exist."""

    async def lean_runs(self, ids: Sequence[str]) -> list[RunView]: ...


@dataclass(frozen=True, slots=True)
class Told:
    """runs: have ended. missing: do not exist. Neither: nothing was told for a while."""

    runs: Sequence[RunView] = ()
    missing: Sequence[str] = ()


class EndWatch:
    """What one stream waits for. `add` and `close` by whoever reads its requests, `news` by whoever answers."""

    def __init__(self, ends: "RunEnds", *, alive_s: float, poll_s: float) -> None:
        self._ends = ends
        self._alive_s = alive_s
        self._poll_s = poll_s
        self._rung = asyncio.Event()
        self._open: set[str] = set()
        self._ended: dict[str, None] = {}
        self._missing: dict[str, None] = {}
        self._is_closed = False
        self._fault: Exception | None = None

    def __len__(self) -> int:
        return len(self._open) + len(self._ended) + len(self._missing)

    def add(self, run_ids: Sequence[str], *, unknown: Sequence[str] = ()) -> None:
        """Wait for these too; unknown: names that cannot be runs. Raises Fault QUEUE_FULL beyond the limits."""
        wanted = [
            each for each in dict.fromkeys(run_ids) if each not in self._open and each not in self._ended
        ]
        self._ends.make_room(len(self), len(wanted) + len(unknown))
        self._missing.update(dict.fromkeys(unknown))
        self._open.update(wanted)
        self._ends.await_for(self, wanted)
        if unknown:
            self._rung.set()

    def close(self, fault: Exception | None = None) -> None:
        """No more is added. fault: what `news` raises, at once."""
        self._is_closed, self._fault = True, fault
        self._rung.set()

    def ring(self) -> None:
        self._rung.set()

    def settle(self, run_id: str, *, missing: bool = False) -> None:
        """A run that was waited for has ended, or does not exist."""
        if run_id in self._open:
            self._open.remove(run_id)
            (self._missing if missing else self._ended)[run_id] = None
            self._rung.set()

    async def news(self) -> AsyncGenerator[Told, None]:
        """What is to be told, a page at a time; ends when the watch was closed and all has been told.

        Reads a page only when the one before was taken: whoever reads slowly makes nothing pile up here but ids. An
        outage of the database is waited out. Raises what `close` was given, and Fault SHUTTING_DOWN.
        """
        while True:
            self._rung.clear()
            self._ends.refuse_if_stopping()
            if self._fault is not None:
                raise self._fault
            if self._ended or self._missing:
                told = await self._page()
                if told is not None:
                    yield told
                    continue
                await self._quiet(self._poll_s)
            elif self._is_closed and not self._open:
                return
            elif not await self._quiet(self._alive_s):
                yield Told()

    async def _page(self) -> Told | None:
        """None: the database cannot be asked now."""
        missing = list(islice(self._missing, MAX_IDS))
        ids = list(islice(self._ended, TOLD_AT_ONCE))
        runs: list[RunView] = []
        if ids:
            try:
                runs = await self._ends.store.lean_runs(ids)
            except Conflict:
                return None
            except Fault as fault:
                if fault.code not in _LATER:
                    raise
                return None
            found = {run.workflow_run_id for run in runs}
            missing += [each for each in ids if each not in found]  # removed since
        for each in ids:
            del self._ended[each]
        for each in missing:
            self._missing.pop(each, None)
        return Told(runs, missing)

    async def _quiet(self, seconds: float) -> bool:
        """Whether something rang within the time."""
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            return False
        return True

    @property
    def awaited(self) -> set[str]:
        return self._open


class RunEnds:
    """All streams of this scheduler that wait for ends, and one loop that looks for what it did not commit itself.

    clock: monotonic.
    """

    def __init__(
        self,
        store: Store,
        *,
        poll_s: float = POLL_S,
        alive_s: float = ALIVE_S,
        pace_s: float = PACE_S,
        max_untold: int = MAX_UNTOLD,
        max_untold_in_all: int = MAX_UNTOLD_IN_ALL,
        max_streams: int = MAX_STREAMS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._poll_s = poll_s
        self._alive_s = alive_s
        self._pace_s = pace_s
        self._max_untold = max_untold
        self._max_untold_in_all = max_untold_in_all
        self._max_streams = max_streams
        self._clock = clock
        self._streams: set[EndWatch] = set()
        self._awaited: dict[str, tuple[EndWatch, ...]] = {}
        self._new: dict[str, None] = {}  # awaited, and not looked for yet
        self._round: list[str] = []  # awaited when this round of looks began, and not looked for in it yet
        self._round_at = float("-inf")
        self._looks = float(BURST_LOOKS)
        self._looked_at = clock()
        self._added = asyncio.Event()
        self._recent: set[str] = set()
        self._older: set[str] = set()
        self._is_stopping = False

    # ------------------------------------------------------------ what is told here

    def ended(self, workflow_run_ids: Iterable[str]) -> None:
        """Say that the ends of these runs have been committed."""
        for run_id in workflow_run_ids:
            self._recent.add(run_id)
            if run_id in self._awaited:
                self._settle(run_id)
        if len(self._recent) >= REMEMBERED // 2:
            self._older, self._recent = self._recent, set()

    def stop(self) -> None:
        """End every watch, those to come too."""
        self._is_stopping = True
        for watch in self._streams:
            watch.ring()

    def refuse_if_stopping(self) -> None:
        if self._is_stopping:
            raise Fault(
                Code.SHUTTING_DOWN, "this scheduler stops; watch through another one", retry_after_s=1.0
            )

    # ------------------------------------------------------------ for streams

    @contextmanager
    def watch(self) -> Iterator[EndWatch]:
        """One stream's watch. Raises Fault QUEUE_FULL when there are too many, SHUTTING_DOWN after `stop`."""
        self.refuse_if_stopping()
        if len(self._streams) >= self._max_streams:
            raise Fault(
                Code.QUEUE_FULL,
                f"{self._max_streams} streams wait for runs on this scheduler already",
                metadata={"limit": str(self._max_streams)},
                retry_after_s=5.0,
            )
        watch = EndWatch(self, alive_s=self._alive_s, poll_s=self._poll_s)
        self._streams.add(watch)
        try:
            yield watch
        finally:
            self._streams.discard(watch)
            for run_id in watch.awaited:
                self._leave(run_id, watch)

    def make_room(self, untold: int, more: int) -> None:
        """Raises Fault QUEUE_FULL when a stream with so many untold runs cannot have more."""
        if untold + more > self._max_untold:
            raise _full(f"one stream waits for at most {self._max_untold} runs", self._max_untold)
        if more and sum(map(len, self._streams)) + more > self._max_untold_in_all:
            raise _full(
                f"the streams of this scheduler wait for at most {self._max_untold_in_all} runs",
                self._max_untold_in_all,
            )

    def await_for(self, watch: EndWatch, run_ids: Sequence[str]) -> None:
        for run_id in run_ids:
            if run_id in self._recent or run_id in self._older:
                watch.settle(run_id)
                continue
            watches = self._awaited.get(run_id, ())
            self._awaited[run_id] = (*watches, watch)
            self._new[run_id] = None
        if self._new:
            self._added.set()

    def _leave(self, run_id: str, watch: EndWatch) -> None:
        left = tuple(each for each in self._awaited.get(run_id, ()) if each is not watch)
        if left:
            self._awaited[run_id] = left
        else:
            self._awaited.pop(run_id, None)
            self._new.pop(run_id, None)

    def _settle(self, run_id: str, *, missing: bool = False) -> None:
        self._new.pop(run_id, None)
        for watch in self._awaited.pop(run_id, ()):
            watch.settle(run_id, missing=missing)

    # ------------------------------------------------------------ looks

    async def run(self) -> None:
        """Look until cancelled: soon for runs that were added, each poll for all. Asks nothing while nobody waits."""
        while True:
            await self._pause()
            page = self._next_page()
            if not page:
                continue
            try:
                ended, missing = await self.store.settled_runs(page)
            except (Fault, Conflict, DataRefused) as error:
                log.warning("watch.look_failed", error=str(error))
                self._new.update(dict.fromkeys(each for each in page if each in self._awaited))
                await asyncio.sleep(self._poll_s)
                continue
            for run_id in ended:
                self._settle(run_id)
            for run_id in missing:
                self._settle(run_id, missing=True)

    async def _pause(self) -> None:
        """Until there is something to look for, and a look is due."""
        if not self._new and not self._round:
            self._added.clear()
            left_s = self._round_at + self._poll_s - self._clock()
            if not self._awaited or left_s > 0:
                try:
                    async with asyncio.timeout(max(left_s, 0.0) if self._awaited else None):
                        await self._added.wait()
                except TimeoutError:
                    pass
        now = self._clock()
        self._looks = min(float(BURST_LOOKS), self._looks + (now - self._looked_at) / self._pace_s) - 1
        self._looked_at = now
        if self._looks < 0:
            await asyncio.sleep(-self._looks * self._pace_s)

    def _next_page(self) -> list[str]:
        """New ones first, then those whose turn it is."""
        page = list(islice(self._new, LOOK_PAGE))
        for run_id in page:
            del self._new[run_id]
        if not self._round and self._clock() - self._round_at >= self._poll_s:
            self._round_at = self._clock()
            self._round = list(self._awaited)
        room = LOOK_PAGE - len(page)
        if self._round and room:
            turn, self._round = self._round[:room], self._round[room:]
            known = set(page)
            page += [each for each in turn if each in self._awaited and each not in known]
        return page


def _full(message: str, limit: int) -> Fault:
    return Fault(
        Code.QUEUE_FULL,
        f"{_FIELD}: {message} that have not been told",
        fields=(FieldViolation(_FIELD, message),),
        metadata={"limit": str(limit)},
        retry_after_s=1.0,
    )
