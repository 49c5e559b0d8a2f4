"""Runs on the screen."""

from collections.abc import Sequence
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import workflow_pb2
from rara_client import Client
from rara_client.cursors import STEP_ENDED

from rara_cli import words
from rara_cli.answers import facts, show_list, show_one, width
from rara_cli.exits import Exit
from rara_cli.follow import follow_run
from rara_cli.jsonview import dumps, to_json
from rara_cli.session import Session
from rara_cli.steps import step_columns
from rara_cli.tables import Column, render


def show_runs(session: Session, runs: Sequence[workflow_pb2.WorkflowRun]) -> None:
    now = datetime.now(UTC)
    columns: list[Column[workflow_pb2.WorkflowRun]] = [
        Column("RUN", lambda run: run.workflow_run_id, is_whole=True),
        Column("DEFINITION", lambda run: f"{run.definition} v{run.definition_version}"),
        Column("STATE", lambda run: words.run_state(run.state), is_state=True),
        Column("STEPS", _steps_done),
        Column("CREATED", lambda run: words.instant_text(run.created_at, session.time_style, now)),
        Column("TOOK", lambda run: span(run.started_at, run.ended_at, now)),
        Column("ERROR", lambda run: run.error.code),
        Column("LABELS", lambda run: pairs(run.labels), wide_only=True),
        Column("RETRY OF", lambda run: run.retry_of_workflow_run_id, wide_only=True),
    ]
    show_list(
        session,
        runs,
        columns,
        name=lambda run: run.workflow_run_id,
        if_empty="no runs; start one: rara run start NAME (what there is: rara definition list)",
    )


def show_run(session: Session, response: workflow_pb2.GetRunResponse) -> None:
    run = response.run
    document = {"run": to_json(run), "steps": [to_json(step) for step in response.steps]}
    show_one(session, document, name=run.workflow_run_id, lines=lambda: _run_lines(session, response))


async def after_start(
    session: Session, client: Client, run: workflow_pb2.WorkflowRun, verb: str, *, watch: bool, wait: bool
) -> int:
    """Say that a run was started, and follow it if that was asked for; the exit code."""
    run_id = run.workflow_run_id
    is_followed = watch or wait
    match session.output:
        case "json" | "jsonl" | "name" if is_followed:
            pass  # the one document, or the last line, comes at the end
        case "json" | "jsonl":
            print(dumps(to_json(run)))
        case "name":
            print(run_id)
        case _:
            print(
                f"run {run_id} {verb} ({words.clean(run.definition)} v{run.definition_version})", flush=True
            )
            if not is_followed:
                session.note(f"follow it: rara watch {run_id}")
    if is_followed:
        return await follow_run(session, client, run_id, is_silent=not watch)
    return Exit.OK


def span(started_at: Timestamp, ended_at: Timestamp, now: datetime) -> str:
    """How long something took, or takes by now."""
    if not started_at.seconds:
        return ""
    end = words.instant(ended_at) if ended_at.seconds else now
    return words.took_text((end - words.instant(started_at)).total_seconds())


def pairs(labels: "object") -> str:
    """`a=1, b=2`."""
    return ", ".join(f"{key}={value}" for key, value in sorted(dict(labels).items()))  # type: ignore[call-overload]


def _steps_done(run: workflow_pb2.WorkflowRun) -> str:
    ended = {words.step_state(state) for state in STEP_ENDED}
    done = sum(count for state, count in run.step_counts.items() if state in ended)
    return f"{done}/{sum(run.step_counts.values())}"


def _run_lines(session: Session, response: workflow_pb2.GetRunResponse) -> list[str]:
    run, now = response.run, datetime.now(UTC)

    def at(value: Timestamp) -> str:
        return words.instant_text(value, session.time_style, now)

    error = f"{run.error.code}: {words.clean(run.error.message)[:300]}" if run.HasField("error") else ""
    lines = facts(
        [
            ("run", run.workflow_run_id),
            ("definition", f"{words.clean(run.definition)} v{run.definition_version}"),
            ("state", words.run_state(run.state)),
            ("created", at(run.created_at)),
            ("started", at(run.started_at)),
            ("ended", at(run.ended_at)),
            ("took", span(run.started_at, run.ended_at, now)),
            ("deadline", at(run.deadline)),
            ("cancel asked", at(run.cancel_requested_at)),
            ("error", error),
            ("labels", words.clean(pairs(run.labels))),
            ("retry of", run.retry_of_workflow_run_id),
            ("input", ", ".join(words.clean(item.name) for item in run.input_artifacts)),
        ]
    )
    if response.steps:
        columns = [
            column
            for column in step_columns(session, now)
            if session.output == "wide" or not column.wide_only
        ]
        lines.append("")
        lines.extend(render(response.steps, columns, width=width(session), in_color=session.in_color))
    return lines
