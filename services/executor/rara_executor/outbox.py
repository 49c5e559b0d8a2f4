"""Events that are not known to be stored: numbered, gathered into frames, kept, sent again.

Pure: time comes in, frames go out. One outbox serves all jobs of an executor.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache

from google.protobuf.descriptor import Descriptor
from rara.v1 import dispatch_pb2, job_pb2

MAX_BATCH_BYTES = 1 << 20
MAX_BATCH_EVENTS = 500  # a frame costs as much as some ten events; the scheduler takes it in without a pause
GATHERED_BYTES = 256 << 10
# `running` and progress wait for company, since nobody waits for them: of a short step all leaves in one frame.
GATHER_S = 0.010
_GATHERED = frozenset({"running", "progress"})
# Unsent progress of one job beyond which a newer one is merged into the last.
MAX_UNSENT_PROGRESS = 8


class _State(Enum):
    QUEUED = auto()
    SENT = auto()
    HELD = auto()  # refused: its cause is being mended
    PAUSED = auto()  # nobody is there to hear of its lease
    GONE = auto()  # acknowledged or dropped; still in the queue


@dataclass(slots=True, eq=False)
class Entry:
    """One event on its way. data: the event as it is sent. first_sent_at: on the caller's clock."""

    event: job_pb2.ProgressEvent
    data: bytes
    kind: str
    token: int
    sequence: int
    order: int
    queued_at: float
    state: _State = _State.QUEUED
    first_sent_at: float | None = None

    @property
    def size_bytes(self) -> int:
        return len(self.data)

    def say(self, event: job_pb2.ProgressEvent) -> None:
        """Another event under the same number."""
        event.sequence = self.sequence
        self.event = event
        self.data = event.SerializeToString()


@dataclass(slots=True)
class _Lane:
    """The events of one lease."""

    last_sequence: int = 0
    acked_sequence: int = 0
    unsent_progress: int = 0
    paused: bool = False
    entries: dict[int, Entry] = field(default_factory=dict)


class Outbox:
    def __init__(self, *, event_window: int = 1000) -> None:
        self.event_window = event_window
        self.in_flight = 0  # sent in this session and not answered
        self.held_bytes = 0
        self._lanes: dict[int, _Lane] = {}
        self._queue: deque[Entry] = deque()
        self._urgent = 0  # queued entries that do not wait for company
        self._queued = 0
        self._queued_bytes = 0
        self._orders = 0

    def add(self, event: job_pb2.ProgressEvent, now: float, *, connected: bool = True) -> int:
        """Number the event and take it in. Its lease must be set. Returns its sequence number.

        A progress event is merged into the lease's last one, if that was never sent and there is pressure:
        no session, a full window, or many unsent ones.
        """
        token = event.lease.lease_token
        lane = self._lanes.get(token)
        if lane is None:
            lane = self._lanes[token] = _Lane()
        kind = event.WhichOneof("event") or ""
        if kind == "progress":
            last = lane.entries.get(lane.last_sequence)
            pressed = (
                not connected
                or lane.paused
                or self.in_flight >= self.event_window
                or lane.unsent_progress >= MAX_UNSENT_PROGRESS
            )
            # What was sent before, and is queued again, may be stored: under its number nothing else may be said.
            waits = (_State.QUEUED, _State.PAUSED)
            is_unsent = last is not None and last.state in waits and last.first_sent_at is None
            if pressed and last is not None and last.kind == "progress" and is_unsent:
                self._merge(last, event)
                return last.sequence
        lane.last_sequence += 1
        event.sequence = sequence = lane.last_sequence
        self._orders += 1
        entry = Entry(event, event.SerializeToString(), kind, token, sequence, self._orders, now)
        lane.entries[sequence] = entry
        self.held_bytes += len(entry.data)
        self._enqueue(entry, lane)
        return sequence

    def due_in(self, now: float) -> float | None:
        """Seconds until the next frame should leave; 0: now; None: nothing can be sent."""
        if not self._queued or self.in_flight >= self.event_window:
            return None
        if self._urgent or self._queued >= MAX_BATCH_EVENTS or self._queued_bytes >= GATHERED_BYTES:
            return 0.0
        self._skip_gone()
        return max(0.0, self._queue[0].queued_at + GATHER_S - now)

    def take(self, now: float) -> list[job_pb2.ProgressEvent]:
        """The events of the next frame, oldest first; they count as sent."""
        return [entry.event for entry in self._take(now)]

    def take_frame(self, now: float) -> bytes:
        """The same as a ConnectRequest on the wire; empty: there is nothing to say. Nothing is serialized twice."""
        fields: list[bytes] = []
        for entry in self._take(now):
            fields += _EVENTS, _varint(len(entry.data)), entry.data
        events = b"".join(fields)
        return b"".join((_FRAME_EVENTS, _varint(len(events)), events)) if events else b""

    def _take(self, now: float) -> list[Entry]:
        entries: list[Entry] = []
        queue, size = self._queue, 0
        most = min(MAX_BATCH_EVENTS, self.event_window - self.in_flight)
        while queue and len(entries) < most:
            entry = queue[0]
            if entry.state is _State.QUEUED:
                size += len(entry.data)
                if entries and size > MAX_BATCH_BYTES:
                    break
                self._uncount(entry)
                entry.state = _State.SENT
                if entry.first_sent_at is None:
                    entry.first_sent_at = now
                entries.append(entry)
            queue.popleft()
        self.in_flight += len(entries)
        return entries

    def acknowledge(self, token: int, sequence: int, missing: Iterable[int] = ()) -> list[Entry]:
        """Everything up to sequence is stored, but for the missing numbers, which are queued again.

        Returns the entries that are stored now, in order.
        """
        lane = self._lanes.get(token)
        if lane is None:
            return []
        wanted = sorted(missing)
        if not wanted and sequence >= lane.last_sequence:
            done, lane.entries = list(lane.entries.values()), {}
        else:
            stored = [number for number in lane.entries if number <= sequence and number not in wanted]
            done = [lane.entries.pop(number) for number in stored]
        for entry in done:
            self._forget(entry)
        lane.acked_sequence = max(lane.acked_sequence, min(sequence, lane.last_sequence))
        for number in wanted:
            entry_or_none = lane.entries.get(number)
            if entry_or_none is not None and entry_or_none.state is _State.SENT:
                self.in_flight -= 1
                self._enqueue(entry_or_none, lane)
        return done

    def hold(self, token: int, sequence: int) -> Entry | None:
        """The event was refused: keep it until resend, replace or drop. None: it is not held."""
        entry = self._find(token, sequence)
        if entry is None:
            return None
        if entry.state is _State.SENT:
            self.in_flight -= 1
        elif entry.state is _State.QUEUED:
            self._uncount(entry)
        entry.state = _State.HELD
        return entry

    def resend(self, token: int, sequence: int) -> None:
        """Send a held event again, as it is."""
        entry = self._find(token, sequence)
        if entry is not None and entry.state is _State.HELD:
            self._enqueue(entry, self._lanes[token])

    def replace(self, event: job_pb2.ProgressEvent, sequence: int) -> None:
        """Put a terminal event in the place of a held one; what came after it is dropped."""
        token = event.lease.lease_token
        entry = self._find(token, sequence)
        if entry is None:
            return
        lane = self._lanes[token]
        for number in [number for number in lane.entries if number > sequence]:
            self._forget(lane.entries.pop(number))
        lane.last_sequence = sequence
        self.held_bytes -= entry.size_bytes
        entry.say(event)
        entry.kind = event.WhichOneof("event") or ""
        self.held_bytes += entry.size_bytes
        if entry.state is _State.HELD:
            self._enqueue(entry, lane)

    def drop(self, token: int) -> None:
        """Forget the lease with all its events."""
        lane = self._lanes.pop(token, None)
        if lane is not None:
            for entry in lane.entries.values():
                self._forget(entry)

    def pause(self, token: int) -> None:
        """The lease's own stream has ended: its events wait for the next, outside of the window."""
        lane = self._lanes.setdefault(token, _Lane())
        lane.paused = True
        for entry in lane.entries.values():
            if entry.state is _State.SENT:
                self.in_flight -= 1
            elif entry.state is _State.QUEUED:
                self._uncount(entry)
            if entry.state is not _State.HELD:
                entry.state = _State.PAUSED
        # Queued again, they must not be found at their old places, before what was sent earlier.
        self._queue = deque(entry for entry in self._queue if entry.token != token)

    def resume(self, token: int) -> None:
        """The lease has a stream again: what waited, and what was sent and not acknowledged, is queued anew."""
        lane = self._lanes.setdefault(token, _Lane())
        lane.paused = False
        for number in sorted(lane.entries):
            if lane.entries[number].state is _State.PAUSED:
                self._enqueue(lane.entries[number], lane)

    def rewind(self) -> None:
        """The session has ended: what was sent and not acknowledged is sent again in the next one."""
        self.in_flight = 0
        queued = [
            entry
            for lane in self._lanes.values()
            for entry in lane.entries.values()
            if entry.state in (_State.SENT, _State.QUEUED)
        ]
        self._queue.clear()
        self._urgent = self._queued = self._queued_bytes = 0
        for lane in self._lanes.values():
            lane.unsent_progress = 0
        for entry in sorted(queued, key=lambda entry: entry.order):
            self._enqueue(entry, self._lanes[entry.token])

    def holds(self, token: int) -> bool:
        """Whether anything of the lease is not known to be stored."""
        lane = self._lanes.get(token)
        return lane is not None and bool(lane.entries)

    def is_empty(self) -> bool:
        return all(not lane.entries for lane in self._lanes.values())

    def sequences(self, token: int) -> tuple[int, int]:
        """Newest made, newest known to be stored."""
        lane = self._lanes.get(token)
        return (0, 0) if lane is None else (lane.last_sequence, lane.acked_sequence)

    def was_sent(self, token: int, sequence: int) -> bool:
        """Whether the event has left at least once, or is stored."""
        entry = self._find(token, sequence)
        return entry is None or entry.first_sent_at is not None

    def _find(self, token: int, sequence: int) -> Entry | None:
        lane = self._lanes.get(token)
        return None if lane is None else lane.entries.get(sequence)

    def _merge(self, last: Entry, event: job_pb2.ProgressEvent) -> None:
        """The newer message under the older number; a checkpoint that was not sent is never lost with it."""
        if not event.progress.HasField("checkpoint") and last.event.progress.HasField("checkpoint"):
            event.progress.checkpoint.CopyFrom(last.event.progress.checkpoint)
            event.progress.checkpoint_artifacts.extend(last.event.progress.checkpoint_artifacts)
        before = last.size_bytes
        last.say(event)
        self.held_bytes += last.size_bytes - before
        if last.state is _State.QUEUED:
            self._queued_bytes += last.size_bytes - before

    def _enqueue(self, entry: Entry, lane: _Lane) -> None:
        if lane.paused:
            entry.state = _State.PAUSED
            return
        entry.state = _State.QUEUED
        self._queue.append(entry)
        self._queued += 1
        self._queued_bytes += len(entry.data)
        if entry.kind not in _GATHERED:
            self._urgent += 1
        elif entry.kind == "progress":
            lane.unsent_progress += 1

    def _uncount(self, entry: Entry) -> None:
        """The entry is no longer among the queued ones."""
        self._queued -= 1
        self._queued_bytes -= len(entry.data)
        if entry.kind not in _GATHERED:
            self._urgent -= 1
        elif entry.kind == "progress":
            lane = self._lanes.get(entry.token)
            if lane is not None:
                lane.unsent_progress -= 1

    def _forget(self, entry: Entry) -> None:
        if entry.state is _State.SENT:
            self.in_flight -= 1
        elif entry.state is _State.QUEUED:
            self._uncount(entry)
        entry.state = _State.GONE
        self.held_bytes -= len(entry.data)

    def _skip_gone(self) -> None:
        while self._queue and self._queue[0].state is not _State.QUEUED:
            self._queue.popleft()


def _tag(message: Descriptor, field: str) -> bytes:
    return bytes(
        ((message.fields_by_name[field].number << 3) | 2,)
    )  # 2: what follows has its length before it


_EVENTS = _tag(dispatch_pb2.EventBatch.DESCRIPTOR, "events")
_FRAME_EVENTS = _tag(dispatch_pb2.ConnectRequest.DESCRIPTOR, "events")


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)
