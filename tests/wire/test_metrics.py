"""What a scheduler counts, as Prometheus reads it, on a real scheduler with executors of ours."""

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_scheduler.telemetry.catalogue import METRICS
from rara_testing.job_events import accepted, failed, running, succeeded
from support.running_scheduler import KIND, RunningScheduler, running_scheduler, until

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(
        database_url, tmp_path, metrics_listen="127.0.0.1:0", metrics_every_s=1
    ) as world:
        yield world


async def scrape(world: RunningScheduler) -> str:
    url = f"http://{world.scheduler.metrics_address}/metrics"
    with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as response:
        return str(response.read().decode())


async def samples(world: RunningScheduler) -> Samples:
    return {
        (name, frozenset(_LABEL.findall(labels))): float(value)
        for name, labels, value in _SAMPLE.findall(await scrape(world))
    }


def value(found: Samples, name: str, **labels: str) -> float:
    return found.get((name, frozenset(labels.items())), 0.0)


async def until_value(world: RunningScheduler, expected: float, name: str, **labels: str) -> Samples:
    async def look() -> Samples | None:
        found = await samples(world)
        return found if value(found, name, **labels) == expected else None

    return await until(look, f"{name}{labels} of {expected:g}")


async def test_a_run_with_a_retry_is_counted_from_ready_to_its_end(world: RunningScheduler) -> None:
    retry = {"max_attempts": 2, "initial_backoff": {"nanos": 1_000_000}}
    await world.define("counted", {"a": {"retry": retry}})
    run_id = await world.start("counted")
    waiting = await until_value(world, 1, "rara_step_ready", kind=KIND)
    assert value(waiting, "rara_step_oldest_ready_seconds", kind=KIND) >= 0
    async with world.executor(credit=1) as executor:
        job = await executor.expect_job()
        await executor.events(accepted(job.lease))
        held = await until_value(world, 1, "rara_step_in_flight", kind=KIND)
        assert value(held, "rara_session_open") == 1
        await executor.heartbeat([job.lease.lease_token])
        await until_value(world, 1, "rara_lease_renewals_total")
        await executor.events(running(job.lease), failed(job.lease))
        await executor.credit(2)
        job = await executor.expect_job()
        await executor.events(accepted(job.lease), running(job.lease), succeeded(job.lease))
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    found = await until_value(world, 1, "rara_run_ended_total", outcome="succeeded")
    assert value(found, "rara_run_started_total") == 1
    assert value(found, "rara_dispatch_latency_seconds_count", kind=KIND) == 2
    assert 0 < value(found, "rara_dispatch_latency_seconds_sum", kind=KIND) < 60
    assert value(found, "rara_step_retries_total", kind=KIND, code="HANDLER_FAILED") == 1
    ended = "rara_attempt_ended_total"
    assert value(found, ended, kind=KIND, outcome="retried", code="HANDLER_FAILED") == 1
    assert value(found, ended, kind=KIND, outcome="succeeded", code="") == 1
    assert value(found, "rara_step_ended_total", kind=KIND, outcome="succeeded") == 1
    events = value(found, "rara_commit_events_total")
    assert events >= 5
    assert value(found, "rara_commit_batch_size_sum") == events
    assert value(found, "rara_commit_duration_seconds_count") == value(found, "rara_commit_batch_size_count")
    assert value(found, "rara_pool_wait_seconds_count", lane="engine") >= 5
    text = await scrape(world)
    shown = {
        label
        for name, labels, _ in _SAMPLE.findall(text)
        if name.startswith("rara_")
        for label, _ in _LABEL.findall(labels)
    }
    assert shown <= {label for metric in METRICS for label in metric.labels} | {"le"}
    for an_id in (run_id, job.lease.step_run_id, executor.executor_id):
        assert an_id not in text


async def test_leases_that_expire_and_steps_that_nobody_held_are_counted(world: RunningScheduler) -> None:
    await world.define("left", {"a": {"retry": {"max_attempts": 1}}, "b": {"depends_on": ["a"]}})
    run_id = await world.start("left")
    async with world.executor() as executor:
        job = await executor.expect_job()
        await executor.events(accepted(job.lease))
        assert await world.until_run(run_id, "failed") == "failed"
    found = await until_value(world, 1, "rara_lease_expirations_total", kind=KIND)
    assert value(found, "rara_step_ended_total", kind=KIND, outcome="failed") == 1
    assert value(found, "rara_step_ended_total", kind="none", outcome="cancelled") == 1
    assert value(found, "rara_run_ended_total", outcome="failed") == 1
    run_id = await world.start("left")
    await world.cancel(run_id)
    found = await until_value(world, 3, "rara_step_ended_total", kind="none", outcome="cancelled")
    assert value(found, "rara_run_ended_total", outcome="cancelled") == 1


async def test_calls_are_counted_by_method_and_code(world: RunningScheduler) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await world.workflows.GetRun(workflow_pb2.GetRunRequest(workflow_run_id="no id"))
    await world.workflows.ListRuns(workflow_pb2.ListRunsRequest())
    watch = world.workflows.WatchRun(
        workflow_pb2.WatchRunRequest(workflow_run_id="00000000-0000-7000-8000-000000000000")
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await watch.read()
    found = await samples(world)
    service = "rara.v1.WorkflowService"
    calls = "rara_call_count_total"
    assert value(found, calls, method=f"{service}/GetRun", code="NOT_FOUND") == 1
    assert value(found, calls, method=f"{service}/ListRuns", code="OK") == 1
    assert value(found, calls, method=f"{service}/WatchRun", code="NOT_FOUND") == 1
    assert value(found, "rara_call_duration_seconds_count", method=f"{service}/ListRuns") == 1
    assert not any(
        name.startswith("rara_call_duration") and "WatchRun" in str(labels) for name, labels in found
    )
    await world.define("watched", {"a": {}})
    run_id = await world.start("watched")
    watch = world.workflows.WatchRun(workflow_pb2.WatchRunRequest(workflow_run_id=run_id))
    await watch.read()
    watch.cancel()
    await until_value(world, 1, calls, method=f"{service}/WatchRun", code="CANCELLED")
