"""Whose clock counts, deadlines that pass while nothing runs, and ends that are told apart by their cause."""

import ast
import asyncio
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from rara_client import Client
from rara_client.definitions import definition_from
from rara_testing.job_events import accepted, failed, running
from rara_testing.processes import Processes
from support.executor_process import notes, start_executor
from support.running_scheduler import SWEEP_S, RunningScheduler, running_scheduler, until
from support.scheduler_process import start_scheduler
from support.skewed_clock import skewed
from support.spawned_executor import spawn_executor

ROOT = Path(__file__).resolve().parents[2]
LEASE_S = 1.5
BACKOFF_S = 1.5

# ---------------------------------------------------------------- whose clock counts


@pytest.mark.case("TIME-1")
@pytest.mark.needs("faketime")
async def test_wrong_clocks_of_schedulers_and_executors_change_nothing(
    database_url: str, tmp_path: Path
) -> None:
    settings = {
        "lease_s": LEASE_S,
        "silence_s": 1.3,
        "heartbeat_s": 0.5,
        "retry_initial_backoff_s": BACKOFF_S,
        "retry_max_backoff_s": BACKOFF_S,
    }
    raw = await asyncpg.connect(database_url)
    async with Processes(tmp_path) as processes:
        (_, ahead), (_, behind) = await asyncio.gather(
            start_scheduler(processes, database_url, tmp_path, name="a", env=skewed(600), **settings),
            start_scheduler(processes, database_url, tmp_path, name="b", env=skewed(-600), **settings),
        )
        module = "support.timed_handlers"
        # Each executor's clock is wrong the other way round.
        await asyncio.gather(
            spawn_executor(
                processes, ahead, tmp_path, module=module, name="x", slots=4, prestart=1, env=skewed(-600)
            ),
            spawn_executor(
                processes, behind, tmp_path, module=module, name="y", slots=4, prestart=1, env=skewed(600)
            ),
        )
        async with Client.connect(behind) as client:
            step = {"kind": "timed.sleep", "timeout": "30s", "retry": {"max_attempts": 3}}
            await client.register_definition(
                definition_from(
                    {
                        "definition": "clocks",
                        "run_timeout": "40s",
                        "steps": [
                            *(
                                {"step_name": f"long{n}", "input_template": {"seconds": 3 * LEASE_S}} | step
                                for n in range(4)
                            ),
                            *(
                                {"step_name": f"twice{n}", "input_template": {"seconds": 0, "succeed_at": 2}}
                                | step
                                for n in range(4)
                            ),
                        ],
                    }
                )
            )
            run_id = (await client.start_run("clocks", {})).run.workflow_run_id
            await client.wait_run(run_id, 20)
    rows = await raw.fetch(
        "select s.step_name, x.state, x.attempt, x.failures, x.output, a.ended_at as failed_at, x.granted_at,"
        " abs(extract(epoch from now() - x.ended_at)) as age_s"
        " from rara.result x join rara.step_run s using (step_run_id)"
        " left join rara.step_attempt a on a.step_run_id = s.step_run_id"
    )
    await raw.close()
    assert len(rows) == 8
    walls = []
    for row in rows:
        again = row["step_name"].startswith("twice")
        assert (row["state"], row["attempt"], row["failures"]) == ("succeeded", 1 + again, int(again))
        assert row["age_s"] < 60
        wall_s = float(row["output"].decode().partition('"wall":')[2].partition(",")[0].strip(" }"))
        walls.append(wall_s - time.time())
        if again:
            wait_s = (row["granted_at"] - row["failed_at"]).total_seconds()
            assert 0 <= wait_s <= BACKOFF_S + 1.0
    assert min(walls) < -500 or max(walls) > 500  # the clocks were wrong indeed
    left = [
        float(r["output"].decode().partition('"time_left_s":')[2].partition(",")[0].strip(" }")) for r in rows
    ]
    assert all(20 < one <= 30 for one in left), left


@pytest.mark.case("TIME-1")
@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        # What a span shows, and the age of bytes in the blob store, by the store's own clock.
        ("services/scheduler/rara_scheduler", {"span_clock.py", "collector.py"}),
        (
            "services/executor/rara_executor",
            # What people read, the age of files of this machine, and a file for health checks of this machine.
            {"wire.py", "blob_cache.py", "ready.py"},
        ),
    ],
)
def test_no_decision_reads_the_wall_clock(package: str, allowed: set[str]) -> None:
    found = {
        path.name
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and f"{ast.unparse(node.value).rpartition('.')[2]}.{node.attr}"
        in {
            "time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
            "time.gmtime", "time.localtime", "time.strftime",
        }
    }  # fmt: skip
    assert found <= allowed


# ---------------------------------------------------------------- deadlines that pass while nothing runs

STEPS: dict[str, dict[str, Any]] = {
    "nobody": {"kind": "nobody.can"},
    "again": {
        "retry": {"max_attempts": 5, "initial_backoff": {"seconds": 3000}, "max_backoff": {"seconds": 3000}}
    },
    "behind": {"depends_on": ["again"]},
}


async def wait_out(world: RunningScheduler, name: str, *, reasons: set[str]) -> str:
    """Start a run, let its one step that can run fail into a long backoff, and wait until the run closes."""
    run_id = await world.start(name)
    created_at = await world.raw.fetchval(
        "select created_at from rara.workflow_run where workflow_run_id = $1::uuid", run_id
    )
    async with world.executor() as executor:
        lease = (await executor.expect_job()).lease
        await executor.events(accepted(lease), running(lease), failed(lease, 3))
        await executor.expect_ack(lease, 3)
        assert await world.until_run(run_id, "failed", "cancelled", "succeeded") == "failed"
        assert len(executor.all("jobs")) == 1
    rows = await world.raw.fetch(
        "select s.step_name, x.state, x.reason, x.attempt, x.failures, x.ended_at from rara.result x"
        " join rara.step_run s using (step_run_id) where x.workflow_run_id = $1::uuid",
        run_id,
    )
    ended = {row["step_name"]: (row["state"], row["reason"], row["attempt"], row["failures"]) for row in rows}
    assert ended["nobody"] == ("cancelled", "DEADLINE_EXCEEDED", 0, 0)
    assert ended["again"] == ("cancelled", "DEADLINE_EXCEEDED", 1, 1)
    assert ended["behind"][0] == "cancelled"
    assert ended["behind"][1] in reasons
    for row in rows:
        took_s = (row["ended_at"] - created_at).total_seconds()
        assert 1.0 <= took_s < 1.0 + SWEEP_S + 0.5
    return run_id


@pytest.mark.case("TIME-2")
async def test_a_steps_deadline_closes_it_where_it_waits(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        timeout: dict[str, Any] = {"timeout": {"seconds": 1}}
        steps = {name: fields | (timeout if name != "behind" else {}) for name, fields in STEPS.items()}
        await world.define("steps", steps, on_failure="CONTINUE")
        await wait_out(world, "steps", reasons={"UPSTREAM_FAILED"})


@pytest.mark.case("TIME-2")
async def test_a_runs_deadline_closes_all_that_waits(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("run", STEPS, run_timeout={"seconds": 1})
        await wait_out(world, "run", reasons={"DEADLINE_EXCEEDED", "UPSTREAM_FAILED"})


@pytest.mark.case("TIME-2")
async def test_a_deadline_that_passes_while_no_scheduler_runs_is_kept_by_the_next(
    database_url: str, tmp_path: Path
) -> None:
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("step", {"nobody": {"kind": "nobody.can", "timeout": {"seconds": 1}}})
        await world.define("run", {"nobody": {"kind": "nobody.can"}}, run_timeout={"seconds": 1})
        runs = [await world.start("step"), await world.start("run")]
    raw = await asyncpg.connect(database_url)
    await until(
        lambda: raw.fetchval("select min(created_at) + interval '1.1 s' < now() from rara.workflow_run"),
        "deadline",
    )
    assert await raw.fetchval("select count(*) from rara.result") == 0
    await raw.close()
    # Settling is for reclaiming: it holds no deadline back.
    async with running_scheduler(database_url, tmp_path, settle_s=60) as world:
        for run_id in runs:
            await world.until_run(run_id, "failed")
            assert await world.steps(run_id) == {"nobody": ("cancelled", "DEADLINE_EXCEEDED")}
        late_s = await world.raw.fetchval(
            "select extract(epoch from now() - min(ended_at)) from rara.workflow_run"
        )
        assert late_s < 2 * SWEEP_S + 0.5


# ---------------------------------------------------------------- ends told apart by their cause


@pytest.mark.case("TIME-3")
async def test_deadline_cancel_and_shutdown_are_recorded_as_what_they_were(
    database_url: str, tmp_path: Path
) -> None:
    async with running_scheduler(database_url, tmp_path) as world, Processes(tmp_path) as processes:
        work = {"kind": "case.work"}
        await world.define("late", {"a": work | {"retry": {"max_attempts": 1}, "timeout": {"seconds": 2}}})
        await world.define("unwanted", {"a": work | {"retry": {"max_attempts": 1}}})
        await world.define("moved", {"a": work | {"retry": {"max_attempts": 3}}})
        given = {"folder": str(tmp_path), "hold": 1}
        leaving = await start_executor(processes, world.address, tmp_path, name="leaves", slots=1, stop_s=1.0)
        moved = await world.start("moved", value=given)
        await until(lambda: has_started(tmp_path, 1), "the one that will move started")
        await start_executor(processes, world.address, tmp_path, name="stays", slots=2)
        late, unwanted = await world.start("late", value=given), await world.start("unwanted", value=given)
        await until(lambda: has_started(tmp_path, 3), "all three started")

        await world.cancel(unwanted)
        leaving.terminate()
        assert await world.until_run(unwanted, "cancelled", "failed") == "cancelled"
        assert await world.until_run(late, "cancelled", "failed") == "failed"
        assert await world.until_run(moved, "succeeded", "failed") == "succeeded"
        assert await leaving.wait() == 0

        assert await world.steps(late) == {"a": ("terminal_failed", "DEADLINE_EXCEEDED")}
        assert await world.steps(unwanted) == {"a": ("cancelled", "CANCELLED")}
        assert await world.steps(moved) == {"a": ("succeeded", "")}
        row = await world.raw.fetchrow(
            "select x.attempt, x.failures, a.reason, a.spent, a.attempt as earlier from rara.result x"
            " join rara.step_attempt a using (step_run_id) where x.workflow_run_id = $1::uuid",
            moved,
        )
        assert row is not None
        assert tuple(row) == (2, 0, "EXECUTOR_SHUTDOWN", False, 1)
        kept = await world.raw.fetch(
            "select attempt, failures from rara.result where workflow_run_id <> $1::uuid", moved
        )
        assert {row["attempt"] for row in kept} == {1}
        assert len(notes(tmp_path, "starts")) == 4
        assert len(notes(tmp_path, "effects")) == 1


async def has_started(folder: Path, count: int) -> bool:
    return len(notes(folder, "starts")) == count


@pytest.mark.case("TIME-3")
async def test_a_cancel_a_deadline_and_a_goodbye_at_one_moment_give_one_cause(
    database_url: str, tmp_path: Path
) -> None:
    """A cancel that is stored first stays the cause, whatever ends the attempt; a deadline does as well."""
    async with running_scheduler(database_url, tmp_path) as world:
        await world.define("one", {"a": {"retry": {"max_attempts": 3}}})
        await world.define("late", {"a": {"retry": {"max_attempts": 3}, "timeout": {"seconds": 1}}})
        wanted, late = await world.start("one"), await world.start("late")
        async with world.executor(credit=2) as executor:
            taken = 0
            while taken < 2:
                for job in (await executor.expect("jobs")).jobs:
                    taken += 1
                    await executor.events(accepted(job.lease), running(job.lease))
            await world.cancel(wanted)
            reasons: set[str] = set()
            while len(reasons) < 2:
                reasons |= {one.reason for one in (await executor.expect("cancels")).jobs}
            assert reasons == {"CANCELLED", "DEADLINE_EXCEEDED"}
            await executor.goodbye()
        assert await world.until_run(wanted, "cancelled", "failed", "succeeded") == "cancelled"
        assert await world.until_run(late, "cancelled", "failed", "succeeded") == "failed"
        assert await world.steps(wanted) == {"a": ("cancelled", "CANCELLED")}
        assert await world.steps(late) == {"a": ("terminal_failed", "DEADLINE_EXCEEDED")}
