"""What each command sends and shows, in each format."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rara.v1 import common_pb2, dispatch_pb2, job_pb2, workflow_pb2
from support.command_line import rara
from support.scripted_workflow import ScriptedServer, scripted_server

RUNS = [f"0198c2a{digit}-0000-7000-8000-00000000000{digit}" for digit in range(3)]
RUN = RUNS[0]
STEP = "0198c2b0-0000-7000-8000-0000000000a1"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        fill(running)
        yield running


def fill(server: ScriptedServer) -> None:
    """Three runs; the first has a step that runs and one that waits."""
    workflow = server.workflow
    workflow.definitions.append(
        workflow_pb2.Definition(
            definition="nightly",
            version=1,
            steps=[
                workflow_pb2.StepDefinition(step_name="index", kind="index.build"),
                workflow_pb2.StepDefinition(
                    step_name="report",
                    kind="report.write",
                    input_template=common_pb2.Payload(data=b'{"n": {"$ref": "/steps/index/output/n"}}'),
                ),
            ],
        )
    )
    states = ("RUNNING", "FAILED", "SUCCEEDED")
    for run_id, state in zip(RUNS, states, strict=True):
        run = workflow_pb2.WorkflowRun(
            workflow_run_id=run_id,
            definition="nightly",
            definition_version=1,
            state=workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{state}"),
            labels={"day": run_id[7]},
            step_counts={"succeeded": 1, "running": 1},
            input=common_pb2.Payload(data=b'{"n": 9007199254740993}'),
        )
        run.created_at.FromJsonString("2026-03-04T05:06:07.089Z")
        workflow.put_run(run)
    step = workflow_pb2.StepRun(
        step_run_id=STEP,
        workflow_run_id=RUN,
        step_name="index",
        state=workflow_pb2.STEP_RUN_STATE_RUNNING,
        kind="index.build",
        kind_version="1.2.0",
        attempt=2,
        failures=1,
        max_attempts=3,
        executor_name="exec-2",
        last_sequence=3,
        progress=job_pb2.JobProgress(
            fraction=0.57, message="indexed\x1b[31m 570 of 1,000", metrics={"documents": 570}
        ),
        output=common_pb2.Payload(omitted_bytes=5000),
        manifest=common_pb2.ArtifactManifest(
            artifacts=[
                common_pb2.Artifact(
                    name="index",
                    type="index",
                    media_type="application/x-sqlite",
                    digest=server.artifacts.put(b"abc"),
                ),
                common_pb2.Artifact(
                    name="notes",
                    type="report",
                    media_type="text/plain",
                    digest=common_pb2.Digest(sha256=hashlib.sha256(b"hello\n").hexdigest(), size_bytes=6),
                    inline=b"hello\n",
                ),
            ]
        ),
    )
    workflow.put_step(step)
    waiting = workflow_pb2.StepRun(
        step_run_id=STEP[:-1] + "2",
        workflow_run_id=RUN,
        step_name="report",
        state=workflow_pb2.STEP_RUN_STATE_PENDING,
        kind="report.write",
        max_attempts=3,
    )
    workflow.put_step(waiting)
    workflow.attempts[STEP] = [
        workflow_pb2.StepAttempt(
            lease=job_pb2.Lease(step_run_id=STEP, lease_token=41, attempt=1),
            reason="LEASE_EXPIRED",
            spent=True,
            last_sequence=1,
        ),
        workflow_pb2.StepAttempt(
            lease=job_pb2.Lease(step_run_id=STEP, lease_token=44, attempt=2),
            executor_name="exec-2",
            last_sequence=3,
        ),
    ]
    for attempt, last in ((1, 1), (2, 3)):
        for sequence in range(1, last + 1):
            event = job_pb2.ProgressEvent(
                lease=job_pb2.Lease(step_run_id=STEP, lease_token=40 + attempt, attempt=attempt),
                sequence=sequence,
            )
            event.event_time.FromJsonString(f"2026-03-04T05:06:0{sequence}Z")
            if sequence == 1:
                event.accepted.executor_name = "exec-2"
            else:
                event.progress.fraction = sequence / 10
                event.progress.message = f"part {sequence}"
            workflow.put_event(event)
    workflow.executors.append(
        workflow_pb2.Executor(
            executor_id="e-1",
            executor_name="exec-2",
            state=workflow_pb2.EXECUTOR_STATE_CONNECTED,
            in_flight=1,
            free_credit=3,
            capabilities=[dispatch_pb2.Capability(kind="index.build", versions=["1.2.0", "1.3.0"])],
        )
    )


async def test_a_list_piped_is_a_table_of_full_width_with_iso_times_and_no_colour(
    server: ScriptedServer,
) -> None:
    result = await rara("run", "list", server=server.address)
    assert result.code == 0
    assert result.lines[0].split() == ["RUN", "DEFINITION", "STATE", "STEPS", "CREATED", "TOOK", "ERROR"]
    assert result.lines[1].split() == [
        RUNS[2],
        "nightly",
        "v1",
        "succeeded",
        "1/2",
        "2026-03-04T05:06:07.089Z",
    ]
    assert [line.split()[3] for line in result.lines[1:]] == ["succeeded", "failed", "running"]
    assert "\x1b" not in result.out


async def test_the_formats_of_a_list(server: ScriptedServer) -> None:
    wide = await rara("ps", "-o", "wide", server=server.address)
    assert "LABELS" in wide.lines[0]
    assert "day=2" in wide.lines[1]
    names = await rara("ps", "-o", "name", server=server.address)
    assert names.lines == RUNS[::-1]
    document = (await rara("-o", "json", "ps", server=server.address)).json
    assert [item["state"] for item in document] == ["succeeded", "failed", "running"]
    assert document[2]["input"] == {"n": 9007199254740993}
    assert document[2]["created_at"] == "2026-03-04T05:06:07.089Z"
    assert "started_at" not in document[2]
    lines = await rara("ps", "-o", "jsonl", server=server.address)
    assert [json.loads(line)["workflow_run_id"] for line in lines.lines] == RUNS[::-1]


async def test_filters_and_the_limit_reach_the_scheduler(server: ScriptedServer) -> None:
    arguments = ("--definition", "nightly", "--state", "failed", "--state", "running", "--label", "day=1")
    result = await rara("run", "list", *arguments, "-o", "name", server=server.address)
    assert result.lines == [RUNS[1]]
    assert (await rara("run", "list", "--limit", "2", "-o", "name", server=server.address)).lines == RUNS[
        :0:-1
    ]


async def test_an_empty_list_says_on_stderr_what_to_do(server: ScriptedServer) -> None:
    result = await rara("run", "list", "--definition", "other", server=server.address)
    assert (result.code, result.out) == (0, "")
    assert "rara run start NAME" in result.err
    assert (
        await rara("run", "list", "--definition", "other", "-o", "json", server=server.address)
    ).json == []


@pytest.mark.parametrize("style", ["relative", "iso", "unix"])
async def test_times_are_shown_as_asked(server: ScriptedServer, style: str) -> None:
    result = await rara("--time", style, "run", "list", "--limit", "1", server=server.address)
    shown = {"iso": "2026-03-04T05:06:07.089Z", "unix": "1772600767.089", "relative": "d"}[style]
    assert shown in result.lines[1]


async def test_colour_is_forced_or_refused_by_flag_and_environment(server: ScriptedServer) -> None:
    address = server.address
    assert "\x1b[32msucceeded" in (await rara("ps", "--color", "always", server=address)).out
    assert "\x1b" in (await rara("ps", server=address, env={"CLICOLOR_FORCE": "1"})).out
    forced = await rara("ps", server=address, env={"CLICOLOR_FORCE": "1", "NO_COLOR": "1"})
    assert "\x1b" not in forced.out


async def test_a_unique_beginning_names_a_run_and_an_ambiguous_one_lists_them(server: ScriptedServer) -> None:
    result = await rara("run", "get", "0198c2a1", "-o", "name", server=server.address)
    assert result.out == f"{RUNS[1]}\n"
    result = await rara("run", "get", "0198c2a", server=server.address)
    assert result.code == 2
    assert result.err == (
        f"rara: AMBIGUOUS_ID: 3 begin with '0198c2a': {', '.join(RUNS[::-1])} (next: type more of it)\n"
    )
    result = await rara("run", "get", "--latest", "-o", "name", server=server.address)
    assert result.out == f"{RUNS[2]}\n"


async def test_run_get_shows_the_run_and_its_steps(server: ScriptedServer) -> None:
    result = await rara("run", "get", RUN, server=server.address)
    assert result.lines[:3] == [f"run         {RUN}", "definition  nightly v1", "state       running"]
    assert any(line.startswith("index   running  ") and "57%" in line for line in result.lines)
    document = (await rara("run", "get", RUN, "-o", "json", server=server.address)).json
    assert [step["step_name"] for step in document["steps"]] == ["index", "report"]
    assert document["steps"][0]["output"] == {"omitted_bytes": 5000}


async def test_run_start_sends_input_labels_version_and_key(server: ScriptedServer) -> None:
    result = await rara(
        *("run", "start", "nightly", "--input", "day=2026-01-01", "--input", "n=3", "--input", 'list=["a"]'),
        *("--label", "team=data", "--version", "1", "--key", "k-1", "--run-timeout", "2h"),
        server=server.address,
    )
    assert result.code == 0
    request = server.script.requests("StartRun")[0]
    assert json.loads(request.input.data) == {"day": "2026-01-01", "n": 3, "list": ["a"]}
    assert dict(request.labels) == {"team": "data"}
    assert (request.definition_version, request.idempotency_key) == (1, "k-1")
    assert request.run_timeout.seconds == 7200
    run_id = "00000000-0000-7000-8000-000000000004"
    assert result.out == f"run {run_id} started (nightly v1)\n"
    assert result.err == f"follow it: rara watch {run_id}\n"
    again = await rara("run", "start", "nightly", "--key", "k-1", server=server.address)
    assert again.out == f"run {run_id} was started before (nightly v1)\n"


async def test_run_start_makes_a_key_of_its_own_so_that_a_repeat_is_safe(server: ScriptedServer) -> None:
    await rara("run", "start", "nightly", server=server.address)
    await rara("run", "start", "nightly", server=server.address)
    keys = {request.idempotency_key for request in server.script.requests("StartRun")}
    assert len(keys) == 2
    assert all(key.startswith("cli-") for key in keys)


@pytest.mark.parametrize("how", ["file", "stdin", "text"])
async def test_an_input_text_is_passed_on_byte_for_byte(
    server: ScriptedServer, tmp_path: Path, how: str
) -> None:
    text = b'{ "n": 1.10, "big": 9007199254740993 }'
    path = tmp_path / "input.json"
    path.write_bytes(text)
    value = {"file": f"@{path}", "stdin": "@-", "text": text.decode()}[how]
    await rara("run", "start", "nightly", "--input", value, stdin=text, server=server.address)
    assert server.script.requests("StartRun")[0].input.data == text


async def test_run_start_uploads_artifacts_and_names_them(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"some text")
    await rara("run", "start", "nightly", "--artifact", f"corpus={path}", server=server.address)
    artifact = server.script.requests("StartRun")[0].input_artifacts[0]
    assert (artifact.name, artifact.media_type, artifact.type) == ("corpus", "text/plain", "blob")
    assert server.artifacts.blobs[artifact.digest.sha256] == b"some text"


async def test_run_start_with_wait_prints_one_document_and_ends_as_the_run(server: ScriptedServer) -> None:
    run = server.workflow.runs[RUNS[1]]
    server.workflow.keys["k-2"] = run.workflow_run_id
    arguments = ("run", "start", "nightly", "--key", "k-2", "--wait")
    result = await rara(*arguments, "-o", "json", server=server.address)
    assert result.code == 10
    assert result.json["run"]["workflow_run_id"] == RUNS[1]
    assert result.json["exit_code"] == 10
    assert (await rara(*arguments, "-o", "name", server=server.address)).out == f"{RUNS[1]}\n"


async def test_watch_piped_prints_plain_lines(server: ScriptedServer) -> None:
    run = server.workflow.runs[RUNS[2]]
    step = workflow_pb2.StepRun(
        step_run_id=STEP[:-1] + "9",
        workflow_run_id=RUNS[2],
        step_name="index",
        state=workflow_pb2.STEP_RUN_STATE_SUCCEEDED,
        attempt=1,
    )
    server.workflow.put_step(step)
    result = await rara("watch", run.workflow_run_id, server=server.address)
    assert [line.partition("  ")[2] for line in result.lines[:-1]] == [
        f"run {RUNS[2]}  succeeded  0/2 steps",
        "step index  succeeded  attempt 1",
    ]
    assert result.lines[-1] == f"run {RUNS[2]} succeeded"
    assert "\x1b" not in result.out


async def test_cancel_needs_a_yes_where_nobody_can_be_asked(server: ScriptedServer) -> None:
    result = await rara("run", "cancel", RUN, server=server.address)
    assert result.code == 2
    assert result.err == (
        f"rara: CONFIRMATION_NEEDED: cancel run {RUN}: nobody is here to ask (next: the same with --yes)\n"
    )
    two = await rara("run", "cancel", "0198c2a0", "0198c2a1", server=server.address)
    assert "cancel 2 runs" in two.err
    assert server.script.requests("CancelRun") == []
    done = await rara(
        "run", "cancel", RUN, "-y", "--message", "wrong day", "--grace", "5s", server=server.address
    )
    assert done.code == 0
    request = server.script.requests("CancelRun")[0]
    assert (request.workflow_run_id, request.message, request.grace.seconds) == (RUN, "wrong day", 5)
    assert "cancelling" in done.out


async def test_retry_starts_a_new_run_of_the_steps_named(server: ScriptedServer) -> None:
    result = await rara("run", "retry", RUNS[1], "--step", "index", "-o", "json", server=server.address)
    assert result.json["retry_of_workflow_run_id"] == RUNS[1]
    assert list(server.script.requests("RetryRun")[0].step_names) == ["index"]


async def test_steps_are_named_by_id_beginning_or_run_and_name(server: ScriptedServer) -> None:
    for arguments in (
        (STEP,),
        ("0198c2a0/index",),
        (f"{RUN}/index",),
        ("0198c2b0-0000-7000-8000-0000000000a1",),
    ):
        result = await rara("step", "get", *arguments, "-o", "name", server=server.address)
        assert result.out == f"{STEP}\n", result.err
    missing = await rara("step", "get", "0198c2a0/nothing", server=server.address)
    assert (missing.code, missing.err) == (
        3,
        f"rara: STEP_NOT_FOUND: run {RUN} has no step 'nothing' (next: rara step list {RUN})\n",
    )
    ambiguous = await rara("step", "get", "0198c2b0", server=server.address)
    assert ambiguous.code == 2


async def test_step_list_and_get_show_states_in_words_and_no_control_characters(
    server: ScriptedServer,
) -> None:
    listed = await rara("step", "list", RUN, server=server.address)
    assert [line.split()[:2] for line in listed.lines[1:]] == [["index", "running"], ["report", "pending"]]
    shown = await rara("step", "get", STEP, server=server.address)
    assert "metrics    documents 570" in shown.lines
    assert "\x1b" not in listed.out + shown.out
    attempts = [line.split() for line in shown.lines[-2:]]
    assert attempts[0][:4] == ["1", "41", "LEASE_EXPIRED", "yes"]
    assert attempts[1][:5] == ["2", "44", "exec-2", "open", "no"]
    only = await rara(
        "step", "list", "--state", "pending", "--kind", "report.write", "-o", "json", server=server.address
    )
    assert [step["step_name"] for step in only.json] == ["report"]


async def test_step_events_prints_the_stored_ones_of_an_attempt(server: ScriptedServer) -> None:
    result = await rara("step", "events", STEP, server=server.address)
    assert result.lines == [
        "2026-03-04T05:06:01.000Z  2.1  accepted   by exec-2",
        "2026-03-04T05:06:02.000Z  2.2  progress   20% part 2",
        "2026-03-04T05:06:03.000Z  2.3  progress   30% part 3",
    ]
    first = await rara("step", "events", STEP, "--attempt", "1", "-o", "json", server=server.address)
    assert [event["sequence"] for event in first.json] == [1]
    later = await rara("step", "events", STEP, "--after", "2", "-o", "jsonl", server=server.address)
    assert [json.loads(line)["sequence"] for line in later.lines] == [3]
    none = await rara("step", "events", STEP, "--attempt", "7", server=server.address)
    assert none.code == 3


async def test_why_says_the_obstacles_in_words(server: ScriptedServer) -> None:
    waiting = STEP[:-1] + "2"
    server.workflow.obstacles[waiting] = [
        workflow_pb2.Obstacle(code="UPSTREAM_PENDING", step_run_ids=[STEP]),
        workflow_pb2.Obstacle(
            code="NO_CAPABLE_EXECUTOR",
            message="nobody offers report.write",
            ahead=10_000,
            near_misses=[workflow_pb2.NearMiss(executor_name="exec-2", lacks="label gpu=a100")],
        ),
    ]
    result = await rara("why", f"{RUN}/report", server=server.address)
    assert result.lines == [
        f"step report of run {RUN}: pending",
        "1. UPSTREAM_PENDING: it waits for steps before it; steps: index",
        "2. NO_CAPABLE_EXECUTOR: nobody offers report.write; 10,000 or more ahead of it",
        "   - executor exec-2 lacks: label gpu=a100",
    ]
    document = (await rara("step", "why", waiting, "-o", "json", server=server.address)).json
    assert document["obstacles"][1]["near_misses"][0]["lacks"] == "label gpu=a100"
    free = await rara("why", STEP, server=server.address)
    assert free.lines[1] == "Nothing is in its way."
    server.workflow.steps[STEP].state = workflow_pb2.STEP_RUN_STATE_SUCCEEDED
    over = await rara("why", STEP, server=server.address)
    assert over.lines[1] == "It has ended, so nothing can be in its way."


async def test_an_executor_is_drained_by_its_name_or_id(server: ScriptedServer) -> None:
    (known,) = server.workflow.executors
    asked = await rara("executor", "drain", known.executor_name, server=server.address)
    assert (asked.code, f"drain executor {known.executor_id}" in asked.err) == (2, True)
    for text in (known.executor_name, known.executor_id, known.executor_id[:2]):
        done = await rara("executor", "drain", text, "-y", "--within", "10m", server=server.address)
        assert done.code == 0, done.err
        request = server.script.requests("DrainExecutor")[-1]
        assert (request.executor_id, request.finish_within.seconds) == (known.executor_id, 600)
    unbound = await rara("executor", "drain", known.executor_id, "-y", server=server.address)
    assert unbound.code == 0
    assert not server.script.requests("DrainExecutor")[-1].HasField("finish_within")
    server.workflow.executors.append(
        workflow_pb2.Executor(executor_id="e-2", executor_name=known.executor_name, state=known.state)
    )
    for text, code, said in (
        (known.executor_name, 2, "AMBIGUOUS_NAME"),
        ("e-", 2, "AMBIGUOUS_ID"),
        ("nobody", 3, "EXECUTOR_NOT_FOUND"),
    ):
        refused = await rara("executor", "drain", text, "-y", server=server.address)
        assert (refused.code, said in refused.err) == (code, True), refused.err


async def test_executors_and_what_they_offer(server: ScriptedServer) -> None:
    result = await rara("executor", "list", server=server.address)
    assert result.lines[1].split() == ["exec-2", "connected", "1", "3", "index.build", "1.2.0", "1.3.0"]


async def test_definitions_are_applied_once_listed_and_shown(server: ScriptedServer, tmp_path: Path) -> None:
    path = tmp_path / "weekly.yaml"
    path.write_text("definition: weekly\nsteps: [{step_name: a, kind: b.c}]\n")
    checked = await rara("definition", "validate", str(path), server=server.address)
    assert checked.out == "definition weekly v1 valid\n"
    applied = await rara("definition", "apply", str(path), server=server.address)
    assert applied.out == "definition weekly v1 created\n"
    again = await rara("definition", "apply", str(path), "-o", "json", server=server.address)
    assert again.json[0]["result"] == "unchanged"
    listed = await rara("definition", "list", "-o", "name", server=server.address)
    assert listed.lines == ["nightly", "weekly"]
    offline = await rara("definition", "validate", "--offline", str(path), "--server", "127.0.0.1:1")
    assert offline.out == "definition weekly readable\n"
    shown = await rara("definition", "get", "nightly", server=server.address)
    assert [line.split() for line in shown.lines[-2:]] == [
        ["index", "index.build"],
        ["report", "report.write", "index"],
    ]


async def test_artifacts_are_listed_saved_and_printed(server: ScriptedServer, tmp_path: Path) -> None:
    listed = await rara("artifact", "list", RUN, server=server.address)
    assert [line.split()[:5] for line in listed.lines[1:]] == [
        ["index", "index", "index", "3", "B"],
        ["notes", "index", "report", "6", "B"],
    ]
    assert (await rara("artifact", "cat", RUN, "index", server=server.address)).raw == b"abc"
    assert (await rara("artifact", "cat", RUN, "index/notes", server=server.address)).raw == b"hello\n"
    target = tmp_path / "out.db"
    saved = await rara("artifact", "get", RUN, "index", "--to", str(target), server=server.address)
    assert target.read_bytes() == b"abc"
    assert str(target) in saved.out
    again = await rara("artifact", "get", RUN, "index", "--to", str(target), server=server.address)
    assert (again.code, "CONFIRMATION_NEEDED" in again.err) == (2, True)
    missing = await rara("artifact", "cat", RUN, "nothing", server=server.address)
    assert (missing.code, missing.err) == (
        3,
        f"rara: ARTIFACT_NOT_FOUND: run {RUN} has no artifact 'nothing' (next: rara artifact list {RUN})\n",
    )


async def test_an_artifact_with_other_bytes_ends_as_refused(server: ScriptedServer, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"abc").hexdigest()
    server.artifacts.blobs[digest] = b"abd"
    result = await rara("artifact", "get", RUN, "index", "--to", str(tmp_path / "x"), server=server.address)
    assert result.code == 5
    assert result.err.startswith("rara: ARTIFACT_MISMATCH: ")
    assert not (tmp_path / "x").exists()


async def test_a_flag_wins_over_the_environment_and_the_right_one_over_the_left(
    server: ScriptedServer,
) -> None:
    result = await rara(
        *("-o", "table", "run", "list", "-o", "name"),
        server="127.0.0.1:1",
        env={"RARA_SERVER": server.address},
    )
    assert result.lines == RUNS[::-1]
    result = await rara("run", "list", "--server", server.address, "-o", "name", server="127.0.0.1:1")
    assert result.lines == RUNS[::-1]
    result = await rara("run", "list", server=server.address, env={"RARA_OUTPUT": "name"})
    assert result.lines == RUNS[::-1]
