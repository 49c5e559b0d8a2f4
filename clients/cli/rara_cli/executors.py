"""Executors on the screen."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rara.v1 import workflow_pb2

from rara_cli import words
from rara_cli.answers import show_list
from rara_cli.runs import pairs
from rara_cli.session import Session
from rara_cli.tables import Column


def show_executors(session: Session, executors: Sequence[workflow_pb2.Executor]) -> None:
    now = datetime.now(UTC)
    columns: list[Column[workflow_pb2.Executor]] = [
        Column("NAME", lambda item: item.executor_name),
        Column("STATE", lambda item: words.executor_state(item.state), is_state=True),
        Column("RUNS", lambda item: str(item.in_flight), is_number=True),
        Column("FREE", lambda item: str(item.free_credit), is_number=True),
        Column("SEEN", lambda item: words.instant_text(item.last_seen_at, session.time_style, now)),
        Column("OFFERS", _offers),
        Column("LABELS", lambda item: pairs(item.labels), wide_only=True),
        Column("SDK", lambda item: item.sdk, wide_only=True),
        Column("ID", lambda item: item.executor_id, is_whole=True, wide_only=True),
    ]
    show_list(
        session,
        executors,
        columns,
        name=lambda item: item.executor_id,
        if_empty=f"no executors; start one: rara-executor --scheduler {session.server} --module YOUR.MODULE",
    )


def _offers(executor: workflow_pb2.Executor) -> str:
    return ", ".join(" ".join([item.kind, *item.versions]) for item in executor.capabilities)
