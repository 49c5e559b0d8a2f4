"""Dialling the executors that serve ExecutorService: one session at a time for each configured address."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio
import structlog
from rara.v1 import executor_pb2, executor_pb2_grpc
from rara_client.security import Security

from rara_scheduler.domain.errors import Fault
from rara_scheduler.sessions import FrameStream
from rara_scheduler.store.database import Conflict
from rara_scheduler.store.sessions import SessionStore
from rara_scheduler.transport.direct import DirectLink, capabilities
from rara_scheduler.transport.dispatch import Terms

log = structlog.get_logger(__name__)


class DirectLoop:
    """Every scheduler knows all addresses; an executor whose session lives elsewhere is left there."""

    def __init__(
        self,
        addresses: Sequence[str],
        store: SessionStore,
        serve: Callable[[FrameStream], Awaitable[None]],
        *,
        scheduler_id: str,
        terms: Terms,
        security: Security = Security(),  # noqa: B008 - a value, and never changed
    ) -> None:
        self._security = security
        self._addresses = addresses
        self._store = store
        self._serve = serve
        self._scheduler_id = scheduler_id
        self._terms = terms
        self._served: dict[str, str] = {}  # the address of each executor_id that has a session here

    async def run(self) -> None:
        """Dial until cancelled."""
        if not self._addresses:
            return
        async with asyncio.TaskGroup() as group:
            for address in self._addresses:
                group.create_task(self._dial(address), name=f"direct {address}")

    async def _dial(self, address: str) -> None:
        terms = self._terms
        options = [
            ("grpc.max_receive_message_length", terms.max_frame_bytes),
            ("grpc.max_send_message_length", 64 * 1024 * 1024),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 5000),
            # An executor that comes back may have another address; gRPC would ask for it again after 30 s only.
            ("grpc.dns_min_time_between_resolutions_ms", 1000),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        answers: bool | None = None
        while True:
            # Anew each time: a path that swallowed the last connection's packets would swallow what comes next too.
            try:
                opened = self._security.channel(address, options)
            except ValueError as error:  # a file is being replaced: the next try finds it
                log.warning("direct.not_dialled", address=address, error=str(error))
                await asyncio.sleep(terms.heartbeat_s)
                continue
            async with opened as channel:
                stub = executor_pb2_grpc.ExecutorServiceStub(channel)
                answer = await capabilities(stub, timeout_s=terms.silence_s)
                if answers is not (answer is not None):
                    answers = answer is not None
                    say = log.info if answers else log.warning
                    say("direct.answers" if answers else "direct.does_not_answer", address=address)
                if answer is not None:
                    await self._session(address, channel, answer)
            await asyncio.sleep(terms.heartbeat_s)

    async def _session(
        self, address: str, channel: grpc.aio.Channel, answer: executor_pb2.GetCapabilitiesResponse
    ) -> None:
        """Hold a session with the executor that answered, unless it has one elsewhere or by another address."""
        terms = self._terms
        executor_id = answer.hello.executor_id
        if other := self._served.get(executor_id):
            log.warning("direct.address_is_another", address=address, other=other, executor_id=executor_id)
            return
        self._served[executor_id] = address
        try:
            if await self._store.lives_elsewhere(executor_id, self._scheduler_id, within_s=terms.silence_s):
                return
            link = DirectLink(channel, answer, terms=terms.message())
            async with asyncio.TaskGroup() as group:
                group.create_task(link.run(), name=f"direct link {address}")
                try:
                    await self._serve(link)
                finally:
                    link.end()
        except* (Fault, Conflict) as faults:
            # Another try follows, as with an executor that dials.
            log.warning("direct.session_ended", address=address, error=str(faults.exceptions[0]))
        except* Exception:
            # Whatever one executor has made of its answers must not end the scheduler of all others.
            log.exception("direct.session_broken", address=address)
        finally:
            del self._served[executor_id]
