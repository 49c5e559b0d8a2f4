"""Sessions one after the other: reconnects with full jitter for as long as anything is to be said."""

import asyncio
import random
from collections.abc import Callable

import structlog
from rara_client.security import Security

from rara_executor.errors import ExecutorError
from rara_executor.outbox import Outbox
from rara_executor.session import Session, SessionEnd, SessionEvents, connect

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 << 20),  # the channel opens before Welcome tells the limit
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 5000),
    # A scheduler that comes back may have another address; gRPC would ask for it again after 30 s only.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # Channels with equal options would share one connection: an upload must not delay a heartbeat, and a new session
    # must not inherit a dead path.
    ("grpc.use_local_subchannel_pool", 1),
    # Keepalive stays off: heartbeats show both directions, and a server counts pings against us.
]


class ReplacedError(ExecutorError):
    """Another process has opened a session with our executor_id: this one must not come back."""


class Connection:
    """Holds at most one session, and opens the next when one has ended, whatever ended it.

    Each session has a channel of its own. A path that swallowed the last one's packets would swallow the next call's
    too, for as long as TCP goes on repeating itself: a quarter of an hour.
    """

    goodbye_gives_back = True

    def __init__(
        self,
        target: str,
        outbox: Outbox,
        events: SessionEvents,
        *,
        security: Security = Security(),  # noqa: B008 - a value, and never changed
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.session: Session | None = None
        self._target = target
        self._security = security
        self._outbox = outbox
        self._events = events
        self._jitter = jitter
        self._longest_wait_s = MAX_BACKOFF_S

    async def run(self) -> bool:
        """Until our Goodbye. True: the scheduler has heard it. Raises ReplacedError."""
        failures = 0
        while True:
            end = await self._one_session()
            self._outbox.rewind()
            log.info("session.ended", reason=end.reason, welcomed=end.welcomed)
            if end.said_goodbye:
                return end.was_heard
            if end.welcomed:
                self._events.spoken.session_ended()
            elif end.versions is not None and self._events.spoken.refused(end.versions):
                continue
            failures = 0 if end.welcomed else failures + 1
            wait_s = pause_s(failures, self._jitter(), self._longest_wait_s)
            if end.went_away is not None:
                if end.went_away.reason == "REPLACED":
                    raise ReplacedError("another session of this executor_id has replaced ours")
                if end.went_away.HasField("reconnect_after"):
                    wait_s = end.went_away.reconnect_after.ToNanoseconds() / 1e9
            await asyncio.sleep(wait_s)

    async def _one_session(self) -> SessionEnd:
        try:
            channel = self._security.channel(self._target, CHANNEL_OPTIONS)
        except ValueError as error:  # a file is being replaced: the next try finds it
            return SessionEnd(str(error), welcomed=False, went_away=None, said_goodbye=False)
        self.session = session = Session(connect(channel), self._outbox, self._events)
        try:
            return await session.run()
        finally:
            await channel.close()
            if session.heartbeats is not None:
                # Short heartbeats mean short leases: those held must be renewed before they run out.
                self._longest_wait_s = min(MAX_BACKOFF_S, session.heartbeats.interval_s)
            self.session = None
            self._events.on_session_end()


def pause_s(failures: int, jitter: float, longest_s: float) -> float:
    """Seconds until the next try after so many failures in a row. jitter: a draw from [0, 1)."""
    return jitter * min(longest_s, FIRST_BACKOFF_S * 2.0 ** min(failures, 16))
