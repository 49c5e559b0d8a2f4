"""run_handler: what users test their handlers with."""

import time
from pathlib import Path
from typing import Any

import pytest
from rara_executor import BlockingJob, Job, JobFailure, Retryable
from rara_executor.testing import Report, StoredArtifact, run_handler


async def count_words(job: Job) -> Any:
    corpus = await job.artifacts.open("corpus")
    words = corpus.read_text().split()
    await job.progress(0.5, "split", {"words": len(words)}, checkpoint={"at": len(words)})
    charged = await job.once("charge", lambda: {"id": 7})
    job.log.info("counted", words=len(words))
    await job.artifacts.put_bytes(
        "index", "\n".join(words).encode(), type="index", metadata={"n": len(words)}
    )
    return {
        "words": len(words),
        "charged": charged,
        "language": job.input["language"],
        "meta": corpus.metadata,
    }


def count_words_blocking(job: BlockingJob) -> Any:
    job.artifacts.put_file("copy", job.artifacts.open("corpus").path)
    return {"from": job.checkpoint, "secret": job.secrets["key"], "left": job.time_left_s is not None}


async def test_an_async_handler_runs_with_artifacts_progress_and_effects() -> None:
    run = await run_handler(
        count_words, {"language": "en"}, artifacts={"corpus": b"to be or not"}, metadata={"corpus": {"k": 1}}
    )
    assert run.output == {"words": 4, "charged": {"id": 7}, "language": "en", "meta": {"k": 1}}
    assert run.progress == [Report(0.5, "split", {"words": 4.0}, {"at": 4})]
    assert run.artifacts == {
        "index": StoredArtifact(b"to\nbe\nor\nnot", "index", "application/octet-stream", {"n": 4})
    }
    assert run.effects == {"charge": {"id": 7}}
    assert run.opened == ["corpus"]
    assert run.logged == ["counted"]


async def test_a_blocking_handler_runs_with_checkpoint_secrets_and_files(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_bytes(b"words")
    run = await run_handler(
        count_words_blocking,
        artifacts={"corpus": tmp_path / "corpus"},
        checkpoint={"done": 3},
        secrets={"key": "value"},
        time_left_s=10,
    )
    assert run.output == {"from": {"done": 3}, "secret": "value", "left": True}
    assert run.artifacts["copy"].data == b"words"


async def test_a_recorded_effect_is_given_back() -> None:
    run = await run_handler(
        count_words, {"language": "en"}, artifacts={"corpus": b""}, effects={"charge": {"id": 1}}
    )
    assert run.output["charged"] == {"id": 1}
    assert run.effects == {}


async def test_what_the_handler_raises_comes_out() -> None:
    async def fails(job: Job) -> None:
        raise Retryable("TOOL_FAILED", "no luck", retry_after_s=3)

    with pytest.raises(Retryable, match="TOOL_FAILED: no luck") as caught:
        await run_handler(fails)
    assert caught.value.retry_after_s == 3


async def test_bad_input_and_bad_output_fail_as_they_would_in_the_executor() -> None:
    async def output(job: Job) -> Any:
        return {"when": time.gmtime}

    with pytest.raises(JobFailure, match="PAYLOAD_INVALID: output at /when"):
        await run_handler(output)
    with pytest.raises(JobFailure, match="INPUT_INVALID: input at /n "):
        await run_handler(output, {"n": "x"}, input_schema={"properties": {"n": {"type": "integer"}}})
    with pytest.raises(JobFailure, match="ARTIFACT_MISSING: no input artifact 'corpus'; there are: none"):
        await run_handler(count_words, {})


async def test_a_name_is_used_once_and_free_again_when_its_put_failed() -> None:
    async def twice(job: Job) -> Any:
        with pytest.raises(FileNotFoundError):
            await job.artifacts.put_file("a", "/no/such/file")
        await job.artifacts.put_bytes("a", b"1")
        with pytest.raises(ValueError, match="a was used before"):
            await job.artifacts.put_bytes("a", b"2")
        with pytest.raises(JobFailure, match="metadata of artifact b at /x"):
            await job.artifacts.put_bytes("b", b"2", metadata={"x": {1}})
        return "done"

    run = await run_handler(twice)
    assert run.artifacts["a"].data == b"1"
