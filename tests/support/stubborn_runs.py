"""Runs of stubborn handlers: all at work, and then row and process table both closed."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration
from support import stubborn
from support.running_scheduler import GRACE_S, LEASE_S, SWEEP_S, RunningScheduler, until

BOUND_S = GRACE_S + LEASE_S + 2 * SWEEP_S


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


async def asked(condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
    async def ask() -> Any:
        return condition()

    return await until(ask, what, timeout_s)


async def all_run(world: RunningScheduler, run_id: str, folder: Path, names: tuple[str, ...]) -> set[int]:
    """Wait until every handler of the run is at work; the numbers of all their processes."""
    await asked(lambda: all(stubborn.starts(folder, name) for name in names), "start of all handlers", 15)

    async def running() -> bool:
        return {state for state, _ in (await world.steps(run_id)).values()} == {"running"}

    await until(running, "running steps")
    pids = stubborn.pids_of(folder, *names)
    assert stubborn.living(pids) == pids
    return pids


async def both_close(world: RunningScheduler, run_id: str, pids: set[int], within_s: float) -> str:
    """Row and processes are closed within the bound; the run's state."""
    started = time.monotonic()
    state = await until(
        lambda: ended(world, run_id), "end of the run", within_s + 1
    )  # a second for a busy machine
    left_s = within_s + 1 - (time.monotonic() - started)
    await asked(lambda: not stubborn.living(pids), f"end of {pids}", max(left_s, 0.2))
    assert await world.raw.fetchval("select count(*) from rara.lease") == 0
    return state


async def ended(world: RunningScheduler, run_id: str) -> str:
    state = await world.run_state(run_id)
    return state if state in ("succeeded", "failed", "cancelled") else ""
