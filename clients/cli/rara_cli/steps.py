"""Steps on the screen."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import job_pb2, workflow_pb2
from rara_client.cursors import STEP_ENDED

from rara_cli import words
from rara_cli.answers import facts, show_list, show_one, width
from rara_cli.jsonview import dumps, to_json
from rara_cli.runlines import step_details
from rara_cli.session import Session
from rara_cli.tables import Column, render


def step_columns(session: Session, now: datetime) -> list[Column[workflow_pb2.StepRun]]:
    return [
        Column("STEP", lambda step: step.step_name),
        Column("STATE", lambda step: words.step_state(step.state), is_state=True),
        Column("ATTEMPT", lambda step: str(step.attempt), is_number=True),
        Column("KIND", lambda step: " ".join(filter(None, (step.kind, step.kind_version)))),
        Column("DETAILS", _details),
        Column("STARTED", lambda step: words.instant_text(step.started_at, session.time_style, now)),
        Column(
            "ENDED", lambda step: words.instant_text(step.ended_at, session.time_style, now), wide_only=True
        ),
        Column("FAILURES", lambda step: f"{step.failures}/{step.max_attempts}", wide_only=True),
        Column("EXECUTOR", lambda step: step.executor_name, wide_only=True),
        Column("RAN", lambda step: handler_text(step.handler), wide_only=True),
        Column("ID", lambda step: step.step_run_id, is_whole=True, wide_only=True),
    ]


def show_steps(session: Session, steps: Sequence[workflow_pb2.StepRun]) -> None:
    show_list(
        session,
        steps,
        step_columns(session, datetime.now(UTC)),
        name=lambda step: step.step_run_id,
        if_empty="no steps; what runs there are: rara run list",
    )


def show_step(session: Session, response: workflow_pb2.GetStepRunResponse) -> None:
    step = response.step_run
    document = {"step_run": to_json(step), "attempts": [to_json(item) for item in response.attempts]}
    show_one(session, document, name=step.step_run_id, lines=lambda: _step_lines(session, response))


def show_event(session: Session, event: job_pb2.ProgressEvent) -> None:
    """One stored event, as it comes."""
    if session.output in ("json", "jsonl"):
        print(dumps({"type": "event", **to_json(event)}), flush=True)
        return
    kind = event.WhichOneof("event") or "unknown"
    at = words.instant_text(
        event.event_time, "iso" if session.time_style == "relative" else session.time_style, _EPOCH
    )
    text = f"{at}  {event.lease.attempt}.{event.sequence}  {kind:<9}"
    print(f"{text}  {_event_text(event)}".rstrip(), flush=True)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def handler_text(handler: workflow_pb2.Handler, *, with_sdk: bool = False) -> str:
    """`1.2.0 in python`: which code ran; empty where nothing did."""
    version = handler.kind_version or ("?" if handler.executor_kind else "")
    parts = (version, f"in {handler.executor_kind}" if handler.executor_kind else "")
    sdk = f" ({handler.sdk})" if with_sdk and handler.sdk else ""
    return words.clean(" ".join(filter(None, parts)) + sdk)


def explanation(
    response: workflow_pb2.ExplainStepResponse, names: Mapping[str, str], now: datetime
) -> list[str]:
    """The obstacles in words. names: of the steps that are waited for, by id."""
    step = response.step_run
    state = words.step_state(step.state)
    details = "".join(f", {text}" for text in step_details(step))
    lines = [f"step {words.clean(step.step_name)} of run {step.workflow_run_id}: {state}{details}"]
    if not response.obstacles:
        has_ended = step.state in STEP_ENDED
        lines.append("It has ended, so nothing can be in its way." if has_ended else "Nothing is in its way.")
    for number, obstacle in enumerate(response.obstacles, 1):
        lines.append(f"{number}. {obstacle.code}: {_obstacle_text(obstacle, names, now)}")
        for miss in obstacle.near_misses:
            executor = words.clean(miss.executor_name) or miss.executor_id
            lines.append(f"   - executor {executor} lacks: {words.clean(miss.lacks)}")
    return lines


_MEANINGS = {
    "PAUSED": "its kind or its definition is paused",
    "UPSTREAM_PENDING": "it waits for steps before it",
    "BACKOFF": "it failed, and waits before the next attempt",
    "NO_CAPABLE_EXECUTOR": "no connected executor offers what it needs",
    "NO_FREE_CREDIT": "all executors that could run it are busy",
    "NOT_ACCEPTED": "it was handed out, and the executor has not taken it yet",
    "NO_PROGRESS": "it runs, and has not moved for long",
    "CANCEL_UNCONFIRMED": "its cancel was asked for, and the executor has not confirmed it",
}


def _obstacle_text(obstacle: workflow_pb2.Obstacle, names: Mapping[str, str], now: datetime) -> str:
    parts = [words.clean(obstacle.message) or _MEANINGS.get(obstacle.code, "")]
    if obstacle.step_run_ids:
        parts.append(
            "steps: " + ", ".join(words.clean(names.get(item, item)) for item in obstacle.step_run_ids)
        )
    if obstacle.ahead:
        more = " or more" if obstacle.ahead >= 10_000 else ""
        parts.append(f"{obstacle.ahead:,}{more} ahead of it")
    if obstacle.until.seconds:
        away_s = max((words.instant(obstacle.until) - now).total_seconds(), 0.0)
        parts.append(f"until {obstacle.until.ToJsonString()} (in {words.duration_text(away_s)})")
    return "; ".join(part for part in parts if part)


def _details(step: workflow_pb2.StepRun) -> str:
    details = step_details(step)
    return "  ".join(details[1:] if step.attempt else details)


def _step_lines(session: Session, response: workflow_pb2.GetStepRunResponse) -> list[str]:
    step, now = response.step_run, datetime.now(UTC)

    def at(value: Timestamp) -> str:
        return words.instant_text(value, session.time_style, now)

    error = f"{step.error.code}: {words.clean(step.error.message)[:300]}" if step.HasField("error") else ""
    metrics = ", ".join(
        f"{key} {words.number_text(value)}" for key, value in sorted(step.progress.metrics.items())
    )
    fraction = f"{step.progress.fraction:.0%}  " if step.progress.HasField("fraction") else ""
    lines = facts(
        [
            ("step", words.clean(step.step_name)),
            ("id", step.step_run_id),
            ("run", step.workflow_run_id),
            ("state", words.step_state(step.state)),
            ("reason", step.reason),
            ("kind", " ".join(filter(None, (step.kind, step.kind_version)))),
            ("attempt", f"{step.attempt}, {step.failures} of {step.max_attempts} failures spent"),
            ("executor", " ".join(filter(None, (words.clean(step.executor_name), step.executor_id)))),
            ("ran", handler_text(step.handler, with_sdk=True)),
            ("progress", f"{fraction}{words.clean(step.progress.message)}".strip()),
            ("metrics", words.clean(metrics)),
            (
                "next attempt",
                at(step.available_at) if words.step_state(step.state) == "retryable_failed" else "",
            ),
            ("started", at(step.started_at)),
            ("ended", at(step.ended_at)),
            ("deadline", at(step.deadline)),
            ("error", error),
            ("output", _payload_text(step.output.data)),
            ("artifacts", ", ".join(words.clean(item.name) for item in step.manifest.artifacts)),
        ]
    )
    if response.attempts:
        columns: list[Column[workflow_pb2.StepAttempt]] = [
            Column("ATTEMPT", lambda item: str(item.lease.attempt), is_number=True),
            Column("LEASE TOKEN", lambda item: str(item.lease.lease_token), is_number=True),
            Column("EXECUTOR", lambda item: item.executor_name or item.executor_id),
            Column("RAN", lambda item: handler_text(item.handler)),
            Column("ENDED AS", lambda item: item.reason or ("success" if item.ended_at.seconds else "open")),
            Column("SPENT", lambda item: "yes" if item.spent else "no"),
            Column("EVENTS", lambda item: str(item.last_sequence), is_number=True),
            Column("LEASED", lambda item: at(item.leased_at)),
            Column("ENDED", lambda item: at(item.ended_at)),
            Column("ERROR", lambda item: item.error.code),
        ]
        lines.append("")
        lines.extend(render(response.attempts, columns, width=width(session), in_color=session.in_color))
    return lines


def _payload_text(data: bytes) -> str:
    """A value on one line, cut where it is long."""
    if not data:
        return ""
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False)
    except ValueError:
        return f"{len(data)} bytes that are no JSON"
    text = words.clean(text)
    return text if len(text) <= 300 else f"{text[:300]}… (all of it: -o json)"


def _event_text(event: job_pb2.ProgressEvent) -> str:
    match event.WhichOneof("event"):
        case "accepted":
            return f"by {words.clean(event.accepted.executor_name)}"
        case "progress":
            fraction = f"{event.progress.fraction:.0%} " if event.progress.HasField("fraction") else ""
            metrics = ", ".join(
                f"{key} {words.number_text(value)}" for key, value in sorted(event.progress.metrics.items())
            )
            return "  ".join(
                filter(None, (f"{fraction}{words.clean(event.progress.message)}".strip(), metrics))
            )
        case "succeeded":
            return f"{len(event.succeeded.manifest.artifacts)} artifacts"
        case "failed":
            return f"{event.failed.code}: {words.clean(event.failed.message)[:300]}"
        case "cancelled":
            return event.cancelled.reason
        case "effect":
            return words.clean(event.effect.name)
        case _:
            return ""
