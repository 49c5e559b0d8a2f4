"""Runs of the chaos load's shapes against a stack of real processes, for tests that choose their faults themselves."""

import asyncio
from dataclasses import dataclass, field

import asyncpg
from rara_chaos.load import Confirmed
from rara_chaos.shapes import Shape
from rara_chaos.stack import Stack
from rara_chaos.verdict import Verdict, judge
from rara_client import CallTimeout, Client, Unavailable

CALL_S = 3.0


@dataclass(slots=True)
class StackRuns:
    """Starts runs and remembers what was confirmed."""

    stack: Stack
    client: Client
    confirmed: list[Confirmed] = field(default_factory=list)
    refused: int = 0

    async def define(self, *shapes: Shape) -> None:
        for shape in shapes:
            await self.client.register_definition(shape.definition(), timeout_s=10)

    async def start(self, shape: Shape) -> Confirmed | None:
        """Start one run with a key of its own; None where the scheduler was not there to confirm it."""
        number = len(self.confirmed) + self.refused
        given = {"ledger": str(self.stack.ledger), "number": number}
        try:
            answer = await self.client.start_run(
                shape.name, given, idempotency_key=f"{shape.name}-{number}", timeout_s=CALL_S
            )
        except (Unavailable, CallTimeout):
            self.refused += 1
            return None
        run = Confirmed(answer.run.workflow_run_id, shape, number)
        self.confirmed.append(run)
        return run

    async def judge(self) -> Verdict:
        """What the history checker and the ledger say, when all is quiet."""
        stack = self.stack
        return await judge(stack.postgres.dsn, stack.ledger, stack.blob_folder, self.confirmed, stack.kills)


async def until_running(dsn: str, count: int, *, kinds: int = 1, bound_s: float = 20.0) -> None:
    """Wait until so many steps run, on so many kinds of executors."""
    await _until(
        dsn,
        f"select count(*) >= {int(count)} and count(distinct x.executor_kind) >= {int(kinds)}"
        " from rara.lease join rara.executor x using (executor_id) where started_at is not null",
        bound_s,
    )


async def until_connected(dsn: str, since: float, *, bound_s: float = 20.0) -> None:
    """Wait until an executor has connected since then (wall time)."""
    await _until(
        dsn, f"select exists (select from rara.executor where connected_at > to_timestamp({since}))", bound_s
    )


async def until_quiet(dsn: str, *, bound_s: float = 60.0) -> None:
    """Wait until every run has ended and nothing is leased."""
    await _until(
        dsn,
        "select not exists (select from rara.workflow_run where ended_at is null)"
        " and not exists (select from rara.lease)",
        bound_s,
    )


async def _until(dsn: str, question: str, bound_s: float) -> None:
    connection = await asyncpg.connect(dsn, timeout=10)
    try:
        async with asyncio.timeout(bound_s):
            while not await connection.fetchval(question):
                await asyncio.sleep(0.05)
    finally:
        await connection.close(timeout=10)
