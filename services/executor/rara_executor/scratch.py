"""The executor's folder: scratch for its jobs, and what dead executors have left there."""

import fcntl
import os
from pathlib import Path

from rara_executor.artifact_files import remove_folder
from rara_executor.errors import ConfigurationError


class ScratchFolder:
    """`jobs/<executor_id>` below a folder that executors of one machine share.

    The lock on a file in it tells that its process lives; without it the folder is anybody's to remove.
    """

    def __init__(self, root: Path, executor_id: str) -> None:
        self.jobs = root / "jobs" / executor_id
        self.cache = root / "cache"
        self._root = root
        self._lock = -1

    def open(self) -> None:
        """Raises ConfigurationError if the folder cannot be used."""
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._root.stat().st_uid != os.getuid():  # a shared /tmp: somebody else may have been first
                raise ConfigurationError(f"RARA_EXECUTOR_DIR {self._root} belongs to another user")
            self.jobs.mkdir(parents=True)
            self.cache.mkdir(exist_ok=True)
            self._lock = os.open(self.jobs / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for folder in self.jobs.parent.iterdir():
                if folder != self.jobs and _is_abandoned(folder):
                    remove_folder(folder)
        except OSError as error:
            raise ConfigurationError(f"RARA_EXECUTOR_DIR {self._root}: {error}") from error

    def close(self) -> None:
        if self._lock >= 0:
            remove_folder(self.jobs)
            os.close(self._lock)
            self._lock = -1


def _is_abandoned(folder: Path) -> bool:
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False  # just being made, or just being removed
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
