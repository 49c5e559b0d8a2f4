"""`rara dev up` in one terminal: start everything, say where it is, stop it in order."""

import asyncio
import fcntl
import os
import shutil
import signal
from pathlib import Path

from rara_scheduler.embedded import EmbeddedPostgresError

from rara_cli.ask import confirm
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import dumps
from rara_cli.session import Session
from rara_cli.stack import PartFailed, PortTaken, Stack, StackSettings

_ECHO_S = 0.2
# What a folder of ours holds, and nothing else: `reset` deletes no other.
_OURS = frozenset({"postgres", "blobs", "executor", "logs"})


async def stay_up(session: Session, settings: StackSettings) -> int:
    """Run the stack until SIGINT or SIGTERM; the exit code. A second signal kills what still runs."""
    stop = asyncio.Event()
    stack = Stack(settings, report=lambda line: session.note(f"rara: {line}"))
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            stack.interrupt()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        return await _run(session, stack, stop)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


async def _run(session: Session, stack: Stack, stop: asyncio.Event) -> int:
    echo = asyncio.create_task(_echo(session, stack), name="echo logs") if session.verbose else None
    try:
        if not await _start(stack, stop):
            session.note("rara: interrupted while starting: nothing runs")
            return Exit.INTERRUPTED
        _say_hello(session, stack)
        waits = [
            asyncio.create_task(stop.wait(), name="wait for a signal"),
            asyncio.create_task(stack.wait(), name="wait for a failure"),
        ]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.wait(waits)
        for task in done:
            task.result()
        session.note("rara: stopping the executor, the scheduler, the database")
        await stack.stop()
        session.note("rara: stopped")
        return Exit.OK
    except PartFailed as error:
        raise CommandError(Exit.UNEXPECTED, "PART_FAILED", str(error)) from error
    except PortTaken as error:
        raise CommandError(Exit.REFUSED, "PORT_TAKEN", str(error), "rara dev up --port 0") from error
    except EmbeddedPostgresError as error:
        raise CommandError(Exit.REFUSED, error.code, str(error)) from error
    finally:
        await stack.stop()
        if echo is not None:
            echo.cancel()
            await asyncio.wait([echo])


async def _start(stack: Stack, stop: asyncio.Event) -> bool:
    """Start all; False if a signal came first."""
    start = asyncio.create_task(stack.start(), name="start the stack")
    interrupted = asyncio.create_task(stop.wait(), name="wait for a signal")
    try:
        await asyncio.wait((start, interrupted), return_when=asyncio.FIRST_COMPLETED)
    finally:
        interrupted.cancel()
        if not start.done():
            start.cancel()
        await asyncio.wait((start, interrupted))  # a cancelled start stops what it has started
    if start.cancelled():
        return False
    start.result()
    return not stop.is_set()


def _say_hello(session: Session, stack: Stack) -> None:
    settings = stack.settings
    if session.output in ("json", "jsonl"):
        print(
            dumps(
                {
                    "type": "ready",
                    "server": stack.address,
                    "directory": str(settings.directory),
                    "database_url": stack.dsn,
                }
            ),
            flush=True,
        )
        return
    print(f"rara is up at {stack.address}", flush=True)
    server = "" if stack.address == Session().server else f" --server {stack.address}"
    session.note(
        f"data in {settings.directory}, logs in {stack.logs}; operations of {', '.join(settings.modules)}\n"
        f"in another terminal: rara{server} executor list    all in one go: rara dev demo\n"
        f"its history against the promises: rara db check --database-url '{stack.dsn}'\n"
        "Ctrl-C stops everything; the data stays"
    )


async def _echo(session: Session, stack: Stack) -> None:
    """Copy what the parts write from now on to the terminal, each line with the part's name."""
    offsets = {path: path.stat().st_size for path in stack.logs.glob("*.log")}
    while True:
        for path in sorted(stack.logs.glob("*.log")):
            with path.open("rb") as file:
                file.seek(offsets.get(path, 0))
                data = file.read(1024 * 1024)
            whole = data[: data.rfind(b"\n") + 1]
            offsets[path] = offsets.get(path, 0) + len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                session.note(f"{path.stem:<9} | {line}")
        await asyncio.sleep(_ECHO_S)


def reset_folder(session: Session, directory: Path) -> None:
    """Delete the stack's data after asking. Raises CommandError if it is in use, or not ours."""
    if not directory.exists():
        session.note(f"rara: {directory} does not exist: nothing to delete")
        return
    inside = {path.name for path in directory.iterdir()}
    if strange := sorted(inside - _OURS):
        raise CommandError(
            Exit.REFUSED,
            "NOT_OURS",
            f"{directory} holds what rara did not put there: {', '.join(strange[:3])}",
        )
    confirm(session, f"delete all data in {directory} ({len(inside)} folders)")
    _refuse_used(directory)
    shutil.rmtree(directory)
    session.note(f"rara: {directory} is deleted")


def _refuse_used(directory: Path) -> None:
    lock = directory / "postgres" / "owner.lock"
    if not lock.exists():
        return
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(file.fileno(), 200, 0).decode(errors="replace").strip()
            raise CommandError(
                Exit.REFUSED,
                "FOLDER_IN_USE",
                f"{directory} is in use by {owner or 'another process'}",
                "stop it first",
            ) from None
        fcntl.flock(file, fcntl.LOCK_UN)
