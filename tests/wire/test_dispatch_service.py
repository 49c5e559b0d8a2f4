"""Sessions of executors with a real scheduler over a real database: frames in, frames out, and what is stored."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2, status_pb2
from rara.v1 import common_pb2, dispatch_pb2, job_pb2, workflow_pb2
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.start_command import StartCommand
from rara_scheduler.store.database import Database
from rara_scheduler.store.definitions import DefinitionStore
from rara_scheduler.store.start import RunStarter
from rara_testing.job_events import (
    accepted,
    cancelled,
    duration,
    effect,
    failed,
    progress,
    running,
    succeeded,
)
from rara_testing.scripted_executor import ScriptedExecutor, capability
from support.running_scheduler import (
    ACCEPT_S,
    GRACE_S,
    HEARTBEAT_S,
    KIND,
    LEASE_S,
    RunningScheduler,
    beating,
    running_scheduler,
    until,
)


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


async def reason_of(executor: ScriptedExecutor) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Status, stable reason and metadata that a call ended with."""
    code, _, trailers = await executor.failure()
    status = status_pb2.Status()
    info = error_details_pb2.ErrorInfo()
    for key, value in trailers:
        if key == "grpc-status-details-bin":
            assert isinstance(value, bytes)
            status.ParseFromString(value)
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
    return code, info.reason, dict(info.metadata)


async def beats_go_by(executor: ScriptedExecutor, count: int = 3) -> None:
    """Wait for so many more answered heartbeats: longer than a poll and a sweep, with nothing else to wait for."""
    last = executor._beats + count
    await executor.expect("heartbeat_ack", lambda ack: ack.number >= last)


def _renews_after(number: int, ack: dispatch_pb2.HeartbeatAck) -> bool:
    return ack.renewed > number


def _asks_for(token: int, cancels: dispatch_pb2.CancelJobs) -> bool:
    return cancels.jobs[0].lease_token == token


async def take(executor: ScriptedExecutor) -> job_pb2.JobRequest:
    """Take a job up to `running`, acknowledged."""
    job = await executor.expect_job()
    await executor.events(accepted(job.lease), running(job.lease))
    await executor.expect_ack(job.lease, 2)
    return job


# ---------------------------------------------------------------- hello


async def test_welcome_agrees_on_terms(world: RunningScheduler) -> None:
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address)
        await executor.hello([KIND])
        welcome = await executor.expect("welcome")
    terms = welcome.terms
    assert welcome.protocol_version == 1
    assert welcome.session_id
    assert terms.heartbeat_interval.ToMilliseconds() == 500
    assert terms.silence_timeout.ToMilliseconds() == 1500
    assert terms.accept_timeout.ToMilliseconds() == 1000
    assert terms.limits.max_payload_bytes == 1024 * 1024
    assert terms.limits.max_inline_bytes == 16 * 1024
    assert terms.limits.event_window > 0


@pytest.mark.parametrize("version", [0, 2, 99])
async def test_a_protocol_version_that_is_not_spoken_is_refused_with_the_range(
    world: RunningScheduler, version: int
) -> None:
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address)
        await executor.hello([KIND], protocol_version=version)
        code, reason, metadata = await reason_of(executor)
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "PROTOCOL_VERSION_UNSUPPORTED")
    assert metadata == {"oldest": "1", "newest": "1"}


@pytest.mark.parametrize(
    ("hello", "field"),
    [
        ({"executor_id": "host-1"}, "hello.executor_id"),
        ({"executor_id": "0190A6F0-0000-7000-8000-000000000000"}, "hello.executor_id"),
        ({"executor_name": ""}, "hello.executor_name"),
        ({"executor_name": "x" * 256}, "hello.executor_name"),
        ({"executor_kind": ""}, "hello.executor_kind"),
        ({"labels": {f"l{i}": "x" for i in range(65)}}, "hello.labels"),
        ({"capabilities": []}, "hello.capabilities"),
        ({"capabilities": [dispatch_pb2.Capability(kind="x.y")]}, "hello.capabilities[0].versions"),
        ({"capabilities": [capability("")]}, "hello.capabilities[0].kind"),
        ({"capabilities": [capability("x.y", max_concurrency=-1)]}, "hello.capabilities[0].max_concurrency"),
    ],
)
async def test_a_hello_with_a_bad_field_is_refused_by_its_name(
    world: RunningScheduler, hello: dict[str, object], field: str
) -> None:
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address)
        fields = dict(hello)
        capabilities = fields.pop("capabilities", [KIND])
        await executor.hello(capabilities, **fields)  # type: ignore[arg-type]  # fields of any type, on purpose
        code, details, _ = await executor.failure()
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(field)


async def test_another_first_frame_and_a_second_hello_are_refused(world: RunningScheduler) -> None:
    async with ScriptedExecutor() as executor:
        await executor.connect(world.address)
        await executor.credit(1)
        assert await executor.status() is grpc.StatusCode.INVALID_ARGUMENT
    async with world.executor() as executor:
        await executor.hello([KIND])
        assert await executor.status() is grpc.StatusCode.INVALID_ARGUMENT


# ---------------------------------------------------------------- jobs and credit


async def test_jobs_never_exceed_the_credit_and_are_sent_after_their_leases(world: RunningScheduler) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(10)})
    await world.start("wide")
    async with world.executor(credit=3) as executor:
        leases: list[job_pb2.Lease] = []
        while len(leases) < 3:
            leases += [job.lease for job in (await executor.expect("jobs")).jobs]
        stored = await world.raw.fetch("select lease_token, executor_id::text as executor from rara.lease")
        assert {row["lease_token"] for row in stored} == {lease.lease_token for lease in leases}
        assert {row["executor"] for row in stored} == {executor.executor_id}
        await executor.credit(2)  # a lower limit changes nothing
        await executor.credit(3)
        await asyncio.sleep(2 * HEARTBEAT_S)  # two polls: nothing more may come
        assert sum(len(batch.jobs) for batch in executor.all("jobs")) == 3
        await executor.credit(4)
        await executor.expect("jobs")
        assert sum(len(batch.jobs) for batch in executor.all("jobs")) == 4


async def test_freed_credit_finds_what_another_scheduler_made_ready(
    database_url: str, tmp_path: Path
) -> None:
    """No hint, no poll, no sweep: only a look that room becoming free has asked for."""
    rare: dict[str, Any] = {"poll_s": 30.0, "sweep_s": 30.0, "lease_s": 120.0, "silence_s": 60.0}
    async with running_scheduler(database_url, tmp_path, **rare) as world:
        await world.define("one", {"a": {}})
        database = Database(database_url)
        await database.open()
        elsewhere = RunStarter(database, DefinitionStore(database, RetryPolicy()), on_ready=lambda: None)
        async with world.executor(credit=2) as executor:
            await world.start("one")
            job = await executor.expect_job()
            await executor.events(accepted(job.lease))
            await executor.expect_ack(job.lease, 1)  # by now a look has found nothing for the second slot
            await elsewhere.start(StartCommand("one"))
            await executor.events(running(job.lease), succeeded(job.lease))
            second = await executor.expect_job(timeout_s=10)
            assert second.lease.step_run_id != job.lease.step_run_id
            await executor.events(accepted(second.lease), running(second.lease), succeeded(second.lease))
            await executor.expect_ack(second.lease, 3)
        await database.close()


async def test_a_step_without_a_template_gets_the_input_of_the_run(world: RunningScheduler) -> None:
    await world.define("plain", {"a": {}})
    await world.start("plain", value={"n": 1})
    await world.start("plain")
    async with world.executor(credit=2) as executor:
        jobs: list[job_pb2.JobRequest] = []
        while len(jobs) < 2:
            jobs += (await executor.expect("jobs")).jobs
        assert [(job.HasField("input"), job.input.data) for job in jobs] == [
            (True, b'{"n": 1}'),
            (False, b""),
        ]


async def test_a_job_says_everything_that_it_needs(world: RunningScheduler) -> None:
    steps: dict[str, dict[str, object]] = {
        "a": {"input_template": {"data": b'{"x":{"$ref":"/run/input/n"}}'}},
        "b": {
            "depends_on": ["a"],
            "input_template": {"data": b'{"$ref":"/steps/a/output/m"}'},
            "attempt_timeout": {"seconds": 30},
            "retry": {"max_attempts": 5},
        },
    }
    await world.define("flow", steps, run_timeout=duration(100))
    run_id = await world.start("flow", value={"n": 9007199254740993})
    async with world.executor(credit=2) as executor:
        first = await take(executor)
        assert first.input.data == b'{"x":9007199254740993}'
        assert (first.lease.attempt, first.failures, first.max_attempts) == (1, 0, 3)
        assert (first.workflow_run_id, first.definition, first.step_name) == (run_id, "flow", "a")
        assert 90 < first.time_remaining.ToTimedelta().total_seconds() <= 100
        assert first.lease_duration.ToMilliseconds() == LEASE_S * 1000
        await executor.events(succeeded(first.lease, output={"m": [1, 2]}))
        second = await executor.expect_job()
        assert second.input.data == b"[1,2]"
        assert (second.attempt_timeout.seconds, second.max_attempts) == (30, 5)
        assert second.lease.lease_token > first.lease.lease_token
        assert second.idempotency_key != first.idempotency_key
        await executor.events(accepted(second.lease), running(second.lease), succeeded(second.lease))
        assert await world.until_run(run_id, "succeeded")


@pytest.mark.parametrize(
    ("step", "hello", "version"),
    [
        ({}, {}, "1.4.2"),
        ({"kind_version": "1"}, {}, "1.4.2"),
        ({"kind_version": "1.4"}, {}, "1.4.2"),
        ({"kind_version": "1.5"}, {}, None),
        ({"kind_version": "14"}, {}, None),
        ({"executor_kind": "python"}, {}, "1.4.2"),
        ({"executor_kind": "go"}, {}, None),
        ({"required_labels": {"gpu": "a100"}}, {"labels": {"gpu": "a100", "zone": "b"}}, "1.4.2"),
        ({"required_labels": {"gpu": "a100"}}, {"labels": {"gpu": "t4"}}, None),
        ({"required_labels": {"gpu": "a100"}}, {}, None),
        ({"kind": "work.other"}, {}, None),
    ],
)
async def test_only_a_compatible_executor_gets_the_step(
    world: RunningScheduler, step: dict[str, object], hello: dict[str, Any], version: str | None
) -> None:
    await world.define("routed", {"a": step})
    run_id = await world.start("routed")
    async with world.executor([capability(KIND, "0.9.0", "1.4.2", "1.3.0")], credit=1, **hello) as executor:
        if version is None:
            await executor.expect(
                "heartbeat_ack", lambda ack: ack.number >= 3
            )  # more than one poll has passed
            assert executor.all("jobs") == []
            assert await world.steps(run_id) == {"a": ("pending", "")}
        else:
            assert (await executor.expect_job()).kind_version == version


async def test_a_kinds_own_concurrency_is_kept(world: RunningScheduler) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(6)})
    await world.start("wide")
    async with world.executor([capability(KIND, "1.0.0", max_concurrency=2)], credit=6) as executor:
        jobs: list[job_pb2.JobRequest] = []
        while len(jobs) < 2:
            jobs += (await executor.expect("jobs")).jobs
        for job in jobs:  # else they lapse while the beats go by
            await executor.events(accepted(job.lease))
        await beats_go_by(executor)
        assert sum(len(batch.jobs) for batch in executor.all("jobs")) == 2
        lease = jobs[0].lease
        await executor.events(running(lease), succeeded(lease))
        assert len((await executor.expect("jobs")).jobs) == 1


# ---------------------------------------------------------------- events


async def test_events_are_acknowledged_when_they_are_stored_and_repeats_too(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with world.executor() as executor:
        job = await executor.expect_job()
        everything = [
            accepted(job.lease),
            running(job.lease),
            progress(job.lease, 3, fraction=0.5),
            effect(job.lease, 4, "paid", {"id": 1}),
            succeeded(job.lease, 5, output={"n": 1}),
        ]
        for number, event in enumerate(everything, 1):
            await executor.events(event)
            await executor.expect_ack(job.lease, number)
            stored = await world.raw.fetchval("select max(sequence) from rara.step_event")
            assert stored == number
        await executor.events(*everything)
        repeated = await executor.expect("acks", lambda acks: len(executor.all("acks")) > 5)
        assert repeated is not None
        assert not any(acks.refusals for acks in executor.all("acks"))
        assert await world.raw.fetchval("select count(*) from rara.step_event") == 5
        assert await world.run_state(run_id) == "succeeded"


async def test_history_tells_who_accepted_from_the_lease_and_not_from_the_events_words(
    world: RunningScheduler,
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as executor:
        job = await executor.expect_job()
        event = accepted(job.lease)
        event.accepted.executor_id, event.accepted.executor_name = "somebody", "token-of-somebody"
        await executor.events(event, running(job.lease), succeeded(job.lease))
        await executor.expect_ack(job.lease, 3)
        executor_id = executor.executor_id
    bodies = await world.raw.fetch("select sequence, body from rara.step_event order by sequence")
    assert not any(b"somebody" in row["body"] for row in bodies)
    told = [
        update.event
        async for update in world.workflows.WatchStepRun(
            workflow_pb2.WatchStepRunRequest(step_run_id=job.lease.step_run_id), timeout=20
        )
        if update.WhichOneof("update") == "event"
    ]
    assert [each.sequence for each in told] == [1, 2, 3]
    assert {each.lease.lease_token for each in told} == {job.lease.lease_token}
    assert (told[0].accepted.executor_id, told[0].accepted.executor_name) == (executor_id, "scripted")
    assert told[0].event_time == event.event_time


async def test_a_gap_is_named_once_and_what_comes_late_changes_no_state(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with world.executor() as executor:
        job = await take(executor)
        await executor.events(progress(job.lease, 6))
        ack = await executor.expect_ack(job.lease, 6)
        assert list(ack.missing) == [3, 4, 5]
        await executor.events(progress(job.lease, 4))
        await executor.events(succeeded(job.lease, 7))
        assert list((await executor.expect_ack(job.lease, 7)).missing) == []
        assert await world.run_state(run_id) == "succeeded"
        await executor.events(progress(job.lease, 3))
        assert (await executor.expect_refusal(job.lease, 3)).code == "LEASE_LOST"
        assert (await world.step(job.lease.step_run_id))["gaps"] == 2


async def test_a_superseded_token_and_another_executors_are_refused(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as old, world.executor(credit=0) as new:
        first = await take(old)
        await new.credit(1)
        second = await new.expect_job()  # the old one never renewed
        assert second.lease.lease_token > first.lease.lease_token
        assert (second.lease.attempt, second.failures) == (2, 1)
        await old.events(progress(first.lease, 3), succeeded(first.lease, 4, output="old"))
        assert (await old.expect_refusal(first.lease, 4)).code == "LEASE_LOST"
        await old.events(accepted(second.lease), succeeded(second.lease, 2, output="stolen"))
        await new.events(accepted(second.lease), running(second.lease))
        assert (await old.expect_refusal(second.lease, 2)).code == "LEASE_LOST"
        await new.expect_ack(second.lease, 2)
        await new.events(succeeded(second.lease, output="new"))
        await new.expect_ack(second.lease, 3)
        row = await world.step(first.lease.step_run_id)
        assert (row["state"], row["output"], row["attempt"]) == ("succeeded", b'"new"', 2)


async def test_a_strangers_events_do_not_hold_up_the_owners(world: RunningScheduler) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(20)})
    run_id = await world.start("wide")
    async with world.executor(credit=20) as owner, world.executor(["other.kind"]) as stranger:
        leases: list[job_pb2.Lease] = []
        while len(leases) < 20:
            leases += [job.lease for job in (await owner.expect("jobs")).jobs]
        for lease in leases:
            await stranger.events(accepted(lease), succeeded(lease, 2, output="stolen"))
            await owner.events(accepted(lease), running(lease), succeeded(lease, output="mine"))
        for lease in leases:
            await owner.expect_ack(lease, 3)
            assert (await stranger.expect_refusal(lease, 2)).code == "LEASE_LOST"
        assert await world.run_state(run_id) == "succeeded"
        outputs = await world.raw.fetch("select output from rara.result")
        assert {row["output"] for row in outputs} == {b'"mine"'}


@pytest.mark.parametrize(
    ("size", "code"), [(1024 * 1024, ""), (1024 * 1024 + 1, "refused:PAYLOAD_TOO_LARGE")]
)
async def test_a_payload_of_the_limit_passes_and_one_byte_more_does_not(
    world: RunningScheduler, size: int, code: str
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as executor:
        job = await take(executor)
        text = b'"' + b"x" * (size - 2) + b'"'
        await executor.events(succeeded(job.lease, output=common_pb2.Payload(data=text)))
        assert await executor.outcome_of(job.lease, 3) == code
        if code:  # the executor sends a failure under the same number instead
            await executor.events(failed(job.lease, code="PAYLOAD_TOO_LARGE"))
            await executor.expect_ack(job.lease, 3)
            row = await world.step(job.lease.step_run_id)
            assert (row["state"], row["reason"]) == ("terminal_failed", "PAYLOAD_TOO_LARGE")


@pytest.mark.parametrize(
    "data", [b"{", b'"\xff"', rb'"\u0000"', rb'"\ud800"', b"", b'"a" "b"', b"NaN"], ids=repr
)
async def test_a_payload_that_is_no_storable_json_is_refused(world: RunningScheduler, data: bytes) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as executor:
        job = await take(executor)
        await executor.events(succeeded(job.lease, output=common_pb2.Payload(data=data)))
        assert (await executor.expect_refusal(job.lease, 3)).code == "PAYLOAD_INVALID"
        assert (await world.step(job.lease.step_run_id))["state"] == "running"


@pytest.mark.parametrize("damage", ["digest", "size"])
async def test_an_inline_artifact_that_does_not_match_is_refused(
    world: RunningScheduler, damage: str
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    good = b"the bytes"
    digest = common_pb2.Digest(sha256=hashlib.sha256(good).hexdigest(), size_bytes=len(good))
    bad = common_pb2.Digest()
    bad.CopyFrom(digest)
    if damage == "digest":
        bad.sha256 = hashlib.sha256(b"others").hexdigest()
    else:
        bad.size_bytes += 1
    async with world.executor() as executor:
        job = await take(executor)
        artifact = common_pb2.Artifact(name="out", digest=bad, inline=good)
        await executor.events(succeeded(job.lease, artifacts=[artifact]))
        assert (await executor.expect_refusal(job.lease, 3)).code == "ARTIFACT_MISMATCH"
        artifact.digest.CopyFrom(digest)
        await executor.events(succeeded(job.lease, artifacts=[artifact]))
        await executor.expect_ack(job.lease, 3)
    assert await world.raw.fetchval("select inline from rara.artifact") == good


async def test_a_blob_that_was_never_uploaded_is_asked_for(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as executor:
        job = await take(executor)
        digest = common_pb2.Digest(sha256="ab" * 32, size_bytes=5)
        await executor.events(
            succeeded(job.lease, artifacts=[common_pb2.Artifact(name="out", digest=digest)])
        )
        refusal = await executor.expect_refusal(job.lease, 3)
        assert refusal.code == "BLOBS_MISSING"
        assert list(refusal.digests) == [digest]


async def test_what_is_wrong_with_one_job_touches_that_job_alone(world: RunningScheduler) -> None:
    steps: dict[str, dict[str, object]] = {f"s{i}": {} for i in range(9)}
    steps["bad"] = {"input_template": {"data": b'{"$ref":"/run/input/not/there"}'}}
    await world.define("ten", steps, on_failure="CONTINUE")
    run_id = await world.start("ten", value={"not": {}})
    async with world.executor(credit=10) as executor:
        leases: list[job_pb2.Lease] = []
        while len(leases) < 9:
            leases += [job.lease for job in (await executor.expect("jobs")).jobs]
        for lease in leases:
            await executor.events(accepted(lease), running(lease), succeeded(lease))
        await world.until_run(run_id, "failed")
    states = await world.steps(run_id)
    assert states.pop("bad") == ("terminal_failed", "INPUT_INVALID")
    assert set(states.values()) == {("succeeded", "")}
    assert await world.raw.fetchval("select max(attempt) from rara.result") == 1


# ---------------------------------------------------------------- heartbeats


async def test_heartbeats_renew_and_are_answered_and_lost_tokens_are_told(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor(beat=False) as executor:
        job = await take(executor)
        token = job.lease.lease_token
        async with beating(executor, lambda: [token]):
            before = await world.raw.fetchval("select expires_at from rara.lease")
            newest = 0
            for _ in range(6):  # well beyond one lease
                ack = await executor.expect("heartbeat_ack", partial(_renews_after, newest))
                newest = ack.renewed
            assert await world.raw.fetchval("select expires_at from rara.lease") > before
            assert (await world.step(job.lease.step_run_id))["attempt"] == 1
        await executor.heartbeat([token, 999_999])
        ack = await executor.expect("heartbeat_ack", lambda a: bool(a.lost_lease_tokens))
        assert list(ack.lost_lease_tokens) == [999_999]


async def test_a_lease_that_no_heartbeat_lists_expires(world: RunningScheduler) -> None:
    await world.define("one", {"a": {"retry": {"max_attempts": 1}}})
    run_id = await world.start("one")
    async with world.executor() as executor:
        job = await take(executor)
        await world.until_run(run_id, "failed")
        row = await world.step(job.lease.step_run_id)
        assert (row["reason"], row["failures"]) == ("ATTEMPTS_EXHAUSTED", 1)
        assert '"LEASE_EXPIRED"' in row["error"]


async def test_silence_ends_a_session(world: RunningScheduler) -> None:
    async with world.executor(beat=False) as executor:
        await executor.status()
        alive = await until(
            lambda: world.raw.fetchval("select count(*) from rara.executor where ended_at is not null"),
            "ended session",
        )
        assert alive == 1


# ---------------------------------------------------------------- not taken up, given back


async def test_a_lease_that_nobody_accepts_goes_elsewhere_free_of_cost(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as deaf:
        first = await deaf.expect_job()
        async with world.executor() as other:
            second = await other.expect_job(timeout_s=ACCEPT_S + 5)
            assert (second.lease.attempt, second.failures) == (2, 0)
    (row,) = await world.raw.fetch("select reason, spent, lease_token from rara.step_attempt")
    assert tuple(row) == ("DISPATCH_LOST", False, first.lease.lease_token)


async def test_three_lapsed_grants_in_a_row_end_a_sessions_credit(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor(credit=10) as deaf:
        for _ in range(3):
            await deaf.expect_job()
        await until(
            lambda: world.raw.fetchval("select count(*) >= 3 from rara.step_attempt"), "third lapsed grant"
        )
        await beats_go_by(deaf)
        assert len(deaf.all("jobs")) == 3


async def test_an_unsupported_kind_is_not_offered_to_that_session_again(world: RunningScheduler) -> None:
    await world.define("two", {"a": {}, "b": {"kind": "work.other"}})
    await world.start("two")
    async with world.executor([KIND, "work.other"], credit=10) as executor:
        jobs: list[job_pb2.JobRequest] = []
        while len(jobs) < 2:
            jobs += (await executor.expect("jobs")).jobs
        refused = next(job for job in jobs if job.kind == KIND)
        await executor.reject(refused.lease, "UNSUPPORTED_KIND", "no such handler here")
        row = await world.until_step(refused.lease.step_run_id, "retryable_failed")
        assert (row["reason"], row["failures"]) == ("UNSUPPORTED_KIND", 0)
        await beats_go_by(executor)
        assert [job.kind for batch in executor.all("jobs") for job in batch.jobs].count(KIND) == 1
        async with world.executor() as able:
            assert (await able.expect_job()).lease.attempt == 2


async def test_no_capacity_zeroes_the_credit_until_the_next(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor(credit=10) as executor:
        job = await executor.expect_job()
        await executor.reject(job.lease, "NO_CAPACITY")
        await world.until_step(job.lease.step_run_id, "retryable_failed")
        await beats_go_by(executor)
        assert len(executor.all("jobs")) == 1
        await executor.credit(10)
        assert (await executor.expect_job()).lease.attempt == 2


async def test_a_rejection_after_running_is_not_heard(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as executor:
        job = await take(executor)
        await executor.reject(job.lease, "NO_CAPACITY")
        await executor.events(succeeded(job.lease))
        await executor.expect_ack(job.lease, 3)
        assert (await world.step(job.lease.step_run_id))["state"] == "succeeded"


# ---------------------------------------------------------------- cancel and time


async def test_a_cancel_is_pushed_repeated_received_and_confirmed(world: RunningScheduler) -> None:
    await world.define("two", {"a": {}, "b": {"depends_on": ["a"]}})
    run_id = await world.start("two")
    async with world.executor(beat=False) as executor:
        job = await take(executor)
        token = job.lease.lease_token
        async with beating(executor, lambda: [token]):
            await world.cancel(run_id)
            (pushed,) = (await executor.expect("cancels")).jobs
            assert (pushed.lease_token, pushed.reason) == (token, "CANCELLED")
            assert pushed.grace.ToTimedelta().total_seconds() == GRACE_S
            repeated = await executor.expect("heartbeat_ack", lambda a: bool(a.cancels))
            assert repeated.cancels[0].lease_token == token
            assert await world.run_state(run_id) == "cancelling"
            await executor.cancel_receipts(token)
            await until(
                lambda: world.raw.fetchval("select cancel_delivered_at is not null from rara.lease"),
                "receipt",
            )
            await executor.events(cancelled(job.lease))
            await executor.expect_ack(job.lease, 3)
    assert await world.steps(run_id) == {"a": ("cancelled", "CANCELLED"), "b": ("cancelled", "CANCELLED")}
    assert await world.run_state(run_id) == "cancelled"
    (facts,) = await world.raw.fetch(
        "select cancel_delivered_at, cancel_confirmed_at from rara.result where lease_token = $1", token
    )
    assert facts["cancel_delivered_at"] is not None
    assert facts["cancel_confirmed_at"] is not None


async def test_a_cancel_that_nobody_confirms_closes_when_the_lease_ends(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with world.executor(beat=False) as executor:
        job = await take(executor)
        async with beating(executor, lambda: [job.lease.lease_token]):
            await world.cancel(run_id)
            assert await world.until_run(run_id, "cancelled") == "cancelled"
    (row,) = await world.raw.fetch("select state, cancel_confirmed_at from rara.result")
    assert tuple(row) == ("cancelled", None)
    assert await world.raw.fetchval("select count(*) from rara.step_attempt") == 0


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"attempt_timeout": {"nanos": 300_000_000}}, "ATTEMPT_TIMEOUT"),
        ({"progress_timeout": {"nanos": 300_000_000}}, "PROGRESS_TIMEOUT"),
    ],
)
async def test_a_timeout_of_the_attempt_ends_the_attempt_only(
    world: RunningScheduler, step: dict[str, object], reason: str
) -> None:
    await world.define("one", {"a": step | {"retry": {"max_attempts": 2}}})
    run_id = await world.start("one")
    async with world.executor(credit=2, beat=False) as executor:
        held: list[int] = []
        async with beating(executor, lambda: held):
            for attempt in (1, 2):
                job = await take(executor)
                held[:] = [job.lease.lease_token]
                assert job.lease.attempt == attempt
                token = job.lease.lease_token
                cancel = await executor.expect("cancels", partial(_asks_for, token))
                assert [one.reason for one in cancel.jobs] == [reason]
                await executor.events(cancelled(job.lease, reason=reason))
            await world.until_run(run_id, "failed")
    assert await world.steps(run_id) == {"a": ("terminal_failed", "ATTEMPTS_EXHAUSTED")}


async def test_the_runs_deadline_closes_what_runs_and_what_waits(world: RunningScheduler) -> None:
    await world.define("two", {"a": {}, "b": {"depends_on": ["a"]}})
    run_id = await world.start("two", run_timeout=duration(1.0))
    async with world.executor(beat=False) as executor:
        job = await take(executor)
        async with beating(executor, lambda: [job.lease.lease_token]):
            (cancel,) = (await executor.expect("cancels")).jobs
            assert cancel.reason == "DEADLINE_EXCEEDED"
            await executor.events(cancelled(job.lease, reason="DEADLINE_EXCEEDED"))
            await world.until_run(run_id, "failed")
    assert await world.steps(run_id) == {
        "a": ("terminal_failed", "DEADLINE_EXCEEDED"),
        "b": ("cancelled", "DEADLINE_EXCEEDED"),
    }


async def test_a_step_that_nobody_can_run_closes_after_its_schedule_timeout(world: RunningScheduler) -> None:
    steps: dict[str, dict[str, object]] = {
        "lonely": {"kind": "nobody.serves", "schedule_timeout": {"nanos": 300_000_000}}
    }
    await world.define("lonely", steps)
    run_id = await world.start("lonely")
    assert await world.until_run(run_id, "failed") == "failed"
    assert await world.steps(run_id) == {"lonely": ("cancelled", "NO_CAPABLE_EXECUTOR")}


async def test_a_step_whose_executor_is_only_busy_outlives_its_schedule_timeout(
    world: RunningScheduler,
) -> None:
    await world.define("one", {"a": {"schedule_timeout": {"nanos": 100_000_000}}})
    run_id = await world.start("one")
    async with world.executor(credit=0) as executor:
        await beats_go_by(executor)
        assert await world.steps(run_id) == {"a": ("pending", "")}


# ---------------------------------------------------------------- ends of sessions


async def test_a_newer_session_of_an_executor_replaces_the_older(world: RunningScheduler) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    async with world.executor() as first:
        job = await take(first)
        held = dispatch_pb2.HeldJob(lease=job.lease, last_sequence=2, acked_sequence=1)
        async with world.executor(executor_id=first.executor_id, credit=0, held_jobs=[held]) as second:
            away = await first.expect("go_away")
            assert (away.reason, away.HasField("reconnect_after")) == ("REPLACED", False)
            await first.status()
            (welcome,) = second.all("welcome")
            assert [(a.lease_token, a.sequence) for a in welcome.acks.acks] == [(job.lease.lease_token, 2)]
            await second.events(succeeded(job.lease))
            await second.expect_ack(job.lease, 3)


async def test_a_drain_asked_for_while_the_executor_is_away_meets_it_at_the_welcome(
    world: RunningScheduler,
) -> None:
    executor_id = str(uuid4())
    async with world.executor(executor_id=executor_id):
        pass
    await world.drain(executor_id, within_s=60)
    async with world.executor(executor_id=executor_id) as executor:
        drain = await executor.expect("drain")
        assert 30 < drain.finish_within.ToTimedelta().total_seconds() <= 60


async def test_a_draining_executor_gets_nothing_more_and_goodbye_gives_back(world: RunningScheduler) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(3)})
    await world.start("wide")
    async with world.executor(credit=2) as executor:
        jobs: list[job_pb2.JobRequest] = []
        while len(jobs) < 2:
            jobs += (await executor.expect("jobs")).jobs
        await executor.drain()
        await executor.credit(9)
        await executor.events(accepted(jobs[0].lease), running(jobs[0].lease), succeeded(jobs[0].lease))
        await executor.expect_ack(jobs[0].lease, 3)
        assert sum(len(batch.jobs) for batch in executor.all("jobs")) == 2
        await executor.goodbye()
        assert await executor.status() is grpc.StatusCode.OK
    row = await world.until_step(jobs[1].lease.step_run_id, "retryable_failed")
    assert (row["reason"], row["failures"]) == ("EXECUTOR_SHUTDOWN", 0)
