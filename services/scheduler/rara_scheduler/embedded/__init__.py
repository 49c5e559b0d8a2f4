"""An embedded PostgreSQL over whatever binaries the machine has."""

from rara_scheduler.embedded.binaries import Binaries, Source, all_binaries, find_binaries
from rara_scheduler.embedded.errors import (
    AccountUnusable,
    BinariesNotFound,
    EmbeddedPostgresError,
    FolderInUse,
    StartFailed,
)
from rara_scheduler.embedded.server import EmbeddedPostgres

__all__ = [
    "AccountUnusable",
    "Binaries",
    "BinariesNotFound",
    "EmbeddedPostgres",
    "EmbeddedPostgresError",
    "FolderInUse",
    "Source",
    "StartFailed",
    "all_binaries",
    "find_binaries",
]
