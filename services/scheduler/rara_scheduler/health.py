"""Asks the scheduler of this machine whether it serves: `python -m rara_scheduler.health`, a container's health check.

It asks at the port of RARA_LISTEN, by grpc.health.v1; exit code 0 while it serves. No token is needed for that.
"""

import os
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - read, not listened on


def own_address(listen: str) -> str:
    """Where a process beside it reaches a scheduler with this RARA_LISTEN."""
    host, _, port = listen.rpartition(":")
    return f"{_WILDCARDS.get(host, host)}:{port}"


def open_channel(address: str, environ: Mapping[str, str]) -> grpc.Channel:
    """To the scheduler that has these settings. Raises OSError when it cannot be reached."""
    options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0)]
    if not environ.get("RARA_TLS_CERT"):
        return grpc.insecure_channel(address, options=options)
    # The address on this machine stands in no certificate. Whatever is shown there is trusted: it is asked how it is,
    # and told nothing.
    shown, name = _shown(address)
    options.append(("grpc.ssl_target_name_override", name))
    pair = (
        environ.get("RARA_TLS_CLIENT_CERT") or environ["RARA_TLS_CERT"],
        environ.get("RARA_TLS_CLIENT_KEY") or environ.get("RARA_TLS_KEY", ""),
    )
    certificate, key = (
        (Path(file).read_bytes() for file in pair) if environ.get("RARA_TLS_CLIENT_CA") else (None, None)
    )
    credentials = grpc.ssl_channel_credentials(shown.encode(), key, certificate)
    return grpc.secure_channel(address, credentials, options=options)


def _shown(address: str) -> tuple[str, str]:
    """The certificate that the port shows, as PEM text, and a name in it."""
    any_certificate = ssl.create_default_context()
    any_certificate.check_hostname, any_certificate.verify_mode = False, ssl.CERT_NONE
    certificate = ssl.DER_cert_to_PEM_cert(_handshake(address, any_certificate)[0])
    just_this = ssl.create_default_context(cadata=certificate)
    just_this.check_hostname = False
    just_this.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _, names = _handshake(address, just_this)
    return certificate, (names[0] if names else "").replace("*", "rara", 1)


def _handshake(address: str, context: ssl.SSLContext) -> tuple[bytes, list[str]]:
    """What the port shows, and the names in it where the context checks them."""
    host, _, port = address.rpartition(":")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT_S) as plain,
        context.wrap_socket(plain) as shaken,
    ):
        facts: Any = shaken.getpeercert() or {}
        return shaken.getpeercert(True) or b"", [value for _, value in facts.get("subjectAltName", ())]


def main() -> None:
    address = own_address(os.environ.get("RARA_LISTEN", "127.0.0.1:7310"))
    try:
        with open_channel(address, os.environ) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
    except grpc.RpcError as error:
        sys.exit(f"{address}: {error.code().name}")
    except OSError as error:  # an SSLError is one
        sys.exit(f"{address}: UNAVAILABLE ({error})")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")


if __name__ == "__main__":
    main()
