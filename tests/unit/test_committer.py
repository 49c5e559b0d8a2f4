"""The committer's batches: how many reports a transaction takes, by how long the last ones took."""

import asyncio
import contextlib
from typing import Any, cast

import pytest
from rara_scheduler.loops.committer import Committer, Submission
from rara_scheduler.store.commit import BatchResult
from rara_scheduler.store.database import Conflict


class _Store:
    """Each transaction takes fixed_s and each_s for every lease in it, or fails when it has more than `most`."""

    def __init__(self, *, fixed_s: float, each_s: float = 0.0, most: int = 10_000) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []
        self._fixed_s = fixed_s
        self._each_s = each_s
        self._most = most

    async def commit(self, batch: list[Any], *, skip_locked: bool) -> BatchResult:
        if len(batch) > self._most:
            raise Conflict("too much for one transaction")
        self.sizes.append(len(batch))
        self.now_s += self._fixed_s + self._each_s * len(batch)
        return BatchResult()


class _Aftermath:
    def committed(self, result: object, reporters: object) -> None:
        pass


async def committed(store: _Store, count: int) -> list[int]:
    """The sizes of the transactions that commit so many reports, each about a lease of its own."""
    committer = Committer(
        cast("Any", store), cast("Any", _Aftermath()), batch=1000, clock=lambda: store.now_s
    )
    for token in range(count):
        committer.submit(Submission(f"s{token}", f"r{token}", token, "executor", cast("Any", "report")))
    running = asyncio.create_task(committer.run())
    async with asyncio.timeout(30):
        await committer.drained()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert sum(store.sizes) == count
    return store.sizes


async def test_a_transaction_is_cut_to_half_a_seconds_worth() -> None:
    sizes = await committed(_Store(fixed_s=0.01, each_s=0.005), 2000)
    assert sizes[0] == 1000
    assert max(sizes[1:]) <= 200  # it looks whether more would do, too


async def test_transactions_that_are_slow_by_themselves_do_not_shrink_to_nothing() -> None:
    """Eight tenths of a second, whatever is in them: with one report each the queue would never end."""
    sizes = await committed(_Store(fixed_s=0.8), 3000)
    assert min(sizes[:-1]) == 50
    assert len(sizes) <= 60


@pytest.mark.parametrize("most", [1, 7])
async def test_what_was_too_much_for_one_transaction_is_cut_until_it_fits(most: int) -> None:
    sizes = await committed(_Store(fixed_s=0.1, most=most), most * 3)
    assert max(sizes) <= most
