"""A runner of plain `def` handlers: one at a time on the main thread, the link on another."""

import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import cast

from rara_executor import outcomes
from rara_executor.errors import JobCancelledError
from rara_executor.handler_trace import attached
from rara_executor.handlers import Handlers
from rara_executor.job import BlockingJob
from rara_executor.orphans import adopt_orphans, has_children, kill_descendants
from rara_executor.registry import BlockingHandler, Operation
from rara_executor.runner_protocol import (
    CancelJob,
    Decoder,
    Failed,
    FromRunner,
    Leave,
    LeavesChildren,
    Message,
    Reply,
    Request,
    StartJob,
    Stopped,
    Succeeded,
    encode,
)

RECEIVE_BYTES = 1 << 18


def run(link: socket.socket, handlers: Handlers, decoder: Decoder, early: list[Message]) -> None:
    """Serve until told to leave. decoder, early: what was received so far."""
    adopt_orphans()
    runner = _BlockingRunner(link, handlers)
    signal.signal(signal.SIGTERM, runner.on_signal)
    # A Ctrl-C on the terminal is the supervisor's to answer: it drains, then tells us.
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=runner.read, args=(decoder, early), name="link", daemon=True).start()
    runner.serve()


class _BlockingRunner:
    def __init__(self, link: socket.socket, handlers: Handlers) -> None:
        self._link = link
        self._handlers = handlers
        self._todo: queue.SimpleQueue[StartJob | Leave] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._main = threading.get_ident()
        self._current: BlockingJob | None = None  # while user code may run
        self._port: _Port | None = None
        self._deferring = 0
        self._deferred = False

    def serve(self) -> None:
        while True:
            match self._todo.get():
                case Leave():
                    kill_descendants()
                    return
                case StartJob() as start:
                    outcome = self._run(start)
                    if has_children():
                        self.send(LeavesChildren(start.lease_token))
                    self.send(outcome)
                    if isinstance(outcome, Stopped):
                        # What a stopped handler left behind, threads and children, ends with this process.
                        kill_descendants()
                        sys.stdout.flush()
                        sys.stderr.flush()
                        os._exit(0)

    # On the link's thread.

    def read(self, decoder: Decoder, messages: list[Message]) -> None:
        while True:
            for message in messages:
                self._take(message)
            data = self._receive()
            if not data:
                # Without its supervisor nobody renews the lease: neither handler nor its children may go on.
                os.killpg(os.getpgrp(), signal.SIGKILL)
            messages = decoder.feed(data)

    def _receive(self) -> bytes:
        try:
            return self._link.recv(RECEIVE_BYTES)
        except OSError:
            return b""

    def _take(self, message: Message) -> None:
        match message:
            case StartJob() | Leave():
                self._todo.put(message)
            case CancelJob():
                self._cancel(message)
            case Reply():
                port = self._port
                if port is not None and port.lease_token == message.lease_token:
                    port.answer(message)
            case _:
                pass  # of a newer supervisor

    def _cancel(self, message: CancelJob) -> None:
        job = self._current
        if job is not None and job.lease_token == message.lease_token and not job.cancelled:
            job.ask_to_stop(message.reason)
            # To the main thread and no other, so that it interrupts the call that the handler waits in.
            signal.pthread_kill(self._main, signal.SIGTERM)

    # On the main thread.

    def on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Raise in the handler if it was asked to stop. A SIGTERM from elsewhere is the supervisor's to answer."""
        job = self._current
        if job is None or not job.cancelled:
            return
        if self._deferring:
            self._deferred = True
            return
        raise JobCancelledError(job.cancel_reason)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Hold the exception of a cancel back, so that no frame is cut in the middle."""
        if threading.get_ident() != self._main:
            yield
            return
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1
        if self._deferred and not self._deferring:
            self._deferred = False
            job = self._current
            if job is not None:
                raise JobCancelledError(job.cancel_reason)

    def send(self, message: FromRunner) -> None:
        data = encode(message)
        with self.deferring(), self._sending:
            self._link.sendall(data)

    def _run(self, start: StartJob) -> Succeeded | Failed | Stopped:
        operation = self._handlers.find(start)
        if isinstance(operation, Failed):
            return operation
        self._port = port = _Port(self, start.lease_token)
        job = BlockingJob(start, port)
        try:
            return self._call(start, job, operation)
        except JobCancelledError:  # it came between the handler's end and ours
            return Stopped(start.lease_token)
        finally:
            self._current = None
            self._port = None
            self._deferred = False

    def _call(self, start: StartJob, job: BlockingJob, operation: Operation) -> Succeeded | Failed | Stopped:
        handler = cast("BlockingHandler", operation.handler)
        try:
            with attached(start):
                self._current = job
                value = handler(job)
                self._current = None
            return outcomes.success(start, value)
        except JobCancelledError as error:
            return Stopped(start.lease_token) if job.cancelled else outcomes.failure(start, error)
        except BaseException as error:  # the handler's, whatever it is: the process goes on
            self._current = None
            return outcomes.failure(start, error)


class _Port:
    """One job's way to the supervisor."""

    def __init__(self, runner: _BlockingRunner, lease_token: int) -> None:
        self.lease_token = lease_token
        self._runner = runner
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Reply]] = {}

    def post(self, message: FromRunner) -> None:
        self._runner.send(message)

    def send(self, message: FromRunner) -> None:
        self._runner.send(message)

    def next_request(self) -> int:
        return next(self._numbers)

    def request(self, message: Request) -> Reply:
        answers: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._waiting[message.request] = answers
        try:
            self._runner.send(message)
            return answers.get()  # ends by the reply, by a cancel's signal, or with the process
        finally:
            del self._waiting[message.request]

    def answer(self, reply: Reply) -> None:
        answers = self._waiting.get(reply.request)
        if answers is not None:
            answers.put(reply)
