"""S07: executor, scheduler and PostgreSQL are killed with work in flight, singly and together; nothing is lost.

Real processes and SIGKILL. What was killed is started again at once, as a supervisor does.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import pytest
from rara_chaos.shapes import BY_NAME
from rara_chaos.stack import LEASE_S, SWEEP_S, Stack
from rara_chaos.verdict import Attempt, read_attempts
from rara_client import Client
from rara_testing.database_faults import kill_server
from support.stack_runs import StackRuns, until_connected, until_quiet, until_running

E, S, P = "executor", "scheduler", "postgres"
SUBSETS = ({E}, {S}, {P}, {E, S}, {E, P}, {S, P}, {E, S, P})
# Three rounds, all subsets: each part alone, each two of them, all together.
ROUNDS = (SUBSETS[:3], SUBSETS[3:6], SUBSETS[6:])
MARGIN_S = 1.0
RUNS = ("chaos-single",) * 4


async def kill_and_restart(stack: Stack, parts: set[str]) -> tuple[float, float]:
    """SIGKILL the parts at once and start them again; when that was, and how long until all were connected."""
    services = [*(stack.executors if E in parts else ()), *(stack.schedulers if S in parts else ())]
    killed_at = time.time()
    ends = [service.kill() for service in services]
    await asyncio.gather(*ends, *([kill_server(stack.postgres)] if P in parts else []))
    starts = [service.start() for service in services]
    await asyncio.gather(*starts, *([stack.postgres.start()] if P in parts else []))
    if S in parts:
        await until_connected(stack.postgres.dsn, killed_at)
    return killed_at, time.time() - killed_at


def recovery_s(attempts: Sequence[Attempt], killed_at: float) -> dict[str, float]:
    """For each step that ran at that instant and lost its lease: seconds until its next attempt ran."""
    found = {}
    for attempt in attempts:
        if attempt.started_at is None or attempt.reason != "LEASE_EXPIRED":
            continue
        if attempt.started_at < killed_at < attempt.ended_at:
            later = [
                one.started_at
                for one in attempts
                if one.step_run_id == attempt.step_run_id and one.attempt > attempt.attempt and one.started_at
            ]
            found[attempt.step_run_id] = min(later) - killed_at
    return found


async def one_kill(runs: StackRuns, parts: set[str]) -> None:
    """Work in flight, the kill, the restart; all of it ends, and the orphans' recovery is in time."""
    stack = runs.stack
    for name in RUNS:
        assert await runs.start(BY_NAME[name]) is not None
    await until_running(stack.postgres.dsn, 2)
    killed_at, restart_s = await kill_and_restart(stack, parts)
    await until_quiet(stack.postgres.dsn)
    connection = await asyncpg.connect(stack.postgres.dsn)
    try:
        recovered = recovery_s(await read_attempts(connection), killed_at)
    finally:
        await connection.close()
    if E in parts:
        assert recovered, "the executor was killed while it worked"
    bound_s = LEASE_S + SWEEP_S + MARGIN_S + restart_s
    assert max(recovered.values(), default=0.0) <= bound_s, (parts, restart_s, recovered)


async def smoke(folder: Path, kills: Sequence[set[str]]) -> None:
    folder.chmod(0o755)
    async with (
        Stack(folder, schedulers_count=1, executors_count=1, slots=6) as stack,
        Client.connect(stack.addresses[0]) as client,
    ):
        runs = StackRuns(stack, client)
        await runs.define(*(BY_NAME[name] for name in sorted(set(RUNS))))
        for parts in kills:
            await one_kill(runs, parts)
        verdict = await runs.judge()
        assert verdict.is_clean, verdict
        assert not stack.crashes
        assert verdict.runs == len(runs.confirmed) == len(RUNS) * len(kills)
        assert verdict.effects == verdict.steps


@pytest.mark.case("S07")
async def test_whatever_is_killed_nothing_is_lost_and_orphans_are_recovered(tmp_path: Path) -> None:
    await smoke(tmp_path, [parts for one_round in ROUNDS for parts in one_round])


@pytest.mark.soak
@pytest.mark.case("S07")
async def test_a_hundred_rounds_of_kills(tmp_path: Path) -> None:
    await smoke(tmp_path, [SUBSETS[number % len(SUBSETS)] for number in range(100)])
