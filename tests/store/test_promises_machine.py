"""The promises, played by chance: executors, sweeps, callers and clocks act in any order, and after each act the
database is asked whether what may never be is so.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rara_scheduler.domain.attempt import CancelReceipt, Guard, Item
from rara_scheduler.store.check import check
from rara_scheduler.store.commit import BatchResult, LeaseReports
from rara_scheduler.store.leases import Grant
from support.postgres import PostgresServer
from support.promise_queries import ALL_NEVER, DEFINITIONS, FINAL, NEVER, Loop
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    progress,
    reports,
    running,
    store_world,
    succeeded,
)

T = TypeVar("T")


@dataclass
class Told:
    """What an executor knows of a grant: its next number, and everything it has sent."""

    grant: Grant
    next_sequence: int = 1
    sent: list[Item] = field(default_factory=list)


class Promises(RuleBasedStateMachine):
    loop: Loop
    world: StoreWorld

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.runs: list[str] = []
        self.final: dict[str, str] = {}
        self.do(self._forget_all())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    async def _forget_all(self) -> None:
        await self.world.raw.execute(
            "truncate rara.workflow_run, rara.start_key, rara.run_artifact, rara.step_run, rara.reused_step,"
            " rara.step_dependency, rara.ready, rara.waiting, rara.lease, rara.result, rara.step_attempt,"
            " rara.step_event, rara.effect, rara.checkpoint, rara.checkpoint_artifact,"
            " rara.artifact, rara.lineage"
        )

    def report(self, told: Told, *items: Item) -> BatchResult:
        told.sent += items
        return self.do(self.world.report(told.grant, *items))

    def number(self, told: Told, skip: int = 0) -> int:
        told.next_sequence += 1 + skip
        return told.next_sequence - 1

    # ------------------------------------------------------------ callers

    @precondition(lambda self: len(self.runs) < 5)
    @rule(name=st.sampled_from(sorted(DEFINITIONS)))
    def start_a_run(self, name: str) -> None:
        self.runs.append(self.do(self.world.start(name)))

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), reason=st.sampled_from(["CANCELLED", "CANCELLED", "DEADLINE_EXCEEDED"]))
    def cancel_a_run(self, data: st.DataObject, reason: str) -> None:
        run_id = data.draw(st.sampled_from(self.runs))
        self.do(self.world.cancels.cancel_run(run_id, reason=reason, message="", grace_s=None))

    # ------------------------------------------------------------ executors

    @precondition(lambda self: self.runs)
    @rule(most=st.integers(1, 3))
    def lease(self, most: int) -> None:
        self.told += [Told(grant) for grant in self.do(self.world.lease(most))]

    @precondition(lambda self: self.told)
    @rule(data=st.data(), skip=st.sampled_from([0, 0, 0, 1, 2]), what=st.sampled_from("arppse"))
    def report_something(self, data: st.DataObject, skip: int, what: str) -> None:
        """Under any token that was ever granted: current, superseded or closed."""
        told = data.draw(st.sampled_from(self.told))
        number = self.number(told, skip)
        item: Item
        if what == "a":
            item = accepted(number)
        elif what == "r":
            item = running(number)
        elif what == "p":
            item = progress(number, b'{"at":1}')
        elif what == "s":
            item = succeeded(number)
        else:
            item = failed(number)
        self.report(told, item)

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def finish_properly(self, data: st.DataObject) -> None:
        told = data.draw(st.sampled_from(self.told))
        first, second, third = (self.number(told) for _ in range(3))
        self.report(told, accepted(first), running(second), succeeded(third))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), retryable=st.sampled_from([None, True, False]))
    def fail(self, data: st.DataObject, retryable: bool | None) -> None:
        told = data.draw(st.sampled_from(self.told))
        self.report(told, failed(self.number(told), retryable=retryable))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), reason=st.sampled_from(["CANCELLED", "EXECUTOR_SHUTDOWN", "ATTEMPT_TIMEOUT"]))
    def say_cancelled(self, data: st.DataObject, reason: str) -> None:
        told = data.draw(st.sampled_from(self.told))
        self.report(told, CancelReceipt(), cancelled(self.number(told), reason))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def report_all_again(self, data: st.DataObject) -> None:
        told = data.draw(st.sampled_from(self.told))
        before = self.do(self.world.raw.fetchval("select count(*) from rara.step_event"))
        self.do(self.world.report(told.grant, *told.sent))
        if not self.do(
            self.world.raw.fetchval(
                "select exists (select from rara.lease where lease_token = $1)", told.grant.lease_token
            )
        ):
            after = self.do(self.world.raw.fetchval("select count(*) from rara.step_event"))
            assert after >= before

    @precondition(lambda self: self.told)
    @rule(data=st.data(), code=st.sampled_from(["NO_CAPACITY", "UNSUPPORTED_KIND"]))
    def reject(self, data: st.DataObject, code: str) -> None:
        told = data.draw(st.sampled_from(self.told))
        self.do(self.world.report(told.grant, ending(code, Guard.NOT_RUNNING)))

    @precondition(lambda self: self.told)
    @rule(count=st.integers(1, 5))
    def heartbeat(self, count: int) -> None:
        beats = [
            (told.grant.step_run_id, told.grant.lease_token, told.grant.executor_id)
            for told in self.told[-count:]
        ]
        renewed, lost, busy = self.do(self.world.leases.renew(beats))
        assert renewed.keys() | lost == {token for _, token, _ in beats}
        assert not busy

    @precondition(lambda self: len(self.runs) < 5)
    @rule(ends=st.lists(st.sampled_from("sfFc"), min_size=3, max_size=3))
    def neighbours_end_in_one_batch(self, ends: list[str]) -> None:
        """Steps of one run whose ends are decided together: one may cancel the run, another ask for a retry."""
        run_id = self.do(self.world.start("trio"))
        self.runs.append(run_id)
        self.lease(20)
        mine = [told for told in self.told if told.grant.workflow_run_id == run_id]
        batch = []
        for told, end in zip(mine, ends, strict=False):
            number = self.number(told)
            item: Item = succeeded(number)
            if end == "f":
                item = failed(number)
            elif end == "F":
                item = failed(number, retryable=False)
            elif end == "c":
                item = cancelled(number, "EXECUTOR_SHUTDOWN")
            told.sent.append(item)
            batch.append(reports(told.grant, item, executor_id=told.grant.executor_id))
        self.do(self.world.commits.commit(batch))

    # ------------------------------------------------------------ time

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def expire_and_reclaim(self, data: st.DataObject) -> None:
        told = data.draw(st.sampled_from(self.told))
        self.do(self.world.expire(told.grant))
        self.do(self._reclaim())

    async def _reclaim(self) -> None:
        for found in await self.world.sweeps.reclaimable(NIL):
            await self.world.commits.commit(
                [
                    reports_of(found.step_run_id, found.workflow_run_id, found.lease_token),
                ],
                skip_locked=True,
            )

    @rule()
    def make_due(self) -> None:
        self.do(self.world.make_due())

    @precondition(lambda self: self.runs)
    @rule()
    def steps_fall_overdue(self) -> None:
        self.do(self._overdue())

    async def _overdue(self) -> None:
        await self.world.raw.execute(
            "update rara.ready set deadline = now() - interval '1 s' where step_run_id ="
            " (select step_run_id from rara.ready order by step_run_id limit 1)"
        )
        if found := await self.world.sweeps.overdue_steps(NIL):
            await self.world.cancels.close_overdue(found)

    # ------------------------------------------------------------ what may never be

    @invariant()
    def the_promises_hold(self) -> None:
        self.do(self._check())

    async def _check(self) -> None:
        broken = await self.world.raw.fetch(ALL_NEVER)
        assert not broken, [row["what"] for row in broken]
        final = {row["id"]: row["facts"] for row in await self.world.raw.fetch(FINAL)}
        for key, facts in self.final.items():
            assert final.get(key) == facts, f"{key} was final"
        self.final = final

    def teardown(self) -> None:
        """Whatever happened, good executors and enough time close every run."""
        self.do(self._finish())

    async def _finish(self) -> None:
        await self._check_history()
        for _ in range(200):
            if not await self.world.raw.fetchval(
                "select count(*) from rara.workflow_run where ended_at is null"
            ):
                break
            await self.world.raw.execute(
                "update rara.lease set granted_at = now() - interval '1 hour', expires_at = now() - interval '1 s'"
            )
            await self._reclaim()
            await self.world.make_due()
            for grant in await self.world.lease():
                await self.world.run_to_success(grant)
        open_runs = await self.world.raw.fetch(
            "select workflow_run_id::text, state from rara.workflow_run where ended_at is null"
        )
        assert not open_runs, open_runs
        await self._check()
        await self._check_history()

    async def _check_history(self) -> None:
        """All rules of the history checker: more than there is time for after each act."""
        report = await check(self.world.raw, max_attempts=3)
        assert report.is_clean, report.violations


def reports_of(step_run_id: str, workflow_run_id: str, token: int) -> LeaseReports:

    words = (ending("DISPATCH_LOST", Guard.UNACCEPTED), ending("LEASE_EXPIRED", Guard.EXPIRED))
    return LeaseReports(step_run_id, workflow_run_id, token, None, words)


async def _play(server: PostgresServer, examples: int, steps: int) -> None:
    async with server.database() as url:
        loop = Loop()

        def play() -> None:
            async def enter(stack: AsyncExitStack) -> StoreWorld:
                world = await stack.enter_async_context(store_world(url))
                for name, (on_failure, definition) in DEFINITIONS.items():
                    await world.define(name, definition, on_failure=f"ON_FAILURE_{on_failure}")
                return world

            stack = AsyncExitStack()
            try:
                world = loop.run(enter(stack))
                machine = type("Played", (Promises,), {"loop": loop, "world": world})
                run_state_machine_as_test(
                    machine,
                    settings=settings(
                        max_examples=examples,
                        stateful_step_count=steps,
                        deadline=None,
                        database=None,
                        derandomize=examples < 100,  # the same in each `make test`; the soak explores
                        suppress_health_check=list(HealthCheck),
                        phases=[Phase.generate, Phase.shrink],
                    ),
                )
            finally:
                loop.run(stack.aclose())

        try:
            await asyncio.to_thread(play)
        finally:
            loop.close()


async def test_the_promises_hold_whatever_happens(postgres_server: PostgresServer) -> None:
    await _play(postgres_server, examples=15, steps=40)


@pytest.mark.soak
async def test_the_promises_hold_whatever_happens_for_long(postgres_server: PostgresServer) -> None:
    await _play(postgres_server, examples=300, steps=60)


async def test_an_empty_database_breaks_no_promise(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        broken = {name: rows for name, text in NEVER.items() if (rows := await connection.fetch(text))}
        assert broken == {}
    finally:
        await connection.close()
