"""The shipped images and compose file, on a real engine: they work as they are, and a stop reaches the services."""

import contextlib
import json
import shlex
import signal
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta

import pytest
import pytest_asyncio
from rara_client import Client
from rara_executor.settings import Settings as ExecutorSettings
from rara_scheduler.settings import Settings as SchedulerSettings
from support.compose import ROOT, ComposeProject, Container, docker, project
from support.stopping import STEPS, counts, ended_run, lines, started_run, until
from support.transcripts import differences, typed

pytestmark = [pytest.mark.needs("containers")]

STOP_S = {
    "scheduler": SchedulerSettings.model_fields["stop_s"].default,
    "python-executor": ExecutorSettings.model_fields["executor_stop_s"].default,
    "go-executor": ExecutorSettings.model_fields["executor_stop_s"].default,
}
# What a busy machine adds; the compose file grants more.
BUSY_S = 9.0
SWEEP_S = SchedulerSettings.model_fields["sweep_s"].default


@pytest_asyncio.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ComposeProject]:
    """The compose file as a project of its own, up."""
    async with project(tmp_path_factory.mktemp("compose")) as made:
        await made.compose("build")
        await made.up()
        yield made


@pytest_asyncio.fixture(autouse=True)
async def whole_system(system: ComposeProject) -> None:
    """Nothing of the test before: no files, and up again where it failed while the services were down."""
    for path in system.work.iterdir():
        path.unlink()
    found = [container for service in STOP_S for container in await system.containers(service)]
    if not all(container.is_running for container in found):
        await system.up()


@contextlib.asynccontextmanager
async def client_of(system: ComposeProject) -> AsyncIterator[Client]:
    async with Client.connect(await system.address()) as client:
        yield client


async def only(system: ComposeProject, service: str) -> Container:
    (container,) = await system.containers(service)
    return container


async def event_at(system: ComposeProject, service: str, name: str) -> datetime:
    """When its log named the event last; AssertionError where it did not."""
    events = await system.events(await only(system, service))
    found = [event["timestamp"] for event in events if event["event"] == name]
    assert found, f"{service} has not logged {name}"
    return datetime.fromisoformat(found[-1])


async def test_the_example_runs_in_both_languages_and_shows_what_the_how_to_shows(
    system: ComposeProject,
) -> None:
    page = (ROOT / "docs" / "how-to" / "run-with-compose.md").read_text()
    transcript = list(typed(page))
    for one in transcript:
        printed = await system.compose(*shlex.split(one.command)[4:])
        assert not (difference := differences(one.shown, printed)), f"{one.command}\n{difference}"
    assert [" ".join(shlex.split(one.command)[7:10]) for one in transcript[:2]] == [
        "rara run start",
        "rara step get",
    ]
    async with client_of(system) as client:
        runs = [run async for run in client.list_runs(definition="knowledge-pipeline-go")]
        steps = [step async for step in client.list_step_runs(runs[0].workflow_run_id)]
        ran_in = [(await client.get_step_run(step.step_run_id)).attempts[-1].handler for step in steps]
    assert {step.step_name: ran.executor_kind for step, ran in zip(steps, ran_in, strict=True)} == {
        "collect": "python",
        "clean": "go",
        "index": "python",
        "evaluate": "python",
        "adapt": "python",
    }


async def test_the_services_run_with_little_power_and_are_reached_from_this_machine_alone(
    system: ComposeProject,
) -> None:
    for service in STOP_S:
        container = await only(system, service)
        (shown,) = json.loads(await docker("inspect", container.id))
        host = shown["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False)
        assert host["SecurityOpt"] == ["no-new-privileges:true"]
        _, *processes = (await docker("top", container.id, "-eo", "pid,uid")).splitlines()
        assert {process.split()[1] for process in processes} == {"10001"}
        for bindings in (host["PortBindings"] or {}).values():
            assert {binding["HostIp"] for binding in bindings} == {"127.0.0.1"}
        networks = {name.removeprefix(f"{system.name}_") for name in shown["NetworkSettings"]["Networks"]}
        assert networks == ({"default", "database"} if service == "scheduler" else {"default"})


@pytest.mark.case("STOP-2")
async def test_a_stop_reaches_the_services_and_what_ran_goes_on_after_up(system: ComposeProject) -> None:
    async with client_of(system) as client:
        run_id = await started_run(client, system.work, "stop")
    await system.compose("stop", *STOP_S)
    for service in STOP_S:
        prefix = service.rpartition("-")[2]
        container = await only(system, service)
        assert not container.is_running
        assert container.exit_code == 0
        stopping = await event_at(system, service, f"{prefix}.stopping")
        stopped = await event_at(system, service, f"{prefix}.stopped")
        assert stopping < stopped
        assert container.finished_at - stopping < timedelta(seconds=STOP_S[service] + BUSY_S)
    assert len(lines(system.work / "starts")) == len(STEPS)

    await system.up()
    await until(lambda: len(lines(system.work / "starts")) == 2 * len(STEPS))
    opened_at = await event_at(system, "scheduler", "session.opened")
    async with client_of(system) as client:
        steps = await ended_run(client, system.work, run_id)
    assert set(steps) == set(STEPS)
    for step in steps.values():
        assert (step.attempt, step.failures, len(step.attempts)) == (2, 0, 2)
        assert (step.attempts[0].reason, step.attempts[0].spent) == ("EXECUTOR_SHUTDOWN", False)
        assert step.attempts[1].leased_at - opened_at < timedelta(seconds=2 * SWEEP_S + BUSY_S)
    assert counts(system.work / "effects") == dict.fromkeys(STEPS, 1)
    assert counts(system.work / "starts") == dict.fromkeys(STEPS, 2)


@pytest.mark.soak
@pytest.mark.case("STOP-2")
async def test_a_stop_of_the_scheduler_alone_costs_no_attempt(system: ComposeProject) -> None:
    async with client_of(system) as client:
        run_id = await started_run(client, system.work, "scheduler alone")
    await system.compose("stop", "scheduler")
    assert (await only(system, "scheduler")).exit_code == 0
    await system.up("--no-deps", "scheduler")
    async with client_of(system) as client:
        steps = await ended_run(client, system.work, run_id)
    assert [(step.attempt, step.failures) for step in steps.values()] == [(1, 0)] * len(STEPS)
    assert counts(system.work / "starts") == dict.fromkeys(STEPS, 1)


@pytest.mark.soak
@pytest.mark.case("STOP-2")
async def test_a_stop_reaches_a_service_that_is_still_starting(system: ComposeProject) -> None:
    """The kernel throws away a signal for process 1 that nobody handles yet."""
    for service in STOP_S:
        container = (await system.compose("run", "-d", "--no-deps", service)).strip()
        began = time.monotonic()
        await docker("stop", container)
        assert time.monotonic() - began < STOP_S[service]
        code = int(await docker("inspect", "-f", "{{.State.ExitCode}}", container))
        assert code in {0, 128 + signal.SIGTERM}
        await docker("rm", "-v", container)


@pytest.mark.soak
async def test_what_a_killed_handler_leaves_behind_is_reaped(system: ComposeProject) -> None:
    async with client_of(system) as client:
        run_id = await started_run(client, system.work, "cancelled")
        await client.cancel_run(run_id, grace=timedelta(seconds=0.2))
        await client.wait_run(run_id, 30)
    container = await only(system, "python-executor")
    shown = await docker("top", container.id, "-eo", "pid,stat,args")
    assert [line for line in shown.splitlines() if line.split()[1].startswith("Z")] == []
    assert "time.sleep(600)" not in shown
