"""What telemetry asks of the database."""

from collections.abc import Sequence
from typing import Final

import asyncpg

from rara_scheduler.store.database import Database
from rara_scheduler.store.queries import query
from rara_scheduler.telemetry.port import AttemptFacts, EndedAttempt, Queues

MOST_COUNTED: Final = 10_000


class TelemetryStore:
    """Takes connections of API calls: the engine's are not for onlookers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def queues(self) -> Queues:
        async with self._database.connection() as connection:
            rows = await connection.fetch(query("queues_by_kind"), MOST_COUNTED)
            oldest_s = await connection.fetchval(query("oldest_transaction"))
            paused = await connection.fetchrow(query("held_back"), MOST_COUNTED)
        assert paused is not None  # noqa: S101 - a select without from
        return Queues(
            ready={row["kind"]: row["ready"] for row in rows if row["ready"]},
            oldest_ready_s={row["kind"]: row["oldest_s"] for row in rows if row["oldest_s"] is not None},
            waiting={row["kind"]: row["waiting"] for row in rows if row["waiting"]},
            oldest_transaction_s=oldest_s,
            held=paused["held"],
            pauses={"kind": paused["kinds"], "definition": paused["definitions"]},
        )

    async def traced(self, ended: Sequence[EndedAttempt]) -> list[tuple[EndedAttempt, AttemptFacts]]:
        """What is known of those attempts whose runs are traced and sampled."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                query("ended_attempts"),
                [one.step_run_id for one in ended],
                [one.lease_token for one in ended],
                [one.granted_on for one in ended],
                [one.attempt for one in ended],
            )
        return [(ended[row["n"] - 1], _facts(row)) for row in rows]


def _facts(row: asyncpg.Record) -> AttemptFacts:
    return AttemptFacts(
        traceparent=row["traceparent"],
        tracestate=row["tracestate"],
        workflow_run_id=row["workflow_run_id"],
        definition=row["definition"],
        step_name=row["step_name"],
        kind=row["kind"],
        executor_id=row["executor_id"],
        granted_at=row["granted_at"],
        accepted_at=row["accepted_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
    )
