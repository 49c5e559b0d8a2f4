"""Which runs and steps a call on many of them means."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from rara_scheduler.domain.run import RunState

MAX_REASONS: Final = 20
MAX_SAMPLE: Final = 10
MAX_WALKED: Final = 100_000  # rows that one call looks at

RETRYABLE: Final = (RunState.FAILED, RunState.CANCELLED)
RETRIED: Final = (RunState.FAILED,)  # unless others are asked for: somebody wanted those cancelled
CANCELLABLE: Final = (RunState.PENDING, RunState.RUNNING)


@dataclass(frozen=True, slots=True)
class RunSelection:
    """Empty or None: any. All that is set must hold."""

    definition: str = ""
    version: int = 0
    states: tuple[RunState, ...] = ()
    reasons: tuple[str, ...] = ()
    kind: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    created_from: datetime | None = None
    created_before: datetime | None = None
    ended_from: datetime | None = None
    ended_before: datetime | None = None


@dataclass(frozen=True, slots=True)
class StepSelection:
    """Of steps that wait for their next attempt; as above."""

    definition: str = ""
    version: int = 0
    kind: str = ""
    reasons: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one run or step fared. code: why nothing was done; empty: it was."""

    id: str
    new_run_id: str = ""
    code: str = ""
