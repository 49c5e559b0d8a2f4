"""An executor process that is frozen for longer than its lease finds out, and changes nothing of the next attempt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rara_testing.processes import Processes
from support.executor_process import notes, start_executor
from support.running_scheduler import LEASE_S, RunningScheduler, running_scheduler, until

WORK = "case.work"


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest.mark.case("OWN-2", "S02")
@pytest.mark.parametrize("finishes", [False, True], ids=["still at work", "finished while frozen"])
async def test_a_frozen_executor_that_wakes_up_after_its_lease_changes_nothing(
    world: RunningScheduler, tmp_path: Path, finishes: bool
) -> None:
    """finishes: the handler, which is not frozen, ends with a result that its supervisor reports after waking up."""
    async with Processes(tmp_path / "processes") as processes:
        frozen = await start_executor(processes, world.address, tmp_path)
        await world.define("one", {"a": {"kind": WORK}})
        run_id = await world.start("one", value={"folder": str(tmp_path), "hold": 2})

        async def holder() -> str | None:
            found = await world.raw.fetchrow(
                "select step_run_id::text, attempt from rara.lease where last_sequence >= 3"
            )
            return f"{found['step_run_id']} {found['attempt']}" if found else None

        step_run_id, _, attempt = (await until(holder, "the first attempt")).partition(" ")
        assert attempt == "1"
        frozen.freeze()
        if finishes:
            (tmp_path / "gate-1").touch()
        await start_executor(processes, world.address, tmp_path, name="exec-2")

        async def second() -> bool:
            return await holder() == f"{step_run_id} 2"

        await until(second, "attempt 2")
        await asyncio.sleep(LEASE_S / 2)  # 2 L in all: a time that is part of the case, nothing is waited for
        second_lease = await world.raw.fetchrow(
            "select lease_token, last_sequence, executor_id from rara.lease"
        )
        frozen.thaw()

        async def told() -> bool:
            return "job.lost" in frozen.stderr.read_text()

        await until(told, "the word that the lease is lost")
        step = await world.step(step_run_id)
        assert (step["state"], step["attempt"], step["failures"]) == ("running", 2, 1)
        assert (
            await world.raw.fetchrow("select lease_token, last_sequence, executor_id from rara.lease")
            == second_lease
        )
        assert await world.raw.fetchval("select count(*) from rara.result") == 0
        (tmp_path / "gate-2").touch()
        await world.until_run(run_id, "succeeded")

    assert second_lease is not None
    (row,) = await world.raw.fetch(
        "select attempt, failures, lease_token, executor_id, output from rara.result"
    )
    assert (row["attempt"], row["failures"]) == (2, 1)
    assert (row["lease_token"], row["executor_id"]) == (
        second_lease["lease_token"],
        second_lease["executor_id"],
    )
    assert row["output"] == b'{"attempt":2,"token":%d}' % row["lease_token"]
    assert [note.attempt for note in notes(tmp_path, "starts")] == [1, 2]
    effects = notes(tmp_path, "effects")
    assert len({note.key for note in effects}) == 1
    # A handler that had ended before it was fenced had its effect: under the same key, and an older token.
    assert [note.attempt for note in effects] == ([1, 2] if finishes else [2])
    assert max(note.lease_token for note in effects) == row["lease_token"]
    history = "select attempt, max(sequence) as n from rara.step_event group by attempt order by attempt"
    assert [tuple(r) for r in await world.raw.fetch(history)] == [(1, 3), (2, 4)]
    closed = "select attempt, reason, spent from rara.step_attempt"
    assert [tuple(r) for r in await world.raw.fetch(closed)] == [(1, "LEASE_EXPIRED", True)]
