"""States, instants, durations and sizes as people read them."""

import unicodedata
from datetime import UTC, datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import workflow_pb2

_COLORS: Final = {
    "succeeded": "green",
    "connected": "green",
    "running": "cyan",
    "leased": "cyan",
    "cancelling": "yellow",
    "retryable_failed": "yellow",
    "silent": "yellow",
    "draining": "yellow",
    "cancelled": "magenta",
    "failed": "red",
    "terminal_failed": "red",
    "lost": "red",
}


def run_state(value: int) -> str:
    """`running`; a number that this version does not know is shown as it is."""
    return _word(workflow_pb2.WorkflowRunState, "WORKFLOW_RUN_STATE_", value)


def step_state(value: int) -> str:
    return _word(workflow_pb2.StepRunState, "STEP_RUN_STATE_", value)


def executor_state(value: int) -> str:
    return _word(workflow_pb2.ExecutorState, "EXECUTOR_STATE_", value)


def run_state_number(word: str) -> workflow_pb2.WorkflowRunState.ValueType:
    return workflow_pb2.WorkflowRunState.Value(f"WORKFLOW_RUN_STATE_{word.upper()}")


def step_state_number(word: str) -> workflow_pb2.StepRunState.ValueType:
    return workflow_pb2.StepRunState.Value(f"STEP_RUN_STATE_{word.upper()}")


def executor_state_number(word: str) -> workflow_pb2.ExecutorState.ValueType:
    return workflow_pb2.ExecutorState.Value(f"EXECUTOR_STATE_{word.upper()}")


def _word(
    enum: type[workflow_pb2.WorkflowRunState]
    | type[workflow_pb2.StepRunState]
    | type[workflow_pb2.ExecutorState],
    prefix: str,
    value: int,
) -> str:
    try:
        return enum.Name(value).removeprefix(prefix).lower()  # type: ignore[arg-type]  # any number may arrive
    except ValueError:
        return f"state_{value}"


def color_of(state: str) -> str | None:
    """The colour that goes with a state's word, never instead of it."""
    return _COLORS.get(state)


def instant(value: Timestamp) -> datetime:
    return value.ToDatetime(UTC)


def instant_text(value: Timestamp, style: str, now: datetime) -> str:
    """An instant as `relative`, `iso` or `unix`; empty for one that was never set."""
    if not value.seconds and not value.nanos:
        return ""
    at = instant(value)
    if style == "unix":
        return f"{at.timestamp():.3f}"
    if style == "relative":
        away_s = (at - now).total_seconds()
        return f"in {duration_text(away_s)}" if away_s > 0.5 else f"{duration_text(-away_s)} ago"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def duration_text(seconds: float) -> str:
    """`3s`, `4m12s`, `2h05m`, `3d04h`."""
    whole = max(round(seconds), 0)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    if minutes:
        return f"{minutes}m{second:02}s"
    return f"{second}s"


def took_text(seconds: float) -> str:
    """How long something took: as `duration_text`, with tenths below ten seconds."""
    return f"{max(seconds, 0.0):.1f}s" if seconds < 9.95 else duration_text(seconds)


def size_text(size_bytes: int) -> str:
    """`512 B`, `1.4 MiB`."""
    if size_bytes < 1024:
        return f"{size_bytes} B"
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def number_text(value: float) -> str:
    """`8,000,000`, `0.9331`."""
    return f"{value:,.0f}" if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


def clean(text: str) -> str:
    """Text from elsewhere on one line, without what could drive a terminal."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        " " if char.isspace() else "\ufffd" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char
        for char in text
    )
