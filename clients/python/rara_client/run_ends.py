"""Waiting for the ends of any number of runs on one stream, over dropped connections, with bounded memory."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import grpc.aio
from rara.v1 import workflow_pb2

from rara_client.pacing import Pacing
from rara_client.watching import Stream, follow

M = TypeVar("M")
RunIds = Iterable[str] | AsyncIterable[str]

MAX_UNTOLD: Final = 100_000  # the contract's bound on one stream
_MAX_IDS: Final = 1000  # and on one message


@dataclass(frozen=True, slots=True)
class RunEnd:
    """run: as it ended, without large payloads; None: there is no such run."""

    workflow_run_id: str
    run: workflow_pb2.WorkflowRun | None


class Call(Stream, Protocol):
    """The part of grpc.aio's call with two streams that is needed here."""

    async def write(self, request: workflow_pb2.WatchRunsRequest) -> None: ...

    async def done_writing(self) -> None: ...


class EndsCursor:
    """What is waited for, and what of it the present call has been asked."""

    message_type = workflow_pb2.WatchRunsResponse

    def __init__(self, open_call: Callable[[], Call], max_untold: int) -> None:
        self._open_call = open_call
        self._max_untold = max_untold
        self._untold: dict[str, None] = {}
        self._call: _AskingCall | None = None
        self._is_complete = False
        self._room = asyncio.Event()

    @property
    def is_done(self) -> bool:
        return self._is_complete and not self._untold

    async def take(self, run_ids: RunIds) -> None:
        """Ask for all of them, as many at a time as one stream may wait for."""
        if isinstance(run_ids, AsyncIterable):
            async for run_id in run_ids:
                await self._add(run_id)
        else:
            for number, run_id in enumerate(run_ids, 1):
                await self._add(run_id)
                if number % _MAX_IDS == 0:
                    await asyncio.sleep(0)  # others share the loop
        self._is_complete = True
        if self._call is not None:
            self._call.complete()

    async def _add(self, run_id: str) -> None:
        while len(self._untold) >= self._max_untold:
            self._room.clear()
            await self._room.wait()
        run_id = canonical_id(run_id)
        if run_id not in self._untold:
            self._untold[run_id] = None
            if self._call is not None:
                self._call.ask(run_id)

    def told(self, message: workflow_pb2.WatchRunsResponse) -> list[RunEnd]:
        """What a message says of runs that were waited for."""
        ends = [RunEnd(run.workflow_run_id, run) for run in message.ended]
        ends += [RunEnd(run_id, None) for run_id in message.not_found]
        new = [end for end in ends if end.workflow_run_id in self._untold]
        for end in new:
            self._untold.pop(end.workflow_run_id, None)
        self._room.set()
        return new

    # As `follow` asks for it.

    def open(self) -> Stream:
        self._call = _AskingCall(self._open_call(), list(self._untold), is_complete=self._is_complete)
        return self._call

    def accept(self, message: workflow_pb2.WatchRunsResponse) -> bool:
        return any(run.workflow_run_id in self._untold for run in message.ended) or any(
            run_id in self._untold for run_id in message.not_found
        )

    def restart(self) -> None:
        """There are no revisions here."""

    async def is_over(self) -> bool:
        return self.is_done


class _AskingCall:
    """A call that asks for runs beside being read; asking costs one message for all that came meanwhile."""

    def __init__(self, call: Call, run_ids: list[str], *, is_complete: bool) -> None:
        self._call = call
        self._unasked = run_ids
        self._is_complete = is_complete
        self._wake = asyncio.Event()
        self._asking = asyncio.create_task(self._ask(), name="ask for ends of runs")

    def ask(self, run_id: str) -> None:
        self._unasked.append(run_id)
        self._wake.set()

    def complete(self) -> None:
        self._is_complete = True
        self._wake.set()

    async def read(self) -> object:
        return await self._call.read()

    def cancel(self) -> bool:
        self._asking.cancel()
        return self._call.cancel()

    async def _ask(self) -> None:
        try:
            while True:
                self._wake.clear()
                while self._unasked:
                    page, self._unasked = self._unasked[:_MAX_IDS], self._unasked[_MAX_IDS:]
                    await self._call.write(workflow_pb2.WatchRunsRequest(workflow_run_ids=page))
                if self._is_complete:
                    await self._call.done_writing()
                    return
                await self._wake.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call has ended: whoever reads it is told why


async def ends_of(
    open_call: Callable[[], Call], run_ids: RunIds, pacing: Pacing, *, max_untold: int
) -> AsyncGenerator[RunEnd, None]:
    """Each run when it has ended. Raises what `follow` raises, and what `run_ids` raise."""
    if not 1 <= max_untold <= MAX_UNTOLD:
        raise ValueError(f"max_untold must be 1 to {MAX_UNTOLD}, not {max_untold}")
    cursor = EndsCursor(open_call, max_untold)
    taking = asyncio.create_task(cursor.take(run_ids), name="runs to wait for")
    reading: asyncio.Future[workflow_pb2.WatchRunsResponse] | None = None
    async with aclosing(follow(cursor, pacing)) as messages:
        try:
            while not cursor.is_done:
                reading = reading or asyncio.ensure_future(anext(messages))
                works: list[asyncio.Future[Any]] = [reading]
                if taking.done():
                    taking.result()
                else:
                    works.append(taking)
                await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                if reading.done():
                    message, reading = await reading, None
                    for end in cursor.told(message):
                        yield end
        except StopAsyncIteration:
            return  # all was told in the moment in which the scheduler ended the stream
        finally:
            await _stopped(taking)
            if reading is not None:
                await _stopped(reading)


async def _stopped(work: "asyncio.Future[M]") -> None:
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()  # nobody asks any more


def canonical_id(run_id: str) -> str:
    """As the scheduler writes it; what is no id is told to be unknown under the name that it was given."""
    try:
        return str(uuid.UUID(run_id))
    except ValueError:
        return run_id
