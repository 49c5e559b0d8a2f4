"""S07: executor, scheduler and PostgreSQL are killed with work in flight, singly and together; nothing is lost.

Real processes and SIGKILL. What was killed is started again at once, as a supervisor does.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import asyncpg
import pytest
from rara_chaos.shapes import BY_NAME, Shape, alternating
from rara_chaos.stack import LEASE_S, SWEEP_S, Stack
from rara_chaos.verdict import Attempt, Verdict, read_attempts
from rara_client import Client
from rara_testing.database_faults import kill_server
from support.go_executor import program
from support.stack_runs import StackRuns, until_connected, until_quiet, until_running

E, S, P = "executor", "scheduler", "postgres"
SUBSETS = ({E}, {S}, {P}, {E, S}, {E, P}, {S, P}, {E, S, P})
# Three rounds, all subsets: each part alone, each two of them, all together.
ROUNDS = (SUBSETS[:3], SUBSETS[3:6], SUBSETS[6:])
MARGIN_S = 1.0
RUNS = (BY_NAME["chaos-single"],) * 4
# Work of one language and of the other, long enough to be met by the kill, and runs in which both take turns.
MIXED_RUNS = [
    alternating(BY_NAME[name], kinds)
    for name in ("chaos-slow", "chaos-chain")
    for kinds in (("python", "go"), ("go", "python"))
]


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


def recovery_s(attempts: Sequence[Attempt], killed_at: float) -> dict[str, tuple[str, float]]:
    """For each step that ran at that instant and lost its lease: where, and seconds until its next attempt ran."""
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
            found[attempt.step_run_id] = attempt.executor_kind, min(later) - killed_at
    return found


async def one_kill(runs: StackRuns, shapes: Sequence[Shape], parts: set[str]) -> None:
    """Work in flight, the kill, the restart; all of it ends, and the orphans' recovery is in time."""
    stack = runs.stack
    kinds = {executor.command.executor_kind for executor in stack.executors}
    for shape in shapes:
        assert await runs.start(shape) is not None
    await until_running(stack.postgres.dsn, 2, kinds=len(kinds))
    killed_at, restart_s = await kill_and_restart(stack, parts)
    await until_quiet(stack.postgres.dsn)
    connection = await asyncpg.connect(stack.postgres.dsn)
    try:
        recovered = recovery_s(await read_attempts(connection), killed_at)
    finally:
        await connection.close()
    if E in parts:
        assert {kind for kind, _ in recovered.values()} == kinds, "each was killed while it worked"
    bound_s = LEASE_S + SWEEP_S + MARGIN_S + restart_s
    assert max((seconds for _, seconds in recovered.values()), default=0.0) <= bound_s, (
        parts,
        restart_s,
        recovered,
    )


async def smoke(
    folder: Path, kills: Sequence[set[str]], shapes: Sequence[Shape] = RUNS, go: Path | None = None
) -> Verdict:
    folder.chmod(0o755)
    async with (
        Stack(folder, schedulers_count=1, executors_count=2 if go else 1, slots=6, go=go) as stack,
        Client.connect(stack.addresses[0]) as client,
    ):
        runs = StackRuns(stack, client)
        await runs.define(*{shape.name: shape for shape in shapes}.values())
        for parts in kills:
            await one_kill(runs, shapes, parts)
        verdict = await runs.judge()
        assert verdict.is_clean, verdict
        assert not stack.crashes
        assert verdict.runs == len(runs.confirmed) == len(shapes) * len(kills)
        assert verdict.effects == verdict.steps
        return verdict


@pytest.mark.case("S07")
async def test_whatever_is_killed_nothing_is_lost_and_orphans_are_recovered(tmp_path: Path) -> None:
    await smoke(tmp_path, [parts for one_round in ROUNDS for parts in one_round])


@pytest.mark.needs("go")
@pytest.mark.case("S07")
async def test_go_and_python_are_killed_and_recovered_together(tmp_path: Path) -> None:
    kills = ({E}, {E, S, P})
    verdict = await smoke(tmp_path, kills, MIXED_RUNS, program("rara-go-chaos"))
    assert set(verdict.attempts_by_kind) == {"python", "go"}
    assert verdict.handovers == 4 * len(kills)  # two in each chain


@pytest.mark.soak
@pytest.mark.case("S07")
async def test_a_hundred_rounds_of_kills(tmp_path: Path) -> None:
    await smoke(tmp_path, [SUBSETS[number % len(SUBSETS)] for number in range(100)])
