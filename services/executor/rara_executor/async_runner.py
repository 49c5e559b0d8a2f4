"""A runner of `async def` handlers, side by side on one loop."""

import asyncio
import itertools
import os
import signal
import socket
from typing import cast

from rara_executor import outcomes
from rara_executor.handler_trace import attached
from rara_executor.handlers import Handlers
from rara_executor.job import Job
from rara_executor.registry import AsyncHandler, Operation
from rara_executor.runner_protocol import (
    CancelJob,
    Decoder,
    Failed,
    FromRunner,
    Leave,
    Message,
    Reply,
    Request,
    StartJob,
    Stopped,
    Succeeded,
    encode,
)


def run(link: socket.socket, handlers: Handlers, decoder: Decoder, early: list[Message]) -> None:
    """Serve until told to leave. decoder, early: what was received so far."""
    asyncio.run(_serve(link, handlers, decoder, early))


async def _serve(link: socket.socket, handlers: Handlers, decoder: Decoder, early: list[Message]) -> None:
    loop = asyncio.get_running_loop()
    # A stop signal to the whole process group is the supervisor's to answer: it drains, then tells us.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: None)
    runner = _AsyncRunner(handlers, decoder)
    await loop.create_connection(lambda: runner, sock=link)
    runner.take(early)
    await runner.left.wait()
    await runner.drain()


class _AsyncRunner(asyncio.Protocol):
    """The runner's end of the link: jobs by lease token, and what waits for a reply."""

    def __init__(self, handlers: Handlers, decoder: Decoder) -> None:
        self.left = asyncio.Event()
        self._handlers = handlers
        self._decoder = decoder
        self._jobs: dict[int, tuple[Job, asyncio.Task[None]]] = {}
        self._ports: dict[int, _Port] = {}
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._writable = asyncio.Event()
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are of no such class.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        # Without its supervisor nobody renews the leases: no handler, nor what it started, may go on.
        os.killpg(os.getpgrp(), signal.SIGKILL)

    def data_received(self, data: bytes) -> None:
        self.take(self._decoder.feed(data))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case StartJob():
                    self._start(message)
                case CancelJob():
                    self._cancel(message)
                case Reply():
                    port = self._ports.get(message.lease_token)
                    if port is not None:
                        port.answer(message)
                case Leave():
                    self.left.set()
                case _:
                    pass  # of a newer supervisor

    async def drain(self) -> None:
        self._flush()
        await self._writable.wait()

    def post(self, message: FromRunner) -> None:
        """Queue a message; all of one turn of the loop leave in one write."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode(message))

    async def send(self, message: FromRunner) -> None:
        self.post(message)
        # A handler that only reports must neither starve its loop nor fill the memory.
        await asyncio.sleep(0)
        await self._writable.wait()

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _start(self, start: StartJob) -> None:
        operation = self._handlers.find(start)
        if isinstance(operation, Failed):
            self.post(operation)
            return
        port = _Port(self)
        job = Job(start, port)
        task = asyncio.create_task(self._run(start, job, operation), name=f"job {start.lease_token}")
        self._ports[start.lease_token] = port
        self._jobs[start.lease_token] = job, task
        task.add_done_callback(lambda _: self._end(start.lease_token))

    def _cancel(self, message: CancelJob) -> None:
        held = self._jobs.get(message.lease_token)
        if held is not None:
            job, task = held
            job.ask_to_stop(message.reason)
            task.cancel()

    def _end(self, token: int) -> None:
        # A task that was cancelled before its first step has run nothing, and says so here.
        held = self._jobs.pop(token, None)
        self._ports.pop(token, None)
        if held is not None and held[1].cancelled():
            self.post(Stopped(token))

    async def _run(self, start: StartJob, job: Job, operation: Operation) -> None:
        self.post(await _outcome(start, job, operation))


async def _outcome(start: StartJob, job: Job, operation: Operation) -> Succeeded | Failed | Stopped:
    try:
        handler = cast("AsyncHandler", operation.handler)
        with attached(start):
            value = await handler(job)
        return outcomes.success(start, value)
    except asyncio.CancelledError as error:
        # Not raised again: this coroutine is all that its task does, and what it returns is the answer.
        return Stopped(start.lease_token) if job.cancelled else outcomes.failure(start, error)
    except BaseException as error:  # the handler's, whatever it is: the loop and the neighbours go on
        return outcomes.failure(start, error)


class _Port:
    """One job's way to the supervisor."""

    def __init__(self, runner: _AsyncRunner) -> None:
        self._runner = runner
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Reply]] = {}

    def post(self, message: FromRunner) -> None:
        self._runner.post(message)

    async def send(self, message: FromRunner) -> None:
        await self._runner.send(message)

    def next_request(self) -> int:
        return next(self._numbers)

    async def request(self, message: Request) -> Reply:
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[message.request] = future
        try:
            await self._runner.send(message)
            return await future
        finally:
            del self._waiting[message.request]

    def answer(self, reply: Reply) -> None:
        future = self._waiting.get(reply.request)
        if future is not None and not future.done():
            future.set_result(reply)
