"""What keeping 10,000 running steps alive writes: WAL bytes for each step and heartbeat."""

import asyncio
from contextlib import AsyncExitStack
from typing import Final

from rara.v1 import job_pb2
from rara_testing import job_events
from rara_testing.scripted_executor import ScriptedExecutor

from rara_bench.arm import Bench, Figures
from rara_bench.operations import NOOP
from rara_bench.product import Product, Shape, running

RUNNING: Final = 10_000
SESSIONS: Final = 10
BEATS: Final = 5
_WAL: Final = "select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
_SILENCE_S: Final = 120.0
_LONG: Final = {"RARA_LEASE_S": "600", "RARA_SILENCE_S": "300", "RARA_HEARTBEAT_S": "60"}


async def measure(bench: Bench) -> Figures:
    each = RUNNING // SESSIONS
    async with (
        running(bench, "rara_heartbeat", Shape(environment=_LONG)) as product,
        AsyncExitStack() as stack,
    ):
        await product.seed(RUNNING)
        executors = [await stack.enter_async_context(ScriptedExecutor()) for _ in range(SESSIONS)]
        tokens = await asyncio.gather(*(_run(one, product.addresses[0], each) for one in executors))
        await product.server.settle(product.database)
        await _beat(executors, tokens)  # the first change of a page after a checkpoint writes all of it
        running_now = await _running(product)
        wal = -await product.connection.fetchval(_WAL)
        for _ in range(BEATS):
            await _beat(executors, tokens)
        wal += await product.connection.fetchval(_WAL)
    if running_now != RUNNING:
        raise RuntimeError(f"{running_now} of {RUNNING} steps run")
    return {"wal_bytes_per_step_and_beat": float(wal) / RUNNING / BEATS}


async def _run(executor: ScriptedExecutor, address: str, count: int) -> list[int]:
    """Take that many jobs and say that they run; their tokens."""
    await executor.connect(address)
    await executor.hello([NOOP])
    await executor.expect("welcome", timeout_s=_SILENCE_S)
    await executor.credit(count)
    leases: list[job_pb2.Lease] = []
    while len(leases) < count:
        batch = await executor.expect("jobs", timeout_s=_SILENCE_S)
        for job in batch.jobs:
            leases.append(job.lease)
            await executor.events(job_events.accepted(job.lease), job_events.running(job.lease))
    for lease in leases:
        await executor.expect_ack(lease, 2, _SILENCE_S)
    return [lease.lease_token for lease in leases]


async def _beat(executors: list[ScriptedExecutor], tokens: list[list[int]]) -> None:
    """One heartbeat of each, all at once; returns when all leases are renewed."""
    numbers = [await one.heartbeat(held) for one, held in zip(executors, tokens, strict=True)]
    for one, number in zip(executors, numbers, strict=True):
        renewed = 0
        while renewed < number:
            answer = await one.expect("heartbeat_ack", timeout_s=_SILENCE_S)
            renewed = answer.renewed
            if answer.lost_lease_tokens:
                raise RuntimeError(f"beat {number} lost {len(answer.lost_lease_tokens)} leases")


async def _running(product: Product) -> int:
    found = await product.connection.fetchval("select count(*) from rara.lease where started_at is not null")
    return int(found)
