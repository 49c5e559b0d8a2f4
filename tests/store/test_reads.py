"""What is shown of runs, steps, attempts and executors, against rows that the engine really wrote."""

import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import pytest_asyncio
from rara.v1 import job_pb2
from rara_scheduler.domain.attempt import ArtifactFacts, Checkpoint, EventType, Report
from rara_scheduler.domain.errors import Code, Fault, StepError
from rara_scheduler.domain.run import RunState
from rara_scheduler.domain.start_command import RunArtifact
from rara_scheduler.domain.step import StepState
from rara_scheduler.domain.views import (
    ExecutorFilter,
    ExecutorState,
    HandlerView,
    PayloadView,
    RunFilter,
    StepFilter,
    StepView,
)
from rara_scheduler.store.explain import Explainer
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.reads import Reads, lean_bytes
from rara_scheduler.store.retry_run import RunRetrier
from support.store_world import (
    StoreWorld,
    accepted,
    failed,
    inline_artifact,
    new_id,
    running,
    store_world,
    succeeded,
)

PAIR: dict[str, dict[str, Any]] = {"a": {}, "b": {"depends_on": ["a"]}}
LARGE = json.dumps("x" * 5000).encode()


@dataclass
class ReadWorld:
    store: StoreWorld
    reads: Reads
    explainer: Explainer

    async def step(self, grant: Grant) -> StepView:
        return await self.reads.get_step(grant.step_run_id)

    async def runs(self, limit: int = 100, **wanted: Any) -> list[str]:
        found = await self.reads.list_runs(RunFilter(**wanted), after=None, limit=limit)
        return [run.workflow_run_id for run in found]

    async def steps(self, limit: int = 100, below: str | None = None, **wanted: Any) -> list[str]:
        found = await self.reads.list_steps(StepFilter(**wanted), below=below, limit=limit)
        return [step.step_name for step in found]

    async def executor(self, name: str = "exec-1", **columns: Any) -> str:
        executor_id = new_id()
        values: dict[str, Any] = {
            "executor_id": executor_id,
            "executor_name": name,
            "executor_kind": "python",
            "sdk": "rara-python/0",
            "capabilities": json.dumps(
                [{"kind": "work.do", "versions": ["1.0"], "max_concurrency": 2, "input_schema_sha256": "ab"}]
            ),
            "labels": '{"zone": "eu"}',
            "session_id": new_id(),
            "scheduler_id": new_id(),
            "free_credit": 3,
        } | columns
        names = ", ".join(values)
        places = ", ".join(f"${n}" for n in range(1, len(values) + 1))
        await self.store.raw.execute(
            f"insert into rara.executor ({names}) values ({places})", *values.values()
        )
        return executor_id


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[ReadWorld]:
    async with store_world(database_url) as opened:
        reads = Reads(opened.database, opened.definitions, silent_after_s=10.0)
        yield ReadWorld(opened, reads, Explainer(reads, accept_timeout_s=10.0, silent_after_s=10.0))


def progress_event(sequence: int, message: str, checkpoint: bytes = b"") -> Report:
    event = job_pb2.ProgressEvent(sequence=sequence)
    event.progress.message = message
    if checkpoint:
        event.progress.checkpoint.data = checkpoint
    kept = Checkpoint(checkpoint) if checkpoint else None
    return Report(sequence, EventType.PROGRESS, event.SerializeToString(), checkpoint=kept)


async def refused(code: Code, awaitable: Any) -> None:
    with pytest.raises(Fault) as caught:
        await awaitable
    assert caught.value.code is code


# ---------------------------------------------------------------- runs


async def test_a_run_is_shown_from_start_to_end(world: ReadWorld) -> None:
    store = world.store
    await store.define("pair", PAIR, run_timeout={"seconds": 60})
    artifact = RunArtifact(
        "raw", hashlib.sha256(b"hi").hexdigest(), 2, "text/plain", "dataset", b"hi", b'{"n":1}'
    )
    run_id = await store.start("pair", input=LARGE, artifacts=(artifact,), labels={"who": "me"})
    run = await world.reads.get_run(run_id)
    assert (run.workflow_run_id, run.definition, run.definition_version) == (run_id, "pair", 1)
    assert (run.state, run.revision, run.step_counts) == (RunState.PENDING, 1, {"pending": 2})
    assert (run.input, run.labels) == (PayloadView(LARGE, len(LARGE)), {"who": "me"})
    (shown,) = run.input_artifacts
    assert (shown.name, shown.inline, shown.metadata) == ("raw", b"hi", PayloadView(b'{"n":1}', 7))
    assert run.deadline == run.created_at + timedelta(seconds=60)
    assert (run.started_at, run.ended_at, run.error, run.retry_of_workflow_run_id) == (None, None, None, None)
    grant = await store.lease_one()
    assert (await world.reads.get_run(run_id)).step_counts == {"leased": 1, "pending": 1}
    await store.report(grant, accepted(1), running(2))
    run = await world.reads.get_run(run_id)
    assert (run.state, run.step_counts) == (RunState.RUNNING, {"running": 1, "pending": 1})
    assert run.started_at is not None
    await store.report(grant, failed(3))
    assert (await world.reads.get_run(run_id)).step_counts == {"retryable_failed": 1, "pending": 1}
    await store.make_due()
    assert (await world.reads.get_run(run_id)).step_counts == {"retryable_failed": 1, "pending": 1}
    await store.run_to_success(await store.lease_one())
    second = await store.lease_one()
    await store.report(second, accepted(1), running(2), failed(3, "BAD_DATA", retryable=False))
    run = await world.reads.get_run(run_id)
    assert (run.state, run.step_counts) == (RunState.FAILED, {"succeeded": 1, "terminal_failed": 1})
    assert run.failed_step_run_id == second.step_run_id
    assert run.error == StepError("BAD_DATA", "it broke", retryable=False)
    assert run.ended_at is not None
    assert run.revision > 1


async def test_a_retried_run_counts_and_shows_the_steps_that_it_reuses(world: ReadWorld) -> None:
    store = world.store
    await store.define("pair", PAIR)
    source = await store.start("pair")
    await store.run_to_success(await store.lease_one())
    await store.report(await store.lease_one(), accepted(1), running(2), failed(3, retryable=False))
    retrier = RunRetrier(store.database, store.definitions, on_ready=lambda: None)
    retry, _ = await retrier.retry(source)
    run, steps = await world.reads.get_run_with_steps(retry)
    assert (run.step_counts, run.retry_of_workflow_run_id) == ({"succeeded": 1, "pending": 1}, source)
    assert [(step.step_name, step.state, step.workflow_run_id) for step in steps] == [
        ("a", StepState.SUCCEEDED, source),
        ("b", StepState.PENDING, retry),
    ]
    assert await world.steps(workflow_run_id=retry) == ["b", "a"]
    await store.run_to_success(await store.lease_one())
    assert (await world.reads.get_run(retry)).step_counts == {"succeeded": 2}


async def test_a_run_that_its_deadline_ended_says_so_without_an_error_of_a_handler(world: ReadWorld) -> None:
    store = world.store
    await store.define("one", {"a": {}})
    run_id = await store.start("one")
    await store.raw.execute(
        "with gone as (delete from rara.ready returning step_run_id, workflow_run_id)"
        " insert into rara.result (step_run_id, workflow_run_id, state, reason, revision, attempt, failures, ended_at)"
        " select step_run_id, workflow_run_id, 'cancelled', 'DEADLINE_EXCEEDED', 2, 0, 0, now() from gone"
    )
    await store.raw.execute(
        "update rara.workflow_run set state = 'failed', steps_failed = 1, ended_at = now(), revision = 2,"
        " failed_step_run_id = (select step_run_id from rara.step_run)"
    )
    run = await world.reads.get_run(run_id)
    assert run.error == StepError("DEADLINE_EXCEEDED")
    assert run.step_counts == {"cancelled": 1}


async def test_runs_are_listed_newest_first_by_page_and_by_filter(world: ReadWorld) -> None:
    store = world.store
    for name in ("x", "y"):
        await store.define(name, {"a": {}})
    ids = [
        await store.start("x" if n % 2 else "y", labels={"n": str(n), "even": str(n % 2 == 0)}, input=LARGE)
        for n in range(6)
    ]
    newest = ids[::-1]
    assert await world.runs() == newest
    await store.raw.execute("update rara.workflow_run set created_at = '2026-05-01'")  # ties go by id
    pages: list[str] = []
    after: tuple[datetime, str] | None = None
    while page := await world.reads.list_runs(RunFilter(), after=after, limit=4):
        pages.extend(run.workflow_run_id for run in page)
        after = page[-1].created_at, page[-1].workflow_run_id
        assert all(run.input == PayloadView(None, len(LARGE)) for run in page)
    assert pages == newest
    assert await world.runs(definition="x") == newest[0::2]
    assert await world.runs(labels={"even": "True"}) == newest[1::2]
    assert await world.runs(labels={"even": "True", "n": "4"}) == [ids[4]]
    assert await world.runs(labels={"n": "7"}) == []
    grant = await store.lease_one()
    await store.run_to_success(grant)
    assert await world.runs(states=(RunState.SUCCEEDED,)) == [grant.workflow_run_id]
    assert len(await world.runs(states=(RunState.SUCCEEDED, RunState.PENDING))) == 6
    day = datetime(2026, 5, 1, tzinfo=UTC)
    assert len(await world.runs(created_from=day)) == 6
    assert await world.runs(created_before=day) == []


async def test_what_is_unknown_is_not_found(world: ReadWorld) -> None:
    unknown = new_id()
    await refused(Code.RUN_NOT_FOUND, world.reads.get_run(unknown))
    await refused(Code.RUN_NOT_FOUND, world.reads.get_run_with_steps(unknown))
    await refused(Code.RUN_NOT_FOUND, world.reads.list_steps(StepFilter(unknown), below=None, limit=1))
    await refused(Code.STEP_NOT_FOUND, world.reads.get_step(unknown))
    await refused(Code.STEP_NOT_FOUND, world.reads.get_step_with_attempts(unknown))
    await refused(Code.STEP_NOT_FOUND, world.explainer.obstacles(unknown))
    await refused(Code.EXECUTOR_NOT_FOUND, world.reads.get_executor(unknown))


# ---------------------------------------------------------------- steps


async def test_a_step_is_shown_through_two_attempts(world: ReadWorld) -> None:
    store = world.store
    executor_id = await world.executor()
    await store.define(
        "one", {"a": {"kind_version": "1", "retry": {"max_attempts": 7}, "timeout": {"seconds": 60}}}
    )
    await store.start("one")
    (first,) = await store.lease(1, executor_id)
    step = await world.step(first)
    assert (step.state, step.attempt, step.failures, step.max_attempts) == (StepState.LEASED, 1, 0, 7)
    assert (step.kind, step.kind_version, step.executor_kind) == ("work.do", "1", "")
    assert (step.executor_id, step.executor_name) == (executor_id, "exec-1")
    assert step.lease_expires_at is not None
    assert step.deadline is not None
    assert (step.progress, step.output, step.manifest, step.error, step.cancel) == (None,) * 5
    await store.report(
        first, accepted(1), running(2), progress_event(3, "a third"), progress_event(4, "half")
    )
    step = await world.step(first)
    assert (step.state, step.last_sequence) == (StepState.RUNNING, 4)
    assert job_pb2.ProgressEvent.FromString(step.progress or b"").progress.message == "half"
    await store.report(first, failed(5, "FLAKY_THING"))
    step = await world.step(first)
    assert (step.state, step.reason, step.attempt, step.failures) == (
        StepState.RETRYABLE_FAILED, "FLAKY_THING", 1, 1,
    )  # fmt: skip
    assert step.error == StepError("FLAKY_THING", "it broke")
    assert (step.executor_name, step.last_sequence) == ("exec-1", 5)  # of the last lease
    assert step.available_at is not None
    assert job_pb2.ProgressEvent.FromString(step.progress or b"").progress.message == "half"
    await store.make_due()
    (second,) = await store.lease(1)
    step = await world.step(second)
    assert (step.state, step.attempt, step.progress) == (StepState.LEASED, 2, None)
    assert step.error == StepError("FLAKY_THING", "it broke")  # the last one
    made = inline_artifact("index", b"bytes")
    facts = ArtifactFacts(
        **{**{name: getattr(made, name) for name in ArtifactFacts.__slots__}, "metadata": LARGE}
    )
    await store.report(
        second, accepted(1), running(2), progress_event(3, "done", LARGE), succeeded(4, LARGE, [facts])
    )
    step = await world.step(second)
    assert (step.state, step.reason, step.attempt, step.failures, step.error) == (
        StepState.SUCCEEDED, "", 2, 1, None,
    )  # fmt: skip
    assert step.output == PayloadView(LARGE, len(LARGE))
    assert step.manifest is not None
    (artifact,) = step.manifest
    assert (artifact.name, artifact.inline, artifact.metadata) == (
        "index",
        b"bytes",
        PayloadView(LARGE, len(LARGE)),
    )
    (lean,) = await world.reads.list_steps(StepFilter(), below=None, limit=10)
    assert lean.output == PayloadView(None, len(LARGE))
    assert lean.manifest is not None
    assert (lean.manifest[0].inline, lean.manifest[0].metadata) == (None, PayloadView(None, len(LARGE)))
    _, attempts = await world.reads.get_step_with_attempts(second.step_run_id)
    assert [(each.attempt, each.reason, each.spent, each.lease_token) for each in attempts] == [
        (1, "FLAKY_THING", True, first.lease_token),
        (2, "", False, second.lease_token),
    ]
    assert attempts[0].error == StepError("FLAKY_THING", "it broke")
    assert (attempts[0].last_sequence, attempts[1].last_sequence) == (5, 4)
    assert all(each.ended_at is not None and each.started_at is not None for each in attempts)


async def test_each_attempt_tells_which_code_ran_it(world: ReadWorld) -> None:
    store = world.store
    in_python = HandlerView("1.0.0", "python", "rara-python/0")
    in_go = HandlerView("1.1.0", "go", "rara-go/2")
    await store.define("one", {"a": {"kind_version": "1"}})
    run_id = await store.start("one")
    (step,) = await world.reads.list_steps(StepFilter(run_id), below=None, limit=1)
    assert step.handler is None  # nothing ran yet
    (first,) = await store.lease(1, await world.executor(), "1.0.0")
    assert (await world.step(first)).handler == in_python
    await store.report(first, accepted(1), running(2), failed(3))
    assert (await world.step(first)).handler == in_python  # it waits: of the last attempt
    await store.make_due()
    other = await world.executor("exec-2", executor_kind="go", sdk="rara-go/2")
    (second,) = await store.lease(1, other, "1.1.0")
    step = await world.step(second)
    assert (step.kind_version, step.handler) == ("1", in_go)  # what is asked for, and what runs
    _, attempts = await world.reads.get_step_with_attempts(second.step_run_id)
    assert [each.handler for each in attempts] == [in_python, in_go]
    await store.report(second, accepted(1), running(2), succeeded(3))
    (lean,) = await world.reads.list_steps(StepFilter(run_id), below=None, limit=1)
    assert lean.handler == in_go
    _, attempts = await world.reads.get_step_with_attempts(second.step_run_id)
    assert [each.handler for each in attempts] == [in_python, in_go]


async def test_an_attempt_from_before_versions_were_recorded_has_an_empty_one(world: ReadWorld) -> None:
    store = world.store
    await store.define("one", {"a": {"retry": {"max_attempts": 1}}})
    await store.start("one")
    (grant,) = await store.lease(1, await world.executor())
    await store.raw.execute("update rara.lease set kind_version = null")
    assert (await world.step(grant)).handler == HandlerView("", "python", "rara-python/0")
    await store.report(grant, accepted(1), running(2), failed(3))
    assert (await world.step(grant)).handler == HandlerView("", "python", "rara-python/0")


async def test_an_open_attempt_is_among_the_attempts_and_a_failed_one_keeps_its_artifacts(
    world: ReadWorld,
) -> None:
    store = world.store
    await store.define("one", {"a": {}})
    await store.start("one")
    first = await store.lease_one()
    log = inline_artifact("log", b"trace")
    report = Report(
        3, EventType.FAILED, b"f", error=StepError("X_Y", "no", details='{"k":1}'), partial=(log,)
    )
    await store.report(first, accepted(1), running(2), report)
    await store.make_due()
    await store.lease_one()
    step, attempts = await world.reads.get_step_with_attempts(first.step_run_id)
    assert [(each.attempt, each.reason) for each in attempts] == [(1, "X_Y"), (2, "")]
    assert (attempts[1].ended_at, attempts[1].accepted_at) == (None, None)
    assert [artifact.name for artifact in attempts[0].error_artifacts] == ["log"]
    assert attempts[0].error is not None
    assert attempts[0].error.details == '{"k":1}'
    assert step.manifest is None


async def test_the_facts_of_a_cancel_are_shown(world: ReadWorld) -> None:
    store = world.store
    await store.define("one", {"a": {}})
    run_id = await store.start("one")
    grant = await store.lease_one()
    await store.report(grant, accepted(1), running(2))
    await store.cancel(run_id)
    step = await world.step(grant)
    assert step.cancel is not None
    assert (step.state, step.cancel.reason, step.cancel.confirmed_at) == (
        StepState.RUNNING,
        "CANCELLED",
        None,
    )
    assert (await world.reads.get_run(run_id)).state is RunState.CANCELLING
    obstacles = await world.explainer.obstacles(grant.step_run_id)
    assert [obstacle.code for obstacle in obstacles] == ["CANCEL_UNCONFIRMED"]
    assert obstacles[0].until == step.cancel.requested_at + timedelta(seconds=5)


async def test_steps_are_listed_by_run_state_and_kind(world: ReadWorld) -> None:
    store = world.store
    await store.define(
        "d", {"a": {}, "b": {"kind": "work.other"}, "c": {"depends_on": ["a"]}, "e": {}, "f": {}}
    )
    run_id = await store.start("d")
    grants = {grant.step_name: grant for grant in await store.lease()}
    await store.run_to_success(grants["a"])
    await store.report(grants["b"], accepted(1), running(2))
    await store.report(grants["e"], accepted(1), running(2), failed(3))
    everything = ["f", "e", "c", "b", "a"]
    filters: list[dict[str, Any]] = [{}, {"workflow_run_id": run_id}]
    for run in filters:
        assert await world.steps(**run) == everything
        assert await world.steps(limit=2, **run) == ["f", "e"]
        below = grants["e"].step_run_id
        assert await world.steps(below=below, **run) == ["c", "b", "a"]
        assert await world.steps(kind="work.other", **run) == ["b"]
        assert await world.steps(kind="none", **run) == []
        assert await world.steps(states=(StepState.SUCCEEDED,), **run) == ["a"]
        assert await world.steps(states=(StepState.RUNNING, StepState.LEASED), **run) == ["f", "b"]
        assert await world.steps(states=(StepState.RETRYABLE_FAILED,), **run) == ["e"]
        assert await world.steps(states=(StepState.PENDING,), **run) == ["c"]
        assert await world.steps(states=tuple(StepState), below=below, **run) == ["c", "b", "a"]
        assert await world.steps(states=(StepState.RUNNING,), kind="work.do", **run) == []
        assert await world.steps(states=(StepState.CANCELLED,), **run) == []
    await store.make_due()
    assert await world.steps(states=(StepState.RETRYABLE_FAILED,)) == ["e"]
    assert await world.steps(states=(StepState.PENDING,)) == ["c"]


async def test_a_long_run_is_shown_with_its_first_thousand_steps_and_small_payloads(world: ReadWorld) -> None:
    store = world.store
    await store.define("wide", {f"s{n:04}": {} for n in range(1001)})
    run_id = await store.start("wide")
    for grant in await store.lease(2):
        await store.run_to_success(grant, json.dumps("x" * 1000).encode())
    run, steps = await world.reads.get_run_with_steps(run_id)
    assert run.step_counts == {"succeeded": 2, "pending": 999}
    assert [step.step_name for step in steps] == [f"s{n:04}" for n in range(1000)]
    assert steps[0].output == PayloadView(None, 1002)
    assert (lean_bytes(50), lean_bytes(1000)) == (4096, 524)


# ---------------------------------------------------------------- executors


async def test_executors_are_shown_with_the_state_that_counts_for_dispatch(world: ReadWorld) -> None:
    old = datetime.now(UTC) - timedelta(seconds=60)
    by_state = {
        ExecutorState.CONNECTED: await world.executor("c"),
        ExecutorState.SILENT: await world.executor("s", last_seen_at=old),
        ExecutorState.DRAINING: await world.executor("d", draining=True),
        ExecutorState.LOST: await world.executor("l", ended_at=old, draining=True),
    }
    for state, executor_id in by_state.items():
        assert (await world.reads.get_executor(executor_id)).state is state
        found = await world.reads.list_executors(ExecutorFilter((state,)), below=None, limit=10)
        assert [each.executor_id for each in found] == [executor_id]
    shown = await world.reads.get_executor(by_state[ExecutorState.CONNECTED])
    assert (shown.executor_name, shown.executor_kind, shown.sdk, shown.free_credit) == (
        "c", "python", "rara-python/0", 3,
    )  # fmt: skip
    assert (shown.labels, shown.schema_digests) == ({"zone": "eu"}, {"work.do": "ab"})
    (capability,) = shown.capabilities
    assert (capability.kind, capability.versions, capability.max_concurrency) == ("work.do", ("1.0",), 2)
    every = await world.reads.list_executors(ExecutorFilter(kind="work.do"), below=None, limit=10)
    assert [each.executor_id for each in every] == sorted(by_state.values(), reverse=True)
    rest = await world.reads.list_executors(ExecutorFilter(), below=every[1].executor_id, limit=10)
    assert [each.executor_id for each in rest] == [each.executor_id for each in every[2:]]
    assert await world.reads.list_executors(ExecutorFilter(kind="other"), below=None, limit=10) == []


# ---------------------------------------------------------------- why


async def obstacle_codes(world: ReadWorld, step_run_id: str) -> list[str]:
    return [each.code for each in await world.explainer.obstacles(step_run_id)]


async def test_a_step_that_nobody_can_run_says_who_came_nearest(world: ReadWorld) -> None:
    store = world.store
    await store.define("gpu", {"a": {"kind_version": "1", "required_labels": {"gpu": "a100"}}})
    run_id = await store.start("gpu")
    (step,) = (await world.reads.get_run_with_steps(run_id))[1]
    (nobody,) = await world.explainer.obstacles(step.step_run_id)
    assert (nobody.code, nobody.near_misses) == ("NO_CAPABLE_EXECUTOR", ())
    assert "no executor is connected" in nobody.message
    await world.executor("wrong-kind", capabilities='[{"kind": "x", "versions": ["1"]}]')
    await world.executor("no-gpu")
    await world.executor("old", capabilities='[{"kind": "work.do", "versions": ["0.9"]}]')
    await world.executor("leaving", labels='{"gpu": "a100"}', draining=True)
    await world.executor("gone", labels='{"gpu": "a100"}', ended_at=datetime.now(UTC))
    (missed,) = await world.explainer.obstacles(step.step_run_id)
    assert missed.code == "NO_CAPABLE_EXECUTOR"
    assert [(each.executor_name, each.lacks) for each in missed.near_misses] == [
        ("leaving", "draining"),
        ("no-gpu", "label gpu=a100"),
        ("old", "version 1 of work.do (has 0.9)"),
        ("wrong-kind", "kind work.do"),
    ]
    for n in range(20):
        await world.executor(f"more-{n}")
    (missed,) = await world.explainer.obstacles(step.step_run_id)
    assert len(missed.near_misses) == 10


async def test_a_step_tells_what_is_in_its_way_from_start_to_end(world: ReadWorld) -> None:
    store = world.store
    await store.define("pair", {"a": {"progress_timeout": {"seconds": 4}}, "b": {"depends_on": ["a"]}})
    run_id = await store.start("pair")
    a, b = (await world.reads.get_run_with_steps(run_id))[1]
    (upstream,) = await world.explainer.obstacles(b.step_run_id)
    assert (upstream.code, upstream.step_run_ids) == ("UPSTREAM_PENDING", (a.step_run_id,))
    executor_id = await world.executor("busy", free_credit=0)
    (full,) = await world.explainer.obstacles(a.step_run_id)
    assert (full.code, full.ahead) == ("NO_FREE_CREDIT", 0)
    await store.start("pair")
    later = (await world.reads.list_steps(StepFilter(), below=None, limit=2))[1]
    (queued,) = await world.explainer.obstacles(later.step_run_id)
    assert (queued.code, queued.ahead) == ("NO_FREE_CREDIT", 1)
    await store.raw.execute("update rara.executor set free_credit = 1")
    assert await obstacle_codes(world, a.step_run_id) == []
    (grant,) = await store.lease(1, executor_id)
    (sent,) = await world.explainer.obstacles(a.step_run_id)
    assert (sent.code, "executor busy" in sent.message) == ("NOT_ACCEPTED", True)
    await store.report(grant, accepted(1), running(2))
    assert await obstacle_codes(world, a.step_run_id) == []
    await store.raw.execute(
        "update rara.lease set started_at = now() - interval '3 seconds', progress_at = null"
    )
    (still,) = await world.explainer.obstacles(a.step_run_id)
    assert (still.code, "has not moved for 3 s" in still.message) == ("NO_PROGRESS", True)
    assert still.until is not None
    await store.expire(grant)
    (silent,) = await world.explainer.obstacles(a.step_run_id)
    assert (silent.code, "lease has run out" in silent.message) == ("NO_PROGRESS", True)
    await store.report(grant, failed(3))
    (backoff,) = await world.explainer.obstacles(a.step_run_id)
    assert (backoff.code, backoff.until) == ("BACKOFF", (await world.step(grant)).available_at)
    await store.cancel(run_id)
    assert await obstacle_codes(world, a.step_run_id) == []
    assert await obstacle_codes(world, b.step_run_id) == []
