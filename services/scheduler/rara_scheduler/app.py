"""Composition root: builds every part of the scheduler, and owns the order of start and stop."""

import asyncio
import functools
import os
import signal
import socket
import threading

import grpc
import structlog
import uuid_utils.compat
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from rara.v1 import (
    artifact_pb2,
    artifact_pb2_grpc,
    dispatch_pb2,
    dispatch_pb2_grpc,
    workflow_pb2,
    workflow_pb2_grpc,
)
from rara_client.certificates import ServerCertificates

from rara_scheduler.blobs.admission import UploadLimits
from rara_scheduler.blobs.checks import BlobChecks
from rara_scheduler.blobs.open import open_blob_store
from rara_scheduler.blobs.transfers import BlobTransfers, TransferLimits
from rara_scheduler.bulk import Bulk
from rara_scheduler.cancelling import Cancelling
from rara_scheduler.domain.definition import DefinitionLimits
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.draining import Draining
from rara_scheduler.loops.aftermath import Aftermath
from rara_scheduler.loops.committer import Committer
from rara_scheduler.loops.direct import DirectLoop
from rara_scheduler.loops.dispatch import DispatchLoop, RouteTable
from rara_scheduler.loops.heartbeat import HeartbeatLoop
from rara_scheduler.loops.looks import LookLoop
from rara_scheduler.loops.notify import NotifyLoop
from rara_scheduler.loops.pauses import PauseLoop
from rara_scheduler.loops.retention import Pruner, RetentionLoop
from rara_scheduler.loops.spans import SpanLoop
from rara_scheduler.loops.sweep import SweepLoop
from rara_scheduler.loops.uploads import UploadLoop
from rara_scheduler.pauses import Pauses
from rara_scheduler.pausing import Pausing
from rara_scheduler.run_ends import RunEnds
from rara_scheduler.sessions import SessionRegistry
from rara_scheduler.settings import Settings
from rara_scheduler.store.blobs import BlobRows
from rara_scheduler.store.bulk import BulkStore
from rara_scheduler.store.cancel import CancelStore
from rara_scheduler.store.commit import CommitStore
from rara_scheduler.store.database import Conflict, Database, StoreUnavailable, translated_errors
from rara_scheduler.store.definitions import DefinitionStore
from rara_scheduler.store.explain import Explainer
from rara_scheduler.store.history import HistoryStore
from rara_scheduler.store.known_runs import KnownRuns
from rara_scheduler.store.leases import LeaseStore
from rara_scheduler.store.lineage import LineageReads
from rara_scheduler.store.migrate import migrate, status
from rara_scheduler.store.pauses import PauseStore
from rara_scheduler.store.pooler import require_sessions
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.retention import RetentionStore
from rara_scheduler.store.retry_run import RunRetrier
from rara_scheduler.store.sessions import SessionStore
from rara_scheduler.store.start import RunStarter
from rara_scheduler.store.sweeps import SweepStore
from rara_scheduler.store.telemetry import TelemetryStore
from rara_scheduler.store.tokens import TokenStore
from rara_scheduler.store.watch import WatchReads
from rara_scheduler.telemetry.setup import begin, wanted
from rara_scheduler.transport import connections
from rara_scheduler.transport.artifacts import ArtifactServicer
from rara_scheduler.transport.auth import AuthInterceptor
from rara_scheduler.transport.authenticator import Authenticator
from rara_scheduler.transport.dispatch import DispatchServicer, Terms
from rara_scheduler.transport.rate import RateInterceptor, Rates
from rara_scheduler.transport.workflow import WorkflowServicer
from rara_scheduler.watch_hub import ChangeHub
from rara_scheduler.watching import Watching

log = structlog.get_logger(__name__)

RETENTION_HEALTH = "rara.retention"

# A scheduler that could not look for so long at what is paused leases nothing until it has.
_STALE_SWEEPS = 5
_LAST_RESORT_S = 0.5  # behind the bound of a stop, which a stop in order may use up
_LAST_WORDS_S = 0.2
_LEAST_STALE_S = 5.0

_SERVICES = tuple(
    descriptor.services_by_name[name].full_name
    for descriptor, name in (
        (workflow_pb2.DESCRIPTOR, "WorkflowService"),
        (dispatch_pb2.DESCRIPTOR, "DispatchService"),
        (artifact_pb2.DESCRIPTOR, "ArtifactService"),
    )
)


class Scheduler:
    """One scheduler process. `start`, then `run` until `stop` is asked for."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        s = settings
        self._scheduler_id = str(uuid_utils.compat.uuid7())
        self._stop_asked = asyncio.Event()
        self._telemetry = begin(wanted(s.metrics_listen), scheduler_id=self._scheduler_id)
        metrics, tracing = self._telemetry.metrics, self._telemetry.tracing
        self._database = Database(
            s.database_url,
            call_connections=s.call_connections,
            engine_connections=s.engine_connections,
            acquire_timeout_s=s.acquire_timeout_s,
            statement_timeout_s=s.statement_timeout_s,
            lock_timeout_s=s.lock_timeout_s,
            metrics=metrics,
        )
        defaults = RetryPolicy(
            max_attempts=s.retry_max_attempts,
            initial_backoff_s=s.retry_initial_backoff_s,
            max_backoff_s=s.retry_max_backoff_s,
            backoff_multiplier=s.retry_backoff_multiplier,
        )
        definitions = DefinitionStore(
            self._database,
            defaults,
            DefinitionLimits(max_payload_bytes=s.max_payload_bytes),
            on_routes=self._wake_sweep,  # it loads the routes
        )
        self._sessions = SessionRegistry(max_sessions=s.max_sessions)
        self._hub = ChangeHub()
        reads = Reads(self._database, definitions, silent_after_s=2 * s.heartbeat_s)
        watch_reads = WatchReads(self._database, reads)
        self._run_ends = RunEnds(watch_reads)
        routes = RouteTable()
        self._pauses = Pauses(stale_s=max(_LEAST_STALE_S, _STALE_SWEEPS * s.sweep_s))
        pause_store = PauseStore(self._database)
        self._pause_loop = PauseLoop(
            pause_store, self._pauses, every_s=s.sweep_s, wake_dispatch=self._look_from_front
        )
        known_runs = KnownRuns()
        leases = LeaseStore(self._database, lease_s=s.lease_s, heartbeat_s=s.heartbeat_s, known=known_runs)
        session_store = SessionStore(self._database)
        cancels = CancelStore(self._database, definitions, cancel_grace_s=s.cancel_grace_s)
        self._notify = NotifyLoop(s.database_url, hint=self._hinted, connect_timeout_s=s.acquire_timeout_s)
        self._draining = Draining(self._sessions)
        aftermath = Aftermath(
            self._sessions,
            self._hub,
            wake_dispatch=self._wake_dispatch,
            credit_freed=self._credit_freed,
            wake_sweep=self._wake_sweep,
            tell_others=self._notify.tell_others,
            metrics=metrics,
            draining=self._draining,
            ends=self._run_ends,
        )
        self._committer = Committer(
            CommitStore(
                self._database,
                definitions,
                lease_s=s.lease_s,
                accept_timeout_s=s.accept_timeout_s,
                cancel_grace_s=s.cancel_grace_s,
                known=known_runs,
            ),
            aftermath,
            batch=s.commit_batch,
            metrics=metrics,
            tracing=tracing,
        )
        self._dispatch = DispatchLoop(
            leases,
            definitions,
            self._sessions,
            routes,
            self._committer,
            self._pauses,
            lease_s=s.lease_s,
            poll_s=s.poll_s,
            lease_batch=s.lease_batch,
            max_payload_bytes=s.max_payload_bytes,
            tell_others=self._notify.tell_others,
            metrics=metrics,
            tracing=tracing,
        )
        self._heartbeats = HeartbeatLoop(
            leases,
            session_store,
            self._sessions,
            heartbeat_s=s.heartbeat_s,
            wake_dispatch=self._wake_dispatch,
            metrics=metrics,
        )
        self._sweep = SweepLoop(
            SweepStore(
                self._database,
                scheduler_id=self._scheduler_id,
                accept_timeout_s=s.accept_timeout_s,
                silence_s=s.silence_s,
            ),
            cancels,
            session_store,
            definitions,
            self._sessions,
            routes,
            self._committer,
            aftermath,
            self._pauses,
            sweep_s=s.sweep_s,
            lease_s=s.lease_s,
            settle_s=s.reclaim_settle_s,
            silence_s=s.silence_s,
            cancel_grace_s=s.cancel_grace_s,
            wake_dispatch=self._wake_dispatch,
            wake_pauses=self._pause_loop.wake,
            nothing_ready=self._dispatch.nothing_ready,
        )
        retention = RetentionStore(self._database)
        self._retention = RetentionLoop(
            Pruner(
                HistoryStore(self._database),
                retention,
                days_ahead=s.history_partitions_ahead,
                keep_days=s.retention_days,
            ),
            retention,
            every_s=s.retention_every_s,
            report=self._report_retention,
        )
        self._blobs = open_blob_store(s.blob_store)
        blob_rows = BlobRows(self._database)
        blob_checks = BlobChecks(self._blobs, blob_rows)
        terms = Terms(
            heartbeat_s=s.heartbeat_s,
            silence_s=s.silence_s,
            accept_timeout_s=s.accept_timeout_s,
            max_frame_bytes=s.max_frame_bytes,
            max_payload_bytes=s.max_payload_bytes,
            max_inline_bytes=s.max_inline_bytes,
            event_window=s.event_window,
            max_attempt_bytes=s.max_attempt_bytes,
        )
        self._dispatch_servicer = DispatchServicer(
            scheduler_id=self._scheduler_id,
            terms=terms,
            store=session_store,
            sessions=self._sessions,
            routes=routes,
            committer=self._committer,
            dispatch=self._dispatch,
            heartbeats=self._heartbeats,
            blobs=blob_checks,
            rebalance_after_s=connections.rebalance_after_s(s.connection_age_s),
            stopping=self._stop_asked.is_set,
        )
        self._direct = DirectLoop(
            s.direct_executors,
            session_store,
            functools.partial(self._dispatch_servicer.serve, direct=True),
            scheduler_id=self._scheduler_id,
            terms=terms,
            security=s.direct_security,
        )
        retrier = RunRetrier(
            self._database, definitions, on_ready=self._dispatch.work_submitted, tracing=tracing
        )
        canceller = Cancelling(cancels, session_store, self._sessions, aftermath)
        self._workflow_servicer = WorkflowServicer(
            definitions=definitions,
            starter=RunStarter(
                self._database,
                definitions,
                on_ready=self._dispatch.work_submitted,
                on_started=self._hub.started,
                known=known_runs,
                max_inline_bytes=s.max_inline_bytes,
            ),
            retrier=retrier,
            reads=reads,
            lineage_reads=LineageReads(self._database),
            watching=Watching(watch_reads, reads, self._hub),
            run_ends=self._run_ends,
            explainer=Explainer(reads, accept_timeout_s=s.accept_timeout_s, silent_after_s=2 * s.heartbeat_s),
            max_payload_bytes=s.max_payload_bytes,
            pausing=Pausing(
                pause_store,
                look=self._pause_loop.look,
                turn_over=self._dispatch.turn_over,
                wake=self._pause_loop.wake,
                tell_others=self._notify.tell_others,
            ),
            canceller=canceller,
            bulk=Bulk(
                BulkStore(self._database),
                retrier,
                canceller,
                on_requeued=self._dispatch.work_submitted,
                on_retried=metrics.run_started,
            ),
            tracing=tracing,
            metrics=metrics,
        )
        transfers = BlobTransfers(
            self._blobs,
            blob_rows,
            TransferLimits(
                uploads=UploadLimits(
                    max_blob_bytes=s.max_blob_bytes,
                    max_attempt_bytes=s.max_attempt_bytes,
                    max_lease_uploads=s.max_lease_uploads,
                    max_open_uploads=s.max_open_uploads,
                    quota_bytes=s.blob_store_quota_bytes,
                ),
                upload_expires_s=s.upload_expires_s,
                max_transfers=s.max_transfers,
            ),
            checks=blob_checks,
        )
        tokens = TokenStore(self._database)
        self._authenticator = (
            Authenticator(tokens, recheck_s=s.token_recheck_s) if s.auth == "tokens" else None
        )
        self._artifact_servicer = ArtifactServicer(transfers, holds_lease=tokens.holds_lease, metrics=metrics)
        telemetry_store = TelemetryStore(self._database)
        self._looks = LookLoop(
            telemetry_store,
            self._sessions,
            metrics,
            commit_queue=lambda: self._committer.waiting,
            every_s=s.metrics_every_s,
        )
        self._spans = SpanLoop(telemetry_store, self._telemetry.spans)
        self._uploads = UploadLoop(transfers)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self.address = ""

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of the metrics; empty: they are not served."""
        return self._telemetry.metrics_address

    @property
    def paused_definitions(self) -> frozenset[str]:
        """Those of which this scheduler leases nothing, as far as it knows now."""
        return self._pauses.definitions

    # Loops wake each other through these, so that none has to exist before another.
    def _wake_dispatch(self) -> None:
        if self._sweep.others_known:
            self._dispatch.work_submitted()  # what became leasable here may be for their executors
        else:
            self._dispatch.wake()

    def _credit_freed(self) -> None:
        self._dispatch.credit_freed()

    def _wake_sweep(self) -> None:
        self._sweep.wake()

    def _look_from_front(self) -> None:
        self._dispatch.look_from_front()

    def _hinted(self) -> None:
        self._pause_loop.wake()
        self._dispatch.wake()
        self._sweep.wake()

    @property
    def stop_asked(self) -> bool:
        return self._stop_asked.is_set()

    def stop(self) -> None:
        """Ask for a graceful stop. Repeats do nothing."""
        self._draining.begin()
        self._stop_asked.set()

    def tell_drain(self) -> None:
        """Say, once, what a stop leaves behind: at its end, or when the process is to end sooner."""
        self._draining.tell()

    async def start(self) -> bool:
        """Check the schema, open the port, serve. False: a stop was asked for first, and this is its end.

        Raises Fault or MigrationError when it cannot.
        """
        begin = asyncio.create_task(self._start(), name="start")
        stop = asyncio.create_task(self._stop_asked.wait(), name="stop")
        try:
            await asyncio.wait([begin, stop], return_when=asyncio.FIRST_COMPLETED)
            if begin.done():
                begin.result()
                return True
        finally:
            begin.cancel()
            stop.cancel()
            await asyncio.wait([begin, stop])
        await self._close()
        return False

    async def _start(self) -> None:
        await self._check_schema()
        await self._blobs.prepare()
        await self._database.open()
        # The onlooker first, so that it sees refused calls, too.
        interceptors = [*self._telemetry.interceptors]
        if self._authenticator is not None:
            interceptors.append(AuthInterceptor(self._authenticator))
        rates = Rates(self._settings.rate_limit_per_s, self._settings.rate_limit_burst)
        interceptors.append(
            RateInterceptor(rates, self._settings.rate_limit_per_s)
        )  # inside, where callers have names
        server = grpc.aio.server(interceptors=interceptors, options=_server_options(self._settings))
        dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(self._dispatch_servicer, server)
        workflow_pb2_grpc.add_WorkflowServiceServicer_to_server(self._workflow_servicer, server)
        artifact_pb2_grpc.add_ArtifactServiceServicer_to_server(self._artifact_servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._settings.reflection:
            reflection.enable_server_reflection(
                (*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), server
            )
        host = self._settings.listen.rpartition(":")[0]
        try:
            port = self._open_port(server)
        except (RuntimeError, ValueError) as error:
            raise Fault(Code.INTERNAL, f"cannot listen on {self._settings.listen}: {error}") from error
        await server.start()
        self._server = server
        self.address = f"{host}:{port}"
        await self._report_health()

    def _open_port(self, server: grpc.aio.Server) -> int:
        """Raises RuntimeError for a port that cannot be had, ValueError for certificates that cannot be used."""
        s = self._settings
        for what in s.exposed:
            log.warning("scheduler.exposed", what=what)
        if s.tls_cert is None or s.tls_key is None:
            return server.add_insecure_port(s.listen)
        certificates = ServerCertificates(s.tls_cert, s.tls_key, s.tls_client_ca, on_reload=log_certificates)
        return server.add_secure_port(s.listen, certificates.credentials())

    async def run(self) -> None:
        """Serve until a stop is asked for, then stop in order. A loop that dies of a bug raises."""
        try:
            async with asyncio.TaskGroup() as loops:
                tasks = [
                    loops.create_task(loop(), name=name)
                    for name, loop in (
                        ("committer", self._committer.run),
                        ("dispatch", self._dispatch.run),
                        ("heartbeat", self._heartbeats.run),
                        ("sweep", self._sweep.run),
                        ("pauses", self._pause_loop.run),
                        ("notify", self._notify.run),
                        ("retention", self._retention.run),
                        ("uploads", self._uploads.run),
                        ("run ends", self._run_ends.run),
                        ("direct", self._direct.run),
                        ("health", self._watch_health),
                        *([] if self._authenticator is None else [("auth", self._authenticator.run)]),
                        ("metrics", self._looks.run),
                        ("spans", self._spans.run),
                    )
                ]
                await self._stop_asked.wait()
                try:
                    async with asyncio.timeout(0.8 * self._settings.stop_s):
                        await self._drain()
                except TimeoutError:
                    log.warning("scheduler.stop_cut_short", stop_s=self._settings.stop_s)
                for task in tasks:
                    task.cancel()
        finally:
            await self._close()

    async def _drain(self) -> None:
        """No new job, commit and acknowledge what is here, end the sessions, answer calls. Leases stay as they are."""
        log.info("scheduler.stopping", sessions=len(self._sessions), uncommitted=self._committer.waiting)
        self._dispatch.stopping = True
        await self._health.enter_graceful_shutdown()
        self._hub.stop()
        self._run_ends.stop()
        try:
            async with asyncio.timeout(self._settings.stop_s / 2):
                await self._committer.drained()
        except TimeoutError:
            log.warning("scheduler.uncommitted", events=self._committer.waiting)
        self._draining.begin()  # sessions that were on their way when the stop was asked for
        for session in self._sessions:
            session.end("SHUTTING_DOWN", reconnect_after_s=0.2)
        await self._dispatch_servicer.all_closed()
        if self._server is not None:
            # No new call; those on their way end with their answer, and not as CANCELLED.
            await self._server.stop(0.25 * self._settings.stop_s)

    async def _close(self) -> None:
        self._draining.close()
        for session in self._sessions:
            session.end()
        rest_s = 0.04 * self._settings.stop_s  # four of them, of the fifth that the drain has left
        if self._server is not None:
            await self._server.stop(min(0.5, rest_s))
        await self._spans.finish(timeout_s=rest_s)
        await self._database.close(timeout_s=rest_s)
        self._blobs.close()
        await asyncio.to_thread(self._telemetry.close, timeout_s=rest_s)
        self.tell_drain()
        log.info("scheduler.stopped")

    async def _check_schema(self) -> None:
        """Bring the schema up to date where that is allowed; refuse one that does not fit. Waits for the database."""
        while True:
            try:
                with translated_errors():
                    await require_sessions(self._settings.database_url)
                    if self._settings.migrate:
                        for applied in await migrate(self._settings.database_url):
                            log.info("schema.migrated", version=applied.version, name=applied.name)
                    found = await status(self._settings.database_url)
                break
            except (StoreUnavailable, Conflict, TimeoutError) as error:
                log.warning("scheduler.waiting_for_database", error=repr(error))
                await asyncio.sleep(1.0)
        if found.incompatible:
            raise Fault(
                Code.SCHEMA_TOO_NEW,
                f"the database has migration {found.incompatible[-1].version}, with which this version of rara cannot"
                " work: upgrade rara",
            )
        if found.pending:
            missing = ", ".join(str(migration.version) for migration in found.pending)
            raise Fault(
                Code.SCHEMA_TOO_OLD,
                f"the database lacks migration {missing}: run `rara db migrate`, or set RARA_MIGRATE=1",
            )
        if found.unknown:
            log.warning("schema.newer", version=found.unknown[-1].version)

    async def _watch_health(self) -> None:
        """Readiness follows the database."""
        shown: bool | None = None
        while True:
            if self._sweep.healthy is not shown and not self._stop_asked.is_set():
                shown = self._sweep.healthy
                await self._report_health()
            await asyncio.sleep(min(1.0, self._settings.sweep_s))

    async def _report_health(self) -> None:
        serving = health_pb2.HealthCheckResponse.SERVING
        if not self._sweep.healthy:
            serving = health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *_SERVICES):
            await self._health.set(name, serving)

    async def _report_retention(self, succeeded: bool) -> None:
        """A name of its own in the health service: nobody has to stop sending calls for it."""
        response = health_pb2.HealthCheckResponse
        await self._health.set(RETENTION_HEALTH, response.SERVING if succeeded else response.NOT_SERVING)


def log_certificates(problem: str) -> None:
    """Say what became of files that have changed. Certificates that cannot be used leave the old ones in use."""
    if problem:
        log.error("certificates.not_reloaded", error=problem)
    else:
        log.info("certificates.reloaded")


def _server_options(settings: Settings) -> list[tuple[str, int]]:
    return [
        *connections.keepalive_options(),
        *connections.age_options(settings.connection_age_s),
        ("grpc.max_receive_message_length", settings.max_frame_bytes),
        ("grpc.max_send_message_length", 64 * 1024 * 1024),
        (
            "grpc.so_reuseport",
            0,
        ),  # a second process on the same port is an error, not a silent half of the calls
    ]


async def serve(settings: Settings) -> int:
    """Run one scheduler until a signal; the process's exit code."""
    scheduler = Scheduler(settings)
    loop = asyncio.get_running_loop()

    def end_now() -> None:
        # In a thread, so that neither a bug nor a pipe that nobody reads keeps the process.
        last_words = threading.Thread(target=scheduler.tell_drain, daemon=True)
        last_words.start()
        last_words.join(_LAST_WORDS_S)
        os._exit(1)

    def on_signal() -> None:
        if scheduler.stop_asked:
            end_now()  # asked twice: at once; leases expire
        scheduler.stop()
        # Whatever hangs from here on, this loop too: a process that has heard that it is to stop ends. Leases expire,
        # and nothing acknowledged is lost.
        last_resort = threading.Timer(settings.stop_s + _LAST_RESORT_S, end_now)
        last_resort.daemon = True
        last_resort.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if not await scheduler.start():
        return 0
    print(f"rara-scheduler listening on {scheduler.address}", flush=True)  # noqa: T201 - what scripts wait for
    log.info(
        "scheduler.started",
        address=scheduler.address,
        host=socket.gethostname(),
        metrics=scheduler.metrics_address,
    )
    await scheduler.run()
    return 0
