"""Verified blobs on local disk, by digest, the least used removed first."""

import asyncio
import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from rara.v1 import common_pb2

from rara_executor.artifact_files import sha256_of
from rara_executor.codes import Code
from rara_executor.errors import JobFailure

_SHA256 = re.compile(r"[0-9a-f]{64}")

Fetch = Callable[[common_pb2.Digest, Path], Awaitable[None]]


class BlobCache:
    """A folder that several executors of one machine may share; a blob in use survives its removal.

    parts: a folder of this executor alone, on the same disk, for what is being fetched: no other one takes it for
    something to remove, and it goes with the executor.
    """

    def __init__(self, folder: Path, *, parts: Path, limit_bytes: int, fetch: Fetch) -> None:
        self._folder = folder
        self._parts = parts
        self._limit_bytes = limit_bytes
        self._fetch = fetch
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        # (modification time, size) of files whose bytes this process has seen to be right
        self._verified: dict[str, tuple[int, int]] = {}

    async def place(self, digest: common_pb2.Digest, target: Path) -> None:
        """Make the blob appear at target, a new path on the same disk. Raises JobFailure."""
        if not _SHA256.fullmatch(digest.sha256):
            raise JobFailure(Code.ARTIFACT_MISSING, "the input artifact names no SHA-256 digest")
        async with self._exclusive(digest.sha256):
            path = self._folder / digest.sha256[:2] / digest.sha256
            if not await asyncio.to_thread(self._is_right, path, digest):
                await self._download(digest, path)
            await asyncio.to_thread(self._link, path, target)

    @contextlib.asynccontextmanager
    async def _exclusive(self, name: str) -> AsyncGenerator[None]:
        """One download of a blob at a time; the lock is forgotten with its last user."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = lock, users - 1

    async def _download(self, digest: common_pb2.Digest, path: Path) -> None:
        await asyncio.to_thread(self._make_room, digest.size_bytes)
        descriptor, name = await asyncio.to_thread(self._temporary, self._parts)
        os.close(descriptor)
        part = Path(name)
        try:
            await self._fetch(digest, part)
            await asyncio.to_thread(self._keep, part, path, digest)
        finally:
            await asyncio.to_thread(part.unlink, missing_ok=True)

    @staticmethod
    def _temporary(folder: Path) -> tuple[int, str]:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.mkstemp(prefix="part-", dir=folder)

    def _keep(self, part: Path, path: Path, digest: common_pb2.Digest) -> None:
        part.chmod(0o444)
        path.parent.mkdir(parents=True, exist_ok=True)
        part.replace(path)
        stat = path.stat()
        self._verified[digest.sha256] = stat.st_mtime_ns, stat.st_size

    def _is_right(self, path: Path, digest: common_pb2.Digest) -> bool:
        """Whether the blob is there, and what it says. Another process, or a crash, may have left it."""
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        if self._verified.get(digest.sha256) == (stat.st_mtime_ns, stat.st_size):
            return stat.st_size == digest.size_bytes
        if sha256_of(path) == (digest.sha256, digest.size_bytes):
            self._verified[digest.sha256] = stat.st_mtime_ns, stat.st_size
            return True
        path.unlink(missing_ok=True)
        return False

    @staticmethod
    def _link(path: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # another disk, or a file system without links
            shutil.copyfile(path, target)
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # the access time orders removal

    def _make_room(self, size_bytes: int) -> None:
        files = []
        for path in self._folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                files.append((stat.st_atime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in files) + size_bytes
        for _, size, path in sorted(files):
            if total <= self._limit_bytes and shutil.disk_usage(self._folder).free >= size_bytes:
                return
            path.unlink(missing_ok=True)
            self._verified.pop(path.name, None)
            total -= size
