"""Self-fencing: no handler runs on under a lease that can no longer be certain."""

import asyncio
import contextlib

from rara_executor.held_job import Phase
from rara_executor.lease_clock import lease_now
from rara_executor.runner import Runner
from rara_executor.supervisor import Supervisor
from rara_executor.warden_link import Warden

CHECK_S = 0.5


async def run(supervisor: Supervisor, warden: Warden) -> None:
    """Stop what must stop, and tell the warden until when each runner may live; for ever."""
    while True:
        supervisor.stopped.clear()
        wait_s = check(supervisor, warden, lease_now())
        # A stopped job's runner may serve the next one at once: the warden must not hold it to the old deadline.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await supervisor.stopped.wait()


def check(supervisor: Supervisor, warden: Warden, now: float) -> float:
    """One look at all leases; seconds until the next is due."""
    next_fence = now + CHECK_S
    deadlines: dict[Runner, float] = {}
    for job in list(supervisor.jobs.values()):
        if job.phase not in (Phase.STARTING, Phase.RUNNING):
            continue
        if job.clock.fence_at <= now:
            supervisor.fence(job, now)
        else:
            next_fence = min(next_fence, job.clock.fence_at)
        runner = job.runner
        if runner is not None and job.phase is Phase.RUNNING:
            deadlines[runner] = min(deadlines.get(runner, float("inf")), job.clock.over_at)
    if supervisor.pool is not None:
        for runner in supervisor.pool.runners:
            warden.watch(runner.pid, deadlines.get(runner))
    return max(0.005, next_fence - now)
