"""The life of one step's leases as a model: two schedulers, two executors, a lossy network, crashes and time.

What the real thing decides, the model lets the product decide: `domain.attempt.decide` and the table of
`domain.step`. The rest (rows, frames, timers) is written down here as the contract has it, small enough to visit
every interleaving. Each rule that the promises rest on can be taken away by name; see GUARDS.

Time is counted in ticks. A lease lasts two. A handler that is not certain of its lease for one tick is stopped
before the next, by the supervisor or, where that is frozen, by the warden.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import NamedTuple

from rara_scheduler.domain.attempt import (
    AttemptEnding,
    Decision,
    EventType,
    Guard,
    Item,
    LeaseFacts,
    Outcome,
    Report,
    decide,
)
from rara_scheduler.domain.errors import Code, StepError
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.step import TERMINAL, StepEvent, StepState, sources, transition
from support.explorer import Step

LEASE_TICKS = 2
FENCE_TICKS = 1
POLICY = RetryPolicy(max_attempts=2)
HELD_STATES = (StepState.LEASED, StepState.RUNNING)

GUARDS = {
    "token": "a report counts under the current token alone",
    "owner": "a report counts from the lease's owner alone",
    "terminal": "a closed step has no lease to report under",
    "expiry": "reclaiming looks at the expiry again when it commits",
    "acceptance": "taking back what was not accepted looks at the acceptance again",
    "ack after commit": "an event is acknowledged after its commit",
    "start after ack": "a handler starts after `accepted` is acknowledged",
    "certain at start": "a handler starts under a lease that is certain",
    "fence": "a handler is stopped before its lease can end",
    "renewal by token": "a heartbeat renews the token that it names",
    "cancel before retry": "a stored cancel is looked at before a retry",
    "cancel before grant": "a cancel closes a step that waits",
    "late is classified": "a report without a lease is looked up before it is called lost",
    "resend": "what was sent and not acknowledged is sent again in the next session",
    "reclaim": "expired leases are taken back",
    "present at release": "only a session that answers gives up what its Hello left out",
}


class Row(NamedTuple):
    """What the database holds of the step."""

    place: StepState = StepState.PENDING
    token: int = 0
    owner: int = 0
    left: int = 0  # ticks until the lease has expired
    accepted: bool = False
    started: bool = False
    last: int = 0
    gaps: int = 0
    failures: int = 0
    cancel: bool = False
    stored: frozenset[tuple[int, int]] = frozenset()  # (token, sequence)
    result: tuple[StepState, int, int] | None = None  # state, token, owner


class Job(NamedTuple):
    """What an executor holds. age: ticks since what last renewed the lease was sent, LEASE_TICKS and more: long ago."""

    token: int
    phase: str = "accepting"  # accepting, accepted, running, ended
    age: int = LEASE_TICKS
    accepted_age: int = -1  # of the first sending of `accepted`; negative: it was never sent
    first: str = "unsent"  # the event `accepted`: unsent, sent, acked
    last: str = ""  # the last event, likewise; empty: there is none yet
    end: str = ""


class Executor(NamedTuple):
    """session: the scheduler it is connected to; negative: Hello was sent there; 0: none. dials: how often."""

    alive: bool = True
    frozen: bool = False
    session: int = 0
    job: Job | None = None
    dials: int = 0


class Frame(NamedTuple):
    """On its way in the session of one executor with one scheduler. a, b: see the sender. dial: which session."""

    kind: str
    scheduler: int
    executor: int
    token: int
    a: int = 0
    b: int = 0
    dial: int = 0


class Scheduler(NamedTuple):
    """inbox: what it is about to commit. unlisted: leases to release, by what its Hello has left out."""

    alive: bool = True
    inbox: Frame | None = None
    unlisted: tuple[Frame, ...] = ()


class World(NamedTuple):
    """found: the token that a sweep has found, and will take back."""

    row: Row
    found: int
    schedulers: tuple[Scheduler, Scheduler]
    executors: tuple[Executor, Executor]
    net: tuple[Frame, ...]
    faults: int
    cancels: int
    strangers: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may happen: the model is finite because of these."""

    grants: int = 2
    frames: int = 1
    faults: int = 1
    fault_kinds: frozenset[str] = frozenset(
        {"scheduler crash", "executor crash", "freeze", "cut", "loss", "repeat"}
    )
    diligent: bool = False  # time passes only when all that are connected have renewed what they hold
    dialling: bool = False  # executor 1 begins without a session, its Hello to scheduler 1 on the way
    victims: tuple[int, ...] = (1, 2)  # the schedulers and executors that faults happen to
    dials: tuple[int, ...] = (1, 2)  # the schedulers that an executor may dial
    cancels: int = 0
    strangers: int = 0


ENDS = ("accepted", "succeeded", "failed", "cancelled", "fenced")


def _report(sequence: int, end: int) -> Report:
    match ENDS[end]:
        case "accepted":
            return Report(sequence, EventType.ACCEPTED, b"")
        case "succeeded":
            return Report(sequence, EventType.SUCCEEDED, b"", outcome=Outcome(b"{}"))
        case "cancelled":
            return Report(sequence, EventType.CANCELLED, b"", reason=Code.CANCELLED)
        case name:
            code = Code.LEASE_EXPIRED if name == "fenced" else Code.HANDLER_FAILED
            return Report(sequence, EventType.FAILED, b"", error=StepError(code, retryable=True))


Word = tuple[int, int] | tuple[Code, Guard]  # an event's number and end, or the scheduler's own word


def _item(word: Word) -> Item:
    first, second = word
    if isinstance(first, Code) and isinstance(second, Guard):
        return AttemptEnding(StepError(first), second)
    assert isinstance(first, int)
    assert isinstance(second, int)
    return _report(first, second)


@cache
def _decided(lease: LeaseFacts, words: tuple[Word, ...], known: frozenset[int]) -> Decision:
    """The product's own decision."""
    return decide(lease, [_item(word) for word in words], POLICY, known=known, blobs={}, jitter=0.0)


class Model:
    """All ways on from a state, with the promises checked on each. without: guards that are taken away."""

    def __init__(self, bounds: Bounds, *, without: frozenset[str] = frozenset()) -> None:
        unknown = without - GUARDS.keys()
        if unknown:
            raise ValueError(f"no such guard: {unknown}")
        self._bounds = bounds
        self._without = without

    def start(self) -> World:
        """Each executor has a session with one of the schedulers, and the step is leasable."""
        bounds = self._bounds
        return World(
            Row(),
            0,
            (Scheduler(), Scheduler()),
            (Executor(session=-1 if bounds.dialling else 1), Executor(session=2)),
            (Frame("hello", 1, 1, 0),) if bounds.dialling else (),
            bounds.faults,
            bounds.cancels,
            bounds.strangers,
        )

    def is_goal(self, world: World) -> bool:
        """The step is closed, or the bound on grants ends what is looked at."""
        row = world.row
        return row.place in TERMINAL or (row.token >= self._bounds.grants and row.place not in HELD_STATES)

    def ways(self, world: World) -> Iterator[Step[World]]:
        for step in self._steps(world):
            yield step if step.broken else self._checked(world, step)

    def _has(self, guard: str) -> bool:
        return guard not in self._without

    # ------------------------------------------------------------ promises

    def _checked(self, before: World, step: Step[World]) -> Step[World]:
        broken = self._broken(before, step.state)
        return Step(step.label, step.state, step.is_fault, broken) if broken else step

    def _broken(self, before: World, after: World) -> str:
        row = after.row
        if before.row.result is not None and row.result != before.row.result:
            return "terminal is final"
        is_new = row.result is not None and before.row.result is None and before.row.place in HELD_STATES
        if is_new and row.result is not None and row.result[1:] != (before.row.token, before.row.owner):
            return "one owner finishes"
        if not before.row.stored <= row.stored:
            return "what is stored stays"
        if row.cancel and row.place in sources(StepEvent.LEASE):
            return "nothing is tried again after a cancel"
        working = 0
        for executor in after.executors:
            job = executor.job
            if job is None:
                continue
            working += job.phase == "running"
            acked = [(job.token, 1)] * (job.first == "acked") + [(job.token, 2)] * (job.last == "acked")
            if not row.stored.issuperset(acked):
                return "nothing acknowledged is lost"
        if working > 1:
            return "no two handlers work at once"
        return ""

    # ------------------------------------------------------------ all that can happen

    def _steps(self, world: World) -> Iterator[Step[World]]:
        yield from self._time(world)
        yield from self._caller(world)
        yield from self._sweep(world)
        for number in (1, 2):
            yield from self._scheduler_steps(world, number)
            yield from self._executor_steps(world, number)
        for frame in dict.fromkeys(world.net):
            yield from self._arrivals(world, frame)
        if world.faults:
            yield from self._faults(world)

    def _time(self, world: World) -> Iterator[Step[World]]:
        jobs = [executor.job for executor in world.executors]
        if self._has("fence") and any(j and j.phase == "running" and j.age >= FENCE_TICKS for j in jobs):
            return  # whoever fences is faster than the clock
        if self._bounds.diligent and any(
            executor.session > 0 and executor.job and executor.job.phase != "accepting" and executor.job.age
            for executor in world.executors
            if not executor.frozen
        ):
            return
        row = world.row
        if row.place in HELD_STATES and row.left:
            row = row._replace(left=row.left - 1)
        first, second = (_aged(executor) for executor in world.executors)
        net = tuple(
            sorted(
                frame._replace(a=_older(frame.a)) if frame.kind.startswith("beat") else frame
                for frame in world.net
            )
        )
        yield Step("a tick of time passes", world._replace(row=row, executors=(first, second), net=net))

    def _caller(self, world: World) -> Iterator[Step[World]]:
        row = world.row
        if world.cancels and row.place not in TERMINAL:
            row = row._replace(cancel=True)
            if row.place in sources(StepEvent.LEASE) and self._has("cancel before grant"):
                state = transition(row.place, StepEvent.CANCEL)
                row = row._replace(place=state, result=(state, 0, 0))
            yield Step("a caller cancels", world._replace(row=row, cancels=world.cancels - 1))
        if world.strangers and row.place in HELD_STATES:
            stranger = 3 - row.owner
            frame = Frame("event", 1, stranger, row.token, 2, ENDS.index("succeeded"))
            yield Step(
                f"executor {stranger} reports success under the other's token {row.token}",
                self._send(world._replace(strangers=world.strangers - 1), frame),
            )

    # ------------------------------------------------------------ schedulers

    def _scheduler_steps(self, world: World, number: int) -> Iterator[Step[World]]:
        scheduler = world.schedulers[number - 1]
        if not scheduler.alive:
            yield Step(f"scheduler {number} starts again", _with_scheduler(world, number, Scheduler()))
            return
        yield from self._grants(world, number)
        if scheduler.inbox is not None:
            yield self._commit(
                _with_scheduler(world, number, scheduler._replace(inbox=None)), scheduler.inbox
            )

    def _sweep(self, world: World) -> Iterator[Step[World]]:
        row = world.row
        if world.found:
            yield self._reclaim(world)
        elif row.place in HELD_STATES and any(scheduler.alive for scheduler in world.schedulers):
            overdue = not row.accepted and row.left < LEASE_TICKS
            if self._has("reclaim") and (row.left == 0 or overdue):
                yield Step(f"a sweep finds token {row.token} to take back", world._replace(found=row.token))

    def _grants(self, world: World, number: int) -> Iterator[Step[World]]:
        row = world.row
        if row.place not in sources(StepEvent.LEASE) or row.token >= self._bounds.grants:
            return
        for name, executor in enumerate(world.executors, 1):
            if executor.session != number or executor.job is not None or (not row.token and name == 2):
                continue  # the first grant is to executor 1: the other half of the states looks the same
            granted = row._replace(
                place=transition(row.place, StepEvent.LEASE),
                token=row.token + 1,
                owner=name,
                left=LEASE_TICKS,
                accepted=False,
                started=False,
                last=0,
                gaps=0,
            )
            yield Step(
                f"scheduler {number} grants token {granted.token} to executor {name}",
                self._send(world._replace(row=granted), Frame("job", number, name, granted.token)),
            )

    def _facts(self, row: Row) -> LeaseFacts:
        return LeaseFacts(
            step_run_id="step",
            workflow_run_id="run",
            lease_token=row.token,
            attempt=row.token,
            failures=row.failures,
            free_endings=0,
            executor_id=str(row.owner),
            granted_on=date.min,
            accepted=row.accepted,
            started=row.started,
            last_sequence=row.last,
            gaps=row.gaps,
            cancel_reason=Code.CANCELLED if row.cancel and self._has("cancel before retry") else None,
            expired=row.left == 0,
            accept_overdue=row.left < LEASE_TICKS,
            step_name="step",
            idempotency_key="key",
        )

    def _is_current(self, row: Row, token: int, executor: int | None) -> bool:
        is_held = row.place in HELD_STATES or (not self._has("terminal") and row.place in TERMINAL)
        is_token = token == row.token or not self._has("token")
        is_owner = executor in (None, row.owner) or not self._has("owner")
        # Without the token's guard the owner's would still refuse: the same executor may hold both.
        return is_held and is_token and (is_owner or not self._has("token"))

    def _applied(
        self, row: Row, token: int, executor: int | None, words: tuple[Word, ...]
    ) -> tuple[Row, Decision]:
        known = frozenset(sequence for held, sequence in row.stored if held == token and sequence <= row.last)
        decision = _decided(self._facts(row), words, known)
        stored = row.stored | {(token, report.sequence) for report in decision.stored}
        row = row._replace(
            stored=stored,
            accepted=row.accepted or decision.accept,
            started=row.started or decision.start,
            last=decision.last_sequence,
            gaps=decision.gaps,
        )
        if decision.accept and not decision.lease.accepted:
            row = row._replace(left=LEASE_TICKS)
        if row.started and row.place is StepState.LEASED:
            row = row._replace(place=transition(row.place, StepEvent.START))
        closing = decision.closing
        if closing is not None:
            row = row._replace(
                place=closing.to,
                failures=closing.failures,
                left=0,
                accepted=False,
                started=False,
                last=0,
                gaps=0,
            )
            if closing.to in TERMINAL:
                row = row._replace(result=(closing.to, token, row.owner if executor is None else executor))
        return row, decision

    def _commit(self, world: World, frame: Frame) -> Step[World]:
        """Commit what the scheduler has in its hands, then answer."""
        row = world.row
        number = frame.scheduler
        if frame.kind == "release":
            label = f"scheduler {number} releases token {frame.token}, which executor {frame.executor} does not hold"
            if not self._is_current(row, frame.token, None):
                return Step(f"{label}: too late", world)
            code = Code.LEASE_EXPIRED if row.accepted else Code.DISPATCH_LOST
            row, _ = self._applied(row, frame.token, None, ((code, Guard.NONE),))
            return Step(label, world._replace(row=row))
        name = ENDS[frame.b]
        label = f"scheduler {number} commits `{name}` of executor {frame.executor} under token {frame.token}"
        if self._is_current(row, frame.token, frame.executor):
            row, decision = self._applied(row, frame.token, frame.executor, ((frame.a, frame.b),))
            world = world._replace(row=row)
            if not self._has("ack after commit"):
                return Step(label, world)
            missing = 1 if decision.last_sequence == 2 and (frame.token, 1) not in row.stored else 0
            ack = Frame("ack", number, frame.executor, frame.token, decision.last_sequence, missing)
            return Step(f"{label}, and acknowledges it", self._answer(world, ack))
        is_mine = (frame.token, frame.a) in row.stored
        if is_mine and self._has("late is classified"):
            ack = Frame(
                "ack", number, frame.executor, frame.token, frame.a, (frame.token, 1) not in row.stored
            )
            return Step(f"{label}: stored already", self._answer(world, ack))
        broken = "what is stored is not called lost" if is_mine else ""
        lost = Frame("lost", number, frame.executor, frame.token)
        return Step(f"{label}: the lease is lost", self._answer(world, lost), broken=broken)

    def _reclaim(self, world: World) -> Step[World]:
        token = world.found
        world = world._replace(found=0)
        label = f"the sweep takes back token {token}"
        if not self._is_current(world.row, token, None):
            return Step(f"{label}: too late", world)
        words: tuple[Word, ...] = (
            (Code.DISPATCH_LOST, Guard.UNACCEPTED if self._has("acceptance") else Guard.NONE),
            (Code.LEASE_EXPIRED, Guard.EXPIRED if self._has("expiry") else Guard.NONE),
        )
        row, decision = self._applied(world.row, token, None, words)
        return Step(label if decision.closing else f"{label}: no reason any more", world._replace(row=row))

    # ------------------------------------------------------------ executors

    def _executor_steps(self, world: World, number: int) -> Iterator[Step[World]]:
        executor = world.executors[number - 1]
        if executor.frozen:
            yield Step(
                f"executor {number} thaws", _with_executor(world, number, executor._replace(frozen=False))
            )
        job = executor.job
        if job is not None and job.phase == "running" and job.age >= FENCE_TICKS and self._has("fence"):
            who = "warden" if executor.frozen else "supervisor"
            yield Step(
                f"the {who} of executor {number} stops the handler: its lease is not certain",
                _with_job(world, number, _ended(job, "fenced")),
            )
        if job is not None and job.phase == "running":
            for end in ("succeeded", "failed"):
                yield Step(
                    f"the handler on executor {number} ends: {end}",
                    _with_job(world, number, _ended(job, end)),
                )
        if not executor.alive or executor.frozen:
            return
        if executor.session == 0:
            for scheduler in self._bounds.dials:
                if world.schedulers[scheduler - 1].alive:
                    held, last = (job.token, 2 if job.last else 1) if job else (0, 0)
                    hello = Frame("hello", scheduler, number, held, last, dial=executor.dials + 1)
                    dialling = executor._replace(session=-scheduler, dials=executor.dials + 1)
                    yield Step(
                        f"executor {number} dials scheduler {scheduler}, holding {_shown(held)}",
                        self._send(_with_executor(world, number, dialling), hello),
                    )
        if executor.session > 0 and job is not None and self._has_room(world):
            yield from self._sends(world, number, executor, job)

    def _sends(self, world: World, number: int, executor: Executor, job: Job) -> Iterator[Step[World]]:
        if job.first == "unsent":
            frame = Frame("event", executor.session, number, job.token, 1, 0, executor.dials)
            sent = job._replace(first="sent", accepted_age=max(0, job.accepted_age))
            yield Step(
                f"executor {number} sends `accepted`", self._send(_with_job(world, number, sent), frame)
            )
        elif job.last == "unsent":
            frame = Frame(
                "event", executor.session, number, job.token, 2, ENDS.index(job.end), executor.dials
            )
            sent = job._replace(last="sent")
            yield Step(
                f"executor {number} sends `{job.end}`", self._send(_with_job(world, number, sent), frame)
            )
        if (
            job.phase != "accepting"
            and job.age
            and not any(frame.kind.startswith("beat") and frame.executor == number for frame in world.net)
        ):
            beat = Frame("beat", executor.session, number, job.token, dial=executor.dials)
            yield Step(f"executor {number} sends a heartbeat", self._send(world, beat))

    # ------------------------------------------------------------ frames

    def _has_room(self, world: World) -> bool:
        return sum(frame.kind != "hello" for frame in world.net) < self._bounds.frames

    def _send(self, world: World, frame: Frame) -> World:
        """Answers always find room: what is bounded is how many are under way when somebody begins to speak."""
        return world._replace(net=tuple(sorted((*world.net, frame))))

    def _answer(self, world: World, frame: Frame) -> World:
        """To an executor whose stream has ended nothing gets through."""
        executor = world.executors[frame.executor - 1]
        wanted = executor.session == frame.scheduler
        if frame.kind == "welcome":
            wanted = (executor.session, executor.dials) == (-frame.scheduler, frame.dial)
        return self._send(world, frame) if wanted else world

    def _arrivals(self, world: World, frame: Frame) -> Iterator[Step[World]]:
        """The frame arrives. Frames overtake one another: old ones of an earlier session come late."""
        rest = list(world.net)
        rest.remove(frame)
        after = world._replace(net=tuple(rest))
        if frame.kind in ("event", "beat", "hello"):
            scheduler = world.schedulers[frame.scheduler - 1]
            if not scheduler.alive:
                return
            scheduler, after = self._heard(after, scheduler, frame)
            step = {"event": self._on_event, "beat": self._on_beat, "hello": self._on_hello}[frame.kind]
            yield from step(after, scheduler, frame)
            return
        executor = world.executors[frame.executor - 1]
        wanted = -frame.scheduler if frame.kind == "welcome" else frame.scheduler
        if executor.alive and not executor.frozen and executor.session == wanted:
            yield self._on_answer(after, executor, frame)

    def _heard(self, world: World, scheduler: Scheduler, frame: Frame) -> tuple[Scheduler, World]:
        """A frame after Hello: the executor speaks in this session, so what it did not list it does not hold."""
        wanted = [
            known for known in scheduler.unlisted if known[2] == frame.executor and known.dial == frame.dial
        ]
        if frame.kind == "hello" or not wanted or scheduler.inbox is not None:
            return scheduler, world
        rest = tuple(known for known in scheduler.unlisted if known not in wanted)
        scheduler = scheduler._replace(inbox=wanted[0], unlisted=rest)
        return scheduler, _with_scheduler(world, frame.scheduler, scheduler)

    def _on_event(self, world: World, scheduler: Scheduler, frame: Frame) -> Iterator[Step[World]]:
        if self._has("ack after commit"):
            yield self._commit(world, frame)
        elif scheduler.inbox is None:
            number = frame.scheduler
            after = _with_scheduler(world, number, scheduler._replace(inbox=frame))
            ack = Frame("ack", number, frame.executor, frame.token, frame.a)
            label = f"scheduler {number} receives event {frame.a} of token {frame.token}, and acknowledges it"
            yield Step(label, self._answer(after, ack))

    def _on_beat(self, world: World, scheduler: Scheduler, frame: Frame) -> Iterator[Step[World]]:
        row = world.row
        number = frame.scheduler
        label = f"scheduler {number} renews token {frame.token} for executor {frame.executor}"
        if not frame.token:
            yield Step(f"scheduler {number} hears that executor {frame.executor} is there", world)
            return
        by_token = row.token == frame.token and row.owner == frame.executor
        if row.place in HELD_STATES and (by_token or not self._has("renewal by token")):
            answer = Frame("beat answer", number, frame.executor, frame.token, frame.a, int(row.cancel))
            after = world._replace(row=row._replace(left=LEASE_TICKS))
            yield Step(label, self._answer(after, answer))
        else:
            lost = Frame("lost", number, frame.executor, frame.token)
            yield Step(f"{label}: lost", self._answer(world, lost))

    def _on_hello(self, world: World, scheduler: Scheduler, frame: Frame) -> Iterator[Step[World]]:
        row = world.row
        number = frame.scheduler
        if scheduler.inbox is not None:
            return
        held = row.place in HELD_STATES and row.owner == frame.executor
        label = f"scheduler {number} welcomes executor {frame.executor}, which holds {_shown(frame.token)}"
        acked, flags = 0, 0
        if frame.token:
            newest = max((sequence for token, sequence in row.stored if token == frame.token), default=0)
            if held and row.token == frame.token:
                acked, flags = newest, int(row.cancel) * 2
            elif newest == 2:
                acked = newest
            else:
                acked = -1
            flags += newest == 2 and (frame.token, 1) not in row.stored
        if held and row.token != frame.token:
            release = Frame("release", number, frame.executor, row.token, dial=frame.dial)
            if self._has("present at release"):
                scheduler = scheduler._replace(unlisted=(release,))
                flags += 4
            else:
                scheduler = scheduler._replace(inbox=release)
            world = _with_scheduler(world, number, scheduler)
            label += f", and has token {row.token} to release"
        welcome = Frame("welcome", number, frame.executor, frame.token, acked, flags, frame.dial)
        yield Step(label, self._answer(world, welcome))

    def _on_answer(self, world: World, executor: Executor, frame: Frame) -> Step[World]:
        number = frame.executor
        job = executor.job
        label = (
            f"executor {number} hears `{frame.kind}` of token {frame.token} from scheduler {frame.scheduler}"
        )
        if frame.kind == "welcome":
            executor = executor._replace(session=frame.scheduler)
            world = _with_executor(world, number, executor)
            label = f"executor {number} is welcome at scheduler {frame.scheduler}"
            if frame.b & 4:
                present = Frame("beat", frame.scheduler, number, 0, dial=executor.dials)
                world = self._send(world, present)
        if frame.kind == "job":
            if job is not None:
                return Step(f"{label}, and has no room", world)
            begun = Job(frame.token)
            if not self._has("start after ack"):
                begun = begun._replace(phase="running", age=0)
            return Step(label, _with_job(world, number, begun))
        if job is None or job.token != frame.token:
            return Step(label, world)
        after: Job | None = job
        match frame.kind:
            case "ack":
                after = self._acked(job, frame.a, bool(frame.b))
            case "beat answer":
                after = self._begun(job._replace(age=min(job.age, frame.a)))
                if frame.b:
                    after = _ended(after, "cancelled")
            case "lost":
                after = None
            case "welcome" if frame.a < 0:
                after = None
            case "welcome":
                after = self._acked(job, frame.a, bool(frame.b & 1))
                if after is not None and frame.b & 2:
                    after = _ended(after, "cancelled")
        return Step(label, _with_job(world, number, after))

    def _acked(self, job: Job, sequence: int, is_first_missing: bool) -> Job | None:
        """What an acknowledgement changes; None: all is said."""
        first, last = job.first, job.last
        if sequence >= 1 and first != "acked":
            first = "unsent" if is_first_missing else "acked"
        if sequence >= 2 and last:
            last = "acked"
        was_accepted = first == "acked" and job.phase == "accepting"
        job = job._replace(first=first, last=last)
        if was_accepted:
            job = self._begun(job._replace(phase="accepted", age=min(job.age, job.accepted_age)))
        return None if first == last == "acked" else job

    def _begun(self, job: Job) -> Job:
        is_certain = job.age < FENCE_TICKS
        if job.phase == "accepted" and (is_certain or not self._has("certain at start")):
            return job._replace(phase="running")
        return job

    # ------------------------------------------------------------ faults

    def _faults(self, world: World) -> Iterator[Step[World]]:
        kinds = self._bounds.fault_kinds
        fewer = world._replace(faults=world.faults - 1)
        for number in self._bounds.victims:
            scheduler, executor = world.schedulers[number - 1], world.executors[number - 1]
            if "scheduler crash" in kinds and scheduler.alive:
                yield Step(f"scheduler {number} crashes", self._scheduler_down(fewer, number), is_fault=True)
            if "executor crash" in kinds and executor.alive and executor.job is not None:
                dead = _with_executor(fewer, number, Executor(alive=False))
                yield Step(
                    f"executor {number} crashes", _without_answers(dead, executor=number), is_fault=True
                )
            if "freeze" in kinds and executor.alive and not executor.frozen and executor.job is not None:
                frozen = _with_executor(fewer, number, executor._replace(frozen=True))
                yield Step(f"executor {number} freezes", frozen, is_fault=True)
            if "cut" in kinds and (executor.session < 0 or executor.job is not None):
                yield Step(f"executor {number} is cut off", self._cut(fewer, number), is_fault=True)
        for frame in dict.fromkeys(world.net):
            if "loss" in kinds and frame.kind in ("job", "lost", "beat", "beat answer"):
                rest = list(world.net)
                rest.remove(frame)
                yield Step(f"`{frame.kind}` is lost", fewer._replace(net=tuple(rest)), is_fault=True)
            if "repeat" in kinds and frame.kind in ("event", "beat", "ack"):
                yield Step(f"`{frame.kind}` is there twice", self._send(fewer, frame), is_fault=True)

    def _cut(self, world: World, number: int) -> World:
        """The session ends: answers are gone, and what the executor had said may still arrive."""
        executor = world.executors[number - 1]
        job = executor.job
        if job is not None and self._has("resend"):
            job = job._replace(
                first="unsent" if job.first == "sent" else job.first,
                last="unsent" if job.last == "sent" else job.last,
            )
        world = _with_executor(world, number, executor._replace(session=0, job=job))
        return _without_answers(world, executor=number)

    def _scheduler_down(self, world: World, number: int) -> World:
        world = _with_scheduler(world, number, Scheduler(alive=False))
        for name, executor in enumerate(world.executors, 1):
            if abs(executor.session) == number:
                world = self._cut(world, name)
        return world._replace(net=tuple(frame for frame in world.net if frame.scheduler != number))


def _older(age: int) -> int:
    return age if age < 0 else min(LEASE_TICKS, age + 1)


def _aged(executor: Executor) -> Executor:
    job = executor.job
    if job is None:
        return executor
    return executor._replace(job=job._replace(age=_older(job.age), accepted_age=_older(job.accepted_age)))


def _shown(token: int) -> str:
    return f"token {token}" if token else "nothing"


def _ended(job: Job, end: str) -> Job:
    return job if job.phase == "ended" else job._replace(phase="ended", last="unsent", end=end)


def _with_scheduler(world: World, number: int, scheduler: Scheduler) -> World:
    first, second = world.schedulers
    return world._replace(schedulers=(scheduler, second) if number == 1 else (first, scheduler))


def _with_executor(world: World, number: int, executor: Executor) -> World:
    first, second = world.executors
    return world._replace(executors=(executor, second) if number == 1 else (first, executor))


def _with_job(world: World, number: int, job: Job | None) -> World:
    return _with_executor(world, number, world.executors[number - 1]._replace(job=job))


def _without_answers(world: World, *, executor: int) -> World:
    net = (
        frame for frame in world.net if frame.executor != executor or frame.kind in ("event", "beat", "hello")
    )
    return world._replace(net=tuple(net))
