"""A blob store from its address, as RARA_BLOB_STORE gives it."""

from pathlib import Path

from rara_scheduler.blobs.folder import FolderBlobStore
from rara_scheduler.blobs.port import BlobStore


def open_blob_store(url: str) -> BlobStore:
    """The store at `file:///folder`; nothing is read or written yet. Raises ValueError for another address.

    `prepare` it before its first use, and `close` it after its last.
    """
    if not url.startswith("file:///"):
        raise ValueError("must be a file:/// URL with an absolute path")
    return FolderBlobStore(Path(url.removeprefix("file://")))
