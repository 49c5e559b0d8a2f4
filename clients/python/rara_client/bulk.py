"""Starting any number of runs: in batches, a few of them under way at once, with bounded memory."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Final

from rara.v1 import workflow_pb2

from rara_client.errors import RaraError

Requests = Iterable[workflow_pb2.StartRunRequest] | AsyncIterable[workflow_pb2.StartRunRequest]
Batch = list[workflow_pb2.StartRunRequest]
StartBatch = Callable[[Batch], Awaitable[workflow_pb2.BatchStartRunsResponse]]

MAX_BATCH: Final = 1000
BATCH_BYTES: Final = 1024 * 1024  # of requests in one call; a single larger one goes alone


async def start_all(
    start_batch: StartBatch, requests: Requests, *, batch_size: int, in_flight: int
) -> AsyncGenerator[workflow_pb2.StartedRun, None]:
    """What each request started, in their order. Requests are taken as their batches are sent, not before."""
    if not 1 <= batch_size <= MAX_BATCH:
        raise ValueError(f"batch_size must be 1 to {MAX_BATCH}, not {batch_size}")
    if in_flight < 1:
        raise ValueError(f"in_flight must be at least 1, not {in_flight}")
    calls: deque[asyncio.Task[workflow_pb2.BatchStartRunsResponse]] = deque()
    begin = 0
    try:
        async with aclosing(_batches(requests, batch_size)) as batches:
            async for batch in batches:
                calls.append(asyncio.create_task(_start(start_batch, batch, begin), name="start batch"))
                begin += len(batch)
                if len(calls) == in_flight:
                    for started in (await calls.popleft()).runs:
                        yield started
        while calls:
            for started in (await calls.popleft()).runs:
                yield started
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _start(start_batch: StartBatch, batch: Batch, begin: int) -> workflow_pb2.BatchStartRunsResponse:
    """begin: the number of the batch's first request; `index` in a fault's metadata counts from the first of all."""
    try:
        return await start_batch(batch)
    except RaraError as fault:
        if "index" in fault.metadata:
            fault.metadata["index"] = str(begin + int(fault.metadata["index"]))
        raise


async def _batches(requests: Requests, batch_size: int) -> AsyncGenerator[Batch, None]:
    batch: Batch = []
    size_bytes = 0
    async for request in _each(requests):
        request_bytes = request.ByteSize()
        if batch and (len(batch) == batch_size or size_bytes + request_bytes > BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(request)
        size_bytes += request_bytes
    if batch:
        yield batch


async def _each(requests: Requests) -> AsyncIterator[workflow_pb2.StartRunRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
