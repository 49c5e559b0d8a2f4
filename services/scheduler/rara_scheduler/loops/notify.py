"""Hints between schedulers: NOTIFY shortens a wait, and nothing depends on it."""

import asyncio
from collections.abc import Callable

import asyncpg
import structlog

log = structlog.get_logger(__name__)

_CHANNEL = "rara_work"
_SPACING_S = 0.05  # at most 20 a second: each notifying commit takes a lock that all of them share
_CHECK_S = 2.0
_ANSWER_S = 1.5
_LONGEST_WAIT_S = 5.0

# What the driver raises when a connection ends under it; the last one when that happens in the middle of a reply.
_LOST = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)


class NotifyLoop:
    """Sends hints, merged, on a connection of its own, and listens on the same one.

    hint: called for another scheduler's hint. A connection that is lost or has gone silent is rebuilt; polling finds
    everything meanwhile.
    """

    def __init__(self, dsn: str, *, hint: Callable[[], None], connect_timeout_s: float = 5.0) -> None:
        self._dsn = dsn
        self._hint = hint
        self._connect_timeout_s = connect_timeout_s
        self._wanted = asyncio.Event()

    def tell_others(self) -> None:
        """Something waits that this scheduler cannot serve by its own sessions."""
        self._wanted.set()

    async def run(self) -> None:
        """Listen and send until cancelled."""
        wait_s = 0.2
        while True:
            try:
                connection = await asyncpg.connect(
                    self._dsn,
                    timeout=self._connect_timeout_s,
                    command_timeout=self._connect_timeout_s,
                    server_settings={"application_name": "rara-scheduler notify"},
                )
            except _LOST as error:
                log.warning("notify.unavailable", error=repr(error), wait_s=wait_s)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                continue
            try:
                own_pid = connection.get_server_pid()

                def heard(_: object, pid: int, __: str, ___: object, own: int = own_pid) -> None:
                    if pid != own:
                        self._hint()

                await connection.add_listener(_CHANNEL, heard)
                self._hint()  # whatever was said while nobody listened
                wait_s = 0.2
                await self._serve(connection)
            except _LOST as error:
                log.warning("notify.lost", error=repr(error))
            finally:
                connection.terminate()

    async def _serve(self, connection: "asyncpg.Connection[asyncpg.Record]") -> None:
        while not connection.is_closed():
            try:
                async with asyncio.timeout(_CHECK_S):
                    await self._wanted.wait()
            except TimeoutError:
                # A path that swallows everything shows itself only when something is asked of it.
                await connection.execute("select 1", timeout=_ANSWER_S)  # it fails on an empty query's answer
                continue
            self._wanted.clear()
            await connection.execute(f"notify {_CHANNEL}")
            await asyncio.sleep(_SPACING_S)
