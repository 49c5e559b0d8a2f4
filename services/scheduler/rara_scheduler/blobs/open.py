"""A blob store from its address, as RARA_BLOB_STORE gives it."""

import re
from pathlib import Path
from typing import Final

from rara_scheduler.blobs.folder import FolderBlobStore
from rara_scheduler.blobs.port import BlobStore
from rara_scheduler.domain.errors import Code, Fault

_S3: Final = re.compile(r"s3://([A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9])(?:/([A-Za-z0-9._/=+-]{0,512}))?")


def open_blob_store(url: str) -> BlobStore:
    """The store at `file:///folder` or `s3://bucket/prefix`; nothing is read or written yet.

    `prepare` it before its first use, and `close` it after its last. Raises ValueError for another address.
    """
    check_blob_store_url(url)
    if url.startswith("file:"):
        return FolderBlobStore(Path(url.removeprefix("file://")))
    try:
        from rara_scheduler.blobs.s3 import S3BlobStore
    except ModuleNotFoundError as error:
        raise Fault(
            Code.FEATURE_DISABLED, f"an s3:// blob store needs the extra `s3` (no module {error.name})"
        ) from error
    return S3BlobStore(*_bucket_and_prefix(url))


def check_blob_store_url(url: str) -> None:
    """Raises ValueError, which does not show the address: somebody may have put credentials into it."""
    if url.startswith("s3://"):
        _bucket_and_prefix(url)
    elif not url.startswith("file:///"):
        raise ValueError("must be a file:/// URL with an absolute path, or s3://bucket/prefix")


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    match = _S3.fullmatch(url)
    prefix = (match[2] or "").rstrip("/") if match else ""
    parts = prefix.split("/") if prefix else []
    if match is None or not all(part.strip(".") for part in parts):
        raise ValueError(
            "must be s3://bucket/prefix with plain names; endpoint and credentials are AWS_* variables"
        )
    return match[1], prefix
