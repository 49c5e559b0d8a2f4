"""No step stays leased with nobody at work on it: dead executors, and rows that spoil their batch."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import job_pb2, workflow_pb2
from rara_testing.auto_executor import AutoExecutor, AutoJob
from rara_testing.job_events import accepted, running
from rara_testing.processes import Processes
from rara_testing.scripted_executor import WAIT_S
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
