"""What keeps a step from running or from ending, the first in the way first."""

import json
from typing import Final

import asyncpg

from rara_scheduler.domain.ids import step_not_found
from rara_scheduler.domain.pause import told
from rara_scheduler.domain.routing import Miss, Route, match, nearness
from rara_scheduler.domain.step import TERMINAL, StepState
from rara_scheduler.domain.views import ExecutorState, ExecutorView, NearMiss, Obstacle
from rara_scheduler.store.database import Connection
from rara_scheduler.store.pauses import pause_of
from rara_scheduler.store.queries import query
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.view_rows import executor_view, offer_of

MAX_SHOWN: Final = 10  # steps waited for, and near misses
MAX_AHEAD: Final = 10_000
MAX_EXECUTORS: Final = 1000  # looked at
QUIET_S: Final = 30.0  # a running step is still from so long on, where it has no progress_timeout


class Explainer:
    """accept_timeout_s, silent_after_s: as the dispatcher goes by them."""

    def __init__(self, reads: Reads, *, accept_timeout_s: float, silent_after_s: float) -> None:
        self._reads = reads
        self._accept_timeout_s = accept_timeout_s
        self._silent_after_s = silent_after_s

    async def obstacles(self, step_run_id: str) -> list[Obstacle]:
        """Empty: nothing is in the way, or the step has ended. Raises STEP_NOT_FOUND."""
        async with self._reads.snapshot() as connection:
            row = await connection.fetchrow(query("explain_step"), step_run_id, self._accept_timeout_s)
            if row is None:
                raise step_not_found(step_run_id)
            state = StepState(row["state"])
            if state in TERMINAL:
                return []
            if state in (StepState.LEASED, StepState.RUNNING):
                return _held(row)
            rows = await connection.fetch(query("explain_pauses"), step_run_id)
            paused = [Obstacle("PAUSED", told(each), pause=each) for each in map(pause_of, rows)]
            if row["released_at"] is None:
                return paused + await _upstream(connection, step_run_id)
            if row["backs_off"]:
                return [
                    *paused,
                    Obstacle(
                        "BACKOFF",
                        f"attempt {row['attempt']} ended with {row['reason']}; the next one waits",
                        until=row["available_at"],
                    ),
                ]
            return paused + await self._unserved(connection, step_run_id, row, is_paused=bool(paused))

    async def _unserved(
        self, connection: Connection, step_run_id: str, row: asyncpg.Record, *, is_paused: bool
    ) -> list[Obstacle]:
        """It could be leased now: who could run it, and why nobody does. Of a paused one, that nobody could."""
        rows = await connection.fetch(query("explain_executors"), self._silent_after_s, MAX_EXECUTORS)
        executors = [executor_view(each) for each in rows]
        route = Route(
            row["route_id"],
            row["executor_kind"],
            row["kind"],
            row["kind_version"],
            json.loads(row["required_labels"]),
        )
        capable, misses = _sorted_out(route, executors)
        if not capable:
            shown = tuple(miss for _, miss in sorted(misses, key=lambda each: each[0])[:MAX_SHOWN])
            message = (
                f"none of {len(executors)} connected executors can run {_asked(route)}"
                if executors
                else f"no executor is connected; the step asks for {_asked(route)}"
            )
            return [Obstacle("NO_CAPABLE_EXECUTOR", message, near_misses=shown)]
        if is_paused:
            return []
        ahead = await connection.fetchval(query("explain_ahead"), step_run_id, MAX_AHEAD)
        if any(executor.free_credit > 0 for executor in capable) and not ahead:
            return []
        what = "1 capable executor has" if len(capable) == 1 else f"{len(capable)} capable executors have"
        return [
            Obstacle(
                "NO_FREE_CREDIT", f"{what} no slot left for it, {ahead} steps are before it", ahead=ahead
            )
        ]


def _asked(route: Route) -> str:
    """What a route asks for, for people."""
    words = [route.kind + (f" version {route.kind_version}" if route.kind_version else "")]
    if route.executor_kind:
        words.append(f"executor kind {route.executor_kind}")
    words.extend(f"label {key}={value}" for key, value in sorted(route.required_labels.items()))
    return ", ".join(words)


def _sorted_out(
    route: Route, executors: list[ExecutorView]
) -> tuple[list[ExecutorView], list[tuple[int, NearMiss]]]:
    """Who could take the step now, and what each other one lacks, with how far it is from it."""
    capable: list[ExecutorView] = []
    misses: list[tuple[int, NearMiss]] = []
    for executor in executors:
        answer = match(route, offer_of(executor))
        if isinstance(answer, Miss):
            far, lacks = 1 + nearness(answer), answer.lacks
        elif executor.state is ExecutorState.CONNECTED:
            capable.append(executor)
            continue
        else:
            far, lacks = 0, str(executor.state)
        misses.append((far, NearMiss(executor.executor_id, executor.executor_name, lacks)))
    return capable, misses


async def _upstream(connection: Connection, step_run_id: str) -> list[Obstacle]:
    rows = await connection.fetch(query("explain_upstream"), step_run_id, MAX_SHOWN + 1)
    ids = tuple(row["step_run_id"] for row in rows[:MAX_SHOWN])
    more = "at least " if len(rows) > MAX_SHOWN else ""
    count = f"{more}{len(ids)} step{'' if len(ids) == 1 else 's'}"
    return [Obstacle("UPSTREAM_PENDING", f"waits for {count} to succeed", step_run_ids=ids)]


def _held(row: asyncpg.Record) -> list[Obstacle]:
    """What keeps a leased or running step from going on or ending."""
    found: list[Obstacle] = []
    executor = row["executor_name"] or row["executor_id"]
    if row["cancel_requested_at"] is not None:
        how_far = "has got the request" if row["cancel_delivered_at"] else "has not confirmed the receipt"
        found.append(
            Obstacle(
                "CANCEL_UNCONFIRMED",
                f"a cancel ({row['cancel_reason']}) is asked for; executor {executor} {how_far}",
                until=row["cancel_until"],
            )
        )
    if row["is_expired"]:
        found.append(
            Obstacle(
                "NO_PROGRESS", f"executor {executor} is not heard of: its lease has run out and is taken back"
            )
        )
    elif not row["is_accepted"]:
        found.append(
            Obstacle(
                "NOT_ACCEPTED",
                f"sent to executor {executor}, which has not accepted it yet",
                until=row["accept_until"],
            )
        )
    elif row["still_s"] is not None and row["still_s"] > _quiet_s(row):
        found.append(
            Obstacle(
                "NO_PROGRESS",
                f"runs on executor {executor} and has not moved for {row['still_s']:.0f} s",
                until=row["progress_until"],
            )
        )
    return found


def _quiet_s(row: asyncpg.Record) -> float:
    """How long a running step may be still before that is worth a word."""
    if row["progress_timeout_s"] is None:
        return QUIET_S
    return min(QUIET_S, float(row["progress_timeout_s"]) / 2)
