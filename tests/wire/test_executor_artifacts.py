"""Artifacts and secrets between handler, executor and scheduler."""

import base64
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
import pytest_asyncio
from rara.v1 import common_pb2, dispatch_pb2, job_pb2
from rara_executor.app import Executor
from rara_testing.scripted_scheduler import ScriptedScheduler, Session, blob_artifact, job
from support.running_executor import running

LARGE = os.urandom(3_000_000)


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler() as scheduler:
        yield scheduler


@pytest_asyncio.fixture
async def executor(scheduler: ScriptedScheduler, tmp_path: Path) -> AsyncIterator[Executor]:
    (tmp_path / "secrets").mkdir()
    async with running(scheduler.address, tmp_path, secrets_dir=tmp_path / "secrets") as executor:
        yield executor


@pytest_asyncio.fixture
async def session(scheduler: ScriptedScheduler, executor: Executor) -> Session:
    session = await scheduler.session()
    await session.frame("credit")
    return session


def corpus(data: bytes, **values: Any) -> common_pb2.Artifact:
    return blob_artifact("corpus", data, **values)


async def test_inputs_are_fetched_and_outputs_stored_with_their_facts(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    scheduler.blobs.add(LARGE)
    metadata = common_pb2.Payload(data=b'{"source":"test"}')
    session.send_jobs(job(1, "demo.artifacts", artifacts=(corpus(LARGE, type="dataset", metadata=metadata),)))
    result = (await scheduler.event(1, "succeeded")).succeeded
    reverse = hashlib.sha256(LARGE[::-1]).hexdigest()
    assert json.loads(result.output.data) == {
        "size": len(LARGE),
        "type": "dataset",
        "metadata": {"source": "test"},
        "big": reverse,
        "small": hashlib.sha256(b"small").hexdigest(),
        "same": True,
    }
    big, small = result.manifest.artifacts
    assert (big.name, big.type, big.digest.sha256, big.digest.size_bytes) == (
        "reversed", "dataset", reverse, len(LARGE),
    )  # fmt: skip
    assert json.loads(big.metadata.data) == {"bytes": len(LARGE)}
    assert [digest.sha256 for digest in big.derived_from] == [hashlib.sha256(LARGE).hexdigest()]
    assert big.inline == b""
    assert scheduler.blobs.blobs[reverse] == LARGE[::-1]
    assert (small.name, small.media_type, small.inline, small.digest.size_bytes) == (
        "summary", "text/plain", b"small", 5,
    )  # fmt: skip
    assert [digest.sha256 for digest in result.consumed] == [hashlib.sha256(LARGE).hexdigest()]
    assert [request.lease.lease_token for request in scheduler.blobs.created] == [1]


async def test_a_blob_is_fetched_once_and_then_comes_from_the_cache(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    scheduler.blobs.add(LARGE)
    for token in (1, 2):
        session.send_jobs(job(token, "demo.artifacts_blocking", artifacts=(corpus(LARGE),)))
        await scheduler.event(token, "succeeded")
    assert scheduler.blobs.reads == 1


async def test_a_damaged_blob_in_the_cache_is_fetched_again(
    scheduler: ScriptedScheduler, session: Session, executor: Executor
) -> None:
    digest = scheduler.blobs.add(LARGE)
    cached = executor._settings.executor_dir / "cache" / digest.sha256[:2] / digest.sha256
    cached.parent.mkdir(parents=True)
    cached.write_bytes(LARGE[:-1])
    session.send_jobs(job(1, "demo.artifacts_blocking", artifacts=(corpus(LARGE),)))
    await scheduler.event(1, "succeeded")
    assert cached.read_bytes() == LARGE


async def test_an_inline_input_needs_no_fetch(scheduler: ScriptedScheduler, session: Session) -> None:
    for token, data in ((1, b"inline"), (2, b"")):
        session.send_jobs(job(token, "demo.artifacts_blocking", artifacts=(corpus(data, inline=True),)))
        output = json.loads((await scheduler.event(token, "succeeded")).succeeded.output.data)
        assert output == hashlib.sha256(data).hexdigest()
    assert scheduler.blobs.reads == 0


@pytest.mark.parametrize("change", ["cut", "flipped", "longer"])
async def test_a_blob_that_does_not_match_its_digest_fails_the_attempt(
    scheduler: ScriptedScheduler, session: Session, change: str
) -> None:
    digest = scheduler.blobs.add(LARGE)
    damaged = {"cut": LARGE[:-1], "flipped": b"\0" + LARGE[1:], "longer": LARGE + b"x"}[change]
    scheduler.blobs.blobs[digest.sha256] = damaged
    session.send_jobs(job(1, "demo.artifacts_blocking", artifacts=(corpus(LARGE),)))
    failed = (await scheduler.event(1, "failed")).failed
    assert failed.code == "ARTIFACT_MISMATCH"
    assert not failed.HasField("retryable")
    assert digest.sha256 in failed.message
    assert scheduler.blobs.reads == 2  # once more, in case the way was at fault


async def test_a_blob_or_name_that_is_not_there_is_missing(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    session.send_jobs(
        job(1, "demo.artifacts_blocking", artifacts=(corpus(LARGE),)), job(2, "demo.artifacts_blocking")
    )
    for token in (1, 2):
        assert (await scheduler.event(token, "failed")).failed.code == "ARTIFACT_MISSING"


async def test_transfers_are_tried_again_while_the_service_is_away(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    scheduler.blobs.add(LARGE)
    scheduler.blobs.fail = [grpc.StatusCode.UNAVAILABLE] * 4
    session.send_jobs(job(1, "demo.artifacts", artifacts=(corpus(LARGE),)))
    await scheduler.event(1, "succeeded")
    assert scheduler.blobs.fail == []


async def test_an_upload_that_was_cut_goes_on_where_it_was(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    scheduler.blobs.add(LARGE)
    backwards = LARGE[::-1]
    digest = common_pb2.Digest(sha256=hashlib.sha256(backwards).hexdigest(), size_bytes=len(backwards))
    scheduler.blobs.uploads[f"upload-{digest.sha256}"] = digest, bytearray(backwards[:1_000_000])
    session.send_jobs(job(1, "demo.artifacts", artifacts=(corpus(LARGE),)))
    await scheduler.event(1, "succeeded")
    assert scheduler.blobs.blobs[digest.sha256] == backwards


async def test_an_upload_under_a_lost_lease_stops_the_job(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    scheduler.blobs.fail = [grpc.StatusCode.FAILED_PRECONDITION]
    session.send_jobs(job(1, "demo.artifacts_blocking", artifacts=(corpus(b"x" * 20_000),)))
    scheduler.blobs.add(b"x" * 20_000)
    await session.frame("credit", lambda credit: credit.limit == 5)
    assert scheduler.kinds(1) in (["accepted"], ["accepted", "running"])  # `running` may still have waited


async def test_missing_blobs_are_stored_again_and_the_same_event_is_sent_again(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    scheduler.blobs.add(LARGE)
    refused: list[job_pb2.ProgressEvent] = []

    def refuse(event: job_pb2.ProgressEvent) -> dispatch_pb2.EventRefusal | None:
        if event.HasField("succeeded") and not refused:
            refused.append(event)
            digests = [artifact.digest for artifact in event.succeeded.manifest.artifacts]
            scheduler.blobs.blobs.clear()  # collected in between
            return dispatch_pb2.EventRefusal(code="BLOBS_MISSING", digests=digests)
        return None

    scheduler.refuse = refuse
    session.send_jobs(job(1, "demo.artifacts", artifacts=(corpus(LARGE),)))
    succeeded = await scheduler.event(1, "succeeded")
    assert succeeded == refused[0]
    assert {digest_of.sha256 for digest_of in _digests(succeeded)} == set(scheduler.blobs.blobs)


def _digests(event: job_pb2.ProgressEvent) -> list[common_pb2.Digest]:
    return [artifact.digest for artifact in event.succeeded.manifest.artifacts]


async def test_a_missing_blob_that_cannot_be_stored_again_ends_as_failed(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    foreign = common_pb2.Digest(sha256="0" * 64, size_bytes=1)
    scheduler.refuse = lambda event: (
        dispatch_pb2.EventRefusal(code="BLOBS_MISSING", digests=[foreign])
        if event.HasField("succeeded")
        else None
    )
    session.send_jobs(job(1, "demo.echo"))
    assert (await scheduler.event(1, "failed")).failed.code == "ARTIFACT_MISMATCH"


SECRET = "s3cr3t-7f/ü+"


def secret(provider: str, name: str) -> dict[str, common_pb2.SecretRef]:
    return {"key": common_pb2.SecretRef(provider=provider, name=name)}


@pytest.mark.parametrize("provider", ["env", "file"])
@pytest.mark.parametrize("given", ["succeed", "fail"])
async def test_no_secret_leaves_the_executor(
    scheduler: ScriptedScheduler,
    session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    provider: str,
    given: str,
) -> None:
    monkeypatch.setenv("THE_KEY", SECRET)
    (tmp_path / "secrets" / "the-key").write_text(SECRET + "\n")
    name = {"env": "THE_KEY", "file": "the-key"}[provider]
    session.send_jobs(job(1, "demo.secrets", input=given, secrets=secret(provider, name)))
    event = await scheduler.event(1, "succeeded" if given == "succeed" else "failed")
    if given == "succeed":
        assert json.loads(event.succeeded.output.data) == {"in": "a *** b", "***": 1}
    else:
        assert event.failed.code == "TOOL_FAILED"
        assert event.failed.message == "cannot reach https://host/?key=***"
        assert json.loads(event.failed.details.data) == {"used": ["***"]}
        assert "TOOL_FAILED" in event.failed.stack_trace
    said = b"".join(frame.SerializeToString() for frame in session.frames)
    captured = capsys.readouterr()
    everything = said + captured.out.encode() + captured.err.encode()
    assert b"printed ***" in everything
    for form in (SECRET, quote(SECRET, safe=""), base64.b64encode(SECRET.encode()).decode()):
        assert form.encode() not in everything


@pytest.mark.parametrize(
    ("given", "named"),
    [("checkpoint", "checkpoint at /pages/0/at: "), ("effect", "effect log in at /cookie: ")],
)
async def test_a_secret_that_the_next_attempt_would_get_ends_the_step(
    scheduler: ScriptedScheduler,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    named: str,
) -> None:
    monkeypatch.setenv("THE_KEY", SECRET)
    session.send_jobs(job(1, "demo.secrets", input=given, secrets=secret("env", "THE_KEY")))
    failed = (await scheduler.event(1, "failed")).failed
    assert (failed.code, failed.message.startswith(named)) == ("SECRET_IN_PAYLOAD", True)
    sent = scheduler.events(1)
    checkpoints = [event.progress.checkpoint.data for event in sent if event.progress.HasField("checkpoint")]
    assert checkpoints[0] == b'{"at":"page 2"}'
    assert not any(event.HasField("effect") for event in sent)
    said = b"".join(frame.SerializeToString() for frame in session.frames)
    assert SECRET.encode() not in said


@pytest.mark.parametrize(
    ("provider", "name"),
    [
        ("env", "NOT_SET_AT_ALL"),
        ("env", "RARA_SCHEDULER"),
        ("file", "nothing"),
        ("file", "../x"),
        ("vault", "a"),
    ],
)
async def test_a_reference_that_leads_nowhere_fails_before_the_handler(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path, provider: str, name: str
) -> None:
    (tmp_path / "x").write_text("outside of the folder")
    session.send_jobs(job(1, "demo.secrets", secrets=secret(provider, name)))
    failed = (await scheduler.event(1, "failed")).failed
    assert failed.code == "SECRET_UNRESOLVED"
    assert name in failed.message
    assert "outside" not in failed.message
    assert scheduler.kinds(1) == ["accepted", "failed"]
