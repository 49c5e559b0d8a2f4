"""A raw secret of each kind is planted wherever text comes in; afterwards it is in no table, log, trace or metric."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import grpc.aio
import pytest
from rara.v1 import common_pb2, workflow_pb2
from rara_client.errors import from_rpc_error
from rara_testing.job_events import accepted, cancelled, effect, failed, progress, running, succeeded
from rara_testing.processes import Processes
from rara_testing.scripted_executor import ScriptedExecutor
from support.go_executor import spawn_go_executor
from support.otlp_receiver import OtlpReceiver
from support.planted_secrets import SAMPLES, everything_stored
from support.running_scheduler import KIND, RunningScheduler
from support.spawned_scheduler import spawned_scheduler

RESOLVED = "s3cr3t/of=a step"  # what the rules do not know: only its executor does

# Of each the part that is the secret.
CORES = SAMPLES | {
    "private_key": "MIIEow",
    "url_with_password": "s3cr3t-7f",
    "slack_webhook": "B00000000/XXXX",
}


def plant(message: Any, secret: str) -> Any:
    """The message with the secret in each string, map and payload that it has."""
    payload = common_pb2.Payload(
        data=json.dumps({"note": f"use {secret} here", f"k {secret}": [secret]}).encode()
    )
    for field in message.DESCRIPTOR.fields:
        if field.name in ("output", "checkpoint", "details", "result", "metadata"):
            getattr(message, field.name).CopyFrom(payload)
        elif field.name in ("message", "stack_trace", "reason"):
            setattr(message, field.name, f"it was {secret}, you see")
    return message


async def answers(call: Any) -> str:
    """The stable reason that a call was refused for, which must not repeat what it refuses."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        fault = from_rpc_error(error)
        said = f"{fault} {fault.violations} {fault.metadata}"
        return "told the secret" if any(core in said for core in CORES.values()) else fault.reason
    return "OK"


async def plant_in_calls(world: RunningScheduler, secret: str) -> None:
    """What clients send is refused, or kept without the secret where a refusal would lose something."""
    value = common_pb2.Payload(data=json.dumps({"at": [secret]}).encode())
    start = workflow_pb2.StartRunRequest
    digest = common_pb2.Digest(sha256="0" * 64, size_bytes=1)
    for request in (
        start(definition="one", input=value),
        start(definition="one", labels={"note": secret}),
        start(definition="one", idempotency_key=secret),
        start(
            definition="one",
            input_artifacts=[common_pb2.Artifact(name="a", digest=digest, metadata=value)],
        ),
    ):
        # A text that no label or key may be at all is refused for that instead.
        assert await answers(world.workflows.StartRun(request)) in ("SECRET_IN_PAYLOAD", "FIELD_INVALID"), (
            request
        )
    step = workflow_pb2.StepDefinition(step_name="a", kind=KIND, input_template=value)
    definition = workflow_pb2.Definition(
        definition="leaky", steps=[step], on_failure=workflow_pb2.ON_FAILURE_FAIL_FAST
    )
    register = workflow_pb2.RegisterDefinitionRequest(definition=definition)
    assert await answers(world.workflows.RegisterDefinition(register)) in (
        "SECRET_IN_PAYLOAD",
        "DEFINITION_INVALID",
    )
    run_id = await world.start("one")
    cancel = workflow_pb2.CancelRunRequest(workflow_run_id=run_id, message=f"since {secret}")
    assert await answers(world.workflows.CancelRun(cancel)) == "OK"


async def plant_in_events(world: RunningScheduler, executor: ScriptedExecutor, secret: str) -> None:
    """One step for each way to end, with the secret in all that its executor says."""
    data = b"x"
    digest = common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    artifact = plant(common_pb2.Artifact(name="a", inline=data, digest=digest), secret)
    manifest = common_pb2.ArtifactManifest(artifacts=[artifact])
    for ending in ("succeeded", "failed", "cancelled"):
        run_id = await world.start("one")
        lease = (await executor.expect_job()).lease
        if ending == "cancelled":
            await world.cancel(run_id)
        said, kept = progress(lease, 3), effect(lease, 4, "call", None)
        plant(said.progress, secret)
        plant(kept.effect, secret)
        await executor.events(accepted(lease, 1), running(lease, 2), said, kept)
        # What the next attempt would get is refused, by its path, and not altered.
        for number, path in ((3, "progress.checkpoint: "), (4, "effect.result: ")):
            refused = await executor.expect_refusal(lease, number)
            assert (refused.code, refused.message.startswith(path)) == ("SECRET_IN_PAYLOAD", True)
            assert not any(core in refused.message for core in CORES.values())
        said = progress(lease, 3)
        plant(said.progress, secret).ClearField("checkpoint")
        match ending:
            case "succeeded":
                last = succeeded(lease, 5)
                plant(last.succeeded, secret).manifest.CopyFrom(manifest)
            case "failed":
                last = failed(lease, 5, code="TOOL_FAILED", retryable=False)
                plant(last.failed, secret).manifest.CopyFrom(manifest)
            case _:
                last = cancelled(lease, 5)
                plant(last.cancelled, secret).ClearField("checkpoint")
        await executor.events(said, effect(lease, 4, "call", None), last)
        assert await world.until_run(run_id, "succeeded", "failed", "cancelled") == ending


async def test_no_planted_secret_is_in_a_table_log_trace_or_metric(database_url: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    async with (
        OtlpReceiver() as receiver,
        Processes(logs) as processes,
        spawned_scheduler(
            processes, database_url, tmp_path, env=receiver.env, log_level="debug"
        ) as scheduler,
    ):
        world = scheduler.world
        await world.define("one", {"a": {"kind": KIND}})
        for secret in SAMPLES.values():
            await plant_in_calls(world, secret)
            async with ScriptedExecutor() as leaky:
                await leaky.connect(world.address)
                await leaky.hello([KIND], labels={"note": secret})
                _, details, _ = await leaky.failure()
                assert details.startswith("hello.labels: ")
                assert secret not in details
        async with world.executor(credit=1000) as executor:
            await plant_in_events(world, executor, " and ".join(SAMPLES.values()))
        kept = await everything_stored(world.raw)
        for rule in SAMPLES.keys() - {"url_with_password"}:  # or nothing was looked at
            assert kept.count(f"[redacted {rule}]".encode()) >= 10, rule
        assert scheduler.process is not None
        assert await scheduler.process.stop() == 0  # and sends what it has
        assert {"commit", "dispatch"} <= {span.name for span in receiver.spans}
        assert receiver.metrics
    said = b"".join(path.read_bytes() for path in logs.rglob("*") if path.is_file())
    assert b"session.opened" in said
    found = {
        (rule, where)
        for rule, core in CORES.items()
        for where, text in (("database", kept), ("logs", said), ("telemetry", receiver.received))
        if core.encode() in text
    }
    assert found == set()


@pytest.mark.needs("go")
@pytest.mark.parametrize("provider", ["env", "file"])
async def test_a_go_handlers_secret_is_in_no_table_log_trace_or_metric(
    database_url: str, tmp_path: Path, provider: str
) -> None:
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "LEAKY").write_text(f"{RESOLVED}\n")
    logs = tmp_path / "logs"
    async with (
        OtlpReceiver() as receiver,
        Processes(logs) as processes,
        spawned_scheduler(
            processes, database_url, tmp_path, env=receiver.env, log_level="debug"
        ) as scheduler,
    ):
        world = scheduler.world
        executor = await spawn_go_executor(
            processes,
            world.address,
            tmp_path,
            env={"LEAKY": RESOLVED, "RARA_LOG_LEVEL": "debug"} | receiver.env,
            secrets_dir=tmp_path / "secrets",
        )
        reference = common_pb2.SecretRef(provider=provider, name="LEAKY")
        await world.define("leaks", {"a": {"kind": "probe.fail", "secrets": {"probe": reference}}})
        run_id = await world.start("leaks", value={"secret": True, "code": "TOOL_FAILED", "retryable": False})
        assert await world.until_run(run_id, "succeeded", "failed") == "failed"
        assert await world.steps(run_id) == {"a": ("terminal_failed", "TOOL_FAILED")}
        kept = await everything_stored(world.raw)
        assert await executor.stop() == 0  # and sends what it has
        assert "process probe.fail" in {span.name for span in receiver.spans}
    assert b"@host/?key=***" in kept
    said = b"".join(path.read_bytes() for path in logs.rglob("*") if path.is_file())
    assert b'"secret":"***"' in said
    for form in (RESOLVED, quote_plus(RESOLVED), base64.b64encode(RESOLVED.encode()).decode()):
        assert form.encode() not in kept
        assert form.encode() not in said
        assert form.encode() not in receiver.received
