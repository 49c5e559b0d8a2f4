"""The outbox under anything that a session may bring: what is not acknowledged stays, and what is said stays said."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rara.v1 import common_pb2, job_pb2
from rara_executor.outbox import MAX_UNSENT_PROGRESS, Outbox

T0 = 1000.0
TOKENS = (1, 2)
TOKEN = st.sampled_from(TOKENS)
KINDS = ("accepted", "running", "progress", "progress", "progress", "effect")


def event(token: int, number: int, kind: str, checkpoint: bool) -> job_pb2.ProgressEvent:
    """number: of this call among all of its lease, so that no two events are equal."""
    lease = job_pb2.Lease(step_run_id=f"s{token}", lease_token=token)
    text = str(number)
    bodies: dict[str, Any] = {
        "accepted": job_pb2.JobAccepted(executor_id=text),
        "running": job_pb2.JobRunning(runner_id=text),
        "progress": job_pb2.JobProgress(message=text),
        "effect": job_pb2.Effect(name=text),
        "succeeded": job_pb2.JobResult(output=common_pb2.Payload(data=text.encode())),
        "failed": job_pb2.JobError(code="HANDLER_FAILED", message=text),
    }
    made = job_pb2.ProgressEvent(lease=lease, **{kind: bodies[kind]})
    if kind == "progress" and checkpoint:
        made.progress.checkpoint.data = text.encode()
    return made


class Lane:
    """What must be known of one lease. wanted: number to bytes of what is not acknowledged; said: of what has left."""

    def __init__(self) -> None:
        self.calls = 0
        self.last = 0
        self.wanted: dict[int, job_pb2.ProgressEvent] = {}
        self.said: dict[int, bytes] = {}
        self.stored: set[int] = set()
        self.held: set[int] = set()
        self.ended = False


class Sessions(RuleBasedStateMachine):
    """Plays supervisor, writer and scheduler at once, with a model beside the outbox."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = {token: Lane() for token in TOKENS}
        self.flying: set[tuple[int, int]] = set()  # sent in this session, and not answered
        self.now = T0

    @initialize(window=st.integers(1, 12))
    def open(self, window: int) -> None:
        self.outbox = Outbox(event_window=window)

    # ------------------------------------------------------------ the executor

    @rule(token=TOKEN, kind=st.sampled_from(KINDS), checkpoint=st.booleans(), connected=st.booleans())
    def add(self, token: int, kind: str, checkpoint: bool, connected: bool) -> None:
        lane = self.lanes[token]
        if lane.ended:
            return
        lane.calls += 1
        made = event(token, lane.calls, kind, checkpoint)
        before = lane.wanted.get(lane.last)
        number = self.outbox.add(made, self.now, connected=connected)
        if number == lane.last:  # merged: only into progress that nobody has seen
            assert before is not None
            assert kind == before.WhichOneof("event") == "progress"
            assert number not in lane.said
            if not checkpoint and before.progress.HasField("checkpoint"):
                assert made.progress.checkpoint == before.progress.checkpoint
        else:
            assert number == lane.last + 1
        lane.last = number
        lane.wanted[number] = made

    @rule(token=TOKEN, kind=st.sampled_from(["succeeded", "failed"]))
    def end(self, token: int, kind: str) -> None:
        lane = self.lanes[token]
        if lane.ended:
            return
        lane.calls += 1
        made = event(token, lane.calls, kind, checkpoint=False)
        assert self.outbox.add(made, self.now) == lane.last + 1
        lane.last += 1
        lane.wanted[lane.last] = made
        lane.ended = True

    @rule(wait=st.sampled_from([0.0, 0.002, 0.02]))
    def send(self, wait: float) -> None:
        """Of each lease in the order of its numbers, but for what was asked for again."""
        self.now += wait
        for sent in self.outbox.take(self.now):
            token, number = sent.lease.lease_token, sent.sequence
            lane = self.lanes[token]
            assert number in lane.wanted, "acknowledged, dropped or never made"
            assert number not in lane.held, "refused, and its cause is not mended"
            assert (token, number) not in self.flying, "twice in one session, and not asked for"
            data = sent.SerializeToString(deterministic=True)
            assert lane.said.setdefault(number, data) == data, "other content under a number that was used"
            self.flying.add((token, number))

    # ------------------------------------------------------------ the scheduler

    @rule(token=TOKEN, upto=st.integers(0, 30), missing=st.sets(st.integers(1, 30), max_size=5))
    def acknowledge(self, token: int, upto: int, missing: set[int]) -> None:
        """Cumulative, late, twice or with gaps; of what was sent, since nobody can have stored the rest."""
        lane = self.lanes[token]
        upto = min(upto, max(lane.said, default=0))
        unsent = {
            number for number in range(1, upto + 1) if number in lane.wanted and number not in lane.said
        }
        gone = (missing | unsent) - lane.stored
        done = self.outbox.acknowledge(token, upto, gone)
        expected = [number for number in sorted(lane.wanted) if number <= upto and number not in gone]
        assert [entry.sequence for entry in done] == expected
        for number in expected:
            del lane.wanted[number]
            lane.stored.add(number)
            lane.held.discard(number)
            self.flying.discard((token, number))
        for number in gone:
            self.flying.discard((token, number))  # asked for again

    @rule(token=TOKEN, which=st.integers(0, 20))
    def refuse(self, token: int, which: int) -> None:
        lane = self.lanes[token]
        sent = sorted(number for flying, number in self.flying if flying == token)
        if not sent:
            return
        number = sent[which % len(sent)]
        assert self.outbox.hold(token, number) is not None
        lane.held.add(number)
        self.flying.discard((token, number))

    @rule(token=TOKEN, as_failure=st.booleans())
    def mend(self, token: int, as_failure: bool) -> None:
        """The cause of a refusal is gone, or the job fails in the place of the event that cannot be stored."""
        lane = self.lanes[token]
        if not lane.held:
            return
        number = min(lane.held)
        if not as_failure:
            self.outbox.resend(token, number)
        else:
            lane.calls += 1
            made = event(token, lane.calls, "failed", checkpoint=False)
            self.outbox.replace(made, number)
            for later in [later for later in lane.wanted if later > number]:
                del lane.wanted[later]
                lane.held.discard(later)
                self.flying.discard((token, later))
            lane.wanted[number] = made
            for said in [said for said in lane.said if said >= number]:
                del lane.said[said]  # refused or dropped: never stored under these numbers
            lane.last, lane.ended = number, True
        lane.held.discard(number)

    @rule()
    def cut(self) -> None:
        self.outbox.rewind()
        self.flying.clear()

    @rule(token=TOKEN, checkpoints=st.lists(st.booleans(), min_size=1, max_size=4))
    def go_on_without_a_session(self, token: int, checkpoints: list[bool]) -> None:
        """Progress is merged now, but not into what has left before: that may be stored."""
        self.cut()
        for checkpoint in checkpoints:
            self.add(token, "progress", checkpoint, connected=False)

    @rule(token=TOKEN)
    def lose(self, token: int) -> None:
        """The lease is somebody else's: nothing more is said under it. The next one has a token of its own."""
        self.outbox.drop(token)
        assert not self.outbox.holds(token)
        self.flying = {(flying, number) for flying, number in self.flying if flying != token}
        self.lanes[token] = Lane()

    @rule(window=st.integers(1, 12))
    def reconnect_with_another_window(self, window: int) -> None:
        self.cut()
        self.outbox.event_window = window

    # ------------------------------------------------------------ always

    @invariant()
    def nothing_is_dropped_and_memory_is_bounded(self) -> None:
        wanted = [made for lane in self.lanes.values() for made in lane.wanted.values()]
        assert self.outbox.held_bytes == sum(made.ByteSize() for made in wanted)
        assert self.outbox.in_flight == len(self.flying)
        assert self.outbox.in_flight <= self.outbox.event_window
        assert self.outbox.is_empty() == (not wanted)
        for token, lane in self.lanes.items():
            assert self.outbox.holds(token) == bool(lane.wanted)
            assert self.outbox.sequences(token)[0] in (0, lane.last)
            unsent = [
                n for n, made in lane.wanted.items() if n not in lane.said and made.HasField("progress")
            ]
            others = sum(not made.HasField("progress") for made in lane.wanted.values())
            # Between two events of another sort progress is not merged: what bounds it are those, and what was sent.
            assert len(unsent) <= (MAX_UNSENT_PROGRESS + 1) * (others + 1)

    def teardown(self) -> None:
        """A session that works gets everything across, each number once and in order."""
        if not hasattr(self, "outbox"):
            return
        for token in TOKENS:
            for number in sorted(self.lanes[token].held):
                self.outbox.resend(token, number)
            self.lanes[token].held.clear()
        self.cut()
        while not self.outbox.is_empty():
            self.now += 1
            before = len(self.flying)
            self.send(0.0)
            assert len(self.flying) > before, "nothing moves any more"
            for token, lane in self.lanes.items():
                sent = [number for flying, number in self.flying if flying == token]
                if sent:
                    self.acknowledge(token, max(sent), {n for n in lane.wanted if n not in sent})
        for lane in self.lanes.values():
            assert lane.stored == set(range(1, lane.last + 1))


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
