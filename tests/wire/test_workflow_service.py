"""WorkflowService as other services call it: a real scheduler, a real database, an executor that behaves."""

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest_asyncio
from rara.v1 import common_pb2, job_pb2, workflow_pb2, workflow_pb2_grpc
from rara_scheduler.bulk import Bulk
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.pausing import Pausing
from rara_scheduler.run_ends import RunEnds
from rara_scheduler.store.bulk import BulkStore
from rara_scheduler.store.database import Database
from rara_scheduler.store.definitions import DefinitionStore
from rara_scheduler.store.explain import Explainer
from rara_scheduler.store.lineage import LineageReads
from rara_scheduler.store.pauses import PauseStore
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.retry_run import RunRetrier
from rara_scheduler.store.start import RunStarter
from rara_scheduler.store.watch import WatchReads
from rara_scheduler.transport.page_token import encode_token
from rara_scheduler.transport.workflow import WorkflowServicer
from rara_scheduler.watch_hub import ChangeHub
from rara_scheduler.watching import Watching
from rara_testing.auto_executor import AutoExecutor, AutoJob, JobFailure
from rara_testing.scripted_executor import WAIT_S
from support.api_errors import refusal
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until

Run = workflow_pb2.WorkflowRun
Step = workflow_pb2.StepRun
S = workflow_pb2


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


def state_name(message: Run | Step) -> str:
    if isinstance(message, Run):
        return S.WorkflowRunState.Name(message.state).removeprefix("WORKFLOW_RUN_STATE_").lower()
    return S.StepRunState.Name(message.state).removeprefix("STEP_RUN_STATE_").lower()


async def everything(call: Any, timeout_s: float = WAIT_S) -> list[Any]:
    """All answers of a stream that ends by itself."""
    async with asyncio.timeout(timeout_s):
        return [response async for response in call]


def kinds(responses: list[Any]) -> list[str]:
    return [response.WhichOneof("update") for response in responses]


async def shout(job: AutoJob) -> object:
    await job.progress(0.5, "half way")
    return {"text": job.input["text"].upper()}


async def define_shouting(world: RunningScheduler) -> None:
    """b shouts what a shouted."""
    payload = common_pb2.Payload
    await world.define(
        "shouting",
        {
            "a": {"input_template": payload(data=b'{"text": {"$ref": "/run/input/word"}}')},
            "b": {"input_template": payload(data=b'{"text": {"$ref": "/steps/a/output/text"}}')},
        },
    )


async def test_a_run_goes_from_start_to_end_as_a_watcher_sees_it(world: RunningScheduler) -> None:
    await define_shouting(world)
    run_id = await world.start("shouting", value={"word": "hey"})
    call = world.workflows.WatchRun(S.WatchRunRequest(workflow_run_id=run_id), timeout=WAIT_S)
    updates = aiter(call)
    seen = [await anext(updates) for _ in range(4)]
    assert kinds(seen) == ["run", "step_run", "step_run", "snapshot_end"]
    watch = asyncio.create_task(everything(updates))
    async with AutoExecutor(world.address, {KIND: shout}) as executor:
        await executor.wait_for(2)
        seen += await watch
    assert [response.revision for response in seen[:3]] == [0, 0, 0]
    assert await call.code() is grpc.StatusCode.OK
    revisions = [response.revision for response in seen]
    assert revisions == sorted(revisions)
    last = seen[-1].run
    assert (state_name(last), dict(last.step_counts)) == ("succeeded", {"succeeded": 2})
    order = ["pending", "leased", "running", "succeeded"]
    for name in ("a", "b"):
        steps = [
            r.step_run for r in seen if r.WhichOneof("update") == "step_run" and r.step_run.step_name == name
        ]
        states = [order.index(state_name(step)) for step in steps]
        assert states == sorted(states)
        assert states[-1] == 3
        assert steps[-1].progress.message == "half way"
    got = await world.workflows.GetRun(
        S.GetRunRequest(workflow_run_id=run_id, include_steps=True), timeout=WAIT_S
    )
    assert [json.loads(step.output.data) for step in got.steps] == [{"text": "HEY"}, {"text": "HEY"}]
    assert got.run.revision == last.revision
    b = await world.workflows.GetStepRun(
        S.GetStepRunRequest(step_run_id=got.steps[1].step_run_id), timeout=WAIT_S
    )
    (attempt,) = b.attempts
    assert (attempt.lease.step_run_id, attempt.lease.attempt) == (b.step_run.step_run_id, 1)
    assert (attempt.executor_name, attempt.reason, attempt.last_sequence) == ("auto", "", 4)


async def test_a_watch_goes_on_after_a_revision_and_ends_at_once_on_a_closed_run(
    world: RunningScheduler,
) -> None:
    await define_shouting(world)
    run_id = await world.start("shouting", value={"word": "hey"})

    async def watch(after: int) -> list[Any]:
        request = S.WatchRunRequest(workflow_run_id=run_id, after_revision=after)
        return await everything(world.workflows.WatchRun(request, timeout=WAIT_S))

    later = asyncio.create_task(watch(1))
    async with AutoExecutor(world.address, {KIND: shout}) as executor:
        await executor.wait_for(2)
        resumed = await later
    assert "snapshot_end" not in kinds(resumed)
    assert {r.step_run.step_name for r in resumed if r.WhichOneof("update") == "step_run"} == {"a", "b"}
    assert state_name(resumed[-1].run) == "succeeded"
    closed = await watch(0)
    assert kinds(closed) == ["run", "step_run", "step_run", "snapshot_end"]
    assert closed[-1].revision == resumed[-1].revision
    assert kinds(await watch(closed[-1].revision)) == ["run"]
    middle = await watch(closed[-1].revision - 1)
    assert [r.step_run.step_name for r in middle[:-1]] == ["b"]
    refused = await refusal(watch(closed[-1].revision + 1))
    assert (refused.status, refused.reason) == (grpc.StatusCode.OUT_OF_RANGE, "REVISION_COMPACTED")


async def test_a_watcher_sees_what_another_scheduler_commits(database_url: str, tmp_path: Path) -> None:
    async with (
        running_scheduler(database_url, tmp_path) as here,
        running_scheduler(database_url, tmp_path, listen="127.0.0.1:0") as there,
    ):
        await define_shouting(here)
        run_id = await here.start("shouting", value={"word": "hey"})
        updates = aiter(here.workflows.WatchRun(S.WatchRunRequest(workflow_run_id=run_id), timeout=WAIT_S))
        assert kinds([await anext(updates) for _ in range(4)])[-1] == "snapshot_end"
        watch = asyncio.create_task(everything(updates))
        async with AutoExecutor(there.address, {KIND: shout}) as executor:
            await executor.wait_for(2)
            assert state_name((await watch)[-1].run) == "succeeded"


async def test_stored_events_are_read_from_any_number_and_a_watch_of_an_attempt_ends_with_it(
    world: RunningScheduler,
) -> None:
    tries = iter(range(10))

    async def flaky(job: AutoJob) -> object:
        for n in range(3):
            await job.progress(n / 3, f"part {n}")
        if next(tries) == 0:
            raise JobFailure("FLAKY_THING")
        return {}

    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    steps = (
        await world.workflows.ListStepRuns(S.ListStepRunsRequest(workflow_run_id=run_id), timeout=WAIT_S)
    ).step_runs
    step_id = steps[0].step_run_id

    async def watch(attempt: int = 0, after: int = 0) -> list[Any]:
        request = S.WatchStepRunRequest(step_run_id=step_id, attempt=attempt, after_sequence=after)
        return await everything(world.workflows.WatchStepRun(request, timeout=WAIT_S))

    live = asyncio.create_task(watch(1))  # before the first lease
    async with AutoExecutor(world.address, {KIND: flaky}) as executor:
        await executor.wait_for(2)
        first = await live

    def events(responses: list[Any]) -> list[job_pb2.ProgressEvent]:
        return [r.event for r in responses if r.WhichOneof("update") == "event"]

    def told(responses: list[Any]) -> list[tuple[int, str | None]]:
        return [(event.sequence, event.WhichOneof("event")) for event in events(responses)]

    story = [(1, "accepted"), (2, "running"), (3, "progress"), (4, "progress"), (5, "progress")]
    assert told(first) == [*story, (6, "failed")]
    assert {(event.lease.step_run_id, event.lease.attempt) for event in events(first)} == {(step_id, 1)}
    assert events(first)[3].progress.message == "part 1"
    second = await watch()
    assert told(second) == [*story, (6, "succeeded")]
    assert events(second)[0].lease.attempt == 2
    assert events(second)[0].lease.lease_token > events(first)[0].lease.lease_token
    assert state_name(second[0].step_run) == "succeeded"
    assert told(await watch(1, 4)) == [(5, "progress"), (6, "failed")]
    assert told(await watch(1, 99)) == []
    refused = await refusal(watch(3))
    assert (refused.reason, refused.fields) == ("FIELD_INVALID", ["attempt"])


async def test_watchers_end_within_a_second_of_a_stop(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    steps = await world.workflows.ListStepRuns(S.ListStepRunsRequest(workflow_run_id=run_id), timeout=WAIT_S)
    calls = [
        world.workflows.WatchRun(S.WatchRunRequest(workflow_run_id=run_id)),
        world.workflows.WatchStepRun(S.WatchStepRunRequest(step_run_id=steps.step_runs[0].step_run_id)),
    ]
    answers = [aiter(call) for call in calls]
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(anext(each) for each in answers))  # they are under way
    watches = [asyncio.create_task(refusal(everything(each))) for each in answers]
    began = time.monotonic()
    world.scheduler.stop()
    for refused in await asyncio.gather(*watches):
        assert (refused.status, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert refused.retry_after_s is not None
    assert time.monotonic() - began < 1.0


async def test_a_cancel_is_idempotent_and_a_closed_run_is_returned_unchanged(world: RunningScheduler) -> None:
    await world.define("pair", {"a": {}, "b": {"depends_on": ["a"]}})
    run_id = await world.start("pair")
    request = S.CancelRunRequest(workflow_run_id=run_id, message="no longer \x00needed")
    first = (await world.workflows.CancelRun(request, timeout=WAIT_S)).run
    assert (state_name(first), dict(first.step_counts)) == ("cancelled", {"cancelled": 2})
    assert (await world.workflows.CancelRun(request, timeout=WAIT_S)).run == first
    message = await world.raw.fetchval("select cancel_message from rara.workflow_run")
    assert message == "no longer \ufffdneeded"


async def test_a_failed_run_is_retried_over_the_wire(world: RunningScheduler) -> None:
    broken = {"b"}

    async def work(job: AutoJob) -> object:
        if job.request.step_name in broken:
            raise JobFailure("BAD_DATA", retryable=False)
        return {"made_by": job.request.workflow_run_id}

    await world.define("pair", {"a": {}, "b": {"depends_on": ["a"]}})
    source = await world.start("pair")
    async with AutoExecutor(world.address, {KIND: work}) as executor:
        await executor.wait_for(2)
        assert await world.until_run(source, "failed") == "failed"
        failed = (await world.workflows.GetRun(S.GetRunRequest(workflow_run_id=source), timeout=WAIT_S)).run
        assert (failed.error.code, failed.error.retryable) == ("BAD_DATA", False)
        broken.clear()
        answer = await world.workflows.RetryRun(S.RetryRunRequest(workflow_run_id=source), timeout=WAIT_S)
        assert not answer.already_started
        assert answer.run.retry_of_workflow_run_id == source
        assert await world.until_run(answer.run.workflow_run_id, "succeeded", "failed") == "succeeded"
    got = await world.workflows.GetRun(
        S.GetRunRequest(workflow_run_id=answer.run.workflow_run_id, include_steps=True), timeout=WAIT_S
    )
    assert [(step.step_name, step.workflow_run_id) for step in got.steps] == [
        ("a", source),
        ("b", answer.run.workflow_run_id),
    ]
    assert [request.idempotency_key for request in executor.requests[1:]] == [f"{source}/b"] * 2


async def test_lists_are_paged_to_the_end_and_filtered(world: RunningScheduler) -> None:
    for name in ("x", "y"):
        await world.define(name, {"a": {}, "b": {}})
    run_ids = [await world.start("xy"[n % 2], labels={"n": str(n % 3)}) for n in range(7)]

    async def pages(method: Any, request: Any, field: str) -> list[list[Any]]:
        found = []
        while True:
            response = await method(request, timeout=WAIT_S)
            found.append(list(getattr(response, field)))
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    w = world.workflows
    found = await pages(w.ListRuns, S.ListRunsRequest(page_size=3), "runs")
    assert [[run.workflow_run_id for run in page] for page in found] == [
        run_ids[:3:-1], run_ids[3:0:-1], run_ids[:1],
    ]  # fmt: skip
    labelled = await pages(w.ListRuns, S.ListRunsRequest(labels={"n": "0"}, definition="x"), "runs")
    assert [run.workflow_run_id for run in labelled[0]] == [run_ids[6], run_ids[0]]
    steps = await pages(w.ListStepRuns, S.ListStepRunsRequest(page_size=5), "step_runs")
    assert [len(page) for page in steps] == [5, 5, 4]
    ids = [step.step_run_id for page in steps for step in page]
    assert ids == sorted(ids, reverse=True)
    assert len(set(ids)) == 14
    one = await pages(
        w.ListStepRuns, S.ListStepRunsRequest(page_size=1, workflow_run_id=run_ids[0]), "step_runs"
    )
    assert [page[0].step_name for page in one] == ["b", "a"]
    definitions = await pages(w.ListDefinitions, S.ListDefinitionsRequest(page_size=1), "definitions")
    assert [page[0].definition for page in definitions] == ["x", "y"]
    await world.define("x", {"a": {}})
    versions = await pages(
        w.ListDefinitions, S.ListDefinitionsRequest(page_size=1, definition="x"), "definitions"
    )
    assert [page[0].version for page in versions] == [2, 1]
    assert (
        await w.GetDefinition(S.GetDefinitionRequest(definition="x"), timeout=WAIT_S)
    ).definition == versions[0][0]


async def test_a_page_of_large_rows_ends_early_and_stays_below_a_frame(world: RunningScheduler) -> None:
    template = json.dumps("x" * 4000).encode()
    await world.define(
        "large", {f"s{n}": {"input_template": common_pb2.Payload(data=template)} for n in range(300)}
    )
    for n in range(2):
        await world.define(
            f"large-{n}", {f"s{m}": {"input_template": common_pb2.Payload(data=template)} for m in range(500)}
        )
    names: list[str] = []
    token, calls = "", 0
    while token or not calls:
        response = await world.workflows.ListDefinitions(
            S.ListDefinitionsRequest(page_token=token), timeout=WAIT_S
        )
        assert response.ByteSize() < 4 * 1024 * 1024
        names += [definition.definition for definition in response.definitions]
        token, calls = response.next_page_token, calls + 1
    assert names == ["large", "large-0", "large-1"]
    assert calls == 3


async def test_an_executor_is_listed_drained_and_explained(world: RunningScheduler) -> None:
    await world.define("one", {"a": {"kind": "work.rare"}})
    run_id = await world.start("one")
    steps = await world.workflows.ListStepRuns(S.ListStepRunsRequest(workflow_run_id=run_id), timeout=WAIT_S)
    ask = S.ExplainStepRequest(step_run_id=steps.step_runs[0].step_run_id)
    async with world.executor(executor_name="pod-7", labels={"zone": "eu"}) as executor:
        listed = (await world.workflows.ListExecutors(S.ListExecutorsRequest(), timeout=WAIT_S)).executors
        assert [(each.executor_name, each.state, each.labels["zone"]) for each in listed] == [
            ("pod-7", S.EXECUTOR_STATE_CONNECTED, "eu")
        ]
        why = await world.workflows.ExplainStep(ask, timeout=WAIT_S)
        assert state_name(why.step_run) == "pending"
        (obstacle,) = why.obstacles
        assert obstacle.code == "NO_CAPABLE_EXECUTOR"
        assert [(miss.executor_name, miss.lacks) for miss in obstacle.near_misses] == [
            ("pod-7", "kind work.rare")
        ]
        drain = S.DrainExecutorRequest(executor_id=executor.executor_id)
        drained = (await world.workflows.DrainExecutor(drain, timeout=WAIT_S)).executor
        assert drained.state == S.EXECUTOR_STATE_DRAINING
        await executor.expect("drain")
    refused = await refusal(
        world.workflows.DrainExecutor(S.DrainExecutorRequest(executor_id=str(uuid.uuid4())), timeout=WAIT_S)
    )
    assert (refused.status, refused.reason) == (grpc.StatusCode.NOT_FOUND, "EXECUTOR_NOT_FOUND")


async def test_lineage_is_asked_for_up_and_down_from_digest_step_and_run(world: RunningScheduler) -> None:
    async def work(job: AutoJob) -> object:
        data = job.request.step_name.encode()
        artifact = common_pb2.Artifact(name="out", type="blob", media_type="a/b", inline=data)
        artifact.digest.sha256 = hashlib.sha256(data).hexdigest()
        artifact.digest.size_bytes = len(data)
        job.artifacts.append(artifact)
        return {}

    binding = S.ArtifactBinding(name="in", from_step="a", from_name="out")
    await world.define("flow", {"a": {}, "b": {"input_artifacts": [binding]}})
    run_id = await world.start("flow")
    async with AutoExecutor(world.address, {KIND: work}) as executor:
        await executor.wait_for(2)
        await world.until_run(run_id, "succeeded")
    got = await world.workflows.GetRun(
        S.GetRunRequest(workflow_run_id=run_id, include_steps=True), timeout=WAIT_S
    )
    a, b = got.steps
    made = a.manifest.artifacts[0].digest
    up, down = S.LINEAGE_DIRECTION_UPSTREAM, S.LINEAGE_DIRECTION_DOWNSTREAM

    async def edges(direction: "S.LineageDirection.ValueType", **start: Any) -> list[tuple[str, str, bool]]:
        response = await world.workflows.QueryLineage(
            S.QueryLineageRequest(direction=direction, **start), timeout=WAIT_S
        )
        return [(edge.step_run_id, edge.artifact_name, edge.produced) for edge in response.edges]

    assert await edges(up, artifact=made) == [(a.step_run_id, "out", True)]
    assert await edges(down, artifact=made) == [(b.step_run_id, "in", False), (b.step_run_id, "out", True)]
    assert await edges(up, step_run_id=b.step_run_id) == [(b.step_run_id, "in", False)]
    assert await edges(down, step_run_id=b.step_run_id, depth=1) == [(b.step_run_id, "out", True)]
    assert {edge[0] for edge in await edges(down, workflow_run_id=run_id)} == {a.step_run_id, b.step_run_id}
    end = b.manifest.artifacts[0].digest
    whole = await edges(up, artifact=end, depth=32)
    assert whole == [(b.step_run_id, "out", True), (b.step_run_id, "in", False), (a.step_run_id, "out", True)]
    assert await edges(up, artifact_prefix=end.sha256[:8], depth=2) == whole

    query = S.QueryLineageRequest(direction=up, artifact=end, depth=2, page_size=1)
    pages = []
    while True:
        pages.append(await world.workflows.QueryLineage(query, timeout=WAIT_S))
        if not pages[-1].next_page_token:
            break
        query.page_token = pages[-1].next_page_token
    found = [edge for page in pages for edge in page.edges]
    assert [(edge.step_run_id, edge.artifact_name, edge.produced) for edge in found] == whole
    assert [(edge.depth, edge.step_name, edge.definition, edge.definition_version, edge.kind) for edge in found] == [
        (1, "b", "flow", 1, KIND), (1, "b", "flow", 1, KIND), (2, "a", "flow", 1, KIND),
    ]  # fmt: skip
    assert [edge.artifact_type for edge in found] == ["blob"] * 3
    assert all(page.artifact == end and not page.truncated for page in pages)


async def test_tokens_of_lineage_pages_are_not_taken_on_trust(world: RunningScheduler) -> None:
    """Each is ours, but for one part of its position."""
    query = S.QueryLineageRequest(
        direction=S.LINEAGE_DIRECTION_UPSTREAM, artifact=common_pb2.Digest(sha256="0" * 64)
    )
    good = ["10:20:10,12", "1", "0", "0" * 64, str(uuid.uuid4()), "name"]
    query.page_token = encode_token(query, good)
    assert not (await world.workflows.QueryLineage(query, timeout=WAIT_S)).edges
    for place, bad in (
        (0, "20:10:"), (0, "x"), (0, "1:99999999999999999999:"), (1, "0"), (1, "100"), (2, "2"), (3, "0"), (4, "1"),
        (5, "a\0b"), (5, "\ud800"),
    ):  # fmt: skip
        position = [*good[:place], bad, *good[place + 1 :]]
        query.page_token = encode_token(query, position)
        refused = await refusal(world.workflows.QueryLineage(query, timeout=WAIT_S))
        assert (refused.status, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAGE_TOKEN_INVALID"), (
            bad
        )


async def test_a_bug_shows_the_id_of_its_log_line_and_never_its_text(world: RunningScheduler) -> None:
    await world.raw.execute("alter table rara.lineage rename to moved_away")
    refused = await refusal(
        world.workflows.QueryLineage(
            S.QueryLineageRequest(
                artifact=common_pb2.Digest(sha256="0" * 64), direction=S.LINEAGE_DIRECTION_UPSTREAM
            ),
            timeout=WAIT_S,
        )
    )
    assert (refused.status, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert "lineage" not in refused.message
    assert refused.metadata["log_id"] in refused.message
    await world.raw.execute("alter table rara.moved_away rename to lineage")


def nothing_to_pause(database: Database) -> Pausing:
    async def nothing() -> None:
        pass

    return Pausing(
        PauseStore(database), look=nothing, turn_over=nothing, wake=lambda: None, tell_others=lambda: None
    )


async def test_without_a_database_calls_are_unavailable_and_say_when_to_try_again() -> None:
    database = Database("postgresql://nobody@127.0.0.1:1/none", acquire_timeout_s=1.0)
    await database.open()
    definitions = DefinitionStore(database, RetryPolicy())
    reads = Reads(database, definitions, silent_after_s=10.0)
    retrier = RunRetrier(database, definitions, on_ready=lambda: None)
    servicer = WorkflowServicer(
        definitions=definitions,
        starter=RunStarter(database, definitions, on_ready=lambda: None),
        retrier=retrier,
        reads=reads,
        lineage_reads=LineageReads(database),
        watching=Watching(WatchReads(database, reads), reads, ChangeHub()),
        run_ends=RunEnds(WatchReads(database, reads)),
        explainer=Explainer(reads, accept_timeout_s=10.0, silent_after_s=10.0),
        canceller=NobodyToCancel(),
        pausing=nothing_to_pause(database),
        bulk=Bulk(
            BulkStore(database),
            retrier,
            NobodyToCancel(),
            on_requeued=lambda: None,
            on_retried=lambda: None,
        ),
        max_payload_bytes=1000,
    )
    server = grpc.aio.server()
    workflow_pb2_grpc.add_WorkflowServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = workflow_pb2_grpc.WorkflowServiceStub(channel)
            run_id = str(uuid.uuid4())
            for call in (
                stub.StartRun(S.StartRunRequest(definition="d"), timeout=WAIT_S),
                stub.GetRun(S.GetRunRequest(workflow_run_id=run_id), timeout=WAIT_S),
                everything(stub.WatchRun(S.WatchRunRequest(workflow_run_id=run_id), timeout=WAIT_S)),
            ):
                refused = await refusal(call)
                assert (refused.status, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")
                assert refused.retry_after_s == 1.0
                assert "nobody@" not in refused.message
    finally:
        await server.stop(0)
        await database.close()


class NobodyToCancel:
    """A canceller for a server without an engine."""

    async def cancel_run(self, workflow_run_id: str, *, message: str, grace_s: float | None) -> None:
        raise AssertionError("no call gets here without a database")

    async def drain_executor(self, executor_id: str, *, finish_within_s: float | None) -> bool:
        raise AssertionError("no call gets here without a database")


async def test_a_busy_run_is_watched_without_missing_a_step(world: RunningScheduler) -> None:
    """A hundred short steps: their changes come in bursts, and every step is seen ending."""
    await world.define("burst", {f"s{n}": {} for n in range(100)})
    run_id = await world.start("burst")
    watch = asyncio.create_task(
        everything(world.workflows.WatchRun(S.WatchRunRequest(workflow_run_id=run_id), timeout=60), 60)
    )

    async def work(job: AutoJob) -> object:
        return {}

    async with AutoExecutor(world.address, {KIND: work}, slots=20) as executor:
        await executor.wait_for(100, timeout_s=60)
        seen = await watch
    ended = [
        r.step_run.step_name
        for r in seen
        if r.WhichOneof("update") == "step_run" and state_name(r.step_run) == "succeeded"
    ]
    assert sorted(ended) == sorted(f"s{n}" for n in range(100))
    assert await until(lambda: world.run_state(run_id), "state") == "succeeded"
