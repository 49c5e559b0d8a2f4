"""The name of a blob."""

import re
from dataclasses import dataclass

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class BlobDigest:
    """SHA-256 in 64 lower-case hex digits, and the size. Raises ValueError when built from anything else."""

    sha256: str
    size_bytes: int

    def __post_init__(self) -> None:
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError("a SHA-256 has 64 lower-case hex digits")
        if self.size_bytes < 0:
            raise ValueError("a size is not negative")
