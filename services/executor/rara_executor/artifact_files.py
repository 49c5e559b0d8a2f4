"""Artifacts as files of a job's scratch folder, hashed while they are copied."""

import errno
import fcntl
import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from rara_executor import payload
from rara_executor.codes import Code
from rara_executor.errors import JobFailure
from rara_executor.runner_protocol import InputInfo

CHUNK_BYTES = 1 << 20
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FICLONE = 0x40049409  # ioctl of linux/fs.h


@dataclass(frozen=True, slots=True)
class InputArtifact:
    """Verified bytes that the step was given. digest: SHA-256 in hex. metadata: parsed JSON, or None."""

    name: str
    path: Path
    digest: str
    size_bytes: int
    media_type: str
    type: str
    metadata: Any

    @classmethod
    def unopened(cls, info: InputInfo) -> "InputArtifact":
        metadata = payload.decode(info.metadata.encode()) if info.metadata else None
        return cls(info.name, Path(), info.sha256, info.size_bytes, info.media_type, info.type, metadata)

    def at(self, path: Path) -> "InputArtifact":
        return replace(self, path=path)

    def read_bytes(self) -> bytes:
        return self.path.read_bytes()

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.path.read_text(encoding)


@dataclass(frozen=True, slots=True)
class OutputArtifact:
    """Stored bytes. digest: SHA-256 in hex."""

    name: str
    digest: str
    size_bytes: int


Derivation: TypeAlias = str | InputArtifact | OutputArtifact


@dataclass(frozen=True, slots=True)
class OutputFile:
    path: Path
    sha256: str
    size_bytes: int


def keep_file(source: Path, target: Path) -> OutputFile:
    """Copy a file that its owner may change or remove, hashing the bytes that were copied.

    Raises JobFailure when the disk is full; nothing is left of the copy then.
    """
    with source.open("rb") as reader, _made(target) as writer:
        if _cloned(reader, writer):
            return OutputFile(target, *sha256_of(target))
        digest = hashlib.sha256()
        size = 0
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
            size += len(chunk)
    return OutputFile(target, digest.hexdigest(), size)


def keep_bytes(data: bytes, target: Path) -> OutputFile:
    """The same with bytes."""
    with _made(target) as writer:
        writer.write(data)
    return OutputFile(target, hashlib.sha256(data).hexdigest(), len(data))


@contextmanager
def _made(target: Path) -> Iterator[BinaryIO]:
    try:
        with target.open("wb") as writer:
            yield writer
    except BaseException as error:
        target.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise JobFailure(
                Code.DEPENDENCY_UNAVAILABLE,
                f"the executor's disk is full (RARA_EXECUTOR_DIR): {error.strerror}",
            ) from error
        raise


def _cloned(reader: BinaryIO, writer: BinaryIO) -> bool:
    """The disk's own copy, which takes neither time nor room, where its file system can make one."""
    if sys.platform == "linux":
        with suppress(OSError):
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            return True
    return False


def sha256_of(path: Path) -> tuple[str, int]:
    """Digest and size of a file."""
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as reader:
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def check_metadata(name: str, metadata: object) -> str:
    """Metadata as JSON text; empty: none. Raises PayloadInvalid or PayloadTooLarge."""
    if metadata is None:
        return ""
    return payload.encode(
        metadata, what=f"metadata of artifact {name}", limit_bytes=payload.MAX_EFFECT_BYTES
    ).decode()


def remove_folder(path: Path) -> None:
    """Remove a scratch folder with all in it, as far as it can be removed."""
    shutil.rmtree(path, ignore_errors=True)
