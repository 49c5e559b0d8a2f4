"""Go executors as processes, against a real scheduler: what the Python one promises, they promise."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest
import pytest_asyncio
from rara.v1 import common_pb2, job_pb2, workflow_pb2
from rara_testing.fault_proxy import FaultProxy
from rara_testing.ports import free_port
from rara_testing.processes import Process, Processes
from support.go_executor import program, spawn_go_executor
from support.running_executor import running
from support.running_scheduler import LEASE_S, SWEEP_S, RunningScheduler, running_scheduler, until

pytestmark = pytest.mark.needs("go")

ONE = workflow_pb2.RetryPolicy(max_attempts=1)
FIVE = workflow_pb2.RetryPolicy(max_attempts=5)
ENDS = ("succeeded", "failed", "cancelled")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The build is nobody's test."""
    program("rara-go-probe")


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path) as opened:
        yield opened


def probe(kind: str, value: object = None, **more: Any) -> dict[str, Any]:
    """A step of a probe with its input."""
    template = common_pb2.Payload(data=json.dumps(value).encode())
    return {"kind": f"probe.{kind}", "input_template": template} | more


async def rows_of(world: RunningScheduler, run_id: str) -> Mapping[str, asyncpg.Record]:
    rows = await world.raw.fetch("select * from rara.step_state where workflow_run_id = $1::uuid", run_id)
    return {row["step_name"]: row for row in rows}


async def steps_of(world: RunningScheduler, run_id: str) -> list[workflow_pb2.StepRun]:
    """As the API shows them."""
    request = workflow_pb2.GetRunRequest(workflow_run_id=run_id, include_steps=True)
    return list((await world.workflows.GetRun(request, timeout=10)).steps)


async def start(world: RunningScheduler, steps: dict[str, dict[str, Any]]) -> str:
    await world.define("go", steps, on_failure="CONTINUE")
    return await world.start("go")


async def until_all(world: RunningScheduler, run_id: str, state: str) -> None:
    async def look() -> bool:
        return {row["state"] for row in (await rows_of(world, run_id)).values()} == {state}

    await until(look, f"all steps {state}")


def error_of(row: asyncpg.Record) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(row["error"])
    return error


def events_of(executor: Process) -> list[str]:
    """What it has logged."""
    return [json.loads(line)["event"] for line in executor.stderr.read_text().splitlines() if line[:1] == "{"]


async def test_every_probe_runs_and_leaves_what_it_says(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await spawn_go_executor(processes, world.address, tmp_path, labels="zone=a", slots=3)
    assert executor.lines == [f"rara-executor go connected to {world.address}"]
    run_id = await start(
        world,
        {
            "echo": probe("echo", {"n": 2**53 + 1, "text": "grüße"}, executor_kind="go"),
            "progress": probe("progress", {"count": 500}),
            "artifact": probe("artifact", {"size": 300_000}),
            "once": probe("once"),
            "spin": probe("spin", {"seconds": 0.7}, required_labels={"zone": "a"}),
        },
    )
    assert await world.until_run(run_id, *ENDS) == "succeeded"
    rows = await rows_of(world, run_id)
    assert json.loads(rows["echo"]["output"]) == {"n": 2**53 + 1, "text": "grüße"}
    assert {row["attempt"] for row in rows.values()} == {1}
    step_run_id = rows["progress"]["step_run_id"]
    sequences = await world.raw.fetch(
        "select sequence from rara.step_event where step_run_id = $1 order by sequence", step_run_id
    )
    assert [row["sequence"] for row in sequences] == list(range(1, len(sequences) + 1))
    executor.terminate()
    assert await executor.wait() == 0
    assert list((tmp_path / "go" / "jobs").iterdir()) == []


@pytest.mark.case("RETRY-3", "PAY-2")
async def test_an_error_keeps_its_flag_its_code_and_its_text(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    later = workflow_pb2.RetryPolicy(max_attempts=5)
    later.initial_backoff.FromSeconds(86_400)  # the wait is drawn evenly from 0 on
    later.max_backoff.FromSeconds(86_400)
    await spawn_go_executor(processes, world.address, tmp_path)
    raw = {"code": "TOOL_FAILED", "bytes": "fffe80"}
    run_id = await start(
        world,
        {
            "final": probe("fail", {"code": "AUTH_INVALID", "retryable": False}, retry=FIVE),
            "unset": probe("fail", {"code": "AUTH_INVALID"}, retry=FIVE),
            "no_code": probe("fail", {"message": "just so"}, retry=FIVE),
            "bytes_final": probe("fail", raw | {"retryable": False}, retry=later),
            "bytes_again": probe("fail", raw | {"retryable": True}, retry=later),
        },
    )
    ends = {
        "final": ("terminal_failed", "AUTH_INVALID"),
        "unset": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),  # documented: what does not say so can heal
        "no_code": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
        "bytes_final": ("terminal_failed", "TOOL_FAILED"),
        "bytes_again": ("retryable_failed", "TOOL_FAILED"),
    }
    for name, row in (await rows_of(world, run_id)).items():
        await world.until_step(str(row["step_run_id"]), ends[name][0])
    rows = await rows_of(world, run_id)
    assert {name: (row["state"], row["reason"]) for name, row in rows.items()} == ends
    found = {
        step.step_name: (step.attempt, step.failures, step.error.code, step.error.message)
        for step in await steps_of(world, run_id)
    }
    assert found == {
        "final": (1, 1, "AUTH_INVALID", "as asked"),
        "unset": (5, 5, "AUTH_INVALID", "as asked"),
        "no_code": (5, 5, "HANDLER_FAILED", "just so"),
        "bytes_final": (1, 1, "TOOL_FAILED", "\ufffd" * 3),
        "bytes_again": (1, 1, "TOOL_FAILED", "\ufffd" * 3),
    }
    await world.cancel(run_id)
    await world.until_run(run_id, *ENDS)


@pytest.mark.case("PAY-1")
async def test_what_cannot_be_stored_is_refused_by_path_and_disturbs_nobody(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await spawn_go_executor(processes, world.address, tmp_path)
    good = {f"good{number}": probe("sleep", {"seconds": 1}) for number in range(4)}
    bad = {what: probe("output", {"bad": what}, retry=FIVE) for what in ("nul", "surrogate")}
    began = time.monotonic()
    # A definition holds no U+0000 either: this text is made in the handler, from bytes.
    message = probe("fail", {"code": "TOOL_FAILED", "bytes": b"a\0b".hex(), "retryable": False}, retry=FIVE)
    run_id = await start(world, good | bad | {"message": message})
    for name, row in (await rows_of(world, run_id)).items():
        if name not in good:
            await world.until_step(str(row["step_run_id"]), "terminal_failed")
    assert time.monotonic() - began < 5
    assert await world.until_run(run_id, *ENDS) == "failed"
    rows = await rows_of(world, run_id)
    assert {(row["state"], row["attempt"]) for name, row in rows.items() if name in good} == {
        ("succeeded", 1)
    }
    for name in bad:
        assert (rows[name]["reason"], rows[name]["attempt"]) == ("PAYLOAD_INVALID", 1)
        assert " at /deep/0/text: " in error_of(rows[name])["message"]
    assert (rows["message"]["reason"], rows["message"]["attempt"]) == ("TOOL_FAILED", 1)
    assert error_of(rows["message"])["message"] == "a\ufffdb"
    assert "session.ended" not in events_of(executor)


async def test_a_cancel_is_confirmed_also_by_a_handler_that_ignores_it(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await spawn_go_executor(processes, world.address, tmp_path, slots=3)
    run_id = await start(
        world,
        {
            "obeys": probe("sleep", {"seconds": 60}),
            "ignores": probe("ignore_cancel", {"seconds": 60}),  # in a process, which is killed
            "leaks": probe("leak", {"seconds": 4}),  # in a goroutine, which nothing can end
        },
    )
    await until_all(world, run_id, "running")
    await world.cancel(run_id)
    assert await world.until_run(run_id, *ENDS) == "cancelled"
    facts = await world.raw.fetch(
        "select cancel_requested_at, cancel_delivered_at, cancel_confirmed_at from rara.step_state"
    )
    assert all(all(row.values()) for row in facts)
    assert "handler.leaked" in events_of(executor)
    # Its slot is taken until it returns; the other one works on.
    again = await start(world, {"a": probe("echo", 1), "b": probe("echo", 2)})
    assert await world.until_run(again, *ENDS) == "succeeded"
    await until(lambda: _logged(executor, "handler.returned_late"), "return of the handler")
    rows = await rows_of(world, run_id)
    assert {(row["state"], row["attempt"]) for row in rows.values()} == {("cancelled", 1)}


async def _logged(executor: Process, event: str) -> bool:
    return event in events_of(executor)


async def test_a_drain_hands_back_what_runs_with_its_checkpoint(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    first = await spawn_go_executor(processes, world.address, tmp_path, name="first", stop_s=2)
    run_id = await start(world, {"a": probe("sleep", {"seconds": 3, "checkpoint": {"half": True}})})
    await until_all(world, run_id, "running")
    (row,) = (await rows_of(world, run_id)).values()
    await until(lambda: _has_checkpoint(world, row["step_run_id"]), "checkpoint")
    await spawn_go_executor(processes, world.address, tmp_path, name="second")
    first.terminate()
    assert await first.wait() == 0
    assert await world.until_run(run_id, *ENDS) == "succeeded"
    (row,) = (await rows_of(world, run_id)).values()
    assert (row["attempt"], row["failures"]) == (2, 0)
    assert json.loads(row["output"]) == {"slept": 3, "checkpoint": {"half": True}}


async def _has_checkpoint(world: RunningScheduler, step_run_id: object) -> bool:
    bodies = await world.raw.fetch(
        "select body from rara.step_event where step_run_id = $1 and type = 'progress'", step_run_id
    )
    return any(
        job_pb2.ProgressEvent.FromString(row["body"]).progress.HasField("checkpoint") for row in bodies
    )


async def test_what_a_killed_executor_held_is_run_by_another_one(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    first = await spawn_go_executor(processes, world.address, tmp_path, name="first")
    run_id = await start(world, {f"s{number}": probe("sleep", {"seconds": 1.5}) for number in range(4)})
    await until_all(world, run_id, "running")
    await first.kill_and_wait()
    await spawn_go_executor(processes, world.address, tmp_path, name="second")
    assert await world.until_run(run_id, *ENDS) == "succeeded"
    rows = await rows_of(world, run_id)
    assert {(row["attempt"], row["failures"]) for row in rows.values()} == {(2, 1)}
    leftovers = [path.name for path in (tmp_path / "first" / "jobs").iterdir()]
    assert len(leftovers) == 1  # its folder is its own; an executor that shares it would clear it


async def test_a_child_ends_with_its_lease_although_its_executor_stands_still(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await spawn_go_executor(processes, world.address, tmp_path)
    run_id = await start(world, {"a": probe("ignore_cancel", {"seconds": 60})})
    await until_all(world, run_id, "running")

    async def children() -> list[psutil.Process]:
        return psutil.Process(executor.pid).children()

    (child,) = await until(children, "child")
    executor.freeze()
    frozen = time.monotonic()

    async def is_gone() -> bool:
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    await until(is_gone, "end of the child")
    assert time.monotonic() - frozen < LEASE_S + 1
    executor.thaw()
    await world.cancel(run_id)
    await world.until_run(run_id, *ENDS)
    (row,) = (await rows_of(world, run_id)).values()
    assert row["state"] == "cancelled"


async def test_steps_in_both_languages_hand_on_what_they_make(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    await spawn_go_executor(processes, world.address, tmp_path)
    value = {"n": 2**53 + 1, "big": 10**30, "text": "grüße \U0001f600", "none": None, "list": [1.5, True]}

    def after(step: str, kind: str, executor_kind: str) -> dict[str, Any]:
        template = common_pb2.Payload(data=json.dumps({"$ref": f"/steps/{step}/output"}).encode())
        return {
            "kind": kind,
            "executor_kind": executor_kind,
            "input_template": template,
            "depends_on": [step],
        }

    async with running(world.address, tmp_path):
        run_id = await start(
            world,
            {
                "s0": probe("echo", value, executor_kind="go"),
                "s1": after("s0", "demo.echo", "python"),
                "s2": after("s1", "probe.echo", "go"),
                "s3": after("s2", "demo.echo_blocking", "python"),
                "s4": after("s3", "probe.echo", "go"),
            },
        )
        assert await world.until_run(run_id, *ENDS) == "succeeded"
    rows = await rows_of(world, run_id)
    assert [json.loads(rows[f"s{number}"]["output"]) for number in range(5)] == [value] * 5
    names = {step.step_name: step.executor_name for step in await steps_of(world, run_id)}
    assert [names[f"s{number}"] for number in range(5)] == ["go", "test", "go", "test", "go"]


async def test_a_dialled_executor_runs_what_others_run_and_goes_on_after_a_broken_stream(
    database_url: str, processes: Processes, tmp_path: Path
) -> None:
    port = free_port()
    listen = f"127.0.0.1:{port}"
    async with (
        FaultProxy("127.0.0.1", port) as proxy,
        running_scheduler(database_url, tmp_path, direct_executors=(proxy.address,)) as world,
    ):
        executor = await spawn_go_executor(
            processes, world.address, tmp_path, listen=listen, ready=f"go listening on {listen}"
        )
        run_id = await start(
            world,
            {
                "long": probe("sleep", {"seconds": 2}),
                "artifact": probe("artifact", {"size": 300_000}),
                "bad": probe("fail", {"code": "AUTH_INVALID", "retryable": False}),
                "held": probe("sleep", {"seconds": 60}),
            },
        )
        rows = await rows_of(world, run_id)
        for name in ("long", "held"):
            await world.until_step(str(rows[name]["step_run_id"]), "running")
        proxy.cut()
        for name in ("long", "artifact"):
            await world.until_step(str(rows[name]["step_run_id"]), "succeeded")
        await world.cancel(run_id)
        assert await world.until_run(run_id, *ENDS) in ("failed", "cancelled")
        rows = await rows_of(world, run_id)
        assert {name: (row["state"], row["reason"], row["attempt"]) for name, row in rows.items()} == {
            "long": ("succeeded", "", 1),
            "artifact": ("succeeded", "", 1),
            "bad": ("terminal_failed", "AUTH_INVALID", 1),
            "held": ("cancelled", "CANCELLED", 1),
        }
        executor.terminate()
        assert await executor.wait() == 0


@pytest.mark.case("PROC-2")
async def test_a_panic_in_the_handler_costs_its_own_step_alone(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    executor = await spawn_go_executor(processes, world.address, tmp_path)
    good = {f"good{number}": probe("sleep", {"seconds": 1}) for number in range(4)}
    run_id = await start(world, good | {"bad": probe("panic", retry=ONE)})
    assert await world.until_run(run_id, *ENDS) == "failed"
    rows = await rows_of(world, run_id)
    error = error_of(rows["bad"])
    assert error["code"] == "HANDLER_PANIC"
    assert "nil pointer dereference" in error["message"]
    assert "probes.dereference" in error["stack_trace"]
    assert {name: (rows[name]["state"], rows[name]["attempt"]) for name in good} == dict.fromkeys(
        good, ("succeeded", 1)
    )
    assert rows["bad"]["attempt"] == 1
    assert executor.returncode is None
    assert "session.ended" not in events_of(executor)


@pytest.mark.case("PROC-2")
async def test_a_panic_that_nobody_can_catch_costs_one_attempt_of_what_ran_beside_it(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    deaths: list[float] = []

    async def keep_one_up() -> None:
        while True:
            executor = await spawn_go_executor(processes, world.address, tmp_path)
            assert await executor.wait(60) == 2  # Go's exit code of a panic
            deaths.append(time.monotonic())

    supervisor = asyncio.create_task(keep_one_up())
    good = {f"good{number}": probe("sleep", {"seconds": 1.5}) for number in range(4)}
    bad = probe("panic_goroutine", {"seconds": 0.7, "attempts": 1})
    run_id = await start(world, good | {"bad": bad})
    await until_all(world, run_id, "running")

    async def leased_again() -> bool:
        return all(row["attempt"] == 2 for row in (await rows_of(world, run_id)).values())

    await until(leased_again, "second attempt of all")
    # Two of the sweeps, and as much again for a busy machine and the start of a process.
    assert time.monotonic() - deaths[0] < LEASE_S + 2 * SWEEP_S + 2
    assert await world.until_run(run_id, *ENDS) == "succeeded"
    supervisor.cancel()
    await asyncio.gather(supervisor, return_exceptions=True)
    attempts = await world.raw.fetch("select attempt, reason, spent from rara.step_attempt where attempt = 1")
    assert [(row["reason"], row["spent"]) for row in attempts] == [("LEASE_EXPIRED", True)] * 5
    assert {row["attempt"] for row in (await rows_of(world, run_id)).values()} == {2}
    assert len(deaths) == 1


@pytest.mark.case("STREAM-3")
@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.soak)])
async def test_idle_and_busy_executors_are_never_sent_away(
    world: RunningScheduler, processes: Processes, tmp_path: Path, seconds: float
) -> None:
    idle = await spawn_go_executor(processes, world.address, tmp_path, name="idle", labels="on=idle")
    busy = await spawn_go_executor(processes, world.address, tmp_path, name="busy", labels="on=busy")
    step = probe("progress", {"count": 2000}, required_labels={"on": "busy"})
    await world.define("busy", {f"s{number}": step for number in range(4)})
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        run_id = await world.start("busy")
        assert await world.until_run(run_id, *ENDS) == "succeeded"
    for executor in (idle, busy):
        assert executor.returncode is None
        assert "session.ended" not in events_of(executor)
    assert await world.raw.fetchval("select max(attempt) from rara.step_state") == 1


@pytest.mark.case("PROC-3")
@pytest.mark.parametrize("cuts", [25, pytest.param(500, marks=pytest.mark.soak)])
async def test_cut_sessions_leave_neither_files_nor_memory_behind(
    world: RunningScheduler, processes: Processes, tmp_path: Path, cuts: int
) -> None:
    """The same with goroutines counted, and cut at any frame, is in executors/go/internal/engine."""
    host, port = world.address.rsplit(":", 1)
    async with FaultProxy(host, int(port)) as proxy:
        executor = await spawn_go_executor(processes, proxy.address, tmp_path)
        await world.define("busy", {f"s{n}": probe("progress", {"count": 200}) for n in range(4)})
        process = psutil.Process(executor.pid)
        files = memory = 0
        for number in range(5 + cuts):
            if number == 5:
                files, memory = process.num_fds(), process.memory_info().rss
            run_id = await world.start("busy")
            if number % 3:
                await until_some(world, run_id)
            (proxy.reset if number % 2 else proxy.cut)()
            assert await world.until_run(run_id, *ENDS) == "succeeded"

        async def settled() -> bool:
            return process.num_fds() <= files + 5

        await until(settled, "closed files")
        assert process.memory_info().rss < memory + (20 << 20)
    attempts = await world.raw.fetch("select distinct reason, spent from rara.step_attempt")
    assert all(not row["spent"] for row in attempts), [tuple(row) for row in attempts]


async def until_some(world: RunningScheduler, run_id: str) -> None:
    async def look() -> bool:
        return {row["state"] for row in (await rows_of(world, run_id)).values()} != {"pending"}

    await until(look, "step that has begun")


async def test_the_pipelines_clean_step_leaves_the_same_bytes_in_both_languages(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    corpus = tmp_path / "corpus"
    write_corpus(corpus)
    await spawn_go_executor(processes, world.address, tmp_path, command="rara-go-executor")
    collected: dict[str, Any] = {
        "depends_on": ["collect"],
        "input_artifacts": [workflow_pb2.ArtifactBinding(name="corpus", from_step="collect")],
        "input_template": common_pb2.Payload(
            data=json.dumps({"documents": {"$ref": "/steps/collect/output/documents"}}).encode()
        ),
    }
    steps = {
        "collect": {
            "kind": "corpus.collect",
            "input_template": common_pb2.Payload(data=b'{"options": {"$ref": "/run/input"}}'),
        },
        "python": collected | {"kind": "corpus.clean", "kind_version": "1", "executor_kind": "python"},
        "go": collected | {"kind": "corpus.clean", "kind_version": "1", "executor_kind": "go"},
        "dedupe": collected | {"kind": "clean.dedupe"},
    }
    await world.define("clean", steps)
    async with running(world.address, tmp_path, modules="knowledge_pipeline.operations", prestart=2):
        for value in ({"corpus": str(corpus)}, {}):  # {}: Python's language reference
            run_id = await world.start("clean", value=value)
            assert await world.until_run(run_id, *ENDS) == "succeeded"
            made = {
                step.step_name: (
                    json.loads(step.output.data),
                    [(artifact.name, artifact.digest.sha256, artifact.digest.size_bytes, artifact.type)
                     for artifact in step.manifest.artifacts],
                )
                for step in await steps_of(world, run_id)
            }  # fmt: skip
            assert made["go"] == made["python"] == made["dedupe"]
            assert made["go"][0]["documents"] > 5


def write_corpus(folder: Path) -> None:
    """Texts with all that cleaning looks at."""
    folder.mkdir()
    long = " ".join(f"Word{number} ends; so it goes. " * 3 for number in range(200))
    texts = {
        "marks.md": "# Title #\n\n**bold** *it* `code` ``two`` __init__ 2*3*4 a**b** **open\n\n"
        "[link](http://x/y_z) ![img](a.png) [bad](with space) [](empty) **é*x** *a\u0301b*",
        "rules.rst": "Title\n=====\n\nText one.\n\nAnother\n~~~\n\n----\n\nno heading\nhere\n---\n",
        "same.txt": "Text one.\n\nText one.\n\nTitle\n#####\nText one.",
        "long.txt": long + "x" * 2500 + " tail",
        "odd.txt": "a\u00a0b\u2028c\u200bd\ufeffe\x07f\tg  h\r\ni\rj \u3000 k \u0301e",
        "quotes.md": '"quoted" \\ back\n\n## *Emphasised* heading ##\n\n> a "b"\n\ncafe\u0301 = café',
        "blank.md": "# only a heading\n",
        "line\u2028end.txt": "a name with a line separator",
        "wide.txt": "\U0001f600 " * 900 + "end.",
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")


async def test_a_folder_is_hashed_into_artifacts(
    world: RunningScheduler, processes: Processes, tmp_path: Path
) -> None:
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    for number in range(30):
        (folder / "sub" / f"f{number:02}").write_bytes(b"x" * number * 1000)
    (folder / "link").symlink_to(folder / "sub")
    await spawn_go_executor(processes, world.address, tmp_path, command="rara-go-executor")
    template = common_pb2.Payload(data=json.dumps({"folder": str(folder), "concurrency": 8}).encode())
    await world.define("hash", {"hash": {"kind": "hash.manifest", "input_template": template}})
    run_id = await world.start("hash")
    assert await world.until_run(run_id, *ENDS) == "succeeded"
    (step,) = await steps_of(world, run_id)
    assert json.loads(step.output.data) == {"files": 30, "size_bytes": 435_000, "skipped": 1}
    names = {artifact.name: artifact.digest.size_bytes for artifact in step.manifest.artifacts}
    assert names.pop("manifest") > 0
    assert names == {f"files/sub/f{number:02}": number * 1000 for number in range(30)}
