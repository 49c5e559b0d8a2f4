"""Pausing and resuming, and pauses on the screen."""

from collections.abc import Sequence
from datetime import UTC, datetime

from rara.v1 import workflow_pb2

from rara_cli import words
from rara_cli.answers import show_list
from rara_cli.jsonview import dumps, to_json
from rara_cli.session import Session
from rara_cli.tables import Column

_MOST_COUNTED = 100_000


async def pause_one(
    session: Session, *, kind: str = "", definition: str = "", reason: str, even_if_unknown: bool
) -> None:
    async with session.connect() as client:
        response = await client.pause(
            kind=kind,
            definition=definition,
            reason=reason,
            allow_unknown=even_if_unknown,
            timeout_s=session.timeout_s,
        )
    what = _target(response.pause)
    if session.output in ("json", "jsonl"):
        print(dumps(to_json(response.pause)))
    elif session.output == "name":
        print(_name(response.pause))
    elif response.already_paused:
        print(f"{what} was paused before{_told(session, response.pause)}")
    else:
        print(f"{what} is paused")
        session.note(
            f"what runs goes on; undo it: rara {_target(response.pause).replace(' ', ' resume ', 1)}"
        )


async def resume_one(session: Session, *, kind: str = "", definition: str = "") -> None:
    async with session.connect() as client:
        response = await client.resume(kind=kind, definition=definition, timeout_s=session.timeout_s)
    was_paused = response.HasField("pause")
    what = f"kind {kind}" if kind else f"definition {definition}"
    if session.output in ("json", "jsonl"):
        print(dumps({"was_paused": was_paused} | ({"pause": to_json(response.pause)} if was_paused else {})))
    elif session.output == "name":
        print(kind or definition)
    else:
        print(
            f"{what} is resumed{_told(session, response.pause)}" if was_paused else f"{what} was not paused"
        )


def show_pauses(session: Session, pauses: Sequence[workflow_pb2.Pause]) -> None:
    now = datetime.now(UTC)
    columns: list[Column[workflow_pb2.Pause]] = [
        Column("PAUSED", _target, is_whole=True),
        Column("SINCE", lambda item: words.instant_text(item.paused_at, session.time_style, now)),
        Column("BY", lambda item: item.paused_by),
        Column("HELD", _held, is_number=True),
        Column("IN FLIGHT", lambda item: str(item.steps_in_flight), is_number=True),
        Column("REASON", lambda item: item.reason),
    ]
    show_list(session, pauses, columns, name=_name, if_empty="nothing is paused")


def _target(pause: workflow_pb2.Pause) -> str:
    return f"{pause.WhichOneof('target')} {_name(pause)}"


def _name(pause: workflow_pb2.Pause) -> str:
    return pause.kind or pause.definition


def _held(pause: workflow_pb2.Pause) -> str:
    return f"{pause.steps_held}{'+' if pause.steps_held >= _MOST_COUNTED else ''}"


def _told(session: Session, pause: workflow_pb2.Pause) -> str:
    """When, by whom and why it was paused."""
    at = words.instant_text(pause.paused_at, session.time_style, datetime.now(UTC))
    by = f" by {words.clean(pause.paused_by)}" if pause.paused_by else ""
    why = f": {words.clean(pause.reason)}" if pause.reason else ""
    return f"; paused {at}{by}{why}"
