"""The Python executor with one rule of the contract broken, to show that the conformance suite sees it.

    python -m support.broken_executor SCENARIO        then as `rara-executor --module rara_testing.probes`

Each break is named for the scenario that must find it.
"""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from rara.v1 import dispatch_pb2, job_pb2
from rara_executor import app, blob_client, connection, held_job, wire
from rara_executor.artifacts import JobArtifacts
from rara_executor.blob_client import BlobClient
from rara_executor.codes import Code
from rara_executor.job_timers import JobTimers
from rara_executor.lease_clock import LeaseClock, lease_now
from rara_executor.outbox import Outbox
from rara_executor.redaction import Redactor
from rara_executor.runner_protocol import StartJob
from rara_executor.session import Session
from rara_executor.session_side import SessionSide
from rara_executor.slots import NotTaken, Slots
from rara_executor.supervisor import Supervisor

BREAKS: dict[str, Callable[[], None]] = {}
_Patch = Callable[[], None]


def breaks(*scenarios: str) -> Callable[[_Patch], _Patch]:
    def register(patch: _Patch) -> _Patch:
        BREAKS.update(dict.fromkeys(scenarios, patch))
        return patch

    return register


def nothing(*_: Any, **__: Any) -> None:
    """In the place of what should have happened."""


def put(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by one that gets the original first."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        return around(original, *arguments, **named)

    setattr(owner, name, replaced)


def changed_event(method: str, change: Callable[[Any], None]) -> None:
    """Change the body of every event of one kind."""

    def around(original: Any, *arguments: Any, **named: Any) -> job_pb2.ProgressEvent:
        event: job_pb2.ProgressEvent = original(*arguments, **named)
        change(getattr(event, method))
        return event

    wrap(wire.EventFactory, method, around)


@breaks("hello")
def offers_less() -> None:
    wrap(app, "capabilities", lambda original, operations: original(operations)[:-1])


@breaks("life_of_a_job")
def numbers_with_holes() -> None:
    def add(original: Any, self: Outbox, event: job_pb2.ProgressEvent, *more: Any, **named: Any) -> int:
        lane = self._lanes.get(event.lease.lease_token)
        if lane is not None:
            lane.last_sequence += 1
        return int(original(self, event, *more, **named))

    wrap(Outbox, "add", add)


@breaks("nothing_before_accepted_is_acknowledged")
def starts_at_once() -> None:
    def take(original: Any, self: Supervisor, request: job_pb2.JobRequest) -> None:
        original(self, request)
        job = self.jobs.get(request.lease.lease_token)
        if job is not None and job.phase is held_job.Phase.ACCEPTING:
            job.phase = held_job.Phase.ACCEPTED
            job.clock.renewed(lease_now())
            self._begin_if_certain(job)

    wrap(Supervisor, "take", take)


@breaks("progress_is_kept_in_order")
def loses_checkpoints() -> None:
    changed_event("progress", lambda body: body.ClearField("checkpoint"))


@breaks("unacknowledged_events_are_sent_again", "a_finished_result_survives_the_lease")
def forgets_what_was_sent() -> None:
    def rewind(original: Any, self: Outbox) -> None:
        for lane in self._lanes.values():
            for number in [n for n, entry in lane.entries.items() if entry.first_sent_at is not None]:
                self._forget(lane.entries.pop(number))
        original(self)

    wrap(Outbox, "rewind", rewind)


@breaks("missing_numbers_are_sent_again")
def ignores_missing() -> None:
    wrap(Outbox, "acknowledge", lambda original, self, token, sequence, _=(): original(self, token, sequence))


@breaks("a_repeated_job_runs_once")
def accepts_twice() -> None:
    def take(original: Any, self: Supervisor, request: job_pb2.JobRequest) -> None:
        if request.lease.lease_token in self.jobs:
            self._emit(self._events.accepted(request.lease))
        original(self, request)

    wrap(Supervisor, "take", take)


@breaks("an_unknown_kind_is_refused")
def has_no_capacity_for_the_unknown() -> None:
    def take(original: Any, self: Slots, kind: str, version: str, **named: Any) -> Any:
        taken = original(self, kind, version, **named)
        return NotTaken(Code.NO_CAPACITY, taken.message) if isinstance(taken, NotTaken) else taken

    wrap(Slots, "take", take)


@breaks("an_unknown_version_is_refused")
def takes_any_version() -> None:
    def take(original: Any, self: Slots, kind: str, version: str, **named: Any) -> Any:
        known = next((v for k, v in self._operations if k == kind), version)
        return original(self, kind, known, **named)

    wrap(Slots, "take", take)


@breaks("more_jobs_than_slots_are_refused")
def takes_more_than_it_has() -> None:
    def take(original: Any, self: Slots, kind: str, version: str, **named: Any) -> Any:
        self._occupied -= 10
        try:
            return original(self, kind, version, **named)
        finally:
            self._occupied += 10

    wrap(Slots, "take", take)


@breaks("credit_rises_as_slots_come_free")
def never_asks_again() -> None:
    put(Slots, "credit", lambda self: self._slots)


@breaks("unknown_frames_are_ignored")
def dies_of_the_unknown() -> None:
    def read(original: Any, self: Session) -> Any:
        call = self._call

        class Strict:
            def __getattr__(self, name: str) -> Any:
                return getattr(call, name)

            async def read(self) -> Any:
                frame = await call.read()
                if isinstance(frame, dispatch_pb2.ConnectResponse) and not frame.WhichOneof("frame"):
                    raise asyncio.InvalidStateError("a frame that nobody knows")
                return frame

        put(self, "_call", Strict())
        return original(self)

    wrap(Session, "_read", read)
    put(connection.Connection, "run", stop_after_the_first)


async def stop_after_the_first(self: connection.Connection) -> None:
    """One session, and none after it."""
    end = await self._one_session()
    if not end.said_goodbye:
        raise SystemExit(1)


@breaks("an_error_has_its_code_and_flag")
def loses_the_flag() -> None:
    changed_event("failed", lambda body: body.ClearField("retryable"))


@breaks("an_error_without_a_code_leaves_the_flag_out")
def decides_for_the_scheduler() -> None:
    changed_event("failed", lambda body: setattr(body, "retryable", True))


@breaks("a_panic_fails_its_own_job_only")
def has_no_stack() -> None:
    changed_event("failed", lambda body: body.ClearField("stack_trace"))


@breaks("a_message_that_is_not_utf8_arrives")
def drops_odd_messages() -> None:
    changed_event(
        "failed", lambda body: setattr(body, "message", body.message.replace("\N{REPLACEMENT CHARACTER}", ""))
    )


@breaks("a_message_over_the_limit_is_cut")
def cuts_nothing() -> None:
    changed_event("failed", lambda body: setattr(body, "message", "x" * 40_000))


@breaks("an_output_that_cannot_be_stored_fails_the_job")
def has_another_code() -> None:
    changed_event("failed", lambda body: setattr(body, "code", "HANDLER_FAILED"))


@breaks("an_output_over_the_limit_fails_the_job")
def knows_no_limit() -> None:
    def start(original: Any, request: Any, **named: Any) -> StartJob:
        return original(request, **{**named, "max_payload_bytes": 1 << 20})  # type: ignore[no-any-return]

    wrap(wire, "start_message", start)


@breaks("a_refused_result_is_failed_under_its_number")
def fails_under_a_new_number() -> None:
    put(Outbox, "replace", lambda self, event, sequence: self.add(event, lease_now()))


@breaks("cancel")
def gives_no_receipt() -> None:
    put(Session, "receipt", nothing)


@breaks("cancel_before_the_start")
def cancels_only_what_runs() -> None:
    def cancel(original: Any, self: Supervisor, order: dispatch_pb2.CancelJob) -> None:
        job = self.jobs.get(order.lease_token)
        if job is not None and job.phase is held_job.Phase.RUNNING:
            original(self, order)

    wrap(Supervisor, "cancel", cancel)


@breaks("cancel_that_is_ignored")
def only_says_that_it_heard() -> None:
    def cancel(_: Any, self: Supervisor, order: dispatch_pb2.CancelJob) -> None:
        if self.session is not None:
            self.session.receipt(order.lease_token)

    wrap(Supervisor, "cancel", cancel)


@breaks("cancel_by_the_heartbeats_answer")
def confirms_twice() -> None:
    def cancel(original: Any, self: Supervisor, order: dispatch_pb2.CancelJob) -> None:
        job = self.jobs.get(order.lease_token)
        if job is not None and job.stop is not None:
            self._emit(self._events.cancelled(job.lease, order.reason, None, None))
        original(self, order)

    wrap(Supervisor, "cancel", cancel)


@breaks("deadline")
def knows_no_deadline() -> None:
    put(JobTimers, "received", nothing)


@breaks("attempt_timeout")
def knows_no_timeout() -> None:
    put(JobTimers, "started", nothing)


@breaks("heartbeats_do_not_depend_on_handlers")
def lists_nothing() -> None:
    put(SessionSide, "heartbeat_tokens", lambda _: [])


@breaks("reconnect_and_go_on")
def holds_nothing() -> None:
    def hello(original: Any, self: SessionSide) -> dispatch_pb2.Hello:
        message: dispatch_pb2.Hello = original(self)
        message.ClearField("held_jobs")
        return message

    wrap(SessionSide, "hello", hello)


@breaks("reconnect_and_be_told_that_it_is_lost", "a_lost_lease_is_dropped")
def loses_nothing() -> None:
    put(Supervisor, "lose", nothing)


@breaks("fences_itself", "fences_itself_in_silence")
def never_fences() -> None:
    for name in ("fence_at", "over_at"):
        setattr(LeaseClock, name, property(lambda self: self.since + 1000))


@breaks("words_about_other_leases_change_nothing")
def cancels_whatever_it_has() -> None:
    def cancel(original: Any, self: Supervisor, order: dispatch_pb2.CancelJob) -> None:
        for token in list(self.jobs):
            original(self, dispatch_pb2.CancelJob(lease_token=token, reason=order.reason))

    wrap(Supervisor, "cancel", cancel)


@breaks("go_away_and_come_back", "comes_back_after_every_status")
def leaves_for_good() -> None:
    put(connection.Connection, "run", stop_after_the_first)


@breaks("drain_lets_jobs_finish")
def takes_while_draining() -> None:
    def take(original: Any, self: Slots, kind: str, version: str, **named: Any) -> Any:
        draining, self.draining = self.draining, False
        try:
            return original(self, kind, version, **named)
        finally:
            self.draining = draining

    wrap(Slots, "take", take)


@breaks("stop_hands_back")
def forgets_the_checkpoint() -> None:
    changed_event("cancelled", lambda body: body.ClearField("checkpoint"))


@breaks("an_idle_stop_is_quick")
def ends_without_goodbye() -> None:
    put(app.Executor, "stop", lambda _: sys.exit(1))


@breaks("secrets_are_not_echoed")
def redacts_nothing() -> None:
    put(Redactor, "text", lambda _, text: text)


@breaks("effects_are_recorded_once")
def records_under_another_name() -> None:
    changed_event("effect", lambda body: setattr(body, "name", "other"))


@breaks("a_recorded_effect_is_not_repeated")
def repeats_effects() -> None:
    _without("effects")


@breaks("checkpoints_are_handed_over")
def hands_no_checkpoint_over() -> None:
    _without("checkpoint")


def _without(field: str) -> None:
    def take(original: Any, self: Supervisor, request: job_pb2.JobRequest) -> None:
        request.ClearField(field)  # type: ignore[arg-type]
        original(self, request)

    wrap(Supervisor, "take", take)


@breaks("artifacts_are_uploaded_before_success", "missing_blobs_are_uploaded_again")
def uploads_nothing() -> None:
    async def upload(*_: Any) -> None:
        pass

    put(BlobClient, "upload", upload)


@breaks("inputs_with_other_bytes_are_refused")
def trusts_what_comes() -> None:
    put(blob_client._Download, "digest", lambda self: self.expected)


@breaks("transfers_wait_for_the_artifact_service")
def waits_for_nothing() -> None:
    wrap(
        BlobClient,
        "__init__",
        lambda original, self, channel, **named: original(self, channel, **{**named, "patience_s": 0.0}),
    )


@breaks("a_result_that_does_not_match_is_failed_under_its_number")
def sends_it_again() -> None:
    def refused(original: Any, self: Supervisor, refusal: dispatch_pb2.EventRefusal) -> None:
        refusal.code = Code.BLOBS_MISSING
        original(self, refusal)

    wrap(Supervisor, "refused", refused)


@breaks("inputs_are_read_from_the_blob_store")
def reads_something_else() -> None:
    opened = JobArtifacts.open

    async def open_(self: JobArtifacts, name: str) -> Any:
        path = await opened(self, name)
        path.unlink()
        path.write_bytes(b"other bytes")
        return path

    put(JobArtifacts, "open", open_)


if __name__ == "__main__":
    BREAKS[sys.argv.pop(1)]()
    from rara_executor.__main__ import main

    main()
