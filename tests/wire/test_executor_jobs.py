"""What an executor says of a job, from its request to its end."""

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rara_executor.app import Executor
from rara_testing.scripted_scheduler import ScriptedScheduler, Session, blob_artifact, job
from support.running_executor import running, until


@pytest_asyncio.fixture(scope="module")
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    async with ScriptedScheduler() as scheduler:
        yield scheduler


@pytest_asyncio.fixture(scope="module")
async def executor(
    scheduler: ScriptedScheduler, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Executor]:
    async with running(
        scheduler.address, tmp_path_factory.mktemp("executor"), labels="zone=a,gpu="
    ) as executor:
        yield executor


@pytest_asyncio.fixture(scope="module")
async def session(scheduler: ScriptedScheduler, executor: Executor) -> Session:
    session = await scheduler.session()
    await session.frame("credit")
    return session


class Tokens:
    def __init__(self) -> None:
        self.last = 0

    def __call__(self) -> int:
        self.last += 1
        return self.last


_tokens = Tokens()


@pytest.fixture
def token() -> int:
    return _tokens()


async def run(
    scheduler: ScriptedScheduler, session: Session, token: int, kind: str, given: Any = None, **more: Any
) -> Any:
    """The output of a job that succeeds."""
    session.send_jobs(job(token, kind, input=given, **more))
    event = await scheduler.event(token, "succeeded")
    return json.loads(event.succeeded.output.data)


async def error(
    scheduler: ScriptedScheduler, session: Session, token: int, kind: str, given: Any = None, **more: Any
) -> Any:
    """The error of a job that fails."""
    session.send_jobs(job(token, kind, input=given, **more))
    return (await scheduler.event(token, "failed")).failed


async def test_hello_names_the_process_and_what_it_can_run(session: Session, executor: Executor) -> None:
    hello = session.hello
    assert hello.protocol_version == 1
    assert hello.executor_id == executor.executor_id
    assert hello.executor_name == "test"
    assert hello.executor_kind == "python"
    assert hello.sdk.startswith("rara-python/")
    assert dict(hello.labels) == {"zone": "a", "gpu": ""}
    assert list(hello.held_jobs) == []
    kinds = {capability.kind: capability for capability in hello.capabilities}
    assert list(kinds["demo.echo"].versions) == ["1.0.0"]
    assert kinds["demo.one_at_a_time"].max_concurrency == 1
    assert kinds["demo.echo"].input_schema_sha256 == ""
    assert len(kinds["demo.checked"].input_schema_sha256) == 64


async def test_credit_is_the_slots_and_rises_as_slots_become_free(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    limit = session.of("credit")[-1].limit
    await run(scheduler, session, token, "demo.echo", 1)
    credit = await session.frame("credit", lambda credit: credit.limit > limit)
    assert credit.limit == limit + 1


@pytest.mark.parametrize("kind", ["demo.echo", "demo.echo_blocking"])
async def test_a_handlers_return_value_is_the_output(
    scheduler: ScriptedScheduler, session: Session, token: int, kind: str
) -> None:
    value = {"text": "é ☃ 😀", "numbers": [1, 2.5, -0.0, 2**53 + 1, 2**200], "nothing": None, "yes": True}
    assert await run(scheduler, session, token, kind, value) == value
    assert scheduler.kinds(token) == ["accepted", "running", "succeeded"]
    accepted, runs, succeeded = scheduler.events(token)
    assert accepted.accepted.executor_name == "test"
    assert runs.running.runner_id
    assert [event.sequence for event in (accepted, runs, succeeded)] == [1, 2, 3]
    assert {event.lease.step_run_id for event in (accepted, runs, succeeded)} == {f"step-{token}"}


async def test_a_handler_sees_the_facts_of_its_attempt(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    facts = await run(
        scheduler, session, token, "demo.facts", attempt=3, checkpoint={"at": 7}, time_remaining_s=100,
        attempt_timeout_s=50,
    )  # fmt: skip
    assert facts["attempt"] == 3
    assert facts["lease_token"] == token
    assert facts["idempotency_key"] == f"key-{token}"
    assert facts["checkpoint"] == {"at": 7}
    assert facts["max_attempts"] == 3
    assert facts["definition"] == "demo"
    assert facts["cancelled"] is False
    assert 45 < facts["time_left_s"] <= 50


async def test_async_handlers_share_a_process_and_blocking_ones_use_theirs_again(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    pids = {(await run(scheduler, session, _tokens(), "demo.facts"))["pid"] for _ in range(3)}
    assert len(pids) == 1
    blocking = {await run(scheduler, session, _tokens(), "demo.pid") for _ in range(3)}
    assert len(blocking) == 1
    assert blocking.isdisjoint(pids)


async def test_no_user_code_runs_before_accepted_is_acknowledged(
    scheduler: ScriptedScheduler, session: Session, token: int, tmp_path: Path
) -> None:
    scheduler.acknowledge = lambda event: event.lease.lease_token != token
    try:
        session.send_jobs(job(token, "demo.block_loop", input={"file": str(tmp_path / "mark"), "seconds": 0}))
        await scheduler.until(lambda: [e for e in session.events if e.lease.lease_token == token], "accepted")
        other = _tokens()
        await run(scheduler, session, other, "demo.echo")  # whatever was due before has happened
        assert not (tmp_path / "mark").exists()
        assert [e.WhichOneof("event") for e in session.events if e.lease.lease_token == token] == ["accepted"]
        assert token not in session.of("heartbeat")[-1].lease_tokens
    finally:
        scheduler.acknowledge = lambda _: True
    scheduler.stored[token] = {1: next(e for e in session.events if e.lease.lease_token == token)}
    session.acknowledge(token, 1)
    await scheduler.event(token, "succeeded")
    assert (tmp_path / "mark").exists()


async def test_a_repeated_request_starts_nothing(
    scheduler: ScriptedScheduler, session: Session, token: int, tmp_path: Path
) -> None:
    request = job(token, "demo.wait_for_file", input={"file": str(tmp_path / "go")})
    session.send_jobs(request, request)
    session.send_jobs(request)
    await scheduler.event(token, "progress")
    (tmp_path / "go").touch()
    await scheduler.event(token, "succeeded")
    assert scheduler.kinds(token) == ["accepted", "running", "progress", "succeeded"]


async def test_an_unknown_kind_or_version_is_rejected_and_runs_nothing(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    first, second, neighbour = _tokens(), _tokens(), _tokens()
    session.send_jobs(
        job(first, "no.such"), job(second, "demo.echo", version="9.9.9"), job(neighbour, "demo.echo")
    )
    for rejected in (first, second):
        rejection = await _rejection(scheduler, session, rejected)
        assert rejection.code == "UNSUPPORTED_KIND"
        assert rejection.lease.step_run_id == f"step-{rejected}"
        assert "demo.echo 1.0.0" in rejection.message
    await scheduler.event(neighbour, "succeeded")
    assert first not in scheduler.stored
    assert second not in scheduler.stored


async def test_a_kind_at_its_own_limit_is_rejected_for_want_of_capacity(
    scheduler: ScriptedScheduler, session: Session, tmp_path: Path
) -> None:
    first, second = _tokens(), _tokens()
    given = {"file": str(tmp_path / "go")}
    session.send_jobs(
        job(first, "demo.one_at_a_time", input=given), job(second, "demo.one_at_a_time", input=given)
    )
    assert (await _rejection(scheduler, session, second)).code == "NO_CAPACITY"
    (tmp_path / "go").touch()
    await scheduler.event(first, "succeeded")


async def _rejection(scheduler: ScriptedScheduler, session: Session, token: int) -> Any:
    def find() -> Any:
        rejections = [one for frame in session.of("rejections") for one in frame.rejections]
        return next((one for one in rejections if one.lease.lease_token == token), None)

    return await scheduler.until(find, f"rejection of {token}")


async def test_input_that_does_not_fit_the_schema_never_reaches_the_handler(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    failed = await error(scheduler, session, token, "demo.checked", {"items": [1, 2, "three"]})
    assert failed.code == "INPUT_INVALID"
    assert failed.message.startswith("input at /items/2 ")
    assert "three" not in failed.message
    assert not failed.HasField("retryable")  # the code's default is final
    assert await run(scheduler, session, _tokens(), "demo.checked", {"items": [1, 2, 3]}) == 6


@pytest.mark.parametrize("kind", ["demo.fail", "demo.fail_blocking"])
async def test_errors_are_reported_with_code_flag_details_and_stack(
    scheduler: ScriptedScheduler, session: Session, kind: str
) -> None:
    failed = await error(scheduler, session, _tokens(), kind, {"how": "retryable"})
    assert (failed.code, failed.message, failed.retryable) == ("TOOL_FAILED", "no luck", True)
    assert json.loads(failed.details.data) == {"n": 1}
    assert failed.retry_after.ToMilliseconds() == 7500
    assert "raise Retryable(" in failed.stack_trace

    failed = await error(scheduler, session, _tokens(), kind, {"how": "terminal"})
    assert (failed.code, failed.retryable) == ("INPUT_HOPELESS", False)

    failed = await error(scheduler, session, _tokens(), kind, {"how": "other", "message": "boom"})
    assert (failed.code, failed.message) == ("HANDLER_FAILED", "RuntimeError: boom")
    assert not failed.HasField("retryable")

    failed = await error(scheduler, session, _tokens(), kind, {"how": "deep"})
    assert failed.code == "HANDLER_FAILED"
    assert failed.message.startswith("RecursionError")


@pytest.mark.parametrize("code", ["FAILED", "tool_failed", "LEASE_LOST", "A_" + "B" * 62, "TOOL FAILED", ""])
async def test_a_code_that_a_handler_cannot_use_becomes_handler_failed(
    scheduler: ScriptedScheduler, session: Session, token: int, code: str
) -> None:
    failed = await error(scheduler, session, token, "demo.fail", {"how": "terminal", "code": code})
    assert failed.code == "HANDLER_FAILED"
    assert repr(code) in failed.message
    assert failed.message.endswith("never")
    assert failed.retryable is False


async def test_an_error_text_can_always_be_sent(scheduler: ScriptedScheduler, session: Session) -> None:
    failed = await error(scheduler, session, _tokens(), "demo.fail", {"how": "bytes"})
    assert failed.message == "RuntimeError: \ufffd\ufffd\ufffd and \ufffd"

    failed = await error(scheduler, session, _tokens(), "demo.fail", {"how": "long"})
    assert len(failed.message.encode()) <= 16 << 10
    assert "[cut: " in failed.message
    assert len(failed.stack_trace.encode()) <= 64 << 10

    failed = await error(scheduler, session, _tokens(), "demo.fail", {"how": "details", "size": 2 << 20})
    assert (failed.code, failed.message) == ("INPUT_HOPELESS", "see details")
    assert json.loads(failed.details.data)["cut"] is True

    failed = await error(scheduler, session, _tokens(), "demo.fail", {"how": "bad_details"})
    assert failed.code == "INPUT_HOPELESS"
    assert "details at /when: object is not a JSON type" in failed.message


@pytest.mark.parametrize(
    ("output", "code", "path"),
    [
        ("nul", "PAYLOAD_INVALID", "/a/1/b~1c"),
        ("nul_key", "PAYLOAD_INVALID", "/"),
        ("surrogate", "PAYLOAD_INVALID", "/0"),
        ("nan", "PAYLOAD_INVALID", "/loss/1"),
        ("infinity", "PAYLOAD_INVALID", "/"),
        ("set", "PAYLOAD_INVALID", "/ids"),
        ("bytes", "PAYLOAD_INVALID", "/"),
        ("int_key", "PAYLOAD_INVALID", "/"),
        ("deep", "PAYLOAD_INVALID", "/0/0/0"),
        ("over", "PAYLOAD_TOO_LARGE", ""),
    ],
)
async def test_an_output_that_cannot_be_stored_is_refused_by_path(
    scheduler: ScriptedScheduler, session: Session, token: int, output: str, code: str, path: str
) -> None:
    failed = await error(scheduler, session, token, "demo.output", output)
    assert failed.code == code
    assert not failed.HasField("retryable")
    assert failed.message.startswith(f"output at {path}" if path else "output has 1048577 bytes")


async def test_an_output_of_exactly_the_limit_passes_and_integers_stay_exact(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    assert len(await run(scheduler, session, _tokens(), "demo.output", "exact")) == (1 << 20) - 2
    numbers = await run(scheduler, session, _tokens(), "demo.output", "big_int")
    assert numbers == {"n": 2**200, "m": 2**53 + 1, "negative": -(2**63)}
    assert await run(scheduler, session, _tokens(), "demo.output", "tuple") == {"pair": [1, 2]}
    assert await run(scheduler, session, _tokens(), "demo.output", "nothing") is None


async def test_progress_arrives_in_order_with_its_checkpoint(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    assert await run(scheduler, session, token, "demo.progress", {"count": 3, "checkpoint": True}) == 3
    reports = [event.progress for event in scheduler.events(token) if event.HasField("progress")]
    assert [report.message for report in reports] == ["1 of 3", "2 of 3", "3 of 3"]
    assert reports[-1].fraction == 1.0
    assert dict(reports[-1].metrics) == {"number": 3.0}
    assert json.loads(reports[-1].checkpoint.data) == {"done": 3}


async def test_a_flood_of_progress_is_merged_and_the_newest_kept(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    assert (
        await run(scheduler, session, token, "demo.progress", {"count": 20_000, "checkpoint": True}) == 20_000
    )
    reports = [event.progress for event in scheduler.events(token) if event.HasField("progress")]
    assert len(reports) < 20_000
    assert reports[-1].message == "20000 of 20000"
    assert json.loads(reports[-1].checkpoint.data) == {"done": 20_000}
    sequences = [event.sequence for event in scheduler.events(token)]
    assert sequences == list(range(1, len(sequences) + 1))


async def test_a_checkpoint_over_the_limit_fails_the_handler_and_progress_is_cut_to_size(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    failed = await error(scheduler, session, _tokens(), "demo.big_checkpoint")
    assert failed.code == "PAYLOAD_TOO_LARGE"
    assert "checkpoint has 1048578 bytes" in failed.message

    token = _tokens()
    await run(scheduler, session, token, "demo.long_progress")
    progress = next(event.progress for event in scheduler.events(token) if event.HasField("progress"))
    assert len(progress.message.encode()) <= 4 << 10
    assert "[cut: " in progress.message
    assert progress.fraction == 1.0
    assert dict(progress.metrics) == {"ok": 1.0}


@pytest.mark.parametrize(
    ("how", "code", "exit_code", "number"),
    [
        ("kill", "RUNNER_CRASHED", None, 9),
        ("abort", "RUNNER_CRASHED", None, 6),
        ("exit", "RUNNER_CRASHED", 7, None),
    ],
)
async def test_a_crashed_runner_fails_its_job_with_the_cause(
    scheduler: ScriptedScheduler,
    session: Session,
    token: int,
    how: str,
    code: str,
    exit_code: int | None,
    number: int | None,
) -> None:
    failed = await error(scheduler, session, token, "demo.die", {"how": how})
    assert failed.code == code
    assert not failed.HasField("retryable")
    end = failed.runner_exit
    assert (end.exit_code if end.HasField("exit_code") else None) == exit_code
    assert (end.signal if end.HasField("signal") else None) == number
    assert end.peak_memory_bytes > 1 << 20
    assert not end.out_of_memory
    assert await run(scheduler, session, _tokens(), "demo.echo_blocking", 1) == 1


async def test_exceptions_that_would_end_a_process_end_the_attempt_only(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    failed = await error(scheduler, session, _tokens(), "demo.die", {"how": "memory"})
    assert failed.code == "OUT_OF_MEMORY"
    failed = await error(scheduler, session, _tokens(), "demo.die", {"how": "sys_exit"})
    assert (failed.code, failed.message) == ("HANDLER_FAILED", "the handler called sys.exit(3)")
    failed = await error(scheduler, session, _tokens(), "demo.self_cancel")
    assert failed.code == "HANDLER_FAILED"


async def test_what_handlers_print_does_not_disturb_the_link(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    assert await run(scheduler, session, token, "demo.noise") == "quiet"


async def test_handlers_may_start_processes_and_report_from_threads(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    assert await run(scheduler, session, _tokens(), "demo.many_children", {"count": 50}) == 50
    token = _tokens()
    assert await run(scheduler, session, token, "demo.progress_from_thread") == "done"
    assert "progress" in scheduler.kinds(token)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["demo.workers", "demo.workers_async"])
async def test_handlers_may_use_multiprocessing(
    scheduler: ScriptedScheduler, session: Session, token: int, kind: str, method: str
) -> None:
    assert await run(scheduler, session, token, kind, method) == [1, 4, 9]


@pytest.mark.parametrize("kind", ["demo.terminated_at_once", "demo.terminated_at_once_blocking"])
async def test_what_a_handler_forks_can_be_ended_from_its_first_moment(
    scheduler: ScriptedScheduler, session: Session, token: int, kind: str
) -> None:
    codes = await run(scheduler, session, token, kind, 30)
    assert codes == [-signal.SIGTERM] * 30


async def test_a_blocking_handler_that_waits_for_an_answer_can_be_cancelled(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    scheduler.acknowledge = lambda event: not event.HasField("effect")
    try:
        session.send_jobs(job(token, "demo.once_blocking"))
        await session.frame(
            "events",
            lambda batch: any(e.HasField("effect") and e.lease.lease_token == token for e in batch.events),
        )
        session.cancel_job(token, grace_s=10)
        cancelled = (await scheduler.event(token, "cancelled", bound_s=3)).cancelled
        assert cancelled.runner_exit.exit_code == 0
    finally:
        scheduler.acknowledge = lambda _: True


async def test_once_runs_its_function_once_and_gives_what_was_recorded(
    scheduler: ScriptedScheduler, session: Session
) -> None:
    token = _tokens()
    output = await run(scheduler, session, token, "demo.once")
    charge = {"charged": 5, "pair": [1, 2]}
    assert output == {"first": charge, "second": charge, "third": "sent", "calls": 1}
    effects = [event.effect for event in scheduler.events(token) if event.HasField("effect")]
    assert [effect.name for effect in effects] == ["charge", "mail"]
    assert json.loads(effects[0].result.data) == charge

    again = await run(
        scheduler, session, _tokens(), "demo.once", effects={"charge": {"charged": 4}, "mail": None}
    )
    assert again == {"first": {"charged": 4}, "second": {"charged": 4}, "third": None, "calls": 0}
    assert await run(scheduler, session, _tokens(), "demo.once_blocking") == [1, 1]


async def test_once_returns_only_when_the_effect_is_acknowledged(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    def stored(event: Any) -> bool:
        return not (event.lease.lease_token == token and event.HasField("effect"))

    scheduler.acknowledge = stored
    try:
        session.send_jobs(job(token, "demo.once_blocking"))
        effect = await scheduler.until(
            lambda: next(
                (e for e in session.events if e.lease.lease_token == token and e.HasField("effect")), None
            ),
            "effect",
        )
        await run(scheduler, session, _tokens(), "demo.echo")
        assert scheduler.kinds(token) == ["accepted", "running"]
    finally:
        scheduler.acknowledge = lambda _: True
    scheduler.stored[token][effect.sequence] = effect
    session.acknowledge(token, effect.sequence)
    await scheduler.event(token, "succeeded")


async def test_an_effect_over_its_limit_fails_the_attempt(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    failed = await error(scheduler, session, token, "demo.big_effect")
    assert failed.code == "PAYLOAD_TOO_LARGE"
    assert "effect big" in failed.message


async def test_effects_keep_the_progress_timeout_away(
    scheduler: ScriptedScheduler, session: Session, token: int
) -> None:
    given = {"count": 5, "seconds": 0.3}
    session.send_jobs(job(token, "demo.slow_effects", input=given, progress_timeout_s=1.0))
    await scheduler.event(token, "succeeded")


@pytest.mark.parametrize("kind", ["demo.wait", "demo.wait_blocking"])
async def test_attempt_and_progress_timeouts_and_deadline_stop_the_handler(
    scheduler: ScriptedScheduler, session: Session, kind: str
) -> None:
    tokens = {reason: _tokens() for reason in ("ATTEMPT_TIMEOUT", "PROGRESS_TIMEOUT", "DEADLINE_EXCEEDED")}
    session.send_jobs(
        job(tokens["ATTEMPT_TIMEOUT"], kind, input={}, attempt_timeout_s=0.3),
        job(tokens["PROGRESS_TIMEOUT"], kind, input={}, progress_timeout_s=0.3),
        job(tokens["DEADLINE_EXCEEDED"], kind, input={}, time_remaining_s=0.3),
    )
    for reason, token in tokens.items():
        assert (await scheduler.event(token, "cancelled")).cancelled.reason == reason


async def test_scratch_folders_are_removed_when_a_job_is_acknowledged(
    scheduler: ScriptedScheduler, session: Session, executor: Executor, token: int
) -> None:
    await run(
        scheduler,
        session,
        token,
        "demo.artifacts_blocking",
        artifacts=(blob_artifact("corpus", b"abc", inline=True),),
    )
    folder = executor._settings.executor_dir / "jobs" / executor.executor_id / str(token)
    await until(lambda: not folder.exists())
