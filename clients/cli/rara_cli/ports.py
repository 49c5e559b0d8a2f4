"""Ports for servers that go away and come back."""

import contextlib
import random
import socket
from typing import Final

_PORTS: Final = (15_000, 32_000)  # below those that kernels give away


def lasting_port() -> int:
    """A free port that stays free while its server is away.

    One of those that the kernel gives away would not: it may become the near end of somebody's connection, even of
    the one that a client then makes to itself.
    """
    while True:
        port = random.randrange(*_PORTS)  # noqa: S311 - not a secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
