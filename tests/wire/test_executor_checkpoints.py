"""Checkpoints with artifacts between handler, executor and scheduler."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from rara.v1 import common_pb2, dispatch_pb2, job_pb2
from rara_executor import BlockingJob, InputArtifact, Job, JobFailure
from rara_executor.testing import run_handler
from rara_testing.scripted_scheduler import ScriptedScheduler, Session, blob_artifact, digest_of, job
from support.fenced_handlers import weights
from support.running_executor import running
from support.running_scheduler import until

SIZE = 30_000


@pytest_asyncio.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler() as scheduler:
        yield scheduler


@pytest_asyncio.fixture
async def session(scheduler: ScriptedScheduler, tmp_path: Path) -> AsyncIterator[Session]:
    async with running(scheduler.address, tmp_path, modules="support.fenced_handlers"):
        session = await scheduler.session()
        await session.frame("credit")
        yield session


def train(token: int, folder: Path) -> job_pb2.JobRequest:
    return job(token, "fenced.train", input={"folder": str(folder), "size": SIZE})


def checkpoints(scheduler: ScriptedScheduler, token: int) -> list[job_pb2.ProgressEvent]:
    return [event for event in scheduler.events(token) if event.progress.checkpoint_artifacts]


def files_of_weights(folder: Path) -> int:
    return sum(path.stat().st_size == SIZE for path in (folder / "executor").rglob("out-*"))


async def until_weights_files(folder: Path, count: int) -> None:
    async def look() -> bool:
        return files_of_weights(folder) == count

    await until(look, f"{count} files of weights")


async def test_bytes_are_stored_before_they_are_named_and_leave_with_a_cancelled_job(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    session.send_jobs(train(1, tmp_path))
    await scheduler.until(lambda: (tmp_path / "half-1").exists(), "half of the training")
    newest = (
        await scheduler.until(
            lambda: [
                event
                for event in checkpoints(scheduler, 1)
                if json.loads(event.progress.checkpoint.data)["epoch"] == 3
            ],
            "third checkpoint",
        )
    )[0].progress
    named = {artifact.name: artifact for artifact in newest.checkpoint_artifacts}
    assert list(named) == ["weights", "log"]
    assert (named["weights"].type, named["weights"].inline) == ("checkpoint", b"")
    assert scheduler.blobs.blobs[named["weights"].digest.sha256] == weights(SIZE, 3)
    assert scheduler.blobs.blobs[named["log"].digest.sha256] == b"python 1\npython 2\npython 3\n"
    await until_weights_files(tmp_path, 2)  # of the first checkpoint, which is stored, nothing is left
    session.cancel_job(1)
    cancelled = (await scheduler.event(1, "cancelled")).cancelled
    assert cancelled.checkpoint == newest.checkpoint
    assert list(cancelled.checkpoint_artifacts) == list(newest.checkpoint_artifacts)


async def test_a_checkpoints_missing_blob_is_stored_again_and_the_same_event_sent_again(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    scheduler.acknowledge = lambda event: not event.progress.checkpoint_artifacts
    session.send_jobs(train(1, tmp_path))

    def reported() -> list[job_pb2.ProgressEvent]:
        return [event for event in session.events if event.progress.checkpoint_artifacts]

    # The handler does not wait: it is two checkpoints on when the first one is refused.
    await scheduler.until(lambda: len(reported()) == 3, "three checkpoints")
    first, _, last = reported()
    digests = [artifact.digest for artifact in first.progress.checkpoint_artifacts]
    for digest in digests:
        del scheduler.blobs.blobs[digest.sha256]  # collected in between
    refusal = dispatch_pb2.EventRefusal(
        lease_token=1, sequence=first.sequence, code="BLOBS_MISSING", digests=digests
    )
    session.send(acks=dispatch_pb2.EventAcks(refusals=[refusal]))
    again = await scheduler.until(lambda: reported()[3:], "the same event")
    assert again == [first]
    assert {digest.sha256 for digest in digests} <= set(scheduler.blobs.blobs)
    assert files_of_weights(tmp_path) == 3
    session.acknowledge(1, last.sequence)
    await until_weights_files(tmp_path, 2)


async def test_a_later_attempt_goes_on_from_the_bytes_and_refuses_others(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    log = b"go 1\ngo 2\n"
    given = (blob_artifact("weights", weights(SIZE, 2), type="checkpoint"), blob_artifact("log", log))
    for data in (weights(SIZE, 2), log):
        scheduler.blobs.add(data)
    request = train(1, tmp_path)
    request.checkpoint.data = b'{"epoch":2,"big":9007199254740993,"by":"go"}'
    request.checkpoint_artifacts.extend(given)
    session.send_jobs(request)
    result = (await scheduler.event(1, "succeeded")).succeeded
    output = json.loads(result.output.data)
    assert (output["resumed_at"], output["resumed_of"], output["big"]) == (2, "go", 2**53 + 1)
    assert output["log"] == log.decode() + "".join(f"python {epoch}\n" for epoch in (3, 4, 5, 6))
    assert not result.consumed  # its own state is no input
    wrong = digest_of(b"x" * SIZE)
    scheduler.blobs.blobs[wrong.sha256] = b"y" * SIZE
    request = train(2, tmp_path)
    request.checkpoint.data = b'{"epoch":2,"big":1,"by":"go"}'
    request.checkpoint_artifacts.append(common_pb2.Artifact(name="weights", digest=wrong))
    session.send_jobs(request)
    assert (await scheduler.event(2, "failed")).failed.code == "ARTIFACT_MISMATCH"


# ---------------------------------------------------------------- in this process


async def test_a_handler_can_carry_over_what_it_was_given() -> None:
    async def handler(job: Job) -> object:
        assert job.artifacts.checkpoint_names() == ["log", "weights"]
        old = await job.artifacts.open_checkpoint("weights")
        assert isinstance(old, InputArtifact)
        await job.progress(0.5, checkpoint={"at": 2}, artifacts={"weights": old, "extra": b"more"})
        with_nothing = {"at": 3}
        await job.progress(0.6, checkpoint=with_nothing)
        return old.digest

    given = {"weights": b"heavy", "log": b"said"}
    run = await run_handler(handler, checkpoint={"at": 1}, checkpoint_artifacts=given)
    assert run.output == hashlib.sha256(b"heavy").hexdigest()
    assert [dict(report.artifacts) for report in run.progress] == [
        {"weights": b"heavy", "extra": b"more"},
        {},
    ]
    assert run.artifacts == {}  # no output


async def test_a_blocking_handler_keeps_files_and_is_told_what_it_did_wrong(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(b"of a blocking one")

    def handler(job: BlockingJob) -> list[str]:
        job.progress(checkpoint={}, artifacts={"a": path, "b": str(path)})
        wrong: list[str] = []
        for given in ({"../a": b""}, {f"n{number}": b"" for number in range(65)}):
            try:
                job.progress(checkpoint={}, artifacts=given)
            except JobFailure as failure:
                wrong.append(failure.code)
        try:
            job.progress(artifacts={"a": b""})
        except ValueError as error:
            wrong.append(str(error)[:32])
        try:
            job.artifacts.open_checkpoint("none")
        except JobFailure as failure:
            wrong.append(failure.message)
        return wrong

    run = await run_handler(handler)
    assert run.progress[0].artifacts == {"a": b"of a blocking one", "b": b"of a blocking one"}
    assert run.output == [
        "ARTIFACT_INVALID",
        "PAYLOAD_TOO_LARGE",
        "artifacts belong to a checkpoint",
        "no checkpoint artifact 'none'; there are: none",
    ]
