"""Streams that outlive their calls: a watch goes on where it was when the connection dropped."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Protocol, TypeVar

import grpc.aio

from rara_client.errors import RaraError, RevisionCompacted, Unavailable, from_rpc_error, may_resume
from rara_client.pacing import Pacing

M = TypeVar("M")


class Stream(Protocol):
    """The part of grpc.aio's streaming call that is needed here."""

    async def read(self) -> object: ...

    def cancel(self) -> bool: ...


class Cursor(Protocol[M]):
    """Where a watch stands."""

    @property
    def message_type(self) -> type[M]: ...

    def open(self) -> Stream:
        """Start the call that continues from here."""

    def accept(self, message: M) -> bool:
        """Take note of a message; False: the caller has it already, or need not see it."""

    def restart(self) -> None:
        """Begin again with a snapshot: the changes since are no longer kept one by one."""

    async def is_over(self) -> bool:
        """Asked when a stream ended well: whether nothing more will come."""


async def follow(cursor: Cursor[M], pacing: Pacing) -> AsyncGenerator[M, None]:
    """Yield what the cursor accepts, over as many calls as it takes.

    Raises the fault of the last call: at once if retrying cannot help, after `retries` tries if the scheduler
    was never heard, else after `resume_within_s` without a word.
    """
    failures = 0
    was_heard = False
    last_word = pacing.clock()
    while True:
        fault: RaraError
        call = cursor.open()
        try:
            while (message := await _read(call, cursor.message_type, pacing.silence_s)) is not None:
                was_heard, last_word = True, pacing.clock()
                if cursor.accept(message):
                    failures = 0  # not before: a stream that only repeats itself is no success
                    yield message
            if await cursor.is_over():
                return
            fault = _unavailable("the scheduler ended the stream before the end")
        except RevisionCompacted as error:
            cursor.restart()
            fault = error
        except RaraError as error:
            if not may_resume(error):
                raise
            fault = error
        finally:
            call.cancel()
        failures += 1
        pause_s = pacing.pause_s(failures, fault.retry_after_s)
        if was_heard:
            is_hopeless = pacing.clock() + pause_s - last_word > pacing.resume_within_s
        else:
            is_hopeless = failures > pacing.retries
        if is_hopeless:
            raise fault
        await pacing.sleep(pause_s)


async def _read(call: Stream, message_type: type[M], silence_s: float) -> M | None:
    """The next message; None at a good end."""
    try:
        # A read that is cancelled ends the whole call, which is what a silent one deserves. Not wait_for: before
        # Python 3.12 it swallows the caller's own cancellation when a message arrives in the same moment.
        async with asyncio.timeout(silence_s):
            message = await call.read()
    except TimeoutError:
        raise _unavailable(f"the scheduler has said nothing for {silence_s:g} s") from None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return message if isinstance(message, message_type) else None  # grpc.aio.EOF is no message


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, reason="UNAVAILABLE", status="UNAVAILABLE")
