"""How connections are kept alive and how long they live: the one place of these values.

Executors' channels send no pings: their heartbeats show both directions, and a server ends a connection that pings
more often than it allows (GOAWAY, ENHANCE_YOUR_CALM).
"""

from typing import Final

MIN_PING_INTERVAL_MS: Final = (
    10_000  # what a client may ping without data; gRPC's own default is five minutes
)
KEEPALIVE_TIME_MS: Final = 20_000
PING_TIMEOUT_MS: Final = 10_000
# Calls under way on one connection; a client's next one waits. Many watches are one connection's right, but not all.
MAX_STREAMS: Final = 10_000

# What a stream may send ahead of its reader: 40 MiB/s over a way of 50 ms.
STREAM_WINDOW_BYTES: Final = 2 * 1024 * 1024

# An old connection takes no new streams from its age on, give or take a tenth. Only then a session that is asked to
# come again comes over a new one, through whatever balances the load; and it must be asked before the old one ends.
_ASKED_AT: Final = 1.12
_LATEST: Final = 1.3


def keepalive_options() -> list[tuple[str, int]]:
    """Of a server."""
    return [
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # gRPC's own estimate takes a peer that is slow to answer for a long way, and grows: with a busy disk
        # below it, hundreds of MiB of one upload were in memory.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES),
    ]


def age_options(connection_age_s: float) -> list[tuple[str, int]]:
    """Of a server whose connections live for so long."""
    return [
        ("grpc.max_connection_age_ms", int(1000 * connection_age_s)),
        ("grpc.max_connection_age_grace_ms", int(1000 * (_LATEST - 0.9) * connection_age_s)),
    ]


def rebalance_after_s(connection_age_s: float) -> float:
    """How long a session lasts before it is asked to come again."""
    return _ASKED_AT * connection_age_s
