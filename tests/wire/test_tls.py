"""TLS at real ports: who is trusted, who is let in, and certificates that change while they are in use."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from rara.v1 import common_pb2, executor_pb2, executor_pb2_grpc, workflow_pb2
from rara_client import Client, NotAllowed, Pacing, Security, Unauthenticated, Unavailable
from rara_client.certificates import ServerCertificates
from rara_executor.settings import load
from rara_scheduler.health import main as health
from rara_testing.ports import free_port
from rara_testing.processes import Processes
from rara_testing.scripted_executor import ScriptedExecutor
from support.bearers import make_token, revoke
from support.certificates import Authority, Pair, write
from support.command_line import rara
from support.go_executor import spawn_go_executor
from support.running_executor import running
from support.running_scheduler import KIND, RunningScheduler, beating, running_scheduler, until

NO_RETRIES = Pacing(retries=0)
ECHO = {"a": {"kind": "demo.echo"}}


def trusting(authority: Authority, pair: Pair | None = None, **more: Any) -> Security:
    if pair is not None:
        more |= {"tls_client_cert": pair.certificate, "tls_client_key": pair.key}
    return Security(tls_ca=str(authority.file), **more)


@contextlib.asynccontextmanager
async def serving(
    database_url: str, folder: Path, pair: Pair, security: Security, **settings: Any
) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(
        database_url, folder, security=security, tls_cert=pair.certificate, tls_key=pair.key, **settings
    ) as world:
        yield world


async def lists(address: str, security: Security) -> str:
    """How a call ends: OK, or the class of its fault."""
    async with Client.connect(address, security=security, pacing=NO_RETRIES) as client:
        try:
            async for _ in client.list_definitions(timeout_s=10):
                pass
        except (Unavailable, Unauthenticated, NotAllowed) as fault:
            return type(fault).__name__
    return "OK"


async def test_only_a_name_signed_by_a_trusted_authority_is_talked_to(
    database_url: str, tmp_path: Path
) -> None:
    ours, other = Authority.new(tmp_path), Authority.new(tmp_path, "other")
    pair = ours.pair("scheduler")
    async with serving(database_url, tmp_path, pair, trusting(ours)) as world:
        assert await lists(world.address, trusting(ours)) == "OK"
        assert await lists(world.address, trusting(other)) == "Unavailable"
        assert await lists(world.address, Security()) == "Unavailable"  # plain text
        port = world.address.rpartition(":")[2]
        assert await lists(f"localhost:{port}", trusting(ours)) == "Unavailable"  # another name
        pair.replace_by(ours.ca, "localhost")
        assert await lists(f"localhost:{port}", trusting(ours)) == "OK"
        expired = ours.pair("expired", is_expired=True)
        write(pair.certificate, expired.certificate.read_bytes())
        write(pair.key, expired.key.read_bytes())
        assert await lists(world.address, trusting(ours)) == "Unavailable"


async def test_without_a_certificate_of_its_own_nobody_is_let_in(database_url: str, tmp_path: Path) -> None:
    ours, other = Authority.new(tmp_path), Authority.new(tmp_path, "other")
    pair, client = ours.pair("scheduler"), ours.pair("client", "lab@example.org")
    async with serving(
        database_url, tmp_path, pair, trusting(ours, client), tls_client_ca=ours.file
    ) as world:
        assert await lists(world.address, trusting(ours, client)) == "OK"
        assert await lists(world.address, trusting(ours)) == "Unavailable"
        assert await lists(world.address, trusting(ours, other.pair("stranger"))) == "Unavailable"
        assert await lists(world.address, trusting(ours, ours.pair("old", is_expired=True))) == "Unavailable"


async def test_a_session_lives_on_while_certificates_change(database_url: str, tmp_path: Path) -> None:
    first, second = Authority.new(tmp_path), Authority.new(tmp_path, "second")
    pair = first.pair("scheduler")
    async with (
        serving(database_url, tmp_path, pair, trusting(first)) as world,
        ScriptedExecutor() as executor,
    ):
        await executor.connect(
            world.address, credentials=grpc.ssl_channel_credentials(first.file.read_bytes())
        )
        await executor.hello([KIND])
        await executor.expect("welcome")
        async with beating(executor):
            # Half of a change, and what is no certificate: the old one stays in use.
            renewed = second.pair("renewed")
            write(pair.certificate, renewed.certificate.read_bytes())
            assert await lists(world.address, trusting(first)) == "OK"
            write(pair.certificate, b"nothing")
            assert await lists(world.address, trusting(first)) == "OK"
            # The whole change: the next connection gets it, and the session does not notice.
            write(pair.key, renewed.key.read_bytes())
            write(pair.certificate, renewed.certificate.read_bytes())
            assert await lists(world.address, trusting(second)) == "OK"
            assert await lists(world.address, trusting(first)) == "Unavailable"
            number = await executor.heartbeat()
            await executor.expect("heartbeat_ack", lambda ack: ack.number >= number)
            assert not executor.ended.is_set()


async def test_a_client_goes_on_with_what_its_files_say_now(database_url: str, tmp_path: Path) -> None:
    first, second = Authority.new(tmp_path), Authority.new(tmp_path, "second")
    pair = first.pair("scheduler")
    trusted, token_file = tmp_path / "trusted.pem", tmp_path / "token"
    write(trusted, first.file.read_bytes())
    write(token_file, b"none yet\n")
    security = Security(tls_ca=str(trusted), token_file=token_file)
    async with (
        serving(database_url, tmp_path, pair, trusting(first), auth="tokens") as world,
        Client.connect(world.address, security=security, pacing=NO_RETRIES) as client,
    ):
        with pytest.raises(Unauthenticated):
            await client.get_definition("one")
        write(token_file, (await make_token(world.raw, "client")).encode() + b"\n")
        assert [each async for each in client.list_definitions()] == []
        pair.replace_by(second.ca)
        write(trusted, second.file.read_bytes())
        assert [each async for each in client.list_definitions()] == []


async def test_an_executor_and_the_command_line_go_through_certificates_and_tokens(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Authority.new(tmp_path)
    pair, client = ours.pair("scheduler"), ours.pair("client")
    token_files = {role: tmp_path / f"{role}.token" for role in ("client", "executor")}
    mutual: dict[str, Any] = {
        "tls_ca": str(ours.file),
        "tls_client_cert": client.certificate,
        "tls_client_key": client.key,
    }
    security = Security(**mutual, token_file=token_files["client"])
    for file in token_files.values():
        file.write_text("to come")
    async with serving(
        database_url, tmp_path, pair, security, auth="tokens", tls_client_ca=ours.file
    ) as world:
        for role, file in token_files.items():
            write(file, (await make_token(world.raw, role, kinds=["*"])).encode())
        async with running(
            world.address, tmp_path, security=mutual | {"token_file": token_files["executor"]}
        ):
            # Artifacts, too: fetched and made with the executor's token, made under its lease.
            data = b"by a client" * 100_000
            async with Client.connect(world.address, security=security) as calls:
                corpus = common_pb2.Artifact(name="corpus", digest=await calls.upload_blob(data))
                step = {
                    "kind": "demo.artifacts",
                    "input_artifacts": [workflow_pb2.ArtifactBinding(name="corpus")],
                }
                await world.define("one", {"a": step})
                run_id = await world.start("one", input_artifacts=[corpus])
                assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
                digest = hashlib.sha256(data[::-1]).hexdigest()
                made = common_pb2.Digest(sha256=digest, size_bytes=len(data))
                assert b"".join([chunk async for chunk in calls.download_blob(made)]) == data[::-1]
        env = {
            "RARA_SERVER": world.address,
            "RARA_TOKEN_FILE": str(token_files["client"]),
            "RARA_TLS_CA": str(ours.file),
            "RARA_TLS_CLIENT_CERT": str(client.certificate),
            "RARA_TLS_CLIENT_KEY": str(client.key),
        }
        listed = await rara("run", "list", "-o", "name", env=env)
        assert (listed.code, listed.out.strip()) == (0, run_id)
        refused = await rara("run", "list", env=env | {"RARA_TOKEN_FILE": str(token_files["executor"])})
        assert (refused.code, "NOT_ALLOWED" in refused.err) == (4, True)
        monkeypatch.setenv("RARA_LISTEN", world.address)
        for name, value in {"CERT": pair.certificate, "KEY": pair.key, "CLIENT_CA": ours.file}.items():
            monkeypatch.setenv(f"RARA_TLS_{name}", str(value))
        await until(is_healthy, "health")  # a busy machine may be a moment behind


async def is_healthy() -> bool:
    try:
        await asyncio.to_thread(health)
    except SystemExit:
        return False
    return True


async def test_a_scheduler_dials_an_executor_by_certificate_and_token(
    database_url: str, tmp_path: Path
) -> None:
    ours = Authority.new(tmp_path)
    pair, scheduler = ours.pair("executor"), ours.pair("scheduler")
    shown, taken = tmp_path / "shown", tmp_path / "taken"
    shown.write_text("old-secret-of-the-two\n")
    taken.write_text("new-secret-of-the-two\nold-secret-of-the-two\n")  # while one follows the other
    listen = f"127.0.0.1:{free_port()}"
    settings: dict[str, Any] = {
        "direct_executors": (listen,),
        "direct_token_file": shown,
        "tls_ca": str(ours.file),
        "tls_client_cert": scheduler.certificate,
        "tls_client_key": scheduler.key,
    }
    door = {
        "tls_cert": pair.certificate,
        "tls_key": pair.key,
        "tls_client_ca": ours.file,
        "direct_token_file": taken,
    }
    async with (
        running_scheduler(database_url, tmp_path, **settings) as world,
        running(world.address, tmp_path, listen=listen, security=door),
    ):
        await world.define("one", ECHO)
        run_id = await world.start("one", value=1)
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert await asks(listen, trusting(ours, scheduler, token="new-secret-of-the-two")) == "OK"
        assert await asks(listen, trusting(ours, scheduler, token="a-secret-of-nobody")) == "UNAUTHENTICATED"
        assert await asks(listen, trusting(ours, scheduler)) == "UNAUTHENTICATED"
        assert await asks(listen, trusting(ours, token="new-secret-of-the-two")) == "UNAVAILABLE"
        write(shown, b"new-secret-of-the-two\n")
        write(taken, b"new-secret-of-the-two\n")
        run_id = await world.start("one", value=2)
        assert await world.until_run(run_id, "succeeded", "failed") == "succeeded"
        assert (
            await asks(listen, trusting(ours, scheduler, token="old-secret-of-the-two")) == "UNAUTHENTICATED"
        )


async def asks(address: str, security: Security) -> str:
    """The status of each method of ExecutorService together, called by somebody."""
    async with security.channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        statuses = set()
        for call in (
            stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(protocol_version=1), timeout=10),
            stub.Cancel(executor_pb2.CancelRequest(), timeout=10),
            stub.Execute(iter(()), timeout=10),
        ):
            code = await call.code()
            # An empty Execute is refused for what it lacks, once its caller was let in.
            statuses.add("OK" if code is grpc.StatusCode.INVALID_ARGUMENT else code.name)
        if "UNAVAILABLE" in statuses:
            # How gRPC ends a stream whose first write meets a refused connection.
            statuses.discard("CANCELLED")
        assert len(statuses) == 1, statuses
        return statuses.pop()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheduler": "10.1.2.3:7310", "token": "rara_executor_x"}, "RARA_TLS_CA"),
        ({"token": "a", "token_file": "b"}, "RARA_TOKEN_FILE"),
        ({"tls_client_cert": "a"}, "RARA_TLS_CLIENT_KEY"),
        ({"tls_ca": "/nowhere.pem"}, "/nowhere.pem"),
        ({"token_file": "/nowhere"}, "/nowhere"),
        ({"tls_cert": "a"}, "RARA_TLS_KEY"),
        ({"tls_client_ca": "a"}, "RARA_TLS_CERT"),
        ({"executor_listen": "0.0.0.0:1"}, "RARA_TLS_CERT"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(given: dict[str, object], said: str) -> None:
    with pytest.raises(Exception, match=said) as refused:
        load({"executor_modules": "a", **given})
    assert "rara_executor_x" not in str(refused.value)


def test_a_key_of_another_certificate_is_refused_at_start(tmp_path: Path) -> None:
    ours = Authority.new(tmp_path)
    with pytest.raises(ValueError, match="no certificate and its key"):
        ServerCertificates(ours.pair("a").certificate, ours.pair("b").key, None)


@pytest.mark.needs("go")
async def test_a_go_executor_goes_through_certificates_and_tokens(database_url: str, tmp_path: Path) -> None:
    ours = Authority.new(tmp_path)
    pair, client = ours.pair("scheduler"), ours.pair("client")
    token = tmp_path / "executor.token"
    env = {
        "RARA_TLS_CA": str(ours.file),
        "RARA_TLS_CLIENT_CERT": str(client.certificate),
        "RARA_TLS_CLIENT_KEY": str(client.key),
        "RARA_TOKEN_FILE": str(token),
    }
    client_token = tmp_path / "client.token"
    client_token.write_text("to come")
    security = trusting(ours, client, token_file=client_token)
    async with (
        serving(database_url, tmp_path, pair, security, auth="tokens", tls_client_ca=ours.file) as world,
        Processes(tmp_path) as processes,
    ):
        write(client_token, (await make_token(world.raw, "client")).encode())
        write(token, (await make_token(world.raw, "executor", name="go", kinds=["*"])).encode())
        await spawn_go_executor(processes, world.address, tmp_path, env=env)
        assert await world.raw.fetchval("select token_name from rara.executor") == "go"
        await revoke(world.raw, "go")
        ended = "select ended_at is not null from rara.executor"
        await until(lambda: world.raw.fetchval(ended), "end of the session")
        # The one that follows is in the same file: the process goes on with it.
        write(token, (await make_token(world.raw, "executor", name="go", kinds=["*"])).encode())
        back = "select ended_at is null from rara.executor"
        await until(lambda: world.raw.fetchval(back), "session with the next token")
        assert await world.raw.fetchval("select count(*) from rara.executor") == 1


@pytest.mark.needs("go")
async def test_a_go_executor_is_dialled_by_certificate_and_token(database_url: str, tmp_path: Path) -> None:
    ours = Authority.new(tmp_path)
    pair, scheduler = ours.pair("executor"), ours.pair("scheduler")
    secret = tmp_path / "direct.token"
    secret.write_text("secret-of-the-two\n")
    listen = f"127.0.0.1:{free_port()}"
    env = {
        "RARA_EXECUTOR_LISTEN": listen,
        "RARA_TLS_CERT": str(pair.certificate),
        "RARA_TLS_KEY": str(pair.key),
        "RARA_TLS_CLIENT_CA": str(ours.file),
        "RARA_DIRECT_TOKEN_FILE": str(secret),
    }
    settings: dict[str, Any] = {
        "direct_executors": (listen,),
        "direct_token_file": secret,
        "tls_ca": str(ours.file),
        "tls_client_cert": scheduler.certificate,
        "tls_client_key": scheduler.key,
    }
    async with (
        running_scheduler(database_url, tmp_path, **settings) as world,
        Processes(tmp_path) as processes,
    ):
        await spawn_go_executor(processes, world.address, tmp_path, env=env)
        assert await asks(listen, trusting(ours, scheduler, token="secret-of-the-two")) == "OK"
        assert await asks(listen, trusting(ours, scheduler)) == "UNAUTHENTICATED"
        assert await asks(listen, trusting(ours, token="secret-of-the-two")) == "UNAVAILABLE"
