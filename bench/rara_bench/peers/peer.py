"""What the benchmark needs of a peer written in Python. The library is imported by its methods: it may be absent."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

OnStart: TypeAlias = Callable[[int], None]


class Peer(Protocol):
    """One system.

    settings: what was chosen, for the record. jobs: enough for some seconds of its work. remaining: SQL that
    counts what is not finished. uvloop: whether it runs on an event loop of ours.
    """

    name: str
    settings: str
    jobs: int
    concurrency: int
    remaining: str
    uvloop: bool

    async def install(self, dsn: str) -> None:
        """Make its schema in an empty database."""

    async def enqueue(self, dsn: str, count: int) -> None:
        """Store jobs 0 to count - 1, in its quickest way."""

    async def enqueue_one(self, dsn: str, number: int) -> None:
        """Store one job from the process that works; the connection is kept."""

    async def work(self, dsn: str, on_start: OnStart, concurrency: int) -> None:
        """Run jobs until cancelled; each tells its number when its handler begins."""
