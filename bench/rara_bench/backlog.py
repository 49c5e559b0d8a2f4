"""How long a lease takes, credit sent to job received, behind a backlog of 100 kinds of which 96 are not served."""

import time
from typing import Final

from rara.v1 import job_pb2, workflow_pb2
from rara_testing import job_events
from rara_testing.scripted_executor import ScriptedExecutor

from rara_bench.arithmetic import percentile
from rara_bench.arm import Bench, Figures
from rara_bench.product import Product, Shape, prepare, running

KINDS: Final = 100
SERVED: Final = 4
SAMPLES: Final = 40
WARM_UP: Final = 5
STEPS_A_RUN: Final = 1000
_SILENCE_S: Final = 60.0

# Ready steps without the detour over BatchStartRuns, which would take minutes.
_RUNS: Final = """
    insert into rara.workflow_run (workflow_run_id, definition, definition_version, steps_total, on_failure)
    select lpad(to_hex(n), 32, '0')::uuid, 'bench', 1, $2, 'continue' from generate_series(1, $1::int / $2::int) n
"""
_STEPS: Final = """
    with stored as (
        insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)
        select ('a' || lpad(to_hex(s), 31, '0'))::uuid, lpad(to_hex(1 + (s - 1) / $2::int), 32, '0')::uuid,
               's' || (s - 1) % $2::int, route.route_id, 'k' || s
          from generate_series(1, $1::int) s
          join rara.route on kind = 'backlog.k' || lpad(((s - 1) % $2::int % $3::int)::text, 3, '0')
        returning step_run_id, workflow_run_id, route_id
    )
    insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)
    select route_id, now(), step_run_id, workflow_run_id, now(), 1 from stored
"""


async def measure(bench: Bench, steps: int) -> Figures:
    database = f"rara_backlog_{steps}"
    if database not in bench.kept:
        await prepare(bench.server, database)
        async with running(bench, database, Shape(), keep=True) as product:
            await _store(product, steps)
        bench.kept[database] = True  # whole: what failed half way is made again
    async with running(bench, database, Shape(), keep=True) as product:
        waits_ms = await _lease_one_by_one(product)
        ready = await product.connection.fetchval("select count(*) from rara.ready")
    return {"p50_ms": percentile(waits_ms, 0.5), "p99_ms": percentile(waits_ms, 0.99), "ready": ready}


async def _store(product: Product, steps: int) -> None:
    steps_of_a_run = [
        workflow_pb2.StepDefinition(step_name=f"s{n}", kind=_kind(n % KINDS)) for n in range(STEPS_A_RUN)
    ]
    await product.client.register_definition(
        workflow_pb2.Definition(definition="bench", steps=steps_of_a_run)
    )
    await product.connection.execute(_RUNS, steps, STEPS_A_RUN, timeout=600)
    await product.connection.execute(_STEPS, steps, STEPS_A_RUN, KINDS, timeout=600)
    await product.server.settle(product.database)


async def _lease_one_by_one(product: Product) -> list[float]:
    waits_ms = []
    async with ScriptedExecutor() as executor:
        await executor.connect(product.addresses[0])
        await executor.hello([_kind(number) for number in range(SERVED)])
        await executor.expect("welcome", timeout_s=_SILENCE_S)
        for number in range(1, WARM_UP + SAMPLES + 1):
            sent = time.perf_counter()
            await executor.credit(number)
            job = await executor.expect_job(_SILENCE_S)
            if number > WARM_UP:
                waits_ms.append(1000 * (time.perf_counter() - sent))
            await _end(executor, job.lease)
    return waits_ms


async def _end(executor: ScriptedExecutor, lease: job_pb2.Lease) -> None:
    await executor.events(
        job_events.accepted(lease), job_events.running(lease), job_events.succeeded(lease, 3)
    )
    await executor.expect_ack(lease, 3, _SILENCE_S)


def _kind(number: int) -> str:
    return f"backlog.k{number:03}"
