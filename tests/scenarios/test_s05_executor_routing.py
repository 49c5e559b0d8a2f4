"""S05: who may run what, held against an oracle that knows nothing of the product's own rule."""

import asyncio
import contextlib
import itertools
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rara.v1 import dispatch_pb2, workflow_pb2
from rara_executor.app import Executor
from rara_testing.job_events import accepted, running, succeeded
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor, capability
from rara_testing.scripted_scheduler import ScriptedScheduler, Session, Terms, job
from support import running_executor
from support.routing_oracle import TAKES, Has, Want, runs_as
from support.running_scheduler import (
    HEARTBEAT_S,
    SWEEP_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


WANTS = [
    *(Want("a", version) for version in TAKES),
    *(Want("b", version) for version in TAKES),
    *(Want("a", executor_kind=kind) for kind in ("python", "go", "rust")),
    *(
        Want("a", "1", "", labels)
        for labels in (
            (("gpu", "a100"),),
            (("gpu", "h100"),),
            (("gpu", ""),),
            (("gpu", "a100"), ("zone", "x")),
            (("zone", "x"),),
        )
    ),
    Want("b", "1.10.0", "go", (("zone", "x"),)),
    Want("A"),
    Want("nobody.has"),
]

EXECUTORS = [
    Has("plain", "python", {"a": ("1.4.2",)}),
    Has("several", "python", {"a": ("1.4.2", "1.10.0"), "b": ("1.4.2",)}, (("zone", "y"),)),
    Has("golang", "go", {"a": ("1.4.2",), "b": ("1.10.0", "10.0.0")}, (("zone", "x"), ("gpu", "a100"))),
    Has("candidate", "python", {"b": ("2.0.0-rc1",)}, (("gpu", ""),)),
    Has("leaves", "rust", {"a": ("1.4.2", "1.10.0"), "b": ("10.0.0",)}, (("gpu", "h100"),), draining=True),
]


@pytest.mark.case("S05", "ROUTE-1")
async def test_each_step_is_offered_to_a_compatible_executor_alone_and_as_the_right_version(
    world: RunningScheduler,
) -> None:
    steps = {}
    for number, want in enumerate(WANTS):
        fields: dict[str, Any] = {"kind": want.kind, "kind_version": want.version}
        fields |= {"executor_kind": want.executor_kind, "required_labels": dict(want.labels)}
        steps[f"s{number:02}"] = fields
    await world.define("matrix", steps, on_failure="CONTINUE")
    expected = {
        name: {has.name: version for has in EXECUTORS if (version := runs_as(want, has)) is not None}
        for name, want in zip(steps, WANTS, strict=True)
    }
    # The matrix has both sides of each of its dimensions, or it would show nothing.
    assert Counter(bool(can) for can in expected.values())[False] >= 5
    assert {who for can in expected.values() for who in can} == {"plain", "several", "golang", "candidate"}

    seen: dict[str, set[tuple[str, str]]] = defaultdict(set)

    async def serve(has: Has, executor: ScriptedExecutor) -> None:
        async for frame in executor.frames():
            for request in frame.jobs.jobs:
                seen[request.step_name].add((has.name, request.kind_version))
                assert request.executor_kind == has.executor_kind
                lease = request.lease
                await executor.events(accepted(lease), running(lease), succeeded(lease))

    rounds = 4  # so that more than one of the capable ones has its turn
    async with contextlib.AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        servers = []
        for has in EXECUTORS:
            executor = await stack.enter_async_context(
                world.executor(
                    [capability(kind, *versions) for kind, versions in has.kinds.items()],
                    credit=0,
                    executor_kind=has.executor_kind,
                    labels=dict(has.labels),
                )
            )
            if has.draining:
                await executor.drain()
            await executor.credit(1000)
            servers.append(tasks.create_task(serve(has, executor)))
        runs = [await world.start("matrix") for _ in range(rounds)]
        runnable = sum(bool(can) for can in expected.values())

        async def all_done() -> bool:
            return bool(await world.raw.fetchval("select count(*) from rara.result") == rounds * runnable)

        await until(all_done, f"{rounds} times {runnable} results")
        await world.raw.fetchval("select pg_sleep($1)", 2 * SWEEP_S)  # for what must not happen
        for name, can in expected.items():
            assert seen[name] <= set(can.items()), name
            assert bool(seen[name]) == bool(can), name
        for run_id in runs:
            rows = await world.raw.fetch(
                "select step_run_id::text, step_name, state, attempt, failures from rara.step_state"
                " where workflow_run_id = $1::uuid",
                run_id,
            )
            for row in rows:
                able = bool(expected[row["step_name"]])
                facts = (row["state"], row["attempt"], row["failures"])
                assert facts == (("succeeded", 1, 0) if able else ("pending", 0, 0)), row["step_name"]
            for row in rows:
                if not expected[row["step_name"]] and run_id == runs[0]:
                    request = workflow_pb2.ExplainStepRequest(step_run_id=row["step_run_id"])
                    answer = await world.workflows.ExplainStep(request, timeout=WAIT_S)
                    assert [o.code for o in answer.obstacles] == ["NO_CAPABLE_EXECUTOR"], row["step_name"]
        for server in servers:
            server.cancel()
    used = {who for offers in seen.values() for who, _ in offers}
    assert used == {"plain", "several", "golang", "candidate"}


@pytest.mark.case("S05")
async def test_no_kind_is_ever_given_beyond_its_own_limit_nor_an_executor_beyond_its_credit(
    world: RunningScheduler,
) -> None:
    limits = {"one": 1, "two": 2, "many": 6}
    credit = 6
    names = []
    for kind, version in itertools.product(limits, ("", "1")):  # two routes share the room of each kind
        names.append(f"{kind}{version}")
        await world.define(names[-1], {"s": {"kind": kind, "kind_version": version}})
    runs = [await world.start(name) for name in names for _ in range(6)]
    held: dict[int, str] = {}  # kind by lease token
    ending: dict[int, str] = {}
    most: Counter[str] = Counter()
    dice = random.Random(5)
    offer = [capability(kind, max_concurrency=0 if kind == "many" else limits[kind]) for kind in limits]
    async with (
        world.executor(offer, credit=credit, beat=False) as executor,
        beating(executor, lambda: [*held, *ending]),
        asyncio.timeout(WAIT_S),
    ):
        leases = {}
        ended = 0
        async for frame in executor.frames():
            for ack in frame.acks.acks:
                if ack.sequence == 3:
                    del ending[ack.lease_token]
                    ended += 1
                    await executor.credit(credit + ended)
            for request in frame.jobs.jobs:
                leases[request.lease.lease_token] = request.lease
                held[request.lease.lease_token] = request.kind
                await executor.events(accepted(request.lease), running(request.lease))
            now = Counter([*held.values(), *ending.values()])
            assert all(now[kind] <= limit for kind, limit in limits.items()), now
            assert now.total() <= credit
            most |= now
            if ended == len(runs):
                break
            if held and not frame.HasField("jobs"):
                token = dice.choice(sorted(held))
                ending[token] = held.pop(token)
                await executor.events(succeeded(leases[token]))
    assert most["one"] == 1
    assert most["two"] == 2
    assert most["many"] > 2
    for run_id in runs:
        assert await world.until_run(run_id, "succeeded") == "succeeded"
    assert (
        await world.raw.fetchval("select count(*) from rara.result where attempt <> 1 or failures > 0") == 0
    )


@pytest.mark.case("S05", "ROUTE-1")
@pytest.mark.parametrize("other", ["a", "b"])
async def test_executors_have_the_first_pick_in_turn(world: RunningScheduler, other: str) -> None:
    """Both can run it, and one perhaps something else as well: neither stands idle beside the other."""
    await world.define("one", {"a": {"kind": "a"}})
    await world.define("another", {"b": {"kind": other}})
    async with (
        world.executor([capability("a", "1.4.2")], credit=100) as plain,
        world.executor([capability("a", "1.4.2"), capability("b", "1.4.2")], credit=100) as several,
    ):
        taken = Counter[str]()
        for _ in range(8):
            run_id = await world.start("one")
            jobs = {asyncio.create_task(executor.expect_job()): executor for executor in (plain, several)}
            done, waiting = await asyncio.wait(jobs, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            (first,) = done
            lease = first.result().lease
            await jobs[first].events(accepted(lease), running(lease), succeeded(lease))
            await world.until_run(run_id, "succeeded")
            taken["plain" if jobs[first] is plain else "several"] += 1
    assert (
        min(taken["plain"], taken["several"]) >= 2
    )  # a step that arrives within a turn may go to the second


@pytest.mark.case("S05", "ROUTE-1")
async def test_a_session_that_drains_or_has_refused_is_offered_nothing_more(world: RunningScheduler) -> None:
    await world.define("a", {"s": {"kind": "a"}})
    await world.define("b", {"s": {"kind": "b"}})
    async with world.executor([capability("a", "1.0.0", "1.1.0"), "b"], credit=1) as executor:
        # It refuses the newest version it had offered, and is given the one below; then that too.
        first = await world.start("a")
        for turn, version in enumerate(("1.1.0", "1.0.0"), 1):
            request = await executor.expect_job()
            assert (request.kind_version, request.lease.attempt, request.failures) == (version, turn, 0)
            await executor.reject(request.lease, "UNSUPPORTED_KIND")
            await executor.credit(turn + 1)
        other = await world.start("b")  # what it has not refused still comes
        request = await executor.expect_job()
        assert request.kind == "b"
        await executor.events(accepted(request.lease), running(request.lease), succeeded(request.lease))
        await world.until_run(other, "succeeded")
        await executor.drain()
        await executor.credit(10)
        second = await world.start("b")
        await world.raw.fetchval("select pg_sleep($1)", 2 * SWEEP_S)
        assert len(executor.all("jobs")) == 3
        states = [await world.run_state(run_id) for run_id in (first, second)]
        assert states == ["pending", "pending"]
        async with world.executor(["a", "b"], credit=2) as next_one:
            for _ in range(2):
                batch = await next_one.expect("jobs")
                for request in batch.jobs:
                    assert request.failures == 0
                    await next_one.events(
                        accepted(request.lease), running(request.lease), succeeded(request.lease)
                    )
                if len(batch.jobs) == 2:
                    break
            await world.until_run(first, "succeeded")
            await world.until_run(second, "succeeded")
    rows = await world.raw.fetch("select attempt, failures from rara.result order by attempt")
    assert [tuple(row) for row in rows] == [(1, 0), (1, 0), (3, 0)]


# ------------------------------------------------------------ by force: a real executor refuses by itself


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler(Terms(heartbeat_s=HEARTBEAT_S)) as opened:
        yield opened


@pytest_asyncio.fixture
async def executor(scheduler: ScriptedScheduler, tmp_path: Path) -> AsyncIterator[Executor]:
    async with running_executor.running(
        scheduler.address, tmp_path, modules="support.case_handlers,support.handlers", slots=2
    ) as opened:
        yield opened


async def rejection(scheduler: ScriptedScheduler, session: Session, token: int) -> dispatch_pb2.JobRejection:
    def look() -> dispatch_pb2.JobRejection | None:
        for frame in session.of("rejections"):
            for one in frame.rejections:
                if one.lease.lease_token == token:
                    return one  # type: ignore[no-any-return]  # of() returns messages of any kind
        return None

    found = await scheduler.until(look, f"rejection of {token}")
    assert isinstance(found, dispatch_pb2.JobRejection)
    return found


@pytest.mark.case("S05", "ROUTE-1")
async def test_a_job_that_does_not_fit_is_refused_by_the_executor_itself_before_any_user_code(
    scheduler: ScriptedScheduler, executor: Executor, tmp_path: Path
) -> None:
    session = await scheduler.session()
    await session.frame("credit")
    given = {"folder": str(tmp_path)}
    wrong = {
        1: job(1, "case.unknown", input=given),
        2: job(2, "case.work", version="2.0.0", input=given),
        3: job(3, "case.work", version="1", input=given),  # part of a version is none
        4: job(4, "case.work", version="", input=given),
        5: job(5, "Case.Work", input=given),
        6: job(6, "", input=given),
        7: job(7, "case.work", input=given),
    }
    wrong[7].executor_kind = "go"
    session.send_jobs(*wrong.values())
    for token in wrong:
        refused = await rejection(scheduler, session, token)
        assert refused.code == "UNSUPPORTED_KIND"
        assert refused.lease == wrong[token].lease

    # Beyond its slots, and while it drains.
    gate = {"folder": str(tmp_path / "held"), "hold": 1}
    (tmp_path / "held").mkdir()
    session.send_jobs(*(job(token, "case.work", input=gate) for token in (11, 12)))
    for token in (11, 12):
        await scheduler.event(token, "progress")
    session.send_jobs(job(13, "case.work", input=given))
    assert (await rejection(scheduler, session, 13)).code == "NO_CAPACITY"
    executor.stop()
    await session.frame("drain")
    session.send_jobs(job(14, "case.work", input=given))
    assert (await rejection(scheduler, session, 14)).code == "EXECUTOR_SHUTDOWN"
    (tmp_path / "held" / "gate-1").touch()
    for token in (11, 12):
        await scheduler.event(token, "succeeded")
    # No user code has run for what was refused, and nothing was reported about it.
    assert not (tmp_path / "starts").exists()
    assert set(scheduler.stored) == {11, 12}


@pytest.mark.case("S05")
@pytest.mark.parametrize("code", ["UNSUPPORTED_KIND", "NO_CAPACITY", "EXECUTOR_SHUTDOWN"])
async def test_each_refusal_is_free_and_the_step_succeeds_elsewhere(
    world: RunningScheduler, code: str
) -> None:
    await world.define("one", {"a": {"kind": "a", "retry": {"max_attempts": 1}}})  # nothing may be spent
    run_id = await world.start("one")
    async with world.executor(["a"], credit=1) as wrong:
        request = await wrong.expect_job()
        await wrong.reject(request.lease, code)
        row = await world.until_step(request.lease.step_run_id, "retryable_failed")
        assert (row["reason"], row["attempt"], row["failures"]) == (code, 1, 0)
        async with world.executor(["a"], credit=1) as right:
            again = await right.expect_job()
            assert (again.lease.attempt, again.failures) == (2, 0)
            assert again.idempotency_key == request.idempotency_key
            await right.events(accepted(again.lease), running(again.lease), succeeded(again.lease))
            await world.until_run(run_id, "succeeded")
    (row,) = await world.raw.fetch("select attempt, failures from rara.result")
    assert tuple(row) == (2, 0)
    ended = await world.raw.fetch("select reason, spent, started_at from rara.step_attempt")
    assert [tuple(r) for r in ended] == [(code, False, None)]
