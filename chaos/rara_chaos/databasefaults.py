"""Faults that are made in PostgreSQL by whoever may log in: its sessions, locks, statements and settings."""

import asyncio
from typing import Final

from rara_testing.database_faults import DatabaseFaults

from rara_chaos.executorfaults import nobody
from rara_chaos.injector import held
from rara_chaos.schedule import Fault, Kind

KINDS: Final = (
    Kind.BACKENDS_TERMINATED,
    Kind.LISTENERS_TERMINATED,
    Kind.ROWS_LOCKED,
    Kind.SNAPSHOT_HELD,
    Kind.STATEMENTS_SLOWED,
    Kind.STATEMENTS_REFUSED,
    Kind.READ_ONLY,
    Kind.CONNECTIONS_EXHAUSTED,
)
SCHEDULERS: Final = "rara-scheduler%"
_LOCKS: Final = (
    "select from rara.lease for update",
    "select from rara.ready for update",
    "select from rara.workflow_run where ended_at is null for update",
    "lock table rara.result in share mode",
)
_TABLES: Final = ("rara.lease", "rara.ready", "rara.result", "rara.workflow_run", "rara.step_event")
# Of the machine or of bad luck: never of the data, which a scheduler may blame on a step.
_STATES: Final = ("58030", "53100", "40001", "40P01", "57014")


class DatabaseSide:
    def __init__(self, dsn: str) -> None:
        self._faults = DatabaseFaults(dsn)

    async def do(self, fault: Fault) -> None:
        """One of KINDS, or the kill of a backend where its process is this machine's."""
        database, hold_s = self._faults, fault.hold_s
        match fault.kind:
            case Kind.BACKEND_KILLED:
                await database.kill_backend(SCHEDULERS)
            case Kind.BACKENDS_TERMINATED:
                _needs(await database.terminate(SCHEDULERS))
            case Kind.LISTENERS_TERMINATED:
                _needs(await database.terminate(SCHEDULERS, listening=True))
            case Kind.ROWS_LOCKED:
                await held(database.locked(_LOCKS[fault.target % len(_LOCKS)]), hold_s)
            case Kind.SNAPSHOT_HELD:
                await held(database.snapshot(), hold_s)
            case Kind.STATEMENTS_SLOWED:
                await held(database.slowed(_TABLES[fault.target % len(_TABLES)], seconds=0.3), hold_s)
            case Kind.STATEMENTS_REFUSED:
                state = _STATES[fault.target // len(_TABLES) % len(_STATES)]
                await held(database.refused(_TABLES[fault.target % len(_TABLES)], sqlstate=state), hold_s)
            case Kind.READ_ONLY:
                await held(database.read_only(SCHEDULERS), hold_s)
            case Kind.CONNECTIONS_EXHAUSTED:
                await self._exhausted(hold_s)
            case _:
                raise AssertionError(fault.kind)

    async def _exhausted(self, hold_s: float) -> None:
        """No connection is left, and those that the schedulers had are gone."""
        async with self._faults.session() as session, self._faults.exhausted():
            await session.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like $1",
                SCHEDULERS,
            )
            async with self._faults.exhausted():  # those that just became free
                await asyncio.sleep(hold_s)


def _needs(count: int) -> None:
    if not count:
        nobody()
