"""A disk of a few MiB that a test may fill: a tmpfs, where mounting one is allowed."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    @property
    def free_bytes(self) -> int:
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def fill(self, *, but_bytes: int) -> None:
        """Take all room, but for so much."""
        self._filler.write_bytes(bytes(self.free_bytes - but_bytes))

    def make_room(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(path: Path, *, size_bytes: int) -> Iterator[SmallDisk]:
    """Skips the test where nothing can be mounted."""
    path.mkdir()
    options = f"size={size_bytes},mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
