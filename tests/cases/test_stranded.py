"""No step stays leased with nobody at work on it: dead executors, bad neighbours, pages of rows that must wait."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import job_pb2, workflow_pb2
from rara_scheduler.store import sweeps
from rara_scheduler.store.database import ENGINE_LOCK_TIMEOUT_S
from rara_testing.auto_executor import AutoExecutor, AutoJob
from rara_testing.job_events import accepted, failed, progress, running, succeeded
from rara_testing.processes import Processes
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor
from support import store_world
from support.executor_process import notes, start_executor
from support.running_scheduler import (
    KIND,
    LEASE_S,
    SWEEP_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)

WORK = "case.work"
SLACK_S = 3.0  # what a busy machine adds to a bound of the case


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def other(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    """A second scheduler over the same database."""
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path / "processes") as opened:
        yield opened


async def started(folder: Path, count: int = 1) -> None:
    async def look() -> bool:
        return len(notes(folder, "starts")) >= count

    await until(look, f"{count} starts")


async def lease_of(world: RunningScheduler, run_id: str) -> asyncpg.Record | None:
    return await world.raw.fetchrow("select * from rara.lease where workflow_run_id = $1::uuid", run_id)


async def attempts(world: RunningScheduler, run_id: str) -> list[tuple[int, str, bool]]:
    """Attempts that left their step open: number, reason, whether the budget was spent."""
    rows = await world.raw.fetch(
        (
            "select a.attempt, a.reason, a.spent from rara.step_attempt a join rara.step_run s using (step_run_id)"
            " where s.workflow_run_id = $1::uuid order by a.attempt"
        ),
        run_id,
    )
    return [(row["attempt"], row["reason"], row["spent"]) for row in rows]


async def stale_leases(world: RunningScheduler) -> int:
    count: int = await world.raw.fetchval(
        "select count(*) from rara.lease where expires_at < now() - make_interval(secs => $1)", 2 * SWEEP_S
    )
    return count


# ------------------------------------------------------------ STR-1, STR-2: dead executors


@pytest.mark.case("STR-1", "S02")
@pytest.mark.parametrize(
    "forget",
    ["delete from rara.executor", "with x as (delete from rara.executor) delete from rara.route"],
    ids=["its registry row", "its registry row and the route"],
)
async def test_a_dead_executor_of_whom_every_other_row_is_gone_strands_nothing(
    world: RunningScheduler, other: RunningScheduler, processes: Processes, tmp_path: Path, forget: str
) -> None:
    await world.define("one", {"a": {"kind": WORK}})
    run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 1})
    dead = await start_executor(processes, world.address, tmp_path)
    await started(tmp_path)
    await dead.kill_and_wait()
    killed_at = time.monotonic()
    await world.raw.execute(forget)

    async with AutoExecutor(other.address, {WORK: lambda job: {"attempt": job.lease.attempt}}):
        await world.until_run(run_id, "succeeded")
        # L from the last heartbeat, which was before the kill, then the sweep, the backoff and the hand-over.
        assert time.monotonic() - killed_at < LEASE_S + 2 * SWEEP_S + SLACK_S
    assert await attempts(world, run_id) == [(1, "LEASE_EXPIRED", True)]
    (row,) = await world.raw.fetch("select state, attempt, failures from rara.result")
    assert tuple(row) == ("succeeded", 2, 1)
    assert await stale_leases(world) == 0
    assert len(notes(tmp_path, "starts")) == 1  # the second attempt ran in this test


@pytest.mark.case("STR-2", "S02")
async def test_a_restart_under_the_same_name_keeps_no_lease_of_the_dead_process(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    await world.define("one", {"a": {"kind": WORK}})
    run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 1})
    first = await start_executor(processes, world.address, tmp_path)
    await started(tmp_path)
    await first.kill_and_wait()
    again = asyncio.create_task(start_executor(processes, world.address, tmp_path))
    await asyncio.sleep(0.1)  # what was sent before the kill has been taken in
    before = await lease_of(world, run_id)
    assert before is not None
    expiries = set()

    async def look() -> bool:
        lease = await lease_of(world, run_id)
        if lease is None or lease["attempt"] > 1:
            return True
        expiries.add(lease["expires_at"])
        return False

    await until(look, "end of the first lease")
    await again
    await world.until_run(run_id, "succeeded")
    assert expiries <= {before["expires_at"]}  # nothing that the new process sent has moved it
    row = await world.raw.fetchrow("select attempt, failures, granted_at, executor_id from rara.result")
    assert row is not None
    assert (row["attempt"], row["failures"]) == (2, 1)
    # The expiry is L after the last real heartbeat.
    late_s = (row["granted_at"] - before["expires_at"]).total_seconds()
    assert 0 <= late_s <= SWEEP_S + SLACK_S
    assert [note.attempt for note in notes(tmp_path, "starts")] == [1, 2]
    assert [note.attempt for note in notes(tmp_path, "effects")] == [2]
    names = await world.raw.fetch("select executor_name, executor_id from rara.executor")
    assert [row["executor_name"] for row in names] == ["exec-1", "exec-1"]
    assert row["executor_id"] != before["executor_id"]


@pytest.mark.case("STR-1")
async def test_a_scheduler_that_stops_with_its_executor_leaves_the_leases_to_the_other(
    database_url: str, other: RunningScheduler, tmp_path: Path
) -> None:
    """Who granted a lease plays no part in its recovery."""
    async with running_scheduler(database_url, tmp_path) as first:
        await first.define("one", {"a": {}})
        run_id = await first.start("one")
        async with first.executor() as executor:
            lease = (await executor.expect_job()).lease
            await executor.events(accepted(lease), running(lease))
            await executor.expect_ack(lease, 2)
            executor.cancel()
        await first.raw.execute("delete from rara.executor")
    async with AutoExecutor(other.address, {KIND: lambda job: job.lease.attempt}):
        await other.until_run(run_id, "succeeded")
    assert await attempts(other, run_id) == [(1, "LEASE_EXPIRED", True)]


# ------------------------------------------------------------ STR-3: one bad row

STEP_A = "select * from rara.result join rara.step_run s using (step_run_id, workflow_run_id) where step_name = 'a'"

TEN = 10
THIRD = 2  # counted from 0


class Tenth:
    """Counts handler starts by run, and answers."""

    def __init__(self) -> None:
        self.starts: list[str] = []

    def __call__(self, job: AutoJob) -> object:
        self.starts.append(job.request.workflow_run_id)
        return {}


BAD_ROWS = {
    "an input that is no JSON": (
        "update rara.workflow_run set input = '\\xff7b' where workflow_run_id = $1::uuid",
        "PAYLOAD_INVALID",
    ),
    "an input cut in the middle": (
        "update rara.workflow_run set input = '{\"n\": [1, 2' where workflow_run_id = $1::uuid",
        "PAYLOAD_INVALID",
    ),
    "an input far over the limit": (
        (
            "update rara.workflow_run set input = convert_to('{\"n\": \"' || repeat('x', 5000000) || '\"}', 'UTF8')"
            " where workflow_run_id = $1::uuid"
        ),
        "PAYLOAD_TOO_LARGE",
    ),
    "an input without what the template names": (
        "update rara.workflow_run set input = '{\"m\": 1}' where workflow_run_id = $1::uuid",
        "INPUT_INVALID",
    ),
    "no input": (
        "update rara.workflow_run set input = null where workflow_run_id = $1::uuid",
        "INPUT_INVALID",
    ),
    "a definition that is gone": (
        (
            "delete from rara.definition d using rara.workflow_run r"
            " where d.definition = r.definition and r.workflow_run_id = $1::uuid"
        ),
        "PAYLOAD_INVALID",
    ),
    "a definition that is damaged": (
        (
            "update rara.definition d set body = '\\xffffff' from rara.workflow_run r"
            " where d.definition = r.definition and r.workflow_run_id = $1::uuid"
        ),
        "PAYLOAD_INVALID",
    ),
    "a definition without the step": (
        "update rara.step_run set step_name = 'another' where workflow_run_id = $1::uuid",
        "PAYLOAD_INVALID",
    ),
}


async def damage(raw: "asyncpg.Connection[asyncpg.Record]", statement: str, *arguments: object) -> None:
    """Change rows that the database itself protects, as a restore of a part would."""
    await raw.execute("set session_replication_role = replica")
    await raw.execute(statement, *arguments)
    await raw.execute("reset session_replication_role")


async def define_each(world: RunningScheduler, **step: Any) -> None:
    """Ten definitions of one step each, so that each can be damaged alone; their steps share one route."""
    template = {"data": json.dumps({"n": {"$ref": "/run/input/n"}}).encode()}
    for number in range(TEN):
        await world.define(f"d{number}", {"a": {"input_template": template} | step})


@pytest.mark.case("STR-3")
@pytest.mark.parametrize("bad", BAD_ROWS)
async def test_a_step_that_cannot_be_built_touches_none_of_its_batch(
    database_url: str, tmp_path: Path, bad: str
) -> None:
    statement, code = BAD_ROWS[bad]
    async with running_scheduler(database_url, tmp_path) as earlier:
        await define_each(earlier)
        runs = [await earlier.start(f"d{number}", value={"n": number}) for number in range(TEN)]
        await damage(earlier.raw, statement, runs[THIRD])
    handler = Tenth()
    async with (
        running_scheduler(database_url, tmp_path) as world,  # one that has read no definition before
        AutoExecutor(world.address, {KIND: handler}, slots=TEN) as executor,
    ):
        states = [await world.until_run(run_id, "succeeded", "failed") for run_id in runs]
        assert states == ["succeeded"] * THIRD + ["failed"] + ["succeeded"] * (TEN - THIRD - 1)
        rows = {str(r["workflow_run_id"]): r for r in await world.raw.fetch("select * from rara.result")}
        assert len(rows) == TEN
        for run_id in (run for run in runs if run != runs[THIRD]):
            assert (rows[run_id]["state"], rows[run_id]["attempt"]) == ("succeeded", 1)
        third = rows[runs[THIRD]]
        assert (third["state"], third["reason"], third["attempt"]) == ("terminal_failed", code, 1)
        assert sorted(handler.starts) == sorted(run for run in runs if run != runs[THIRD])
        assert len({row["granted_at"] for row in rows.values()}) == 1  # one statement leased them all
        assert await world.raw.fetchval("select count(*) from rara.lease") == 0
        assert len(executor.requests) == TEN - 1
        # Whoever looks at it is told.
        request = workflow_pb2.GetRunRequest(workflow_run_id=runs[THIRD], include_steps=True)
        shown = await world.workflows.GetRun(request, timeout=WAIT_S)
        assert [(step.reason, step.attempt) for step in shown.steps] == [(code, 1)]
        assert shown.steps[0].error.code == code
        # And the scheduler goes on.
        await world.define("next", {"a": {}})
        await world.until_run(await world.start("next"), "succeeded")


@pytest.mark.case("STR-3")
@pytest.mark.parametrize("on_failure", ["ON_FAILURE_FAIL_FAST", "ON_FAILURE_CONTINUE"])
@pytest.mark.parametrize(
    "statement",
    [
        "delete from rara.definition where definition = 'd2'",
        "update rara.definition set body = '\\xffffff' where definition = 'd2'",
    ],
    ids=["gone", "damaged"],
)
async def test_reports_about_a_run_whose_definition_cannot_be_read_are_answered_and_their_batch_commits(
    database_url: str, statement: str, on_failure: str
) -> None:
    async with store_world.store_world(database_url) as earlier:
        for number in range(TEN):
            await earlier.define(f"d{number}", {"a": {}, "b": {"depends_on": ["a"]}}, on_failure=on_failure)
        runs = [await earlier.start(f"d{number}") for number in range(TEN)]
        grants = await earlier.lease()
    async with store_world.store_world(database_url) as world:
        await damage(world.raw, statement)
        begin = [store_world.accepted(1), store_world.running(2)]
        batch = [
            store_world.reports(g, *begin, store_world.succeeded(3), executor_id=g.executor_id)
            for g in grants
        ]
        result = await world.commits.commit(batch)
        (bad,) = [g for g in grants if g.workflow_run_id == runs[THIRD]]
        for grant in grants:
            state = "terminal_failed" if grant is bad else "succeeded"
            assert await world.state(grant.step_run_id) == state
        refused = result.decisions[bad.lease_token].refused
        assert [(r.sequence, r.code) for r in refused] == [(n, "PAYLOAD_INVALID") for n in (1, 2, 3)]
        assert await world.run_state(runs[THIRD]) == "failed"  # nothing of it could go on
        assert {state for state, _ in (await world.steps(runs[THIRD])).values()} == {
            "terminal_failed",
            "cancelled",
        }
        assert len(await world.lease()) == TEN - 1  # the other runs' next steps


@pytest.mark.case("STR-3")
async def test_sweeps_and_cancels_pass_over_a_definition_that_cannot_be_read(
    database_url: str, tmp_path: Path
) -> None:
    """Every loop that looks at the bad run does its work for the others, and the scheduler lives."""
    async with running_scheduler(database_url, tmp_path) as earlier:
        for name in ("bad", "good"):
            await earlier.define(name, {"a": {"attempt_timeout": {"seconds": 60}}, "b": {"kind": "not.here"}})
        runs = {name: await earlier.start(name) for name in ("bad", "good")}
        async with earlier.executor(credit=2) as executor:
            jobs: list[job_pb2.JobRequest] = []
            while len(jobs) < 2:
                jobs += (await executor.expect("jobs")).jobs
            for job in jobs:
                await executor.events(accepted(job.lease), running(job.lease))
                await executor.expect_ack(job.lease, 2)
            executor_id = executor.executor_id
    held = [
        {"lease": {"step_run_id": j.lease.step_run_id, "lease_token": j.lease.lease_token, "attempt": 1}}
        for j in jobs
    ]
    tokens = [job.lease.lease_token for job in jobs]
    async with running_scheduler(database_url, tmp_path) as world:
        await damage(world.raw, "delete from rara.definition where definition = 'bad'")
        async with (
            world.executor(executor_id=executor_id, credit=10, beat=False, held_jobs=held) as executor,
            beating(executor, lambda: tokens),
        ):
            await world.raw.execute("update rara.lease set attempt_deadline = now()")

            async def marked() -> bool:
                return bool(
                    await world.raw.fetchval("select bool_and(cancel_reason is not null) from rara.lease")
                )

            await until(marked, "both leases marked")
            tokens.clear()  # from here on nobody renews: both expire, and the bad one is leased again
            assert await world.until_run(runs["bad"], "failed") == "failed"
            await world.raw.execute("update rara.workflow_run set deadline = now() where ended_at is null")
            assert await world.until_run(runs["good"], "failed") == "failed"
            reasons = {str(r["workflow_run_id"]): r["reason"] for r in await world.raw.fetch(STEP_A)}
            assert reasons == {runs["bad"]: "PAYLOAD_INVALID", runs["good"]: "DEADLINE_EXCEEDED"}
            assert await world.raw.fetchval("select count(*) from rara.lease") == 0


# ------------------------------------------------------------ STR-4: pages of rows that must wait


async def hold(executor: ScriptedExecutor, count: int, *events: Any) -> list[job_pb2.Lease]:
    """Take that many jobs and report the events of each; their leases by step."""
    leases: list[job_pb2.Lease] = []
    while len(leases) < count:
        leases += [job.lease for job in (await executor.expect("jobs")).jobs]
    for lease in leases:
        if events:
            await executor.events(*(event(lease) for event in events))
    for lease in leases:
        if events:
            await executor.expect_ack(lease, len(events))
    return sorted(leases, key=lambda lease: lease.step_run_id)


@contextlib.asynccontextmanager
async def locked(database_url: str, query: str, *arguments: object) -> AsyncIterator[None]:
    """A session of somebody else that holds the rows that the query selects for update."""
    side = await asyncpg.connect(database_url)
    transaction = side.transaction()
    await transaction.start()
    try:
        assert await side.fetch(query, *arguments)
        yield
    finally:
        await transaction.rollback()
        await side.close(timeout=10)


LOCK_LEASES = "select from rara.lease where step_run_id = any($1::uuid[]) for update"
LOCK_RUNS = (
    "select from rara.workflow_run where workflow_run_id in"
    " (select workflow_run_id from rara.step_run where step_run_id = any($1::uuid[])) for update"
)


@pytest.mark.case("STR-4")
@pytest.mark.parametrize("lock", [LOCK_LEASES, LOCK_RUNS], ids=["leases", "runs"])
@pytest.mark.parametrize("events", [(), (accepted, running)], ids=["not accepted in time", "expired"])
async def test_an_expired_lease_behind_a_page_of_held_ones_is_taken_back(
    world: RunningScheduler,
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    lock: str,
    events: Sequence[Any],
) -> None:
    monkeypatch.setattr(sweeps, "_PAGE", 100)
    front = 150
    if lock == LOCK_LEASES:
        await world.define("wide", {f"s{n:03}": {} for n in range(front + 1)}, on_failure="CONTINUE")
        await world.start("wide")
    else:
        await world.define("one", {"a": {}})
        for _ in range(front + 1):
            await world.start("one")
    async with world.executor(credit=front + 1) as silent:  # it heartbeats, and lists no lease
        leases = await hold(silent, front + 1, *events)
        last = leases.pop()
        async with locked(database_url, lock, [lease.step_run_id for lease in leases]):
            locked_at = time.monotonic()
            async with AutoExecutor(world.address, {KIND: lambda _: {}}, slots=front + 1):
                row = await world.until_step(last.step_run_id, "succeeded")
                assert time.monotonic() - locked_at < LEASE_S + 2 * SWEEP_S + SLACK_S
                assert row["attempt"] == 2
                assert await world.raw.fetchval("select count(*) from rara.result") == 1
        released_at = time.monotonic()
        count = "select count(*) from rara.step_attempt where reason = $1"
        reason = "LEASE_EXPIRED" if events else "DISPATCH_LOST"

        async def recovered() -> bool:
            return bool(await world.raw.fetchval(count, reason) == front + 1)

        await until(recovered, f"recovery of all {front}")
        assert time.monotonic() - released_at < 2 * SWEEP_S + SLACK_S
        assert await stale_leases(world) == 0


PAGE = 4
FRONT = 10

# What falls due in a moment, of the steps $1; what holds the front; how many of $1 have been looked after.
SOON_S = 1.2
SOON = f"now() + interval '{SOON_S} s'"
CANCELLED = "select count(*) from rara.result where step_run_id = any($1::uuid[]) and state = 'cancelled'"
PROMOTED = "select count(*) from rara.ready where step_run_id = any($1::uuid[])"
STAGES = {
    "leases beyond their deadline": (
        f"update rara.lease set deadline = {SOON} where step_run_id = any($1::uuid[])",
        LOCK_LEASES,
        (
            "select count(*) from rara.lease where step_run_id = any($1::uuid[])"
            " and cancel_reason = 'DEADLINE_EXCEEDED'"
        ),
    ),
    "runs beyond their deadline": (
        (
            f"update rara.workflow_run r set deadline = {SOON} from rara.step_run s"
            " where r.workflow_run_id = s.workflow_run_id and s.step_run_id = any($1::uuid[])"
        ),
        LOCK_RUNS,
        CANCELLED,
    ),
    "ready steps beyond their deadline, rows held": (
        f"update rara.ready set deadline = {SOON} where step_run_id = any($1::uuid[])",
        "select from rara.ready where step_run_id = any($1::uuid[]) for update",
        CANCELLED,
    ),
    "ready steps beyond their deadline, runs held": (
        f"update rara.ready set deadline = {SOON} where step_run_id = any($1::uuid[])",
        LOCK_RUNS,
        CANCELLED,
    ),
    "waits that are over, rows held": (
        f"update rara.waiting set available_at = {SOON} where step_run_id = any($1::uuid[])",
        "select from rara.waiting where step_run_id = any($1::uuid[]) for update",
        PROMOTED,
    ),
    "waits that are over, runs held": (
        f"update rara.waiting set available_at = {SOON} where step_run_id = any($1::uuid[])",
        LOCK_RUNS,
        PROMOTED,
    ),
}


@pytest.mark.case("STR-4")
@pytest.mark.parametrize("stage", STAGES)
async def test_every_sweep_looks_behind_a_page_of_rows_that_somebody_holds(
    world: RunningScheduler, database_url: str, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    monkeypatch.setattr(sweeps, "_PAGE", PAGE)
    make_due, lock, looked_after = STAGES[stage]
    backoff = {"initial_backoff": {"seconds": 600}, "max_backoff": {"seconds": 600}}
    await world.define("one", {"a": {"retry": backoff}})
    for _ in range(FRONT + 1):
        await world.start("one")
    rows = await world.raw.fetch("select step_run_id::text from rara.step_run order by step_run_id")
    steps = [row["step_run_id"] for row in rows]
    async with contextlib.AsyncExitStack() as stack:
        if stage.startswith(("leases", "waits")):
            executor = await stack.enter_async_context(world.executor(credit=FRONT + 1, beat=False))
            tokens: list[int] = []
            await stack.enter_async_context(beating(executor, lambda: tokens))
            leases = await hold(executor, FRONT + 1, accepted, running)
            tokens += [lease.lease_token for lease in leases]
            if stage.startswith("waits"):
                await executor.events(*(failed(lease) for lease in leases))
                for lease in leases:
                    await executor.expect_ack(lease, 3)

        async def all_of(wanted: list[str]) -> bool:
            return bool(await world.raw.fetchval(looked_after, wanted) == len(wanted))

        assert await world.raw.execute(make_due, steps) == f"UPDATE {FRONT + 1}"
        async with locked(database_url, lock, steps[:-1]):
            await until(lambda: all_of(steps[-1:]), f"{stage}: the last", SOON_S + 3 * SWEEP_S + SLACK_S)
            assert await world.raw.fetchval(looked_after, steps[:-1]) == 0
        await until(lambda: all_of(steps), f"{stage}: the front", 2 * SWEEP_S + SLACK_S)


@pytest.mark.case("STR-4", "ROUTE-2")
async def test_steps_that_wait_for_a_busy_executor_hide_none_that_nobody_can_run(
    world: RunningScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond their schedule_timeout, all of them; only where no executor is capable is that an end."""
    monkeypatch.setattr(sweeps, "_PAGE", PAGE)
    for name, kind in (("busy", KIND), ("hopeless", "nobody.can")):
        await world.define(name, {"a": {"kind": kind, "schedule_timeout": {"nanos": 500_000_000}}})
    async with world.executor(credit=1) as executor:
        busy = [await world.start("busy") for _ in range(FRONT + 1)]
        await executor.expect_job()
        hopeless = await world.start("hopeless")
        assert await world.until_run(hopeless, "failed") == "failed"
        assert await world.steps(hopeless) == {"a": ("cancelled", "NO_CAPABLE_EXECUTOR")}
        overdue = await world.raw.fetchval("select count(*) from rara.ready where schedule_deadline < now()")
        assert overdue == FRONT
        states = [await world.run_state(run_id) for run_id in busy]
        assert set(states) <= {"pending", "running"}


@pytest.mark.case("STR-4", "STR-3")
async def test_reports_about_runs_that_somebody_holds_keep_no_others_waiting(
    database_url: str, tmp_path: Path
) -> None:
    """As many as fit into a batch are held up: what others report is stored all the same, theirs in order later."""
    async with running_scheduler(database_url, tmp_path, commit_batch=PAGE) as world:
        await world.define("one", {"a": {}})
        for _ in range(FRONT + 2):
            await world.start("one")
        async with world.executor(credit=FRONT + 2, beat=False) as executor:
            tokens: list[int] = []
            async with beating(executor, lambda: tokens):
                leases = await hold(executor, FRONT + 2, accepted, running)
                tokens += [lease.lease_token for lease in leases]
                *front, first, second = leases
                async with locked(database_url, LOCK_RUNS, [lease.step_run_id for lease in front]):
                    for lease in front:
                        await executor.events(progress(lease, 3), progress(lease, 4))
                    await executor.events(succeeded(first))
                    await executor.expect_ack(first, 3, timeout_s=3 * ENGINE_LOCK_TIMEOUT_S + SLACK_S)
                    sent_at = time.monotonic()
                    await executor.events(succeeded(second))
                    await executor.expect_ack(second, 3)
                    assert (
                        time.monotonic() - sent_at < 2 * ENGINE_LOCK_TIMEOUT_S
                    )  # not behind the lock any more
                    for lease in front:
                        await executor.events(succeeded(lease, 5))
                for lease in front:
                    await executor.expect_ack(lease, 5)
                stored = await world.raw.fetch("select last_sequence, gaps, state from rara.result")
                assert [tuple(row) for row in stored if row["last_sequence"] == 5] == [
                    (5, 0, "succeeded")
                ] * FRONT
                assert len(stored) == FRONT + 2
