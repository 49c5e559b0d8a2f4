"""Main program of a runner: imports the user's modules, then runs handlers for the supervisor.

Started as `python -m rara_executor.runner_process FD PARENT_PID`, where FD is its end of a socket pair.
"""

import gc
import os
import signal
import socket
import sys
import threading
import traceback

from rara_executor import async_runner, blocking_runner, registry
from rara_executor.handlers import Handlers
from rara_executor.parent_death import die_with_parent
from rara_executor.runner_protocol import Assume, Decoder, Message, Ready, Setup, encode


def main(argv: list[str]) -> int:
    descriptor, parent = int(argv[0]), int(argv[1])
    die_with_parent(parent)
    _let_forks_be_ordinary_processes()
    os.set_inheritable(descriptor, False)  # what a handler starts must not hold the link open
    link = socket.socket(fileno=descriptor)
    decoder = Decoder()
    setup, rest = _receive(link, decoder, [])
    if not isinstance(setup, Setup):
        return 1
    handlers, problem = _prepare(setup)
    if handlers is None:
        link.sendall(encode(Ready([], problem)))
        return 1
    gc.freeze()  # what was imported stays: collections need not walk it
    link.sendall(encode(Ready(handlers.catalogue(), "")))
    role, rest = _receive(link, decoder, rest)
    if not isinstance(role, Assume):
        return 1
    if role.is_async:
        async_runner.run(link, handlers, decoder, rest)
    else:
        blocking_runner.run(link, handlers, decoder, rest)
    return 0


def _let_forks_be_ordinary_processes() -> None:
    """For what a handler forks: a runner passes over stop signals, but multiprocessing ends its workers by one.

    One that comes before the child is that far must wait, not be passed over.
    """
    stops = (signal.SIGTERM, signal.SIGINT)
    before = threading.local()

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, stops)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def be_ordinary() -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        let_go()

    os.register_at_fork(before=hold, after_in_parent=let_go, after_in_child=be_ordinary)


def _prepare(setup: Setup) -> tuple[Handlers | None, str]:
    """Import the modules. The second value says why it failed."""
    _limit_memory(setup.memory_limit_bytes)
    sys.path[:] = [*setup.sys_path, *(entry for entry in sys.path if entry not in setup.sys_path)]
    try:
        return Handlers(registry.load(setup.modules)), ""
    except BaseException as error:  # user code at import: whatever it is, the supervisor must hear of it
        print(traceback.format_exc(), file=sys.stderr)  # noqa: T201 - the supervisor logs what we write
        return None, f"{type(error).__name__}: {error}"


def _limit_memory(limit_bytes: int) -> None:
    if limit_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


def _receive(
    link: socket.socket, decoder: Decoder, early: list[Message]
) -> tuple[Message | None, list[Message]]:
    """The next message and those that came with it; None: the supervisor is gone."""
    while not early:
        data = link.recv(blocking_runner.RECEIVE_BYTES)
        if not data:
            return None, []
        early = decoder.feed(data)
    return early[0], early[1:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
