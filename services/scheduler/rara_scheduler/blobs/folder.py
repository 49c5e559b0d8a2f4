"""Blobs in a folder of a local or network file system.

    <root>/sha256/ab/cdef...    the blob of digest abcdef..., complete and verified, read-only
    <root>/partial/<upload_id>  the bytes of an upload so far

Plain files and threads instead of a store library: uploads here append, resume after `kill -9` and are fsynced
with their folder before they count, and an object store's local back end offers none of the three.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.port import (
    LISTED_AT_ONCE,
    BlobMismatch,
    BlobStoreUnavailable,
    Leftover,
    StoredBlob,
    UploadBusy,
)

CHUNK_BYTES = 256 * 1024
_HASH_SLICE_BYTES = 16 * 1024 * 1024  # read and hashed in one visit to a thread, so that cancelling is prompt
_BUSY_WAIT_S = 10.0
_BUSY_LOOK_S = 0.05
_UPLOAD_ID = re.compile(r"[0-9a-f-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GROUP_DIGITS = 2  # of a digest: blobs are spread over so many folders

T = TypeVar("T")


class FileThreads:
    """A few threads for file work, so that a slow disk stops neither the loop nor all of its threads."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="blobs")

    async def run(self, work: Callable[[], T], *, undo: Callable[[T], None] | None = None) -> T:
        """Run in a thread. Raises BlobStoreUnavailable for any OSError.

        When cancelled, it waits for the thread first, which may be using a file that the caller is to close; a
        result that nobody takes then goes to `undo`.
        """
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # cancelled again: the thread still has the file
                    await asyncio.wait({future})
            if undo is not None and future.exception() is None:
                undo(future.result())
            raise
        except FileNotFoundError as error:  # what can be absent says so itself
            raise BlobStoreUnavailable("its folder is gone") from error
        except OSError as error:
            raise BlobStoreUnavailable(error.strerror or type(error).__name__) from error

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class FolderBlobStore:
    """Several processes may use one folder at once. File work runs in a few threads of its own."""

    removal_s = 5.0  # it is one call of the system's, between a look at the file and its end under a lock

    def __init__(self, root: Path, *, threads: int = 4, busy_wait_s: float = _BUSY_WAIT_S) -> None:
        self._blobs = root / "sha256"
        self._partial = root / "partial"
        self._busy_wait_s = busy_wait_s
        self._threads = FileThreads(threads)

    async def prepare(self) -> None:
        """Create the folders. Raises BlobStoreUnavailable when the root cannot be written."""
        await self._threads.run(self._create_folders)

    def _create_folders(self) -> None:
        for folder in (self._blobs, self._partial):
            folder.mkdir(parents=True, exist_ok=True)
        probe = self._partial / f"probe-{os.getpid()}-{threading.get_ident()}"
        probe.touch()
        probe.unlink()

    def close(self) -> None:
        self._threads.close()

    # ------------------------------------------------------------ uploads

    @asynccontextmanager
    async def write(self, upload_id: str, expected: BlobDigest) -> AsyncIterator["FolderWriter"]:
        path = self._partial_path(upload_id)
        waited = 0.0
        while (fd := await self._threads.run(lambda: _open_locked(path), undo=_close)) is None:
            if waited >= self._busy_wait_s:
                raise UploadBusy(upload_id)
            await asyncio.sleep(_BUSY_LOOK_S)
            waited += _BUSY_LOOK_S
        writer = FolderWriter(fd, path, self._blob_path(expected.sha256), expected, self._threads)
        try:
            await writer.take_up()
            yield writer
        finally:
            os.close(fd)  # the lock ends with it

    async def uploaded_bytes(self, upload_id: str) -> int:
        return await self._threads.run(partial(_size, self._partial_path(upload_id), self._partial)) or 0

    async def is_being_written(self, upload_id: str) -> bool:
        return await self._threads.run(partial(_is_locked, self._partial_path(upload_id)))

    async def discard(self, upload_id: str) -> bool:
        return await self._threads.run(partial(_discard, self._partial_path(upload_id)))

    # ------------------------------------------------------------ blobs

    async def size(self, sha256: str) -> int | None:
        return await self._threads.run(partial(_size, self._blob_path(sha256), self._blobs))

    async def fingerprint(self, sha256: str) -> tuple[int, ...] | None:
        return await self._threads.run(partial(_fingerprint, self._blob_path(sha256), self._blobs))

    async def read(
        self, sha256: str, *, offset: int = 0, limit: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        path = self._blob_path(sha256)
        fd = await self._threads.run(partial(_open_to_read, path, self._blobs), undo=_close)
        if fd is None:
            raise FileNotFoundError(sha256)
        end = None if limit is None else offset + limit
        try:
            while end is None or offset < end:
                wanted = CHUNK_BYTES if end is None else min(end - offset, CHUNK_BYTES)
                chunk = await self._threads.run(partial(os.pread, fd, wanted, offset))
                if not chunk:
                    return
                yield chunk
                offset += len(chunk)
        finally:
            os.close(fd)

    async def verify(self, expected: BlobDigest) -> bool:
        digest = hashlib.sha256()
        size_bytes = 0
        try:
            async with aclosing(self.read(expected.sha256)) as chunks:
                async for chunk in chunks:
                    await self._threads.run(partial(digest.update, chunk))
                    size_bytes += len(chunk)
        except FileNotFoundError:
            return False
        return (digest.hexdigest(), size_bytes) == (expected.sha256, expected.size_bytes)

    async def remove(self, sha256: str, *, only: Hashable | None = None, until: float | None = None) -> bool:
        return await self._threads.run(partial(_remove_blob, self._blob_path(sha256), only, until))

    async def free_bytes(self) -> int:
        facts = await self._threads.run(partial(os.statvfs, self._partial))
        return facts.f_bavail * facts.f_frsize

    # ------------------------------------------------------------ listings

    async def stored(self) -> AsyncGenerator[Sequence[StoredBlob], None]:
        async with aclosing(self._pages(_stored_blobs(self._blobs))) as pages:
            async for page in pages:
                yield page

    async def leftovers(self) -> AsyncGenerator[Sequence[Leftover], None]:
        async with aclosing(self._pages(_leftovers(self._partial))) as pages:
            async for page in pages:
                yield page

    async def _pages(self, items: Generator[T, None, None]) -> AsyncGenerator[list[T], None]:
        try:
            while page := await self._threads.run(lambda: list(islice(items, LISTED_AT_ONCE))):
                yield page
        finally:
            items.close()

    # ------------------------------------------------------------ paths and threads

    def _partial_path(self, upload_id: str) -> Path:
        if not _UPLOAD_ID.fullmatch(upload_id):
            raise ValueError(f"not an upload's id: {upload_id!r}")
        return self._partial / upload_id

    def _blob_path(self, sha256: str) -> Path:
        BlobDigest(sha256, 0)  # raises on what could leave the folder
        return self._blobs / sha256[:_GROUP_DIGITS] / sha256[_GROUP_DIGITS:]


class FolderWriter:
    """The holder of an upload's file and of the lock on it."""

    def __init__(self, fd: int, path: Path, blob: Path, expected: BlobDigest, threads: FileThreads) -> None:
        self._fd = fd
        self._path = path
        self._blob = blob
        self._expected = expected
        self._threads = threads
        self._hash = hashlib.sha256()
        self._committed_bytes = 0

    @property
    def committed_bytes(self) -> int:
        return self._committed_bytes

    async def take_up(self) -> None:
        """Hash what an earlier call has stored, so that the digest covers it."""
        while more := await self._threads.run(self._hash_stored):
            self._committed_bytes += more

    def _hash_stored(self) -> int:
        data = os.pread(self._fd, _HASH_SLICE_BYTES, self._committed_bytes)
        self._hash.update(data)
        return len(data)

    async def append(self, data: bytes) -> None:
        if self._committed_bytes + len(data) > self._expected.size_bytes:
            await self._drop()
            raise BlobMismatch(self._expected, "more bytes than that arrived")
        await self._threads.run(partial(self._write, data))
        self._committed_bytes += len(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        written = 0
        try:
            while written < len(view):
                written += os.pwrite(self._fd, view[written:], self._committed_bytes + written)
        except OSError:
            with suppress(OSError):  # a full disk: leave whole pieces only
                os.ftruncate(self._fd, self._committed_bytes)
            raise
        self._hash.update(view)

    async def _drop(self) -> None:
        await self._threads.run(partial(_remove, self._path))

    async def keep(self) -> None:
        found = self._hash.hexdigest()
        if self._committed_bytes != self._expected.size_bytes:
            await self._drop()
            raise BlobMismatch(self._expected, f"only {self._committed_bytes} bytes arrived")
        if found != self._expected.sha256:
            await self._drop()
            raise BlobMismatch(self._expected, f"the bytes that arrived have the SHA-256 {found}")
        await self._threads.run(self._publish)

    def _publish(self) -> None:
        """Bytes first, then their name: whatever is cut off in between, a name stands for whole bytes."""
        os.fsync(self._fd)
        folder = self._blob.parent
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)  # always: the one who made it may have died before this line
        os.utime(self._fd)  # the bytes may be hours old: from now on they are nobody's leftover
        # Another upload of the same digest may have been first: its bytes are the same, and readers keep theirs.
        with _locked_folder(folder):
            self._path.rename(self._blob)
        _sync_folder(folder)
        _sync_folder(self._path.parent)
        os.fchmod(self._fd, 0o440)  # a blob is never changed


def _open_locked(path: Path) -> int | None:
    """Open, or create, and lock a file that is only written here; None: another one holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and lock the holder may have published or discarded the file: then this is not the path's.
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _discard(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):  # as above: else it is another's by now, or nobody's
            path.unlink()
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    finally:
        os.close(fd)
    return True


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _facts(path: Path, folder: Path) -> os.stat_result | None:
    """None: there is no such file. Raises FileNotFoundError when the store's folder is not there, as without a mount.

    Else every blob of a store that is away would count as lost.
    """
    try:
        return path.stat()
    except FileNotFoundError:
        folder.stat()
        return None


def _size(path: Path, folder: Path) -> int | None:
    facts = _facts(path, folder)
    return None if facts is None else facts.st_size


def _fingerprint(path: Path, folder: Path) -> tuple[int, ...] | None:
    facts = _facts(path, folder)
    if facts is None:
        return None
    # The change time too: whoever sets a file's modification time back does not set that back.
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def _open_to_read(path: Path, folder: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        folder.stat()
        return None


def _stored_blobs(folder: Path) -> Generator[StoredBlob, None, None]:
    for group in sorted(folder.iterdir()):
        if len(group.name) != _GROUP_DIGITS:
            continue  # somebody else's, such as lost+found
        for rest, facts in _files(group):
            if _SHA256.fullmatch(group.name + rest):
                yield StoredBlob(group.name + rest, facts.st_size, _modified_at(facts))


def _leftovers(folder: Path) -> Generator[Leftover, None, None]:
    for name, facts in _files(folder):
        if _UPLOAD_ID.fullmatch(name):
            yield Leftover(name, facts.st_size, _modified_at(facts))


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Names and facts, one at a time: a folder may hold millions."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # gone meanwhile
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, entry.stat(follow_symlinks=False)


def _modified_at(facts: os.stat_result) -> datetime:
    return datetime.fromtimestamp(facts.st_mtime, UTC)


def _remove_blob(path: Path, only: Hashable | None, until: float | None) -> bool:
    try:
        with _locked_folder(path.parent):
            if only is not None and _fingerprint(path, path.parent) not in (None, only):
                return False
            if until is not None and time.monotonic() > until:
                return False
            path.unlink(missing_ok=True)
    except FileNotFoundError:  # the folder
        pass
    return True


@contextmanager
def _locked_folder(path: Path) -> Generator[None, None, None]:
    """Nobody else renames a blob into the folder, or removes one: between look and removal it stays the same file."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
