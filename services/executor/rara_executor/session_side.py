"""What the scheduler says, turned into what the supervisor does; and what a session begins with."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rara.v1 import dispatch_pb2

from rara_executor.artifacts import ArtifactStore
from rara_executor.heartbeat import Renewal
from rara_executor.held_job import HeldJob, Phase
from rara_executor.outbox import Outbox
from rara_executor.protocol import Spoken
from rara_executor.session import Session
from rara_executor.supervisor import Supervisor


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this executor says it is in Hello."""

    executor_id: str
    executor_name: str
    executor_kind: str
    sdk: str
    labels: dict[str, str]


class SessionSide:
    """Hears one session after the other. Each frame is taken in whole before the next is read."""

    def __init__(
        self,
        identity: Identity,
        capabilities: list[dispatch_pb2.Capability],
        supervisor: Supervisor,
        outbox: Outbox,
        store: ArtifactStore,
        asked_to_drain: Callable[[float | None], None],
    ) -> None:
        self.welcomed = asyncio.Event()
        self.spoken = Spoken()
        self._asked_to_drain = asked_to_drain
        self._identity = identity
        self._capabilities = capabilities
        self._supervisor = supervisor
        self._outbox = outbox
        self._store = store

    def hello(self, version: int | None = None) -> dispatch_pb2.Hello:
        """version: that the scheduler has asked for; None: the one that is spoken now."""
        return dispatch_pb2.Hello(
            protocol_version=version or self.spoken.version,
            executor_id=self._identity.executor_id,
            executor_name=self._identity.executor_name,
            executor_kind=self._identity.executor_kind,
            sdk=self._identity.sdk,
            capabilities=self._capabilities,
            labels=self._identity.labels,
            held_jobs=[self._held(job) for job in self._supervisor.jobs.values() if not job.is_lost],
        )

    def on_welcome(self, session: Session, welcome: dispatch_pb2.Welcome) -> None:
        supervisor = self._supervisor
        supervisor.begin_session(session)
        self.take_limits(welcome.terms.limits)
        # The answer names every held token: what it does not name is not ours any more.
        named = {ack.lease_token for ack in welcome.acks.acks}
        named |= {refusal.lease_token for refusal in welcome.acks.refusals}
        named |= {cancel.lease_token for cancel in welcome.cancels}
        for token in set(welcome.lost_lease_tokens) | (supervisor.jobs.keys() - named):
            supervisor.lose(token)
        self.on_acks(welcome.acks)
        for cancel in welcome.cancels:
            supervisor.cancel(cancel)
        supervisor.after_change()
        self.welcomed.set()

    def take_limits(self, limits: dispatch_pb2.Limits) -> None:
        """What the scheduler leaves out stays as it is."""
        self._supervisor.max_payload_bytes = limits.max_payload_bytes or self._supervisor.max_payload_bytes
        self._outbox.event_window = limits.event_window or self._outbox.event_window
        self._supervisor.max_frame_bytes = limits.max_frame_bytes or self._supervisor.max_frame_bytes
        self._store.max_inline_bytes = limits.max_inline_bytes or self._store.max_inline_bytes

    def on_session_end(self) -> None:
        self._supervisor.end_session()

    def on_jobs(self, jobs: dispatch_pb2.JobBatch) -> None:
        for request in jobs.jobs:
            self._supervisor.take(request)
        self._supervisor.after_change()

    def on_acks(self, acks: dispatch_pb2.EventAcks) -> None:
        for ack in acks.acks:
            self._supervisor.acknowledged(ack)
        for refusal in acks.refusals:
            self._supervisor.refused(refusal)
        self._supervisor.after_change()

    def on_heartbeat_ack(self, ack: dispatch_pb2.HeartbeatAck, renewal: Renewal | None) -> None:
        for token in ack.lost_lease_tokens:
            self._supervisor.lose(token)
        if renewal is not None:
            for token in renewal.tokens:
                self._supervisor.renewed(token, renewal.sent_at)
        for cancel in ack.cancels:
            self._supervisor.cancel(cancel)
        self._supervisor.after_change()

    def on_cancels(self, cancels: dispatch_pb2.CancelJobs) -> None:
        for cancel in cancels.jobs:
            self._supervisor.cancel(cancel)
        self._supervisor.after_change()

    def on_drain(self, drain: dispatch_pb2.Drain) -> None:
        """May come again, with another bound."""
        has_bound = drain.HasField("finish_within")
        self._asked_to_drain(max(0.0, drain.finish_within.ToNanoseconds() / 1e9) if has_bound else None)

    def heartbeat_tokens(self) -> list[int]:
        """Runners alive or starting, and finished jobs with unacknowledged events."""
        jobs = self._supervisor.jobs
        return [token for token, job in jobs.items() if job.phase is not Phase.ACCEPTING and not job.is_lost]

    def _held(self, job: HeldJob) -> dispatch_pb2.HeldJob:
        last, acked = self._outbox.sequences(job.token)
        return dispatch_pb2.HeldJob(
            lease=job.lease, last_sequence=last, acked_sequence=acked, finished=job.has_ended
        )
