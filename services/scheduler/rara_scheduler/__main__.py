"""The `rara-scheduler` command: read the settings, run the service."""

import asyncio
import contextlib
import os
import sys
import traceback
from typing import NoReturn

from pydantic import ValidationError

from rara_scheduler.app import serve
from rara_scheduler.domain.errors import Fault
from rara_scheduler.logging import configure
from rara_scheduler.memory import give_back_large_buffers, look_for_garbage_rarely
from rara_scheduler.settings import Settings
from rara_scheduler.store.migrate import MigrationError


def main() -> None:
    """Exit 0 after a graceful stop, 2 on settings that cannot be, 1 on anything else."""
    try:
        settings = Settings()  # type: ignore[call-arg] # from the environment
    except ValidationError as error:
        for problem in error.errors():
            where = "_".join(str(part) for part in problem["loc"])
            name = f"RARA_{where.upper()}: " if where else ""
            print(f"rara-scheduler: {name}{problem['msg']}", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    give_back_large_buffers()
    look_for_garbage_rarely()
    configure(log_format=settings.log_format, level=settings.log_level)
    factory = None
    if settings.uvloop:
        import uvloop

        factory = uvloop.new_event_loop
    try:
        code = asyncio.Runner(loop_factory=factory).run(serve(settings))
    except (Fault, MigrationError) as error:
        name = f"{error.code}: " if isinstance(error, Fault) else ""
        print(f"rara-scheduler: {name}{error}", file=sys.stderr)  # noqa: T201
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    _leave(code)  # the runner is not closed: it would wait for threads


def _leave(code: int) -> NoReturn:
    """End the process without the interpreter's own last steps; what is ours is closed, or was left behind by a bug.

    There gRPC may wait for ever for a thread that the interpreter has ended, and threads that look up a name are
    waited for however long that takes.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
