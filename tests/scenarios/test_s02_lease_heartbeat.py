"""S02: executors that fall silent, die and come back late; every step is finished by exactly one owner."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from rara.v1 import dispatch_pb2, job_pb2
from rara_testing.job_events import accepted, running, succeeded
from rara_testing.scripted_executor import ScriptedExecutor
from support.running_scheduler import (
    HEARTBEAT_S,
    KIND,
    LEASE_S,
    RunningScheduler,
    running_scheduler,
    until,
)

SLOTS = 25
STEPS_PER_RUN = 50


class Way(StrEnum):
    """What an executor does with one job."""

    FINISH = "finish"
    OVERTAKE = "overtake"  # succeeds without having said `running`
    SILENT = "silent"  # works, renews nothing, and says its result when the lease is long over
    LATE = "late"  # says nothing more until another attempt has its lease, then succeeds
    DEAF = "deaf"  # never accepts


WAYS = [*[Way.FINISH] * 14, *[Way.OVERTAKE] * 2, Way.SILENT, Way.LATE, Way.DEAF]


@dataclass
class Tally:
    """What the executors themselves saw, over all their sessions."""

    sent: Counter[Way] = field(default_factory=Counter)
    committed: Counter[int] = field(default_factory=Counter)  # successes acknowledged, by lease token
    refused: Counter[str] = field(default_factory=Counter)
    lost: set[int] = field(default_factory=set)
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Late:
    """A result that its executor keeps for itself until `due_at`, by the loop's clock."""

    lease: job_pb2.Lease
    executor_id: str
    due_at: float


class Erratic:
    """An executor of many faults, which starts a new session, or a new process, whenever one has ended."""

    def __init__(self, address: str, dice: random.Random, tally: Tally) -> None:
        self._address = address
        self._dice = dice
        self._tally = tally
        self._late: dict[int, Late] = {}

    async def run(self) -> None:
        """Until cancelled: a session of a second or so, then a cut, a restart, or an orderly reconnect."""
        executor_id = None
        while True:
            async with ScriptedExecutor(executor_id=executor_id) as session:
                try:
                    async with asyncio.timeout(0.8 + self._dice.random()):
                        await self._session(session)
                except* TimeoutError:
                    pass
                except* AssertionError:
                    if not session.ended.is_set():
                        raise
                executor_id = session.executor_id if self._dice.random() < 0.5 else None
                self._tally.restarts += executor_id is None

    async def _session(self, session: ScriptedExecutor) -> None:
        listed = [
            dispatch_pb2.HeldJob(lease=late.lease, last_sequence=3, acked_sequence=2)
            for late in self._late.values()
            if late.executor_id == session.executor_id
        ]
        await session.connect(self._address)
        await session.hello([KIND], held_jobs=listed)
        welcome = await session.expect("welcome")
        self._tally.lost |= set(welcome.lost_lease_tokens)  # and yet it reports them
        async with asyncio.TaskGroup() as tasks:
            jobs = _Jobs(session, self._dice, self._tally, self._late, tasks)
            tasks.create_task(jobs.beat())
            tasks.create_task(jobs.serve())


class _Jobs:
    """The jobs of one session."""

    def __init__(
        self,
        session: ScriptedExecutor,
        dice: random.Random,
        tally: Tally,
        late: dict[int, Late],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._session = session
        self._dice = dice
        self._tally = tally
        self._late = late
        self._tasks = tasks
        self._renewing: set[int] = set()
        self._credit = SLOTS

    async def beat(self) -> None:
        while True:
            await self._session.heartbeat(self._renewing)
            await asyncio.sleep(HEARTBEAT_S / 2)

    async def serve(self) -> None:
        await self._session.credit(self._credit)
        for late in list(self._late.values()):
            self._tasks.create_task(self._report_late(late))
        async for frame in self._session.frames():
            for request in frame.jobs.jobs:
                way = self._dice.choice(WAYS)
                self._tally.sent[way] += 1
                self._tasks.create_task(self._work(request.lease, way))

    async def _work(self, lease: job_pb2.Lease, way: Way) -> None:
        if way is Way.DEAF:
            return
        await self._session.events(accepted(lease))
        await self._session.expect_ack(lease, 1)
        if way in (Way.SILENT, Way.LATE):
            await self._session.events(running(lease))
            # At about the end of its lease, for a race with the sweep, or long after it.
            due_at = asyncio.get_running_loop().time() + LEASE_S * (1.05 if way is Way.SILENT else 1.6)
            late = Late(lease, self._session.executor_id, due_at)
            self._late[lease.lease_token] = late
            await self._report_late(late)
            return
        self._renewing.add(lease.lease_token)
        if way is Way.FINISH:
            await self._session.events(running(lease))
        await self._report(lease, 3 if way is Way.FINISH else 2)

    async def _report_late(self, late: Late) -> None:
        await asyncio.sleep(max(0.0, late.due_at - asyncio.get_running_loop().time()))
        await self._report(late.lease, 3)

    async def _report(self, lease: job_pb2.Lease, sequence: int) -> None:
        await self._session.events(succeeded(lease, sequence, output={"token": lease.lease_token}))
        outcome = await self._session.outcome_of(lease, sequence)
        self._late.pop(lease.lease_token, None)
        self._renewing.discard(lease.lease_token)
        if outcome:
            self._tally.refused[outcome] += 1
        else:
            self._tally.committed[lease.lease_token] += 1
        self._credit += 1
        await self._session.credit(self._credit)


@contextlib.asynccontextmanager
async def schedulers(database_url: str, folder: Path, count: int) -> AsyncIterator[list[RunningScheduler]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running_scheduler(database_url, folder)) for _ in range(count)]


async def check(world: RunningScheduler, tally: Tally, steps: int) -> None:
    """Everything that must hold when all is over, from the tables and from what the executors saw."""
    fetch = world.raw.fetch
    results = await fetch("select * from rara.result")
    assert len(results) == steps
    assert {row["state"] for row in results} == {"succeeded"}
    # One commit a step; and every success that was acknowledged is the one that is stored.
    tokens = {row["lease_token"] for row in results}
    assert len(tokens) == steps
    assert set(tally.committed) <= tokens
    for row in results:
        assert row["output"] == b'{"token":%d}' % row["lease_token"]
    # Tokens are unique over all steps, and rise over a step's attempts, which have no holes.
    history = await fetch(
        "select step_run_id, attempt, lease_token from rara.step_attempt"
        " union all select step_run_id, attempt, lease_token from rara.result order by step_run_id, attempt"
    )
    assert len({row["lease_token"] for row in history}) == len(history)
    of_step: dict[str, list[tuple[int, int]]] = {}
    for row in history:
        of_step.setdefault(str(row["step_run_id"]), []).append((row["attempt"], row["lease_token"]))
    for grants in of_step.values():
        assert [attempt for attempt, _ in grants] == list(range(1, len(grants) + 1))
        assert sorted(token for _, token in grants) == [token for _, token in grants]
    # No success under a token that another attempt followed, and no more than one terminal success a step.
    successes = await fetch("select step_run_id, attempt from rara.step_event where type = 'succeeded'")
    assert Counter((row["step_run_id"], row["attempt"]) for row in successes) == Counter(
        (row["step_run_id"], row["attempt"]) for row in results
    )
    spent = await fetch(
        "select step_run_id, count(*) filter (where spent) as spent from rara.step_attempt group by step_run_id"
    )
    failures = {row["step_run_id"]: row["failures"] for row in results}
    assert all(failures[row["step_run_id"]] == row["spent"] for row in spent)
    reasons = Counter(row["reason"] for row in await fetch("select reason from rara.step_attempt"))
    assert set(reasons) <= {"LEASE_EXPIRED", "DISPATCH_LOST"}
    assert reasons["LEASE_EXPIRED"] > 0
    assert reasons["DISPATCH_LOST"] > 0
    assert set(tally.refused) == {"refused:LEASE_LOST"}
    for table in ("lease", "ready", "waiting"):
        assert await world.raw.fetchval(f"select count(*) from rara.{table}") == 0
    runs = await fetch("select state, steps_succeeded, steps_total from rara.workflow_run")
    assert all((row["state"], row["steps_succeeded"]) == ("succeeded", row["steps_total"]) for row in runs)


async def play(database_url: str, folder: Path, *, steps: int, executors: int, seed: int) -> None:
    dice = random.Random(seed)
    tally = Tally()
    async with schedulers(database_url, folder, 2) as worlds:
        retry = {"max_attempts": 50, "initial_backoff": {"nanos": 10_000_000}}
        await worlds[0].define("wide", {f"s{n}": {"retry": retry} for n in range(STEPS_PER_RUN)})
        runs = [await worlds[n % 2].start("wide") for n in range(steps // STEPS_PER_RUN)]
        tasks = []
        for number in range(executors):
            one = Erratic(worlds[number % 2].address, random.Random(dice.random()), tally)
            tasks.append(asyncio.create_task(one.run(), name=f"erratic executor {number}"))

        async def all_over() -> bool:
            query = "select count(*) from rara.workflow_run where ended_at is not null"
            return bool(await worlds[0].raw.fetchval(query) == len(runs))

        async def late_ones_answered() -> bool:
            return bool(tally.refused)

        try:
            await until(all_over, "end of all runs", 120.0)
            await until(late_ones_answered, "answer to a late result")
        finally:
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(ended, asyncio.CancelledError), ended
        await check(worlds[0], tally, steps)
    assert tally.sent[Way.LATE] + tally.sent[Way.SILENT] > 0
    assert tally.restarts > 0


@pytest.mark.case("S02", "OWN-2", "STR-2")
async def test_five_hundred_steps_over_erratic_executors_have_one_owner_each(
    database_url: str, tmp_path: Path
) -> None:
    await play(database_url, tmp_path, steps=500, executors=4, seed=2)


@pytest.mark.soak
@pytest.mark.case("S02")
@pytest.mark.parametrize("seed", range(10))
async def test_two_thousand_steps_over_erratic_executors(
    database_url: str, tmp_path: Path, seed: int
) -> None:
    await play(database_url, tmp_path, steps=2000, executors=8, seed=seed)
