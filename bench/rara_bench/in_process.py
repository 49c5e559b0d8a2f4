"""An executor whose handlers run on the supervisor's own loop: what isolation in runner processes costs.

For the benchmark alone. A handler that blocks stops the heartbeats here, and one that crashes takes all with it.
"""

import asyncio
import itertools
from typing import cast

from rara_executor import app, outcomes, registry, runner_pool
from rara_executor.__main__ import main
from rara_executor.handlers import Handlers
from rara_executor.job import Job
from rara_executor.registry import AsyncHandler, Operation
from rara_executor.runner import Runner, RunnerEvents
from rara_executor.runner_protocol import (
    CancelJob,
    Failed,
    FromRunner,
    Ready,
    Reply,
    Request,
    Setup,
    StartJob,
    Stopped,
    Succeeded,
    ToRunner,
)
from rara_executor.warden_link import Warden


class InProcessRunner(Runner):
    """Takes a runner's place in the pool without being a process."""

    def __init__(self, runner_id: str, setup: Setup, events: RunnerEvents) -> None:
        super().__init__(runner_id, setup, events)
        self._hears = events
        self._handlers = Handlers(registry.load(setup.modules))
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        ready = Ready(self._handlers.catalogue(), "")
        asyncio.get_running_loop().call_soon(self._hears.on_ready, self, ready)

    def send(self, message: ToRunner) -> None:
        match message:
            case StartJob():
                self._begin(message)
            case CancelJob():
                self._tasks[message.lease_token].cancel()
            case _:
                pass

    def hear(self, message: FromRunner) -> None:
        self._hears.on_message(self, message)

    def _begin(self, start: StartJob) -> None:
        operation = self._handlers.find(start)
        if isinstance(operation, Failed):
            asyncio.get_running_loop().call_soon(self.hear, operation)
            return
        token = start.lease_token
        task = asyncio.create_task(self._run(start, operation), name=f"job {token}")
        self._tasks[token] = task
        task.add_done_callback(lambda _: self._tasks.pop(token))

    async def _run(self, start: StartJob, operation: Operation) -> None:
        ending: Succeeded | Failed | Stopped
        try:
            value = await cast("AsyncHandler", operation.handler)(Job(start, _Port(self)))
            ending = outcomes.success(start, value)
        except asyncio.CancelledError:
            ending = Stopped(start.lease_token)
        self.hear(ending)


class _Port:
    """What the benchmark's handlers use of a port: reports."""

    def __init__(self, runner: InProcessRunner) -> None:
        self._runner = runner
        self._numbers = itertools.count(1)

    def post(self, message: FromRunner) -> None:
        self._runner.hear(message)

    async def send(self, message: FromRunner) -> None:
        self.post(message)
        await asyncio.sleep(0)

    def next_request(self) -> int:
        return next(self._numbers)

    async def request(self, message: Request) -> Reply:
        raise NotImplementedError(f"no handler of the benchmark sends {type(message).__name__}")


class _NoWarden(Warden):
    """There is no runner to end."""

    def add(self, group: int, mark: str) -> None: ...


if __name__ == "__main__":
    # Where the pool and the executor look for the names that they imported.
    vars(runner_pool)["Runner"] = InProcessRunner
    vars(app)["Warden"] = _NoWarden
    main()
