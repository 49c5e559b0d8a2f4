"""The entry of `rara`: parse, run, and turn every end into an exit code and at most one line."""

import contextlib
import inspect
import os
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import click

from rara_cli import __version__
from rara_cli.exits import CommandError, Exit, from_client_error
from rara_cli.options import LazyGroup
from rara_cli.session import Session


@click.group(
    cls=LazyGroup,
    lazy={
        "run": ("rara_cli.commands.run:run", "start, list, get, watch, wait, cancel and retry runs"),
        "step": (
            "rara_cli.commands.step:step",
            "list, get and requeue steps, their events, why they do not run",
        ),
        "definition": (
            "rara_cli.commands.definition:definition",
            "apply, list, get, validate, pause and resume definitions",
        ),
        "kind": ("rara_cli.commands.kind:kind", "pause and resume kinds of steps"),
        "pause": ("rara_cli.commands.pause:pause", "list what is paused"),
        "artifact": ("rara_cli.commands.artifact:artifact", "list, get and print what runs produced"),
        "executor": ("rara_cli.commands.executor:executor", "list executors"),
        "db": ("rara_cli.commands.db:db", "migrate and check the database, show where it stands"),
        "token": ("rara_cli.commands.token:token", "create, list and revoke bearer tokens"),
        "dev": ("rara_cli.commands.dev:dev", "all of Rara on this machine, and the demo"),
        "ps": ("rara_cli.commands.run:list_runs", "short for: run list"),
        "watch": ("rara_cli.commands.run:watch", "short for: run watch"),
        "why": ("rara_cli.commands.step:why", "short for: step why"),
        "completion": ("rara_cli.commands.completion:completion", "print the shell's completion script"),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 unexpected, 2 usage, 3 not found, 4 not allowed, 5 refused, 6 unreachable, "
    "7 promise broken, 8 still going after --timeout, 10 run failed, 11 run cancelled, 12 deadline exceeded, "
    "130 interrupted.",
)
@click.version_option(__version__, prog_name="rara", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Durable runs of long data and ML steps.

    RUN and STEP are ids or unique beginnings of them; RUN/NAME is a step of a run.
    """
    ctx.ensure_object(Session)


def parse(arguments: Sequence[str], session: Session) -> object:
    """Run the command up to its first wait: its exit code, or a coroutine that gives it."""
    return cli.main(list(arguments), prog_name="rara", standalone_mode=False, obj=session)


async def complete(work: Coroutine[Any, Any, object]) -> int:
    """Wait for a command; its exit code."""
    code = await work
    return code if isinstance(code, int) else Exit.OK


def explain(error: BaseException, session: Session) -> CommandError:
    """Any end of a command as an exit code and one line."""
    match error:
        case CommandError():
            return error
        case click.UsageError():
            path = error.ctx.command_path if error.ctx is not None else "rara"
            return CommandError(Exit.USAGE, "USAGE", _one_line(error.format_message()), f"{path} --help")
        case click.ClickException():
            return CommandError(Exit.USAGE, "USAGE", _one_line(error.format_message()))
        case click.Abort() | KeyboardInterrupt():
            why = session.farewell or "interrupted"
            return CommandError(Exit.INTERRUPTED, "INTERRUPTED", why, session.farewell_next)
    if "rara_client.errors" in sys.modules:
        from rara_client.errors import RaraError

        if isinstance(error, RaraError):
            return from_client_error(error, session.server)
    if isinstance(error, OSError) and error.filename is not None:
        return CommandError(Exit.USAGE, "FILE_UNUSABLE", f"{error.filename}: {error.strerror}")
    return CommandError(
        Exit.UNEXPECTED, "UNEXPECTED", _one_line(f"{type(error).__name__}: {error}"), "the same with -v"
    )


def report(error: BaseException, session: Session) -> int:
    """Say on stderr how the command ended; the exit code."""
    if session.verbose and not isinstance(error, click.Abort | KeyboardInterrupt):
        import traceback

        traceback.print_exception(error)
    ended = explain(error, session)
    print(f"rara: {ended}", file=sys.stderr, flush=True)
    return ended.exit_code


def run(arguments: Sequence[str]) -> int:
    """Run a command line in a loop of its own; its exit code."""
    session = Session()
    try:
        outcome = parse(arguments, session)
        if inspect.iscoroutine(outcome):
            import asyncio

            # The runner is not closed: it would wait for threads, and the process ends anyway.
            outcome = asyncio.Runner().run(complete(outcome))
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else Exit.OK
    except BrokenPipeError:
        # `rara run list | head`: the reader has enough. Python would complain at its own last flush.
        sys.stdout = open("/dev/null", "w")  # noqa: PTH123, SIM115
        return Exit.OK
    except (Exception, KeyboardInterrupt) as error:
        return report(error, session)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def main() -> None:
    """The console script. Ends without the interpreter's last steps, in which gRPC may wait for a thread for ever."""
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
