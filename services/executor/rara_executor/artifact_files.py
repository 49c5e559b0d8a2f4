"""Artifacts as files of a job's scratch folder, hashed while they are copied."""

import hashlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rara_executor import payload
from rara_executor.runner_protocol import InputInfo

CHUNK_BYTES = 1 << 20


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
    """Copy a file that its owner may change or remove, hashing the bytes that were copied."""
    digest = hashlib.sha256()
    size = 0
    with source.open("rb") as reader, target.open("wb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
            size += len(chunk)
    return OutputFile(target, digest.hexdigest(), size)


def keep_bytes(data: bytes, target: Path) -> OutputFile:
    target.write_bytes(data)
    return OutputFile(target, hashlib.sha256(data).hexdigest(), len(data))


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
