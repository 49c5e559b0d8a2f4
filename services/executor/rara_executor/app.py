"""Composition root of the executor: builds every part, and owns the order of start and stop."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from importlib import metadata

import grpc
import structlog
import uuid_utils
from rara.v1 import dispatch_pb2
from rara_client import otlp

from rara_executor import fencing, payload
from rara_executor.artifacts import ArtifactStore
from rara_executor.blob_cache import BlobCache
from rara_executor.blob_client import BlobClient
from rara_executor.connection import CHANNEL_OPTIONS, Connection
from rara_executor.direct import DirectServer
from rara_executor.door import Door
from rara_executor.drain import Drain
from rara_executor.errors import ConfigurationError
from rara_executor.lease_clock import lease_now
from rara_executor.outbox import Outbox
from rara_executor.ready import ReadyFile
from rara_executor.redaction import Redactor
from rara_executor.runner_pool import PoolLimits, RunnerPool
from rara_executor.runner_protocol import OperationInfo, Setup
from rara_executor.scratch import ScratchFolder
from rara_executor.session_side import Identity, SessionSide
from rara_executor.settings import Settings
from rara_executor.supervisor import Supervisor, SupervisorLimits
from rara_executor.tracing import UNTRACED, JobTracing
from rara_executor.warden_link import Warden
from rara_executor.wire import EventFactory

log = structlog.get_logger(__name__)

# While a transfer is under way. A scheduler takes offence at pings more often than each 10 s.
BLOB_KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.http2.ping_timeout_ms", 10_000)]
# What a download may be ahead of a slow disk: gRPC's own estimate grows without bound.
BLOB_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 2 << 20)]
SWEEP_S = 1.0
_LAST_SPANS = 0.04  # of the time to stop, for a receiver that is slow or away


class Executor:
    """One executor process: `run` holds its whole life, `stop` begins its end."""

    def __init__(
        self,
        settings: Settings,
        *,
        sys_path: list[str],
        on_connected: Callable[[], None] = lambda: None,
        on_listening: Callable[[str], None] = lambda _address: None,
    ) -> None:
        self.executor_id = str(uuid_utils.uuid7())
        self._settings = settings
        self._sys_path = sys_path
        self._on_connected = on_connected
        self._on_listening = on_listening
        self._stop = asyncio.Event()
        self._connection: Connection | DirectServer | None = None
        self._drain: Drain | None = None
        self._tracing: JobTracing = UNTRACED

    def stop(self) -> None:
        """Drain, then end; the bound is RARA_EXECUTOR_STOP_S."""
        if not self._stop.is_set():
            log.info("executor.stopping", stop_s=self._settings.executor_stop_s)
        self._stop.set()

    def cut_short(self) -> None:
        """Say what a stop that is not waited for leaves behind: the process ends now."""
        if self._drain is not None:
            self._drain.stop()
            self._drain.tell()

    @property
    def is_ready(self) -> bool:
        """Whether the last heartbeats were answered in time: jobs can come."""
        session = None if self._connection is None else self._connection.session
        return session is not None and session.is_ready(lease_now())

    async def run(self) -> None:
        """Until stopped, drained, or replaced. Raises ConfigurationError, ReplacedError."""
        settings = self._settings
        scratch = ScratchFolder(settings.executor_dir, self.executor_id)
        warden = Warden()
        self._tracing = _tracing(self.executor_id, settings.executor_name)
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(scratch.open)
            stack.callback(scratch.close)
            warden.start()
            stack.callback(warden.stop)
            # No heartbeat shows whether this path is alive, so pings do.
            options = [*CHANNEL_OPTIONS, *BLOB_KEEPALIVE, *BLOB_WINDOW]
            async with settings.security.channel(settings.scheduler, options) as blob_channel:
                with _one_error():
                    await self._run(scratch, warden, self._blob_client(blob_channel))
        await asyncio.to_thread(self._tracing.close, timeout_s=_LAST_SPANS * settings.executor_stop_s)
        log.info("executor.stopped")

    def _blob_client(self, channel: grpc.aio.Channel) -> BlobClient:
        return BlobClient(channel, patience_s=self._settings.executor_transfer_patience_s)

    async def _run(self, scratch: ScratchFolder, warden: Warden, blobs: BlobClient) -> None:
        settings = self._settings
        outbox = Outbox()
        cache = BlobCache(
            scratch.cache, parts=scratch.jobs, limit_bytes=settings.executor_cache_bytes, fetch=blobs.download
        )
        store = ArtifactStore(blobs, cache, transfers=settings.executor_transfers)
        identity = Identity(
            executor_id=self.executor_id,
            executor_name=settings.executor_name,
            executor_kind=settings.executor_kind,
            sdk=f"rara-python/{_version()}",
            labels=settings.executor_labels,
        )
        redactor = Redactor()
        if settings.token is not None:
            redactor.add(settings.token.get_secret_value())
        async with asyncio.TaskGroup() as work:
            supervisor = Supervisor(
                EventFactory(redactor, executor_id=self.executor_id, executor_name=settings.executor_name),
                SupervisorLimits(
                    slots=settings.executor_slots,
                    executor_kind=settings.executor_kind,
                    grace_s=settings.executor_grace_s,
                    scratch=scratch.jobs,
                    secrets=settings.executor_secrets_dir,
                ),
                outbox,
                store,
                redactor,
                work,
                self._tracing,
            )
            self._drain = drain = Drain(supervisor, stop_s=settings.executor_stop_s)
            supervisor.pool = pool = RunnerPool(
                Setup(list(settings.executor_modules), self._sys_path, settings.executor_memory_bytes),
                PoolLimits(
                    slots=settings.executor_slots,
                    jobs_per_runner=settings.executor_jobs_per_runner,
                    prestart=settings.executor_prestart,
                    idle_s=settings.executor_idle_s,
                    start_timeout_s=settings.executor_start_timeout_s,
                ),
                supervisor,
                warden,
            )
            try:
                operations = await self._started(pool)
                if operations is None:
                    drain.stop()
                    drain.tell()  # of nothing
                else:
                    supervisor.slots.offer(operations)
                    offered = capabilities(operations)
                    side = SessionSide(identity, offered, supervisor, outbox, store, drain.asked)
                    self._connection = await self._reachable(outbox, side, supervisor)
                    await self._serve(supervisor, side, pool, warden, self._connection, drain)
            finally:
                self._connection = None
                await pool.stop()

    async def _reachable(
        self, outbox: Outbox, side: SessionSide, supervisor: Supervisor
    ) -> Connection | DirectServer:
        """The way to the scheduler: ours to dial, or an address where it dials us."""
        if not self._settings.executor_listen:
            return Connection(self._settings.scheduler, outbox, side, security=self._settings.security)
        server = DirectServer(
            self._settings.executor_listen, side, supervisor, outbox, Door.of(self._settings)
        )
        await server.start()
        self._on_listening(server.address)
        return server

    async def _serve(
        self,
        supervisor: Supervisor,
        side: SessionSide,
        pool: RunnerPool,
        warden: Warden,
        connection: Connection | DirectServer,
        drain: Drain,
    ) -> None:
        """Fencing and sweeping outlive the drain, and runners outlive both."""
        async with asyncio.TaskGroup() as group:
            sessions = group.create_task(connection.run(), name="sessions")
            others = [
                group.create_task(fencing.run(supervisor, warden), name="fencing"),
                group.create_task(_sweep(pool), name="runner sweep"),
                group.create_task(self._report_readiness(side), name="readiness"),
                group.create_task(_forward(self._stop.wait(), drain.stop), name="stop"),
            ]
            await drain.begun.wait()
            await drain.run(connection, sessions)
            for task in (*others, sessions):
                task.cancel()

    async def _started(self, pool: RunnerPool) -> list[OperationInfo] | None:
        """What the runners can run; None: we were stopped before they could say."""
        start = asyncio.create_task(pool.start(), name="first runner")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait([start, stop], return_when=asyncio.FIRST_COMPLETED)
            return start.result() if start.done() else None
        finally:
            for task in (start, stop):
                task.cancel()
            await asyncio.wait([start, stop])

    async def _report_readiness(self, side: SessionSide) -> None:
        await side.welcomed.wait()
        self._on_connected()
        file = ReadyFile(self._settings.executor_ready_file)
        ready: bool | None = None
        try:
            while True:
                if ready is not self.is_ready:
                    ready = self.is_ready
                    log.info("executor.readiness_changed", ready=ready)
                file.show(self.is_ready)
                await asyncio.sleep(SWEEP_S)
        finally:
            file.show(is_ready=False)


def _tracing(executor_id: str, executor_name: str) -> JobTracing:
    """By OTLP where OpenTelemetry's variables want traces. Raises ConfigurationError."""
    try:
        if not otlp.is_sent("TRACES"):
            return UNTRACED
        from rara_executor.sent_spans import SentTracing
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    except ImportError as error:
        raise ConfigurationError(
            f"traces need the extra `observability`: install rara[observability] ({error})"
        ) from error
    return SentTracing(executor_id, executor_name)


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """Of a group with a single error, that error says more than the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from None


async def _forward(cause: Coroutine[None, None, object], effect: Callable[[], None]) -> None:
    await cause
    effect()


async def _sweep(pool: RunnerPool) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        pool.sweep()


def capabilities(operations: list[OperationInfo]) -> list[dispatch_pb2.Capability]:
    """One capability per kind, with all its versions."""
    kinds: dict[str, list[OperationInfo]] = {}
    for operation in operations:
        kinds.setdefault(operation.kind, []).append(operation)
    return [
        dispatch_pb2.Capability(
            kind=kind,
            versions=[operation.version for operation in same],
            max_concurrency=_kind_concurrency(same),
            input_schema_sha256=_schema_digest(same),
        )
        for kind, same in kinds.items()
    ]


def _kind_concurrency(operations: list[OperationInfo]) -> int:
    """0 as soon as one version has no bound of its own: each version's own is kept here."""
    bounds = [operation.max_concurrency for operation in operations]
    return 0 if 0 in bounds else max(bounds)


def _schema_digest(operations: list[OperationInfo]) -> str:
    digests = {operation.version: operation.input_schema_sha256 for operation in operations}
    different = set(digests.values())
    return different.pop() if len(different) == 1 else payload.canonical_sha256(digests)


def _version() -> str:
    try:
        return metadata.version("rara")
    except metadata.PackageNotFoundError:
        return "0"
