"""Watching a run step by step: what is sent after each change, in which order, and when it ends."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio
from rara_scheduler import watch_hub
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.views import RunView, StepView
from rara_scheduler.store.queries import query
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.watch import STEP_PAGE, RunLook, WatchReads
from rara_scheduler.watch_hub import ChangeHub
from rara_scheduler.watching import Alive, SnapshotEnd, StoredStepEvent, Watching
from support.store_world import (
    StoreWorld,
    accepted,
    failed,
    new_id,
    progress,
    running,
    store_world,
    succeeded,
)

PAIR: dict[str, dict[str, Any]] = {"a": {}, "b": {"depends_on": ["a"]}}


class Clock:
    """The monotonic clock, which tests push on."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class WatchWorld:
    def __init__(self, store: StoreWorld) -> None:
        self.store = store
        self.hub = ChangeHub()
        self.clock = Clock()
        reads = Reads(store.database, store.definitions, silent_after_s=10.0)
        self.watching = Watching(
            WatchReads(store.database, reads), reads, self.hub, poll_s=0.02, alive_s=15.0, now_s=self.clock
        )


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[WatchWorld]:
    async with store_world(database_url) as opened:
        yield WatchWorld(opened)


def told(update: Any) -> str:
    """One update in a word: `a running`, `run failed`, `end of snapshot`, `alive`, `event 3`."""
    match update:
        case StepView():
            return f"{update.step_name} {update.state}"
        case RunView():
            return f"run {update.state}"
        case SnapshotEnd():
            return "end of snapshot"
        case Alive():
            return "alive"
        case StoredStepEvent():
            return f"event {update.event.sequence}"
    raise AssertionError(update)


class Story:
    """A watch, read as far as a test wants to."""

    def __init__(self, updates: AsyncIterator[Any]) -> None:
        self._updates = updates
        self.revision = 0

    async def next(self, count: int) -> list[str]:
        found: list[str] = []
        async with asyncio.timeout(20):
            while len(found) < count:
                update = await anext(self._updates)
                if hasattr(update, "revision") and hasattr(update, "update"):
                    self.revision, update = update.revision, update.update
                found.append(told(update))
        return found

    async def rest(self) -> list[str]:
        found: list[str] = []
        try:
            while True:
                found += await self.next(1)
        except StopAsyncIteration:
            return found


async def test_each_change_is_sent_once_and_a_steps_end_before_its_runs(world: WatchWorld) -> None:
    store = world.store
    await store.define("pair", PAIR)
    run_id = await store.start("pair")
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        story = Story(updates)
        assert await story.next(4) == ["run pending", "a pending", "b pending", "end of snapshot"]
        grant = await store.lease_one()  # touches no run row, and is found all the same
        assert await story.next(1) == ["a leased"]
        await store.report(grant, accepted())
        assert await story.next(1) == ["a leased"]  # accepted: a new sequence number
        assert await story.next(1) == ["run running"]
        await store.report(grant, running())
        assert await story.next(2) == ["a running", "run running"]
        await store.report(grant, failed(3))
        assert await story.next(2) == ["a retryable_failed", "run running"]
        await store.make_due()
        second = await store.lease_one()
        assert await story.next(1) == ["a leased"]
        await store.run_to_success(second)
        assert sorted(await story.next(3)) == ["a succeeded", "b pending", "run running"]  # b: available now
        third = await store.lease_one()
        await store.report(third, accepted(1), running(2), failed(3, "BAD_DATA", retryable=False))
        rest = await story.rest()
        assert rest[-2:] == ["b terminal_failed", "run failed"]


@pytest.mark.parametrize("count", [STEP_PAGE, STEP_PAGE + 1])
async def test_a_snapshot_has_every_step_once_and_in_order(world: WatchWorld, count: int) -> None:
    store = world.store
    await store.define("wide", {f"s{n}": {} for n in range(count)})
    run_id = await store.start("wide")
    await store.lease_one()
    sent = []
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        async for each in updates:
            if isinstance(each.update, SnapshotEnd):
                break
            if isinstance(each.update, StepView):
                sent.append(each.update)
    rows = await store.raw.fetch(
        "select step_run_id::text from rara.step_run where workflow_run_id = $1 order by step_run_id", run_id
    )
    assert [step.step_run_id for step in sent] == [row["step_run_id"] for row in rows]
    assert Counter(str(step.state) for step in sent) == {"pending": count - 1, "leased": 1}


async def test_after_a_revision_only_later_changes_come(world: WatchWorld) -> None:
    store = world.store
    await store.define("pair", PAIR)
    run_id = await store.start("pair")
    await store.run_to_success(await store.lease_one())
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        story = Story(updates)
        assert (await story.next(4))[-1] == "end of snapshot"
    async with aclosing(world.watching.run(run_id, story.revision)) as updates:
        resumed = Story(updates)
        await store.run_to_success(await store.lease_one())
        assert (await resumed.rest())[-2:] == ["b succeeded", "run succeeded"]
    with pytest.raises(Fault) as caught:
        await anext(world.watching.run(run_id, resumed.revision + 1))
    assert caught.value.code is Code.REVISION_COMPACTED
    assert caught.value.metadata == {"workflow_run_id": run_id, "revision": str(resumed.revision)}


async def test_what_went_and_came_back_between_two_looks_is_told(world: WatchWorld) -> None:
    """Nobody saw the lease: the step waited, and is ready again, or stands in its backoff."""
    store = world.store
    await store.define("three", {name: {} for name in "abc"})
    run_id = await store.start("three")
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        story = Story(updates)
        assert (await story.next(5))[-1] == "end of snapshot"
        grants = {grant.step_name: grant for grant in await store.lease(3)}
        await store.report(grants["a"], accepted(), failed(2, "EXECUTOR_SHUTDOWN"))
        await store.report(grants["b"], accepted(), failed(2))
        again = await store.steps(run_id)
        assert {again["a"][0], again["b"][0]} == {"retryable_failed"}
        told = await story.next(4)
    assert sorted(told[:3]) == ["a retryable_failed", "b retryable_failed", "c leased"]
    async with aclosing(world.watching.run(run_id, story.revision)) as updates:
        resumed = Story(updates)
        await store.make_due()
        again_b = next(grant for grant in await store.lease(3) if grant.step_name == "b")
        await store.report(again_b, accepted(), running(), failed(3))
        assert "b retryable_failed" in await resumed.next(4)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_look_at_a_run_costs_what_changed_in_it(world: WatchWorld, mode: str) -> None:
    """However many steps of it are open, and whatever stands ready or waits beside it."""
    store = world.store
    await store.define("deep", {f"s{n}": {"depends_on": [f"s{n - 1}"]} if n else {} for n in range(2000)})
    run_id = await store.start("deep")
    other = "gen_random_uuid(), gen_random_uuid(), 99, now(), 1, 0, 'x', now(), 1"
    for table in ("ready", "waiting"):
        await store.raw.execute(
            f"insert into rara.{table} (step_run_id, workflow_run_id, route_id, available_at, attempt, failures,"
            f" reason, released_at, revision) select {other} from generate_series(1, 20000)"
        )
    await store.raw.execute("analyze rara.ready; analyze rara.waiting; analyze rara.step_dependency")
    before = (await store.run(run_id))["revision"]
    await store.run_to_success(await store.lease_one())
    await store.raw.execute(f"set plan_cache_mode = {mode}")
    await store.raw.execute(f"prepare look as {query('watch_run_look')}")
    explained = await store.raw.fetchval(
        f"explain (analyze, buffers, timing off, format json) execute look('{run_id}', {before})"
    )
    plan = json.loads(explained)[0]["Plan"]
    found = await store.raw.fetchrow(f"execute look('{run_id}', {before})")
    assert found is not None
    assert len(found["step_run_ids"]) == 2  # the one that ended, and the one behind it
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 60


@pytest.mark.parametrize("steps", [3, 101])
async def test_leases_of_a_run_are_found_beside_ten_thousand_of_others(world: WatchWorld, steps: int) -> None:
    """By step in a run of up to 100 steps, which reads none of the others."""
    store = world.store
    await store.define("wide", {f"s{n}": {} for n in range(steps)})
    run_id = await store.start("wide")
    grant = await store.lease_one()
    await store.say(grant, accepted(), running())
    await store.raw.execute(
        "insert into rara.lease (step_run_id, workflow_run_id, route_id, lease_token, attempt, failures, free_endings,"
        " executor_id, released_at, granted_at, granted_on, expires_at, revision)"
        " select gen_random_uuid(), gen_random_uuid(), 99, 1000000 + n, 1, 0, 0, gen_random_uuid(), now(), now(),"
        " current_date, now() + interval '1 hour', 1 from generate_series(1, 10000) n"
    )
    await store.raw.execute("analyze rara.lease; analyze rara.step_run; analyze rara.workflow_run")
    watch = WatchReads(store.database, Reads(store.database, store.definitions, silent_after_s=10.0))
    for revision in (2, 1000):
        assert (await watch.look(run_id, revision)).step_run_ids == [grant.step_run_id]
    assert (await watch.run(run_id)).step_counts == {"pending": steps - 1, "running": 1}
    for name, given in (
        ("watch_run_look", f"'{run_id}', 2"),
        ("read_runs", f"array['{run_id}']::uuid[], 4096"),
    ):
        await store.raw.execute(f"prepare {name} as {query(name)}")
        explained = await store.raw.fetchval(
            f"explain (analyze, buffers, timing off, format json) execute {name}({given})"
        )
        plan = json.loads(explained)[0]["Plan"]
        if steps <= 100:
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 60, name
    await store.raw.execute("delete from rara.lease where route_id = 99")


async def test_a_run_that_closes_while_it_is_watched_from_before_sends_every_step_first(
    world: WatchWorld,
) -> None:
    """Closing between two statements of one look must not show the end before the steps that made it."""
    store = world.store
    await store.define("pair", PAIR)
    for _ in range(20):
        run_id = await store.start("pair")
        await store.run_to_success(await store.lease_one())
        last = await store.lease_one()
        async with aclosing(world.watching.run(run_id, 0)) as updates:
            story = Story(updates)
            await story.next(4)
            closing = asyncio.create_task(store.run_to_success(last))
            rest = await story.rest()
            await closing
        assert rest[-2:] == ["b succeeded", "run succeeded"]
        assert rest.count("run succeeded") == 1


async def test_silence_is_broken_by_alive(world: WatchWorld) -> None:
    await world.store.define("pair", PAIR)
    run_id = await world.store.start("pair")
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        story = Story(updates)
        await story.next(4)
        for _ in range(2):
            following = asyncio.create_task(story.next(1))
            await asyncio.sleep(0.1)  # several looks: nothing to say
            assert not following.done()
            world.clock.ahead_s += 15.0
            assert await following == ["alive"]


async def test_a_change_wakes_the_watcher_before_its_poll(world: WatchWorld) -> None:
    store = world.store
    reads = Reads(store.database, store.definitions, silent_after_s=10.0)
    slow = Watching(WatchReads(store.database, reads), reads, world.hub, poll_s=3600.0)
    await store.define("pair", PAIR)
    run_id = await store.start("pair")
    async with aclosing(slow.run(run_id, 0)) as updates:
        story = Story(updates)
        await story.next(4)
        following = asyncio.create_task(story.next(1))
        await asyncio.sleep(0.1)
        await store.lease_one()
        assert not following.done()
        world.hub.publish([run_id])
        assert await following == ["a leased"]


class CountedReads(WatchReads):
    looks = 0

    async def look(self, workflow_run_id: str, after_revision: int) -> RunLook:
        self.looks += 1
        return await super().look(workflow_run_id, after_revision)


async def test_who_is_told_of_the_end_sends_what_was_open_in_the_order_in_which_it_ended(
    world: WatchWorld,
) -> None:
    store = world.store
    reads = Reads(store.database, store.definitions, silent_after_s=10.0)
    counted = CountedReads(store.database, reads)
    watching = Watching(counted, reads, world.hub, poll_s=3600.0)
    await store.define("three", {"a": {}, "b": {}, "c": {}})
    run_id = await store.start("three")
    grants = [await store.lease_one() for _ in range(3)]
    rows = await store.raw.fetch(
        "select step_run_id::text, step_name from rara.step_run where workflow_run_id = $1", run_id
    )
    names = {row["step_run_id"]: row["step_name"] for row in rows}
    await store.run_to_success(grants[0])
    async with aclosing(watching.run(run_id, 0)) as updates:
        story = Story(updates)
        await story.next(5)
        looks = counted.looks
        for grant in reversed(grants[1:]):
            await store.run_to_success(grant)
        world.hub.ended([run_id])
        rest = await story.rest()
    ended = [names[grant.step_run_id] for grant in reversed(grants[1:])]
    assert rest == [*(f"{name} succeeded" for name in ended), "run succeeded"]
    assert counted.looks == looks
    assert story.revision == await store.raw.fetchval(
        "select revision from rara.workflow_run where workflow_run_id = $1", run_id
    )


async def test_a_run_that_ends_before_its_first_look_is_shown_whole_by_that(
    world: WatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_hub, "FIRST_LOOK_S", 3600.0)
    store = world.store
    await store.define("pair", PAIR)
    run_id = await store.start("pair")
    world.hub.started([run_id])
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        whole = asyncio.create_task(Story(updates).rest())
        for _ in range(2):
            await store.run_to_success(await store.lease_one())
            world.hub.publish([run_id])
        assert not whole.done()
        world.hub.ended([run_id])
        assert await whole == ["run succeeded", "a succeeded", "b succeeded", "end of snapshot"]


async def test_who_is_told_of_an_end_that_has_not_come_goes_on(world: WatchWorld) -> None:
    store = world.store
    await store.define("pair", PAIR)
    run_id = await store.start("pair")
    async with aclosing(world.watching.run(run_id, 0)) as updates:
        story = Story(updates)
        await story.next(4)
        grant = await store.lease_one()
        world.hub.ended([run_id])
        assert await story.next(1) == ["a leased"]
        await store.run_to_success(grant)
        await store.run_to_success(await store.lease_one())
        rest = await story.rest()
    assert [word for word in rest if "succeeded" in word] == [
        "a succeeded",
        "b succeeded",
        "run succeeded",
    ]


async def test_who_watches_from_a_revision_on_is_sent_no_more_at_the_end(world: WatchWorld) -> None:
    """It was never sent the other steps, so the end alone does not tell what is new."""
    store = world.store
    await store.define("pair", PAIR)
    run_id = await store.start("pair")
    await store.run_to_success(await store.lease_one())
    revision = await store.raw.fetchval(
        "select revision from rara.workflow_run where workflow_run_id = $1", run_id
    )
    last = await store.lease_one()
    async with aclosing(world.watching.run(run_id, revision)) as updates:
        story = Story(updates)
        assert await story.next(1) == ["b leased"]
        await store.run_to_success(last)
        world.hub.ended([run_id])
        assert (await story.rest())[-2:] == ["b succeeded", "run succeeded"]


async def test_stored_events_come_in_order_with_the_states_between_them(world: WatchWorld) -> None:
    store = world.store
    await store.define("one", {"a": {}})
    await store.start("one")
    grant = await store.lease_one()
    async with aclosing(world.watching.step(grant.step_run_id, 0, 0)) as updates:
        story = Story(updates)
        assert await story.next(1) == ["a leased"]
        await store.report(grant, accepted())
        assert await story.next(1) == ["event 1"]
        await store.report(grant, running())
        assert sorted(await story.next(2)) == ["a running", "event 2"]
        await store.report(grant, progress(3, b"{}"))
        assert await story.next(1) == ["event 3"]
        await store.report(grant, succeeded(5))  # a gap is not waited for
        assert await story.rest() == ["event 5", "a succeeded"]
    late = Story(world.watching.step(grant.step_run_id, 1, 2))
    assert await late.rest() == ["a succeeded", "event 3", "event 5"]


async def test_the_watch_of_an_attempt_that_never_came_ends_with_its_step(world: WatchWorld) -> None:
    store = world.store
    await store.define("one", {"a": {}})
    run_id = await store.start("one")
    step_id = str(await store.raw.fetchval("select step_run_id from rara.step_run"))
    async with aclosing(world.watching.step(step_id, 0, 0)) as updates:
        story = Story(updates)
        assert await story.next(1) == ["a pending"]
        await store.cancel(run_id)
        assert await story.rest() == ["a cancelled"]


async def test_bad_places_to_watch_from_are_refused(world: WatchWorld) -> None:
    await world.store.define("one", {"a": {}})
    run_id = await world.store.start("one")
    step_id = str(await world.store.raw.fetchval("select step_run_id from rara.step_run"))
    w = world.watching
    cases: list[tuple[AsyncIterator[Any], Code]] = [
        (w.run(new_id(), 0), Code.RUN_NOT_FOUND),
        (w.run(run_id, -1), Code.FIELD_INVALID),
        (w.step(new_id(), 0, 0), Code.STEP_NOT_FOUND),
        (w.step(step_id, -1, 0), Code.FIELD_INVALID),
        (w.step(step_id, 2, 0), Code.FIELD_INVALID),
        (w.step(step_id, 0, -1), Code.FIELD_INVALID),
    ]
    for updates, code in cases:
        with pytest.raises(Fault) as caught:
            await anext(updates)
        assert caught.value.code is code
