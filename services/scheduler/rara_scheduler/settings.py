"""The scheduler's settings: read once from `RARA_*`, checked as a whole, then passed on as values."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

MIB = 1024 * 1024

Positive = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Every value has its unit in its name; durations are seconds."""

    model_config = SettingsConfigDict(env_prefix="RARA_", frozen=True, extra="ignore")

    database_url: (
        str  # postgresql://user@host/database; for a Unix socket postgresql:///database?host=/folder
    )
    listen: str = "127.0.0.1:7310"  # HOST:PORT; port 0 takes a free one, and the ready line names it
    migrate: bool = False  # apply missing migrations before serving
    blob_store: str = "file:///var/lib/rara/blobs"  # where artifacts' bytes live
    scheduler_name: str = ""  # label for people; default: the host's name

    lease_s: Positive = 30.0  # how long an executor may be unheard of before its steps are leased again
    heartbeat_s: Positive = 5.0  # at most a third of the lease, so that two may be lost
    silence_s: Positive = 15.0  # a session without a frame for so long is closed; at least 2.5 heartbeats
    accept_timeout_s: Positive = 10.0  # from the grant to `accepted`
    cancel_grace_s: Positive = (
        10.0  # between asking and the kill, where neither step nor request says otherwise
    )
    settle_s: Annotated[float, Field(ge=0)] | None = (
        None  # no reclaim after a start or outage; default: half the lease
    )
    sweep_s: Positive = 1.0  # how often expired leases, due steps and deadlines are looked for
    poll_s: Positive = 1.0  # how often ready steps are looked for without a hint
    stop_s: Positive = 10.0  # a graceful stop ends within this

    # The default retry policy, where a definition says nothing.
    retry_max_attempts: Annotated[int, Field(ge=1, le=1000)] = 3
    retry_initial_backoff_s: Annotated[float, Field(ge=0)] = 1.0
    retry_max_backoff_s: Annotated[float, Field(ge=0)] = 300.0
    retry_backoff_multiplier: Annotated[float, Field(ge=1, le=100)] = 2.0

    max_payload_bytes: Annotated[int, Field(ge=1024)] = MIB
    max_inline_bytes: Annotated[int, Field(ge=0, le=64 * 1024)] = 16 * 1024
    max_frame_bytes: Annotated[int, Field(ge=MIB)] = 4 * MIB
    event_window: Annotated[int, Field(ge=16, le=100_000)] = 5000  # unacknowledged events per session
    max_blob_bytes: Annotated[int, Field(ge=1)] = 100 * 1024 * MIB
    upload_expires_s: Positive = (
        24 * 3600.0
    )  # from its creation; what is stored of an unfinished one goes then
    max_sessions: Annotated[int, Field(ge=1)] = 1000
    commit_batch: Annotated[int, Field(ge=1, le=5000)] = 1000  # events in one transaction at most
    lease_batch: Annotated[int, Field(ge=1, le=1000)] = 500  # steps leased in one statement at most

    call_connections: Annotated[int, Field(ge=1, le=100)] = 6
    engine_connections: Annotated[int, Field(ge=3, le=20)] = 5  # commit, lease, heartbeat, sweep, listen
    statement_timeout_s: Positive = 20.0
    lock_timeout_s: Positive = 5.0
    acquire_timeout_s: Positive = 5.0

    history_partitions_ahead: Annotated[int, Field(ge=1, le=30)] = 3  # days

    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    reflection: bool = True
    uvloop: bool = False

    @property
    def reclaim_settle_s(self) -> float:
        return self.lease_s / 2 if self.settle_s is None else self.settle_s

    @property
    def blob_folder(self) -> Path:
        return Path(self.blob_store.removeprefix("file://"))

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
        if not self.blob_store.startswith("file:///"):
            raise ValueError("RARA_BLOB_STORE must be a file:/// URL with an absolute path")
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"RARA_LISTEN must be HOST:PORT, not {self.listen!r}")
        return self
