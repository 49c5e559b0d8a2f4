"""The executor's settings: RARA_* environment variables, each with a flag of the same name."""

import os
import socket
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict
from rara_client.channel import is_loopback
from rara_client.security import Security

from rara_executor.errors import ConfigurationError


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"rara-executor-{os.getuid()}"


class Settings(BaseSettings):
    """Read once at start, checked as a whole. docs/reference/settings.md is made from here."""

    model_config = SettingsConfigDict(env_prefix="RARA_", frozen=True, extra="ignore", populate_by_name=True)

    scheduler: str = "127.0.0.1:7310"
    """host:port of the scheduler, several as ipv4:HOST:PORT,HOST:PORT, or any target that gRPC knows."""
    executor_listen: str = ""
    """HOST:PORT to serve ExecutorService on: then schedulers dial this executor (their RARA_DIRECT_EXECUTORS names
    it), and it dials RARA_SCHEDULER for artifacts alone."""
    insecure: bool = False
    """Serve and dial beyond loopback in plain text all the same."""
    token: SecretStr | None = None
    """The bearer token that the scheduler is shown; no handler gets to see it."""
    token_file: Path | None = None
    """A file with that token, read again when it changes."""
    tls_ca: str = ""
    """Dial the scheduler by TLS, and trust these authorities: a PEM file, or `system`."""
    tls_client_cert: Path | None = None
    """The certificate to show to a scheduler that asks for one: a PEM file, read again when it changes."""
    tls_client_key: Path | None = None
    """Its key."""
    tls_cert: Path | None = None
    """Serve ExecutorService by TLS with this certificate and what leads to its authority: a PEM file, read again when
    it changes."""
    tls_key: Path | None = None
    """Its key."""
    tls_client_ca: Path | None = None
    """Let in only schedulers that show a certificate of these authorities: a PEM file, read again when it changes."""
    direct_token_file: Path | None = None
    """Let in only schedulers that show a token of this file, one a line: their RARA_DIRECT_TOKEN_FILE."""
    executor_modules: Annotated[tuple[str, ...], NoDecode] = ()
    """Importable modules whose @operation functions this executor offers, separated by commas."""
    executor_name: str = Field(default_factory=socket.gethostname, max_length=64)
    """The label that people know; each process start has an id of its own beside it."""
    executor_kind: str = Field(default="python", max_length=64)
    """What a definition's executor_kind is compared with."""
    executor_labels: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """k=v,...: what a definition's required_labels are matched with."""
    executor_slots: int = Field(default=4, ge=1, le=100_000)
    """Jobs at once, async and blocking together."""
    executor_jobs_per_runner: int = Field(default=100, ge=1)
    """`async def` handlers that share one runner process. Killing one that ignores its cancel costs its
    neighbours a free retry, so more sharing is cheaper and less apart."""
    executor_prestart: int = Field(default=2, ge=0)
    """Runners for plain `def` handlers that are kept ready, at most one a slot: a step then costs no import."""
    executor_idle_s: float = Field(default=60.0, gt=0)
    """How long a runner beyond those kept may idle."""
    executor_start_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time that importing the modules may take."""
    executor_memory_bytes: int = Field(default=0, ge=0)
    """Address space of each runner; 0: no limit of ours."""
    executor_grace_s: float = Field(default=10.0, ge=0)
    """Between asking a handler to stop and killing its process, where the scheduler does not say."""
    executor_stop_s: float = Field(default=10.0, gt=0)
    """From SIGTERM to the end of the process, running handlers and last words included."""
    executor_dir: Path = Field(default_factory=_default_folder)
    """Scratch folders and the cache of input artifacts."""
    executor_cache_bytes: int = Field(default=10 << 30, ge=0)
    """Size to which the cache is kept; what running jobs use is not counted."""
    executor_transfers: int = Field(default=4, ge=1)
    """Artifacts moved at once."""
    executor_transfer_patience_s: float = Field(default=300.0, ge=0)
    """How long a transfer may move nothing, as while the scheduler is away or a disk is full, before it is given up."""
    executor_ready_file: Path | None = None
    """A file that is there, and touched every second, while jobs can come; for health checks."""
    executor_secrets_dir: Path = Path("/run/secrets")
    """Where the secret provider `file` looks."""
    executor_uvloop: bool = False
    """Use uvloop in the supervisor; needs the extra `speed`."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """How lines on stderr look; `auto`: columns on a terminal, else JSON."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is logged."""

    @field_validator("executor_modules", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("executor_labels", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        labels = {}
        for part in filter(None, (part.strip() for part in value.split(","))):
            key, separator, label = part.partition("=")
            if not separator or not key.strip():
                raise ValueError(f"{part!r} is not of the form key=value")
            labels[key.strip()] = label.strip()
        return labels

    @property
    def security(self) -> Security:
        """Towards the scheduler."""
        return Security(
            token=None if self.token is None else self.token.get_secret_value(),
            token_file=self.token_file,
            tls_ca=self.tls_ca,
            tls_client_cert=self.tls_client_cert,
            tls_client_key=self.tls_client_key,
            insecure=self.insecure,
        )

    @model_validator(mode="after")
    def _secure(self) -> "Settings":
        self.security.check(self.scheduler)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("RARA_TLS_CERT and RARA_TLS_KEY go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("RARA_TLS_CLIENT_CA needs RARA_TLS_CERT")
        return self

    @model_validator(mode="after")
    def _safe(self) -> "Settings":
        host, colon, port = self.executor_listen.rpartition(":")
        if not self.executor_listen:
            return self
        if not colon or not host or not port.isdecimal():
            raise ValueError(f"RARA_EXECUTOR_LISTEN must be HOST:PORT, not {self.executor_listen!r}")
        is_closed = self.tls_client_ca is not None or self.direct_token_file is not None
        is_safe = self.tls_cert is not None and is_closed
        if not self.insecure and not is_safe and not is_loopback(self.executor_listen):
            raise ValueError(
                f"RARA_EXECUTOR_LISTEN={self.executor_listen} is beyond loopback, and whoever reaches it may run "
                "anything: set RARA_TLS_CERT, with RARA_TLS_CLIENT_CA or RARA_DIRECT_TOKEN_FILE, or RARA_INSECURE=1 "
                "to do it all the same"
            )
        return self

    @model_validator(mode="after")
    def _complete(self) -> "Settings":
        if not self.executor_modules:
            raise ValueError(
                "RARA_EXECUTOR_MODULES (--module) names no module: there would be nothing to run"
            )
        return self


def load(given: dict[str, object]) -> Settings:
    """Settings from the environment, overridden by what is given. Raises ConfigurationError."""
    try:
        return Settings(**given)  # type: ignore[arg-type]  # pydantic checks the values
    except ValidationError as error:
        problems = []
        for problem in error.errors(include_url=False, include_input=False):
            where = ".".join(str(part) for part in problem["loc"])
            name = f"RARA_{where.upper()}: " if where else ""
            problems.append(f"{name}{problem['msg'].removeprefix('Value error, ')}")
        raise ConfigurationError("; ".join(problems)) from None
