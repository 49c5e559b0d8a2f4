"""Bearer tokens at a real scheduler: every method with every kind of caller, and how long a token is good."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import grpc.aio
import pytest
import pytest_asyncio
import uuid_utils.compat
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, job_pb2, workflow_pb2, workflow_pb2_grpc
from rara_client.errors import from_rpc_error
from rara_scheduler.domain.tokens import Role, new_token
from rara_scheduler.transport.roles import ALLOWED, OPEN
from rara_testing.job_events import accepted
from rara_testing.ports import free_port
from rara_testing.processes import Processes
from rara_testing.scripted_executor import WAIT_S, ScriptedExecutor
from support.bearers import bearing, make_token, revoke
from support.running_executor import running
from support.running_scheduler import KIND, RunningScheduler, beating, running_scheduler, until
from support.spawned_executor import spawn_executor

RECHECK_S = 0.4
REFUSED = {("UNAUTHENTICATED", "CREDENTIAL_INVALID"), ("PERMISSION_DENIED", "NOT_ALLOWED")}

Metadata = tuple[tuple[str, str], ...]


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path, auth="tokens", token_recheck_s=RECHECK_S) as opened:
        yield opened


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    request_streams: bool
    response_streams: bool

    async def ends(self, channel: grpc.aio.Channel, metadata: Metadata) -> tuple[str, str]:
        """Status and stable reason of a call with an empty request; of a stream, of its first answer or its end."""
        kind = ("stream" if self.request_streams else "unary", "stream" if self.response_streams else "unary")
        call = getattr(channel, "_".join(kind))(self.path)
        request: Any = iter(()) if self.request_streams else b""
        try:
            under_way = call(request, metadata=metadata, timeout=WAIT_S)
            if self.response_streams:
                await under_way.read()
                if not under_way.done():
                    under_way.cancel()
                    return "OK", ""
                code = await under_way.code()
                if code is not grpc.StatusCode.OK:
                    async for _ in under_way:
                        pass
            else:
                await under_way
        except grpc.aio.AioRpcError as error:
            fault = from_rpc_error(error)
            return fault.status, fault.reason
        return "OK", ""


async def served(channel: grpc.aio.Channel, metadata: Metadata) -> list[Method]:
    """Every method of every service that the port has, by its own account."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata, timeout=WAIT_S
    )
    names = [service.name async for answer in asked for service in answer.list_services_response.service]
    pool = descriptor_pool.Default()
    return [
        Method(f"/{name}/{method.name}", method.client_streaming, method.server_streaming)
        for name in names
        for method in pool.FindServiceByName(name).methods
    ]


async def test_every_method_is_open_to_its_roles_and_to_nobody_else(world: RunningScheduler) -> None:
    texts = {role: await make_token(world.raw, role, name=role) for role in Role}
    strangers = {
        "nobody": (),
        "garbage": bearing("garbage"),
        "unknown": bearing(new_token(Role.OPERATOR)),
        "two at once": bearing(texts[Role.CLIENT]) + bearing(texts[Role.OPERATOR]),
        "not a bearer": (("authorization", f"Basic {texts[Role.OPERATOR]}"),),
        "expired": bearing(await make_token(world.raw, "operator", name="old", expires_s=-1)),
        "revoked": bearing(await make_token(world.raw, "operator", name="gone")),
    }
    await revoke(world.raw, "gone")
    async with grpc.aio.insecure_channel(world.address) as channel:
        methods = await served(channel, bearing(texts[Role.OPERATOR]))
        # Whatever is served is in the table, and whatever is in the table exists.
        listed = OPEN | set(ALLOWED)
        assert {method.path for method in methods} == {
            path for path in listed if not path.startswith("/grpc.reflection.v1.")
        }
        wrong = []
        for method in methods:
            for who, metadata in strangers.items():
                ended = await method.ends(channel, metadata)
                expected = (
                    ended not in REFUSED
                    if method.path in OPEN
                    else ended == ("UNAUTHENTICATED", "CREDENTIAL_INVALID")
                )
                if not expected:
                    wrong.append((method.path, who, ended))
            for role, text in texts.items():
                ended = await method.ends(channel, bearing(text))
                allowed = method.path in OPEN or role in ALLOWED[method.path]
                if allowed != (ended not in REFUSED) or (
                    not allowed and ended != ("PERMISSION_DENIED", "NOT_ALLOWED")
                ):
                    wrong.append((method.path, role, ended))
        assert wrong == []
    assert len(methods) * (len(strangers) + len(texts)) > 250


async def test_what_a_role_may_do_is_what_its_table_says() -> None:
    """Written out once more, so that a row changed by accident shows."""
    of = {role: {path for path, roles in ALLOWED.items() if role in roles} for role in Role}
    service = workflow_pb2.DESCRIPTOR.services_by_name["WorkflowService"]
    everything = {f"/{service.full_name}/{method.name}" for method in service.methods}
    operating = {
        f"/{service.full_name}/{method}"
        for method in ("DrainExecutor", "Pause", "Resume", "RetryRuns", "CancelRuns", "RequeueSteps")
    }
    of_clients = {path for path in of[Role.CLIENT] if path.startswith(f"/{service.full_name}/")}
    assert of_clients == everything - operating
    assert of[Role.OPERATOR] - of[Role.CLIENT] == operating
    assert of[Role.CLIENT] < of[Role.OPERATOR]
    assert of[Role.EXECUTOR] - of[Role.CLIENT] == {"/rara.v1.DispatchService/Connect"}
    assert {path for path in of[Role.EXECUTOR] if "Workflow" in path} == set()


async def test_a_revoked_token_stops_calls_and_streams(world: RunningScheduler) -> None:
    operator = bearing(await make_token(world.raw, "operator", name="ops"))
    client = bearing(await make_token(world.raw, "client", name="lab"))
    executor_token = bearing(await make_token(world.raw, "executor", name="farm"))
    async with (
        grpc.aio.insecure_channel(world.address) as channel,
        ScriptedExecutor() as executor,
    ):
        workflows: Any = workflow_pb2_grpc.WorkflowServiceStub(channel)
        run_id = await started(workflows, client)
        watch = workflows.WatchRun(
            workflow_pb2.WatchRunRequest(workflow_run_id=run_id), metadata=client, timeout=WAIT_S
        )
        assert await watch.read()
        ends = workflows.WatchRuns(metadata=client, timeout=WAIT_S)
        await ends.write(workflow_pb2.WatchRunsRequest(workflow_run_ids=[run_id]))
        await executor.connect(world.address, metadata=executor_token)
        await executor.hello([KIND])
        await executor.expect("welcome")
        async with beating(executor):
            await revoke(world.raw, "lab")
            await revoke(world.raw, "farm")
            loop = asyncio.get_running_loop()
            begun = loop.time()
            assert await executor.status() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_out(watch)
            assert await ends.code() is grpc.StatusCode.UNAUTHENTICATED
            assert loop.time() - begun < RECHECK_S + 5.0
        fault = from_rpc_error(ended.value)
        assert (fault.status, fault.reason) == ("UNAUTHENTICATED", "CREDENTIAL_INVALID")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await workflows.GetRun(workflow_pb2.GetRunRequest(workflow_run_id=run_id), metadata=client)
        assert from_rpc_error(refused.value).reason == "CREDENTIAL_INVALID"
        # Others are not touched, and use is noted.
        await workflows.GetRun(workflow_pb2.GetRunRequest(workflow_run_id=run_id), metadata=operator)
    assert await until(
        lambda: world.raw.fetchval("select last_used_at is not null from rara.token where name = 'farm'"),
        "the use of a token to be noted",
    )


async def test_a_session_ends_when_its_token_expires(world: RunningScheduler) -> None:
    token = await make_token(world.raw, "executor", name="brief", expires_s=2.0)
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address, metadata=bearing(token))
        await executor.hello([KIND])
        await executor.expect("welcome")
        async with beating(executor):
            code, details, _ = await executor.failure()
    assert (code, "expired" in details) == (grpc.StatusCode.UNAUTHENTICATED, True)


@pytest.mark.parametrize(
    ("kinds", "executor_kind", "offered", "named"),
    [
        (["index.build"], None, ["index.build", "index.drop"], "hello.capabilities[1].kind"),
        (["index.*"], None, ["indexes.build"], "hello.capabilities[0].kind"),
        (["*"], "go", ["index.build"], "hello.executor_kind"),
    ],
)
async def test_a_hello_beyond_the_tokens_kinds_is_refused(
    world: RunningScheduler, kinds: list[str], executor_kind: str | None, offered: list[str], named: str
) -> None:
    token = await make_token(world.raw, "executor", kinds=kinds, executor_kind=executor_kind)
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address, metadata=bearing(token))
        await executor.hello(offered)
        code, details, _ = await executor.failure()
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert details.startswith(named)
    assert await world.raw.fetchval("select count(*) from rara.executor") == 0


async def test_nobody_takes_over_an_executor_of_somebody_else(world: RunningScheduler) -> None:
    first, other = [await make_token(world.raw, "executor", name=name) for name in ("a", "b")]
    successor = await make_token(world.raw, "executor", name="a")  # the token that follows the first
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address, metadata=bearing(first))
        await executor.hello([KIND])
        await executor.expect("welcome")
        async with beating(executor), ScriptedExecutor(executor_id=executor.executor_id) as thief:
            await thief.connect(world.address, metadata=bearing(other))
            await thief.hello([KIND])
            code, details, _ = await thief.failure()
            assert (code, details) == (
                grpc.StatusCode.PERMISSION_DENIED,
                "hello.executor_id: it is the executor of somebody else",
            )
            assert not executor.ended.is_set()
    for token, expected in ((other, "refused"), (successor, "welcome")):
        async with ScriptedExecutor(executor_id=executor.executor_id) as again:
            await again.connect(world.address, metadata=bearing(token))
            await again.hello([KIND])
            if expected == "welcome":
                await again.expect("welcome")
            else:
                assert await again.status() is grpc.StatusCode.PERMISSION_DENIED


async def seat(address: str, token: str | None, executor_id: str, *kinds: str) -> str:
    """`welcome`, or the reason for which the session of such an executor is refused."""
    async with ScriptedExecutor(executor_id=executor_id) as executor:
        await executor.connect(address, metadata=() if token is None else bearing(token))
        await executor.hello(kinds)
        try:
            await executor.expect("welcome")
        except AssertionError:
            return (await executor.failure())[1]
    return "welcome"


async def test_executors_from_before_tokens_are_taken_over_by_their_kinds_alone(
    database_url: str, tmp_path: Path
) -> None:
    executor_id = str(uuid_utils.compat.uuid7())
    refused = "hello.executor_id: it is the executor of somebody else"
    async with running_scheduler(database_url, tmp_path) as world:
        assert await seat(world.address, None, executor_id, KIND) == "welcome"
    async with running_scheduler(database_url, tmp_path, auth="tokens") as world:
        other = await make_token(world.raw, "executor", name="other", kinds=["other.only"])
        farm = await make_token(world.raw, "executor", name="farm", kinds=[f"{KIND.split('.')[0]}.*"])
        assert await seat(world.address, other, executor_id, "other.only") == refused
        # One that is connected, to a scheduler which asks nobody yet, is nobody else's either.
        await world.raw.execute("update rara.executor set ended_at = null, last_seen_at = now()")
        assert await seat(world.address, farm, executor_id, KIND) == refused
        await world.raw.execute("update rara.executor set last_seen_at = now() - interval '1 minute'")
        assert await seat(world.address, farm, executor_id, KIND) == "welcome"
        assert await world.raw.fetchval("select token_name from rara.executor") == "farm"
        # Of the direct link it never is, also when it is gone.
        await world.raw.execute("update rara.executor set token_name = null, direct = true, ended_at = now()")
        assert await seat(world.address, farm, executor_id, KIND) == refused


async def test_a_dialled_executor_stores_artifacts_by_a_token_of_its_kinds(
    database_url: str, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with running_scheduler(database_url, tmp_path, auth="tokens", direct_executors=(listen,)) as world:
        own, other = [
            await make_token(world.raw, "executor", name=name, kinds=[kinds])
            for name, kinds in (("dialled", "case.*"), ("other", "other.only"))
        ]
        operator = bearing(await make_token(world.raw, "operator", name="ops"))
        async with (
            grpc.aio.insecure_channel(world.address) as channel,
            running(
                world.address,
                tmp_path,
                modules="support.blob_handlers",
                listen=listen,
                security={"token": own},
            ) as executor,
        ):
            workflows: Any = workflow_pb2_grpc.WorkflowServiceStub(channel)
            value = {"folder": str(tmp_path), "size_bytes": 200_000}
            run_id = await started(workflows, operator, kind="case.blob", value=value)
            assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
            assert await world.raw.fetchval("select size_bytes from rara.artifact") == 200_000
            assert await world.raw.fetchval("select direct from rara.executor")
            assert await seat(world.address, other, executor.executor_id, "other.only") == (
                "hello.executor_id: it is the executor of somebody else"
            )


async def test_an_executor_uploads_under_a_lease_of_its_own_alone(world: RunningScheduler) -> None:
    client = bearing(await make_token(world.raw, "client"))
    own, other = [bearing(await make_token(world.raw, "executor", name=name)) for name in ("a", "b")]
    digest = common_pb2.Digest(sha256=hashlib.sha256(b"blob").hexdigest(), size_bytes=4)
    async with grpc.aio.insecure_channel(world.address) as channel, ScriptedExecutor() as executor:
        artifacts: Any = artifact_pb2_grpc.ArtifactServiceStub(channel)
        await started(workflow_pb2_grpc.WorkflowServiceStub(channel), client)
        await executor.connect(world.address, metadata=own)
        await executor.hello([KIND])
        await executor.credit(1)
        async with beating(executor):
            lease = (await executor.expect_job()).lease
            await executor.events(accepted(lease, 1))

            async def create(metadata: Metadata, lease: job_pb2.Lease | None) -> str:
                request = artifact_pb2.CreateUploadRequest(digest=digest, lease=lease)
                try:
                    return str(
                        (await artifacts.CreateUpload(request, metadata=metadata)).upload_id and "created"
                    )
                except grpc.aio.AioRpcError as error:
                    return from_rpc_error(error).reason

            assert await create(own, lease) == "created"
            assert await create(own, None) == "NOT_ALLOWED"
            assert await create(other, lease) == "LEASE_LOST"
            assert await create(client, None) == "created"


async def read_out(call: Any) -> None:
    """Read a stream to its end. Raises what it ends with."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def started(workflows: Any, metadata: Metadata, *, kind: str = KIND, value: object = None) -> str:
    """The id of a run of one step, which waits for an executor."""
    definition = workflow_pb2.Definition(
        definition="one",
        steps=[workflow_pb2.StepDefinition(step_name="a", kind=kind)],
        on_failure=workflow_pb2.ON_FAILURE_FAIL_FAST,
    )
    await workflows.RegisterDefinition(
        workflow_pb2.RegisterDefinitionRequest(definition=definition), metadata=metadata, timeout=WAIT_S
    )
    response = await workflows.StartRun(
        workflow_pb2.StartRunRequest(
            definition="one", input=common_pb2.Payload(data=json.dumps(value).encode())
        ),
        metadata=metadata,
        timeout=WAIT_S,
    )
    return str(response.run.workflow_run_id)


async def test_who_makes_work_too_often_is_told_when_to_come_again(database_url: str, tmp_path: Path) -> None:
    async with running_scheduler(
        database_url, tmp_path, auth="tokens", rate_limit_per_s=0.01, rate_limit_burst=3
    ) as world:
        busy, other = [
            bearing(await make_token(world.raw, "client", name=name)) for name in ("busy", "other")
        ]
        async with grpc.aio.insecure_channel(world.address) as channel:
            workflows: Any = workflow_pb2_grpc.WorkflowServiceStub(channel)
            run_id = await started(workflows, busy)  # two calls
            start = workflow_pb2.StartRunRequest(definition="one")
            await workflows.StartRun(start, metadata=busy)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await workflows.StartRun(start, metadata=busy)
            fault = from_rpc_error(refused.value)
            assert (fault.status, fault.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
            assert fault.retry_after_s is not None
            assert 50.0 < fault.retry_after_s <= 100.0
            # Reads go on, and so do others.
            await workflows.GetRun(workflow_pb2.GetRunRequest(workflow_run_id=run_id), metadata=busy)
            await workflows.StartRun(start, metadata=other)
            # A batch counts as its runs, and one that is larger than a full bucket takes all of it.
            bulk = bearing(await make_token(world.raw, "client", name="bulk"))
            batch = workflow_pb2.BatchStartRunsRequest(requests=[start] * 5)
            await workflows.BatchStartRuns(batch, metadata=bulk)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await workflows.StartRun(start, metadata=bulk)
            assert from_rpc_error(refused.value).reason == "RATE_LIMITED"
    assert await count_runs(database_url) == 8


async def count_runs(database_url: str) -> int:
    raw = await asyncpg.connect(database_url)
    try:
        return int(await raw.fetchval("select count(*) from rara.workflow_run"))
    finally:
        await raw.close()


READS_ENVIRONMENT = """
import os
from rara_executor import Job, operation

@operation("env.read", version="1.0.0")
def read(job: Job) -> list[str]:
    return [os.environ.get("RARA_TOKEN", "none"), os.environ["SOMETHING_ELSE"], "x" + os.environ["SAME_TOKEN"] + "x"]
"""


async def test_a_handler_gets_no_token_and_cannot_send_it(world: RunningScheduler, tmp_path: Path) -> None:
    token = await make_token(world.raw, "executor", kinds=["env.*"])
    client = bearing(await make_token(world.raw, "client"))
    (tmp_path / "reads_environment.py").write_text(READS_ENVIRONMENT)
    async with (
        Processes(tmp_path) as processes,
        grpc.aio.insecure_channel(world.address) as channel,
    ):
        env = {
            "PYTHONPATH": str(tmp_path),
            "RARA_TOKEN": token,
            "SOMETHING_ELSE": "else",
            "SAME_TOKEN": token,
        }
        await spawn_executor(processes, world.address, tmp_path, module="reads_environment", env=env)
        run_id = await started(workflow_pb2_grpc.WorkflowServiceStub(channel), client, kind="env.read")
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
    assert json.loads(await world.raw.fetchval("select output from rara.result")) == ["none", "else", "x***x"]
