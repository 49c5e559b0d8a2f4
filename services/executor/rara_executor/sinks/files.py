"""A file that is replaced as a whole, and keeps the largest lease token that has written it."""

import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from rara_executor.errors import Retryable
from rara_executor.sinks.token import Superseded, Tokened, token_of

LOCK_S = 30.0
_LOOK_S = 0.02
_DIGITS = 20  # one width for all, so that a token is overwritten in place


def write_file(job: Tokened, path: str | Path, data: bytes, *, lock_s: float = LOCK_S) -> None:
    """Make the file hold the data, wholly or not at all. Raises Superseded; Retryable if others hold the lock."""
    with open_file(job, path, lock_s=lock_s) as file:
        file.write(data)


@contextlib.contextmanager
def open_file(job: Tokened, path: str | Path, *, lock_s: float = LOCK_S) -> Iterator[BinaryIO]:
    """A new file to write into, which takes the place of `path` at the end of the block, if that ends well.

    The largest token that has written stands in `.NAME.fence` beside it, which is also what writers lock while they
    replace the file. A process that is killed leaves `path` as it was, or as it was to become.
    """
    token, path = token_of(job), Path(path)
    part = path.with_name(f".{path.name}.{token:0{_DIGITS}}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _replace(path, part, token, lock_s)
    finally:
        part.unlink(missing_ok=True)


def _replace(path: Path, part: Path, token: int, lock_s: float) -> None:
    descriptor = os.open(path.with_name(f".{path.name}.fence"), os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _lock(descriptor, path, lock_s)
        newest = _read(descriptor)
        if newest > token:
            raise Superseded(f"file {path}", token)
        if newest < token:
            # Before the file itself: whatever ends this process in between, no older attempt can follow.
            os.pwrite(descriptor, f"{token:0{_DIGITS}}\n".encode(), 0)
            os.fsync(descriptor)
        part.replace(path)
        _remove_older(path, token)
        _sync(path.parent)
    finally:
        os.close(descriptor)  # gives the lock up


def _lock(descriptor: int, path: Path, lock_s: float) -> None:
    """With a bound: whoever holds it may have been stopped in the middle."""
    ends_at = time.monotonic() + lock_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                raise Retryable("WRITE_BLOCKED", f"file {path}: locked for {lock_s:g} s by others") from None
            time.sleep(_LOOK_S)
        else:
            return


def _read(descriptor: int) -> int:
    """0: nobody has written."""
    text = os.pread(descriptor, _DIGITS, 0)
    return int(text) if re.fullmatch(rb"[0-9]{20}", text) else 0


def _remove_older(path: Path, token: int) -> None:
    """What killed writers have left; and what older ones still write, which they could not put into place any more."""
    part = re.compile(rf"\.{re.escape(path.name)}\.([0-9]{{{_DIGITS}}})\.[0-9a-f]{{32}}\.part")
    for entry in os.scandir(path.parent):
        found = part.fullmatch(entry.name)
        if found is not None and int(found[1]) < token:
            Path(entry.path).unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
