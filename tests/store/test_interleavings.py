"""Two schedulers on one database, statement by statement: whichever runs its next one, the promises hold."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from rara_scheduler.domain.attempt import Guard, Item
from rara_scheduler.store.check import check
from rara_scheduler.store.commit import BatchResult, LeaseReports
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.retry_run import RunRetrier
from support.postgres import PostgresServer
from support.promise_queries import ALL_NEVER, DEFINITIONS, FINAL, Loop
from support.stepped_database import Interleaver, SteppedDatabase
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    new_id,
    reports,
    running,
    store_world,
    succeeded,
)

T = TypeVar("T")

MOST_ACTS = 4
ENDS: dict[str, Callable[[], tuple[Item, ...]]] = {
    "succeeded": lambda: (accepted(), running(), succeeded(3)),
    "failed": lambda: (accepted(), running(), failed(3)),
    "failed for good": lambda: (accepted(), failed(3, retryable=False)),
    "given back": lambda: (accepted(), cancelled(3, "EXECUTOR_SHUTDOWN")),
    "accepted": lambda: (accepted(),),
}


DEEDS = (
    "report",
    "report",
    "report",
    "lease",
    "lease",
    "reclaim",
    "promote",
    "cancel",
    "close overdue",
    "start",
    "retry",
    "reconnect",
    "heartbeat",
)


@dataclass(frozen=True, slots=True)
class Deed:
    """What one of two schedulers does. which: to whom, counted round what there is."""

    what: str
    at: int
    which: int
    ends: tuple[str, ...]


DEED = st.builds(
    Deed,
    what=st.sampled_from(DEEDS),
    at=st.integers(0, 1),
    which=st.integers(0, 7),
    ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=1, max_size=3).map(tuple),
)


class Interleavings(RuleBasedStateMachine):
    loop: Loop
    worlds: tuple[StoreWorld, StoreWorld]

    def __init__(self) -> None:
        super().__init__()
        self.grants: list[Grant] = []
        self.runs: list[str] = []
        self.final: dict[str, str] = {}
        self.ended: dict[str, int] = {}  # token under which we were told that a step has its result
        self.executors = [new_id() for _ in range(3)]
        self.raw = self.worlds[0].raw
        self.under_way = Interleaver(self.worlds[1].raw)
        self.do(self._begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    async def _begin(self) -> None:
        await self.raw.execute(
            "truncate rara.workflow_run, rara.start_key, rara.run_artifact, rara.step_run, rara.reused_step,"
            " rara.step_dependency, rara.ready, rara.waiting, rara.lease, rara.result, rara.step_attempt,"
            " rara.step_event, rara.effect, rara.checkpoint, rara.checkpoint_artifact,"
            " rara.artifact, rara.lineage"
        )
        for name in ("diamond", "trio"):
            self.runs.append(await self.worlds[0].start(name))
        self.grants += await self.worlds[0].lease(3, self.executors[0])

    # ------------------------------------------------------------ whose statement is next

    @rule(
        deeds=st.lists(DEED, min_size=2, max_size=MOST_ACTS), order=st.lists(st.integers(0, 3), max_size=40)
    )
    def together(self, deeds: list[Deed], order: list[int]) -> None:
        """Begin all, let them take their statements in this order, and then go on in turns to the end."""
        self.do(self._together(deeds, order))

    @rule(
        name=st.sampled_from(["trio", "diamond", "branches"]),
        ends=st.lists(st.sampled_from(sorted(ENDS)), min_size=3, max_size=3),
        others=st.lists(DEED, max_size=2),
        order=st.lists(st.integers(0, 3), max_size=40),
    )
    def one_run_from_both_sides(
        self, name: str, ends: list[str], others: list[Deed], order: list[int]
    ) -> None:
        """Steps of one run end through both schedulers at once, one of them through both."""
        self.do(self._both_sides(name, ends, others, order))

    async def _both_sides(self, name: str, ends: list[str], others: list[Deed], order: list[int]) -> None:
        first, second = self.worlds
        run_id = await first.start(name)
        self.runs.append(run_id)
        for grant in await first.lease(20, self.executors[1]):
            self.grants.append(grant)
            if grant.step_name == "a" and name == "diamond":
                await first.run_to_success(grant)
                self.ended[grant.step_run_id] = grant.lease_token
        if name == "diamond":
            self.grants += await first.lease(20, self.executors[1])
        mine = [grant for grant in self.grants if grant.workflow_run_id == run_id][-2:]
        if not mine:
            return  # older runs had so many steps ready that this one got no lease
        batches = [
            [reports(mine[0], *ENDS[ends[0]](), executor_id=mine[0].executor_id)],
            [
                reports(grant, *ENDS[end](), executor_id=grant.executor_id)
                for grant, end in zip(mine[::-1], ends[1:], strict=False)
            ],
        ]
        for world, batch in ((first, batches[0]), (second, batches[1][: 1 + len(order) % 2])):
            await self.under_way.begin("report", self._report(world, batch))
        await self._together(others, order)

    async def _together(self, deeds: list[Deed], order: list[int]) -> None:
        for deed in deeds:
            if (work := await self._work(deed)) is not None:
                await self.under_way.begin(deed.what, work)
        for number in order:
            if ready := self.under_way.ready():
                before = len(self.under_way.acts)
                await self.under_way.step(ready[number % len(ready)])
                if len(self.under_way.acts) < before:
                    await self._check()
        await self.under_way.finish()

    # ------------------------------------------------------------ what they do

    async def _work(self, deed: Deed) -> Coroutine[Any, Any, object] | None:
        """None: there is nothing to do it to."""
        world = self.worlds[deed.at]
        grants = self.grants[-8:]
        executor_id = self.executors[deed.which % len(self.executors)]
        match deed.what:
            case "start":
                return self._start(world, deed.which) if len(self.runs) < 10 else None
            case "lease":
                return self._lease(world, 1 + deed.which % 3, executor_id)
            case "reconnect":
                return self._inventory(world, executor_id, lists=deed.which % 2 == 0)
            case "cancel":
                run_id = self.runs[-1 - deed.which % min(3, len(self.runs))]
                reason = "DEADLINE_EXCEEDED" if deed.ends[0] == "failed" else "CANCELLED"
                return world.cancels.cancel_run(run_id, reason=reason, message="", grace_s=None)
            case "retry":
                return self._retry(world, self.runs[deed.which % len(self.runs)])
            case "promote":
                await self.raw.execute(
                    "update rara.waiting set available_at = now() where step_run_id in"
                    " (select step_run_id from rara.waiting for update skip locked)"
                )
                return world.sweeps.promote_due()
            case "close overdue":
                await self.raw.execute(
                    "update rara.ready set deadline = now() - interval '1 s' where step_run_id in"
                    " (select step_run_id from rara.ready order by step_run_id limit 1 for update skip locked)"
                )
                return self._close_overdue(world)
            case _ if not grants:
                return None
            case "heartbeat":
                return world.leases.renew([(g.step_run_id, g.lease_token, g.executor_id) for g in grants])
            case "reclaim":
                await self._expire(grants[deed.which % len(grants)].lease_token)
                return self._reclaim(world)
            case _:
                chosen = {
                    g.step_run_id: g
                    for n in range(len(deed.ends))
                    for g in [grants[(deed.which + n) % len(grants)]]
                }
                batch = [
                    reports(grant, *ENDS[end](), executor_id=grant.executor_id)
                    for grant, end in zip(chosen.values(), deed.ends, strict=False)
                ]
                return self._report(world, batch)

    async def _lease(self, world: StoreWorld, most: int, executor_id: str) -> None:
        self.grants += await world.lease(most, executor_id)

    async def _report(self, world: StoreWorld, batch: list[LeaseReports]) -> None:
        self._told(await world.commits.commit(batch))

    def _told(self, result: BatchResult) -> None:
        for token, decision in result.decisions.items():
            if decision.closing is not None and decision.closing.to != "retryable_failed":
                step = decision.lease.step_run_id
                assert self.ended.setdefault(step, token) == token, "two were told that they had finished"

    async def _expire(self, token: int) -> None:
        await self.raw.execute(
            "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
            " where step_run_id in (select step_run_id from rara.lease where lease_token = $1 for update skip locked)",
            token,
        )

    async def _reclaim(self, world: StoreWorld) -> None:
        words: tuple[Item, ...] = (
            ending("DISPATCH_LOST", Guard.UNACCEPTED),
            ending("LEASE_EXPIRED", Guard.EXPIRED),
        )
        found = await world.sweeps.reclaimable(NIL)
        batch = [LeaseReports(f.step_run_id, f.workflow_run_id, f.lease_token, None, words) for f in found]
        self._told(await world.commits.commit(batch, skip_locked=True))

    async def _close_overdue(self, world: StoreWorld) -> None:
        if found := await world.sweeps.overdue_steps(NIL):
            await world.cancels.close_overdue(found)

    async def _start(self, world: StoreWorld, which: int) -> None:
        """Some of them under one key."""
        names = sorted(DEFINITIONS)
        key = "k" if which % 4 == 0 else None
        run_id = await world.start("single" if key else names[which % len(names)], idempotency_key=key)
        if run_id not in self.runs:
            self.runs.append(run_id)

    async def _retry(self, world: StoreWorld, source: str) -> None:
        retrier = RunRetrier(world.database, world.definitions, on_ready=lambda: None)
        run_id, _ = await retrier.retry(source)
        if run_id not in self.runs:
            self.runs.append(run_id)

    async def _inventory(self, world: StoreWorld, executor_id: str, *, lists: bool) -> None:
        """Compare, and take back what the executor does not list."""
        held = await world.sessions.leases(executor_id)
        await world.sessions.closed([(g.step_run_id, g.lease_token) for g in self.grants[-4:]])
        if not lists and held:
            words: tuple[Item, ...] = (ending("LEASE_EXPIRED"),)
            batch = [LeaseReports(h.step_run_id, h.workflow_run_id, h.lease_token, None, words) for h in held]
            self._told(await world.commits.commit(batch))

    # ------------------------------------------------------------ what may never be

    @invariant()
    def the_promises_hold(self) -> None:
        self.do(self._check())

    async def _check(self) -> None:
        broken = await self.raw.fetch(ALL_NEVER)
        assert not broken, [row["what"] for row in broken]
        final = {row["id"]: row["facts"] for row in await self.raw.fetch(FINAL)}
        for key, facts in self.final.items():
            assert final.get(key) == facts, f"{key} was final"
        self.final = final

    def teardown(self) -> None:
        """Whatever happened, good executors and enough time close every run."""
        self.do(self._finish())

    async def _finish(self) -> None:
        if self.under_way.acts:  # something has failed already
            await self.under_way.abandon()
            return
        for step, token in self.ended.items():
            stored = await self.raw.fetchval(
                "select lease_token from rara.result where step_run_id = $1::uuid", step
            )
            assert stored == token, f"{step} was said to have ended under {token}"
        world = self.worlds[0]
        for _ in range(100):
            if not await self.raw.fetchval("select count(*) from rara.workflow_run where ended_at is null"):
                break
            await self.raw.execute(
                "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
            )
            await self._reclaim(world)
            await world.make_due()
            await self._close_overdue(world)
            for grant in await world.lease():
                await world.run_to_success(grant)
        open_runs = await self.raw.fetch(
            "select workflow_run_id::text, state from rara.workflow_run where ended_at is null"
        )
        assert not open_runs, open_runs
        await self._check()
        report = await check(self.raw, max_attempts=3)
        assert report.is_clean, "\n".join(map(str, report.violations))


async def _play(server: PostgresServer, examples: int, steps: int) -> None:
    async with server.database() as url:
        loop = Loop()

        def play() -> None:
            async def enter(stack: AsyncExitStack) -> tuple[StoreWorld, StoreWorld]:
                first = await stack.enter_async_context(store_world(url, SteppedDatabase))
                second = await stack.enter_async_context(store_world(url, SteppedDatabase))
                for name, (on_failure, definition) in DEFINITIONS.items():
                    await first.define(name, definition, on_failure=f"ON_FAILURE_{on_failure}")
                return first, second

            stack = AsyncExitStack()
            try:
                worlds = loop.run(enter(stack))
                machine = type("Played", (Interleavings,), {"loop": loop, "worlds": worlds})
                run_state_machine_as_test(
                    machine,
                    settings=settings(
                        max_examples=examples,
                        stateful_step_count=steps,
                        deadline=None,
                        database=None,
                        derandomize=examples < 100,  # the same in each `make test`; the soak explores
                        suppress_health_check=list(HealthCheck),
                        phases=[Phase.generate],
                    ),
                )
                deadlocks = loop.run(
                    worlds[0].raw.fetchval(
                        "select deadlocks from pg_stat_database where datname = current_database()"
                    )
                )
                assert deadlocks == 0
            finally:
                loop.run(stack.aclose())

        try:
            await asyncio.to_thread(play)
        finally:
            loop.close()


async def test_the_promises_hold_in_whatever_order_statements_run(postgres_server: PostgresServer) -> None:
    await _play(postgres_server, examples=4, steps=8)


@pytest.mark.soak
async def test_the_promises_hold_in_whatever_order_statements_run_for_long(
    postgres_server: PostgresServer,
) -> None:
    await _play(postgres_server, examples=200, steps=30)
