"""Ports for servers that are started and dialled within a moment."""

import socket


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now. Somebody else may take it before its server does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
