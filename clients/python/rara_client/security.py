"""How a caller reaches a port: by TLS or in plain text, and with which token.

Tokens and certificates in files are read again when they change, so that neither has to be renewed by a restart.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from rara_client.certificates import SYSTEM, Fingerprint, channel_credentials, fingerprint
from rara_client.channel import is_loopback

Options = Sequence[tuple[str, Any]]
_MAX_RETIRED = 4
_TRUE = frozenset({"1", "true", "yes", "on"})


class TokenFile:
    """Tokens in a file, one a line: the first is sent, all are taken. Read again when the file changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: Fingerprint | None = None
        self._tokens: tuple[str, ...] = ()

    def tokens(self) -> tuple[str, ...]:
        """Raises ValueError where there is none. A file that is being replaced leaves what was read last."""
        try:
            now = fingerprint([self._path])
            if now != self._seen:
                lines = self._path.read_text(encoding="utf-8").split()
                self._tokens, self._seen = tuple(lines) or self._tokens, now
        except (OSError, UnicodeDecodeError) as error:
            if not self._tokens:
                raise ValueError(f"the token cannot be read: {error}") from error
        if not self._tokens:
            raise ValueError(f"there is no token in {self._path}")
        return self._tokens


@dataclass(frozen=True, slots=True)
class Security:
    """What a caller shows and trusts. Nothing: plain text and no token.

    token, token_file: at most one of them. tls_ca: a file with the authorities whose certificates are trusted, or
    `system`; empty: plain text. tls_client_cert, tls_client_key: shown to a port that asks for a certificate.
    insecure: a token may leave this machine in plain text.
    """

    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    tls_ca: str = ""
    tls_client_cert: Path | None = None
    tls_client_key: Path | None = None
    insecure: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """RARA_TOKEN, RARA_TOKEN_FILE, RARA_TLS_CA, RARA_TLS_CLIENT_CERT, RARA_TLS_CLIENT_KEY, RARA_INSECURE."""
        return cls(
            token=environ.get("RARA_TOKEN") or None,
            token_file=_path(environ.get("RARA_TOKEN_FILE")),
            tls_ca=environ.get("RARA_TLS_CA", ""),
            tls_client_cert=_path(environ.get("RARA_TLS_CLIENT_CERT")),
            tls_client_key=_path(environ.get("RARA_TLS_CLIENT_KEY")),
            insecure=environ.get("RARA_INSECURE", "").lower() in _TRUE,
        )

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.token_file is not None

    @property
    def is_plain(self) -> bool:
        """Whether what is sent can be read on its way."""
        return not self.tls_ca

    def exposes_token(self, target: str) -> bool:
        """Whether a token would leave this machine in plain text."""
        return self.has_token and self.is_plain and not is_loopback(target)

    def check(self, target: str) -> None:
        """Raises ValueError, naming the settings, for what cannot be or must not be."""
        if self.token is not None and self.token_file is not None:
            raise ValueError("RARA_TOKEN and RARA_TOKEN_FILE are both set: one of them is enough")
        if (self.tls_client_cert is None) != (self.tls_client_key is None):
            raise ValueError("RARA_TLS_CLIENT_CERT and RARA_TLS_CLIENT_KEY go together")
        if self.tls_client_cert is not None and self.is_plain:
            raise ValueError("RARA_TLS_CLIENT_CERT needs RARA_TLS_CA: a file, or `system`")
        if self.exposes_token(target) and not self.insecure:
            raise ValueError(
                f"a token for {target} needs TLS: set RARA_TLS_CA, or RARA_INSECURE=1 to send it in plain text"
            )
        self._token()
        if not self.is_plain:
            self._credentials()

    def channel(self, target: str, options: Options) -> grpc.aio.Channel:
        """A channel whose calls carry the token. Raises ValueError, as `check` does."""
        self.check(target)
        if self.is_plain and not self.has_token:
            return grpc.aio.insecure_channel(target, options=options)
        return _SecuredChannel(target, options, self)

    def _token(self) -> Callable[[], str] | None:
        """Gives the token to send now; None: none is sent. Raises ValueError."""
        if self.token_file is not None:
            file = TokenFile(self.token_file)
            file.tokens()
            return lambda: file.tokens()[0]
        token = self.token
        return None if token is None else lambda: token

    def _credentials(self) -> grpc.ChannelCredentials:
        return channel_credentials(self.tls_ca, self.tls_client_cert, self.tls_client_key)

    def _files(self) -> list[Path]:
        own = [file for file in (self.tls_client_cert, self.tls_client_key) if file is not None]
        return own if self.tls_ca in ("", SYSTEM) else [Path(self.tls_ca), *own]


class _SecuredChannel(grpc.aio.Channel):
    """A channel that is made anew when its certificates have changed, and adds the token to each call.

    Calls that are under way stay on the channel before, which is closed at one of the next changes.
    """

    def __init__(self, target: str, options: Options, security: Security) -> None:
        self._target = target
        self._options = options
        self._security = security
        self._token = security._token()  # noqa: SLF001 - one unit
        self._seen: Fingerprint | None = None
        self._retired: list[grpc.aio.Channel] = []
        self._closing: set[asyncio.Future[None]] = set()
        self._inner = self._open()

    def _open(self) -> grpc.aio.Channel:
        if self._security.is_plain:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        self._seen = fingerprint(self._security._files())  # noqa: SLF001
        return grpc.aio.secure_channel(self._target, self._security._credentials(), options=self._options)  # noqa: SLF001

    def _current(self) -> grpc.aio.Channel:
        if self._security.is_plain:
            return self._inner
        try:
            if fingerprint(self._security._files()) == self._seen:  # noqa: SLF001
                return self._inner
            opened = self._open()
        except (OSError, ValueError):  # half of a change: what is in use stays in use
            return self._inner
        self._retired.append(self._inner)
        self._inner = opened
        if len(self._retired) > _MAX_RETIRED:
            closing = asyncio.ensure_future(self._retired.pop(0).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        return opened

    def _method(self, kind: str, path: str, *serializers: Any, **named: Any) -> Any:
        made: list[Any] = [None, None]  # the channel, and its method

        def call(*arguments: Any, metadata: Any = None, **more: Any) -> Any:
            channel = self._current()
            if made[0] is not channel:
                made[:] = channel, getattr(channel, kind)(path, *serializers, **named)
            return made[1](*arguments, metadata=self._with_token(metadata), **more)

        return call

    def _with_token(self, metadata: Any) -> Any:
        if self._token is None:
            return metadata
        return (*(metadata or ()), ("authorization", f"Bearer {self._token()}"))

    def unary_unary(self, method: str, *serializers: Any, **more: Any) -> Any:
        return self._method("unary_unary", method, *serializers, **more)

    def unary_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        return self._method("unary_stream", method, *serializers, **more)

    def stream_unary(self, method: str, *serializers: Any, **more: Any) -> Any:
        return self._method("stream_unary", method, *serializers, **more)

    def stream_stream(self, method: str, *serializers: Any, **more: Any) -> Any:
        return self._method("stream_stream", method, *serializers, **more)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        for channel in (*self._retired, self._inner):
            await channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None
