"""Retrying, cancelling and requeueing by filter, as operators ask for it: looked at first, then done in sets."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final, Protocol

import structlog

from rara_scheduler.domain.bulk import CANCELLABLE, RETRIED, Outcome, RunSelection, StepSelection
from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.store.bulk import FIRST, BulkStore, Look, Place, Preview

log = structlog.get_logger(__name__)

_AT_ONCE: Final = 4  # of a page: other calls need connections, too
_BUDGET_S: Final = 10.0  # then a page ends early; a call has 30 s
_STEPS: Final = 200  # requeued in one transaction
# These say something about the call, not about one run of it.
_OF_THE_CALL: Final = frozenset({Code.STORE_UNAVAILABLE, Code.POOL_TIMEOUT, Code.SHUTTING_DOWN})

Done = tuple[list[Outcome], Place | None]  # what became of each, and where to go on from


class _Retrier(Protocol):
    async def retry(
        self, workflow_run_id: str, step_names: Sequence[str] = (), *, idempotency_key: str | None = None
    ) -> tuple[str, bool]: ...


class _Canceller(Protocol):
    async def cancel_run(self, workflow_run_id: str, *, message: str, grace_s: float | None) -> None: ...


class Bulk:
    """on_requeued: steps have become leasable."""

    def __init__(
        self,
        store: BulkStore,
        retrier: _Retrier,
        canceller: _Canceller,
        *,
        on_requeued: Callable[[], None],
        on_retried: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._retrier = retrier
        self._canceller = canceller
        self._on_requeued = on_requeued
        self._on_retried = on_retried
        self._clock = clock

    async def preview_retries(self, wanted: RunSelection, as_of: datetime | None = None) -> Preview:
        return await self._preview(self._retryable(wanted), as_of)

    async def preview_cancels(self, wanted: RunSelection, as_of: datetime | None = None) -> Preview:
        return await self._preview(self._cancellable(wanted), as_of)

    async def preview_requeues(self, wanted: StepSelection, as_of: datetime | None = None) -> Preview:
        return await self._preview(self._store.backing_off_steps(wanted), as_of)

    async def _preview(self, look: Look, as_of: datetime | None) -> Preview:
        now = await self._now_from(as_of)
        return await self._store.preview(look, as_of or now)

    async def _now_from(self, as_of: datetime | None) -> datetime:
        """The database's time. Raises FIELD_INVALID: with a later instant a call would act on what it made itself."""
        now = await self._store.now()
        if as_of is not None and as_of > now:
            raise field_invalid("as_of", f"is later than now, {now.isoformat()}")
        return now

    async def retry_runs(
        self, wanted: RunSelection, as_of: datetime, after: Place | None, most: int, *, by: str
    ) -> Done:
        """Retry a page of runs. One that was ever retried is left out; a key keeps two calls at once to one retry."""

        async def retry(run_id: str) -> Outcome:
            new_id, already = await self._retrier.retry(run_id, idempotency_key=f"rara.retry-runs/{run_id}")
            if not already:
                self._on_retried()
            return Outcome(run_id, new_id)

        return await self._runs("retry", self._retryable(wanted), as_of, after, most, retry, by)

    async def cancel_runs(
        self,
        wanted: RunSelection,
        as_of: datetime,
        after: Place | None,
        most: int,
        *,
        message: str,
        grace_s: float | None,
        by: str,
    ) -> Done:
        async def cancel(run_id: str) -> Outcome:
            await self._canceller.cancel_run(run_id, message=message, grace_s=grace_s)
            return Outcome(run_id)

        return await self._runs("cancel", self._cancellable(wanted), as_of, after, most, cancel, by)

    async def requeue_steps(
        self, wanted: StepSelection, as_of: datetime, after: Place | None, most: int, *, by: str
    ) -> Done:
        """End the waits of a page of steps. One that waits no more, or is to be cancelled meanwhile, has no outcome."""
        await self._now_from(as_of)
        look = self._store.backing_off_steps(wanted)
        found, end = await self._store.page(look, as_of, after or FIRST, most)
        outcomes: list[Outcome] = []
        for at in range(0, len(found), _STEPS):
            steps = [step for _, step in found[at : at + _STEPS]]
            moved = await self._store.requeue(steps)
            outcomes += [Outcome(step) for step in steps if step in moved]
        if outcomes:
            self._on_requeued()
        _tell("requeue", outcomes, by)
        return outcomes, end

    def _retryable(self, wanted: RunSelection) -> Look:
        return self._store.unsuccessful_runs(replace(wanted, states=wanted.states or RETRIED))

    def _cancellable(self, wanted: RunSelection) -> Look:
        return self._store.open_runs(replace(wanted, states=wanted.states or CANCELLABLE))

    async def _runs(
        self,
        action: str,
        look: Look,
        as_of: datetime,
        after: Place | None,
        most: int,
        act: Callable[[str], Awaitable[Outcome]],
        by: str,
    ) -> Done:
        began_at = self._clock()
        await self._now_from(as_of)
        found, end = await self._store.page(look, as_of, after or FIRST, most)
        outcomes: list[Outcome] = []
        for at in range(0, len(found), _AT_ONCE):
            few = found[at : at + _AT_ONCE]
            outcomes += await asyncio.gather(*(_fared(run_id, act) for _, run_id in few))
            if self._clock() - began_at > _BUDGET_S and len(outcomes) < len(found):
                end = few[-1]
                break
        _tell(action, outcomes, by)
        return outcomes, end


async def _fared(run_id: str, act: Callable[[str], Awaitable[Outcome]]) -> Outcome:
    """What became of one run; what is wrong with it alone does not stop the others."""
    try:
        return await act(run_id)
    except Fault as fault:
        if fault.code in _OF_THE_CALL:
            raise
        return Outcome(run_id, code=str(fault.code))


def _tell(action: str, outcomes: Sequence[Outcome], by: str) -> None:
    if outcomes:
        refused = sum(bool(outcome.code) for outcome in outcomes)
        log.info("bulk.done", action=action, done=len(outcomes) - refused, refused=refused, by=by)
