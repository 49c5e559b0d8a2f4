"""An object that is replaced by compare-and-swap, and keeps the largest lease token that has written it.

What changes is a small pointer, `path` itself: JSON with the token, the key, digest and size of the bytes, which are an
object of their own under a name that nobody else uses. The token stands in what the store compares by ETag, so that
equal bytes of two attempts are two pointers. A bare object could not be fenced: its ETag says nothing of the token.

The synchronous half of obstore, in threads: its asynchronous half answers from threads of its own, which can abort
(SIGABRT) a process that ends just then.
"""

import asyncio
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rara_executor.codes import Code
from rara_executor.errors import JobFailure, Retryable, Terminal
from rara_executor.sinks.token import Superseded, Tokened, token_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

ATTEMPTS = 32  # each lost swap means that somebody else's has been made
MAX_POINTER_BYTES = 16 << 10
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where the bytes are, and who wrote them. sha256 in hex."""

    lease_token: int
    object: str
    sha256: str
    size_bytes: int

    def encode(self) -> bytes:
        """The same text in every language, so that a repeat changes nothing."""
        return json.dumps(asdict(self), separators=(",", ":"), ensure_ascii=False).encode()

    @classmethod
    def decode(cls, path: str, data: bytes) -> "Pointer":
        try:
            values = json.loads(data)
            return cls(**{name: kind(values[name]) for name, kind in _FIELDS.items()})
        except (ValueError, TypeError, KeyError) as error:
            raise Terminal("POINTER_INVALID", f"object {path} was not written by put_object") from error


_FIELDS = {"lease_token": int, "object": str, "sha256": str, "size_bytes": int}


async def put_object(store: "ObjectStore", job: Tokened, path: str, data: bytes | Path) -> Pointer:
    """Make `path` point to the data, unless a newer attempt has written it. Raises Superseded.

    store: obstore's, of an S3-compatible or other service with conditional writes (`check_store`). Bytes that lost,
    and those of earlier pointers, stay beside it under `path.TOKEN-DIGEST`, for a lifecycle rule to remove.
    """
    import obstore

    token = token_of(job)
    found = await _look(store, path)
    if found is not None and found[0].lease_token > token:
        raise Superseded(f"object {path}", token)  # before bytes that nobody would see are sent
    sha256, size_bytes = await asyncio.to_thread(_digest, data)
    pointer = Pointer(token, f"{path}.{token}-{sha256}", sha256, size_bytes)
    await asyncio.to_thread(obstore.put, store, pointer.object, data)
    for _ in range(ATTEMPTS):
        if await _swap(store, path, pointer, None if found is None else found[1]):
            return pointer
        found = await _look(store, path)
        if found is not None and found[0].lease_token > token:
            raise Superseded(f"object {path}", token)
    raise Retryable("WRITE_CONTENDED", f"object {path}: {ATTEMPTS} others were faster")


async def read_pointer(store: "ObjectStore", path: str) -> Pointer | None:
    """Where `path` points to now; None: nowhere."""
    found = await _look(store, path)
    return None if found is None else found[0]


async def get_object(store: "ObjectStore", path: str) -> bytes:
    """The bytes that `path` points to, verified. Raises FileNotFoundError if there are none."""
    import obstore

    pointer = await read_pointer(store, path)
    if pointer is None:
        raise FileNotFoundError(path)
    data = await asyncio.to_thread(lambda: bytes(obstore.get(store, pointer.object).bytes()))
    if (hashlib.sha256(data).hexdigest(), len(data)) != (pointer.sha256, pointer.size_bytes):
        raise JobFailure(Code.ARTIFACT_MISMATCH, f"object {pointer.object} does not have its digest")
    return data


async def check_store(store: "ObjectStore", path: str) -> None:
    """Try whether the store keeps its word, with an object at `path`. Raises Terminal if writes are not conditional."""
    import obstore

    def pointer(token: int) -> Pointer:
        return Pointer(token, path, "", 0)

    try:
        first = await _swap(store, path, pointer(1), None)
        again = await _swap(store, path, pointer(2), None)
        found = await _look(store, path)
        assert found is not None  # noqa: S101 - one of the two has written it
        other = await _swap(store, path, pointer(3), '"of nothing"')
        right = await _swap(store, path, pointer(4), found[1])
        if (first, again, other, right) != (True, False, False, True):
            raise Terminal("STORE_NOT_CONDITIONAL", "the store writes whatever the condition says")
    finally:
        await asyncio.to_thread(obstore.delete, store, path)


async def _look(store: "ObjectStore", path: str) -> tuple[Pointer, str] | None:
    import obstore

    try:
        answer = await asyncio.to_thread(obstore.get, store, path)
    except FileNotFoundError:
        return None
    if answer.meta["size"] > MAX_POINTER_BYTES:
        raise Terminal("POINTER_INVALID", f"object {path} was not written by put_object")
    data = bytes(await asyncio.to_thread(answer.bytes))
    return Pointer.decode(path, data), answer.meta["e_tag"] or ""


async def _swap(store: "ObjectStore", path: str, pointer: Pointer, e_tag: str | None) -> bool:
    """Write the pointer if the object still has this ETag; None: if there is none."""
    import obstore
    from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

    try:
        await asyncio.to_thread(
            obstore.put,
            store,
            path,
            pointer.encode(),
            mode="create" if e_tag is None else {"e_tag": e_tag},
            use_multipart=False,
        )
    except (AlreadyExistsError, PreconditionError, NotFoundError):
        return False
    except NotImplementedError as error:
        raise Terminal(
            "STORE_NOT_CONDITIONAL", "the store cannot replace an object under a condition"
        ) from error
    return True


def _digest(data: bytes | Path) -> tuple[str, int]:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest(), len(data)
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
