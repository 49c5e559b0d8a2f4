"""The blob store itself, for commands that work on it directly."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from rara_scheduler.blobs import BlobStore, BlobStoreUnavailable, open_blob_store
from rara_scheduler.domain.errors import Fault

from rara_cli.exits import CommandError, Exit


@asynccontextmanager
async def opened_store(url: str) -> AsyncGenerator[BlobStore, None]:
    """The store at an address, closed at the end; its faults as ends of the command."""
    try:
        store = open_blob_store(url)
    except ValueError as error:
        raise CommandError(Exit.USAGE, "USAGE", f"--blob-store: {error}", "set RARA_BLOB_STORE") from error
    except Fault as error:
        raise CommandError(Exit.UNEXPECTED, error.code, error.message, "pip install 'rara[s3]'") from error
    try:
        async with aclosing(
            store.stored()
        ) as pages:  # not prepare: a folder that is not mounted is not to be made
            await anext(pages, None)
        yield store
    except BlobStoreUnavailable as error:
        raise CommandError(Exit.UNREACHABLE, error.code, error.message, "check --blob-store") from error
    finally:
        store.close()
