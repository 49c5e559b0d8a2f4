"""One trace runs from the call that starts a run to the commit of its last step, as a real OTLP receiver gets it."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import TracerProvider
from rara.v1 import common_pb2, workflow_pb2
from rara_client import Client
from rara_scheduler.telemetry.catalogue import METRICS
from rara_testing.job_events import accepted, succeeded
from rara_testing.job_events import running as running_event
from rara_testing.ports import free_port
from rara_testing.processes import Processes
from structlog.testing import capture_logs
from support.go_executor import spawn_go_executor
from support.otlp_receiver import OtlpReceiver, ReceivedSpan
from support.running_executor import running
from support.running_scheduler import TEST_VALUES, RunningScheduler, running_scheduler, until

OF_AN_ATTEMPT = {"lease", "dispatch", "commit"}


@pytest_asyncio.fixture
async def receiver(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpReceiver]:
    async with OtlpReceiver() as receiver:
        for name, value in receiver.env.items():
            monkeypatch.setenv(name, value)
        yield receiver


@pytest_asyncio.fixture
async def world(receiver: OtlpReceiver, database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as world:
        yield world


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path / "processes") as processes:
        yield processes


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def assert_attempt(spans: list[ReceivedSpan], attempt: ReceivedSpan, kind: str) -> ReceivedSpan:
    """All that belongs to an attempt hangs below its span; the handler's."""
    children = {span.name: span for span in spans if span.parent_id == attempt.span_id}
    assert set(children) == OF_AN_ATTEMPT | {f"process {kind}"}
    assert {children[name].service for name in OF_AN_ATTEMPT} == {"rara-scheduler"}
    handler = children[f"process {kind}"]
    assert handler.kind == "CONSUMER"
    for span in children.values():
        assert span.attributes["rara.lease_token"] == attempt.attributes["rara.lease_token"]
        assert attempt.trace_id == span.trace_id
        assert 0 < span.start_ns <= span.end_ns
    # One clock made these; the others are of other processes and may be a little off.
    assert children["lease"].end_ns == children["dispatch"].start_ns
    assert attempt.start_ns < attempt.end_ns
    return handler


async def test_one_trace_from_the_call_to_the_commit_with_the_handlers_own_spans(
    world: RunningScheduler, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    steps: dict[str, dict[str, Any]] = {
        "a": {"kind": "traced.async"},
        "b": {"kind": "traced.blocking", "depends_on": ["a"]},
        "c": {"kind": "traced.flaky", "depends_on": ["b"]},
    }
    await world.define("traced", steps)
    tracer = TracerProvider().get_tracer("caller")
    async with (
        running(world.address, tmp_path, modules="support.traced_handlers") as executor,
        Client.connect(world.address) as client,
    ):
        with tracer.start_as_current_span("caller") as caller:
            run_id = (await client.start_run("traced")).run.workflow_run_id
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        wanted = 1 + 4 * 5 + 2  # the call, four attempts of five spans each, and two of the handlers' own
        trace_id = f"{caller.get_span_context().trace_id:032x}"
        await receiver.until(
            lambda spans: len([s for s in spans if s.trace_id == trace_id]) >= wanted, f"{wanted} spans"
        )
    spans = [span for span in receiver.spans if span.trace_id == trace_id]
    assert len(spans) == wanted
    (call,) = named(spans, "rara.v1.WorkflowService/StartRun")
    assert (call.kind, call.parent_id) == ("SERVER", f"{caller.get_span_context().span_id:016x}")
    attempts = [span for span in spans if span.name.startswith("attempt ")]
    assert {span.parent_id for span in attempts} == {call.span_id}
    by_kind = {kind: named(attempts, f"attempt {kind}") for kind in ("traced.async", "traced.blocking")}
    for kind, (attempt,) in by_kind.items():
        handler = assert_attempt(spans, attempt, kind)
        (own,) = named(spans, f"inside {kind.removeprefix('traced.')}")
        assert (own.parent_id, own.service) == (handler.span_id, "handlers")
        assert handler.attributes["rara.outcome"] == attempt.attributes["rara.outcome"] == "succeeded"
        assert attempt.attributes["rara.workflow_run_id"] == run_id
        assert attempt.attributes["rara.executor_id"] == executor.executor_id
        assert attempt.events == ("accepted", "started")
    first, second = sorted(named(attempts, "attempt traced.flaky"), key=lambda span: span.start_ns)
    assert first.attributes["rara.outcome"] == "retryable_failed"
    assert (first.failed, first.attributes["error.type"]) == (True, "HANDLER_FAILED")
    assert (second.failed, second.attributes["rara.attempt"]) == (False, 2)
    assert assert_attempt(spans, first, "traced.flaky").failed
    assert not assert_attempt(spans, second, "traced.flaky").failed
    # What a handler hands on by HTTP names the span that its own spans have as their parent.
    output = await world.raw.fetchval(
        "select convert_from(output, 'UTF8')::json ->> 'traceparent' from rara.result x"
        " join rara.step_run s using (step_run_id) where s.step_name = 'a'"
    )
    (attempt,) = by_kind["traced.async"]
    assert output.startswith(f"00-{trace_id}-{assert_attempt(spans, attempt, 'traced.async').span_id}-")
    assert receiver.metrics <= {metric.name for metric in METRICS}
    assert {"rara.run.started", "rara.commit.events", "rara.session.open"} <= receiver.metrics


async def test_runs_of_a_batch_have_a_trace_too(world: RunningScheduler, receiver: OtlpReceiver) -> None:
    await world.define("one", {"a": {}})
    tracer = TracerProvider().get_tracer("caller")

    async def traces() -> list[str]:
        rows = await world.raw.fetch("select traceparent from rara.workflow_run order by created_at")
        return [row["traceparent"].split("-")[1] for row in rows]

    async with Client.connect(world.address) as client:
        requests = [workflow_pb2.StartRunRequest(definition="one") for _ in range(2)]
        await client.batch_start_runs(requests)
        begun = set(await traces())
        with tracer.start_as_current_span("caller") as caller:
            await client.batch_start_runs(requests)
        assert not requests[0].HasField("trace")  # the caller's own stay as they were
    called = f"{caller.get_span_context().trace_id:032x}"
    assert sorted(await traces()) == sorted([*begun, *begun, called, called])
    await receiver.until(lambda spans: bool(begun & {span.trace_id for span in spans}), "the call's span")
    (call,) = [span for span in receiver.spans if span.trace_id in begun]
    assert (call.name, call.kind) == ("rara.v1.WorkflowService/BatchStartRuns", "SERVER")


async def test_a_retried_run_is_a_trace_of_its_own_that_links_to_the_first(
    world: RunningScheduler, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    await world.define("hopeless", {"a": {"kind": "traced.hopeless", "retry": {"max_attempts": 1}}})
    async with running(world.address, tmp_path, modules="support.traced_handlers"):
        run_id = await world.start("hopeless")
        assert await world.until_run(run_id, "failed") == "failed"
        again = await world.workflows.RetryRun(workflow_pb2.RetryRunRequest(workflow_run_id=run_id))
        await world.until_run(again.run.workflow_run_id, "failed")
        spans = await receiver.until(
            lambda spans: len(named(spans, "attempt traced.hopeless")) == 2, "spans of both runs"
        )
    (start,) = named(spans, "rara.v1.WorkflowService/StartRun")
    (retry,) = named(spans, "rara.v1.WorkflowService/RetryRun")
    assert retry.trace_id != start.trace_id
    assert retry.links == ((start.trace_id, start.span_id),)
    parents = {(span.trace_id, span.parent_id) for span in named(spans, "attempt traced.hopeless")}
    assert parents == {(start.trace_id, start.span_id), (retry.trace_id, retry.span_id)}


@pytest.mark.needs("go")
async def test_a_go_executors_handlers_stand_in_the_same_trace(
    world: RunningScheduler, receiver: OtlpReceiver, processes: Processes, tmp_path: Path
) -> None:
    """In the executor's own process and in one of the operation's own."""
    kinds = ("probe.traced", "probe.traced_apart")
    await world.define("go", {kind.removeprefix("probe."): {"kind": kind} for kind in kinds})
    settings = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
    await spawn_go_executor(processes, world.address, tmp_path, env=settings | {"OTEL_SERVICE_NAME": "go"})
    run_id = await world.start("go")
    assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    wanted = 1 + 2 * 5 + 2
    await receiver.until(lambda spans: len(spans) >= wanted, f"{wanted} spans")
    spans = receiver.spans
    assert len(spans) == wanted
    (call,) = named(spans, "rara.v1.WorkflowService/StartRun")
    assert {span.trace_id for span in spans} == {call.trace_id}
    own = {span.parent_id: span for span in named(spans, "inside go")}
    for kind in kinds:
        (attempt,) = named(spans, f"attempt {kind}")
        assert attempt.parent_id == call.span_id
        handler = assert_attempt(spans, attempt, kind)
        assert (handler.service, own[handler.span_id].service) == ("go", "go")
        assert handler.attributes["rara.outcome"] == "succeeded"


async def test_what_the_caller_does_not_sample_is_not_sent(
    world: RunningScheduler, receiver: OtlpReceiver, tmp_path: Path
) -> None:
    await world.define("quiet", {"a": {"kind": "traced.async"}})
    unsampled = common_pb2.TraceContext(traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")
    async with running(world.address, tmp_path, modules="support.traced_handlers"):
        quiet = await world.start("quiet", trace=unsampled)
        await world.until_run(quiet, "succeeded")
        loud = await world.start("quiet")
        await world.until_run(loud, "succeeded")
        spans = await receiver.until(lambda spans: bool(named(spans, "attempt traced.async")), "a trace")
    assert {span.attributes.get("rara.workflow_run_id", loud) for span in spans} == {loud}
    assert "4bf92f3577b34da6a3ce929d0e0e4736" not in {span.trace_id for span in spans}


async def test_a_receiver_that_is_away_costs_one_warning_and_no_work(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    loop = asyncio.get_running_loop()
    with capture_logs() as lines:
        async with running_scheduler(database_url, tmp_path) as world:
            await world.define("alone", {f"s{n}": {} for n in range(10)})
            run_id = await world.start("alone")
            async with world.executor(credit=0) as executor:
                for number in range(10):
                    await executor.credit(number + 1)
                    job = await executor.expect_job()
                    await executor.events(accepted(job.lease), running_event(job.lease), succeeded(job.lease))
                assert await world.until_run(run_id, "succeeded") == "succeeded"

            async def warned() -> bool:
                return any(line["event"] == "telemetry.export_failed" for line in lines)

            await until(warned, "a warning")
            stopping_at = loop.time()
            world.scheduler.stop()
    assert loop.time() - stopping_at < TEST_VALUES["stop_s"]  # type: ignore[operator]
    assert sum(line["event"] == "telemetry.export_failed" for line in lines) == 1
