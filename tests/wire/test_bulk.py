"""Acting by filter as operators do it: the calls, and the command as a process."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest_asyncio
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import job_pb2
from rara.v1 import workflow_pb2 as wf
from rara_client import Client
from rara_testing import job_events
from rara_testing.scripted_executor import WAIT_S
from support import command_line
from support.api_errors import refusal
from support.command_line import Ended, ended, rara_process
from support.running_scheduler import RunningScheduler, running_scheduler


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    # Waits of an hour, so that only a requeue ends them.
    async with running_scheduler(
        database_url, tmp_path, retry_initial_backoff_s=3600.0, retry_max_backoff_s=3600.0
    ) as opened:
        await opened.define("day", {"a": {}})
        yield opened


async def failing(
    world: RunningScheduler, count: int, code: str, *, retryable: bool, name: str = "day"
) -> list[str]:
    """Runs whose step fails so."""
    runs = []
    async with world.executor(credit=count) as executor:
        for _ in range(count):
            runs.append(await world.start(name))
            lease = (await executor.expect_job()).lease
            await executor.events(
                job_events.accepted(lease),
                job_events.running(lease),
                job_events.failed(lease, code=code, retryable=retryable, retry_after_s=3600.0),
            )
            await executor.expect_ack(lease, 3)
    return runs


async def rara(world: RunningScheduler, *arguments: str) -> Ended:
    return await ended(await rara_process(*arguments, env={"RARA_SERVER": world.address}))


async def retries(world: RunningScheduler) -> dict[str, str]:
    rows = await world.raw.fetch(
        "select retry_of_workflow_run_id::text as source, workflow_run_id::text as id from rara.workflow_run"
        " where retry_of_workflow_run_id is not null"
    )
    return {row["source"]: row["id"] for row in rows}


async def test_the_command_shows_asks_and_retries_each_run_once(world: RunningScheduler) -> None:
    runs = await failing(world, 3, "BAD_DATA", retryable=False)
    await failing(world, 1, "OTHER", retryable=False)
    filter_ = ("run", "retry", "--definition", "day", "--code", "BAD_DATA", "--since", "1h")
    preview = await rara(world, *filter_, "--preview")
    assert preview.code == 0
    headline, as_of = preview.lines[0].split(", as of ")
    assert headline == "3 runs to retry (3 failed)"
    assert [line.split()[0] for line in preview.lines[1:]] == runs
    assert all("BAD_DATA" in line for line in preview.lines[1:])
    unasked = await rara(world, *filter_)
    assert (unasked.code, "retry 3 runs (3 failed): nobody is here to ask" in unasked.err) == (2, True)
    assert await retries(world) == {}
    done = await rara(world, *filter_, "--yes", "-o", "json")
    assert done.code == 0
    by_run = {row["id"]: row["new_workflow_run_id"] for row in done.json["outcomes"]}
    assert list(by_run) == runs
    assert await retries(world) == by_run
    again = await rara(world, *filter_, "--yes", "--as-of", as_of)
    assert (again.code, again.lines) == (0, ["retried 0 runs"])
    assert await retries(world) == by_run
    cancelled = await rara(world, "run", "cancel", "--definition", "day", "--message", "no more", "--yes")
    assert (cancelled.code, cancelled.lines) == (0, ["cancelled 3 runs"])
    assert {await world.run_state(run_id) for run_id in by_run.values()} == {"cancelled"}


async def test_an_instant_counts_in_the_preview_and_what_was_cancelled_is_named_and_left_out(
    world: RunningScheduler,
) -> None:
    runs = await failing(world, 2, "BAD_DATA", retryable=False)
    await world.start("day")
    await rara(world, "run", "cancel", "--definition", "day", "--yes")
    filter_ = ("run", "retry", "--definition", "day")
    old = await rara(world, *filter_, "--as-of", "2020-01-01T00:00:00Z", "--preview")
    assert old.lines == ["0 runs to retry, as of 2020-01-01T00:00:00Z"]
    for flags in (("--preview",), ("--yes",)):
        refused = await rara(world, *filter_, "--as-of", "2100-01-01T00:00:00Z", *flags)
        assert (refused.code, "FIELD_INVALID" in refused.err, "as_of" in refused.err) == (5, True, True)
    now = await rara(world, *filter_, "--preview")
    assert now.lines[0].startswith("2 runs to retry (2 failed), as of ")
    assert now.lines[-1] == "  left out: 1 cancelled; with --state cancelled"
    both = await rara(world, *filter_, "--state", "failed", "--state", "cancelled", "--preview")
    assert both.lines[0].startswith("3 runs to retry (2 failed, 1 cancelled), as of ")
    assert (await rara(world, *filter_, "--yes")).lines == ["retried 2 runs"]
    assert set(await retries(world)) == set(runs)


async def test_waits_end_by_filter_and_the_steps_are_leased_at_once(world: RunningScheduler) -> None:
    runs = await failing(world, 2, "RATE_LIMITED", retryable=True)
    assert [await world.steps(run_id) for run_id in runs] == [{"a": ("retryable_failed", "RATE_LIMITED")}] * 2
    none = await rara(world, "step", "requeue", "--code", "OTHER", "--yes")
    assert none.lines == ["requeued 0 steps"]
    async with world.executor(credit=2) as executor:
        done = await rara(world, "step", "requeue", "--kind", "work.do", "--code", "RATE_LIMITED", "--yes")
        assert (done.code, done.lines) == (0, ["requeued 2 steps"])
        jobs: list[job_pb2.JobRequest] = []
        while len(jobs) < len(runs):
            jobs += (await executor.expect("jobs")).jobs
        assert {(job.workflow_run_id, job.lease.attempt) for job in jobs} == {(run, 2) for run in runs}
        for job in jobs:
            await executor.events(
                job_events.accepted(job.lease),
                job_events.running(job.lease),
                job_events.succeeded(job.lease, 3),
            )
            await executor.expect_ack(job.lease, 3)


async def test_the_client_retries_over_pages_and_a_token_belongs_to_its_filter(
    world: RunningScheduler,
) -> None:
    runs = await failing(world, 3, "BAD_DATA", retryable=False)
    wanted = wf.RunFilter(definition="day", states=[wf.WORKFLOW_RUN_STATE_FAILED])
    async with Client.connect(world.address) as client:
        seen = await client.preview_retries(wanted)
        assert (seen.count, seen.more, [run.workflow_run_id for run in seen.sample]) == (3, False, runs)
        request = wf.RetryRunsRequest(filter=wanted, as_of=seen.as_of, page_size=2)
        first: wf.RetryRunsResponse = await world.workflows.RetryRuns(request, timeout=WAIT_S)
        assert [one.id for one in first.outcomes] == runs[:2]
        request.page_token = first.next_page_token
        request.filter.definition = "other"
        assert (
            await refusal(world.workflows.RetryRuns(request, timeout=WAIT_S))
        ).reason == "PAGE_TOKEN_INVALID"
        assert [one.id async for one in client.retry_runs(wanted, seen.as_of)] == runs[2:]
        assert [one async for one in client.retry_runs(wanted, seen.as_of)] == []
        steps = await client.preview_requeues(wf.WaitingStepFilter(definition="day"))
        assert (steps.count, list(steps.sample)) == (0, [])
        open_ = await client.preview_cancels(wf.RunFilter(definition="day"))
        assert open_.count == 3
        outcomes = [one async for one in client.cancel_runs(wf.RunFilter(), open_.as_of, "over")]
        assert {one.id for one in outcomes} == set((await retries(world)).values())


def at(moment: datetime) -> Timestamp:
    made = Timestamp()
    made.FromDatetime(moment)
    return made


async def test_a_filter_that_cannot_be_is_refused_by_its_fields(world: RunningScheduler) -> None:
    for wanted, fields in (
        (wf.RunFilter(definition="A B"), ["filter.definition"]),
        (wf.RunFilter(definition_version=1), ["filter.definition_version"]),
        (wf.RunFilter(definition="day", definition_version=-1), ["filter.definition_version"]),
        (wf.RunFilter(states=[wf.WORKFLOW_RUN_STATE_SUCCEEDED]), ["filter.states[0]"]),
        (wf.RunFilter(reasons=["bad data"], kind="a b"), ["filter.kind", "filter.reasons[0]"]),
        (wf.RunFilter(reasons=["X"] * 21), ["filter.reasons"]),
        (wf.RunFilter(labels={"-": "x"}), ["filter.labels[…]"]),
    ):
        request = wf.RetryRunsRequest(filter=wanted)
        refused = await refusal(world.workflows.RetryRuns(request, timeout=WAIT_S))
        assert (refused.reason, refused.fields) == ("FIELD_INVALID", fields)


async def test_open_runs_cannot_be_asked_how_they_ended(world: RunningScheduler) -> None:
    wanted = wf.RunFilter(
        reasons=["X"], kind="work.do", ended_from=at(datetime.now(UTC) - timedelta(hours=1))
    )
    refused = await refusal(world.workflows.CancelRuns(wf.CancelRunsRequest(filter=wanted), timeout=WAIT_S))
    assert refused.fields == ["filter.reasons", "filter.kind", "filter.ended_from"]
    refused = await refusal(
        world.workflows.RequeueSteps(wf.RequeueStepsRequest(page_size=-1), timeout=WAIT_S)
    )
    assert refused.fields == ["page_size"]


async def test_a_run_is_named_or_a_filter_given_and_not_both() -> None:
    for arguments, says in (
        (("run", "retry", "abc", "--code", "X"), "not both"),
        (("run", "retry", "--code", "X", "--wait"), "not for a filter"),
        (("run", "retry", "--all", "--as-of", "yesterday"), "is not an instant"),
        (("run", "cancel", "--latest", "--all"), "not both"),
        (("run", "retry", "--preview"), "--preview is for a filter: give one, or --all"),
        (("run", "retry", "abc", "--preview"), "--preview is for a filter: give one, or --all"),
        (("run", "cancel", "abc", "--preview"), "--preview is for a filter: give one, or --all"),
        (("run", "retry", "--as-of", "2026-01-01T00:00:00Z"), "--as-of is for a filter"),
        (("run", "retry"), "name a RUN, or --latest, or give a filter, or --all"),
        (("step", "requeue"), "give a filter, or --all"),
    ):
        refused = await command_line.rara(*arguments, server="127.0.0.1:1")
        assert (refused.code, says in refused.err) == (2, True), arguments
