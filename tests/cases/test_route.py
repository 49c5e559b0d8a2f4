"""Who is offered a step, what a refusal costs, and that the head of one queue does not block another."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import job_pb2, workflow_pb2
from rara_scheduler.store.queries import query
from rara_scheduler.store.sweeps import BEFORE_ALL
from rara_testing.auto_executor import AutoExecutor, AutoJob, Handler
from rara_testing.job_events import accepted, running, succeeded
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor, capability
from support.running_scheduler import (
    HEARTBEAT_S,
    SWEEP_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)
from support.store_world import new_id, store_world

SLACK_S = 1.0


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def step_ids(world: RunningScheduler, run_id: str) -> dict[str, str]:
    rows = await world.raw.fetch(
        "select step_name, step_run_id::text from rara.step_run where workflow_run_id = $1::uuid", run_id
    )
    return {row["step_name"]: row["step_run_id"] for row in rows}


async def obstacles(world: RunningScheduler, step_run_id: str) -> list[str]:
    request = workflow_pb2.ExplainStepRequest(step_run_id=step_run_id)
    answer = await world.workflows.ExplainStep(request, timeout=WAIT_S)
    return [obstacle.code for obstacle in answer.obstacles]


# ------------------------------------------------------------ ROUTE-1


@pytest.mark.case("ROUTE-1", "S05")
async def test_only_the_capable_run_a_step_and_a_refusal_costs_it_nothing(world: RunningScheduler) -> None:
    """Kinds a, b@1, b@2 and c; executors of {a}, of {a, b@2}, and one that claims b@2 and does not know it."""
    deadline_s = 4.0
    for name, kind, version in (("a", "a", ""), ("b1", "b", "1"), ("b2", "b", "2"), ("c", "c", "")):
        await world.define(name, {"s": {"kind": kind, "kind_version": version}})
    starts: dict[str, list[str]] = {"only a": [], "a and b2": []}

    def handler(executor: str) -> Handler:
        def run(job: AutoJob) -> object:
            starts[executor].append(f"{job.request.kind}@{job.request.kind_version}")
            return {}

        return run

    runs = {
        name: await world.start(name, run_timeout={"seconds": int(deadline_s)}) for name in ("b1", "b2", "c")
    }
    steps = {name: (await step_ids(world, run_id))["s"] for name, run_id in runs.items()}
    async with AutoExecutor(world.address, {"a": handler("only a")}):
        runs["a"] = await world.start("a")
        await world.until_run(runs["a"], "succeeded")
        # By force: an executor that was sent it all the same, and does not know it.
        async with world.executor([capability("b", "2.0.0")]) as ignorant:
            forced = await ignorant.expect_job()
            assert forced.lease.step_run_id == steps["b2"]
            await ignorant.reject(forced.lease, "UNSUPPORTED_KIND", "what is b?")
            row = await world.until_step(steps["b2"], "retryable_failed")
            assert (row["reason"], row["attempt"], row["failures"]) == ("UNSUPPORTED_KIND", 1, 0)
            await ignorant.credit(5)  # it is not asked again on this session
            await world.raw.fetchval("select pg_sleep($1)", 2 * SWEEP_S)
            assert not ignorant.all("jobs")[1:]
            row = await world.step(steps["b2"])
            assert (row["state"], row["attempt"]) == ("retryable_failed", 1)
        for name in ("b1", "c"):
            assert await obstacles(world, steps[name]) == ["NO_CAPABLE_EXECUTOR"]
        late = AutoExecutor(
            world.address, {"a": handler("a and b2"), "b": handler("a and b2")}, versions=("2.0.1",)
        )
        async with late:
            await world.until_run(runs["b2"], "succeeded")
            row = await world.step(steps["b2"])
            assert (row["state"], row["attempt"], row["failures"]) == ("succeeded", 2, 0)
            for name in ("b1", "c"):
                await world.until_run(runs[name], "failed")
                row = await world.step(steps[name])
                assert (row["state"], row["reason"]) == ("cancelled", "DEADLINE_EXCEEDED")
                assert (row["attempt"], row["failures"]) == (0, 0)
    assert starts["only a"] + starts["a and b2"] in (["a@1.0.0", "b@2.0.1"], ["b@2.0.1", "a@2.0.1"])


@pytest.mark.case("ROUTE-1")
async def test_a_rolling_deploy_hands_each_version_to_those_who_have_it(world: RunningScheduler) -> None:
    """Executors of 1.x are replaced by 2.x one by one; steps of both are asked for all the while."""
    wanted = {"any": "", "one": "1", "two": "2", "exact": "2.1.0"}
    for name, version in wanted.items():
        await world.define(name, {"s": {"kind": "b", "kind_version": version}})
    ran: list[tuple[str, str]] = []

    def run(job: AutoJob) -> object:
        ran.append((job.request.definition, job.request.kind_version))
        return {}

    def executor(version: str) -> AutoExecutor:
        return AutoExecutor(world.address, {"b": run}, versions=(version,))

    runs: list[str] = []
    async with contextlib.AsyncExitStack() as new:
        async with contextlib.AsyncExitStack() as old:
            for version in ("1.9.3", "1.10.0"):
                await old.enter_async_context(executor(version))
            runs += [await world.start(name) for name in wanted for _ in range(3)]
            for version in ("2.0.0", "2.1.0"):
                await new.enter_async_context(executor(version))
            runs += [await world.start(name) for name in wanted for _ in range(3)]
            for run_id in runs:
                assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"

        async def old_ones_gone() -> bool:
            return bool(
                await world.raw.fetchval("select count(*) = 2 from rara.executor where ended_at is null")
            )

        await until(old_ones_gone, "end of the old sessions")
        # What asks for them waits, and nothing else does.
        left = await world.start("one")
        for name in ("any", "two", "exact"):
            await world.until_run(await world.start(name), "succeeded")
        assert await world.run_state(left) == "pending"
        (step,) = (await step_ids(world, left)).values()
        assert await obstacles(world, step) == ["NO_CAPABLE_EXECUTOR"]
    for definition, version in ran:
        assert version.startswith(wanted[definition])
        assert not (definition == "exact" and version != "2.1.0")
    assert len(ran) == 6 * len(wanted) + 3
    # A grant may meet a session in the moment of its end: that is free.
    assert await world.raw.fetchval("select count(*) from rara.result where failures > 0") == 0


@pytest.mark.case("ROUTE-1")
@pytest.mark.parametrize("code", ["NO_CAPACITY", "EXECUTOR_SHUTDOWN"])
async def test_an_executor_that_refuses_again_and_again_ends_at_the_cap_of_free_endings(
    world: RunningScheduler, code: str
) -> None:
    await world.define("one", {"a": {"retry": {"max_attempts": 2}}})
    run_id = await world.start("one")
    cap = 3 * 2 + 5
    async with world.executor(credit=1) as executor:
        for turn in range(1, cap + 1):
            job = await executor.expect_job()
            assert (job.lease.attempt, job.failures) == (turn, 0)
            await executor.reject(job.lease, code)
            await executor.credit(turn + 1)
        assert await world.until_run(run_id, "failed") == "failed"
    (row,) = await world.raw.fetch("select state, reason, attempt, failures, error from rara.result")
    assert tuple(row)[:4] == ("terminal_failed", "ATTEMPTS_EXHAUSTED", cap, 0)
    assert f'"{code}"' in row["error"]  # the last cause


@pytest.mark.case("ROUTE-1")
async def test_a_step_that_all_who_offered_its_kind_have_refused_is_one_that_nobody_can_run(
    world: RunningScheduler,
) -> None:
    """What an executor refused it offers no more: `explain` says so, and a schedule_timeout counts."""
    await world.define("one", {"a": {"schedule_timeout": {"seconds": 1}}})
    run_id = await world.start("one")
    (step,) = (await step_ids(world, run_id)).values()
    async with world.executor(credit=5) as executor:
        job = await executor.expect_job()
        await executor.reject(job.lease, "UNSUPPORTED_KIND")
        await world.until_step(step, "retryable_failed")

        async def said() -> bool:
            return await obstacles(world, step) == ["NO_CAPABLE_EXECUTOR"]

        await until(said, "the word that nobody can run it", 2 * HEARTBEAT_S + SLACK_S)
        assert await world.until_run(run_id, "failed") == "failed"
        assert await world.steps(run_id) == {"a": ("cancelled", "NO_CAPABLE_EXECUTOR")}
        assert len(executor.all("jobs")) == 1


# ------------------------------------------------------------ ROUTE-2

BACKLOG = 20_000


async def fill(raw: "asyncpg.Connection[asyncpg.Record]", definition: str, count: int) -> None:
    """So many ready steps of a definition of one step `a`, whose run is the template for all."""
    await raw.execute(
        """with made as (
               insert into rara.workflow_run (workflow_run_id, definition, definition_version, steps_total, on_failure)
               select gen_random_uuid(), $1, 1, 1, 'fail_fast' from generate_series(1, $2::int)
               returning workflow_run_id
           ), steps as (
               insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)
               select gen_random_uuid(), m.workflow_run_id, 'a', t.route_id, m.workflow_run_id || '/a'
                 from made m
                cross join (select route_id from rara.step_run s join rara.workflow_run r using (workflow_run_id)
                             where r.definition = $1 limit 1) t
               returning step_run_id, workflow_run_id, route_id
           )
           insert into rara.ready (route_id, available_at, step_run_id, workflow_run_id, released_at, revision)
           select route_id, now() - interval '1 hour' + row_number() over () * interval '1 ms', step_run_id,
                  workflow_run_id, now(), 1
             from steps""",
        definition,
        count,
    )
    await raw.execute("analyze rara.ready")


@pytest.mark.case("ROUTE-2")
async def test_a_backlog_of_one_kind_keeps_no_other_waiting_and_is_served_oldest_first(
    database_url: str, tmp_path: Path
) -> None:
    # Its history is made by hand, and long: it is not held against every rule.
    async with running_scheduler(database_url, tmp_path, check_history=False) as world:
        await block_one_kind(world)


async def block_one_kind(world: RunningScheduler) -> None:
    await world.define("blocked", {"a": {"kind": "blocked"}})
    await world.define("free", {"a": {"kind": "free"}})
    await world.start("blocked")
    await fill(world.raw, "blocked", BACKLOG - 1)
    rows = await world.raw.fetch(
        "select step_run_id::text from rara.ready order by available_at, step_run_id limit 40"
    )
    oldest = [row["step_run_id"] for row in rows]
    async with world.executor(["blocked"], credit=1, beat=False) as full:
        tokens: list[int] = []
        async with beating(full, lambda: tokens):
            held = await full.expect_job()
            await full.events(accepted(held.lease), running(held.lease))
            tokens.append(held.lease.lease_token)
            async with AutoExecutor(world.address, {"free": lambda _: {}}, slots=10) as free:
                runs = [await world.start("free") for _ in range(10)]
                asked_at = time.monotonic()
                await free.wait_for(10)
                assert time.monotonic() - asked_at < 2 * SWEEP_S + SLACK_S
                assert set(free.outcomes.values()) == {"succeeded"}
                for run_id in runs:
                    await world.until_run(run_id, "succeeded")
            served = [held.lease.step_run_id]
            for turn in range(1, 30):
                tokens.clear()
                await full.events(succeeded(held.lease))
                await full.credit(turn + 1)
                held = await full.expect_job()
                tokens.append(held.lease.lease_token)
                served.append(held.lease.step_run_id)
                await full.events(accepted(held.lease), running(held.lease))
            assert served == oldest[:30]
            left = await world.raw.fetchval("select count(*) from rara.ready")
            assert left == BACKLOG - 30


def work_s(server_pid: int) -> float:
    """Seconds of processor time that a server process has had; where the system does not tell, those of the clock."""
    try:
        return int(Path(f"/proc/{server_pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return time.perf_counter()


async def lease_p99_s(database_url: str, clock: Callable[[int], float]) -> float:
    """What the statement takes over the backlog: in turn for one kind alone, and for both."""
    async with store_world(database_url) as world:
        for name in ("blocked", "free"):
            await world.define(name, {"a": {"kind": name}})
            await world.start(name)
        await fill(world.raw, "blocked", BACKLOG - 1)
        routes = {route.kind: route.route_id for route in await world.definitions.routes_after(0)}
        await fill(world.raw, "free", 1000)
        executor_id = new_id()
        server_pid = world.raw.get_server_pid()
        times = []
        for turn in range(200):
            kinds, slots = (["free"], 1) if turn % 2 else (["blocked", "free"], 5)
            probes = [(routes[kind], slots, *BEFORE_ALL) for kind in kinds]
            columns = [list(column) for column in zip(*probes, strict=True)]
            began = clock(server_pid)
            rows = await world.raw.fetch(
                query("grant_leases"), *columns, slots, [executor_id] * slots, 30.0, ["1.0.0"] * len(kinds)
            )
            times.append(clock(server_pid) - began)
            assert [row["route_id"] for row in rows] == [
                routes[kinds[0]]
            ] * slots  # the oldest are of the first
        return sorted(times)[197]


@pytest.mark.case("ROUTE-2")
async def test_the_lease_statement_is_fast_over_a_backlog_that_it_may_not_touch(database_url: str) -> None:
    """Below 20 ms of work: how long the server waits for a processor is other tests' doing."""
    assert await lease_p99_s(database_url, work_s) < 0.020


@pytest.mark.soak
@pytest.mark.case("ROUTE-2")
async def test_the_lease_statement_takes_less_than_twenty_milliseconds_by_the_clock(
    database_url: str,
) -> None:
    assert await lease_p99_s(database_url, lambda _: time.perf_counter()) < 0.020


@pytest.mark.case("ROUTE-2")
async def test_a_kind_at_its_own_limit_keeps_the_others_of_its_executor_going(
    world: RunningScheduler,
) -> None:
    """The same block inside one executor: slots are free, and one kind has none."""
    for name in ("narrow", "wide"):
        await world.define(name, {"a": {"kind": name}})
    narrow = [await world.start("narrow") for _ in range(50)]
    wide = [await world.start("wide") for _ in range(10)]
    offer = [capability("narrow", max_concurrency=1), capability("wide")]
    async with world.executor(offer, credit=11, beat=False) as executor:
        tokens: list[int] = []
        async with beating(executor, lambda: tokens):
            jobs = await jobs_of(executor, 11)
            assert sorted(job.kind for job in jobs) == ["narrow"] + ["wide"] * 10
            tokens += [job.lease.lease_token for job in jobs]
            for job in jobs:
                events = [accepted(job.lease), running(job.lease)]
                await executor.events(*events, *([succeeded(job.lease)] if job.kind == "wide" else []))
            for run_id in wide:
                await world.until_run(run_id, "succeeded")
            states = [await world.run_state(run_id) for run_id in narrow]
            assert states == ["running"] + ["pending"] * 49


async def jobs_of(executor: ScriptedExecutor, count: int) -> list[job_pb2.JobRequest]:
    jobs: list[job_pb2.JobRequest] = []
    while len(jobs) < count:
        jobs += (await executor.expect("jobs")).jobs
    return jobs
