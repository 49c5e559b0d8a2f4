"""Every row of the exit-code table, with the one line that goes with it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from rara.v1 import job_pb2, workflow_pb2
from support.command_line import rara
from support.scripted_workflow import Fault, ScriptedServer, scripted_server

RUN = "0198c2a0-0000-7000-8000-000000000001"
OTHER_RUN = "0198c2a0-0000-7000-8001-000000000001"
STEP = "0198c2a0-0000-7000-8000-0000000000a1"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        yield running


def put(server: ScriptedServer, state: str, code: str = "", *, step_reason: str = "") -> None:
    """A run in this state; code: of its error."""
    number = workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{state}")
    run = workflow_pb2.WorkflowRun(
        workflow_run_id=RUN, definition="nightly", definition_version=2, state=number
    )
    if code or step_reason:
        run.failed_step_run_id = STEP
        step = workflow_pb2.StepRun(
            step_run_id=STEP,
            workflow_run_id=RUN,
            step_name="index",
            state=workflow_pb2.STEP_RUN_STATE_TERMINAL_FAILED,
            reason=step_reason or code,
        )
        server.workflow.put_step(step)
    if code:
        run.error.CopyFrom(job_pb2.JobError(code=code, message="no room\nleft"))
    server.workflow.put_run(run)


@pytest.mark.parametrize("verb", ["watch", "wait"])
@pytest.mark.parametrize(
    ("state", "error", "step_reason", "code", "said"),
    [
        ("SUCCEEDED", "", "", 0, ""),
        (
            "FAILED",
            "GPU_OOM",
            "",
            10,
            f"rara: step index: GPU_OOM: no room left (next: rara step get {RUN}/index)\n",
        ),
        ("CANCELLED", "", "", 11, f"rara: RUN_CANCELLED: the run was cancelled (next: rara run get {RUN})\n"),
        ("FAILED", "DEADLINE_EXCEEDED", "", 12, "DEADLINE_EXCEEDED"),
        ("FAILED", "", "DEADLINE_EXCEEDED", 12, "DEADLINE_EXCEEDED"),
    ],
    ids=["succeeded", "failed", "cancelled", "deadline", "deadline-of-the-step"],
)
async def test_watch_and_wait_end_with_the_code_of_the_run(
    server: ScriptedServer, verb: str, state: str, error: str, step_reason: str, code: int, said: str
) -> None:
    put(server, state, error, step_reason=step_reason)
    result = await rara("run", verb, RUN, server=server.address)
    assert result.code == code
    assert result.err == said if said.endswith("\n") or not said else said in result.err
    assert result.lines[-1] == f"run {RUN} {state.lower()}"


@pytest.mark.parametrize("verb", ["watch", "wait"])
async def test_a_run_that_goes_on_when_the_timeout_ends_is_8(server: ScriptedServer, verb: str) -> None:
    put(server, "RUNNING")
    result = await rara("run", verb, RUN, "--timeout", "0.2s", server=server.address)
    assert result.code == 8
    assert result.err == (
        f"rara: STILL_GOING: the run is running after 0.2 s, and goes on (next: rara watch {RUN})\n"
    )


def put_many(server: ScriptedServer, *states: str) -> list[str]:
    """Runs in these states; their ids."""
    runs = [
        workflow_pb2.WorkflowRun(
            workflow_run_id=f"0198c2a0-0000-7000-8000-00000000010{number}",
            state=workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{state}"),
        )
        for number, state in enumerate(states)
    ]
    for run in runs:
        server.workflow.put_run(run)
    return [run.workflow_run_id for run in runs]


async def test_a_wait_for_several_tells_each_and_ends_with_the_code_of_the_first_that_failed(
    server: ScriptedServer,
) -> None:
    runs = put_many(server, "SUCCEEDED", "CANCELLED", "FAILED")
    result = await rara("run", "wait", *runs, server=server.address)
    assert (result.code, result.err) == (11, "")
    assert result.lines == [
        f"run {runs[0]} succeeded",
        f"run {runs[1]} cancelled",
        f"run {runs[2]} failed",
    ]
    assert (await rara("run", "wait", runs[0], runs[0], server=server.address)).code == 0
    piped = await rara(
        "run", "wait", "-", "-o", "json", stdin="\n".join(runs).encode(), server=server.address
    )
    document = json.loads(piped.out)
    assert (piped.code, document["exit_code"]) == (11, 11)
    assert [(one["workflow_run_id"], one["exit_code"]) for one in document["runs"]] == [
        (runs[0], 0),
        (runs[1], 11),
        (runs[2], 10),
    ]
    assert document["runs"][2]["run"]["state"] == "failed"
    assert not server.script.requests("WatchRun")


async def test_a_wait_for_several_says_what_does_not_exist_and_what_goes_on(server: ScriptedServer) -> None:
    runs = put_many(server, "RUNNING", "SUCCEEDED")
    lines = await rara(
        "run", "wait", runs[1], OTHER_RUN, runs[0], "-o", "jsonl", "--timeout", "0.3s", server=server.address
    )
    assert lines.code == 3
    assert [json.loads(line)["exit_code"] for line in lines.lines] == [0, 3]
    going = await rara("run", "wait", *runs, "--timeout", "0.3s", server=server.address)
    assert (going.code, going.lines) == (8, [f"run {runs[1]} succeeded"])
    assert going.err == (
        f"rara: STILL_GOING: 1 of 2 runs have not ended after 0.3 s, and go on (next: rara watch {runs[0]})\n"
    )
    table = await rara("run", "wait", runs[1], OTHER_RUN, server=server.address)
    assert table.lines == [f"run {runs[1]} succeeded", f"run {OTHER_RUN} does not exist"]
    for arguments in ((*runs, "--latest"), ("-",)):
        wrong = await rara("run", "wait", *arguments, stdin=b"0198\n", server=server.address)
        assert (wrong.code, "USAGE" in wrong.err) == (2, True)


async def test_a_fault_nobody_foresaw_is_1_and_shows_its_traceback_only_when_asked(
    server: ScriptedServer,
) -> None:
    server.script.plant("ListRuns", *[Fault(grpc.StatusCode.INTERNAL, "INTERNAL", "log 17")] * 2)
    result = await rara("run", "list", server=server.address)
    assert (result.code, result.out, result.err) == (1, "", "rara: INTERNAL: log 17\n")
    result = await rara("run", "list", "-v", server=server.address)
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.err.endswith("rara: INTERNAL: log 17\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ("nonsense",),
        ("run", "nonsense"),
        ("run", "list", "--nonsense"),
        ("run", "list", "--state", "asleep"),
        ("run", "list", "-o", "xml"),
        ("run", "list", "--timeout", "soon"),
        ("run", "get"),
        ("run", "get", "0198", "--latest"),
        ("run", "start"),
        ("run", "start", "x", "--input", "@/nowhere/input.json"),
        ("run", "start", "x", "--input", "{}", "--input", "{}"),
        ("run", "start", "x", "--label", "a"),
        ("run", "start", "x", "--artifact", "a=/nowhere/file"),
        ("run", "cancel", RUN),
        ("definition", "apply", "/nowhere/d.yaml"),
        ("step", "get"),
        ("artifact", "cat", RUN),
        ("db", "migrate"),
        ("completion", "tcsh"),
    ],
    ids=" ".join,
)
async def test_what_was_typed_wrong_is_2_on_one_line(
    server: ScriptedServer, arguments: tuple[str, ...]
) -> None:
    result = await rara(*arguments, server=server.address)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("rara: ")
    assert result.err.count("\n") == 1
    assert server.script.calls == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("run", "get", RUN), f"rara: RUN_NOT_FOUND: there is no run {RUN} (next: rara run list)"),
        (("run", "get", "0198"), "rara: RUN_NOT_FOUND: no run begins with '0198' (next: rara run list)"),
        (("run", "get", "--latest"), "rara: RUN_NOT_FOUND: there is no run yet (next: rara run start NAME)"),
        (("step", "get", STEP), f"rara: STEP_NOT_FOUND: there is no step {STEP} (next: rara step list RUN)"),
        (
            ("definition", "get", "x"),
            "rara: DEFINITION_NOT_FOUND: there is no definition x (next: rara definition list)",
        ),
        (
            ("run", "start", "x"),
            "rara: DEFINITION_NOT_FOUND: there is no definition x (next: rara definition list)",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_what_is_not_there_is_3(server: ScriptedServer, arguments: tuple[str, ...], line: str) -> None:
    result = await rara(*arguments, server=server.address)
    assert (result.code, result.out, result.err) == (3, "", f"{line}\n")


@pytest.mark.parametrize(
    "fault",
    [
        Fault(grpc.StatusCode.UNAUTHENTICATED, "CREDENTIAL_INVALID", "no valid token"),
        Fault(grpc.StatusCode.PERMISSION_DENIED, "NOT_ALLOWED", "not for clients"),
    ],
    ids=lambda fault: fault.reason,
)
async def test_not_signed_in_or_not_allowed_is_4(server: ScriptedServer, fault: Fault) -> None:
    server.script.plant("ListRuns", fault)
    result = await rara("ps", server=server.address)
    assert (result.code, result.err) == (4, f"rara: {fault.reason}: {fault.message}\n")


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            Fault(grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST", "the lease has passed on"),
            "rara: LEASE_LOST: the lease has passed on",
        ),
        (
            Fault(
                grpc.StatusCode.INVALID_ARGUMENT,
                "PAYLOAD_INVALID",
                "the input does not fit the schema",
                violations=[("input.day", "must be a number")],
            ),
            "rara: PAYLOAD_INVALID: the input does not fit the schema: input.day: must be a number",
        ),
        (
            Fault(
                grpc.StatusCode.INVALID_ARGUMENT,
                "SECRET_IN_PAYLOAD",
                "a raw secret",
                violations=[("input.db.password", "key rule")],
            ),
            (
                "rara: SECRET_IN_PAYLOAD: a raw secret: input.db.password: key rule"
                " (next: name the secret in the definition's `secrets` instead)"
            ),
        ),
        (
            Fault(grpc.StatusCode.ALREADY_EXISTS, "IDEMPOTENCY_CONFLICT", f"run {RUN} has this key"),
            f"rara: IDEMPOTENCY_CONFLICT: run {RUN} has this key (next: use another --key)",
        ),
        (
            Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", "100,000 steps wait"),
            "rara: QUEUE_FULL: 100,000 steps wait (next: try again later)",
        ),
    ],
    ids=lambda value: value.reason if isinstance(value, Fault) else "",
)
async def test_what_state_schema_or_secret_rule_refuses_is_5(
    server: ScriptedServer, fault: Fault, line: str
) -> None:
    server.script.plant("StartRun", fault)
    result = await rara("run", "start", "x", "--input", '{"day": "x"}', server=server.address)
    assert (result.code, result.out, result.err) == (5, "", f"{line}\n")


async def test_a_retry_of_a_run_that_did_not_fail_is_5(server: ScriptedServer) -> None:
    put(server, "SUCCEEDED")
    result = await rara("run", "retry", RUN, server=server.address)
    assert (result.code, result.err) == (
        5,
        "rara: RUN_NOT_RETRYABLE: the run has not failed (next: rara run get RUN)\n",
    )


async def test_a_definition_file_that_is_wrong_is_5_and_nothing_is_sent(
    server: ScriptedServer, tmp_path: Path
) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("definition: good")
    bad.write_text("definition: x\nsteps: [{timeout: 30}]")
    for verb in ("apply", "validate"):
        result = await rara("definition", verb, str(good), str(bad), server=server.address)
        assert (result.code, result.out) == (5, "")
        assert result.err.startswith(
            f"rara: DEFINITION_INVALID: {bad}: steps[0].timeout: must be seconds in quotes"
        )
        assert result.err.count("\n") == 1
    assert server.script.calls == []


async def test_a_scheduler_that_cannot_be_reached_is_6() -> None:
    result = await rara("run", "list", "--server", "127.0.0.1:1")
    assert result.code == 6
    assert result.err == (
        "rara: UNAVAILABLE: the scheduler at 127.0.0.1:1 cannot be reached"
        " (next: rara dev up, or name another with --server HOST:PORT)\n"
    )


async def test_a_scheduler_that_does_not_answer_in_time_is_6() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent:
        address = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        result = await rara("run", "list", "--timeout", "0.2", server=address)
    assert result.code == 6
    assert result.err.startswith(
        f"rara: DEADLINE_EXCEEDED: the scheduler at {address} did not answer in time"
    )


async def test_a_database_behind_the_scheduler_that_is_away_is_6(server: ScriptedServer) -> None:
    away = Fault(grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE", "the database is away")
    server.script.plant("ListRuns", *[away] * 6)
    result = await rara("run", "list", server=server.address)
    assert (result.code, result.err) == (
        6,
        "rara: STORE_UNAVAILABLE: the database is away (next: try again later)\n",
    )


@pytest.mark.parametrize(
    ("state", "words", "code"),
    [
        ("TERMINAL_FAILED", (), 0),
        ("TERMINAL_FAILED", ("--exit-code",), 9),
        ("RUNNING", ("--exit-code",), 8),
        ("SUCCEEDED", ("--exit-code",), 0),
    ],
)
async def test_runs_that_differ_are_9_if_that_is_asked_for(
    server: ScriptedServer, state: str, words: tuple[str, ...], code: int
) -> None:
    two_runs(server, state)
    result = await rara("run", "compare", RUN, OTHER_RUN, *words, server=server.address)
    assert (result.code, result.err) == (code, "")


async def test_a_run_that_retention_removes_while_it_is_compared_is_3(server: ScriptedServer) -> None:
    two_runs(server, "SUCCEEDED")
    gone = Fault(grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND", f"there is no run {RUN}")
    server.script.plant("ListStepRuns", gone)
    result = await rara("run", "compare", RUN, OTHER_RUN, server=server.address)
    assert (result.code, result.out) == (3, "")
    assert result.err == f"rara: RUN_NOT_FOUND: there is no run {RUN} (next: rara run list)\n"


def two_runs(server: ScriptedServer, state: str) -> None:
    """RUN, whose one step succeeded, and OTHER_RUN, whose step is in this state."""
    server.workflow.definitions.append(workflow_pb2.Definition(definition="nightly", version=2))
    run_states = {"TERMINAL_FAILED": "FAILED"}
    for run_id, step_state in ((RUN, "SUCCEEDED"), (OTHER_RUN, state)):
        run_state = run_states.get(step_state, step_state)
        server.workflow.put_run(
            workflow_pb2.WorkflowRun(
                workflow_run_id=run_id,
                definition="nightly",
                definition_version=2,
                state=workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{run_state}"),
            )
        )
        server.workflow.put_step(
            workflow_pb2.StepRun(
                step_run_id=run_id[:-2] + "a1",
                workflow_run_id=run_id,
                step_name="index",
                state=workflow_pb2.StepRunState.Value(f"STEP_RUN_STATE_{step_state}"),
            )
        )


async def test_the_last_line_of_jsonl_says_how_it_ended(server: ScriptedServer) -> None:
    put(server, "FAILED", "GPU_OOM")
    result = await rara("watch", RUN, "-o", "jsonl", server=server.address)
    assert result.code == 10
    events = [json.loads(line) for line in result.lines]
    assert [event["type"] for event in events] == ["run", "step_run", "snapshot_end", "result"]
    assert events[-1]["exit_code"] == 10
    assert events[-1]["state"] == "failed"
    assert events[-1]["error"]["code"] == "GPU_OOM"
