"""An attempt that was superseded can store bytes and say what it likes: nothing of it becomes the step's.

What it had stored before, under its own lease, the next attempt goes on from, in whichever language.
"""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rara.v1 import common_pb2, job_pb2, workflow_pb2
from rara_testing.fault_proxy import FaultProxy
from rara_testing.processes import Process, Processes
from support.fenced_handlers import weights
from support.go_executor import program, spawn_go_executor
from support.running_scheduler import RunningScheduler, running_scheduler, until
from support.spawned_executor import spawn_executor

pytestmark = pytest.mark.needs("go")

SIZE = 40_000  # over what goes inline
FREE = workflow_pb2.RetryPolicy(max_attempts=5)
BOTH_WAYS = [("python", "go"), ("go", "python")]


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


async def spawn(language: str, processes: Processes, address: str, folder: Path, name: str) -> Process:
    if language == "go":
        return await spawn_go_executor(processes, address, folder, name=name)
    return await spawn_executor(
        processes, address, folder, module="support.fenced_handlers", name=name, prestart=1
    )


async def start(world: RunningScheduler, kind: str, folder: Path) -> str:
    template = common_pb2.Payload(data=json.dumps({"folder": str(folder), "size": SIZE}).encode())
    await world.define("one", {"a": {"kind": kind, "input_template": template, "retry": FREE}})
    return await world.start("one")


async def until_file(path: Path) -> None:
    async def is_there() -> bool:
        return path.exists()

    await until(is_there, path.name, 30)


async def step_of(world: RunningScheduler, run_id: str) -> workflow_pb2.StepRun:
    request = workflow_pb2.GetRunRequest(workflow_run_id=run_id, include_steps=True)
    (step,) = (await world.workflows.GetRun(request, timeout=10)).steps
    response = await world.workflows.GetStepRun(
        workflow_pb2.GetStepRunRequest(step_run_id=step.step_run_id), timeout=10
    )
    found: workflow_pb2.StepRun = response.step_run
    return found


@pytest.mark.parametrize(("first", "second"), BOTH_WAYS)
async def test_a_killed_attempts_checkpoint_goes_on_in_the_other_language(
    world: RunningScheduler, processes: Processes, tmp_path: Path, first: str, second: str
) -> None:
    executor = await spawn(first, processes, world.address, tmp_path, "first")
    run_id = await start(world, "fenced.train", tmp_path)
    await until_file(tmp_path / "half-1")

    async def is_stored() -> bool:
        at = await world.raw.fetchval("select data from rara.checkpoint")
        return at is not None and json.loads(at)["epoch"] == 3

    await until(is_stored, "third checkpoint")
    kept = await world.raw.fetch(
        "select name, sha256, size_bytes, type from rara.checkpoint_artifact order by position"
    )
    log = "".join(f"{first} {epoch}\n" for epoch in (1, 2, 3)).encode()
    assert [tuple(row) for row in kept] == [
        ("weights", hashlib.sha256(weights(SIZE, 3)).hexdigest(), SIZE, "checkpoint"),
        ("log", hashlib.sha256(log).hexdigest(), len(log), "checkpoint"),
    ]
    await executor.kill_and_wait()
    await spawn(second, processes, world.address, tmp_path, "second")
    assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    step = await step_of(world, run_id)
    assert (step.attempt, step.executor_name) == (2, "second")
    assert json.loads(step.output.data) == {
        "epoch": 6,
        "resumed_at": 3,
        "resumed_of": first,
        "by": second,
        "big": 2**53 + 1,
        "log": log.decode() + "".join(f"{second} {epoch}\n" for epoch in (4, 5, 6)),
    }
    (model,) = step.manifest.artifacts  # what was kept for a checkpoint is no output
    assert (model.name, model.digest.sha256) == ("model", hashlib.sha256(weights(SIZE, 6)).hexdigest())
    tokens = await world.raw.fetch("select distinct lease_token, sequence from rara.checkpoint_artifact")
    assert [tuple(row) for row in tokens] == [
        tuple(row) for row in await world.raw.fetch("select lease_token, sequence from rara.checkpoint")
    ]


def inline(name: str, data: bytes, **facts: Any) -> common_pb2.Artifact:
    digest = common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    return common_pb2.Artifact(name=name, digest=digest, inline=data, **facts)


TYPES = ("dataset", "model", "index", "metrics", "report", "checkpoint", "blob")


@pytest.mark.parametrize("language", ["python", "go"])
async def test_what_a_handler_says_of_its_artifacts_is_stored(
    world: RunningScheduler, processes: Processes, tmp_path: Path, language: str
) -> None:
    await spawn(language, processes, world.address, tmp_path, "only")
    names = ("read", "ignored")
    bindings = [workflow_pb2.ArtifactBinding(name=name) for name in names]
    await world.define("one", {"a": {"kind": "fenced.describe", "input_artifacts": bindings}})
    given = [
        inline("read", b"read", type="dataset", metadata=common_pb2.Payload(data=b'{"of":"test"}')),
        inline("ignored", b"ignored"),
    ]
    run_id = await world.start("one", value={}, input_artifacts=given)
    assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    step = await step_of(world, run_id)
    assert json.loads(step.output.data) == {
        "code": "ARTIFACT_INVALID",
        "message": f"artifact other: type {chr(39) if language == 'python' else chr(34)}embedding"
        f"{chr(39) if language == 'python' else chr(34)}: must be one of {', '.join(TYPES)}",
        "of": "dataset",
    }
    made = {artifact.name: artifact for artifact in step.manifest.artifacts}
    assert list(made) == [f"of/{type_}" for type_ in TYPES] + ["plain"]
    assert (made["plain"].type, made["plain"].media_type) == ("blob", "application/octet-stream")
    assert not made["plain"].HasField("metadata")
    read = hashlib.sha256(b"read").hexdigest()
    for type_ in TYPES:
        artifact = made[f"of/{type_}"]
        assert (artifact.type, artifact.media_type) == (type_, f"text/{type_}")
        assert json.loads(artifact.metadata.data) == {
            "type": type_,
            "big": 2**53 + 1,
            "read": {"of": "test"},
        }
        assert artifact.digest.sha256 == hashlib.sha256(type_.encode()).hexdigest()
    rows = await world.raw.fetch(
        "select name, derived_from from rara.lineage where produced and name <> 'plain' order by name"
    )
    assert [(row["name"], row["derived_from"]) for row in rows] == sorted(
        (f"of/{type_}", [read]) for type_ in TYPES
    )
    rows = await world.raw.fetch("select body from rara.step_event where type = 'succeeded'")
    event = job_pb2.ProgressEvent.FromString(rows[0]["body"])
    assert [digest.sha256 for digest in event.succeeded.consumed] == [read]  # what was really read


def published(language: str, attempt: int) -> str:
    return hashlib.sha256(f"{language} {attempt}\n".encode() * SIZE).hexdigest()


async def assert_only_the_second_is_published(
    world: RunningScheduler, run_id: str, first: str, second: str
) -> None:
    """The first one's bytes are a blob that nothing refers to."""
    step = await step_of(world, run_id)
    assert (step.attempt, step.executor_name) == (2, "second")
    assert json.loads(step.output.data) == {"attempt": 2, "by": second}
    assert [artifact.digest.sha256 for artifact in step.manifest.artifacts] == [published(second, 2)]
    named: Any = await world.raw.fetch("select attempt, sha256 from rara.artifact")
    assert [tuple(row) for row in named] == [(2, published(second, 2))]
    made = await world.raw.fetch("select attempt, sha256 from rara.lineage where produced")
    assert [tuple(row) for row in made] == [(2, published(second, 2))]
    blobs = {row["sha256"] for row in await world.raw.fetch("select sha256 from rara.blob")}
    assert blobs == {published(first, 1), published(second, 2)}
    attempts = await world.raw.fetch("select attempt, reason from rara.step_attempt")
    assert [tuple(row) for row in attempts] == [(1, "LEASE_EXPIRED")]


async def is_told(executor: Process) -> bool:
    """Whether it has logged that the lease is somebody else's."""
    return '"job.lost"' in executor.stderr.read_text()


@pytest.mark.parametrize(("first", "second"), BOTH_WAYS)
async def test_an_executor_frozen_past_its_lease_publishes_nothing_when_it_goes_on(
    world: RunningScheduler, processes: Processes, tmp_path: Path, first: str, second: str
) -> None:
    frozen = await spawn(first, processes, world.address, tmp_path, "first")
    run_id = await start(world, "fenced.publish", tmp_path)
    await until_file(tmp_path / "stored-1")
    frozen.freeze()
    await spawn(second, processes, world.address, tmp_path, "second")
    await until_file(tmp_path / "stored-2")
    (tmp_path / "publish-1").touch()  # the first one's handler would end at once
    (tmp_path / "publish-2").touch()
    assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    frozen.thaw()
    await until(lambda: is_told(frozen), "the first executor's word", 30)
    await assert_only_the_second_is_published(world, run_id, first, second)


@pytest.mark.parametrize(("first", "second"), BOTH_WAYS)
async def test_a_success_that_arrives_after_the_lease_has_passed_on_is_refused(
    world: RunningScheduler, processes: Processes, tmp_path: Path, first: str, second: str
) -> None:
    """The first one's handler has returned in time: its event, manifest included, is what comes too late."""
    host, port = world.address.rsplit(":", 1)
    async with FaultProxy(host, int(port)) as proxy:
        apart = await spawn(first, processes, proxy.address, tmp_path, "first")
        run_id = await start(world, "fenced.publish", tmp_path)
        await until_file(tmp_path / "stored-1")
        proxy.stall()
        (tmp_path / "publish-1").touch()
        await until_file(tmp_path / "returned-1")
        await spawn(second, processes, world.address, tmp_path, "second")
        await until_file(tmp_path / "stored-2")
        proxy.resume()
        await until(lambda: is_told(apart), "the first executor's word", 30)
        assert await world.run_state(run_id) == "running"
        (tmp_path / "publish-2").touch()
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    await assert_only_the_second_is_published(world, run_id, first, second)


@pytest.mark.parametrize(("first", "second"), BOTH_WAYS)
async def test_an_effect_that_is_said_too_late_is_not_recorded(
    world: RunningScheduler, processes: Processes, tmp_path: Path, first: str, second: str
) -> None:
    """The first one has had it, and waits in vain for its record: once() never returns to it."""
    host, port = world.address.rsplit(":", 1)
    async with FaultProxy(host, int(port)) as proxy:
        apart = await spawn(first, processes, proxy.address, tmp_path, "first")
        run_id = await start(world, "fenced.charge", tmp_path)
        await until_file(tmp_path / "stored-1")
        proxy.stall()
        (tmp_path / "publish-1").touch()
        await until_file(tmp_path / "charged-1")
        await spawn(second, processes, world.address, tmp_path, "second")
        await until_file(tmp_path / "stored-2")
        proxy.resume()
        await until(lambda: is_told(apart), "the first executor's word", 30)
        assert await world.raw.fetchval("select count(*) from rara.effect") == 0
        (tmp_path / "publish-2").touch()
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    step = await step_of(world, run_id)
    assert json.loads(step.output.data) == f"{second} 2"
    effects = await world.raw.fetch("select name, result, attempt from rara.effect")
    assert [tuple(row) for row in effects] == [("charge", f'"{second} 2"'.encode(), 2)]
    assert not (tmp_path / "returned-1").exists()
