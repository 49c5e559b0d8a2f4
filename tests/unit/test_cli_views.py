"""What is shown, as pure functions: tables, words, progress, lines, frames, JSON."""

import io
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, job_pb2, workflow_pb2
from rara_cli import statewords, words
from rara_cli.exits import Exit
from rara_cli.jsonview import to_json
from rara_cli.runlines import RunLines
from rara_cli.runlive import RunLive
from rara_cli.runview import RunView, dependencies, exit_of
from rara_cli.tables import Column, render
from rich.console import Console

NOW = datetime(2026, 3, 4, 14, 4, 12, tzinfo=UTC)
RUN = "0198c2a0-0000-7000-8000-000000000001"


def stamp(at: datetime) -> Timestamp:
    value = Timestamp()
    value.FromDatetime(at)
    return value


def a_step(name: str, state: str, **fields: object) -> workflow_pb2.StepRun:
    return workflow_pb2.StepRun(
        step_run_id=name,
        workflow_run_id=RUN,
        step_name=name,
        state=workflow_pb2.StepRunState.Value(f"STEP_RUN_STATE_{state}"),
        **fields,  # type: ignore[arg-type]  # as the test names them
    )


def a_run(state: str = "RUNNING", **fields: object) -> workflow_pb2.WorkflowRun:
    return workflow_pb2.WorkflowRun(
        workflow_run_id=RUN,
        definition="nightly-refresh",
        definition_version=7,
        state=workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{state}"),
        **fields,  # type: ignore[arg-type]  # as the test names them
    )


def changed(value: workflow_pb2.WorkflowRun | workflow_pb2.StepRun) -> workflow_pb2.WatchRunResponse:
    if isinstance(value, workflow_pb2.WorkflowRun):
        return workflow_pb2.WatchRunResponse(run=value)
    return workflow_pb2.WatchRunResponse(step_run=value)


def a_view(*values: workflow_pb2.WorkflowRun | workflow_pb2.StepRun) -> RunView:
    view = RunView(RUN)
    for value in values:
        view.apply(changed(value), 0.0)
    return view


# Words


@pytest.mark.parametrize(
    ("ours", "enum", "prefix"),
    [
        (statewords.RUN_STATES, workflow_pb2.WorkflowRunState, "WORKFLOW_RUN_STATE_"),
        (statewords.STEP_STATES, workflow_pb2.StepRunState, "STEP_RUN_STATE_"),
        (statewords.EXECUTOR_STATES, workflow_pb2.ExecutorState, "EXECUTOR_STATE_"),
    ],
)
def test_the_words_of_options_are_those_of_the_contract(
    ours: tuple[str, ...], enum: object, prefix: str
) -> None:
    names = enum.keys()  # type: ignore[attr-defined]  # a generated enum
    assert list(ours) == [name.removeprefix(prefix).lower() for name in names if "UNSPECIFIED" not in name]


def test_a_state_of_a_newer_scheduler_is_still_a_word() -> None:
    assert words.run_state(99) == "state_99"
    assert words.step_state(workflow_pb2.STEP_RUN_STATE_RETRYABLE_FAILED) == "retryable_failed"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-5, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (252, "4m12s"),
        (7500, "2h05m"),
        (273_600, "3d04h"),
    ],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert words.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1_500_000, "1.4 MiB"), (5 * 1024**4, "5.0 TiB")],
)
def test_sizes_are_short(size: int, text: str) -> None:
    assert words.size_text(size) == text


def test_instants_are_relative_iso_or_unix_and_empty_when_never_set() -> None:
    past = stamp(NOW - timedelta(minutes=4, seconds=12))
    assert words.instant_text(past, "relative", NOW) == "4m12s ago"
    assert words.instant_text(stamp(NOW + timedelta(seconds=48)), "relative", NOW) == "in 48s"
    assert words.instant_text(past, "iso", NOW) == "2026-03-04T14:00:00.000Z"
    assert words.instant_text(past, "unix", NOW) == "1772632800.000"
    assert words.instant_text(Timestamp(), "iso", NOW) == ""


def test_text_from_elsewhere_cannot_drive_the_terminal() -> None:
    assert words.clean("a\x1b[2Jb\nc\td\u202ee\x00") == "a\ufffd[2Jb c d\ufffde\ufffd"
    assert words.clean("größer 数") == "größer 数"


# Tables


def texts(*columns: Column[tuple[str, ...]], rows: Sequence[tuple[str, ...]], width: int | None) -> list[str]:
    return render(rows, columns, width=width, in_color=False)


def column(
    index: int, title: str, *, is_whole: bool = False, is_number: bool = False
) -> Column[tuple[str, ...]]:
    return Column(title, lambda row: row[index], is_whole=is_whole, is_number=is_number)


def test_a_table_of_full_width_cuts_nothing() -> None:
    lines = texts(column(0, "A"), column(1, "NUMBER", is_number=True), rows=[("x" * 200, "7")], width=None)
    assert lines == ["A" + " " * 199 + "  NUMBER", "x" * 200 + "       7"]


def test_a_narrow_table_cuts_the_widest_column_then_drops_the_last_and_keeps_ids() -> None:
    rows = [(RUN, "a" * 40, "b" * 20)]
    columns = (column(0, "ID", is_whole=True), column(1, "LONG"), column(2, "LESS"))
    for width in (100, 80, 60, 56, 50, 40, 36):
        lines = texts(*columns, rows=rows, width=width)
        assert all(len(line) <= width for line in lines)
        assert lines[1].startswith(RUN)
    assert texts(*columns, rows=rows, width=80)[1] == f"{RUN}  {'a' * 19}…  {'b' * 20}"
    assert texts(*columns, rows=rows, width=20)[1] == RUN


def test_wide_characters_take_two_cells() -> None:
    lines = texts(column(0, "A"), column(1, "B"), rows=[("数数", "x"), ("ab", "y")], width=None)
    assert lines == ["A     B", "数数  x", "ab    y"]


# Progress


def test_the_run_counts_every_step_the_same() -> None:
    view = a_view(
        a_run(step_counts={"succeeded": 1, "running": 1, "pending": 2}),
        a_step("a", "SUCCEEDED"),
        a_step("b", "RUNNING", progress=job_pb2.JobProgress(fraction=0.5)),
    )
    assert view.counts() == (1, 4)
    assert view.fraction() == 0.375


def test_the_time_left_comes_from_the_rate_seen_here_and_starts_anew_with_an_attempt() -> None:
    view = RunView(RUN)
    for now_s, fraction in ((0.0, 0.2), (1.0, 0.25)):
        view.apply(
            changed(a_step("a", "RUNNING", attempt=1, progress=job_pb2.JobProgress(fraction=fraction))), now_s
        )
    assert view.eta_s("a") is None
    view.apply(changed(a_step("a", "RUNNING", attempt=1, progress=job_pb2.JobProgress(fraction=0.4))), 4.0)
    assert view.eta_s("a") == pytest.approx(12.0)
    view.apply(changed(a_step("a", "RUNNING", attempt=2, progress=job_pb2.JobProgress(fraction=0.1))), 60.0)
    assert view.eta_s("a") is None


def test_failed_and_running_steps_come_first_then_the_order_of_the_definition() -> None:
    view = a_view(
        a_step("1", "SUCCEEDED"),
        a_step("2", "PENDING"),
        a_step("3", "PENDING"),
        a_step("4", "RUNNING"),
        a_step("5", "RETRYABLE_FAILED"),
        a_step("6", "TERMINAL_FAILED"),
    )
    steps = [workflow_pb2.StepDefinition(step_name=name) for name in "321456"]
    view.learn(workflow_pb2.Definition(steps=steps))
    assert [step.step_name for step in view.rows()] == ["6", "4", "5", "3", "2", "1"]


def test_a_step_depends_on_what_it_names_binds_and_refers_to() -> None:
    template = {"x": [{"$ref": "/steps/c~1d/output/y"}, {"$ref": "/run/input/z"}], "$ref": "/steps/no/output"}
    step = workflow_pb2.StepDefinition(
        depends_on=["a"],
        input_artifacts=[
            workflow_pb2.ArtifactBinding(name="m", from_step="b"),
            workflow_pb2.ArtifactBinding(name="n"),
        ],
        input_template=common_pb2.Payload(data=json.dumps(template).encode()),
    )
    assert dependencies(step) == ["a", "b", "c/d"]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("PENDING", Exit.STILL_GOING),
        ("RUNNING", Exit.STILL_GOING),
        ("CANCELLING", Exit.STILL_GOING),
        ("SUCCEEDED", Exit.OK),
        ("FAILED", Exit.RUN_FAILED),
        ("CANCELLED", Exit.RUN_CANCELLED),
    ],
)
def test_every_state_of_a_run_has_its_exit_code(state: str, code: Exit) -> None:
    assert exit_of(a_run(state), None) == code


# Lines


def test_lines_come_for_changes_of_state_and_seldom_for_progress() -> None:
    view = RunView(RUN)
    lines = RunLines(view)
    said = []

    def take(value: workflow_pb2.WorkflowRun | workflow_pb2.StepRun, now_s: float) -> None:
        view.apply(changed(value), now_s)
        said.extend(lines.lines(changed(value), now_s, NOW))

    take(a_run(), 0.0)
    take(a_run(), 0.1)
    take(a_step("index", "PENDING"), 0.2)
    for now_s, fraction in ((1.0, 0.1), (1.5, 0.2), (3.5, 0.3)):
        progress = job_pb2.JobProgress(fraction=fraction, message="rows\nand rows")
        take(a_step("index", "RUNNING", attempt=1, progress=progress), now_s)
    error = job_pb2.JobError(code="GPU_OOM", message="no room")
    take(a_step("index", "RETRYABLE_FAILED", attempt=1, reason="GPU_OOM", error=error), 3.6)
    took = {"started_at": stamp(NOW), "ended_at": stamp(NOW + timedelta(seconds=90))}
    take(a_step("index", "SUCCEEDED", attempt=2, **took), 3.7)
    take(a_run("SUCCEEDED"), 3.8)
    at = "2026-03-04T14:04:12Z"
    assert said == [
        f"{at}  run {RUN}  running",
        f"{at}  step index  pending",
        f"{at}  step index  running  attempt 1  10%  rows and rows",
        f"{at}  step index  running  attempt 1  30%  rows and rows",
        f"{at}  step index  retryable_failed  attempt 1  GPU_OOM  no room",
        f"{at}  step index  succeeded  attempt 2  1m30s",
        f"{at}  run {RUN}  succeeded  1/1 steps",
    ]


# The live view


def frame(view: RunView, *, width: int = 120, height: int = 24, encoding: str = "utf-8") -> list[str]:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=out, width=width, height=height, force_terminal=False, highlight=False)
    console.print(RunLive(view, console).frame(NOW))
    out.seek(0)
    return [line.rstrip() for line in out.read().splitlines()]


def a_busy_view() -> RunView:
    view = a_view(
        a_run(started_at=stamp(NOW - timedelta(minutes=5)), step_counts={"succeeded": 1, "running": 3}),
        a_step(
            "ingest",
            "SUCCEEDED",
            attempt=1,
            started_at=stamp(NOW - timedelta(seconds=300)),
            ended_at=stamp(NOW - timedelta(seconds=48)),
            progress=job_pb2.JobProgress(message="8,000,000 rows"),
        ),
        a_step(
            "index",
            "RUNNING",
            attempt=2,
            executor_name="exec-2",
            lease_expires_at=stamp(NOW + timedelta(seconds=26)),
            progress=job_pb2.JobProgress(fraction=0.57, message="41k rows/s"),
        ),
        a_step(
            "evaluate",
            "RETRYABLE_FAILED",
            attempt=1,
            error=job_pb2.JobError(code="GPU_OOM"),
            available_at=stamp(NOW + timedelta(seconds=48)),
        ),
        a_step("adapt", "PENDING"),
    )
    definition = workflow_pb2.Definition(
        steps=[
            workflow_pb2.StepDefinition(step_name="ingest"),
            workflow_pb2.StepDefinition(step_name="index"),
            workflow_pb2.StepDefinition(step_name="evaluate"),
            workflow_pb2.StepDefinition(step_name="adapt", depends_on=["ingest", "index", "evaluate"]),
        ]
    )
    view.learn(definition)
    return view


def test_the_live_view_shows_the_run_then_the_urgent_steps_each_with_its_state_as_a_word() -> None:
    lines = frame(a_busy_view())
    assert lines[0] == f"nightly-refresh v7  run {RUN}  RUNNING  1/4 steps  39%  5m00s"
    assert lines[1].split() == [
        *("▶", "index", "running", "attempt", "2"),
        *("[#########-------]", "57%", "41k", "rows/s", "exec-2", "lease", "26s"),
    ]
    local = (NOW + timedelta(seconds=48)).astimezone().strftime("%H:%M:%S")
    assert lines[2].split("  ")[0] == "↻ evaluate"
    assert lines[2].endswith(f"failed GPU_OOM, retry at {local} (in 48s)")
    assert lines[3].endswith("waiting for: index, evaluate")
    assert lines[4].split()[:3] == ["✓", "ingest", "succeeded"]
    assert lines[4].endswith("4m12s  8,000,000 rows")
    assert lines[5] == f"detach with Ctrl-C · details: rara why {RUN}/index"


def test_the_live_view_takes_at_most_a_screen_and_says_what_is_hidden() -> None:
    view = a_view(a_run(), *(a_step(f"s{number:03}", "PENDING") for number in range(100)))
    lines = frame(view, height=10)
    assert len(lines) == 8
    assert lines[-1].startswith("94 more · detach with Ctrl-C")


def test_the_live_view_is_never_wider_than_the_screen_nor_wraps() -> None:
    lines = frame(a_busy_view(), width=40)
    assert len(lines) == 6
    assert all(len(line) <= 40 for line in lines)


def test_the_live_view_is_ascii_where_the_terminal_is() -> None:
    lines = frame(a_busy_view(), encoding="ascii")
    assert "\n".join(lines).isascii()
    assert lines[1].startswith("> index")


# JSON


def test_a_message_becomes_json_that_scripts_can_read() -> None:
    step = a_step(
        "index",
        "RUNNING",
        last_sequence=2**53 + 1,
        started_at=stamp(NOW),
        output=common_pb2.Payload(data=b'{"n": 9007199254740993}'),
        progress=job_pb2.JobProgress(metrics={"b": 2.0, "a": 1.5}),
    )
    view = to_json(step)
    assert view["state"] == "running"
    assert view["last_sequence"] == 2**53 + 1
    assert view["started_at"] == "2026-03-04T14:04:12Z"
    assert view["output"] == {"n": 9007199254740993}
    assert view["progress"] == {"message": "", "metrics": {"a": 1.5, "b": 2.0}, "checkpoint_artifacts": []}
    assert view["reason"] == ""
    assert "ended_at" not in view
    assert json.loads(json.dumps(view)) == view


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (common_pb2.Payload(data=b"null"), None),
        (common_pb2.Payload(), None),
        (common_pb2.Payload(omitted_bytes=9), {"omitted_bytes": 9}),
        (
            common_pb2.Payload(media_type="image/png", data=b"\x89P"),
            {"media_type": "image/png", "base64": "iVA="},
        ),
    ],
)
def test_a_payload_is_shown_as_its_value_or_as_what_it_is(payload: common_pb2.Payload, value: object) -> None:
    assert to_json(a_run(input=payload))["input"] == value


def test_numbers_that_json_cannot_say_are_text_and_bytes_are_base64() -> None:
    progress = job_pb2.JobProgress(fraction=float("nan"), metrics={"x": float("inf")})
    view = to_json(progress)
    assert (view["fraction"], view["metrics"]) == ("nan", {"x": "inf"})
    assert to_json(common_pb2.Artifact(inline=b"abc"))["inline"] == "YWJj"


def test_a_duration_is_text_and_an_unknown_enum_its_number() -> None:
    definition = workflow_pb2.Definition(definition="x", on_failure=9)  # type: ignore[arg-type]  # of a newer scheduler
    definition.run_timeout.FromSeconds(90)
    view = to_json(definition)
    assert (view["run_timeout"], view["on_failure"]) == ("90s", 9)
