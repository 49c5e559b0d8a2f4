"""`rara-executor`: read the settings, run the executor until a signal ends it."""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from enum import IntEnum
from typing import NoReturn

# grpc must not add handlers of its own around fork: what we start, we spawn.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

import click

from rara_executor import logs, settings
from rara_executor.app import Executor
from rara_executor.connection import ReplacedError
from rara_executor.errors import ConfigurationError

LAST_RESORT_S = 0.5  # behind the bound of a stop, which a stop in order may use up
LAST_WORDS_S = 0.2


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    REPLACED = 3


@click.command()
@click.option("--scheduler", metavar="HOST:PORT", help="Where the scheduler listens.  [RARA_SCHEDULER]")
@click.option(
    "--listen", metavar="HOST:PORT", help="Be dialled by schedulers instead.  [RARA_EXECUTOR_LISTEN]"
)
@click.option(
    "--module", "modules", multiple=True, help="Importable module with operations.  [RARA_EXECUTOR_MODULES]"
)
@click.option("--name", help="The label people know this executor by.  [RARA_EXECUTOR_NAME]")
@click.option("--slots", type=int, help="Jobs at once.  [RARA_EXECUTOR_SLOTS]")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="[RARA_EXECUTOR_LABELS]")
@click.option("--dir", "folder", help="Folder for scratch and cache.  [RARA_EXECUTOR_DIR]")
@click.option("--stop-s", type=float, help="Seconds from SIGTERM to the end.  [RARA_EXECUTOR_STOP_S]")
@click.option("--log-format", type=click.Choice(["auto", "json", "console"]), help="[RARA_LOG_FORMAT]")
def main(
    scheduler: str | None,
    listen: str | None,
    modules: tuple[str, ...],
    name: str | None,
    slots: int | None,
    labels: tuple[str, ...],
    folder: str | None,
    stop_s: float | None,
    log_format: str | None,
) -> None:
    """Run steps for a scheduler, in processes of their own."""
    flags: dict[str, object] = {
        "scheduler": scheduler,
        "executor_listen": listen,
        "executor_modules": modules or None,
        "executor_name": name,
        "executor_slots": slots,
        "executor_labels": ",".join(labels) or None,
        "executor_dir": folder,
        "executor_stop_s": stop_s,
        "log_format": log_format,
    }
    try:
        chosen = settings.load({key: value for key, value in flags.items() if value is not None})
    except ConfigurationError as error:
        click.echo(f"rara-executor: {error}", err=True)
        sys.exit(ExitCode.USAGE)
    logs.configure(log_format=chosen.log_format, level=chosen.log_level)
    os.environ.pop("RARA_TOKEN", None)  # the processes of handlers inherit what is left
    _run(chosen)


def _run(chosen: settings.Settings) -> NoReturn:
    try:
        runner = asyncio.Runner(loop_factory=_loop_factory(chosen))
        runner.run(_serve(chosen))
        code = ExitCode.OK
    except ConfigurationError as error:
        click.echo(f"rara-executor: {error}", err=True)
        code = ExitCode.FAILED
    except ReplacedError as error:
        click.echo(f"rara-executor: {error}", err=True)
        code = ExitCode.REPLACED
    except Exception:
        traceback.print_exc()
        code = ExitCode.FAILED
    _leave(code)  # the runner is not closed: it would wait for threads


def _leave(code: ExitCode) -> NoReturn:
    """End the process without the interpreter's own last steps; what is ours is closed, or was left behind by a bug.

    There gRPC may wait for ever for a thread that the interpreter has ended, and threads that look up a name are
    waited for however long that takes.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


async def _serve(chosen: settings.Settings) -> None:
    executor = Executor(
        chosen,
        sys_path=[entry for entry in sys.path if entry],
        on_connected=lambda: click.echo(
            f"rara-executor {chosen.executor_name} connected to {chosen.scheduler}"
        ),
        on_listening=lambda address: click.echo(
            f"rara-executor {chosen.executor_name} listening on {address}"
        ),
    )
    _collect_seldom()
    loop = asyncio.get_running_loop()
    signals = 0

    def end_now() -> None:
        # In a thread, so that neither a bug nor a pipe that nobody reads keeps the process.
        last_words = threading.Thread(target=executor.cut_short, daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_S)
        os._exit(ExitCode.FAILED)  # the warden ends the runners

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            end_now()  # asked twice: at once
        executor.stop()
        # Whatever hangs from here on, this loop too: a process that has heard that it is to stop ends.
        last_resort = threading.Timer(chosen.executor_stop_s + LAST_RESORT_S, end_now)
        last_resort.daemon = True
        last_resort.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await executor.run()


def _collect_seldom() -> None:
    """Of the thousands of objects that short jobs make each second none is garbage that reference counts leave, and
    what was imported stays for ever."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def _loop_factory(chosen: settings.Settings) -> "type[asyncio.AbstractEventLoop] | None":
    if not chosen.executor_uvloop:
        return None
    try:
        import uvloop
    except ImportError:
        raise ConfigurationError("RARA_EXECUTOR_UVLOOP needs uvloop: install rara[speed]") from None
    return uvloop.Loop


if __name__ == "__main__":
    main()
