"""The heartbeats of one session: numbers, what was renewed since when, silence, readiness. Pure."""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from rara.v1 import dispatch_pb2

MAX_UNRENEWED = 1000  # the database may be away for long; older ones prove nothing any more


@dataclass(frozen=True, slots=True)
class _Beat:
    number: int
    sent_at: float
    tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class Renewal:
    """The leases that the heartbeat sent at `sent_at` has renewed."""

    sent_at: float
    tokens: frozenset[int]


class Heartbeats:
    """sent_at and now are on the lease clock."""

    def __init__(self, *, interval_s: float, silence_s: float, now: float) -> None:
        self.interval_s = interval_s
        self.silence_s = silence_s
        self.heard_at = now
        self._number = 0
        self._answered = 0
        self._answered_sent_at = now  # Welcome answered Hello
        self._beats: deque[_Beat] = deque(maxlen=MAX_UNRENEWED)

    def compose(self, tokens: Collection[int], now: float) -> dispatch_pb2.Heartbeat:
        """The next heartbeat, sent now."""
        self._number += 1
        self._beats.append(_Beat(self._number, now, frozenset(tokens)))
        return dispatch_pb2.Heartbeat(
            number=self._number, lease_tokens=sorted(tokens), answered=self._answered
        )

    def answered(self, ack: dispatch_pb2.HeartbeatAck) -> Renewal | None:
        """Take an answer in; what it renewed, if anything new."""
        if self._answered < ack.number <= self._number:
            self._answered = ack.number
            for beat in self._beats:
                if beat.number == ack.number:
                    self._answered_sent_at = beat.sent_at
        renewed: _Beat | None = None
        while self._beats and self._beats[0].number <= ack.renewed:
            renewed = self._beats.popleft()
        if renewed is None or renewed.number != ack.renewed:
            return None
        return Renewal(renewed.sent_at, renewed.tokens)

    def heard(self, now: float) -> None:
        """Any frame shows that the other side lives."""
        self.heard_at = now

    def is_silent(self, now: float) -> bool:
        return now - self.heard_at > self.silence_s

    def is_ready(self, now: float) -> bool:
        """Both directions have proved themselves within two intervals."""
        return now - self._answered_sent_at <= 2 * self.interval_s
