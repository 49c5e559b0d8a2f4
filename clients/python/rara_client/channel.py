"""The connection to a scheduler."""

import ipaddress
from typing import Final

import grpc
import grpc.aio

KEEPALIVE_MS: Final = 20_000  # while a call is under way; a scheduler takes offence below 10 s
PING_TIMEOUT_MS: Final = 10_000
# A run with 1,000 steps and the largest payloads that a list keeps is over gRPC's default of 4 MiB.
_MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024


def is_loopback(target: str) -> bool:
    """Whether the address stays on this machine."""
    if target.startswith("unix:"):
        return True
    host = target.rpartition(":")[0].strip("[]") or target
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def channel_options(target: str, user_agent: str) -> list[tuple[str, str | int]]:
    """Of a channel that reconnects within seconds."""
    options: list[tuple[str, str | int]] = [
        ("grpc.primary_user_agent", user_agent),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 5000),
        # A path that swallows everything is left only when a ping finds it: without, every later call would go
        # over it too, until TCP gives up after a quarter of an hour.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        # A scheduler that comes back may have another address; gRPC would ask for it again after 30 s only.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        # What a download may be ahead of a slow disk: gRPC's own estimate grows without bound.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 2 * 1024 * 1024),
    ]
    if is_loopback(target):
        # gRPC would send even 127.0.0.1 to the proxy that http_proxy names.
        options.append(("grpc.enable_http_proxy", 0))
    return options


def open_channel(
    target: str, *, credentials: grpc.ChannelCredentials | None, user_agent: str
) -> grpc.aio.Channel:
    """A channel that connects at the first call."""
    options = channel_options(target, user_agent)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)
