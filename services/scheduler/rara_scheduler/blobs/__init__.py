"""Where artifacts' bytes live, by content."""

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.folder import FolderBlobStore
from rara_scheduler.blobs.open import open_blob_store
from rara_scheduler.blobs.port import (
    BlobMismatch,
    BlobStore,
    BlobStoreUnavailable,
    BlobWriter,
    Leftover,
    StoredBlob,
    UploadBusy,
)

__all__ = [
    "BlobDigest",
    "BlobMismatch",
    "BlobStore",
    "BlobStoreUnavailable",
    "BlobWriter",
    "FolderBlobStore",
    "Leftover",
    "StoredBlob",
    "UploadBusy",
    "open_blob_store",
]
