"""Certificates of both sides of a connection, read again when their files change.

The files of a pair may be replaced one after the other, and by links, as Kubernetes does it: what does not fit together
is said once, and the certificate in use stays in use.
"""

import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import grpc

SYSTEM: Final = "system"  # instead of a file of certificate authorities: those that gRPC comes with

Fingerprint = tuple[tuple[int, int, int], ...]


def fingerprint(files: Sequence[Path]) -> Fingerprint:
    """What changes when the content of a file does. Raises OSError for a file that is not there."""
    found = [file.stat() for file in files]
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)


def check_pair(certificate: Path, key: Path) -> None:
    """Raises ValueError, naming the files, unless the key belongs to the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")  # never asks at a terminal
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{certificate} and {key} are no certificate and its key: {error}") from error


def check_authorities(file: Path) -> None:
    """Raises ValueError, naming the file, unless it holds certificates."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{file} holds no certificates of authorities: {error}") from error


class ServerCertificates:
    """What a port shows, and whom it lets in.

    client_authorities: callers must show a certificate that these have signed; None: callers need none.
    """

    def __init__(
        self,
        certificate: Path,
        key: Path,
        client_authorities: Path | None,
        *,
        on_reload: Callable[[str], None] = lambda _problem: None,
    ) -> None:
        """on_reload: told of each change of the files, with what is wrong with it, or "". Raises ValueError."""
        self._pair = certificate, key
        self._authorities = client_authorities
        self._on_reload = on_reload
        self._files = [certificate, key, *([] if client_authorities is None else [client_authorities])]
        self._seen: Fingerprint | None = None
        try:
            self._seen = fingerprint(self._files)
        except OSError as error:
            raise ValueError(str(error)) from error
        self._first = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._changed,  # type: ignore[arg-type]  # None means no change, which its stub has forgotten
            require_client_authentication=self._authorities is not None,
        )

    def _read(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._pair
        check_pair(certificate, key)
        if self._authorities is not None:
            check_authorities(self._authorities)
        return grpc.ssl_server_certificate_configuration(
            [(key.read_bytes(), certificate.read_bytes())],
            root_certificates=None if self._authorities is None else self._authorities.read_bytes(),
        )

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake, in a thread of its own: what to show from now on, if that is new."""
        try:
            now = fingerprint(self._files)
            if now == self._seen:
                return None
            self._seen = now
            read = self._read()
        except (OSError, ValueError) as error:
            self._on_reload(str(error))
            return None
        self._on_reload("")
        return read


def channel_credentials(
    authorities: str, certificate: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """Of a caller who trusts these authorities, a file or `system`, and shows a certificate. Raises ValueError."""
    if authorities != SYSTEM:
        check_authorities(Path(authorities))
    if certificate is not None and key is not None:
        check_pair(certificate, key)
    try:
        return grpc.ssl_channel_credentials(
            root_certificates=None if authorities == SYSTEM else Path(authorities).read_bytes(),
            private_key=None if key is None else key.read_bytes(),
            certificate_chain=None if certificate is None else certificate.read_bytes(),
        )
    except OSError as error:
        raise ValueError(str(error)) from error
