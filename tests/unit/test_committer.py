"""The committer's batches: how many reports a transaction takes, and which commits may run at the same time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from rara_scheduler.domain.attempt import EventType, Report
from rara_scheduler.loops.committer import Committer, Submission
from rara_scheduler.store.commit import BatchResult, LeaseReports
from rara_scheduler.store.database import Conflict, LockTimeout


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
    """The sizes of the transactions that commit so many reports, each about a lease of its own, all of one run."""
    committer = Committer(
        cast("Any", store), cast("Any", _Aftermath()), batch=1000, clock=lambda: store.now_s
    )
    for token in range(count):
        committer.submit(Submission(f"s{token}", "run", token, "executor", cast("Any", "report")))
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


class _Gated:
    """A store whose commits wait until they are let through, and that remembers which were under way together."""

    def __init__(self) -> None:
        self.under_way: list[tuple[list[LeaseReports], asyncio.Future[BatchResult]]] = []
        self.stored: list[LeaseReports] = []
        self.began = asyncio.Event()

    async def commit(self, batch: list[LeaseReports], *, skip_locked: bool) -> BatchResult:
        runs = {reports.workflow_run_id for reports in batch}
        for other, _ in self.under_way:
            assert runs.isdisjoint(reports.workflow_run_id for reports in other)
        let_through: asyncio.Future[BatchResult] = asyncio.get_running_loop().create_future()
        entry = batch, let_through
        self.under_way.append(entry)
        self.began.set()
        try:
            result = await let_through
        finally:
            if entry in self.under_way:  # cancelled
                self.under_way.remove(entry)
        self.stored += [reports for reports in batch if reports.lease_token not in result.busy]
        return result

    async def under_way_are(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.under_way) < count:
                self.began.clear()
                await self.began.wait()

    def end(self, workflow_run_id: str, outcome: BatchResult | Exception | None = None) -> None:
        """Let the commit that has this run in it end."""
        (entry,) = (entry for entry in self.under_way if entry[0][0].workflow_run_id == workflow_run_id)
        self.under_way.remove(entry)
        future = entry[1]
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome or BatchResult())


def _report(sequence: int = 1, event: EventType = EventType.ACCEPTED) -> Report:
    return Report(sequence, event, b"")


def _two_lanes(committer: Committer) -> tuple[str, str]:
    """Two runs that are committed beside each other."""
    names = [f"run {number}" for number in range(64)]
    lanes: dict[int, str] = {}
    for name in names:
        lane = committer._lane(Submission("", name, -1, None, _report()))
        lanes.setdefault(id(lane), name)
    first, second = lanes.values()
    return first, second


@contextlib.asynccontextmanager
async def _committing(store: object, batch: int = 1000) -> AsyncIterator[Committer]:
    committer = Committer(cast("Any", store), cast("Any", _Aftermath()), batch=batch)
    running = asyncio.create_task(committer.run(), name="committer")
    try:
        async with asyncio.timeout(30):
            yield committer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _turns() -> None:
    """Let everything go on that needs no time."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_commit_that_waits_holds_up_no_other_run_and_no_two_have_one_run() -> None:
    store = _Gated()
    async with _committing(store) as committer:
        first, second = _two_lanes(committer)
        committer.submit(Submission("s1", first, 1, "executor", _report()))
        await store.under_way_are(1)
        committer.submit(Submission("s2", first, 2, "executor", _report()))
        committer.submit(Submission("s3", second, 3, "executor", _report()))
        await store.under_way_are(2)
        store.end(second)
        await _turns()
        assert [reports.lease_token for reports in store.stored] == [3]
        store.end(first)
        await store.under_way_are(1)
        store.end(first)
        await committer.drained()
    assert [reports.lease_token for reports in store.stored] == [3, 1, 2]


async def test_what_is_counted_as_waiting_is_so_until_its_own_commit() -> None:
    store = _Gated()
    async with _committing(store) as committer:
        first, second = _two_lanes(committer)
        committer.submit(Submission("s1", first, 1, "executor", _report()))
        committer.submit(Submission("s2", second, 2, "executor", _report()))
        committer.submit(Submission("s2", second, 2, "executor", _report(2, EventType.RUNNING)))
        assert committer.waiting == 3
        await store.under_way_are(2)
        assert committer.queued("executor") == 3
        store.end(first)
        await _turns()
        assert not committer.has_queued(1)
        assert committer.has_queued(2)
        assert committer.queued("executor") == 2
        store.end(second)
        await store.under_way_are(1)  # `running`, which had stood aside
        assert committer.has_queued(2)
        store.end(second)
        await committer.drained()
        assert (committer.waiting, committer.queued("executor"), committer.has_queued(2)) == (0, 0, False)


@pytest.mark.parametrize("last", [0, 1])
async def test_drained_waits_for_every_lane(last: int) -> None:
    store = _Gated()
    async with _committing(store) as committer:
        runs = _two_lanes(committer)
        for token, run in enumerate(runs):
            committer.submit(Submission(f"s{token}", run, token, "executor", _report()))
        await store.under_way_are(2)
        draining = asyncio.create_task(committer.drained())
        store.end(runs[1 - last])
        await _turns()
        assert not draining.done()
        committer.submit(Submission("late", runs[1 - last], 7, "executor", _report()))
        await store.under_way_are(2)
        store.end(runs[last])
        await _turns()
        assert not draining.done()  # at no moment was nothing uncommitted
        store.end(runs[1 - last])
        await draining
        assert committer.waiting == 0


async def test_nothing_overtakes_what_is_queued_of_its_lease_under_another_runs_name() -> None:
    """An executor's repeat after a reconnect names no run: it must not be judged before its first copy is stored."""
    store = _Gated()
    async with _committing(store) as committer:
        first, second = _two_lanes(committer)
        committer.submit(Submission("s1", first, 1, "executor", _report()))
        committer.submit(Submission("s1", second, 1, "executor", _report()))
        await store.under_way_are(1)
        await _turns()
        assert len(store.under_way) == 1
        store.end(first)
        await store.under_way_are(1)
        store.end(second)
        await committer.drained()
    assert [reports.workflow_run_id for reports in store.stored] == [first, second]


async def test_a_lane_that_fails_waits_alone_and_keeps_what_it_has() -> None:
    store = _Gated()
    async with _committing(store) as committer:
        first, second = _two_lanes(committer)
        committer.submit(Submission("s1", first, 1, "executor", _report()))
        await store.under_way_are(1)
        store.end(first, Conflict("conflicts do not end"))
        await _turns()
        assert committer.has_queued(1)
        for token in range(2, 6):
            committer.submit(Submission("s2", second, token, "executor", _report()))
            await store.under_way_are(1)
            store.end(second)
            await _turns()
        assert [reports.lease_token for reports in store.stored] == [2, 3, 4, 5]
        await store.under_way_are(1)
        store.end(first)
        await committer.drained()
    assert store.stored[-1].lease_token == 1


async def test_a_run_that_somebody_holds_slows_its_own_lane_only() -> None:
    store = _Gated()
    async with _committing(store) as committer:
        first, second = _two_lanes(committer)
        committer.submit(Submission("s1", first, 1, "executor", _report()))
        await store.under_way_are(1)
        store.end(first, LockTimeout("held"))
        await store.under_way_are(1)
        store.end(first, BatchResult(busy={1}))
        await _turns()
        assert committer.has_queued(1)
        assert store.under_way == []  # it looks again, but not at once
        committer.submit(Submission("s2", second, 2, "executor", _report()))
        await store.under_way_are(1)
        store.end(second)
        await _turns()
        assert [reports.lease_token for reports in store.stored] == [2]
        await store.under_way_are(1)
        store.end(first)
        await committer.drained()


async def test_an_idle_committer_commits_at_once() -> None:
    store = _Gated()
    async with _committing(store) as committer:
        for run in _two_lanes(committer):
            committer.submit(Submission("s", run, 1, "executor", _report()))
            await _turns()
            store.end(run)
            await _turns()
        assert len(store.stored) == 2


async def test_a_lane_that_dies_of_a_bug_takes_the_committer_with_it() -> None:
    store = _Gated()
    committer = Committer(cast("Any", store), cast("Any", _Aftermath()), batch=1000)
    running = asyncio.create_task(committer.run())
    first, second = _two_lanes(committer)
    committer.submit(Submission("s1", first, 1, "executor", _report()))
    committer.submit(Submission("s2", second, 2, "executor", _report()))
    await store.under_way_are(2)
    store.end(first, ZeroDivisionError())
    with pytest.raises(ExceptionGroup):
        async with asyncio.timeout(5):
            await running
    assert store.under_way == []
