"""The supervisor's end of one runner process."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
from enum import StrEnum
from typing import Protocol, cast

from rara_executor.child_process import ChildProcess, ProcessExit
from rara_executor.runner_protocol import (
    Assume,
    CancelJob,
    Decoder,
    FromRunner,
    Leave,
    Message,
    ProtocolError,
    Ready,
    Setup,
    StartJob,
    ToRunner,
    encode,
)
from rara_executor.warden import MARK

UNLINKED_S = 1.0


class RunnerState(StrEnum):
    STARTING = "starting"  # importing the user's modules
    READY = "ready"
    LEAVING = "leaving"  # was told to exit, or killed; takes no job
    ENDED = "ended"


class RunnerEvents(Protocol):
    """Who hears what happens in a runner."""

    def on_ready(self, runner: "Runner", ready: Ready) -> None: ...

    def on_message(self, runner: "Runner", message: FromRunner) -> None: ...

    def on_line(self, runner: "Runner", stream: str, line: bytes) -> None: ...

    def on_exit(self, runner: "Runner", end: ProcessExit) -> None: ...


class Runner(asyncio.Protocol):
    """A process, the jobs it holds, and the link to it.

    Messages of one turn of the loop leave in one write. What cannot be written waits in the transport: at
    most the jobs that the runner has room for.
    """

    def __init__(self, runner_id: str, setup: Setup, events: RunnerEvents) -> None:
        self.runner_id = runner_id
        self.mark = secrets.token_hex(8)  # of all processes that come from it
        self.state = RunnerState.STARTING
        self.is_async = False
        self.jobs: set[int] = set()
        self.asked: set[int] = set()  # jobs that were asked to stop
        self.killed_for: int | None = None  # the job that it was killed for
        self.idle_since = asyncio.get_running_loop().time()
        self._setup = setup
        self._events = events
        self._decoder = Decoder()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._process: ChildProcess | None = None

    async def start(self) -> None:
        """Spawn the process. It is ready when on_ready is called. Raises OSError."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                ours.setblocking(False)
                self._process = ChildProcess(
                    [
                        sys.executable,
                        "-u",
                        "-m",
                        "rara_executor.runner_process",
                        str(theirs.fileno()),
                        str(os.getpid()),
                    ],
                    descriptors=[theirs.fileno()],
                    mark=self.mark,
                    environment=dict(os.environ) | {MARK: self.mark},
                    on_line=lambda stream, line: self._events.on_line(self, stream, line),
                    on_exit=self._on_exit,
                )
                await loop.create_connection(lambda: self, sock=ours)
            except BaseException:
                ours.close()
                self.kill()
                raise
        self.send(self._setup)

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def ended(self) -> None:
        if self._process is not None:
            await asyncio.shield(self._process.exited)

    def assume(self, *, is_async: bool) -> None:
        self.is_async = is_async
        self.state = RunnerState.READY
        self.send(Assume(is_async))

    def start_job(self, start: StartJob) -> None:
        self.jobs.add(start.lease_token)
        self.send(start)

    def ask_to_stop(self, token: int, reason: str) -> None:
        self.asked.add(token)
        self.send(CancelJob(token, reason))

    def end_job(self, token: int) -> None:
        self.jobs.discard(token)
        self.asked.discard(token)
        self.idle_since = asyncio.get_running_loop().time()

    def leave(self) -> None:
        if self.state in (RunnerState.STARTING, RunnerState.READY):
            self.state = RunnerState.LEAVING
            self.send(Leave())

    def kill(self, token: int | None = None) -> None:
        """Kill the process and its tree. token: the job that it has to be killed for."""
        if self.killed_for is None:
            self.killed_for = token
        if self.state is not RunnerState.ENDED:
            self.state = RunnerState.LEAVING
        if self._process is not None:
            self._process.kill()

    def send(self, message: ToRunner) -> None:
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode(message))

    def _flush(self) -> None:
        if self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports are of no such class.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages: list[Message] = self._decoder.feed(data)
        except ProtocolError:
            self.kill()
            return
        for message in messages:
            match message:
                case Ready():
                    self._events.on_ready(self, message)
                case Setup() | Assume() | StartJob() | CancelJob() | Leave():
                    self.kill()  # it says what only we say
                case _:
                    self._events.on_message(self, message)  # type: ignore[arg-type]  # Reply is never sent to us

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._transport = None
        if self._process is not None and self.state is not RunnerState.LEAVING:
            # A dying process closes its link before its end can be seen, and who killed it must stay known. One
            # that lives on without a link can neither be told nor tell anything.
            asyncio.get_running_loop().call_later(UNLINKED_S, self.kill)

    def _on_exit(self, end: ProcessExit) -> None:
        # What it wrote before it ended may still be in the socket, and a result in it counts.
        if self._transport is not None:
            with contextlib.suppress(OSError, ValueError):
                self._read_rest(self._transport)
            self._transport.abort()
            self._transport = None
        self.state = RunnerState.ENDED
        self._events.on_exit(self, end)

    def _read_rest(self, transport: asyncio.Transport) -> None:
        link = transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(link.fileno())) as rest:
            rest.setblocking(False)
            while data := rest.recv(1 << 18):
                self.data_received(data)
