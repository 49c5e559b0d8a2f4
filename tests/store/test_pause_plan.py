"""That pausing costs the same however much is ready: what leases and looks read with all that is paused in front."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.pause import Target
from rara_scheduler.store.pauses import FRONT, PauseStore
from rara_scheduler.store.queries import query
from support.store_world import StoreWorld, new_id, store_world

NIL = "'00000000-0000-0000-0000-000000000000'"
SIZES = [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)]


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def free_behind(world: StoreWorld) -> str:
    """Two definitions of one route; a run of `free` is started, which comes last."""
    for name in ("held", "free"):
        await world.define(name, {"a": {}})
    assert [route.route_id for route in await world.definitions.routes_after(0)] == [1]
    return await world.start("free")


async def fill(world: StoreWorld, route_id: int, ready: int) -> None:
    """Many ready steps of runs of `held`, before all others."""
    await world.raw.execute(
        """with run as (
               insert into rara.workflow_run (workflow_run_id, definition, definition_version, on_failure, steps_total)
               select gen_random_uuid(), 'held', 1, 'fail_fast', 1 from generate_series(1, $2::int / 10)
               returning workflow_run_id
           )
           insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)
           select $1, now() - make_interval(secs => 1000 + n), gen_random_uuid(), run.workflow_run_id, now(), 1
             from run, generate_series(1, 10) n""",
        route_id,
        ready,
    )
    await world.raw.execute("analyze rara.ready")
    await world.raw.execute("analyze rara.workflow_run")


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


async def explain(
    raw: "asyncpg.Connection[asyncpg.Record]", name: str, arguments: str, *, mode: str
) -> dict[str, Any]:
    """What the statement does; undone."""
    await raw.execute(f"set plan_cache_mode = {mode}")
    await raw.execute("set jit = off")
    await raw.execute(f"prepare {name} as {query(name)}")
    transaction = raw.transaction()
    await transaction.start()
    told = await raw.fetchval(
        f"explain (analyze, buffers, timing off, format json) execute {name}({arguments})"
    )
    await transaction.rollback()
    plan: dict[str, Any] = json.loads(told)[0]["Plan"]
    return plan


def read_buffers(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


@pytest.mark.parametrize("ready", SIZES)
async def test_a_lease_walks_over_nothing_that_has_stepped_aside(world: StoreWorld, ready: int) -> None:
    await free_behind(world)
    pause, _ = await PauseStore(world.database).pause(Target(definition="held"), reason="", paused_by="")
    await fill(world, -pause.pause_id, ready)
    # As it is planned in production: the driver prepares it, and the server plans it for its values.
    plan = await explain(
        world.raw,
        "grant_leases",
        f"array[1], array[50], array['1970-01-01']::timestamptz[], array[{NIL}]::uuid[], 50,"
        f" array_fill('{new_id()}'::uuid, array[50]), 30, array['1.0.0']",
        mode="force_custom_plan",
    )
    assert plan["Actual Rows"] == 1
    assert read_buffers(plan) < 100


@pytest.mark.parametrize("ready", SIZES)
@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_look_reads_its_page_alone(world: StoreWorld, mode: str, ready: int) -> None:
    await free_behind(world)
    await fill(world, 1, ready)
    await PauseStore(world.database).pause(Target(definition="held"), reason="", paused_by="")
    plan = await explain(world.raw, "hold_ready", f"0, '1970-01-01', {NIL}, 1000, 2147483647", mode=mode)
    big = [node for node in nodes(plan) if node.get("Relation Name") in ("ready", "workflow_run")]
    assert {n["Node Type"] for n in big} <= {"Index Scan", "Index Only Scan", "Tid Scan", "ModifyTable"}
    assert max(n["Actual Rows"] * n["Actual Loops"] for n in big) == 1000
    assert read_buffers(plan) < 1000 * 60


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_page_of_waits_that_begin_anew_reads_its_page_alone(world: StoreWorld, mode: str) -> None:
    await free_behind(world)
    await fill(world, 1, 5000)
    await world.raw.execute(
        "insert into rara.step_run"
        " (step_run_id, workflow_run_id, step_name, route_id, idempotency_key, schedule_timeout)"
        " select step_run_id, workflow_run_id, step_run_id::text, 1, step_run_id::text, '1 hour' from rara.ready"
        " on conflict do nothing"
    )
    await world.raw.execute("update rara.ready set schedule_deadline = now()")
    await world.raw.execute("analyze rara.ready")
    await world.raw.execute("analyze rara.step_run")
    plan = await explain(world.raw, "restart_waits", f"1, '1970-01-01', {NIL}, now(), 1000", mode=mode)
    big = [node for node in nodes(plan) if node.get("Relation Name") in ("ready", "step_run")]
    assert max(n["Actual Rows"] * n["Actual Loops"] for n in big) == 1000
    assert read_buffers(plan) < 1000 * 60


async def test_what_is_paused_in_front_steps_aside_page_by_page(world: StoreWorld) -> None:
    free = await free_behind(world)
    await fill(world, 1, 5000)
    await world.raw.execute(
        "insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)"
        " select step_run_id, workflow_run_id, step_run_id::text, 1, step_run_id::text from rara.ready"
        " on conflict do nothing"
    )
    store = PauseStore(world.database)
    pause, _ = await store.pause(Target(definition="held"), reason="", paused_by="")
    place, held = FRONT, []
    while (seen := await store.hold(place, 1000)).place is not None:
        held.append(seen.held)
        place = seen.place
    assert held == [1000, 1000, 1000, 1000, 1000, 0]
    assert (await store.loads([pause.pause_id]))[pause.pause_id].held == 5000
    (grant,) = await world.lease(10)
    assert grant.workflow_run_id == free
    await store.resume(Target(definition="held"))
    assert [await store.release(pause.pause_id, 3000) for _ in range(3)] == [3000, 2000, 0]


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_leases_are_counted_once_for_all_pauses(world: StoreWorld, mode: str) -> None:
    await world.define("busy", {f"s{n}": {} for n in range(100)})
    await world.define("other", {"a": {"kind": "other.do"}})
    for name in ("busy", "busy", "other"):
        await world.start(name)
    leased = 0
    while grants := await world.lease(500):
        leased += len(grants)
    assert leased == 201
    store = PauseStore(world.database)
    targets = [Target(definition="busy"), Target(kind="other.do"), Target(kind="work.do")]
    targets += [Target(definition=f"d{n}") if n % 2 else Target(kind=f"k{n}") for n in range(40)]
    ids = [(await store.pause(target, reason="", paused_by=""))[0].pause_id for target in targets]
    loads = await store.loads(ids)
    assert [loads[each].in_flight for each in ids] == [200, 1, 200] + [0] * 40
    plan = await explain(world.raw, "pause_load", f"array{ids}, 1000", mode=mode)
    (leases,) = [node for node in nodes(plan) if node.get("Relation Name") == "lease"]
    (runs,) = [node for node in nodes(plan) if node.get("Relation Name") == "workflow_run"]
    assert (leases["Actual Loops"], leases["Actual Rows"], runs["Actual Loops"]) == (1, 201, 3)
