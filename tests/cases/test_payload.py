"""Data that is legal for a handler never breaks the store or the wire, and no secret gets into either."""

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import asyncpg
import grpc
import grpc.aio
import pytest
import pytest_asyncio
from rara.v1 import common_pb2, job_pb2, workflow_pb2, workflow_pb2_grpc
from rara_testing.processes import Processes
from support import faulty
from support.api_errors import refusal
from support.otlp_receiver import OtlpReceiver
from support.planted_secrets import everything_stored
from support.running_executor import running
from support.running_scheduler import RunningScheduler, running_scheduler
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

MODULE = "support.faulty"
FIVE = workflow_pb2.RetryPolicy(max_attempts=5)
# By the step's name: how it ends at its first attempt, wherever in it the text stands.
PLACES = {
    "value": ("terminal_failed", "PAYLOAD_INVALID"),
    "key": ("terminal_failed", "PAYLOAD_INVALID"),
    "deep": ("terminal_failed", "PAYLOAD_INVALID"),
    "checkpoint": ("terminal_failed", "PAYLOAD_INVALID"),
    "effect": ("terminal_failed", "PAYLOAD_INVALID"),
    "effect-name": ("terminal_failed", "PAYLOAD_INVALID"),
    "artifact-metadata": ("terminal_failed", "PAYLOAD_INVALID"),
    "message": ("terminal_failed", "TOOL_FAILED"),
    "details": ("terminal_failed", "TOOL_FAILED"),
    "stack": ("terminal_failed", "TOOL_FAILED"),
    "code": ("terminal_failed", "HANDLER_FAILED"),
    "foreign": ("retryable_failed", "HANDLER_FAILED"),
    "progress": ("succeeded", ""),
    "metric": ("succeeded", ""),
    "artifact-name": ("terminal_failed", "ARTIFACT_INVALID"),
    "artifact-type": ("terminal_failed", "ARTIFACT_INVALID"),
    "log": ("succeeded", ""),
}
PATHS = {"value": "/", "key": "/", "deep": "/a/0/b/1/0", "checkpoint": "/at", "effect": "/0"}


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def rows_of(world: RunningScheduler, run_id: str) -> dict[str, asyncpg.Record]:
    rows = await world.raw.fetch("select * from rara.step_state where workflow_run_id = $1::uuid", run_id)
    return {row["step_name"]: row for row in rows}


def error_of(row: asyncpg.Record) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(row["error"])
    return error


@pytest.mark.case("PAY-1", "PAY-2")
@pytest.mark.parametrize("what", ["nul", "surrogate", "bytes"])
async def test_text_that_cannot_be_stored_is_refused_or_mended_wherever_it_stands(
    world: RunningScheduler, tmp_path: Path, what: str
) -> None:
    later = workflow_pb2.RetryPolicy(max_attempts=5)
    later.initial_backoff.FromSeconds(86_400)  # the wait is drawn evenly from 0 on
    later.max_backoff.FromSeconds(86_400)
    steps: dict[str, dict[str, Any]] = {name: {"kind": "faulty.says", "retry": later} for name in PLACES}
    good: dict[str, dict[str, Any]] = {f"good{number}": {"kind": "faulty.harmless"} for number in range(4)}
    async with running(world.address, tmp_path, modules=MODULE, slots=len(steps) + len(good)):
        await world.define("says", steps | good, on_failure="CONTINUE")
        run_id = await world.start("says", value={"folder": str(tmp_path), "what": what})
        for name, row in (await rows_of(world, run_id)).items():
            await world.until_step(str(row["step_run_id"]), PLACES.get(name, ("succeeded", ""))[0])
        rows = await rows_of(world, run_id)
        assert {name: (rows[name]["state"], rows[name]["reason"]) for name in PLACES} == PLACES | {
            "foreign": ("retryable_failed", "HANDLER_FAILED")
        }
        assert {row["attempt"] for row in rows.values()} == {1}
        assert {rows[name]["state"] for name in good} == {"succeeded"}
        assert all(len(faulty.notes(tmp_path, name, "starts")) == 1 for name in (*steps, *good))
        for name, path in PATHS.items():
            assert f" at {path}: " in error_of(rows[name])["message"], name
        assert "\ufffd" in error_of(rows["message"])["message"]
        assert "\ufffd" in error_of(rows["stack"])["stack_trace"]
        assert "details at /deep/0" in error_of(rows["details"])["message"]
        events = await progress_of(world, rows["progress"])
        assert [event.message for event in events] == [
            {"nul": "a\ufffdb", "surrogate": "a\ufffdb"}.get(what, "\ufffd" * 3)
        ]
        (metric,) = await progress_of(world, rows["metric"])
        assert all("\ufffd" in name for name in metric.metrics)
        await world.cancel(run_id)  # the one that may heal waits
        await world.until_run(run_id, "failed", "cancelled")


async def progress_of(world: RunningScheduler, row: asyncpg.Record) -> list[job_pb2.JobProgress]:
    stored = await world.raw.fetch(
        "select body from rara.step_event where step_run_id = $1 and type = 'progress' order by sequence",
        row["step_run_id"],
    )
    return [job_pb2.ProgressEvent.FromString(event["body"]).progress for event in stored]


# Megabytes take their time on a busy machine, and time is not what is tested.
PATIENT: dict[str, Any] = {"lease_s": 20.0, "accept_timeout_s": 10.0, "silence_s": 10.0}
LIMIT = 4 << 20
OVER = 5 << 20


@pytest.mark.case("PAY-3")
async def test_what_is_too_large_is_named_at_once_and_the_stream_stays_up(
    database_url: str, tmp_path: Path
) -> None:
    async with (
        running_scheduler(
            database_url, tmp_path, max_payload_bytes=LIMIT, max_frame_bytes=2 * LIMIT + (1 << 20), **PATIENT
        ) as world,
        running(world.address, tmp_path, modules=MODULE, slots=10),
        # A run comes back with its input, which is all that one message of gRPC's own default could hold.
        grpc.aio.insecure_channel(
            world.address, options=[("grpc.max_receive_message_length", -1)]
        ) as channel,
    ):
        world.workflows = workflow_pb2_grpc.WorkflowServiceStub(channel)
        await world.define("echo", {"echo": {"kind": "faulty.echo"}})
        for size in (LIMIT + 1, OVER):
            refused = await refusal(
                world.workflows.StartRun(
                    workflow_pb2.StartRunRequest(definition="echo", input=text_of(size)), timeout=15
                )
            )
            assert (refused.status, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PAYLOAD_TOO_LARGE")
        assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 0

        for size in (LIMIT - 1, LIMIT):  # there and back
            response = await world.workflows.StartRun(
                workflow_pb2.StartRunRequest(definition="echo", input=text_of(size)), timeout=15
            )
            run_id = response.run.workflow_run_id
            assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
            output = await world.raw.fetchval(
                "select length(convert_from(output, 'UTF8')) from rara.step_state where workflow_run_id = $1::uuid",
                run_id,
            )
            assert output == size

        too_large = ("terminal_failed", "PAYLOAD_TOO_LARGE")
        failed = ("terminal_failed", "TOOL_FAILED")
        for size, expected in (
            (LIMIT, {"output": ("succeeded", ""), "checkpoint": ("succeeded", ""), "details": failed}),
            (LIMIT + 1, {"output": too_large, "checkpoint": too_large, "details": failed}),
            (OVER, {"output": too_large, "checkpoint": too_large, "details": failed}),
            (16 << 10, {"effect": ("succeeded", ""), "message": failed, "progress": ("succeeded", "")}),
            ((16 << 10) + 1, {"effect": too_large}),
            (1 << 20, {"effect": too_large, "message": failed, "progress": ("succeeded", "")}),
        ):
            name = f"sized-{size}"
            steps = {step: {"kind": "faulty.sized", "retry": FIVE} for step in expected}
            await world.define(name, steps, on_failure="CONTINUE")
            run_id = await world.start(name, value={"folder": str(tmp_path), "size": size})
            await world.until_run(run_id, "succeeded", "failed")
            assert await world.steps(run_id) == expected, size
            rows = await rows_of(world, run_id)
            assert {row["attempt"] for row in rows.values()} == {1}
            if "details" in expected:
                assert ("cut" in str(error_of(rows["details"])["details"])) is (size > LIMIT)
            if "message" in expected:
                assert ("[cut: " in error_of(rows["message"])["message"]) is (size > 16 << 10)
            if "progress" in expected:
                (progress,) = await progress_of(world, rows["progress"])
                assert len(progress.message.encode()) <= 4 << 10
                assert "[cut: " in progress.message
        assert await world.raw.fetchval("select count(*) from rara.executor where ended_at is null") == 1
        assert await world.raw.fetchval("select count(*) from rara.step_attempt") == 0


def text_of(size: int) -> common_pb2.Payload:
    return common_pb2.Payload(data=b'"' + b"x" * (size - 2) + b'"')


SECRET = "s3cr3t-7f+/=%"
FORMS = {
    "plain": SECRET,
    "url": quote_plus(SECRET),
    "base64": base64.b64encode(SECRET.encode()).decode().rstrip("="),
    "core": "s3cr3t-7f",
    "basic": base64.b64encode(f"user:{SECRET}".encode()).decode()[8:-4],
}


@pytest.mark.case("PAY-4")
async def test_no_secret_gets_into_the_database_any_log_trace_or_metric(
    database_url: str, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    async with (
        OtlpReceiver() as receiver,
        Processes(logs) as processes,
        spawned_scheduler(
            processes, database_url, tmp_path, env=receiver.env, log_level="debug"
        ) as scheduler,
    ):
        world = scheduler.world
        executor = await spawn_executor(
            processes, scheduler.address, tmp_path, module=MODULE,
            env={"LEAKY_KEY": SECRET, "RARA_LOG_LEVEL": "debug"} | receiver.env,
        )  # fmt: skip
        secrets = {"key": common_pb2.SecretRef(provider="env", name="LEAKY_KEY")}
        two = workflow_pb2.RetryPolicy(max_attempts=2)
        steps: dict[str, dict[str, Any]] = {
            "async": {"kind": "faulty.leaks", "secrets": secrets},
            "keeps": {"kind": "faulty.keeps", "secrets": secrets},
            "blocking": {"kind": "faulty.leaks_blocking", "secrets": secrets, "retry": two},
        }
        await world.define("leaks", steps, on_failure="CONTINUE")
        run_id = await world.start("leaks", value={"folder": str(tmp_path)})
        assert await world.until_run(run_id, "succeeded", "failed") == "failed"
        assert await world.steps(run_id) == {
            "async": ("succeeded", ""),
            "keeps": ("terminal_failed", "SECRET_IN_PAYLOAD"),
            "blocking": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
        }
        attempts = await world.raw.fetch("select error->>'code' as code, error->>'message' as message"
                                         " from rara.step_attempt order by message")  # fmt: skip
        assert [row["code"] for row in attempts] == ["HANDLER_FAILED", "TOOL_FAILED"]
        assert attempts[0]["message"].startswith("RuntimeError: postgresql://")
        assert attempts[1]["message"].startswith("the part that is no secret: cannot reach https://")
        kept = await everything_stored(world.raw)
        assert b"the part that is no secret" in kept  # or nothing was looked at
        assert await executor.stop() == 0
        said = b"".join(path.read_bytes() for path in logs.iterdir()) + "\n".join(executor.lines).encode()
        assert b"last words" in said
        assert "process faulty.leaks" in {span.name for span in receiver.spans}
        assert b"cannot reach https" in said
    found = {
        (name, where)
        for name, form in FORMS.items()
        for where, text in (("database", kept), ("logs", said), ("telemetry", receiver.received))
        if form.encode() in text
    }
    assert found == set()
