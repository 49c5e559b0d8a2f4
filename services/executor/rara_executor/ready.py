"""A file that says whether the executor is ready: touched while it is, gone when it is not, old when it hangs.

`python -m rara_executor.ready`, a container's health check, exits 0 while the file of RARA_EXECUTOR_READY_FILE is new.
"""

import os
import sys
import time
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

# The executor touches it every second; a busy machine may be late.
STALE_S = 10.0


class ReadyFile:
    """Follows the executor's readiness. Without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._works = True

    def show(self, is_ready: bool) -> None:
        """A file that cannot be written fails the health check, and must not cost the jobs."""
        if self._path is None:
            return
        try:
            if is_ready:
                self._path.touch()
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            if self._works:
                log.warning("executor.ready_file_failed", error=str(error))
            self._works = False
        else:
            self._works = True


def is_ready(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < STALE_S
    except OSError:
        return False


def main() -> None:
    path = os.environ.get("RARA_EXECUTOR_READY_FILE")
    if not path:
        sys.exit("RARA_EXECUTOR_READY_FILE names no file")
    if not is_ready(Path(path)):
        sys.exit("not ready")


if __name__ == "__main__":
    main()
