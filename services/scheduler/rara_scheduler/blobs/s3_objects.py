"""Objects of an S3-compatible bucket: blocking calls with bounds, and errors in our own words.

The synchronous half of obstore, in threads of the caller. Its asynchronous half answers from threads of its own,
which aborts a process (SIGABRT) that happens to end just then, as a command does after its last call.
"""

import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import S3Store

from rara_scheduler.blobs.port import LISTED_AT_ONCE, BlobStoreUnavailable, RemovalUnknown

if TYPE_CHECKING:  # these two are there for type checkers alone
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

Content: TypeAlias = bytes | bytearray | memoryview  # not copied on its way to a request

_WRITER: Final = "rara-writer"  # metadata of a created object: who created it
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSED = re.compile(r"status code: (?:4\d\d|503)")  # nothing was done, nor will be
_CAUSES: Final = (  # as obstore shows what went wrong before there was an answer
    ("MissingAccessKeyId", "AWS_ACCESS_KEY_ID is not set"),
    ("MissingSecretAccessKey", "AWS_SECRET_ACCESS_KEY is not set"),
    ("BadScheme", "a plain http:// endpoint needs AWS_ALLOW_HTTP=true"),
    ("kind: Timeout", "no answer in time"),
    ("kind: Connect", "cannot connect"),
    ("kind: Request", "the connection broke"),
    ("kind: Decode", "the answer broke off"),
    ("kind: Interrupted", "the connection broke"),
)


@dataclass(frozen=True, slots=True)
class CallBounds:
    """A call ends within its time, or `retry_s` later: until then, it is tried again. `delete_once` is not."""

    connect_s: float = 5.0
    facts_s: float = 10.0  # a call that moves no content
    content_s: float = 60.0  # at most 16 MiB in one request
    stream_s: float = 300.0  # completing an object of many parts takes a store its time
    retries: int = 3
    retry_s: float = 15.0


@dataclass(frozen=True, slots=True)
class ObjectFacts:
    key: str
    size_bytes: int
    modified_at: datetime
    etag: str


class S3Objects:
    """Objects below one prefix. Every method blocks; all but `facts` and `read` raise BlobStoreUnavailable alone.

    Where the bucket is comes from AWS's own environment variables: AWS_ENDPOINT_URL, AWS_REGION, credentials.
    """

    def __init__(self, bucket: str, prefix: str, bounds: CallBounds) -> None:
        self.address = f"s3://{bucket}/{prefix}".rstrip("/")
        with self._translated("open"):
            self._facts = _store(bucket, prefix, bounds, bounds.facts_s)
            self._content = _store(bucket, prefix, bounds, bounds.content_s)
            self._stream = _store(bucket, prefix, bounds, bounds.stream_s)
            self._once = _store(bucket, prefix, replace(bounds, retries=0), bounds.facts_s)

    # ------------------------------------------------------------ reading

    def facts(self, key: str) -> ObjectFacts | None:
        """None: there is no such object."""
        try:
            with self._translated("look at objects", may_be_absent=True):
                return _facts_of(obstore.head(self._facts, key))
        except FileNotFoundError:
            pass
        try:
            # HEAD says 404 and no more, for a bucket that is gone too, in which no blob would count any longer. GET
            # says which.
            with self._translated("look at objects", may_be_absent=True):
                return _facts_of(obstore.get(self._facts, key).meta)
        except FileNotFoundError:
            return None

    def read(self, key: str, offset: int, length: int) -> memoryview:
        """Exactly `length` bytes from `offset` on, at least one. Raises FileNotFoundError: there is no such object."""
        with self._translated("read", may_be_absent=True):
            data = memoryview(obstore.get_range(self._content, key, start=offset, length=length))
        if len(data) != length:
            raise BlobStoreUnavailable(f"{self.address}: {len(data)} bytes came where {length} should be")
        return data

    def pages(self, folder: str) -> Iterator[list[ObjectFacts]]:
        """Every object below `folder`, each page when it is asked for."""
        with self._translated("list"):
            stream = obstore.list(self._facts, folder, chunk_size=LISTED_AT_ONCE)
        while True:
            with self._translated("list"):
                page = next(stream, None)
            if page is None:
                return
            yield [_facts_of(meta) for meta in page]

    # ------------------------------------------------------------ writing

    def put(self, key: str, data: Content) -> None:
        """Write a whole object, over what may be there."""
        with self._translated("write"):
            obstore.put(self._content, key, data, use_multipart=False)

    def create(self, key: str, data: Content, writer: str) -> bool:
        """Write a whole object where there is none yet; whether it is this writer's now."""
        try:
            with self._translated("write"):
                obstore.put(self._content, key, data, mode="create", attributes={_WRITER: writer})
        except AlreadyExistsError:
            return self._is_by(key, writer)  # its first answer may have been lost, and this was another try
        return True

    def _is_by(self, key: str, writer: str) -> bool:
        try:
            with self._translated("look at objects", may_be_absent=True):
                found = obstore.get(self._facts, key, options={"head": True}).attributes
        except FileNotFoundError:
            return False
        return found.get(_WRITER) == writer

    def put_stream(self, key: str, blocks: Iterator[Content], part_bytes: int) -> None:
        """Write a whole object from blocks, holding a few parts in memory. What `blocks` raises leaves no object."""
        with (
            self._translated("write"),
            obstore.open_writer(self._stream, key, buffer_size=part_bytes, max_concurrency=2) as writer,
        ):
            for block in blocks:
                writer.write(block)

    def delete(self, keys: Sequence[str]) -> None:
        """Harmless where there is none."""
        if keys:
            with self._translated("delete"):
                obstore.delete(self._facts, keys)

    def delete_once(self, key: str) -> None:
        """In one request that lasts `facts_s` at most. Raises RemovalUnknown unless the store has answered."""
        try:
            with self._translated("delete"):
                obstore.delete(self._once, [key])
        except BlobStoreUnavailable as error:
            if _REFUSED.search(str(error.__cause__)):
                raise
            raise RemovalUnknown(
                f"cannot delete at {self.address}: {_cause(str(error.__cause__))}"
            ) from error

    # ------------------------------------------------------------ errors

    @contextmanager
    def _translated(self, doing: str, *, may_be_absent: bool = False) -> Generator[None, None, None]:
        """AlreadyExistsError is an answer and passes, FileNotFoundError where it can be one. Else nothing is known."""
        try:
            yield
        except AlreadyExistsError:
            raise
        except FileNotFoundError as error:
            if may_be_absent and "NoSuchBucket" not in str(error):
                raise
            raise BlobStoreUnavailable(f"cannot {doing} at {self.address}: {_cause(str(error))}") from error
        except (BaseError, OSError) as error:
            raise BlobStoreUnavailable(f"cannot {doing} at {self.address}: {_cause(str(error))}") from error


def _store(bucket: str, prefix: str, bounds: CallBounds, request_s: float) -> S3Store:
    options: ClientConfig = {
        "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
        "connect_timeout": timedelta(seconds=bounds.connect_s),
        "timeout": timedelta(seconds=request_s),
    }
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        options["root_certificate"] = _certificates(bundle)
    return S3Store(
        bucket,
        prefix=prefix or None,
        client_options=options,
        retry_config={
            "max_retries": bounds.retries,
            "retry_timeout": timedelta(seconds=bounds.retry_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=3),
                "base": 2,
            },
        },
    )


def _certificates(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BlobStoreUnavailable(f"AWS_CA_BUNDLE={path}: {error.strerror}") from error


def _facts_of(meta: "ObjectMeta") -> ObjectFacts:
    return ObjectFacts(meta["path"], meta["size"], meta["last_modified"], meta["e_tag"] or "")


def _cause(text: str) -> str:
    """The service's error code, else the status, else what happened before an answer. Nothing else of the text.

    It holds the whole answer, and with it what only the owner of the account should see.
    """
    if match := _CODE.search(text) or _STATUS.search(text):
        return match[1]
    return next((cause for sign, cause in _CAUSES if sign in text), "no answer")
