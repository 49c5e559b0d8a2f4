"""Keeps starting runs, as a careful caller would: keys on every start, repeats until the answer is known.

The seed gives the same callers with the same wishes; when each wish is served depends on the faults.
"""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import NamedTuple, TypeVar

from rara.v1 import workflow_pb2
from rara_client import CallTimeout, Client, RaraError, Refused, Unavailable
from rara_client.errors import may_resume
from rara_client.security import Security

from rara_chaos.shapes import SHAPES, Shape

T = TypeVar("T")

_CALL_S = 3.0
_PAUSE_S = 0.1
_LOOK_S = 0.25
_GIVE_UP_S = 60.0  # of one wish; what was confirmed is looked for at the end in any case
ENDED = frozenset(
    {
        workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED,
        workflow_pb2.WORKFLOW_RUN_STATE_FAILED,
        workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED,
    }
)


@dataclass(slots=True)
class Confirmed:
    """A run whose start was answered. retry_of: the run that it repeats."""

    workflow_run_id: str
    shape: Shape
    number: int
    may_be_cancelled: bool = False
    has_timeout: bool = False  # a retry has it too
    retry_of: str | None = None


class Took(NamedTuple):
    """at_s: monotonic, when it ended."""

    at_s: float
    seconds: float


@dataclass(slots=True)
class Load:
    """What was asked for and answered."""

    seed: int
    ledger: str  # as handlers reach it
    addresses: Sequence[str]
    shapes: Sequence[Shape] = SHAPES
    security: Security | None = None
    numbers: int = 1_000_000  # so many different inputs at most
    starts: list[Took] = field(default_factory=list)  # calls that were answered
    runs: list[Took] = field(default_factory=list)  # from the answer to a start until the end was seen
    confirmed: list[Confirmed] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)  # answers after which a call was repeated
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def _clients(self) -> AsyncIterator[list[Client]]:
        async with contextlib.AsyncExitStack() as stack:
            yield [
                await stack.enter_async_context(Client.connect(address, security=self.security))
                for address in self.addresses
            ]

    async def run(self, callers: int) -> None:
        """Until `stopping` is set; what is under way then is still waited for."""
        async with self._clients() as clients:
            await self._define(clients[0])
            async with asyncio.TaskGroup() as tasks:
                for number in range(callers):
                    caller = _Caller(self, clients, random.Random(f"load {self.seed} {number}"), number)
                    tasks.create_task(caller.run(), name=f"caller {number}")

    async def _define(self, client: Client) -> None:
        for shape in self.shapes:
            await self.insist(partial(client.register_definition, shape.definition(), timeout_s=_CALL_S))

    async def insist(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """The answer, however often that takes; None when it never came, or was a refusal that should not be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S):
                while True:
                    try:
                        return await call()
                    except RaraError as error:
                        if not _may_repeat(error):
                            self.violations.append(f"a call was refused: {error}")
                            return None
                        self.refusals[error.reason] += 1
                    await asyncio.sleep(_PAUSE_S)
        return None


def _took_since(began: float) -> Took:
    now = time.monotonic()
    return Took(now, now - began)


def _may_repeat(error: RaraError) -> bool:
    transient = isinstance(error, Unavailable | CallTimeout) or may_resume(error)
    return transient or (isinstance(error, Refused) and error.retry_after_s is not None)


@dataclass(slots=True)
class _Caller:
    """One run after the other."""

    load: Load
    clients: Sequence[Client]
    draw: random.Random
    number: int

    async def run(self) -> None:
        count = 0
        while not self.load.stopping.is_set():
            count += 1
            await self._one(f"chaos-{self.load.seed}-{self.number}-{count}")

    async def _one(self, key: str) -> None:
        draw = self.draw
        shapes = self.load.shapes
        shape = draw.choices(shapes, [shape.weight for shape in shapes])[0]
        number = draw.randrange(self.load.numbers)
        is_twice, is_cancelled, cancel_after_s = (
            draw.random() < 0.2,
            draw.random() < 0.12,
            draw.uniform(0, 2.5),
        )
        run_timeout = timedelta(seconds=draw.uniform(0.5, 4)) if shape.name == "chaos-slow" else None
        is_retried = draw.random() < 0.7

        async def start(client: Client) -> str | None:
            async def call() -> workflow_pb2.StartRunResponse:
                began = time.monotonic()
                answer = await client.start_run(
                    shape.name,
                    {"ledger": self.load.ledger, "number": number},
                    idempotency_key=key,
                    run_timeout=run_timeout,
                    timeout_s=_CALL_S,
                )
                self.load.starts.append(_took_since(began))
                return answer

            answer = await self.load.insist(call)
            return None if answer is None else answer.run.workflow_run_id

        found = await self._same_run(start, key, is_twice)
        if found is None:
            return
        has_timeout = run_timeout is not None
        confirmed = Confirmed(found, shape, number, is_cancelled or has_timeout, has_timeout)
        self.load.confirmed.append(confirmed)
        if is_cancelled:
            await asyncio.sleep(cancel_after_s)
            await self.load.insist(lambda: self._any().cancel_run(found, timeout_s=_CALL_S))
        run = await self._ended(found)
        if run is not None and run.state != workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED and is_retried:
            await self._retry(confirmed, key)

    async def _retry(self, first: Confirmed, key: str) -> None:
        async def retry(client: Client) -> str | None:
            answer = await self.load.insist(
                lambda: client.retry_run(
                    first.workflow_run_id, idempotency_key=f"{key}-retry", timeout_s=_CALL_S
                )
            )
            return None if answer is None else answer.run.workflow_run_id

        found = await self._same_run(retry, key, self.draw.random() < 0.5)
        if found is not None:
            self.load.confirmed.append(
                Confirmed(
                    found,
                    first.shape,
                    first.number,
                    first.has_timeout,
                    first.has_timeout,
                    first.workflow_run_id,
                )
            )
            await self._ended(found)

    async def _same_run(
        self, ask: Callable[[Client], Awaitable[str | None]], key: str, is_twice: bool
    ) -> str | None:
        """Ask one scheduler, or several at once: the answers must name one run."""
        asked = self.clients if is_twice else [self._any()]
        answers = await asyncio.gather(*(ask(client) for client in asked))
        found = {answer for answer in answers if answer is not None}
        if len(found) > 1:
            self.load.violations.append(f"key {key} has several runs: {', '.join(sorted(found))}")
        return min(found, default=None)

    async def _ended(self, workflow_run_id: str) -> workflow_pb2.WorkflowRun | None:
        """The run when it has ended; None when it did not in time."""
        began = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GIVE_UP_S):
                while True:
                    answer = await self.load.insist(
                        lambda: self._any().get_run(workflow_run_id, timeout_s=_CALL_S)
                    )
                    if answer is not None and answer.run.state in ENDED:
                        self.load.runs.append(_took_since(began))
                        return answer.run
                    await asyncio.sleep(_LOOK_S)
        return None

    def _any(self) -> Client:
        return self.draw.choice(self.clients)
