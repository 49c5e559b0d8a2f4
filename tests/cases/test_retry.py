"""Attempts and failures are counted right, whatever ends an attempt, and an error that cannot heal is final."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_testing.job_events import accepted, failed
from rara_testing.job_events import running as runs
from rara_testing.processes import Processes
from support import faulty
from support.running_executor import running
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor

MODULE = "support.faulty"
THREE = workflow_pb2.RetryPolicy(max_attempts=3)
FIVE = workflow_pb2.RetryPolicy(max_attempts=5)


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


def beside(kind: str, harmless: str = "faulty.harmless") -> dict[str, dict[str, Any]]:
    """A step of the kind, and ten harmless ones."""
    return {"bad": {"kind": kind, "retry": THREE}} | {
        f"good{number}": {"kind": harmless, "retry": THREE} for number in range(10)
    }


async def bad_one_is_exhausted(world: RunningScheduler, run_id: str, folder: Path, cause: str) -> None:
    async def ended() -> str:
        state = await world.run_state(run_id)
        return state if state in ("failed", "succeeded", "cancelled") else ""

    # Where the executor dies too, this takes three starts of one and three leases.
    assert await until(ended, "end of the run", 60) == "failed"
    steps = await world.steps(run_id)
    assert steps.pop("bad") == ("terminal_failed", "ATTEMPTS_EXHAUSTED")
    assert set(steps.values()) == {("succeeded", "")}
    row = await world.raw.fetchrow("select * from rara.step_state where step_name = 'bad'")
    assert row is not None
    assert (row["attempt"], row["failures"]) == (3, 3)
    assert json.loads(row["error"])["code"] == cause
    attempts = await world.raw.fetch(
        "select reason, spent from rara.step_attempt where step_run_id = $1 order by attempt",
        row["step_run_id"],
    )
    assert [tuple(attempt) for attempt in attempts] == [(cause, True)] * 2
    assert [int(note[0]) for note in faulty.notes(folder, "bad", "starts")] == [1, 2, 3]


@pytest.mark.case("RETRY-1")
@pytest.mark.parametrize("harmless", ["faulty.harmless", "faulty.harmless_blocking"])
async def test_a_handler_that_kills_its_process_spends_its_budget_and_ends(
    world: RunningScheduler, tmp_path: Path, harmless: str
) -> None:
    async with running(world.address, tmp_path, modules=MODULE):
        await world.define("deadly", beside("faulty.die", harmless), on_failure="CONTINUE")
        run_id = await world.start("deadly", value={"folder": str(tmp_path)})
        await bad_one_is_exhausted(world, run_id, tmp_path, "RUNNER_CRASHED")


@pytest.mark.case("RETRY-1")
@pytest.mark.parametrize(("abort", "cause"), [(False, "OUT_OF_MEMORY"), (True, "RUNNER_CRASHED")])
async def test_a_handler_over_its_memory_spends_its_budget_and_ends(
    world: RunningScheduler, tmp_path: Path, abort: bool, cause: str
) -> None:
    async with running(world.address, tmp_path, modules=MODULE, memory_bytes=4 << 30):
        await world.define("hungry", beside("faulty.hog"), on_failure="CONTINUE")
        run_id = await world.start("hungry", value={"folder": str(tmp_path), "abort": abort})
        await bad_one_is_exhausted(world, run_id, tmp_path, cause)


@pytest.mark.case("RETRY-1")
async def test_a_handler_that_kills_the_whole_executor_spends_its_budget_and_ends(
    world: RunningScheduler, tmp_path: Path
) -> None:
    steps = beside("faulty.die")
    for name, step in steps.items():  # what shares an executor with it dies with it
        step["required_labels"] = {"on": "bad" if name == "bad" else "good"}
    async with Processes(tmp_path) as processes:

        async def keep_one_up() -> None:
            for number in range(10):
                executor = await spawn_executor(
                    processes,
                    world.address,
                    tmp_path,
                    module=MODULE,
                    name=f"e{number}",
                    labels="on=bad",
                    prestart=1,
                )
                await executor.wait(60)

        supervisor = asyncio.create_task(keep_one_up())
        async with running(world.address, tmp_path, modules=MODULE, labels="on=good"):
            await world.define("deadly", steps, on_failure="CONTINUE")
            run_id = await world.start("deadly", value={"folder": str(tmp_path), "executor": True})
            await bad_one_is_exhausted(world, run_id, tmp_path, "LEASE_EXPIRED")
        supervisor.cancel()
        await asyncio.gather(supervisor, return_exceptions=True)


@pytest.mark.case("RETRY-3")
async def test_a_final_error_ends_the_step_at_its_first_attempt(
    world: RunningScheduler, tmp_path: Path
) -> None:
    kinds = ("auth", "auth_blocking", "unset", "own_code")
    async with running(world.address, tmp_path, modules=MODULE):
        steps = {kind: {"kind": f"faulty.{kind}", "retry": FIVE} for kind in kinds}
        await world.define("final", steps, on_failure="CONTINUE")
        run_id = await world.start("final", value={"folder": str(tmp_path)})
        assert await world.until_run(run_id, "failed", "succeeded") == "failed"
    assert await world.steps(run_id) == {
        "auth": ("terminal_failed", "AUTH_INVALID"),
        "auth_blocking": ("terminal_failed", "AUTH_INVALID"),
        # Documented: what does not say so can heal.
        "unset": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
        "own_code": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
    }
    rows = await world.raw.fetch("select step_name, attempt, failures, error from rara.step_state")
    found = {
        row["step_name"]: (row["attempt"], row["failures"], json.loads(row["error"])["code"]) for row in rows
    }
    assert found == {
        "auth": (1, 1, "AUTH_INVALID"),
        "auth_blocking": (1, 1, "AUTH_INVALID"),
        "unset": (5, 5, "HANDLER_FAILED"),
        "own_code": (5, 5, "TOOL_ODD"),
    }
    starts = {kind: len(faulty.notes(tmp_path, kind, "starts")) for kind in kinds}
    assert starts == {"auth": 1, "auth_blocking": 1, "unset": 5, "own_code": 5}


@pytest.mark.case("RETRY-3")
@pytest.mark.parametrize(
    ("flag", "state"),
    [(False, "terminal_failed"), (None, "retryable_failed"), (True, "retryable_failed")],
)
async def test_an_executor_that_does_not_know_the_flag_means_that_it_can_heal(
    world: RunningScheduler, flag: bool | None, state: str
) -> None:
    long = workflow_pb2.RetryPolicy(max_attempts=5)
    long.initial_backoff.FromSeconds(60)
    long.max_backoff.FromSeconds(60)
    await world.define("one", {"a": {"retry": long}})
    await world.start("one")
    async with world.executor() as executor:
        lease = (await executor.expect_job()).lease
        await executor.events(
            accepted(lease), runs(lease), failed(lease, code="AUTH_INVALID", retryable=flag)
        )
        row = await world.until_step(lease.step_run_id, "terminal_failed", "retryable_failed")
    assert (row["state"], row["reason"], row["attempt"], row["failures"]) == (state, "AUTH_INVALID", 1, 1)
