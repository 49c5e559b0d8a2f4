"""The executor's own timers of a job: a second line behind the scheduler's, and the kill after a grace."""

import asyncio
from collections.abc import Callable

from rara_executor.codes import Code
from rara_executor.held_job import HeldJob


class JobTimers:
    """on_timeout is told the job and the reason; on_kill the job whose grace is over."""

    def __init__(
        self, on_timeout: Callable[[HeldJob, Code], None], on_kill: Callable[[HeldJob], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_timeout = on_timeout
        self._on_kill = on_kill

    def received(self, job: HeldJob) -> None:
        """The time to the deadline runs from the request's receipt."""
        if job.limits.time_remaining_s is not None:
            self._arm(job, job.limits.time_remaining_s, Code.DEADLINE_EXCEEDED)

    def started(self, job: HeldJob) -> None:
        limits = job.limits
        if limits.attempt_timeout_s is not None:
            self._arm(job, limits.attempt_timeout_s, Code.ATTEMPT_TIMEOUT)
        self.progressed(job)
        if limits.progress_timeout_s is not None:
            self._watch_progress(job, limits.progress_timeout_s, limits.progress_timeout_s)

    def progressed(self, job: HeldJob) -> None:
        job.progressed_at = self._loop.time()

    def left_s(self, job: HeldJob) -> float | None:
        """To the deadline or the end of the attempt that starts now; None: there is neither."""
        remaining_s, attempt_timeout_s = job.limits.time_remaining_s, job.limits.attempt_timeout_s
        if remaining_s is None:
            return attempt_timeout_s
        remaining_s -= self._loop.time() - job.received_at
        return remaining_s if attempt_timeout_s is None else min(remaining_s, attempt_timeout_s)

    def kill_within(self, job: HeldJob, grace_s: float) -> None:
        """An earlier kill stays."""
        at = self._loop.time() + grace_s
        if job.kill_timer is not None:
            if job.kill_timer.when() <= at:
                return
            job.kill_timer.cancel()
        job.kill_timer = self._loop.call_at(at, self._on_kill, job)

    def _arm(self, job: HeldJob, delay_s: float, reason: Code) -> None:
        job.timers.append(self._loop.call_later(delay_s, self._on_timeout, job, reason))

    def _watch_progress(self, job: HeldJob, timeout_s: float, delay_s: float) -> None:
        # One timer that looks again, instead of a new one with every report.
        job.timers = [timer for timer in job.timers if timer.when() > self._loop.time()]
        job.timers.append(self._loop.call_later(delay_s, self._check_progress, job, timeout_s))

    def _check_progress(self, job: HeldJob, timeout_s: float) -> None:
        left_s = job.progressed_at + timeout_s - self._loop.time()
        if left_s > 0:
            self._watch_progress(job, timeout_s, left_s)
        else:
            self._on_timeout(job, Code.PROGRESS_TIMEOUT)
