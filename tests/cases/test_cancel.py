"""A cancel is kept, arrives, and ends within its bound, whatever the step is doing and whoever cannot hear."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_testing.processes import Processes
from support import faulty, stubborn
from support.database_paths import proxied
from support.running_executor import running
from support.running_scheduler import (
    GRACE_S,
    HEARTBEAT_S,
    LEASE_S,
    SWEEP_S,
    RunningScheduler,
    running_scheduler,
    until,
)
from support.spawned_executor import spawn_executor

SLACK_S = 1.0  # what a busy machine adds to a bound


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def until_noted(folder: Path, step: str, name: str, count: int = 1) -> None:
    async def look() -> bool:
        return len(faulty.notes(folder, step, name)) >= count

    await until(look, f"{count} {name} of {step}")


@pytest.mark.case("CANCEL-1")
async def test_a_step_that_waits_is_cancelled_at_once_and_never_starts_again(
    world: RunningScheduler, tmp_path: Path
) -> None:
    async with running(world.address, tmp_path, modules="support.faulty"):
        await world.define(
            "waits",
            {
                "backs-off": {"kind": "faulty.fail_twice"},
                "nobody": {"kind": "nobody.does"},
                "behind": {"depends_on": ["backs-off"]},
            },
        )
        run_id = await world.start("waits", value={"folder": str(tmp_path)})
        await until_noted(tmp_path, "backs-off", "starts", 2)

        async def backs_off() -> bool:
            row = await world.raw.fetchrow(
                "select state, attempt, available_at > now() + interval '50 s' as is_far from rara.step_state"
                " where step_name = 'backs-off'"
            )
            return row is not None and tuple(row) == ("retryable_failed", 2, True)

        await until(backs_off, "a long backoff")
        asked_at = time.monotonic()
        await world.cancel(run_id)
        await world.until_run(run_id, "cancelled")
        assert time.monotonic() - asked_at < 1.0
        assert set((await world.steps(run_id)).values()) == {("cancelled", "CANCELLED")}
        await asyncio.sleep(3 * SWEEP_S)  # nothing comes of it any more
        rows = await world.raw.fetch("select step_name, attempt from rara.step_state")
        assert {row["step_name"]: row["attempt"] for row in rows} == {
            "backs-off": 2,
            "nobody": 0,
            "behind": 0,
        }
        assert len(faulty.notes(tmp_path, "backs-off", "starts")) == 2
        assert await world.raw.fetchval("select count(*) from rara.waiting") == 0


@pytest.mark.case("CANCEL-1")
async def test_a_cancel_among_many_backoffs_that_end_lets_no_attempt_begin(
    world: RunningScheduler, tmp_path: Path
) -> None:
    """The neighbour: the backoff ends at the moment of the cancel."""
    many = workflow_pb2.RetryPolicy(max_attempts=100)
    many.initial_backoff.FromMilliseconds(20)
    many.max_backoff.FromMilliseconds(40)
    await world.define(
        "flaps", {f"s{number}": {"kind": "faulty.fail", "retry": many} for number in range(20)}
    )
    async with running(world.address, tmp_path, modules="support.faulty", slots=20):
        for _ in range(3):
            run_id = await world.start("flaps", value={"folder": str(tmp_path)})

            async def second_attempts(run_id: str = run_id) -> bool:
                return bool(
                    await world.raw.fetchval(
                        "select count(*) > 10 from rara.step_state where workflow_run_id = $1::uuid"
                        " and attempt >= 2",
                        run_id,
                    )
                )

            await until(second_attempts, "second attempts")
            await world.cancel(run_id)
            # A grant may pass the request on its way: leasing looks at no run. Once it is answered none may.
            answered_at = await world.raw.fetchval("select clock_timestamp()")
            await world.until_run(run_id, "cancelled")
            late = await world.raw.fetchval(
                "select count(*) from rara.step_state where workflow_run_id = $1::uuid and granted_at > $2",
                run_id,
                answered_at,
            )
            assert late == 0
            assert {state for state, _ in (await world.steps(run_id)).values()} == {"cancelled"}


@pytest.mark.case("CANCEL-2")
async def test_a_cancel_arrives_with_a_heartbeat_while_the_listener_cannot_come_back(
    database_url: str, tmp_path: Path
) -> None:
    """No sweep and no poll of the executor's scheduler can bring it, and its hints are cut off."""
    async with (
        proxied(database_url) as (proxy, through_proxy),
        running_scheduler(database_url, tmp_path / "a") as a,
        running_scheduler(through_proxy, tmp_path / "b", sweep_s=30.0, poll_s=30.0) as b,
        running(b.address, tmp_path, modules="support.stubborn"),
    ):
        await a.define("one", {"works": {"kind": "stubborn.async"}})
        run_id = await a.start("one", value={"folder": str(tmp_path)})

        async def started() -> bool:
            return (
                bool(stubborn.starts(tmp_path, "works")) and (await a.steps(run_id))["works"][0] == "running"
            )

        await until(started, "start")
        proxy.refuse()
        # All listeners go; only that of `a` can return.
        await a.raw.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'rara-scheduler notify' and datname = current_database()"
        )
        asked_at = time.monotonic()
        await a.cancel(run_id)
        await a.until_run(run_id, "cancelled")
        took_s = time.monotonic() - asked_at
        assert took_s < 2 * HEARTBEAT_S + GRACE_S + SLACK_S
        row = await a.raw.fetchrow(
            "select state, reason, attempt, cancel_delivered_at, cancel_confirmed_at from rara.step_state"
        )
        assert row is not None
        assert tuple(row)[:3] == ("cancelled", "CANCELLED", 1)
        assert row["cancel_delivered_at"] is not None
        assert row["cancel_confirmed_at"] is not None
        assert len(stubborn.starts(tmp_path, "works")) == 1
        proxy.resume()


@pytest.mark.case("CANCEL-3", "OWN-2")
async def test_handlers_that_never_confirm_end_within_grace_and_lease(
    world: RunningScheduler, tmp_path: Path
) -> None:
    steps = {
        "swallows": {"kind": "faulty.ticks", "required_labels": {"on": "awake"}},
        "blocks": {"kind": "faulty.blocks", "required_labels": {"on": "awake"}},
        "frozen": {"kind": "faulty.ticks", "required_labels": {"on": "frozen"}},
    }
    async with Processes(tmp_path) as processes:
        awake, frozen = await asyncio.gather(
            *(
                spawn_executor(
                    processes, world.address, tmp_path, module="support.faulty", name=name, slots=2,
                    labels=f"on={name}",
                )
                for name in ("awake", "frozen")
            )
        )  # fmt: skip
        await world.define("stuck", steps)
        run_id = await world.start("stuck", value={"folder": str(tmp_path)})
        for step in steps:
            await until_noted(tmp_path, step, "starts")

        async def all_run() -> bool:
            return {state for state, _ in (await world.steps(run_id)).values()} == {"running"}

        await until(all_run, "running steps")
        frozen.freeze()
        asked_at = time.monotonic()
        await world.cancel(run_id)
        await world.until_run(run_id, "cancelled")
        assert time.monotonic() - asked_at < GRACE_S + LEASE_S + 2 * SWEEP_S + SLACK_S
        assert set((await world.steps(run_id)).values()) == {("cancelled", "CANCELLED")}
        ticks = [float(note[3]) for note in faulty.notes(tmp_path, "swallows", "ticks")]
        assert max(ticks) < asked_at + GRACE_S + 0.5
        # The warden has ended what its frozen supervisor could not, when the lease was over.
        ticks = [float(note[3]) for note in faulty.notes(tmp_path, "frozen", "ticks")]
        assert max(ticks) < asked_at + LEASE_S + 0.5
        confirmed = await world.raw.fetch("select step_name, cancel_confirmed_at from rara.step_state")
        assert {row["step_name"] for row in confirmed if row["cancel_confirmed_at"]} == {"swallows", "blocks"}

        frozen.thaw()
        # Slots are free again on both, so that what comes next fills them.
        await world.define(
            "next",
            {
                f"{on}{number}": {"kind": "faulty.harmless", "required_labels": {"on": on}}
                for on in ("awake", "frozen")
                for number in range(2)
            },
        )
        after = await world.start("next", value={"folder": str(tmp_path)})
        await world.until_run(after, "succeeded")
        assert set((await world.steps(run_id)).values()) == {("cancelled", "CANCELLED")}
        starts = {step: len(faulty.notes(tmp_path, step, "starts")) for step in steps}
        assert starts == {"swallows": 1, "blocks": 1, "frozen": 1}
        assert awake.returncode is frozen.returncode is None
