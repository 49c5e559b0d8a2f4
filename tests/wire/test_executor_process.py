"""`rara-executor` as a process: what it prints, how it ends, and what it leaves behind."""

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest_asyncio
from rara_testing.processes import Process, Processes
from rara_testing.scripted_scheduler import ScriptedScheduler, Terms, job
from support.running_executor import TESTS, until


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler(Terms(heartbeat_s=0.1, silence_s=5)) as scheduler:
        yield scheduler


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as processes:
        yield processes


async def start(processes: Processes, scheduler: ScriptedScheduler, folder: Path, *flags: str) -> Process:
    return await processes.start(
        "executor",
        [
            "rara-executor", "--scheduler", scheduler.address, "--module", "support.handlers", "--name", "proc",
            "--dir", str(folder / "work"), *flags,
        ],
        env={"PYTHONPATH": str(TESTS), "RARA_LOG_FORMAT": "json"},
        ready=f"rara-executor proc connected to {scheduler.address}",
    )  # fmt: skip


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def living(processes: list[psutil.Process]) -> list[int]:
    return [
        process.pid
        for process in processes
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


async def test_it_connects_runs_and_ends_with_goodbye_on_sigterm(
    scheduler: ScriptedScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await start(processes, scheduler, tmp_path, "--label", "zone=a", "--slots", "2")
    session = await scheduler.session()
    assert dict(session.hello.labels) == {"zone": "a"}
    assert (await session.frame("credit")).limit == 2
    session.send_jobs(job(1, "demo.echo", input=1), job(2, "demo.echo_blocking", input=2))
    await scheduler.event(1, "succeeded")
    await scheduler.event(2, "succeeded")
    session.send_jobs(job(3, "demo.wait_for_file", input={"file": str(tmp_path / "go")}))
    await scheduler.event(3, "progress")
    children = family(executor.pid)
    executor.terminate()
    await session.frame("drain")
    (tmp_path / "go").touch()  # what runs may finish
    await scheduler.event(3, "succeeded")
    assert await executor.wait() == 0
    assert session.of("goodbye")
    assert living(children) == []
    lines = executor.stderr.read_text().splitlines()
    assert {json.loads(line)["event"] for line in lines if line.startswith("{")} >= {"executor.draining"}
    assert list((tmp_path / "work" / "jobs").iterdir()) == []


async def test_a_second_sigterm_ends_it_at_once(
    scheduler: ScriptedScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await start(processes, scheduler, tmp_path)
    session = await scheduler.session()
    session.send_jobs(job(1, "demo.swallow", input={"file": str(tmp_path / "m")}))
    await until((tmp_path / "m").exists)
    children = family(executor.pid)
    executor.terminate()
    await session.frame("drain")
    started = time.monotonic()
    executor.terminate()
    assert await executor.wait() == 1
    assert time.monotonic() - started < 2
    await until(lambda: not living(children), bound_s=3)


async def test_kill_9_leaves_no_runner_and_none_of_their_children(
    scheduler: ScriptedScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await start(processes, scheduler, tmp_path)
    session = await scheduler.session()
    session.send_jobs(
        job(1, "demo.children", input={"file": str(tmp_path / "pids")}),
        job(2, "demo.hold_lock", input={"file": str(tmp_path / "m"), "seconds": 600}),
        job(3, "demo.swallow", input={"file": str(tmp_path / "n")}),
    )
    await until(lambda: all((tmp_path / name).exists() for name in ("pids", "m", "n")))
    await until(lambda: (tmp_path / "pids").read_text())
    children = family(executor.pid)
    assert set(json.loads((tmp_path / "pids").read_text())) <= {child.pid for child in children}
    executor.kill()
    await executor.wait()
    await until(lambda: not living(children), bound_s=3)


async def test_a_frozen_supervisor_does_not_leave_handlers_running_past_the_lease(
    scheduler: ScriptedScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await start(processes, scheduler, tmp_path)
    session = await scheduler.session()
    path = tmp_path / "ticks"
    session.send_jobs(job(1, "demo.ticks", input={"file": str(path)}, lease_s=1.0))
    await until(path.exists)
    frozen_at = time.monotonic()
    executor.freeze()
    try:
        await until(lambda: time.monotonic() - frozen_at > 1.5)
        ticks = [float(line.split()[1]) for line in path.read_text().splitlines()]
        assert ticks[-1] - frozen_at < 1.1
    finally:
        executor.thaw()
    failed = (await scheduler.event(1, "failed")).failed
    assert failed.code in {"LEASE_EXPIRED", "RUNNER_CRASHED"}


async def test_a_module_that_cannot_be_imported_ends_the_start_with_its_reason(
    scheduler: ScriptedScheduler, processes: Processes, tmp_path: Path
) -> None:
    for flags, code, text in (
        (["--module", "no.such.module"], 1, "ModuleNotFoundError: No module named 'no"),
        (["--module", "support.handlers", "--slots", "0"], 2, "RARA_EXECUTOR_SLOTS: "),
        ([], 2, "RARA_EXECUTOR_MODULES (--module) names no module"),
    ):
        argv = ["rara-executor", "--scheduler", scheduler.address, "--dir", str(tmp_path / "w"), *flags]
        executor = await processes.start("executor", argv, env={"PYTHONPATH": str(TESTS)})
        assert await executor.wait() == code
        last = executor.stderr.read_text().splitlines()[-1]
        assert last.startswith("rara-executor: ")
        assert text in last


async def test_it_waits_for_a_scheduler_that_is_not_there_yet_and_can_be_stopped_meanwhile(
    processes: Processes, tmp_path: Path
) -> None:
    argv = [
        "rara-executor",
        "--scheduler",
        "127.0.0.1:1",
        "--module",
        "support.handlers",
        "--dir",
        str(tmp_path / "w"),
    ]
    executor = await processes.start("executor", argv, env={"PYTHONPATH": str(TESTS)})
    await until(lambda: "session.ended" in executor.stderr.read_text())
    executor.terminate()
    started = time.monotonic()
    assert await executor.wait() == 0
    assert time.monotonic() - started < 3
