"""Blobs in a bucket of an S3-compatible store.

    <prefix>/sha256/ab/cdef...             the blob of digest abcdef..., complete and verified
    <prefix>/partial/<upload_id>/<offset>  a piece of an upload, at its place in the blob

An object is written whole or not at all, and cannot grow: so an upload's bytes wait in pieces, from which `keep`
makes the blob. Schedulers share nothing but the bucket; any of them goes on with any upload.
"""

import asyncio
import hashlib
import re
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import structlog

from rara_scheduler.blobs.digest import BlobDigest
from rara_scheduler.blobs.port import (
    BlobMismatch,
    BlobStoreUnavailable,
    Leftover,
    RemovalUnknown,
    StoredBlob,
    UploadBusy,
)
from rara_scheduler.blobs.s3_objects import CallBounds, Content, ObjectFacts, S3Objects

log = structlog.get_logger(__name__)

T = TypeVar("T")

MIB: Final = 1024 * 1024
PIECE_BYTES: Final = 8 * MIB  # what a killed scheduler loses of an upload at most
PART_BYTES: Final = 8 * MIB  # of an object that is put together; S3 wants 5 MiB at least
CHUNK_BYTES: Final = 256 * 1024
BLOCK_BYTES: Final = 2 * MIB  # read at once: a request that ends soon, however slow the reader is
_MAX_PARTS: Final = 9_000  # of one object; S3 takes 10,000
_CALL_THREADS: Final = 32
_JOIN_THREADS: Final = 2  # blobs made from pieces at one time: each holds a few parts in memory
_BUSY_WAIT_S: Final = 10.0
_BUSY_LOOK_S: Final = 0.05
_STOP_S: Final = 90.0  # work looks between its requests whether to stop
_LATE_S: Final = 110.0  # how much later than its caller gave up a service may still carry out a request
_REMOVE_TRIES: Final = 4
_REMOVE_PAUSE_S: Final = 0.1  # before the second try; twice that before the next one
_UPLOAD_ID = re.compile(r"[0-9a-f-]{1,64}")
_BLOB_KEY = re.compile(r"sha256/([0-9a-f]{2})/([0-9a-f]{62})")
_PIECE_KEY = re.compile(r"partial/([0-9a-f-]{1,64})/([0-9]{15})")


@dataclass(frozen=True, slots=True)
class _Piece:
    key: str
    size_bytes: int


class S3BlobStore:
    """One bucket and prefix, for any number of schedulers at once. Calls run in a few threads of its own."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        bounds: CallBounds | None = None,
        piece_bytes: int = PIECE_BYTES,
        busy_wait_s: float = _BUSY_WAIT_S,
    ) -> None:
        bounds = bounds or CallBounds()
        self.objects = S3Objects(bucket, prefix, bounds)
        self.removal_s = bounds.facts_s + _LATE_S
        self.piece_bytes = piece_bytes
        self._busy_wait_s = busy_wait_s
        self._calls = ThreadPoolExecutor(_CALL_THREADS, thread_name_prefix="s3")
        self._joins = ThreadPoolExecutor(_JOIN_THREADS, thread_name_prefix="s3-join")
        self._held: set[str] = set()  # uploads that a caller of this process writes

    async def prepare(self) -> None:
        """Try what will be needed, on an object that nobody else uses. Raises BlobStoreUnavailable."""
        await self.run(self._probe)

    def _probe(self) -> None:
        writer = str(uuid.uuid4())
        key = f"probe/{writer}"
        self.objects.create(key, b"rara", writer)
        if self.objects.create(key, b"rara", "somebody else"):
            raise BlobStoreUnavailable(f"{self.objects.address}: PUT with If-None-Match overwrites")
        self.objects.read(key, 0, len(b"rara"))
        if not any(facts.key == key for page in self.objects.pages("probe") for facts in page):
            raise BlobStoreUnavailable(f"{self.objects.address}: an object just written is not listed")
        self.objects.delete([key])

    def close(self) -> None:
        for threads in (self._calls, self._joins):
            threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ uploads

    @asynccontextmanager
    async def write(self, upload_id: str, expected: BlobDigest) -> AsyncIterator["S3Writer"]:
        await self._hold(upload_id)
        try:
            pieces = await self.run(partial(self._pieces, upload_id))
            writer = S3Writer(self, upload_id, expected, pieces)
            try:
                yield writer
            except BlobStoreUnavailable:
                raise  # it would not take the rest either
            except BaseException:
                await writer.save_what_came()
                raise
            await writer.flush()
        finally:
            self._held.discard(upload_id)

    async def _hold(self, upload_id: str) -> None:
        """Among the callers of this process. One of another process is found out by the pieces that it writes."""
        _checked_id(upload_id)
        waited = 0.0
        while upload_id in self._held:
            if waited >= self._busy_wait_s:
                raise UploadBusy(upload_id)
            await asyncio.sleep(_BUSY_LOOK_S)
            waited += _BUSY_LOOK_S
        self._held.add(upload_id)

    def _pieces(self, upload_id: str) -> list[_Piece]:
        """Those that follow each other from the start on."""
        found = {
            int(match[2]): _Piece(facts.key, facts.size_bytes)
            for page in self.objects.pages(f"partial/{_checked_id(upload_id)}")
            for facts in page
            if (match := _PIECE_KEY.fullmatch(facts.key)) and facts.size_bytes
        }
        pieces: list[_Piece] = []
        offset = 0
        while piece := found.get(offset):
            pieces.append(piece)
            offset += piece.size_bytes
        return pieces

    async def uploaded_bytes(self, upload_id: str) -> int:
        return sum(piece.size_bytes for piece in await self.run(partial(self._pieces, upload_id)))

    async def is_being_written(self, upload_id: str) -> bool:
        return upload_id in self._held

    async def discard(self, upload_id: str) -> bool:
        """As every caller of `write` here has ended; one of another scheduler notices when it comes to keep."""
        _checked_id(upload_id)
        if upload_id in self._held:
            return False
        await self.run(partial(self.delete_pieces, upload_id))
        return True

    def delete_pieces(self, upload_id: str) -> None:
        for page in self.objects.pages(f"partial/{upload_id}"):
            self.objects.delete([facts.key for facts in page])

    # ------------------------------------------------------------ blobs

    async def size(self, sha256: str) -> int | None:
        facts = await self._facts(sha256)
        return None if facts is None else facts.size_bytes

    async def fingerprint(self, sha256: str) -> tuple[str, str, int] | None:
        facts = await self._facts(sha256)
        return None if facts is None else _fingerprint(facts)

    async def _facts(self, sha256: str) -> ObjectFacts | None:
        return await self.run(partial(self.objects.facts, blob_key(sha256)))

    async def read(
        self, sha256: str, *, offset: int = 0, limit: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        facts = await self._facts(sha256)
        if facts is None:
            raise FileNotFoundError(sha256)
        end = facts.size_bytes if limit is None else min(offset + limit, facts.size_bytes)
        while offset < end:
            block = await self.run(
                partial(self.objects.read, facts.key, offset, min(end - offset, BLOCK_BYTES))
            )
            offset += len(block)
            for start in range(0, len(block), CHUNK_BYTES):
                yield bytes(block[start : start + CHUNK_BYTES])

    async def verify(self, expected: BlobDigest) -> bool:
        digest = hashlib.sha256()
        size_bytes = 0
        try:
            async with aclosing(self.read(expected.sha256)) as chunks:
                async for chunk in chunks:
                    await self.run(partial(digest.update, chunk))
                    size_bytes += len(chunk)
        except FileNotFoundError:
            return False
        return (digest.hexdigest(), size_bytes) == (expected.sha256, expected.size_bytes)

    async def remove(self, sha256: str, *, only: Hashable | None = None, until: float | None = None) -> bool:
        """With `only`, a blob stored again in the moment between look and removal goes too: S3 has no better answer.

        Whoever records a blob looks for it once more afterwards. When cancelled, it waits for the request under way.
        """
        stop = threading.Event()
        work = partial(self._remove, blob_key(sha256), only, until, stop)
        return await self._ended(self._calls, work, stop)

    def _remove(self, key: str, only: Hashable | None, until: float | None, stop: threading.Event) -> bool:
        """Tried again only where the store has said that it did nothing."""
        for pause_s in (_REMOVE_PAUSE_S * 2**n for n in range(_REMOVE_TRIES)):
            if only is not None:
                facts = self.objects.facts(key)
                if facts is not None and _fingerprint(facts) != only:
                    return False
            if stop.is_set():
                raise _Stopped
            if until is not None and time.monotonic() > until:
                return False
            try:
                self.objects.delete_once(key)
                return True
            except RemovalUnknown:
                raise
            except BlobStoreUnavailable as error:
                refused = error
            stop.wait(pause_s)
        raise refused

    async def free_bytes(self) -> None:
        return None

    # ------------------------------------------------------------ listings

    async def stored(self) -> AsyncGenerator[Sequence[StoredBlob], None]:
        async with aclosing(self._listed("sha256")) as pages:
            async for page in pages:
                yield [
                    StoredBlob(match[1] + match[2], facts.size_bytes, facts.modified_at)
                    for facts in page
                    if (match := _BLOB_KEY.fullmatch(facts.key))
                ]

    async def leftovers(self) -> AsyncGenerator[Sequence[Leftover], None]:
        async with aclosing(self._listed("partial")) as pages:
            async for page in pages:
                found: dict[str, Leftover] = {}
                for facts in page:
                    if match := _PIECE_KEY.fullmatch(facts.key):
                        found[match[1]] = _added(found.get(match[1]), match[1], facts)
                yield list(found.values())

    async def _listed(self, folder: str) -> AsyncGenerator[list[ObjectFacts], None]:
        pages = self.objects.pages(folder)
        while page := await self.run(partial(next, pages, None)):
            yield page

    # ------------------------------------------------------------ threads

    async def run(self, work: Callable[[], T]) -> T:
        """In a thread. When cancelled it does not wait: the call ends within its own bound, and nobody looks."""
        return await asyncio.get_running_loop().run_in_executor(self._calls, work)

    async def join(self, work: Callable[[], T], stop: threading.Event) -> T:
        """In a thread for long work; else as `_ended`."""
        return await self._ended(self._joins, work, stop)

    async def _ended(self, threads: ThreadPoolExecutor, work: Callable[[], T], stop: threading.Event) -> T:
        """In a thread. When cancelled it sets `stop`, and waits for the work to see it."""
        future = asyncio.get_running_loop().run_in_executor(threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait({future}, timeout=_STOP_S)
            if future.done() and not future.cancelled():
                future.exception()  # seen
            raise


class _WrongBytes(Exception):
    """Raised within a stream of blocks, so that no object comes of it."""


class _Stopped(Exception):
    """Raised before the next request of work that nobody waits for any more."""


class S3Writer:
    """Holds what came since the last piece; one for each call that writes."""

    def __init__(
        self, store: S3BlobStore, upload_id: str, expected: BlobDigest, pieces: list[_Piece]
    ) -> None:
        self._store = store
        self._upload_id = upload_id
        self._expected = expected
        self._pieces = pieces
        self._stored_bytes = sum(piece.size_bytes for piece in pieces)
        self._rest = bytearray()
        self._writer = str(uuid.uuid4())

    @property
    def committed_bytes(self) -> int:
        """With what is in memory, which is stored before a call that ends in order says so to anybody."""
        return self._stored_bytes + len(self._rest)

    async def append(self, data: bytes) -> None:
        if self.committed_bytes + len(data) > self._expected.size_bytes:
            await self._drop()
            raise BlobMismatch(self._expected, "more bytes than that arrived")
        self._rest += data
        if len(self._rest) >= self._store.piece_bytes and self.committed_bytes < self._expected.size_bytes:
            await self.flush()

    async def flush(self) -> None:
        """Store what came since the last piece. Raises UploadBusy when another scheduler has written that place."""
        if not self._rest:
            return
        data, key = self._rest, f"partial/{self._upload_id}/{self._stored_bytes:015d}"
        if not await self._store.run(partial(self._store.objects.create, key, data, self._writer)):
            self._rest = bytearray()  # what is stored there counts
            raise UploadBusy(self._upload_id)
        self._pieces.append(_Piece(key, len(data)))
        self._stored_bytes += len(data)
        self._rest = bytearray()

    async def save_what_came(self) -> None:
        """As far as can be: the caller is gone, by a broken connection or worse, and comes again for the rest."""
        try:
            await self.flush()
        except (BlobStoreUnavailable, UploadBusy) as error:
            log.info("upload.tail_lost", upload_id=self._upload_id, error=str(error))

    async def keep(self) -> None:
        if (arrived := self.committed_bytes) != self._expected.size_bytes:
            await self._drop()
            raise BlobMismatch(self._expected, f"only {arrived} bytes arrived")
        stop = threading.Event()
        try:
            if self._pieces:
                await self._store.join(partial(self._join, self._rest, stop), stop)
            else:
                await self._store.run(partial(self._put, self._rest))
        except _WrongBytes as error:
            await self._drop()
            raise BlobMismatch(self._expected, f"the bytes that arrived have the SHA-256 {error}") from None
        except UploadBusy:
            self._rest = bytearray()  # else it would be stored as the piece of an upload that is over
            raise
        await self._drop()

    def _put(self, data: bytearray) -> None:
        self._compare(hashlib.sha256(data).hexdigest())
        self._store.objects.put(blob_key(self._expected.sha256), data)

    def _join(self, rest: bytearray, stop: threading.Event) -> None:
        """Make the blob from the pieces and the rest. It appears only when all of its bytes are the digest's."""
        part_bytes = max(PART_BYTES, -(-self._expected.size_bytes // _MAX_PARTS))
        self._store.objects.put_stream(
            blob_key(self._expected.sha256), self._checked_blocks(rest, stop), part_bytes
        )

    def _checked_blocks(self, rest: bytearray, stop: threading.Event) -> Iterator[Content]:
        found = hashlib.sha256()
        for block in self._blocks():
            if stop.is_set():
                raise _Stopped
            found.update(block)
            yield block
        found.update(rest)
        self._compare(found.hexdigest())
        yield rest

    def _blocks(self) -> Iterator[Content]:
        for piece in self._pieces:
            for offset in range(0, piece.size_bytes, BLOCK_BYTES):
                length = min(piece.size_bytes - offset, BLOCK_BYTES)
                try:
                    block = self._store.objects.read(piece.key, offset, length)
                except FileNotFoundError as error:  # another scheduler has kept or discarded the upload
                    raise UploadBusy(self._upload_id) from error
                yield block

    def _compare(self, found: str) -> None:
        if found != self._expected.sha256:
            raise _WrongBytes(found)

    async def _drop(self) -> None:
        """Delete the pieces. Where that fails, the upload's end or a collection of garbage finds them."""
        self._rest = bytearray()
        if not self._pieces:
            return
        try:
            await self._store.run(partial(self._store.delete_pieces, self._upload_id))
        except BlobStoreUnavailable as error:
            log.warning("upload.pieces_left", upload_id=self._upload_id, error=str(error))


def blob_key(sha256: str) -> str:
    BlobDigest(sha256, 0)  # raises on what could lead elsewhere
    return f"sha256/{sha256[:2]}/{sha256[2:]}"


def _fingerprint(facts: ObjectFacts) -> tuple[str, str, int]:
    return facts.etag, facts.modified_at.isoformat(), facts.size_bytes


def _checked_id(upload_id: str) -> str:
    if not _UPLOAD_ID.fullmatch(upload_id):
        raise ValueError(f"not an upload's id: {upload_id!r}")
    return upload_id


def _added(found: Leftover | None, upload_id: str, facts: ObjectFacts) -> Leftover:
    if found is None:
        return Leftover(upload_id, facts.size_bytes, facts.modified_at)
    return Leftover(upload_id, found.size_bytes + facts.size_bytes, max(found.modified_at, facts.modified_at))
