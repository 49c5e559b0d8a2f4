"""Two schedulers and two executors of the compose file while they are killed, paused, cut off and restarted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from rara_client import Client
from support.compose import TAG, ComposeProject, Container, docker, project
from support.stopping import STEPS, Kept, counts, ended_run, lines, started_run, steps_of, until

pytestmark = [pytest.mark.needs("containers"), pytest.mark.soak]

LEASE_S = 15.0
IMAGE = f"rara-scheduler:{TAG}"
# A lease that runs out, a sweep, a backoff, and what a busy machine adds.
TAKEN_OVER_S = 60.0

Fault = Callable[[ComposeProject, Container], Awaitable[None]]


@pytest_asyncio.fixture(scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ComposeProject]:
    env = {"RARA_LEASE_S": str(LEASE_S), "RARA_HEARTBEAT_S": "1", "RARA_SILENCE_S": "4"}
    async with project(tmp_path_factory.mktemp("compose"), env) as made:
        await made.compose("build")
        await made.up("--scale", "scheduler=2", "--scale", "python-executor=2")
        yield made


@pytest_asyncio.fixture(autouse=True)
async def whole_system(system: ComposeProject) -> None:
    for path in system.work.iterdir():
        path.unlink()
    await system.until_healthy("scheduler", 2)
    await system.until_healthy("python-executor", 2)


# ---------------------------------------------------------------- faults


async def crash(system: ComposeProject, container: Container, command: str) -> None:
    """Unlike `docker kill` no stop by hand, so the container comes back by itself: wait until it has."""
    await docker("exec", container.id, "sh", "-c", command)
    async with asyncio.timeout(TAKEN_OVER_S):
        while True:
            found = await system.containers(container.service)
            if any(one.id == container.id and one.restarts > container.restarts for one in found):
                break
            await asyncio.sleep(0.1)
    await system.until_healthy(container.service, len(found))


# SIGKILL to what process 1 has started.
KILL = "kill -9 $(cat /proc/1/task/1/children)"
# PostgreSQL is process 1, which SIGKILL does not reach from within; this ends it without a checkpoint, as a crash.
CRASH_POSTGRES = "kill -QUIT 1"


async def kill_executor(system: ComposeProject, victim: Container) -> None:
    await crash(system, victim, KILL)
    await until_another_attempt(system)


async def pause_executor(system: ComposeProject, victim: Container) -> None:
    """Longer than its leases: another takes over, and it finds out when it wakes up."""
    await docker("pause", victim.id)
    try:
        await until_another_attempt(system)
    finally:
        await docker("unpause", victim.id)


async def cut_off_executor(system: ComposeProject, victim: Container) -> None:
    network = f"{system.name}_default"
    await docker("network", "disconnect", network, victim.id)
    try:
        await until_another_attempt(system)
    finally:
        await docker("network", "connect", "--alias", "python-executor", network, victim.id)


async def kill_schedulers(system: ComposeProject, victim: Container) -> None:
    """One after the other, so that every executor has to change once at least."""
    for scheduler in await system.containers("scheduler"):
        await crash(system, scheduler, KILL)


async def cut_off_scheduler(system: ComposeProject, victim: Container) -> None:
    """Shorter than a lease; its sessions end on both sides."""
    network = f"{system.name}_default"
    first, *_ = await system.containers("scheduler")
    await docker("network", "disconnect", network, first.id)
    await docker("network", "connect", "--alias", "scheduler", network, first.id)


async def move_schedulers(system: ComposeProject, victim: Container) -> None:
    """Cut off both, and connect them at other addresses, since theirs are taken meanwhile."""
    network = f"{system.name}_default"
    schedulers = await system.containers("scheduler")
    for scheduler in schedulers:
        await docker("network", "disconnect", network, scheduler.id)
    takers = [
        (await docker("run", "-d", "--rm", "--network", network, IMAGE, "sleep", "300")).strip()
        for _ in schedulers
    ]
    try:
        for scheduler in schedulers:
            await docker("network", "connect", "--alias", "scheduler", network, scheduler.id)
        await until_sessions(system)
    finally:
        await docker("rm", "-f", *takers)


async def kill_database(system: ComposeProject, victim: Container) -> None:
    (database,) = await system.containers("database")
    await crash(system, database, CRASH_POSTGRES)


async def until_sessions(system: ComposeProject) -> None:
    """Wait until every executor has a session again, and takes jobs."""
    async with Client.connect(await system.address()) as client, asyncio.timeout(TAKEN_OVER_S):
        while await takers_of(client) != {"python": 2, "go": 1}:
            await asyncio.sleep(0.2)


async def takers_of(client: Client) -> Counter[str]:
    """How many executors would take a job, by language."""
    return Counter([one.executor_kind async for one in client.list_executors() if one.free_credit])


async def until_another_attempt(system: ComposeProject) -> None:
    await until(lambda: len(lines(system.work / "starts")) > len(STEPS), TAKEN_OVER_S)


# ---------------------------------------------------------------- tests


async def victim_of(system: ComposeProject, client: Client, run_id: str) -> Container:
    """The executor that runs the first step; a container's name within it is the beginning of its id."""
    step, *_ = [step for step in await steps_of(client, run_id) if step.step_name == STEPS[0]]
    attempt, *_ = (await client.get_step_run(step.step_run_id)).attempts
    found = await system.containers("python-executor")
    return next(container for container in found if container.id.startswith(attempt.executor_name))


async def survived(system: ComposeProject, fault: Fault) -> dict[str, Kept]:
    """A run during which the fault happened; its steps. AssertionError unless it has one result and effect a step."""
    async with Client.connect(await system.address(2)) as client:
        run_id = await started_run(client, system.work, fault.__name__)
        victim = await victim_of(system, client, run_id)
    await fault(system, victim)
    async with Client.connect(await system.address(2)) as client:
        steps = await ended_run(client, system.work, run_id)
    assert counts(system.work / "effects") == dict.fromkeys(STEPS, 1)
    starts = [int(line.split()[1]) for line in lines(system.work / "starts")]
    assert len(starts) == len(set(starts)), "a lease started two handlers"
    return steps


@pytest.mark.parametrize("fault", [kill_executor, pause_executor, cut_off_executor])
async def test_a_lost_executors_steps_are_taken_over_once(system: ComposeProject, fault: Fault) -> None:
    steps = await survived(system, fault)
    assert steps[STEPS[0]].attempt == 2
    assert all(step.attempt <= 2 for step in steps.values())


@pytest.mark.parametrize("fault", [kill_schedulers, cut_off_scheduler, move_schedulers, kill_database])
async def test_what_runs_does_not_notice_a_lost_scheduler_or_database(
    system: ComposeProject, fault: Fault
) -> None:
    steps = await survived(system, fault)
    assert [(step.attempt, step.failures) for step in steps.values()] == [(1, 0)] * len(STEPS)


async def test_a_rolling_restart_of_all_parts_spends_no_attempt(system: ComposeProject) -> None:
    async def restart_all(system: ComposeProject, victim: Container) -> None:
        for service in ("scheduler", "python-executor", "go-executor"):
            found = await system.containers(service)
            for container in found:
                await docker("restart", container.id)
                await system.until_healthy(service, len(found))

    steps = await survived(system, restart_all)
    assert [step.failures for step in steps.values()] == [0] * len(STEPS)
    for step in steps.values():
        assert {attempt.spent for attempt in step.attempts} == {False}


async def test_containers_that_are_added_take_part(system: ComposeProject) -> None:
    await system.up("--no-deps", "--no-recreate", "--scale", "python-executor=3", "python-executor")
    async with Client.connect(await system.address()) as client, asyncio.timeout(30):
        while (await takers_of(client))["python"] < 3:
            await asyncio.sleep(0.2)
    *_, third = await system.containers("python-executor")
    await docker("rm", "-f", "-v", third.id)  # compose would scale down as well, and leave its volume
