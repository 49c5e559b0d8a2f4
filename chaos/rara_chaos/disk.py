"""A disk of a few MiB that can be filled at once: a tmpfs, where mounting one is allowed."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        """Take all room that is left."""
        facts = os.statvfs(self.path)
        with contextlib.suppress(OSError), self._filler.open("wb") as file:
            # A little more than there is: what others write meanwhile must find nothing either.
            for _ in range(facts.f_bavail + 1):
                file.write(bytes(facts.f_frsize))

    def make_room(self) -> None:
        self._filler.unlink(missing_ok=True)


def why_not(folder: Path) -> str:
    """Why no small disk can be had here; empty: it can."""
    try:
        with mounted(folder / "probe", size_bytes=1 << 20):
            return ""
    except OSError as error:
        return f"no tmpfs can be mounted: {error}"


@contextlib.contextmanager
def mounted(path: Path, *, size_bytes: int) -> Iterator[SmallDisk]:
    """Raises OSError where nothing can be mounted."""
    path.mkdir()
    options = f"size={size_bytes},mode=0755"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)],  # noqa: S607 - the machine's own
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        path.rmdir()
        raise OSError(done.stderr.strip() or f"mount ended with {done.returncode}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)  # noqa: S607
