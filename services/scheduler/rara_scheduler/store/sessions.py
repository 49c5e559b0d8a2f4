"""Executors as the database knows them: their newest session, and what is leased to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import asyncpg
import orjson

from rara_scheduler.domain.attempt import MAX_MISSING
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.ids import is_uuid
from rara_scheduler.domain.routing import Offer
from rara_scheduler.domain.tokens import Token
from rara_scheduler.store.database import Connection, Database, Lane
from rara_scheduler.store.queries import query
from rara_scheduler.store.run_ledger import CancelOrder, cancel_order


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """An executor takes no new job, and ends. within_s: how long its jobs may still take; None: as they need. by: the
    instant at which that is over, in seconds since the epoch by the database's clock."""

    by: float | None = None
    within_s: float | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """What an executor's row says. is_newest: no newer session has replaced this one."""

    is_newest: bool
    drain: DrainOrder | None


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A current lease of one executor. missing: numbers up to last_sequence that never came."""

    step_run_id: str
    workflow_run_id: str
    lease_token: int
    attempt: int
    kind: str
    accepted: bool
    last_sequence: int
    missing: tuple[int, ...]
    cancel_reason: str | None
    cancel_grace_s: float | None


class AnothersExecutor(Fault):
    def __init__(self) -> None:
        super().__init__(
            Code.NOT_ALLOWED,
            "hello.executor_id: it is the executor of somebody else",
            metadata={"field": "hello.executor_id"},
        )


class SessionStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(
        self,
        *,
        executor_id: str,
        executor_name: str,
        sdk: str,
        offer: Offer,
        schemas: Mapping[str, str],
        session_id: str,
        scheduler_id: str,
        bearer: Token | None = None,
        direct: bool = False,
        silence_s: float = 15.0,
    ) -> DrainOrder | None:
        """Make this the executor's newest session. Returns what an operator has asked of it.

        schemas: input_schema_sha256 by kind. bearer: the token that it comes with. direct: it was dialled.
        silence_s: from when on an executor counts as gone. Raises AnothersExecutor for an executor_id of somebody
        else: whoever has the id has its leases.
        """
        capabilities = [
            {
                "kind": c.kind,
                "versions": list(c.versions),
                "max_concurrency": c.max_concurrency,
                "input_schema_sha256": schemas.get(c.kind, ""),
            }
            for c in offer.capabilities
        ]
        async with self._database.connection(Lane.ENGINE) as connection:
            row = await connection.fetchrow(
                query("open_session"),
                executor_id,
                executor_name,
                offer.executor_kind,
                sdk,
                orjson.dumps(capabilities).decode(),
                orjson.dumps(dict(offer.labels)).decode(),
                session_id,
                scheduler_id,
                None if bearer is None else bearer.name,
                direct,
                [] if bearer is None else list(bearer.kinds),
                silence_s,
            )
        if row is None:
            raise AnothersExecutor
        return _drain_order(row)

    async def close(self, executor_id: str, session_id: str, *, for_good: bool) -> None:
        """The session ended. for_good: the executor said goodbye, and is not on its way back."""
        async with self._database.connection(Lane.ENGINE) as connection:
            await connection.execute(query("close_session"), executor_id, session_id, for_good)

    async def lives_elsewhere(self, executor_id: str, scheduler_id: str, *, within_s: float) -> bool:
        """Whether another scheduler has heard of this executor in that time, on a session that has not ended."""
        if not is_uuid(executor_id):
            return False  # whoever serves it says what is wrong
        async with self._database.connection(Lane.ENGINE) as connection:
            return bool(
                await connection.fetchval(query("lives_elsewhere"), executor_id, scheduler_id, within_s)
            )

    async def withdraw(self, executor_id: str, session_id: str, refused: Sequence[tuple[str, str]]) -> None:
        """Take kinds and versions that this session refused out of what its executor is known to offer."""
        async with self._database.connection(Lane.ENGINE) as connection:
            await connection.execute(
                query("withdraw_capabilities"),
                executor_id,
                session_id,
                [kind for kind, _ in refused],
                [version for _, version in refused],
            )

    async def drain(self, executor_id: str, *, within_s: float | None = None) -> DrainOrder | None:
        """Remember that this executor is to drain, in that time if any. None: there is none of that id."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(query("drain_executor"), executor_id, within_s)
        return None if row is None else _drain_order(row)

    async def leases(self, executor_id: str) -> list[HeldLease]:
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(query("leases_of_executor"), executor_id)
            return [
                HeldLease(
                    step_run_id=row["step_run_id"],
                    workflow_run_id=row["workflow_run_id"],
                    lease_token=row["lease_token"],
                    attempt=row["attempt"],
                    kind=row["kind"],
                    accepted=row["accepted"],
                    last_sequence=row["last_sequence"],
                    missing=await self._missing(connection, row) if row["gaps"] else (),
                    cancel_reason=row["cancel_reason"],
                    cancel_grace_s=row["cancel_grace_s"],
                )
                for row in rows
            ]

    async def _missing(self, connection: Connection, row: asyncpg.Record) -> tuple[int, ...]:
        stored = await connection.fetch(
            query("stored_sequences"), row["granted_on"], row["step_run_id"], row["attempt"]
        )
        have = {record["sequence"] for record in stored}
        return tuple(islice((n for n in range(1, row["last_sequence"] + 1) if n not in have), MAX_MISSING))

    async def closed(self, tokens: Sequence[tuple[str, int]]) -> dict[int, int]:
        """Of (step_run_id, lease_token) pairs those whose attempt has ended: the newest stored number by token."""
        if not tokens:
            return {}
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("closed_tokens"), [step for step, _ in tokens], [token for _, token in tokens]
            )
        return {row["lease_token"]: row["last_sequence"] for row in rows}

    async def seen(self, sessions: Sequence[tuple[str, str, int, int]]) -> dict[str, Seen]:
        """Note that (executor_id, session_id, in_flight, free_credit) live. By executor_id, what its row says."""
        if not sessions:
            return {}
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(
                query("seen_executors"),
                [executor_id for executor_id, _, _, _ in sessions],
                [session_id for _, session_id, _, _ in sessions],
                [in_flight for _, _, in_flight, _ in sessions],
                [free for _, _, _, free in sessions],
            )
        return {row["executor_id"]: Seen(row["is_newest"], _drain_order(row)) for row in rows}

    async def undelivered_cancels(self, executor_ids: Sequence[str]) -> list[CancelOrder]:
        if not executor_ids:
            return []
        async with self._database.connection(Lane.ENGINE) as connection:
            rows = await connection.fetch(query("undelivered_cancels"), list(executor_ids))
        return [cancel_order(row) for row in rows]


def _drain_order(row: asyncpg.Record) -> DrainOrder | None:
    return DrainOrder(row["drain_by"], row["drain_within_s"]) if row["draining"] else None
