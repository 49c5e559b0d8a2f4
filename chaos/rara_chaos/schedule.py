"""Which faults come when: dealt from a shuffled deck, so that none is left out, and the same for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    EXECUTOR_KILLED = "executor_killed"
    EXECUTOR_FROZEN_BRIEFLY = "executor_frozen_briefly"
    EXECUTOR_FROZEN_PAST_LEASE = "executor_frozen_past_lease"
    EXECUTOR_STOPPED = "executor_stopped"
    RUNNER_KILLED = "runner_killed"
    RUNNER_FROZEN = "runner_frozen"
    SCHEDULER_KILLED = "scheduler_killed"
    SCHEDULER_FROZEN = "scheduler_frozen"
    SCHEDULER_STOPPED = "scheduler_stopped"
    POSTGRES_KILLED = "postgres_killed"
    POSTGRES_RESTARTED = "postgres_restarted"
    BACKEND_KILLED = "backend_killed"
    BACKENDS_TERMINATED = "backends_terminated"
    LISTENERS_TERMINATED = "listeners_terminated"
    ROWS_LOCKED = "rows_locked"
    SNAPSHOT_HELD = "snapshot_held"
    STATEMENTS_SLOWED = "statements_slowed"
    STATEMENTS_REFUSED = "statements_refused"
    READ_ONLY = "read_only"
    CONNECTIONS_EXHAUSTED = "connections_exhausted"
    LINK_CUT = "link_cut"
    LINK_RESET = "link_reset"
    LINK_STALLED_TO_SCHEDULER = "link_stalled_to_scheduler"
    LINK_STALLED_TO_EXECUTOR = "link_stalled_to_executor"
    LINK_DELAYED = "link_delayed"
    LINK_SWALLOWED = "link_swallowed"
    CLIENT_LINK_RESET = "client_link_reset"
    DATABASE_LINK_CUT = "database_link_cut"
    DATABASE_LINK_STALLED = "database_link_stalled"
    DATABASE_LINK_SWALLOWED = "database_link_swallowed"
    COLLECTOR_KILLED = "collector_killed"
    COLLECTOR_FROZEN = "collector_frozen"
    ALL_KILLED = "all_killed"
    CLOCK_JUMPED = "clock_jumped"
    DISK_FULL = "disk_full"
    EXECUTOR_CUT_OFF = "executor_cut_off"
    SCHEDULER_CUT_OFF = "scheduler_cut_off"
    POSTGRES_CUT_OFF = "postgres_cut_off"
    POSTGRES_FROZEN = "postgres_frozen"
    POSTGRES_STARVED = "postgres_starved"
    HOOK = "hook"


# Those of the local stack that need nothing but processes; what a seed deals of them stays as it is.
PROCESS_KINDS: Final = tuple(Kind)[: list(Kind).index(Kind.CLOCK_JUMPED)]
# Those that need something of the machine besides.
MACHINE_KINDS: Final = (Kind.CLOCK_JUMPED, Kind.DISK_FULL)

OF_EXECUTORS = frozenset(
    {
        Kind.EXECUTOR_KILLED,
        Kind.EXECUTOR_FROZEN_BRIEFLY,
        Kind.EXECUTOR_FROZEN_PAST_LEASE,
        Kind.EXECUTOR_STOPPED,
        Kind.EXECUTOR_CUT_OFF,
    }
)

# For how long a fault is held: from, to.
_BRIEF = (0.3, 1.2)
_HOLD_S: dict[Kind, tuple[float, float]] = {
    Kind.EXECUTOR_FROZEN_BRIEFLY: (0.3, 1.0),
    Kind.EXECUTOR_FROZEN_PAST_LEASE: (2.5, 4.0),
    Kind.RUNNER_FROZEN: (0.5, 4.0),
    Kind.SCHEDULER_FROZEN: (0.5, 3.0),
    Kind.POSTGRES_KILLED: (0.0, 1.5),
    Kind.POSTGRES_RESTARTED: (0.0, 2.5),
    Kind.ROWS_LOCKED: (0.5, 2.5),
    Kind.SNAPSHOT_HELD: (1.0, 4.0),
    Kind.STATEMENTS_SLOWED: (0.5, 2.0),
    Kind.READ_ONLY: (0.5, 2.0),
    Kind.CONNECTIONS_EXHAUSTED: (0.5, 2.0),
    Kind.LINK_STALLED_TO_SCHEDULER: (0.5, 4.0),
    Kind.LINK_STALLED_TO_EXECUTOR: (0.5, 4.0),
    Kind.LINK_DELAYED: (1.0, 3.0),
    Kind.DATABASE_LINK_STALLED: (0.5, 3.0),
    Kind.COLLECTOR_FROZEN: (0.5, 4.0),
    Kind.ALL_KILLED: (0.0, 1.0),
    Kind.CLOCK_JUMPED: (1.0, 6.0),
    Kind.DISK_FULL: (0.5, 3.0),
    Kind.EXECUTOR_CUT_OFF: (0.5, 5.0),
    Kind.SCHEDULER_CUT_OFF: (0.5, 4.0),
    Kind.POSTGRES_CUT_OFF: (0.5, 3.0),
    Kind.POSTGRES_FROZEN: (0.5, 3.0),
    Kind.POSTGRES_STARVED: (2.0, 6.0),
    Kind.HOOK: (1.0, 5.0),
}
_FIRST_S = 2.0  # the load is under way
_LAST_S = 1.0  # before the end, so that the last ones bite too


@dataclass(frozen=True, slots=True)
class Fault:
    """at_s: from the start of the load. target, hold_s: the seed's choice of whom, and for how long."""

    at_s: float
    kind: Kind
    target: int
    hold_s: float


def schedule(
    seed: int,
    duration_s: float,
    every_s: float,
    kinds: Sequence[Kind] = PROCESS_KINDS,
    also: Sequence[Kind] = (),
    *,
    at_most: int | None = None,
) -> list[Fault]:
    """All faults of a run, in order. Every kind is dealt once before any is dealt again.

    Targets are even and odd in turns, from kind to kind and from deck to deck: where every other executor is of
    another language, both are hit.

    every_s: between two faults, in the mean, where there is time for that.
    also: kinds with a deck of their own, which change nothing in what is dealt of the others.
    at_most: so many faults, the first ones of a shuffled deck, where there is no time for all.
    """
    draw = random.Random(f"schedule {seed}")
    room_s = max(duration_s - _FIRST_S - _LAST_S, 1.0)
    decks = max(1, round(room_s / (every_s * max(len(kinds), 1))))
    faults = _deal(draw, kinds, decks, room_s, at_most)
    if also:
        faults += _deal(random.Random(f"schedule {seed} also"), also, decks, room_s, at_most)
    return sorted(faults, key=lambda fault: fault.at_s)


def _deal(
    draw: random.Random, kinds: Sequence[Kind], decks: int, room_s: float, at_most: int | None
) -> list[Fault]:
    turn = draw.randrange(2)
    cards: list[tuple[Kind, int]] = []
    for number in range(decks):
        deck = [(kind, (turn + number + place) % 2) for place, kind in enumerate(kinds)]
        draw.shuffle(deck)
        cards += deck
    cards = cards[:at_most]
    instants = sorted(_FIRST_S + draw.random() * room_s for _ in cards)
    return [
        Fault(at_s, kind, 2 * draw.randrange(1 << 15) + odd, draw.uniform(*_HOLD_S.get(kind, _BRIEF)))
        for at_s, (kind, odd) in zip(instants, cards, strict=True)
    ]
