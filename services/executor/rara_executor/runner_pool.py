"""Runner processes: started when needed, used again, and where a job is placed."""

import asyncio
import itertools
import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import structlog

from rara_executor.child_process import ProcessExit
from rara_executor.errors import ConfigurationError
from rara_executor.runner import Runner, RunnerState
from rara_executor.runner_protocol import FromRunner, OperationInfo, Ready, Setup, StartJob
from rara_executor.warden_link import Warden

log = structlog.get_logger(__name__)

START_FAILURES = 3  # in a row, after which waiting jobs fail instead of waiting on


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """jobs_per_runner: async handlers that share one process. prestart: blocking runners kept ready."""

    slots: int
    jobs_per_runner: int
    prestart: int
    idle_s: float
    start_timeout_s: float


class PoolEvents(Protocol):
    """Who hears what becomes of jobs in runners."""

    def on_placed(self, token: int, runner: Runner) -> float:
        """The job goes to the runner now. When its lease is over, on the lease clock."""

    def on_runner_message(self, runner: Runner, message: FromRunner) -> None: ...

    def on_runner_line(self, runner: Runner, stream: str, line: bytes) -> None: ...

    def on_runner_exit(self, runner: Runner, end: ProcessExit) -> None: ...

    def on_not_started(self, token: int, problem: str, end: ProcessExit | None) -> None: ...


class RunnerPool:
    """Places jobs on runners. Waiting jobs are bounded by the slots of who submits them."""

    def __init__(self, setup: Setup, limits: PoolLimits, events: PoolEvents, warden: Warden) -> None:
        self.runners: set[Runner] = set()
        self._setup = setup
        self._limits = limits
        self._events = events
        self._warden = warden
        self._waiting: dict[bool, deque[StartJob]] = {True: deque(), False: deque()}
        self._roles: dict[Runner, bool] = {}  # of runners that are starting
        self._spawning: set[asyncio.Task[None]] = set()
        self._started_at: dict[Runner, float] = {}
        self._numbers = itertools.count(1)
        self._failures = 0
        self._retry_at = 0.0
        self._catalogue: asyncio.Future[list[OperationInfo]] | None = None
        self._stopping = False

    async def start(self) -> list[OperationInfo]:
        """Start the first runner and tell what it can run. Raises ConfigurationError if it cannot start."""
        self._catalogue = asyncio.get_running_loop().create_future()
        self._spawn(is_async=True)
        try:
            async with asyncio.timeout(self._limits.start_timeout_s):
                operations = await self._catalogue
        except TimeoutError:
            raise ConfigurationError(
                f"the modules were not imported within {self._limits.start_timeout_s:g} s"
            ) from None
        if any(not operation.is_async for operation in operations):
            have = sum(not runner.is_async for runner in self.runners)
            for _ in range(min(self._limits.slots, self._limits.prestart) - have):
                self._spawn(is_async=False)
        return operations

    def submit(self, start: StartJob, *, is_async: bool) -> None:
        """Place the job now or as soon as a runner has room; on_placed tells."""
        self._waiting[is_async].append(start)
        self._place(is_async)

    def withdraw(self, token: int) -> bool:
        """Take back a job that was not placed; False: it was."""
        for waiting in self._waiting.values():
            for start in waiting:
                if start.lease_token == token:
                    waiting.remove(start)
                    return True
        return False

    def job_ended(self, runner: Runner, token: int) -> None:
        """The job has left the runner, which has room again."""
        runner.end_job(token)
        self._place(runner.is_async)

    def sweep(self) -> None:
        """From time to time: retry failed starts, end what does not start, retire what idles."""
        now = asyncio.get_running_loop().time()
        if not self._warden.check():
            log.warning("warden.restarted")
        for runner, started_at in list(self._started_at.items()):
            if now - started_at > self._limits.start_timeout_s:
                log.warning("runner.start_timed_out", runner_id=runner.runner_id, pid=runner.pid)
                runner.kill()
        for is_async in (True, False):
            self._place(is_async)
            keep = 1 if is_async else max(self._limits.prestart, 1)
            ready = [
                runner
                for runner in self.runners
                if runner.state is RunnerState.READY and runner.is_async is is_async
            ]
            idle = [
                runner
                for runner in ready
                if not runner.jobs and now - runner.idle_since > self._limits.idle_s
            ]
            for runner in idle[: max(0, len(ready) - keep)]:
                runner.leave()

    async def stop(self) -> None:
        """Kill every runner and wait until all are reaped."""
        self._stopping = True
        for task in list(self._spawning):
            task.cancel()
        await asyncio.gather(*self._spawning, return_exceptions=True)
        runners = list(self.runners)
        for runner in runners:
            runner.kill()
        await asyncio.gather(*(runner.ended() for runner in runners))

    def _place(self, is_async: bool) -> None:
        waiting = self._waiting[is_async]
        while waiting:
            runner = self._best(is_async)
            if runner is None:
                self._spawn_for(len(waiting), is_async=is_async)
                return
            start = waiting.popleft()
            over_at = self._events.on_placed(start.lease_token, runner)
            self._warden.watch_if_free(runner.pid, over_at)
            runner.start_job(start)

    def _best(self, is_async: bool) -> Runner | None:
        """The least loaded runner with room; one that may have to be killed for another job comes last."""
        room = self._limits.jobs_per_runner if is_async else 1
        best: Runner | None = None
        best_load = (True, room)
        for runner in self.runners:
            if runner.state is not RunnerState.READY or runner.is_async is not is_async:
                continue
            if len(runner.jobs) < room:
                load = bool(runner.asked), len(runner.jobs)
                if best is None or load < best_load:
                    best, best_load = runner, load
        return best

    def _spawn_for(self, jobs: int, *, is_async: bool) -> None:
        now = asyncio.get_running_loop().time()
        if self._stopping or now < self._retry_at:
            return  # sweep() tries again
        starting = sum(role is is_async for role in self._roles.values())
        needed = math.ceil(jobs / self._limits.jobs_per_runner) if is_async else jobs
        for _ in range(needed - starting):
            self._spawn(is_async=is_async)

    def _spawn(self, *, is_async: bool) -> None:
        runner = Runner(f"r{next(self._numbers)}", self._setup, self)
        self._roles[runner] = is_async
        task = asyncio.create_task(self._start(runner), name=f"start {runner.runner_id}")
        self._spawning.add(task)
        task.add_done_callback(self._spawning.discard)

    async def _start(self, runner: Runner) -> None:
        self._started_at[runner] = asyncio.get_running_loop().time()
        try:
            await runner.start()
        except OSError as error:
            self._not_started(runner, f"the runner could not be started: {error}", None)
            return
        if runner.state is RunnerState.ENDED:
            return  # it has ended already, and on_exit was told
        self.runners.add(runner)
        self._warden.add(runner.pid, runner.mark)
        log.debug("runner.started", runner_id=runner.runner_id, pid=runner.pid)

    def _not_started(self, runner: Runner, problem: str, end: ProcessExit | None) -> None:
        is_async = self._roles.pop(runner, True)
        self._started_at.pop(runner, None)
        if self._stopping:
            return
        if self._catalogue is not None and not self._catalogue.done():
            self._catalogue.set_exception(ConfigurationError(problem))
            return
        self._failures += 1
        self._retry_at = asyncio.get_running_loop().time() + min(5.0, 0.25 * 2**self._failures)
        log.warning(
            "runner.not_started", runner_id=runner.runner_id, problem=problem, failures=self._failures
        )
        if self._failures >= START_FAILURES:
            waiting = self._waiting[is_async]
            while waiting:
                self._events.on_not_started(waiting.popleft().lease_token, problem, end)

    # RunnerEvents

    def on_ready(self, runner: Runner, ready: Ready) -> None:
        if ready.problem:
            self._not_started(runner, f"importing the modules failed: {ready.problem}", None)
            return
        self._started_at.pop(runner, None)
        is_async = self._roles.pop(runner, True)
        self._failures = 0
        if self._catalogue is not None and not self._catalogue.done():
            is_async = any(operation.is_async for operation in ready.operations)
            self._catalogue.set_result(ready.operations)
        runner.assume(is_async=is_async)
        self._place(is_async)

    def on_message(self, runner: Runner, message: FromRunner) -> None:
        self._events.on_runner_message(runner, message)

    def on_line(self, runner: Runner, stream: str, line: bytes) -> None:
        self._events.on_runner_line(runner, stream, line)

    def on_exit(self, runner: Runner, end: ProcessExit) -> None:
        self._warden.forget(runner.pid)
        self.runners.discard(runner)
        if runner in self._roles:
            self._not_started(runner, f"the runner ended while it started ({end.describe()})", end)
        else:
            self._events.on_runner_exit(runner, end)
        if not self._stopping:
            self._place(runner.is_async)
