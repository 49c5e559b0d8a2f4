"""Playing scenarios one after the other against one executor, and judging each."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import grpc
import grpc.aio
from rara.v1 import dispatch_pb2, executor_pb2, executor_pb2_grpc
from rara_scheduler.transport.direct import DirectLink

from rara_testing.conformance import rules
from rara_testing.conformance.scenario import Scenario, Way, scenarios
from rara_testing.conformance.script import PATIENCE_S, Broken, Script
from rara_testing.conformance.target import SLOTS, Target, TargetFailed
from rara_testing.scripted_scheduler import ScriptedScheduler, Session

_MEET_S: Final = 30.0  # starting a process included
_TOKENS: Final = 1000  # of each scenario


class Verdict(StrEnum):
    KEPT = "kept"
    BROKEN = "broken"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a scenario went; detail: what was broken, or why it was left out."""

    scenario: Scenario
    way: Way
    verdict: Verdict
    detail: str
    took_s: float


async def verify(
    target: Target,
    *,
    only: Sequence[str] = (),
    patience_s: float = PATIENCE_S,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:
    """Play every scenario, or those named. patience_s: how long a step waits for what it expects.

    Raises TargetFailed when the executor cannot be met at all.
    """
    chosen = [scenario for scenario in scenarios() if not only or scenario.name in only]
    outcomes = []
    async with ScriptedScheduler() as scheduler, contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(target.stop)
        meeting = _Meeting(scheduler, target)
        stack.push_async_callback(meeting.end)
        for number, scenario in enumerate(chosen, 1):
            script = Script(
                scenario,
                scheduler,
                target,
                base=number * _TOKENS,
                meet=meeting.next,
                patience_s=patience_s,
            )
            outcome = await _play(script, scenario, scheduler, target, meeting)
            outcomes.append(outcome)
            on_outcome(outcome)
    return outcomes


async def _play(
    script: Script, scenario: Scenario, scheduler: ScriptedScheduler, target: Target, meeting: "_Meeting"
) -> Outcome:
    started = time.monotonic()

    def outcome(verdict: Verdict, detail: str = "") -> Outcome:
        return Outcome(scenario, target.way, verdict, detail, time.monotonic() - started)

    if target.way not in scenario.ways:
        return outcome(Verdict.LEFT_OUT, f"means nothing for {target.way}")
    if scenario.needs_process and not target.is_ours:
        return outcome(Verdict.LEFT_OUT, "needs --command")
    await meeting.end()
    tokens = range(script.base, script.base + _TOKENS)
    try:
        await script.play()
        frames = [
            (session.frames, script.jobs_sent.get(place, 0))
            for place, session in enumerate(scheduler.sessions)
            if place >= script.first_session
        ]
        slots = SLOTS if target.is_ours else None
        problems = [*rules.broken(frames, tokens, slots=slots), *meeting.reused_ids()]
    except (Broken, TargetFailed) as error:
        problems = [str(error)]
    if problems or script.ended_process:
        await target.stop()
    scheduler.lost |= set(tokens)  # whatever is still held is nobody's concern in the next scenario
    if problems:
        return outcome(Verdict.BROKEN, "; ".join(problems))
    return outcome(Verdict.KEPT)


class _Meeting:
    """Makes the next session, whichever side dials."""

    def __init__(self, scheduler: ScriptedScheduler, target: Target) -> None:
        self._scheduler = scheduler
        self._target = target
        self._session: Session | None = None
        self._channel: grpc.aio.Channel | None = None
        self._link: asyncio.Task[None] | None = None
        self._ids: dict[str, int] = {}  # the process of each executor_id
        self._reused: set[str] = set()

    def reused_ids(self) -> list[str]:
        """Leases belong to one start of a process: an id that comes with a second one inherits what it must not."""
        return [f"executor_id {known} came with a second process" for known in sorted(self._reused)]

    async def next(self) -> Session:
        """Raises TargetFailed when the executor is not met in time."""
        await self._target.start(self._scheduler.address)
        try:
            if self._target.way is Way.SESSION:
                self._session = await self._scheduler.until(
                    self._unmet, "the executor's Hello", bound_s=_MEET_S
                )
            else:
                self._session = await self._dial()
        except (AssertionError, TimeoutError):
            raise TargetFailed(f"was not met within {_MEET_S:g} s\n{self._target.last_words()}") from None
        assert self._session is not None
        if self._target.process is not None:
            pid = self._target.process.pid
            if self._ids.setdefault(self._session.hello.executor_id, pid) != pid:
                self._reused.add(self._session.hello.executor_id)
        return self._session

    def _unmet(self) -> Session | None:
        """A session after the last one, whose Hello is there and whose end is not."""
        sessions = self._scheduler.sessions
        after = 0 if self._session is None else sessions.index(self._session) + 1
        return next((s for s in sessions[after:] if s.frames and not s.ended.is_set()), None)

    async def _dial(self) -> Session:
        await self._end_link()
        self._channel = grpc.aio.insecure_channel(
            self._target.address, options=[("grpc.max_reconnect_backoff_ms", 500)]
        )
        stub = executor_pb2_grpc.ExecutorServiceStub(self._channel)
        answer = await stub.GetCapabilities(
            executor_pb2.GetCapabilitiesRequest(protocol_version=1), timeout=_MEET_S, wait_for_ready=True
        )
        link = DirectLink(self._channel, answer, terms=self._scheduler.terms.message())
        session = Session(self._scheduler)
        self._scheduler.sessions.append(session)
        self._link = asyncio.create_task(_serve(session, link), name="direct session of the script")
        await self._scheduler.until(lambda: session.frames, "capabilities", bound_s=_MEET_S)
        return session

    async def end(self) -> None:
        """End the session without a word."""
        if self._session is not None:
            self._session.end(grpc.StatusCode.UNAVAILABLE)
            await self._session.ended.wait()
        await self._end_link()

    async def _end_link(self) -> None:
        link, self._link = self._link, None
        channel, self._channel = self._channel, None
        if link is not None:
            link.cancel()
            await asyncio.wait([link])
        if channel is not None:
            await channel.close()


class _Cut(Exception):
    """The script has ended the session without a word."""


class _NoContext:
    """What a session's end needs of a server's call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise _Cut(f"{code.name}: {details}")


async def _serve(session: Session, link: DirectLink) -> None:
    """Let the scripted session speak over the link, until either ends."""
    running = asyncio.create_task(link.run(), name="direct link of the script")
    context: Any = _NoContext()
    try:
        with contextlib.suppress(_Cut):
            async with contextlib.aclosing(session.run(_requests(link), context)) as frames:
                async for frame in frames:
                    await link.write(frame)
    finally:
        link.end()
        await asyncio.wait([running])


async def _requests(link: DirectLink) -> AsyncIterator[dispatch_pb2.ConnectRequest]:
    while isinstance(frame := await link.read(), dispatch_pb2.ConnectRequest):
        yield frame


def is_clean(outcomes: Iterable[Outcome]) -> bool:
    return not any(outcome.verdict is Verdict.BROKEN for outcome in outcomes)
