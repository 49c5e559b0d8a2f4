"""Acting by filter: look, show, ask, and then do it set by set."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import click
from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import workflow_pb2

from rara_cli import words
from rara_cli.answers import print_document
from rara_cli.ask import confirm
from rara_cli.exits import Exit
from rara_cli.inputs import read_labels
from rara_cli.jsonview import dumps, to_json
from rara_cli.session import Session

_CALL_S = 30.0  # a set may take some ten seconds

Preview = workflow_pb2.RetryRunsResponse | workflow_pb2.CancelRunsResponse | workflow_pb2.RequeueStepsResponse


@dataclass(frozen=True, slots=True)
class Filter:
    """As given on the command line; times are seconds before now."""

    definition: str
    version: int | None
    states: tuple[str, ...]
    codes: tuple[str, ...]
    kind: str
    labels: tuple[str, ...]
    since: float | None
    before: float | None
    created_since: float | None
    created_before: float | None
    every: bool
    as_of: datetime | None

    @property
    def is_given(self) -> bool:
        return self.every or any(
            value not in (None, "", ())
            for name in self.__slots__
            if name not in ("every", "as_of") and (value := getattr(self, name)) is not None
        )

    @property
    def until(self) -> Timestamp | None:
        """The instant to act as of; None: that of the preview."""
        return None if self.as_of is None else _timestamp(self.as_of)

    def runs(self) -> workflow_pb2.RunFilter:
        now = datetime.now(UTC)
        return workflow_pb2.RunFilter(
            definition=self.definition,
            definition_version=self.version or 0,
            states=[words.run_state_number(state) for state in self.states],
            reasons=self.codes,
            kind=self.kind,
            labels=read_labels(self.labels),
            ended_from=_ago(now, self.since),
            ended_before=_ago(now, self.before),
            created_from=_ago(now, self.created_since),
            created_before=_ago(now, self.created_before),
        )

    def steps(self) -> workflow_pb2.WaitingStepFilter:
        return workflow_pb2.WaitingStepFilter(
            definition=self.definition,
            definition_version=self.version or 0,
            kind=self.kind,
            reasons=self.codes,
            labels=read_labels(self.labels),
        )


def check_filter(wanted: Filter, runs: Sequence[str], *, latest: bool, preview_only: bool) -> None:
    """Raises UsageError for a run that is named beside a filter, and for what belongs to a filter without one."""
    if wanted.is_given and (runs or latest):
        raise click.UsageError("name a run, or give a filter, not both")
    if not wanted.is_given and (preview_only or wanted.as_of is not None):
        raise click.UsageError(
            f"{'--preview' if preview_only else '--as-of'} is for a filter: give one, or --all"
        )
    if not (wanted.is_given or runs or latest):
        raise click.UsageError("name a RUN, or --latest, or give a filter, or --all")


async def retry_by_filter(session: Session, wanted: Filter, *, preview_only: bool) -> int:
    runs, timeout_s = wanted.runs(), session.timeout_s or _CALL_S
    async with session.connect() as client:
        seen = await client.preview_retries(runs, wanted.until, timeout_s=timeout_s)

        def do(at: Timestamp) -> AsyncIterator[workflow_pb2.BulkOutcome]:
            return client.retry_runs(runs, at, timeout_s=timeout_s)

        return await _act(session, wanted, seen, "retry", "run", do, preview_only=preview_only)


async def cancel_by_filter(
    session: Session, wanted: Filter, *, message: str, grace: float | None, preview_only: bool
) -> int:
    runs, timeout_s = wanted.runs(), session.timeout_s or _CALL_S
    async with session.connect() as client:
        seen = await client.preview_cancels(runs, wanted.until, timeout_s=timeout_s)

        def do(at: Timestamp) -> AsyncIterator[workflow_pb2.BulkOutcome]:
            spare = None if grace is None else timedelta(seconds=grace)
            return client.cancel_runs(runs, at, message, grace=spare, timeout_s=timeout_s)

        return await _act(session, wanted, seen, "cancel", "run", do, preview_only=preview_only)


async def requeue_by_filter(session: Session, wanted: Filter, *, preview_only: bool) -> int:
    steps, timeout_s = wanted.steps(), session.timeout_s or _CALL_S
    async with session.connect() as client:
        seen = await client.preview_requeues(steps, wanted.until, timeout_s=timeout_s)

        def do(at: Timestamp) -> AsyncIterator[workflow_pb2.BulkOutcome]:
            return client.requeue_steps(steps, at, timeout_s=timeout_s)

        return await _act(session, wanted, seen, "requeue", "step", do, preview_only=preview_only)


async def _act(
    session: Session,
    wanted: Filter,
    seen: Preview,
    verb: str,
    thing: str,
    do: Callable[[Timestamp], AsyncIterator[workflow_pb2.BulkOutcome]],
    *,
    preview_only: bool,
) -> int:
    count = f"{seen.count:,}{' or more' if seen.more else ''} {thing}{'' if seen.count == 1 else 's'}"
    by_state, left_out = _states(wanted, seen)
    lines = [*_sample(session, seen), *left_out]
    if preview_only:
        _show_preview(
            session, seen, [f"{count} to {verb}{by_state}, as of {seen.as_of.ToJsonString()}", *lines]
        )
        return Exit.OK
    if seen.count or seen.more:
        for line in lines:
            session.note(line)
        confirm(session, f"{verb} {count}{by_state}")
    done: list[workflow_pb2.BulkOutcome] = []
    if seen.count or seen.more:
        async for outcome in do(seen.as_of):
            done.append(outcome)
            if session.output == "jsonl":
                print(dumps(to_json(outcome)), flush=True)
    refused = [outcome for outcome in done if outcome.code]
    _show_done(session, done, refused, seen.as_of, verb, thing)
    return Exit.REFUSED if refused else Exit.OK


def _states(wanted: Filter, seen: Preview) -> tuple[str, list[str]]:
    """How many runs a retry means in each state, and lines on those that it leaves out unless they are asked for."""
    if not isinstance(seen, workflow_pb2.RetryRunsResponse):
        return "", []
    counts = {words.run_state(each.state): each.count for each in seen.state_counts}
    meant = wanted.states or ("failed",)
    inside = ", ".join(f"{n:,} {state}" for state, n in counts.items() if state in meant)
    outside = [
        f"  left out: {n:,} {state}; with --state {state}"
        for state, n in counts.items()
        if state not in meant
    ]
    return f" ({inside})" if inside else "", outside


def _show_preview(session: Session, seen: Preview, lines: Sequence[str]) -> None:
    match session.output:
        case "json":
            print_document(to_json(seen))
        case "jsonl":
            print(dumps(to_json(seen)))
        case "name":
            for item in seen.sample:
                print(_id(item))
        case _:
            for line in lines:
                print(line)


def _show_done(
    session: Session,
    done: Sequence[workflow_pb2.BulkOutcome],
    refused: Sequence[workflow_pb2.BulkOutcome],
    as_of: Timestamp,
    verb: str,
    thing: str,
) -> None:
    match session.output:
        case "json":
            print_document({"as_of": as_of.ToJsonString(), "outcomes": [to_json(one) for one in done]})
        case "jsonl":
            pass  # each was said as it came
        case "name":
            for one in done:
                if not one.code:
                    print(one.new_workflow_run_id or one.id)
        case _:
            count = len(done) - len(refused)
            print(f"{_PAST[verb]} {count:,} {thing}{'' if count == 1 else 's'}")
            for one in refused:
                print(f"  not {one.id}: {one.code}")


_PAST = {"retry": "retried", "cancel": "cancelled", "requeue": "requeued"}


def _sample(session: Session, seen: Preview) -> list[str]:
    now = datetime.now(UTC)
    lines = []
    for item in seen.sample:
        if isinstance(item, workflow_pb2.StepRun):
            at = words.instant_text(item.available_at, session.time_style, now)
            facts: tuple[str, ...] = (item.step_name, item.kind, item.reason, f"due {at}")
        else:
            at = words.instant_text(
                item.ended_at if item.HasField("ended_at") else item.created_at, session.time_style, now
            )
            facts = (f"{item.definition} v{item.definition_version}", item.error.code, at)
        lines.append("  ".join(("", _id(item), *(words.clean(fact) for fact in facts if fact))))
    if seen.count > len(seen.sample):
        lines.append(f"  and {seen.count - len(seen.sample):,} more")
    return lines


def _id(item: Any) -> str:
    return str(item.step_run_id if isinstance(item, workflow_pb2.StepRun) else item.workflow_run_id)


def _ago(now: datetime, seconds: float | None) -> Timestamp | None:
    if seconds is None:
        return None
    return _timestamp(now - timedelta(seconds=seconds))


def _timestamp(moment: datetime) -> Timestamp:
    made = Timestamp()
    made.FromDatetime(moment)
    return made
