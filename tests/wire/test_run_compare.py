"""`rara run compare` over a real scheduler: two real runs of which one thing differs, and what the command says."""

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest_asyncio
from rara.v1 import common_pb2, workflow_pb2
from rara_testing.auto_executor import AutoExecutor, AutoJob, JobFailure
from rara_testing.job_events import json_payload
from rara_testing.scripted_executor import WAIT_S
from support.command_line import Ended, rara
from support.running_scheduler import RunningScheduler, running_scheduler

SEED = b"a seed"
LEXICON = ContextVar("LEXICON", default=b"a lexicon")  # that a step reads, though no definition names it


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


def artifact(name: str, data: bytes) -> common_pb2.Artifact:
    digest = common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    return common_pb2.Artifact(name=name, type="dataset", digest=digest, inline=data)


async def work(job: AutoJob) -> object:
    """Bytes and a number that follow from all that the step was given, and from the version that runs."""
    if job.request.kind == "flow.index" and (job.input or {}).get("depth") == 13:
        raise JobFailure("UNLUCKY", retryable=False)
    given = [job.request.kind, job.request.kind_version, job.input]
    if job.request.kind == "flow.aside":
        lexicon = artifact("lexicon", LEXICON.get())
        job.consumed.append(lexicon.digest)
        given.append(lexicon.digest.sha256)
    given += sorted([item.name, item.digest.sha256] for item in job.request.input_artifacts)
    data = json.dumps(given).encode()
    name = job.request.kind.removeprefix("flow.")
    job.artifacts.append(artifact(name, data))
    return {
        "size": int(hashlib.sha256(data).hexdigest()[:4], 16),
        "text": "x" * 5_000,
    }  # more than a list shows


def definition(**clean: Any) -> workflow_pb2.Definition:
    """collect -> clean -> index, and beside them a step that takes nothing."""
    bound = workflow_pb2.ArtifactBinding
    made = workflow_pb2.Definition(definition="flow", on_failure=workflow_pb2.ON_FAILURE_CONTINUE)
    made.steps.add(
        step_name="collect",
        kind="flow.collect",
        input_template=json_payload({"source": {"$ref": "/run/input/source"}}),
        input_artifacts=[bound(name="seed")],
    )
    made.steps.add(
        step_name="clean",
        kind="flow.clean",
        input_template=json_payload(clean),
        input_artifacts=[bound(name="corpus", from_step="collect", from_name="collect")],
    )
    made.steps.add(
        step_name="index",
        kind="flow.index",
        input_template=json_payload(
            {"size": {"$ref": "/steps/clean/output/size"}, "depth": {"$ref": "/run/input/depth"}}
        ),
    )
    made.steps.add(step_name="aside", kind="flow.aside", input_template=json_payload({}))
    return made


async def register(world: RunningScheduler, made: workflow_pb2.Definition) -> None:
    request = workflow_pb2.RegisterDefinitionRequest(definition=made)
    await world.workflows.RegisterDefinition(request, timeout=WAIT_S)


async def run(
    world: RunningScheduler, *, source: str = "x", depth: int = 1, seed: bytes = SEED, version: int = 1
) -> str:
    run_id = await world.start(
        "flow",
        value={"source": source, "depth": depth},
        definition_version=version,
        input_artifacts=[artifact("seed", seed)],
    )
    await world.until_run(run_id, "succeeded", "failed")
    return run_id


@contextlib.asynccontextmanager
async def executor(world: RunningScheduler, **more: Any) -> AsyncIterator[None]:
    kinds = ("flow.collect", "flow.clean", "flow.index", "flow.aside")
    async with AutoExecutor(world.address, dict.fromkeys(kinds, work), **more):
        yield


async def compare(world: RunningScheduler, a: str, b: str, *more: str) -> Ended:
    return await rara("run", "compare", a, b, *more, server=world.address)


def document_of(ended: Ended) -> Any:
    """Behind what the scheduler of this process may have logged meanwhile."""
    return json.loads(ended.lines[-1])


def told(document: Any) -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By step: its verdict, and the kinds and names of its causes."""
    return {
        step["step_name"]: (step["verdict"], [(cause["kind"], cause["what"]) for cause in step["causes"]])
        for step in document["steps"]
    }


SAME: tuple[str, list[tuple[str, str]]] = ("same", [])
FOLLOWS_COLLECT = ("consequence", [("upstream", "collect")])
FOLLOWS_CLEAN = ("consequence", [("upstream", "clean")])


async def test_each_cause_is_found_between_two_real_runs(world: RunningScheduler) -> None:
    await register(world, definition(mode="plain"))
    await register(world, definition(mode="strict"))
    async with executor(world):
        base = await run(world)
        again = await run(world)
        other_source = await run(world, source="y")
        other_depth = await run(world, depth=2)
        other_seed = await run(world, seed=b"another seed")
        other_definition = await run(world, version=2)
    LEXICON.set(b"another lexicon")
    async with executor(world):
        other_lexicon = await run(world)
    LEXICON.set(b"a lexicon")
    async with executor(world, versions=("1.1.0",), executor_kind="go"):
        other_code = await run(world)

    same = await compare(world, base, again, "-o", "json", "--exit-code")
    assert (same.code, document_of(same)["result"]) == (0, "same")
    assert list(told(document_of(same)).values()) == [SAME] * 4
    assert [step["unread_output_bytes"] for step in document_of(same)["steps"]] == [0] * 4

    async def difference(other: str) -> Any:
        ended = await compare(world, base, other, "-o", "json", "--exit-code")
        found = document_of(ended)
        assert (ended.code, ended.err, found["result"]) == (9, "", "different")
        return found

    assert told(await difference(other_source)) == {
        "collect": ("cause", [("input", "/source")]),
        "clean": FOLLOWS_COLLECT,
        "index": FOLLOWS_CLEAN,
        "aside": SAME,
    }
    assert told(await difference(other_seed)) == {
        "collect": ("cause", [("input_artifact", "seed")]),
        "clean": FOLLOWS_COLLECT,
        "index": FOLLOWS_CLEAN,
        "aside": SAME,
    }
    document = await difference(other_depth)
    assert told(document) == {
        "index": ("cause", [("input", "/depth")]), "collect": SAME, "clean": SAME, "aside": SAME,
    }  # fmt: skip
    size, bytes_made = document["steps"][0]["changes"]
    assert (size["kind"], size["what"], size["delta"]) == ("output", "/size", size["b"] - size["a"])
    assert (bytes_made["kind"], bytes_made["what"]) == ("artifact", "index")
    assert bytes_made["a"]["sha256"] != bytes_made["b"]["sha256"]
    assert told(await difference(other_definition)) == {
        "clean": ("cause", [("definition", "/input_template/mode")]),
        "index": FOLLOWS_CLEAN,
        "collect": SAME,
        "aside": SAME,
    }
    digests = sorted(artifact("", data).digest.sha256 for data in (b"a lexicon", b"another lexicon"))
    document = await difference(other_lexicon)
    assert told(document).pop("aside")[0] == "cause"
    assert sorted(told(document)["aside"][1]) == [("read", digest) for digest in digests]
    assert [step["verdict"] for step in document["steps"][1:]] == ["same"] * 3
    document = await difference(other_code)
    assert {name: verdict for name, (verdict, _) in told(document).items()} == dict.fromkeys(
        ("collect", "clean", "index", "aside"), "cause"
    )
    assert told(document)["aside"][1] == [("code", "version"), ("code", "language")]
    ran = [
        (step["a"]["ran_version"], step["b"]["ran_version"], step["b"]["ran_in"])
        for step in document["steps"]
    ]
    assert ran == [("1.0.0", "1.1.0", "go")] * 4

    text = await compare(world, base[:23], other_depth)
    assert text.code == 0
    assert text.lines[-1] == "1 of 4 steps differ: index because of input /depth 1 → 2."
    names = await compare(world, base, other_source, "-o", "name")
    assert names.lines == ["collect", "clean", "index"]
    step_id = document["steps"][3]["b"]["step_run_id"]
    shown = await rara("step", "get", step_id, server=world.address)
    assert "ran        1.1.0 in go (rara-scripted/1)" in shown.lines


async def test_a_retried_run_shares_what_it_reuses_and_a_fault_is_told(world: RunningScheduler) -> None:
    await register(world, definition())
    async with executor(world):
        failed = await run(world, depth=13)
        good = await run(world, depth=1)
        response = await world.workflows.RetryRun(
            workflow_pb2.RetryRunRequest(workflow_run_id=failed), timeout=WAIT_S
        )
        retry = response.run.workflow_run_id
        await world.until_run(retry, "failed")

    retried = document_of(await compare(world, failed, retry, "-o", "json"))
    assert retried["result"] == "same"  # it fails again, for the same reason
    steps = {step["step_name"]: step for step in retried["steps"]}
    assert [
        (steps[name]["a"]["is_reused"], steps[name]["b"]["is_reused"]) for name in ("collect", "index")
    ] == [
        (False, True),
        (False, False),
    ]
    document = document_of(await compare(world, good, failed, "-o", "json"))
    assert document["steps"][0]["changes"][0] == {
        "kind": "state", "what": "", "a": "succeeded", "b": "terminal_failed UNLUCKY",
    }  # fmt: skip
    assert told(document)["index"] == ("cause", [("input", "/depth")])


async def test_unfinished_equal_and_unknown_runs_are_told_apart(world: RunningScheduler) -> None:
    await register(world, definition())
    async with executor(world):
        done = await run(world)
    waiting = await world.start(
        "flow", value={"source": "x", "depth": 1}, input_artifacts=[artifact("seed", SEED)]
    )

    so_far = await compare(world, done, waiting, "--exit-code")
    assert (so_far.code, so_far.lines[-1]) == (8, "same so far: 4 of 4 steps have not ended in both")
    itself = await compare(world, done, done, "--exit-code")
    assert (itself.code, itself.lines[-1]) == (0, "same: A and B are one run")
    nowhere = "0198c2a0-0000-7000-8000-000000000001"
    missing = await compare(world, done, nowhere)
    assert (missing.code, missing.out) == (3, "")
    assert nowhere in missing.err
    assert "RUN_NOT_FOUND" in missing.err
    for words in ([done], [], [done, done, done], [done, done, "--latest"]):
        usage = await rara("run", "compare", *words, server=world.address)
        assert (usage.code, usage.out) == (2, "")
    for words in (["--latest"], [done, "--latest"]):
        newest = await rara("run", "compare", *words, server=world.address)
        ids = [line.split()[1] for line in newest.lines if line.startswith(("A ", "B "))]
        assert ids == [done, waiting]
