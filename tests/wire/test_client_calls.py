"""Calls of the client against a real server: repeats, deadlines, errors, pages."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from rara.v1 import common_pb2, workflow_pb2
from rara_client import (
    CallTimeout,
    Client,
    DefinitionInvalid,
    FieldViolation,
    IdempotencyConflict,
    InvalidArgument,
    NotAllowed,
    NotFound,
    Pacing,
    PayloadInvalid,
    RaraError,
    Refused,
    Unauthenticated,
    Unavailable,
)
from rara_testing.fault_proxy import FaultProxy
from support.scripted_workflow import UNAVAILABLE, Fault, ScriptedServer, scripted_server

RUN = "0198c2a0-0000-7000-8000-000000000001"


@dataclass
class Sleeps:
    """Takes the place of asyncio.sleep: notes, and does not wait."""

    taken: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


@pytest.fixture
def sleeps() -> Sleeps:
    return Sleeps()


@pytest.fixture
async def client(server: ScriptedServer, sleeps: Sleeps) -> AsyncIterator[Client]:
    pacing = Pacing(sleep=sleeps, jitter=lambda: 0.5)
    async with Client.connect(server.address, pacing=pacing) as connected:
        yield connected


def a_run(number: int = 1, **fields: object) -> workflow_pb2.WorkflowRun:
    return workflow_pb2.WorkflowRun(
        workflow_run_id=f"0198c2a0-0000-7000-8000-{number:012d}",
        definition="nightly",
        definition_version=1,
        state=workflow_pb2.WORKFLOW_RUN_STATE_RUNNING,
        **fields,  # type: ignore[arg-type]  # as the test names them
    )


async def test_a_read_is_repeated_after_unavailable_with_growing_jittered_pauses(
    server: ScriptedServer, client: Client, sleeps: Sleeps
) -> None:
    server.workflow.put_run(a_run())
    server.script.plant("GetRun", *[UNAVAILABLE] * 5)
    assert (await client.get_run(RUN)).run.definition == "nightly"
    assert sleeps.taken == [0.05, 0.1, 0.2, 0.4, 0.8]
    assert len(server.script.requests("GetRun")) == 6


@pytest.mark.parametrize("status", ["CANCELLED", "INTERNAL", "UNKNOWN"])
async def test_a_read_is_repeated_after_a_connection_that_broke_without_a_word(
    server: ScriptedServer, client: Client, status: str
) -> None:
    server.workflow.put_run(a_run())
    server.script.plant("GetRun", Fault(grpc.StatusCode[status]))
    assert (await client.get_run(RUN)).run.definition == "nightly"
    server.script.plant("GetRun", Fault(grpc.StatusCode[status], "INTERNAL"))  # the scheduler's own word
    with pytest.raises(RaraError):
        await client.get_run(RUN)
    assert len(server.script.requests("GetRun")) == 3


async def test_a_read_gives_up_after_five_repeats(
    server: ScriptedServer, client: Client, sleeps: Sleeps
) -> None:
    server.workflow.put_run(a_run())
    server.script.plant("GetRun", *[UNAVAILABLE] * 6)
    with pytest.raises(Unavailable) as caught:
        await client.get_run(RUN)
    assert (caught.value.reason, caught.value.status) == ("STORE_UNAVAILABLE", "UNAVAILABLE")
    assert len(sleeps.taken) == 5


async def test_retry_info_is_the_floor_of_the_pause(
    server: ScriptedServer, client: Client, sleeps: Sleeps
) -> None:
    server.workflow.put_run(a_run())
    server.script.plant("GetRun", Fault(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", retry_after_s=2.5))
    await client.get_run(RUN)
    assert sleeps.taken == [2.55]


async def test_a_pause_longer_than_the_time_left_is_not_begun(
    server: ScriptedServer, client: Client, sleeps: Sleeps
) -> None:
    server.workflow.put_run(a_run())
    server.script.plant("GetRun", Fault(grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN", retry_after_s=60))
    with pytest.raises(Unavailable) as caught:
        await client.get_run(RUN, timeout_s=5)
    assert caught.value.retry_after_s == 60
    assert sleeps.taken == []


async def test_start_run_is_repeated_only_with_an_idempotency_key(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.definitions.append(workflow_pb2.Definition(definition="nightly", version=1))
    server.script.plant("StartRun", UNAVAILABLE)
    with pytest.raises(Unavailable):
        await client.start_run("nightly", {"day": 1})
    assert len(server.script.requests("StartRun")) == 1
    server.script.plant("StartRun", UNAVAILABLE)
    response = await client.start_run("nightly", {"day": 1}, idempotency_key="k1")
    assert response.already_started is False
    assert response.run.input.data == b'{"day":1}'
    assert len(server.script.requests("StartRun")) == 3
    assert (await client.start_run("nightly", {"day": 1}, idempotency_key="k1")).already_started is True


async def test_retry_run_and_register_are_not_repeated_and_cancel_run_is(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.put_run(a_run())
    for method in ("RetryRun", "RegisterDefinition", "CancelRun"):
        server.script.plant(method, UNAVAILABLE)
    with pytest.raises(Unavailable):
        await client.retry_run(RUN)
    with pytest.raises(Unavailable):
        await client.register_definition(workflow_pb2.Definition(definition="x"))
    assert (await client.cancel_run(RUN, "enough")).state == workflow_pb2.WORKFLOW_RUN_STATE_CANCELLING
    assert [
        len(server.script.requests(name)) for name in ("RetryRun", "RegisterDefinition", "CancelRun")
    ] == [1, 1, 2]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND"), NotFound),
        (Fault(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_INVALID"), InvalidArgument),
        (Fault(grpc.StatusCode.INVALID_ARGUMENT, "DEFINITION_INVALID"), DefinitionInvalid),
        (Fault(grpc.StatusCode.INVALID_ARGUMENT, "PAYLOAD_TOO_LARGE"), PayloadInvalid),
        (Fault(grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_CONFLICT"), IdempotencyConflict),
        (Fault(grpc.StatusCode.FAILED_PRECONDITION, "RUN_NOT_RETRYABLE"), Refused),
        (Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"), Refused),
        (Fault(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID"), Unauthenticated),
        (Fault(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"), NotAllowed),
        (Fault(grpc.StatusCode.INVALID_ARGUMENT, "A_REASON_OF_A_NEWER_SCHEDULER"), InvalidArgument),
        (Fault(grpc.StatusCode.INTERNAL, "INTERNAL"), RaraError),
    ],
    ids=lambda value: value.reason if isinstance(value, Fault) else value.__name__,
)
async def test_every_reason_has_its_class_and_nothing_but_unavailable_is_repeated(
    server: ScriptedServer, client: Client, fault: Fault, kind: type[RaraError]
) -> None:
    server.script.plant("GetRun", fault)
    with pytest.raises(RaraError) as caught:
        await client.get_run(RUN)
    assert type(caught.value) is kind
    assert (caught.value.reason, caught.value.status) == (fault.reason, fault.status.name)
    assert caught.value.from_scheduler
    assert len(server.script.requests("GetRun")) == 1


async def test_an_error_carries_fields_metadata_and_the_pause_asked_for(
    server: ScriptedServer, client: Client
) -> None:
    server.script.plant(
        "StartRun",
        Fault(
            grpc.StatusCode.INVALID_ARGUMENT,
            "PAYLOAD_INVALID",
            "the input does not fit",
            metadata={"workflow_run_id": RUN},
            violations=[("input.day", "not a number"), ("labels.a", "too long")],
            retry_after_s=0.25,
        ),
    )
    with pytest.raises(PayloadInvalid) as caught:
        await client.start_run("nightly")
    error = caught.value
    assert error.violations == (
        FieldViolation("input.day", "not a number"),
        FieldViolation("labels.a", "too long"),
    )
    assert error.metadata == {"workflow_run_id": RUN}
    assert error.retry_after_s == 0.25
    assert str(error) == "PAYLOAD_INVALID: the input does not fit"


async def test_a_status_without_details_keeps_its_own_name(server: ScriptedServer, client: Client) -> None:
    server.script.plant("GetRun", Fault(grpc.StatusCode.NOT_FOUND))
    with pytest.raises(NotFound) as caught:
        await client.get_run(RUN)
    assert (caught.value.reason, caught.value.from_scheduler) == ("NOT_FOUND", False)


async def test_nobody_listening_is_unavailable_and_not_from_the_scheduler(sleeps: Sleeps) -> None:
    async with Client.connect("127.0.0.1:1", pacing=Pacing(sleep=sleeps)) as client:
        with pytest.raises(Unavailable) as caught:
            await client.get_run(RUN)
    assert not caught.value.from_scheduler
    assert len(sleeps.taken) == 5


async def test_a_silent_peer_ends_the_call_at_its_deadline() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        async with Client.connect(f"127.0.0.1:{port}") as client:
            with pytest.raises(CallTimeout):
                await client.get_run(RUN, timeout_s=0.2)


async def test_lists_fetch_page_after_page_and_only_as_far_as_they_are_read(
    server: ScriptedServer, client: Client
) -> None:
    server.workflow.page_size = 2
    for number in range(1, 6):
        server.workflow.put_run(a_run(number))
    runs = [run.workflow_run_id[-1] async for run in client.list_runs(definition="nightly")]
    assert runs == ["5", "4", "3", "2", "1"]
    assert [request.page_token for request in server.script.requests("ListRuns")] == ["", "2", "4"]
    async for _ in client.list_runs():
        break
    assert len(server.script.requests("ListRuns")) == 4


async def test_the_token_goes_with_every_call_and_never_unencrypted_to_another_machine(
    server: ScriptedServer,
) -> None:
    server.workflow.put_run(a_run())
    async with Client.connect(server.address, token="t0ken") as client:
        await client.get_run(RUN)
        async for _ in client.watch_run(RUN):
            break
    assert [call.metadata["authorization"] for call in server.script.calls] == ["Bearer t0ken"] * 2
    with pytest.raises(ValueError, match="needs TLS"):
        Client.connect("scheduler.example:7310", token="t0ken")


async def test_an_input_that_json_cannot_say_is_refused_before_it_is_sent(
    server: ScriptedServer, client: Client
) -> None:
    for value in ({"x": float("nan")}, "\ud800", {1, 2}):
        with pytest.raises(PayloadInvalid):
            await client.start_run("nightly", value)
    assert server.script.calls == []


async def test_a_payload_is_sent_as_it_is(server: ScriptedServer, client: Client) -> None:
    server.workflow.definitions.append(workflow_pb2.Definition(definition="nightly", version=1))
    await client.start_run("nightly", common_pb2.Payload(data=b'{"n": 9007199254740993.10}'))
    assert server.script.requests("StartRun")[0].input.data == b'{"n": 9007199254740993.10}'


async def test_a_swallowed_connection_is_left_for_another(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall forgets the connection: nobody is told, and TCP would try for a quarter of an hour."""
    monkeypatch.setattr("rara_client.channel.KEEPALIVE_MS", 300)
    monkeypatch.setattr("rara_client.channel.PING_TIMEOUT_MS", 300)
    host, _, port = server.address.rpartition(":")
    async with FaultProxy(host, int(port)) as proxy, Client.connect(proxy.address) as client:
        with pytest.raises(NotFound):  # so says the server
            await client.get_run(RUN, timeout_s=5)
        proxy.drop_idle(0.0)
        await asyncio.sleep(0.3)  # the proxy looks every now and then
        with pytest.raises((CallTimeout, Unavailable)):
            await client.get_run(RUN, timeout_s=0.2)
        proxy.resume()
        with pytest.raises(NotFound):
            await client.get_run(RUN, timeout_s=10)
        assert proxy.accepted == 2
