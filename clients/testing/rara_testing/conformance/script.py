"""The verbs of scenarios, played against one executor."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from rara.v1 import common_pb2, dispatch_pb2, job_pb2

from rara_testing.conformance.scenario import Scenario, ScenarioInvalid, Way
from rara_testing.conformance.target import SECRET_NAME, STOP_S, Target, TargetFailed
from rara_testing.scripted_scheduler import ScriptedScheduler, Session, blob_artifact, digest_of, job

PATIENCE_S: Final = 10.0  # how long a step waits, where it does not say
HEARTBEAT_S: Final = 0.4
SILENCE_S: Final = 4.0
LEASE_S: Final = 30.0


class Broken(Exception):
    """The executor did not do what a step expects."""


@dataclass
class Behaviour:
    """What a scenario may say under `scheduler`.

    acknowledge: store and acknowledge events by itself. beat: answer heartbeats. renew: with a renewal.
    Sizes in bytes, times in seconds.
    """

    acknowledge: bool = True
    beat: bool = True
    renew: bool = True
    heartbeat_s: float = HEARTBEAT_S
    silence_s: float = SILENCE_S
    event_window: int = 1000
    max_payload_bytes: int = 1 << 20
    max_inline_bytes: int = 16 << 10
    refuse: dict[str, str] = field(default_factory=dict)  # an event's name: the code, for the first one of it


class Script:
    """Plays one scenario. base: added to every token."""

    def __init__(
        self,
        scenario: Scenario,
        scheduler: ScriptedScheduler,
        target: Target,
        *,
        base: int,
        meet: Callable[[], Awaitable[Session]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._scenario = scenario
        self._scheduler = scheduler
        self._target = target
        self.base = base
        self._meet = meet
        self._patience_s = patience_s
        self._leases: dict[int, job_pb2.Lease] = {}
        self.jobs_sent: dict[int, int] = {}  # by the session's place
        self.ended_process = False
        self.first_session = 0  # its place among the scheduler's
        try:
            self._behaviour = Behaviour(**dict(scenario.scheduler))
        except TypeError as error:
            raise ScenarioInvalid(f"{scenario.name}: scheduler: {error}") from None

    async def play(self) -> None:
        """Raises Broken with the step that was not kept."""
        self._apply(self._behaviour)
        await self._next_session()
        self.first_session = self._scheduler.sessions.index(self._session)
        for number, step in enumerate(self._scenario.steps, 1):
            verb = getattr(self, f"do_{step.verb}", None)
            if verb is None:
                raise ScenarioInvalid(f"{self._scenario.name}: step {number}: no verb {step.verb!r}")
            try:
                # A list is one thing that the verb takes whole; a mapping names its parts.
                await (verb(**step.given) if isinstance(step.given, Mapping) else verb(step.given))
            except (
                AssertionError,
                TargetFailed,
                ValueError,
            ) as error:  # ValueError: no JSON where it should be
                text = str(error).partition("\n")[0] or "not kept"
                raise Broken(f"step {number}, {step.verb} {json.dumps(step.given)}: {text}") from None
            except TypeError as error:
                raise ScenarioInvalid(f"{self._scenario.name}: step {number}: {error}") from error

    def _apply(self, behaviour: Behaviour) -> None:
        scheduler = self._scheduler
        scheduler.terms.heartbeat_s = behaviour.heartbeat_s
        scheduler.terms.silence_s = behaviour.silence_s
        scheduler.terms.event_window = behaviour.event_window
        scheduler.terms.max_payload_bytes = behaviour.max_payload_bytes
        scheduler.terms.max_inline_bytes = behaviour.max_inline_bytes
        scheduler.beat, scheduler.renew = behaviour.beat, behaviour.renew
        acknowledges = behaviour.acknowledge
        scheduler.acknowledge = lambda _: acknowledges
        refusals = dict(behaviour.refuse)

        def refuse(event: job_pb2.ProgressEvent) -> dispatch_pb2.EventRefusal | None:
            code = refusals.pop(event.WhichOneof("event") or "", None)
            return (
                None if code is None else dispatch_pb2.EventRefusal(code=code, message="the script says so")
            )

        scheduler.refuse = refuse

    async def _next_session(self) -> None:
        self._session = await self._meet()

    # ---------------------------------------------------------------- what the scheduler does

    async def do_jobs(self, jobs: list[dict[str, Any]]) -> None:
        """Send jobs in one batch."""
        requests = [self._job(**given) for given in jobs]
        self._session.send_jobs(*requests)
        place = self._scheduler.sessions.index(self._session)
        self.jobs_sent[place] = self.jobs_sent.get(place, 0) + len(requests)

    def _job(
        self,
        token: int,
        kind: str,
        lease_s: float = LEASE_S,
        artifacts: tuple[dict[str, Any], ...] = (),
        secret: bool = False,
        **more: Any,
    ) -> job_pb2.JobRequest:
        """secret: hand the planted one over, as `probe`. artifacts: {name, text, inline, but}."""
        request = job(
            token + self.base,
            kind,
            lease_s=lease_s,
            artifacts=tuple(self._artifact(**given) for given in artifacts),
            secrets={"probe": common_pb2.SecretRef(provider="env", name=SECRET_NAME)} if secret else None,
            **more,
        )
        request.executor_kind = self._session.hello.executor_kind
        self._leases[token] = request.lease
        return request

    def _artifact(
        self, name: str, text: str, inline: bool = False, but: str | None = None
    ) -> common_pb2.Artifact:
        """but: the bytes that come in the place of those that the digest names."""
        artifact = blob_artifact(name, text.encode(), inline=inline)
        given = (text if but is None else but).encode()
        if inline:
            artifact.inline = given
        else:
            self._scheduler.blobs.blobs[artifact.digest.sha256] = given
        return artifact

    async def do_acknowledge(self, token: int, through: int, missing: tuple[int, ...] = ()) -> None:
        """Acknowledge a lease's events up to a number, but for the missing ones."""
        self._session.acknowledge(token + self.base, through, tuple(missing))

    async def do_acknowledge_all(self) -> None:
        """From here on store and acknowledge by itself, what came before included."""
        self._scheduler.acknowledge = lambda _: True
        for token in self._leases:
            seen = self._events(token)
            for event in seen:
                self._scheduler.stored.setdefault(token + self.base, {})[event.sequence] = event
            if seen:
                self._session.acknowledge(token + self.base, max(event.sequence for event in seen))

    async def do_refuse(self, token: int, sequence: int, code: str, size: int = 0) -> None:
        """Refuse one event. size: of the probe's artifact, whose digest the refusal names."""
        refusal = dispatch_pb2.EventRefusal(lease_token=token + self.base, sequence=sequence, code=code)
        if size:
            refusal.digests.append(digest_of(pattern(size)))
        self._session.send(acks=dispatch_pb2.EventAcks(refusals=[refusal]))

    async def do_lose(self, tokens: list[int]) -> None:
        """From here on these leases are somebody else's."""
        self._scheduler.lost |= {token + self.base for token in tokens}

    async def do_cancel(self, token: int, reason: str = "CANCELLED", grace_s: float = 1.0) -> None:
        self._session.cancel_job(token + self.base, reason=reason, grace_s=grace_s)

    async def do_renew_nothing(self) -> None:
        """From here on answer heartbeats without a renewal."""
        self._scheduler.renew = False

    async def do_silence(self) -> None:
        """Say nothing more, and renew nothing."""
        self._scheduler.beat = self._scheduler.renew = False
        self._scheduler.acknowledge = lambda _: False

    async def do_speak(self) -> None:
        """Undo silence."""
        self._apply(self._behaviour)

    async def do_cut(self, status: str = "UNAVAILABLE") -> None:
        """End the session without a word, as a lost connection does, or with another status."""
        self._session.end(grpc.StatusCode[status])

    async def do_drain(self, finish_within_s: float | None = None) -> None:
        """Ask the executor to drain."""
        drain = dispatch_pb2.Drain()
        if finish_within_s is not None:
            drain.finish_within.FromNanoseconds(int(finish_within_s * 1e9))
        self._session.send(drain=drain)

    async def do_go_away(self, reason: str = "SHUTTING_DOWN", reconnect_after_s: float = 0.1) -> None:
        """Send the executor away, and end the session."""
        away = dispatch_pb2.GoAway(reason=reason)
        away.reconnect_after.FromNanoseconds(int(reconnect_after_s * 1e9))
        self._session.send(go_away=away)

    async def do_unknown_frame(self) -> None:
        """Send a frame of a kind that does not exist yet, and one with a field and an enum value more."""
        self._session.send_raw(dispatch_pb2.ConnectResponse.FromString(b"\xfa\x07\x03new"))
        strange = dispatch_pb2.ConnectResponse(acks=dispatch_pb2.EventAcks())
        strange.acks.MergeFromString(b"\xfa\x07\x03new")
        self._session.send_raw(strange)

    async def do_signal(self, name: str) -> None:
        """TERM, KILL, STOP or CONT to the executor's process."""
        self._target.signal(name)
        self.ended_process = self.ended_process or name in {"TERM", "KILL"}

    # ---------------------------------------------------------------- what the executor must do

    def _events(self, token: int) -> list[job_pb2.ProgressEvent]:
        number = token + self.base
        return [
            event
            for session in self._scheduler.sessions
            for event in session.events
            if event.lease.lease_token == number
        ]

    async def _until(self, ask: Callable[[], Any], what: str, within_s: float | None) -> Any:
        within_s = self._patience_s if within_s is None else within_s
        try:
            return await self._scheduler.until(ask, what, bound_s=within_s)
        except AssertionError:
            seen = {
                token: [event.WhichOneof("event") for event in self._events(token)] for token in self._leases
            }
            raise AssertionError(f"no {what} within {within_s:g} s; events: {seen}") from None

    async def do_event(
        self,
        token: int,
        sequence: int | None = None,
        times: int = 1,
        last: bool = False,
        within_s: float | None = None,
        **facts: Any,
    ) -> None:
        """An event of the lease comes, for the so many-eth time, and has these facts; `is` names its kind.

        last: the newest of the kind that is there has them.
        """
        kind = str(facts.pop("is"))

        def found() -> list[job_pb2.ProgressEvent]:
            return [
                event
                for event in self._events(token)
                if event.WhichOneof("event") == kind and sequence in (None, event.sequence)
            ]

        await self._until(lambda: len(found()) >= times, f"{kind} of {token} (time {times})", within_s)
        event = found()[-1 if last else times - 1]
        lease = self._leases[token]
        assert event.lease == lease, f"its lease is {event.lease}, not {lease}"
        _check(event, kind, facts)

    async def do_quiet(self, token: int, for_s: float, ignoring: tuple[str, ...] = ()) -> None:
        """No event with a new number comes for so long, but for those to be ignored."""

        def numbers() -> set[int]:
            return {e.sequence for e in self._events(token) if e.WhichOneof("event") not in ignoring}

        before = numbers()
        await asyncio.sleep(for_s)
        new = numbers() - before
        kinds = [e.WhichOneof("event") for e in self._events(token) if e.sequence in new]
        assert not new, f"{', '.join(map(str, kinds))} came"

    async def do_heartbeat(
        self,
        lists: tuple[int, ...] = (),
        leaves_out: tuple[int, ...] = (),
        answered: bool = False,
        within_s: float | None = None,
    ) -> None:
        """A new heartbeat lists these leases and not those; answered: it says that our answers arrive."""
        seen = len(self._session.of("heartbeat"))
        listed = {token + self.base for token in lists}
        left_out = {token + self.base for token in leaves_out}

        def fits(beat: dispatch_pb2.Heartbeat) -> bool:
            named = set(beat.lease_tokens)
            return listed <= named and not left_out & named and (not answered or beat.answered > 0)

        await self._until(
            lambda: any(fits(beat) for beat in self._session.of("heartbeat")[seen:]),
            "heartbeat like that",
            within_s,
        )

    async def do_rejection(self, token: int, code: str, within_s: float | None = None) -> None:
        """The job is refused before anything of it has run."""

        def rejected() -> list[str]:
            return [
                rejection.code
                for session in self._scheduler.sessions
                for batch in session.of("rejections")
                for rejection in batch.rejections
                if rejection.lease.lease_token == token + self.base
            ]

        await self._until(rejected, f"rejection of {token}", within_s)
        assert rejected()[0] == code, f"its code is {rejected()[0]}"
        kinds = [event.WhichOneof("event") for event in self._events(token)]
        assert "running" not in kinds, "it ran all the same"

    async def do_receipt(self, token: int, within_s: float | None = None) -> None:
        """The executor says that the cancel request has arrived."""

        def received() -> bool:
            number = token + self.base
            return any(
                number in receipts.lease_tokens
                for session in self._scheduler.sessions
                for receipts in session.of("cancel_receipts")
            )

        await self._until(received, f"receipt for {token}", within_s)

    async def do_hello(
        self,
        holds: tuple[int, ...] = (),
        finished: tuple[int, ...] = (),
        within_s: float | None = None,
    ) -> None:
        """The executor is met again, and says exactly what it holds. finished: those of which the handler has ended."""
        try:
            async with asyncio.timeout(self._patience_s if within_s is None else within_s):
                await self._next_session()
        except TimeoutError:
            raise AssertionError("it did not come back") from None
        mine = {lease.lease_token: token for token, lease in self._leases.items()}
        held = {
            mine[h.lease.lease_token]: h
            for h in self._session.hello.held_jobs
            if h.lease.lease_token in mine  # not what an earlier scenario has left
        }
        assert sorted(held) == sorted({*holds, *finished}), f"it holds {sorted(held)}"
        ended = sorted(token for token, h in held.items() if h.finished)
        assert ended == sorted(finished), f"finished are {ended}"

    async def do_credit(self, limit: int, within_s: float | None = None) -> None:
        """So many jobs are allowed since the session began."""
        await self._until(
            lambda: any(credit.limit >= limit for credit in self._session.of("credit")),
            f"credit of {limit}",
            within_s,
        )

    async def do_offers(self, kinds: list[str], versions: tuple[str, ...] = ("1.0.0",)) -> None:
        """Hello names the executor and what it can run."""
        hello = self._session.hello
        assert hello.protocol_version == 1, f"protocol_version is {hello.protocol_version}"
        assert hello.executor_id, "executor_id is empty"
        assert hello.executor_name, "executor_name is empty"
        assert hello.executor_kind, "executor_kind is empty"
        offered = {c.kind: set(c.versions) for c in hello.capabilities}
        for kind in kinds:
            assert set(versions) <= offered.get(kind, set()), f"{kind} is not offered in {versions}"

    async def do_drained(self, within_s: float | None = None) -> None:
        """The executor says that it takes no new job."""
        await self._until(lambda: self._session.of("drain"), "drain", within_s)

    async def do_goodbye(self, within_s: float | None = None) -> None:
        """Where it dials: the session ends with Goodbye. Where it is dialled there is none."""
        if self._target.way is Way.SESSION:
            await self._until(lambda: self._session.of("goodbye"), "goodbye", within_s)
            self.ended_process = True

    async def do_blob(self, text: str = "", size: int = 0) -> None:
        """These bytes (or the probe's pattern of that size) are in the blob store."""
        data = text.encode() or pattern(size)
        assert digest_of(data).sha256 in self._scheduler.blobs.blobs, "the blob store does not have them"

    async def do_fail_blobs(self, statuses: list[str]) -> None:
        """The next calls of the artifact service end with these statuses, one each."""
        self._scheduler.blobs.fail = [grpc.StatusCode[name] for name in statuses]

    async def do_drop_blobs(self) -> None:
        """The blob store loses all that it has."""
        self._scheduler.blobs.blobs.clear()

    async def do_exit(self, code: int = 0, within_s: float = STOP_S + 5.0) -> None:
        """The process ends with this code."""
        self.ended_process = True
        found = await self._target.exit_code(within_s)
        assert found == code, f"its exit code is {found}"


def pattern(size: int) -> bytes:
    """The bytes that `probe.artifact` makes."""
    return bytes(number % 251 for number in range(size))


def _check(event: job_pb2.ProgressEvent, kind: str, facts: dict[str, Any]) -> None:
    body = getattr(event, kind)
    for name, wanted in facts.items():
        given = _fact(body, name)
        if name in _PARTS:
            assert _PARTS[name](given, wanted), f"{name}: {given!r} does not have {wanted!r}"
        elif isinstance(wanted, list) and name == "code":
            assert given in wanted, f"code is {given!r}, not one of {wanted!r}"
        else:
            assert given == wanted, f"{name} is {given!r}, not {wanted!r}"


_PARTS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "message_has": lambda given, wanted: wanted in given,
    "message_at_most": lambda given, wanted: len(given.encode()) <= wanted,
    "stack_trace_has": lambda given, wanted: wanted in given,
    "artifacts": lambda given, wanted: [[a.name, a.digest.size_bytes] for a in given] == wanted,
}


def _fact(body: Any, name: str) -> Any:
    """A fact of an event's body by the name that scenarios use."""
    error = body.error if hasattr(body, "error") else body
    match name:
        case "output":
            return json.loads(body.output.data)
        case "checkpoint":
            return json.loads(body.checkpoint.data)
        case "retryable":
            return error.retryable if error.HasField("retryable") else None
        case "message_has" | "message_at_most":
            return error.message
        case "stack_trace_has":
            return error.stack_trace
        case "artifacts":
            return body.manifest.artifacts
        case "code":
            return error.code
        case _:
            return getattr(body, name)
