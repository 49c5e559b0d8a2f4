"""Many at once over one database: who grants, commits, renews, reclaims and cancels never meets the other's end."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import EventType, Guard, Item, Report
from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.loops.committer import Committer, Submission
from rara_scheduler.sessions import SessionRegistry
from rara_scheduler.store.check import check
from rara_scheduler.store.commit import BatchResult, LeaseReports
from rara_scheduler.store.database import LockTimeout
from rara_scheduler.store.leases import Grant, LeaseStore
from rara_scheduler.store.sweeps import BEFORE_ALL
from support.store_world import (
    LEASE_S,
    NIL,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    new_id,
    progress,
    reports,
    running,
    store_world,
    stored_artifact,
    succeeded,
)

STEPS = 500
RECLAIM = (ending("DISPATCH_LOST", Guard.UNACCEPTED), ending("LEASE_EXPIRED", Guard.EXPIRED))


@pytest_asyncio.fixture
async def worlds(database_url: str) -> AsyncIterator[list[StoreWorld]]:
    """The stores of two schedulers over one database."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(store_world(database_url, check_history=index == 0))
            for index in range(2)
        ]


async def deadlocks(world: StoreWorld) -> int:
    await world.raw.execute("select pg_stat_clear_snapshot()")
    return int(
        await world.raw.fetchval("select deadlocks from pg_stat_database where datname = current_database()")
    )


async def reclaim(world: StoreWorld) -> None:
    after = NIL
    while page := await world.sweeps.reclaimable(after):
        await world.commits.commit(
            [LeaseReports(x.step_run_id, x.workflow_run_id, x.lease_token, None, RECLAIM) for x in page],
            skip_locked=True,
        )
        after = page[-1].step_run_id


async def test_racing_schedulers_and_executors_finish_each_step_once(worlds: list[StoreWorld]) -> None:
    first = worlds[0]
    retry = {
        "max_attempts": 1000,
        "initial_backoff": {"nanos": 1_000_000},
        "max_backoff": {"nanos": 2_000_000},
    }
    await first.define(
        "wide", {f"s{i}": {"retry": retry} for i in range(STEPS)}, on_failure="ON_FAILURE_CONTINUE"
    )
    run_id = await first.start("wide")
    routes = [r.route_id for r in await first.definitions.routes_after(0)]
    dice = random.Random(7)
    committed: list[tuple[str, int]] = []
    done = asyncio.Event()

    async def execute(world: StoreWorld) -> None:
        """Lease with almost no time, so that many leases expire while their results are on the way."""
        leases = LeaseStore(world.database, lease_s=0.02, heartbeat_s=0.005)
        executor_id = new_id()

        while not done.is_set():
            probes = [(r, 10, BEFORE_ALL, "1.0.0") for r in routes]
            grants = await leases.grant(probes, [executor_id] * 10)
            if not grants:
                await asyncio.sleep(0.005)
                continue
            await asyncio.sleep(dice.random() * 0.06)
            batch = [
                reports(
                    g,
                    accepted(),
                    running(),
                    failed(3) if dice.random() < 0.1 else succeeded(3),
                    executor_id=executor_id,
                )
                for g in grants
            ]
            result = await world.commit(batch)
            committed.extend(
                (d.lease.step_run_id, token)
                for token, d in result.decisions.items()
                if d.closing is not None and d.closing.to == "succeeded"
            )

    async def sweep(world: StoreWorld) -> None:
        while not done.is_set():
            await reclaim(world)
            await world.sweeps.promote_due()
            await asyncio.sleep(0.005)

    async def watch() -> None:
        while await first.run_state(run_id) != "succeeded":
            await asyncio.sleep(0.02)
        done.set()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for world in worlds:
            for _ in range(4):
                group.create_task(execute(world))
            group.create_task(sweep(world))
        group.create_task(watch())

    results = await first.raw.fetch("select step_run_id::text, lease_token from rara.result")
    assert len(results) == STEPS
    assert sorted(committed) == sorted((row["step_run_id"], row["lease_token"]) for row in results)
    attempts = await first.raw.fetch(
        "select step_run_id, attempt, lease_token from rara.step_attempt"
        " union all select step_run_id, attempt, lease_token from rara.result order by step_run_id, attempt"
    )
    tokens = [row["lease_token"] for row in attempts]
    assert len(set(tokens)) == len(tokens)
    assert len(tokens) > STEPS  # some did race
    for before, after in itertools.pairwise(attempts):
        if before["step_run_id"] == after["step_run_id"]:
            assert after["attempt"] == before["attempt"] + 1
            assert after["lease_token"] > before["lease_token"]
    assert await deadlocks(first) <= 1


async def test_cancels_commits_heartbeats_and_sweeps_do_not_lock_each_other_out(
    worlds: list[StoreWorld], database_url: str
) -> None:
    first = worlds[0]
    steps: dict[str, dict[str, object]] = {f"s{i}": {} for i in range(8)}
    steps |= {f"t{i}": {"depends_on": ["s0", "s1"]} for i in range(4)}
    await first.define("fast", steps)
    await first.define("slow", steps, on_failure="ON_FAILURE_CONTINUE")
    held: list[Grant] = []
    loop = asyncio.get_running_loop()
    end = loop.time() + 4.0
    dice = random.Random(11)
    turns = {"commit": 0, "cancel": 0, "renew": 0, "sweep": 0, "examine": 0}

    async def start_and_lease(world: StoreWorld) -> None:
        while loop.time() < end:
            await world.start(dice.choice(["fast", "slow"]))
            held.extend(await world.lease(20))
            await asyncio.sleep(0)

    async def commit(world: StoreWorld) -> None:
        while loop.time() < end:
            chosen = {g.lease_token: g for g in dice.sample(held, min(len(held), 30))}
            words = [succeeded(3), failed(3), failed(3, retryable=False), cancelled(3, "EXECUTOR_SHUTDOWN")]
            batch = [
                reports(g, accepted(), running(), dice.choice(words), executor_id=g.executor_id)
                for g in chosen.values()
            ]
            await world.commit(batch)
            turns["commit"] += len(batch)
            await asyncio.sleep(0)

    async def cancel(world: StoreWorld) -> None:
        while loop.time() < end:
            if held:
                with contextlib.suppress(LockTimeout):  # the caller would try again
                    await world.cancel(dice.choice(held).workflow_run_id)
                turns["cancel"] += 1
            await asyncio.sleep(0.005)

    async def renew(world: StoreWorld) -> None:
        while loop.time() < end:
            chosen = dice.sample(held, min(len(held), 60))
            await world.leases.renew([(g.step_run_id, g.lease_token, g.executor_id) for g in chosen])
            turns["renew"] += len(chosen)
            await asyncio.sleep(0)

    async def sweep(world: StoreWorld) -> None:
        while loop.time() < end:
            await world.raw.execute(
                "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
                " where step_run_id in (select step_run_id from rara.lease limit 3 for update skip locked)"
            )
            await reclaim(world)
            await world.make_due()
            overdue = await world.sweeps.overdue_steps(NIL)
            if overdue:
                await world.cancels.close_overdue(overdue)
            turns["sweep"] += 1

    async def examine() -> None:
        """The history checker sees one snapshot: what is at work beside it is no violation."""
        connection = await asyncpg.connect(database_url)
        try:
            while loop.time() < end:
                assert (await check(connection, max_attempts=3)).broken == {}
                turns["examine"] += 1
                await asyncio.sleep(0.1)
        finally:
            await connection.close()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for world in worlds:
            for work in (start_and_lease, commit, commit, cancel, renew, sweep):
                group.create_task(work(world))
        group.create_task(examine())

    assert turns.pop("examine") > 0
    assert all(count > 10 for count in turns.values()), turns
    assert await deadlocks(first) <= 1
    for _ in range(20):  # good executors and time close everything
        await first.raw.execute(
            "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
        )
        await reclaim(first)
        await first.make_due()
        while grants := await first.lease(500):
            await first.commits.commit(
                [reports(g, accepted(), running(), succeeded(3), executor_id=g.executor_id) for g in grants]
            )
    assert await first.raw.fetchval("select count(*) from rara.workflow_run where ended_at is null") == 0
    twice = await first.raw.fetchval("select count(*) from rara.result join rara.lease using (step_run_id)")
    assert twice == 0


def a_committer(world: StoreWorld) -> Committer:
    class Nobody:
        def publish(self, workflow_run_ids: object) -> None: ...

        def ended(self, workflow_run_ids: object) -> None: ...

    def nothing() -> None: ...

    registry = SessionRegistry(max_sessions=1)
    aftermath = Aftermath(
        registry,
        Nobody(),
        wake_dispatch=nothing,
        credit_freed=nothing,
        wake_sweep=nothing,
        tell_others=nothing,
    )
    return Committer(world.commits, aftermath, batch=1000)


@contextlib.asynccontextmanager
async def committing(committer: Committer, *, within_s: float = 10) -> AsyncIterator[None]:
    task = asyncio.create_task(committer.run(), name="committer")
    try:
        async with asyncio.timeout(within_s):
            yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def say(committer: Committer, grant: Grant, item: Item) -> None:
    committer.submit(
        Submission(grant.step_run_id, grant.workflow_run_id, grant.lease_token, grant.executor_id, item)
    )


async def test_what_nobody_waits_for_is_committed_with_what_comes_next_of_its_lease(
    worlds: list[StoreWorld],
) -> None:
    world = worlds[0]
    await world.define("two", {"a": {}, "b": {}})
    run_id = await world.start("two")
    first, second = await world.lease(2)
    committer = a_committer(world)
    async with committing(committer):
        say(committer, first, accepted())
        say(committer, second, accepted())
        await committer.drained()
        say(committer, first, running())
        say(committer, second, running())
        assert committer.waiting == 2
        assert committer.has_queued(first.lease_token)
        say(committer, first, succeeded(3))
        await committer.drained()  # and what stood aside alone follows by itself
    steps = {grant.step_name: await world.step(grant.step_run_id) for grant in (first, second)}
    assert steps[first.step_name]["state"] == "succeeded"
    assert steps[second.step_name]["state"] == "running"
    events = await world.raw.fetch(
        "select step_run_id::text, type, stored_at from rara.step_event order by step_run_id, sequence"
    )
    stored = {(row["step_run_id"], row["type"]): row["stored_at"] for row in events}
    assert len(stored) == 5
    assert stored[first.step_run_id, "running"] == stored[first.step_run_id, "succeeded"]
    assert await world.run_state(run_id) == "running"


async def test_a_batch_that_a_stranger_shares_stores_and_answers_the_owners_events(
    worlds: list[StoreWorld],
) -> None:
    world = worlds[0]
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    grant = await world.lease_one()
    committer = a_committer(world)
    for sequence, item in enumerate((accepted(), running(), succeeded(3)), 1):
        stolen = succeeded(sequence, b'"stolen"')
        committer.submit(Submission(grant.step_run_id, NIL, grant.lease_token, new_id(), stolen))
        committer.submit(
            Submission(grant.step_run_id, grant.workflow_run_id, grant.lease_token, grant.executor_id, item)
        )
    async with committing(committer):
        await committer.drained()
    assert await world.run_state(run_id) == "succeeded"
    assert (await world.step(grant.step_run_id))["output"] == b"{}"


async def test_lanes_commit_runs_that_share_blobs_beside_a_sweep_and_do_not_lock_each_other_out(
    worlds: list[StoreWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds[0]
    blobs = [stored_artifact(f"blob{n}", bytes([n]) * 10) for n in range(6)]
    await world.put_blobs(*blobs)
    quick = {
        "max_attempts": 1000,
        "initial_backoff": {"nanos": 1_000_000},
        "max_backoff": {"nanos": 2_000_000},
    }
    await world.define("pair", {"a": {"retry": quick}, "b": {"retry": quick, "depends_on": ["a"]}})
    runs = [await world.start("pair") for _ in range(60)]
    committer = a_committer(world)
    dice = random.Random(3)
    under_way = together = 0
    commit = world.commits.commit

    async def counted(batch: list[LeaseReports], *, skip_locked: bool = False) -> BatchResult:
        nonlocal under_way, together
        if skip_locked:
            return await commit(batch, skip_locked=True)
        under_way += 1
        together = max(together, under_way)
        try:
            return await commit(batch)
        finally:
            under_way -= 1

    monkeypatch.setattr(world.commits, "commit", counted)
    before = await deadlocks(world)
    async with committing(committer, within_s=60), asyncio.TaskGroup() as group:

        async def sweep() -> None:
            """Let leases expire, and take back those that nothing is on its way about."""
            while True:
                await worlds[1].raw.execute(
                    "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
                    " where step_run_id in"
                    " (select step_run_id from rara.lease limit 5 for update skip locked)"
                )
                await world.sweeps.promote_due()
                found = [
                    x for x in await world.sweeps.reclaimable(NIL) if not committer.has_queued(x.lease_token)
                ]
                await committer.commit_found(
                    [
                        LeaseReports(x.step_run_id, x.workflow_run_id, x.lease_token, None, RECLAIM)
                        for x in found
                    ]
                )
                await asyncio.sleep(0.002)

        sweeping = group.create_task(sweep())
        while await world.raw.fetchval("select count(*) from rara.workflow_run where ended_at is null"):
            for grant in await world.lease(40):
                effect = Report(3, EventType.EFFECT, b"e", effect=("paid", b"1"))
                some = dice.sample(blobs, 4)
                for item in (
                    accepted(),
                    running(),
                    effect,
                    progress(4, b"{}", some[:2]),
                    succeeded(5, artifacts=some),
                ):
                    say(committer, grant, item)
                    if dice.random() < 0.3:
                        await asyncio.sleep(0)
            if dice.random() < 0.5:
                await committer.drained()
        sweeping.cancel()
    assert together == 2
    assert await deadlocks(world) == before
    assert {await world.run_state(run_id) for run_id in runs} == {"succeeded"}
    assert await world.raw.fetchval("select count(*) from rara.step_event where type = 'succeeded'") == 120


async def test_two_grants_at_once_share_no_step(worlds: list[StoreWorld]) -> None:
    await worlds[0].define("wide", {f"s{i}": {} for i in range(100)})
    for _ in range(5):
        await worlds[0].start("wide")
        grants = await asyncio.gather(*(world.lease(30) for world in worlds for _ in range(2)))
        steps = [grant.step_run_id for granted in grants for grant in granted]
        assert len(steps) == len(set(steps))


async def test_a_commit_waits_for_the_run_and_not_for_other_runs(
    worlds: list[StoreWorld], database_url: str
) -> None:
    world = worlds[0]
    await world.define("one", {"a": {}})
    locked, free = await world.start("one"), await world.start("one")
    grants = {grant.workflow_run_id: grant for grant in await world.lease()}
    side = await asyncpg.connect(database_url)
    try:
        transaction = side.transaction()
        await transaction.start()
        await side.execute(
            "select from rara.workflow_run where workflow_run_id = $1::uuid for update", locked
        )
        waiting = asyncio.create_task(world.run_to_success(grants[locked]))
        await world.run_to_success(grants[free])
        assert await world.run_state(free) == "succeeded"
        assert not waiting.done()
        await transaction.rollback()
        await waiting
        assert await world.run_state(locked) == "succeeded"
    finally:
        await side.close()


async def test_a_ready_row_that_is_rewritten_while_it_is_leased_is_not_both(worlds: list[StoreWorld]) -> None:
    """A statement that waited for nobody locks a row in a place where it was not when the statement began."""
    first, second = worlds
    await first.define("wide", {f"s{n}": {"schedule_timeout": {"seconds": 600}} for n in range(STEPS)})
    (route,) = [route.route_id for route in await first.definitions.routes_after(0)]
    for _ in range(20):
        await first.raw.execute("truncate rara.ready, rara.lease")
        await first.start("wide")

        async def rewrite() -> None:
            await asyncio.sleep(random.random() * 0.01)
            for _ in range(4):
                await second.raw.execute(
                    "update rara.ready set schedule_deadline = schedule_deadline + interval '1 s'"
                )

        async def grant() -> None:
            for _ in range(20):
                await first.leases.grant([(route, 20, BEFORE_ALL, "1.0.0")], [new_id()] * 20)

        await asyncio.gather(rewrite(), grant())
        counts = await first.raw.fetchrow(
            "select (select count(*) from rara.lease) as leased, (select count(*) from rara.ready) as ready,"
            " (select count(*) from rara.ready join rara.lease using (step_run_id)) as twice"
        )
        assert counts is not None
        assert (counts["leased"] + counts["ready"], counts["twice"]) == (STEPS, 0)
    # What check_history looks at was cut off above.
    await first.raw.execute("truncate rara.ready, rara.lease, rara.workflow_run cascade")


async def test_what_is_said_to_be_renewed_was(worlds: list[StoreWorld]) -> None:
    first, second = worlds
    await first.define("wide", {f"s{n}": {} for n in range(STEPS)})
    await first.start("wide")
    held = await first.lease(STEPS)
    await first.commits.commit([reports(g, accepted(), running(), executor_id=g.executor_id) for g in held])
    sequence = itertools.count(3)
    is_over = False

    async def write() -> None:
        while not is_over:
            number = next(sequence)
            for part in (held[:250], held[250:]):
                await second.commits.commit(
                    [reports(g, progress(number), executor_id=g.executor_id) for g in part]
                )

    writer = asyncio.create_task(write())
    beats = [(g.step_run_id, g.lease_token, g.executor_id) for g in held]
    told = 0
    for _ in range(40):
        began = await first.raw.fetchval("select clock_timestamp()")
        renewed, lost, busy = await first.leases.renew(beats)
        assert not lost
        assert len(renewed) + len(busy) == STEPS
        told += len(renewed)
        short = await first.raw.fetch(
            "select lease_token from rara.lease where expires_at < $1::timestamptz + make_interval(secs => $2)",
            began,
            LEASE_S,
        )
        assert not {row["lease_token"] for row in short} & set(renewed)
    is_over = True
    await writer
    assert told > STEPS
