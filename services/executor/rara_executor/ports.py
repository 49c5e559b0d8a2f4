"""The ways from a job to whoever runs it: the supervisor, or a test."""

from typing import Protocol

from rara_executor.errors import JobFailure
from rara_executor.runner_protocol import FromRunner, Reply, Request


class AsyncPort(Protocol):
    """The way from an async handler to whoever runs it."""

    async def send(self, message: FromRunner) -> None: ...

    async def request(self, message: Request) -> Reply: ...

    def post(self, message: FromRunner) -> None: ...

    def next_request(self) -> int: ...


class BlockingPort(Protocol):
    """The same for a blocking handler."""

    def send(self, message: FromRunner) -> None: ...

    def request(self, message: Request) -> Reply: ...

    def post(self, message: FromRunner) -> None: ...

    def next_request(self) -> int: ...


def check(reply: Reply) -> Reply:
    """The reply of a request that worked. Raises JobFailure if it did not."""
    if reply.code:
        raise JobFailure(reply.code, reply.message)
    return reply
