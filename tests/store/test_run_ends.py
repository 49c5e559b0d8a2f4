"""Two schedulers over one database, and streams that wait for runs at each: who is told when, and what it costs."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from rara_scheduler import run_ends
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.run_ends import EndWatch, RunEnds, Told
from rara_scheduler.store.database import StoreUnavailable
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.watch import WatchReads
from support.store_world import StoreWorld, new_id, store_world

LONG_S = 30.0


class CountedReads:
    """The store's own statements, counted; they fail while `is_away`."""

    def __init__(self, store: StoreWorld) -> None:
        self._reads = WatchReads(
            store.database, Reads(store.database, store.definitions, silent_after_s=10.0)
        )
        self.looks: list[int] = []
        self.pages: list[int] = []
        self.is_away = False
        self.asked = asyncio.Event()

    async def settled_runs(self, ids: Sequence[str]) -> tuple[list[str], list[str]]:
        self.looks.append(len(ids))
        self._ask()
        return await self._reads.settled_runs(ids)

    async def lean_runs(self, ids: Sequence[str]) -> Any:
        self.pages.append(len(ids))
        self._ask()
        return await self._reads.lean_runs(ids)

    def _ask(self) -> None:
        self.asked.set()
        if self.is_away:
            raise StoreUnavailable("gone")


@asynccontextmanager
async def scheduler(store: StoreWorld, **more: Any) -> AsyncIterator[tuple[RunEnds, CountedReads]]:
    reads = CountedReads(store)
    ends = RunEnds(reads, **({"poll_s": 0.05, "pace_s": 0.01} | more))
    looking = asyncio.create_task(ends.run())
    try:
        yield ends, reads
    finally:
        looking.cancel()
        await asyncio.wait([looking])


@pytest_asyncio.fixture
async def store(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        await opened.define("one", {"a": {}})
        yield opened


async def told(watch: EndWatch) -> Told:
    async with asyncio.timeout(LONG_S), aclosing(watch.news()) as news:
        async for each in news:
            return each
    return Told()


def named(news: Told) -> list[tuple[str, str]]:
    return [(run.workflow_run_id, run.state.value) for run in news.runs]


async def test_who_commits_tells_at_once_and_others_find_it_by_looking(store: StoreWorld) -> None:
    run_id = await store.start("one")
    async with scheduler(store, poll_s=LONG_S) as (here, read_here), scheduler(store) as (there, read_there):
        with here.watch() as mine, here.watch() as second, there.watch() as other:
            for watch in (mine, second, other):
                watch.add([run_id])
            await read_here.asked.wait()
            result = await store.run_to_success(await store.lease_one())
            assert result.ended_runs == {run_id: "succeeded"}
            here.ended(result.ended_runs)
            for watch in (mine, second, other):
                assert named(await told(watch)) == [(run_id, "succeeded")]
        assert len(read_here.looks) <= 2
        assert read_here.pages == [1, 1]
        assert len(read_there.looks) >= 1
        # Told again where it is added again; it is remembered where it was committed.
        looks = len(read_here.looks)
        with here.watch() as mine, there.watch() as other:
            for watch in (mine, other):
                watch.add([run_id])
                assert named(await told(watch)) == [(run_id, "succeeded")]
        assert len(read_here.looks) == looks


async def test_a_cancelled_run_is_told_and_what_does_not_exist_is_named(store: StoreWorld) -> None:
    run_id, nobody = await store.start("one"), new_id()
    async with scheduler(store) as (ends, _), asyncio.timeout(LONG_S):
        with ends.watch() as watch:
            watch.add([run_id, nobody], unknown=["x"])
            missing: set[str] = set()
            while missing != {nobody, "x"}:
                missing |= set((await told(watch)).missing)
            result = await store.cancel(run_id)
            assert result.ended_runs == {run_id: "cancelled"}
            assert named(await told(watch)) == [(run_id, "cancelled")]
            assert len(watch) == 0


async def test_thousands_cost_few_statements_and_nobody_none(
    store: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_ends, "LOOK_PAGE", 400)
    async with scheduler(store, pace_s=0.001) as (ends, reads), asyncio.timeout(LONG_S):
        await asyncio.sleep(0.1)
        assert reads.looks == []
        with ends.watch() as watch:
            ids = [new_id() for _ in range(1000)]
            watch.add(ids)
            found: list[str] = []
            while len(found) < 1000:
                found += (await told(watch)).missing
            assert sorted(found) == sorted(ids)
            assert (max(reads.looks), len(reads.looks) <= 6) == (400, True)
            # One that stays open is looked for in turn, with what was added meanwhile in the same statement.
            open_run = await store.start("one")
            watch.add([open_run])
            before = len(reads.looks)
            while len(reads.looks) < before + 3:
                reads.asked.clear()
                await reads.asked.wait()
        reads.asked.clear()
        count = len(reads.looks)
        await asyncio.sleep(0.2)
        assert len(reads.looks) <= count + 1


async def test_an_outage_of_the_database_is_waited_out(store: StoreWorld) -> None:
    run_id = await store.start("one")
    async with scheduler(store) as (ends, reads), asyncio.timeout(LONG_S):
        with ends.watch() as watch:
            reads.is_away = True
            watch.add([run_id])
            await reads.asked.wait()
            result = await store.cancel(run_id)
            ends.ended(result.ended_runs)
            waiting = asyncio.create_task(told(watch))
            while not reads.pages:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            reads.is_away = False
            assert named(await waiting) == [(run_id, "cancelled")]


async def test_a_quiet_watch_says_that_it_lives_and_a_stop_ends_it(store: StoreWorld) -> None:
    run_id = await store.start("one")
    async with scheduler(store, alive_s=0.05) as (ends, _):
        with ends.watch() as watch:
            watch.add([run_id])
            assert await told(watch) == Told()
            waiting = asyncio.create_task(told(watch))
            ends.stop()
            with pytest.raises(Fault) as stopped:
                await waiting
            assert stopped.value.code is Code.SHUTTING_DOWN
        with pytest.raises(Fault, match="stops"), ends.watch():
            pass


async def test_only_so_many_ended_runs_are_remembered(store: StoreWorld) -> None:
    ends = RunEnds(CountedReads(store))
    for number in range(run_ends.REMEMBERED + 5):
        ends.ended([str(number)])
    with ends.watch() as watch:
        watch.add([str(run_ends.REMEMBERED + 4), "0"])
        assert (len(watch), watch.awaited) == (2, {"0"})
