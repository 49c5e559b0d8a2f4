"""The scheduler's settings: read once from `RARA_*`, checked as a whole, then passed on as values."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from rara_client.channel import is_loopback
from rara_client.security import Security

from rara_scheduler.blobs.open import check_blob_store_url

MIB = 1024 * 1024

Positive = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Every value has its unit in its name; durations are seconds. docs/reference/settings.md is made from here."""

    model_config = SettingsConfigDict(env_prefix="RARA_", frozen=True, extra="ignore")

    database_url: str
    """postgresql://user@host/database; for a Unix socket postgresql:///database?host=/folder."""
    listen: str = "127.0.0.1:7310"
    """HOST:PORT; port 0 takes a free one, and the ready line names it."""
    insecure: bool = False
    """Serve and dial beyond loopback in plain text all the same."""
    auth: Literal["none", "tokens"] = "none"
    """`tokens`: every call needs a bearer token, made by `rara token create`, whose role may make it."""
    token_recheck_s: Annotated[float, Field(gt=0, le=60)] = 5.0
    """How soon a token that was revoked or has expired stops, streams included."""
    rate_limit_per_s: Positive = 20_000.0
    """Calls a second of one caller (a token's name, else an address) that start or retry runs, register definitions or
    begin uploads; a batch counts as its runs. Over it they are refused with `RATE_LIMITED` and when to try again. By
    default above what one scheduler stores of batches: lower it where callers do not trust each other."""
    rate_limit_burst: Annotated[int, Field(ge=1)] = 20_000
    """Such calls that a caller who was quiet may make at once. A larger batch takes all of them."""
    tls_cert: Path | None = None
    """Serve by TLS with this certificate and what leads to its authority: a PEM file, read again when it changes."""
    tls_key: Path | None = None
    """Its key."""
    tls_client_ca: Path | None = None
    """Let in only who shows a certificate of these authorities: a PEM file, read again when it changes."""
    tls_ca: str = ""
    """Dial direct executors by TLS, and trust these authorities: a PEM file, or `system`."""
    tls_client_cert: Path | None = None
    """The certificate to show to direct executors that ask for one: a PEM file, read again when it changes."""
    tls_client_key: Path | None = None
    """Its key."""
    direct_token: SecretStr | None = None
    """The token that direct executors are shown."""
    direct_token_file: Path | None = None
    """A file with that token in its first line, read again when it changes."""
    direct_executors: Annotated[tuple[str, ...], NoDecode] = ()
    """HOST:PORT,...: executors that this scheduler dials, because they serve ExecutorService and do not dial."""
    migrate: bool = False
    """Apply missing migrations before serving."""
    blob_store: str = "file:///var/lib/rara/blobs"
    """Where artifacts' bytes live: a file:/// URL with an absolute path, which schedulers share, or s3://bucket/prefix
    with AWS's own variables beside it."""

    lease_s: Positive = 30.0
    """How long an executor may be unheard of before its steps are leased again."""
    heartbeat_s: Positive = 5.0
    """Between two heartbeats of an executor; at most a third of the lease, so that two may be lost."""
    silence_s: Positive = 15.0
    """A session without a frame for so long is closed; at least 2.5 heartbeats, below the lease."""
    accept_timeout_s: Positive = 10.0
    """From the grant of a lease to `accepted`; then it is taken back at no cost."""
    cancel_grace_s: Positive = 10.0
    """Between asking a handler to end and killing it, where neither step nor request says otherwise."""
    settle_s: Annotated[float, Field(ge=0)] | None = None
    """No reclaim for so long after a start or a database outage; unset: half the lease."""
    sweep_s: Positive = 1.0
    """How often expired leases, due steps, deadlines and pauses are looked for."""
    poll_s: Positive = 1.0
    """How often ready steps are looked for without a hint."""
    stop_s: Positive = 10.0
    """A graceful stop ends within this."""

    # The default retry policy, where a definition says nothing.
    retry_max_attempts: Annotated[int, Field(ge=1, le=1000)] = 3
    """The budget that failures spend, where a definition says nothing; so for the next three."""
    retry_initial_backoff_s: Annotated[float, Field(ge=0)] = 1.0
    """Ceiling of the wait after the first failure; the wait is drawn evenly from 0 to its ceiling."""
    retry_max_backoff_s: Annotated[float, Field(ge=0)] = 300.0
    """No ceiling grows above it."""
    retry_backoff_multiplier: Annotated[float, Field(ge=1, le=100)] = 2.0
    """By which the ceiling grows with each further failure."""

    max_payload_bytes: Annotated[int, Field(ge=1024)] = MIB
    """One input, output, checkpoint or error detail."""
    max_inline_bytes: Annotated[int, Field(ge=0, le=64 * 1024)] = 16 * 1024
    """One artifact or effect result that travels inside a message."""
    max_frame_bytes: Annotated[int, Field(ge=MIB)] = 4 * MIB
    """One gRPC message; at least two payloads and 1 MiB."""
    event_window: Annotated[int, Field(ge=16, le=100_000)] = 5000
    """Events that a session may have sent and not acknowledged."""
    max_blob_bytes: Annotated[int, Field(ge=1)] = 100 * 1024 * MIB
    """One artifact in the blob store."""
    max_attempt_bytes: Annotated[int, Field(ge=1)] = 1024 * 1024 * MIB
    """All artifacts of one attempt together."""
    blob_store_quota_bytes: Annotated[int, Field(ge=1)] | None = None
    """All blobs of the store together, those being uploaded included; unset: as much as the disk has."""
    max_transfers: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Artifacts that this scheduler receives and sends at one time. Each upload into a bucket holds up to 8 MiB in
    memory, and the two that are put together at one time up to 24 MiB more; into a folder it is one message. So 64 may
    take 560 MiB."""
    max_open_uploads: Annotated[int, Field(ge=1)] = 10_000
    """Uploads begun and not finished, of all schedulers."""
    max_lease_uploads: Annotated[int, Field(ge=1)] = 256
    """Uploads begun and not finished under one lease."""
    upload_expires_s: Positive = 24 * 3600.0
    """From an upload's creation, or from when it was taken up again; what is stored of an unfinished one goes then."""
    connection_age_s: Positive = 1800.0
    """How long a connection takes new calls. Executors are then asked to come again, over a new one that a load
    balancer may lead elsewhere; their jobs run on."""
    max_sessions: Annotated[int, Field(ge=1)] = 1000
    """Executors connected to this scheduler at one time."""
    commit_batch: Annotated[int, Field(ge=1, le=5000)] = 1000
    """Events in one transaction at most."""
    lease_batch: Annotated[int, Field(ge=1, le=1000)] = 500
    """Steps leased in one statement at most."""

    call_connections: Annotated[int, Field(ge=1, le=100)] = 6
    """Database connections for API calls."""
    engine_connections: Annotated[int, Field(ge=4, le=20)] = 6
    """Database connections for leasing, commits, heartbeats and sweeps, which calls never take."""
    statement_timeout_s: Positive = 20.0
    """Longest time of one statement, kept by the database."""
    lock_timeout_s: Positive = 5.0
    """Longest wait for one lock, kept by the database."""
    acquire_timeout_s: Positive = 5.0
    """Longest wait for a connection."""

    history_partitions_ahead: Annotated[int, Field(ge=1, le=30)] = 3
    """Days for which partitions of history are made ahead."""
    retention_days: Annotated[int, Field(ge=1, le=36_500)] | None = None
    """Days after its end for which a run is kept, with its steps and events; longer while a retry of it is kept, or
    the idempotency key that started it is younger than 7 days. Unset: for ever."""
    retention_every_s: Positive = 3600.0
    """How often what is past retention is looked for; after a failure sooner."""

    metrics_listen: str = ""
    """HOST:PORT where Prometheus finds metrics at /metrics, in plain text and for anybody: numbers by kind, method and
    code, no ids. Needs the extra `observability`. OTLP is set by OpenTelemetry's own variables."""
    metrics_every_s: Annotated[float, Field(ge=1)] = 15.0
    """How often metrics that the database alone knows are asked for, while metrics are on."""

    log_format: Literal["auto", "json", "console"] = "auto"
    """How lines on stderr look; `auto`: columns on a terminal, else JSON."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""
    reflection: bool = True
    """Serve gRPC reflection, so that grpcurl and the like need no files."""
    uvloop: bool = False
    """Use uvloop; needs the extra `speed`."""

    @property
    def reclaim_settle_s(self) -> float:
        return self.lease_s / 2 if self.settle_s is None else self.settle_s

    @field_validator("direct_executors", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))
        return value

    @model_validator(mode="after")
    def _contradictions(self) -> "Settings":
        """Refuse what cannot work together, by both names."""

        def refuse(rule: str, **values: float) -> None:
            shown = ", ".join(f"RARA_{name.upper()}={value:g}" for name, value in values.items())
            raise ValueError(f"{rule} ({shown})")

        if self.heartbeat_s > self.lease_s / 3:
            refuse(
                "RARA_HEARTBEAT_S must be at most a third of RARA_LEASE_S",
                heartbeat_s=self.heartbeat_s,
                lease_s=self.lease_s,
            )
        if self.silence_s < 2.5 * self.heartbeat_s:
            refuse(
                "RARA_SILENCE_S must be at least 2.5 times RARA_HEARTBEAT_S",
                silence_s=self.silence_s,
                heartbeat_s=self.heartbeat_s,
            )
        if self.silence_s >= self.lease_s:
            refuse(
                "RARA_SILENCE_S must be below RARA_LEASE_S", silence_s=self.silence_s, lease_s=self.lease_s
            )
        if self.max_frame_bytes < 2 * self.max_payload_bytes + MIB:
            refuse(
                "RARA_MAX_FRAME_BYTES must hold two payloads of RARA_MAX_PAYLOAD_BYTES and 1 MiB",
                max_frame_bytes=self.max_frame_bytes,
                max_payload_bytes=self.max_payload_bytes,
            )
        if self.retry_max_backoff_s < self.retry_initial_backoff_s:
            refuse(
                "RARA_RETRY_MAX_BACKOFF_S must not be below RARA_RETRY_INITIAL_BACKOFF_S",
                retry_max_backoff_s=self.retry_max_backoff_s,
                retry_initial_backoff_s=self.retry_initial_backoff_s,
            )
        try:
            check_blob_store_url(self.blob_store)
        except ValueError as error:
            raise ValueError(f"RARA_BLOB_STORE {error}") from None
        for name, address in (
            ("RARA_LISTEN", self.listen),
            *([("RARA_METRICS_LISTEN", self.metrics_listen)] if self.metrics_listen else []),
            *(("RARA_DIRECT_EXECUTORS", address) for address in self.direct_executors),
        ):
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ValueError(f"{name} must be HOST:PORT, not {address!r}")
        return self

    @property
    def direct_security(self) -> Security:
        """Towards the executors that are dialled."""
        return Security(
            token=None if self.direct_token is None else self.direct_token.get_secret_value(),
            token_file=self.direct_token_file,
            tls_ca=self.tls_ca,
            tls_client_cert=self.tls_client_cert,
            tls_client_key=self.tls_client_key,
            insecure=self.insecure,
        )

    @property
    def exposed(self) -> list[str]:
        """What anybody who reaches the wire may read, or do; empty: nothing. Loopback is not the wire."""
        found = []
        if not is_loopback(self.listen):
            if self.tls_cert is None:
                found.append(
                    f"RARA_LISTEN={self.listen} is beyond loopback, in plain text without RARA_TLS_CERT"
                )
            if self.auth == "none" and self.tls_client_ca is None:
                found.append(
                    f"RARA_LISTEN={self.listen} is beyond loopback, and anybody who reaches it may do anything "
                    "without RARA_AUTH=tokens or RARA_TLS_CLIENT_CA"
                )
        far = [address for address in self.direct_executors if not is_loopback(address)]
        if far and not self.tls_ca:
            found.append(
                f"RARA_DIRECT_EXECUTORS={','.join(far)} is beyond loopback, and jobs go there in plain text "
                "without RARA_TLS_CA"
            )
        return found

    @model_validator(mode="after")
    def _secure(self) -> "Settings":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("RARA_TLS_CERT and RARA_TLS_KEY go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("RARA_TLS_CLIENT_CA needs RARA_TLS_CERT")
        if self.direct_token is not None and self.direct_token_file is not None:
            raise ValueError(
                "RARA_DIRECT_TOKEN and RARA_DIRECT_TOKEN_FILE are both set: one of them is enough"
            )
        if self.exposed and not self.insecure:
            raise ValueError(f"{'; '.join(self.exposed)}: set it, or RARA_INSECURE=1 to go on all the same")
        for address in self.direct_executors:
            self.direct_security.check(address)
        return self
