"""One key gives one run, and an artifact counts only with the bytes that its manifest names."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from rara.v1 import artifact_pb2, artifact_pb2_grpc, common_pb2, job_pb2, workflow_pb2, workflow_pb2_grpc
from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.job_events import accepted, failed, running, succeeded
from rara_testing.processes import Processes
from rara_testing.scripted_executor import ScriptedExecutor
from rara_testing.scripted_scheduler import blob_artifact, digest_of
from support.api_errors import refusal, taken_apart
from support.blob_handlers import content
from support.executor_process import notes
from support.running_scheduler import RunningScheduler, beating, running_scheduler, until
from support.spawned_executor import spawn_executor
from support.spawned_scheduler import spawned_scheduler

CLIENTS = 50
MIB = 1 << 20


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


@pytest_asyncio.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes(tmp_path / "processes") as opened:
        yield opened


# ---------------------------------------------------------------- IDEM-1: one key, one run


def submit(key: str, data: bytes) -> workflow_pb2.StartRunRequest:
    return workflow_pb2.StartRunRequest(
        definition="d", idempotency_key=key, input=common_pb2.Payload(data=data)
    )


async def at_once(addresses: list[str], request: workflow_pb2.StartRunRequest, clients: int) -> list[Any]:
    """The answers to as many clients, each with a connection of its own, that ask at the same moment."""
    barrier = asyncio.Barrier(clients)

    async def ask(number: int) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        address = addresses[number % len(addresses)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            await channel.channel_ready()
            await barrier.wait()
            return await workflow_pb2_grpc.WorkflowServiceStub(channel).StartRun(request, timeout=30)

    return await asyncio.gather(*(ask(number) for number in range(clients)), return_exceptions=True)


@pytest.mark.case("IDEM-1")
async def test_many_clients_of_two_schedulers_with_one_key_get_one_run(
    world: RunningScheduler, database_url: str, tmp_path: Path
) -> None:
    await world.define("d", {"a": {}})
    async with running_scheduler(database_url, tmp_path) as other:
        addresses = [world.address, other.address]
        answers = await at_once(addresses, submit("k", b'{"a": 1, "b": [2, "x"]}'), CLIENTS)
        assert [answer for answer in answers if isinstance(answer, BaseException)] == []
        (run_id,) = {answer.run.workflow_run_id for answer in answers}
        assert [answer.already_started for answer in answers].count(False) == 1

        for scheduler in (world, other):
            again = await scheduler.workflows.StartRun(submit("k", b'{ "b": [2,"x"],\n "a":1 }'), timeout=10)
            assert (again.run.workflow_run_id, again.already_started) == (run_id, True)
            refused = await refusal(scheduler.workflows.StartRun(submit("k", b'{"a": 2}'), timeout=10))
            assert (refused.status, refused.reason) == (
                grpc.StatusCode.ALREADY_EXISTS,
                "IDEMPOTENCY_CONFLICT",
            )
            assert refused.metadata == {"workflow_run_id": run_id}
    rows = [
        await world.raw.fetchval(f"select count(*) from rara.{table}")
        for table in ("workflow_run", "step_run", "start_key", "ready")
    ]
    assert rows == [1, 1, 1, 1]


@pytest.mark.case("IDEM-1")
async def test_clients_that_bring_different_content_under_one_key_get_one_run_or_a_conflict(
    world: RunningScheduler,
) -> None:
    await world.define("d", {"a": {}})
    both = await asyncio.gather(
        *(at_once([world.address], submit("k", b'{"n": %d}' % n), CLIENTS // 5) for n in range(3))
    )
    answers = [answer for some in both for answer in some]
    started = [answer for answer in answers if not isinstance(answer, BaseException)]
    refused = [taken_apart(answer) for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert len(started) + len(refused) == len(answers)
    assert len({answer.run.workflow_run_id for answer in started}) == 1
    assert len(started) == CLIENTS // 5  # those who brought what the first had brought
    assert {(one.status, one.reason) for one in refused} == {
        (grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_CONFLICT")
    }
    assert not any("unique" in one.message or "duplicate" in one.message for one in refused)
    assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 1


@pytest.mark.case("IDEM-1")
async def test_a_kill_between_commit_and_answer_leaves_one_run_that_a_repeat_finds(
    processes: Processes, database_url: str, tmp_path: Path
) -> None:
    async with spawned_scheduler(processes, database_url, tmp_path) as scheduler:
        await scheduler.world.define("d", {"a": {}})
        host, _, port = scheduler.address.rpartition(":")
        async with (
            FaultProxy(host, int(port)) as proxy,
            grpc.aio.insecure_channel(proxy.address) as channel,
        ):
            await channel.channel_ready()
            proxy.stall(Direction.TO_CLIENT)
            stub = workflow_pb2_grpc.WorkflowServiceStub(channel)
            asked = asyncio.ensure_future(stub.StartRun(submit("k", b'{"a": 1}'), timeout=30))

            async def committed() -> str | None:
                found: str | None = await scheduler.world.raw.fetchval(
                    "select workflow_run_id::text from rara.workflow_run"
                )
                return found

            run_id = await until(committed, "the run")
            await scheduler.kill()
            proxy.reset()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await scheduler.restart()
        again = await scheduler.world.workflows.StartRun(submit("k", b'{"a":1}'), timeout=15)
        assert (again.run.workflow_run_id, again.already_started) == (run_id, True)
        refused = await refusal(scheduler.world.workflows.StartRun(submit("k", b'{"a":2}'), timeout=15))
        assert refused.reason == "IDEMPOTENCY_CONFLICT"
        assert await scheduler.world.raw.fetchval("select count(*) from rara.workflow_run") == 1


# ---------------------------------------------------------------- IDEM-2: bytes before manifests


def blob_path(folder: Path, sha256: str) -> Path:
    return folder / "blobs" / "sha256" / sha256[:2] / sha256[2:]


def flip_a_byte(path: Path) -> None:
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def store_blob(address: str, data: bytes) -> common_pb2.Digest:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = artifact_pb2_grpc.ArtifactServiceStub(channel)
        created = await stub.CreateUpload(artifact_pb2.CreateUploadRequest(digest=digest_of(data)))
        if not created.upload_id:
            return digest_of(data)
        message = artifact_pb2.WriteBlobRequest(upload_id=created.upload_id, data=data, finish=True)
        return (await stub.WriteBlob(iter([message]))).verified


async def take(executor: ScriptedExecutor) -> job_pb2.Lease:
    lease = (await executor.expect_job()).lease
    await executor.events(accepted(lease), running(lease))
    await executor.expect_ack(lease, 2)
    return lease


async def refused_end(executor: ScriptedExecutor, event: job_pb2.ProgressEvent) -> Any:
    """Send a last event that must not be stored; its refusal."""
    await executor.events(event)
    acks = await executor.expect("acks", lambda acks: bool(acks.refusals))
    (refused,) = acks.refusals
    assert (refused.lease_token, refused.sequence) == (event.lease.lease_token, event.sequence)
    return refused


async def killed_in_the_middle(
    processes: Processes, database_url: str, folder: Path, size_bytes: int
) -> None:
    """An executor is killed at half of its upload; another one makes the same artifact."""
    data = content(size_bytes)
    async with running_scheduler(database_url, folder) as world:
        await world.define("blob", {"a": {"kind": "case.blob"}})
        host, _, port = world.address.rpartition(":")
        async with FaultProxy(host, int(port)) as proxy:
            first = await spawn_executor(
                processes, proxy.address, folder, module="support.blob_handlers", name="first", slots=1
            )
            partial = folder / "blobs" / "partial"
            proxy.delay(0.002)  # per chunk of 64 KiB, so that there is a middle
            run_id = await world.start("blob", value={"folder": str(folder), "size_bytes": size_bytes})

            async def half() -> bool:
                return any(size_bytes // 2 < path.stat().st_size for path in partial.iterdir())

            await until(half, "half of an upload", 30)
            proxy.stall()
            await first.kill_and_wait()
        assert not blob_path(folder, hashlib.sha256(data).hexdigest()).exists()
        assert await world.raw.fetchval("select count(*) from rara.artifact") == 0
        await spawn_executor(
            processes, world.address, folder, module="support.blob_handlers", name="second", slots=1
        )
        await world.until_run(run_id, "succeeded")
        manifest = await world.raw.fetch("select attempt, sha256, size_bytes from rara.artifact")
        assert [tuple(row) for row in manifest] == [(2, hashlib.sha256(data).hexdigest(), size_bytes)]
        assert blob_path(folder, manifest[0]["sha256"]).read_bytes() == data
        assert [note.attempt for note in notes(folder, "starts")] == [1, 2]
        counted = await world.raw.fetch("select sha256, size_bytes from rara.blob where marked_at is null")
        assert [tuple(row) for row in counted] == [(manifest[0]["sha256"], size_bytes)]


@pytest.mark.case("IDEM-2")
async def test_after_a_kill_in_the_middle_of_an_upload_the_next_attempt_stores_the_same_content(
    processes: Processes, database_url: str, tmp_path: Path
) -> None:
    await killed_in_the_middle(processes, database_url, tmp_path, 16 * MIB)


@pytest.mark.soak
@pytest.mark.case("IDEM-2")
async def test_after_a_kill_in_the_middle_of_a_large_upload_the_next_attempt_stores_the_same_content(
    processes: Processes, database_url: str, tmp_path: Path
) -> None:
    await killed_in_the_middle(processes, database_url, tmp_path, 64 * MIB)


@pytest.mark.case("IDEM-2")
@pytest.mark.parametrize("lie", ["size", "digest", "inline"])
async def test_a_manifest_with_a_false_digest_or_size_closes_nothing(
    world: RunningScheduler, lie: str
) -> None:
    await world.define("one", {"a": {"retry": {"max_attempts": 1}}})
    run_id = await world.start("one")
    data = os.urandom(100_000)
    await store_blob(world.address, data)
    artifact = blob_artifact("x", data)
    code = "ARTIFACT_MISMATCH"
    if lie == "size":
        artifact.digest.size_bytes -= 1
    elif lie == "digest":
        artifact.digest.sha256 = hashlib.sha256(b"never stored").hexdigest()
        code = "BLOBS_MISSING"  # an executor that cannot store it says ARTIFACT_MISMATCH itself
    else:
        artifact = blob_artifact("x", b"abc", inline=True)
        artifact.inline = b"abd"
    async with world.executor() as executor:
        lease = await take(executor)
        async with beating(executor, lambda: [lease.lease_token]):
            refused = await refused_end(executor, succeeded(lease, artifacts=[artifact]))
            assert refused.code == code
            assert await world.raw.fetchval("select count(*) from rara.result") == 0
            await executor.events(failed(lease, code="ARTIFACT_MISMATCH"))
            await executor.expect_ack(lease, 3)
    assert await world.run_state(run_id) == "failed"
    assert await world.raw.fetchval("select count(*) from rara.artifact") == 0
    assert await world.raw.fetchval("select count(*) from rara.blob where marked_at is null") == 1


@pytest.mark.case("IDEM-2")
@pytest.mark.parametrize("known", ["to this scheduler", "to nobody in memory"])
async def test_a_byte_that_changed_before_the_commit_is_a_mismatch_and_the_next_attempt_heals_it(
    world: RunningScheduler, database_url: str, tmp_path: Path, known: str
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    data = os.urandom(3 * MIB)
    path = blob_path(tmp_path, hashlib.sha256(data).hexdigest())
    artifact = blob_artifact("x", data)
    if known == "to this scheduler":
        await store_blob(world.address, data)
    else:
        async with running_scheduler(database_url, tmp_path) as other:
            await store_blob(other.address, data)
    async with world.executor() as executor:
        lease = await take(executor)
        flip_a_byte(path)
        async with beating(executor, lambda: [lease.lease_token]):
            refused = await refused_end(executor, succeeded(lease, artifacts=[artifact]))
            assert refused.code == "ARTIFACT_MISMATCH"
            assert [digest.sha256 for digest in refused.digests] == [artifact.digest.sha256]
            assert await world.raw.fetchval("select count(*) from rara.result") == 0
            await executor.events(failed(lease, code="ARTIFACT_MISMATCH"))
            await executor.expect_ack(lease, 3)
        await executor.credit(2)
        lease = await take(executor)
        assert lease.attempt == 2
        async with beating(executor, lambda: [lease.lease_token]):
            assert await store_blob(world.address, data) == artifact.digest  # not taken for complete
            await executor.events(succeeded(lease, artifacts=[artifact]))
            await executor.expect_ack(lease, 3)
    assert await world.run_state(run_id) == "succeeded"
    assert path.read_bytes() == data


@pytest.mark.case("IDEM-2")
async def test_a_blob_that_is_gone_before_the_commit_is_asked_for_again(
    world: RunningScheduler, tmp_path: Path
) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    data = os.urandom(MIB)
    await store_blob(world.address, data)
    async with world.executor() as executor:
        lease = await take(executor)
        blob_path(tmp_path, hashlib.sha256(data).hexdigest()).unlink()
        async with beating(executor, lambda: [lease.lease_token]):
            event = succeeded(lease, artifacts=[blob_artifact("x", data)])
            assert (await refused_end(executor, event)).code == "BLOBS_MISSING"
            await store_blob(world.address, data)
            await executor.events(event)
            await executor.expect_ack(lease, 3)
    assert await world.run_state(run_id) == "succeeded"
    assert (await world.raw.fetchval("select attempt from rara.result")) == 1


@pytest.mark.case("IDEM-2")
async def test_a_large_blob_is_looked_at_while_heartbeats_and_other_steps_go_on(
    world: RunningScheduler, tmp_path: Path
) -> None:
    await world.define("two", {"a": {}, "b": {}})
    run_id = await world.start("two")
    data = os.urandom(3 * MIB)
    await store_blob(world.address, data)
    async with world.executor(credit=2) as executor:
        large, small = (job.lease for job in (await executor.expect("jobs")).jobs)
        for lease in (large, small):
            await executor.events(accepted(lease), running(lease))
            await executor.expect_ack(lease, 2)
        flip_a_byte(path := blob_path(tmp_path, hashlib.sha256(data).hexdigest()))
        path.write_bytes(data)  # changed and changed back: looked at again, and right
        async with beating(executor, lambda: [large.lease_token, small.lease_token]):
            await executor.events(succeeded(large, artifacts=[blob_artifact("x", data)]), succeeded(small))
            await executor.expect_ack(small, 3)
            await executor.expect_ack(large, 3)
    assert await world.run_state(run_id) == "succeeded"
