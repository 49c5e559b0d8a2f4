"""Where artifacts' bytes live, by content."""

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.folder import FolderBlobStore
from rara_scheduler.blobs.port import BlobMismatch, BlobStore, BlobStoreUnavailable, BlobWriter, UploadBusy

__all__ = [
    "BlobDigest",
    "BlobMismatch",
    "BlobStore",
    "BlobStoreUnavailable",
    "BlobWriter",
    "FolderBlobStore",
    "UploadBusy",
]
