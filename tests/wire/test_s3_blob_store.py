"""Blobs in S3: schedulers that share nothing else, and a store that is slow, broken, wrongly set or away.

What it has in common with other stores is shown by tests/wire/test_blob_stores.py.
"""

import asyncio
import hashlib
import random
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from rara_scheduler.blobs import BlobDigest, BlobMismatch, BlobStoreUnavailable, UploadBusy, open_blob_store
from rara_scheduler.blobs.port import RemovalUnknown
from rara_scheduler.blobs.s3 import S3BlobStore
from rara_scheduler.blobs.s3_objects import CallBounds
from rara_scheduler.domain.errors import Fault
from rara_testing.fault_proxy import Direction, FaultProxy
from rara_testing.processes import Processes
from support.s3_server import S3Server, s3_server

MIB = 1024 * 1024
SHORT = CallBounds(connect_s=1.0, facts_s=2.0, content_s=2.0, stream_s=4.0, retries=2, retry_s=1.0)
ENDS_S = 15.0  # a call of those bounds is over by then, on a busy machine too


@pytest.fixture(scope="module")
async def s3(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    async with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
async def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    yield await s3.new_bucket()
    await s3.heal()


def new_store(bucket: str, piece_bytes: int = 100_000) -> S3BlobStore:
    """As another scheduler has it."""
    return S3BlobStore(bucket, "p", bounds=SHORT, piece_bytes=piece_bytes, busy_wait_s=0.1)


def digest_of(data: bytes) -> BlobDigest:
    return BlobDigest(hashlib.sha256(data).hexdigest(), len(data))


def new_upload() -> str:
    return str(uuid.uuid4())


async def put(store: S3BlobStore, data: bytes, upload_id: str | None = None, *, pieces: int = 1) -> int:
    """Upload what is missing of it; how much was there."""
    async with store.write(upload_id or new_upload(), digest_of(data)) as writer:
        already = writer.committed_bytes
        size = -(-len(data) // pieces)
        for start in range(already, len(data), size):
            await writer.append(data[start : start + size])
        await writer.keep()
    return already


async def get(store: S3BlobStore, data: bytes) -> bytes:
    return b"".join([chunk async for chunk in store.read(digest_of(data).sha256)])


# ---------------------------------------------------------------- several schedulers


async def test_another_scheduler_goes_on_with_an_upload(bucket: str) -> None:
    data = random.Random(1).randbytes(350_000)
    upload_id = new_upload()
    first, second = new_store(bucket), new_store(bucket)
    writing = first.write(upload_id, digest_of(data))
    writer = await writing.__aenter__()
    for start in (0, 100_000, 200_000):
        await writer.append(data[start : start + 100_000])
    await writer.append(data[300_000:310_000])  # in the memory of one that will not come back
    assert await second.uploaded_bytes(upload_id) == 300_000
    assert await put(second, data, upload_id) == 300_000
    assert await get(second, data) == data
    await writer.append(data[310_000:])  # it comes back all the same
    with pytest.raises(UploadBusy):
        await writer.keep()
    await writing.__aexit__(None, None, None)
    assert await get(first, data) == data
    assert [page async for page in first.leftovers()] == []


async def test_two_schedulers_that_write_one_upload_are_found_out(bucket: str) -> None:
    data = random.Random(2).randbytes(300_000)
    upload_id = new_upload()
    first, second = new_store(bucket), new_store(bucket)
    async with first.write(upload_id, digest_of(data)) as one:
        await one.append(data[:100_000])
        async with second.write(upload_id, digest_of(data)) as two:
            await two.append(data[100_000:200_000])
        await one.append(data[100_000:150_000])
        with pytest.raises(UploadBusy) as caught:
            await one.append(data[150_000:200_000])
    assert (caught.value.code, caught.value.retry_after_s) == ("STORE_UNAVAILABLE", 1.0)
    assert await put(first, data, upload_id) == 200_000
    assert await get(second, data) == data


async def test_an_upload_that_was_discarded_meanwhile_is_not_kept(bucket: str) -> None:
    data = random.Random(3).randbytes(250_000)
    upload_id = new_upload()
    first, second = new_store(bucket), new_store(bucket)
    async with first.write(upload_id, digest_of(data)) as writer:
        await writer.append(data[:200_000])
        assert await second.discard(upload_id)
        await writer.append(data[200_000:])
        with pytest.raises(UploadBusy):
            await writer.keep()
    assert await first.size(digest_of(data).sha256) is None


async def test_a_piece_whose_answer_was_lost_is_the_writer_s_own(s3: S3Server, bucket: str) -> None:
    data = random.Random(4).randbytes(250_000)
    await s3.fail("500 InternalError", method="PUT", key="/partial/", after=True)
    store = new_store(bucket)
    assert await put(store, data, pieces=3) == 0
    assert await get(store, data) == data


_WRITES = """
import asyncio, hashlib, random, sys
from rara_scheduler.blobs import BlobDigest
from rara_scheduler.blobs.port import RemovalUnknown
from rara_scheduler.blobs.s3 import S3BlobStore

async def main(bucket, upload_id):
    store = S3BlobStore(bucket, "p", piece_bytes=100_000)
    data = random.Random(10).randbytes(1_000_000)
    async with store.write(upload_id, BlobDigest(hashlib.sha256(data).hexdigest(), len(data))) as writer:
        while writer.committed_bytes < len(data):
            await writer.append(data[writer.committed_bytes : writer.committed_bytes + 50_000])
            print("at", writer.committed_bytes // 100_000 * 100_000)
        await writer.keep()
    print("kept")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.soak)])
async def test_whenever_a_scheduler_is_killed_another_goes_on_and_the_blob_is_whole(
    s3: S3Server, bucket: str, tmp_path: Path, kills: int
) -> None:
    data, draw = random.Random(10).randbytes(1_000_000), random.Random(kills)
    store = new_store(bucket)
    async with Processes(tmp_path) as processes:
        for number in range(kills):
            upload_id = new_upload()
            # In the pieces, and around the making of the blob from them.
            kill_at = (300_000, 1_000_000)[number % 2]
            writer = await processes.start(
                "writer",
                [sys.executable, "-u", "-c", _WRITES, bucket, upload_id],
                env=s3.environment(),
                ready=f"at {kill_at}",
            )
            await asyncio.sleep(draw.uniform(0, 0.1))  # where the kill falls
            await writer.kill_and_wait()
            said = max(int(line.split()[1]) for line in writer.lines if line.startswith("at "))
            size_bytes = await store.size(digest_of(data).sha256)
            assert size_bytes in (None, len(data))
            if size_bytes is None:  # the last piece need not be one yet: the blob is made from memory, too
                assert await put(store, data, upload_id) >= min(said, 900_000)
            assert await store.verify(digest_of(data))
            assert await store.discard(upload_id)
            assert await store.remove(digest_of(data).sha256)
    assert [page async for page in store.leftovers()] == []


# ---------------------------------------------------------------- whole or not at all


async def test_a_large_blob_appears_whole_or_not_at_all(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rara_scheduler.blobs.s3.PART_BYTES", 5 * MIB)
    data = random.Random(5).randbytes(6 * MIB)
    store, upload_id = new_store(bucket, 3 * MIB), new_upload()
    await s3.fail("500 InternalError", method="PUT", key="partNumber=2", count=50)
    with pytest.raises(BlobStoreUnavailable):
        await put(store, data, upload_id, pieces=2)
    assert await store.size(digest_of(data).sha256) is None
    assert await s3.uploads(bucket) == 0
    await s3.heal()
    assert await put(store, data, upload_id) >= 3 * MIB  # nothing that was stored is lost
    assert await store.verify(digest_of(data))
    assert [page async for page in store.leftovers()] == []

    wrong = digest_of(data[:-1] + b"?")
    async with store.write(new_upload(), wrong) as writer:
        await writer.append(data[: 4 * MIB])
        await writer.append(data[4 * MIB :])
        with pytest.raises(BlobMismatch):
            await writer.keep()
    assert await store.size(wrong.sha256) is None
    assert await s3.uploads(bucket) == 0


async def test_a_call_that_is_cancelled_while_it_keeps_leaves_no_half(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rara_scheduler.blobs.s3.PART_BYTES", 5 * MIB)
    data = random.Random(6).randbytes(7 * MIB)
    async with FaultProxy(*_host_and_port(s3)) as proxy:
        for name, value in s3.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        store, upload_id = new_store(bucket, MIB), new_upload()
        async with store.write(upload_id, digest_of(data)) as writer:
            for start in range(0, len(data), MIB):
                await writer.append(data[start : start + MIB])
        proxy.delay(0.02)
        keeping = asyncio.create_task(put(store, data, upload_id))
        async with asyncio.timeout(30):
            while not await s3.uploads(bucket):
                await asyncio.sleep(0.02)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        proxy.resume()
        assert keeping.cancelled()
        assert await s3.uploads(bucket) == 0
        assert await store.size(digest_of(data).sha256) is None
        assert await put(store, data, upload_id) == len(data)
        assert await store.verify(digest_of(data))


# ---------------------------------------------------------------- a store that fails


async def test_what_passes_is_tried_again(s3: S3Server, bucket: str) -> None:
    store = new_store(bucket)
    for method in ("PUT", "HEAD", "GET", "POST"):
        await s3.fail("503 SlowDown", method=method)
    data = random.Random(7).randbytes(150_000)
    await put(store, data, pieces=2)
    assert await get(store, data) == data
    assert await store.remove(digest_of(data).sha256)


async def test_a_removal_is_tried_again_only_after_an_answer_that_nothing_was_done(
    s3: S3Server, bucket: str
) -> None:
    """A second try would make the answer say nothing of the first, which could still be carried out."""
    store = new_store(bucket)
    digest = digest_of(b"abc")
    await put(store, b"abc")
    await s3.fail("504 GatewayTimeout", method="POST")
    await s3.requests()
    with pytest.raises(RemovalUnknown, match="GatewayTimeout"):
        await store.remove(digest.sha256)
    assert sum(request.startswith("POST") for request in await s3.requests()) == 1
    await s3.fail("503 SlowDown", method="POST", count=2)
    looked_at = await store.fingerprint(digest.sha256)
    assert await store.remove(digest.sha256, only=looked_at, until=time.monotonic() - 1) is False
    assert await store.remove(digest.sha256, only=looked_at, until=time.monotonic() + 60) is True
    assert await store.size(digest.sha256) is None


FAILING: list[tuple[str, Callable[[S3BlobStore], Awaitable[object]]]] = [
    ("write", lambda store: put(store, b"abc")),
    ("append", lambda store: put(store, b"x" * 150_000, pieces=2)),
    ("status", lambda store: store.uploaded_bytes(new_upload())),
    ("size", lambda store: store.size("ab" * 32)),
    ("fingerprint", lambda store: store.fingerprint("ab" * 32)),
    ("verify", lambda store: store.verify(BlobDigest("ab" * 32, 3))),
    ("read", lambda store: anext(store.read("ab" * 32))),
    ("remove", lambda store: store.remove("ab" * 32)),
    ("discard", lambda store: store.discard(new_upload())),
    ("stored", lambda store: anext(store.stored())),
    ("leftovers", lambda store: anext(store.leftovers())),
    ("prepare", lambda store: store.prepare()),
]


@pytest.mark.parametrize(
    "answer", ["500 InternalError", "503 SlowDown", "403 AccessDenied", "403 ExpiredToken"]
)
async def test_a_store_that_refuses_is_unavailable(s3: S3Server, bucket: str, answer: str) -> None:
    store = new_store(bucket)
    await s3.fail(answer, count=1000)
    found = await asyncio.gather(*(_unavailable(call, store) for _, call in FAILING))
    for (name, _), error in zip(FAILING, found, strict=True):
        assert (error.code, error.retry_after_s) == ("STORE_UNAVAILABLE", 5.0), name
        # HEAD has no body, and so no code.
        assert answer.split()[1] in error.message or answer.split()[0] in error.message, (name, error.message)
        assert "secret" not in str(error)
        assert "an-access-key" not in str(error)


async def test_a_bucket_that_is_gone_is_no_empty_bucket(bucket: str) -> None:
    store = new_store(f"{bucket}-gone")
    for error in await asyncio.gather(*(_unavailable(call, store) for _, call in FAILING)):
        assert "NoSuchBucket" in error.message


async def test_an_unreachable_store_says_so_soon_and_holds_nobody_up(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(8).randbytes(250_000)
    upload_id = new_upload()
    async with FaultProxy(*_host_and_port(s3)) as proxy:
        for name, value in s3.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        store = new_store(bucket)
        async with store.write(upload_id, digest_of(data)) as writer:
            await writer.append(data[:120_000])
        for fault in (proxy.refuse, proxy.stall):
            fault()
            proxy.reset()
            late = asyncio.create_task(_most_late_s())
            began = time.monotonic()
            for error in await asyncio.gather(*(_unavailable(call, store) for _, call in FAILING)):
                assert error.retry_after_s == 5.0
            assert time.monotonic() - began < ENDS_S
            late.cancel()
            assert await late < 1.0  # the loop was free for heartbeats: no call blocks it
            proxy.resume()
        proxy.reset()
        assert await put(store, data, upload_id) == 120_000
        assert await get(store, data) == data


async def test_an_answer_that_breaks_off_is_no_blob(
    s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = random.Random(9).randbytes(400_000)
    async with FaultProxy(*_host_and_port(s3)) as proxy:
        for name, value in s3.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        store = new_store(bucket)
        await put(store, data)
        for _ in range(2):
            proxy.reset()
            proxy.cut_after(200_000, Direction.TO_CLIENT)
            with suppress(BlobStoreUnavailable):
                assert await get(store, data) == data  # whole by another try, or not at all
            assert proxy.triggered.is_set()
        proxy.resume()
        assert await get(store, data) == data


async def _unavailable(
    call: Callable[[S3BlobStore], Awaitable[object]], store: S3BlobStore
) -> BlobStoreUnavailable:
    with pytest.raises(BlobStoreUnavailable) as caught:
        await call(store)
    return caught.value


async def _most_late_s() -> float:
    """The longest that a tick of 20 ms took too long, until cancelled."""
    most = 0.0
    with suppress(asyncio.CancelledError):
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.02)
            most = max(most, time.monotonic() - began - 0.02)
    return most


def _host_and_port(s3: S3Server) -> tuple[str, int]:
    host, _, port = s3.address.partition(":")
    return host, int(port)


# ---------------------------------------------------------------- at start


async def test_a_store_that_cannot_do_what_is_needed_is_refused(s3: S3Server, bucket: str) -> None:
    store = new_store(bucket)
    # It overwrites in spite of If-None-Match: then two writers of an upload would not be found out.
    await s3.fail("200 OK", method="PUT", count=2)
    with pytest.raises(BlobStoreUnavailable, match="If-None-Match"):
        await store.prepare()


async def test_settings_that_are_wrong_are_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(BlobStoreUnavailable, match="AWS_ALLOW_HTTP"):
        await open_blob_store(f"s3://{bucket}").prepare()
    monkeypatch.setenv("AWS_CA_BUNDLE", "/no/such/file")
    with pytest.raises(BlobStoreUnavailable, match="AWS_CA_BUNDLE"):
        open_blob_store(f"s3://{bucket}")
    monkeypatch.delenv("AWS_CA_BUNDLE")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(BlobStoreUnavailable, match="AWS_ACCESS_KEY_ID"):
        open_blob_store(f"s3://{bucket}")
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        open_blob_store("http://bucket")


async def test_without_its_extra_the_scheduler_says_which_one_is_missing(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "rara_scheduler.blobs.s3")
    monkeypatch.setitem(sys.modules, "rara_scheduler.blobs.s3_objects", None)
    with pytest.raises(Fault, match="extra `s3`") as caught:
        open_blob_store(f"s3://{bucket}")
    assert caught.value.code == "FEATURE_DISABLED"


_ENDS_AT_ONCE = """
import asyncio, sys
from rara_scheduler.blobs import open_blob_store

async def main():
    store = open_blob_store(sys.argv[1])
    await store.prepare()
    print(await store.size("ab" * 32))
    store.close()

asyncio.run(main())
"""


async def test_a_process_may_end_right_after_its_last_call(bucket: str) -> None:
    """obstore's asynchronous calls abort every third such process, which is why they are not used."""
    for _ in range(3):
        ended = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", _ENDS_AT_ONCE, f"s3://{bucket}/p"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "None\n", "")


async def test_presence_of_the_store_is_checked_with_few_requests(s3: S3Server, bucket: str) -> None:
    store = new_store(bucket)
    await store.prepare()
    await s3.requests()
    await put(store, b"abc")
    assert [request.split()[0] for request in await s3.requests()] == ["GET", "PUT"]  # the pieces; the blob
    assert await store.size(digest_of(b"abc").sha256) == 3
    assert [request.split()[0] for request in await s3.requests()] == ["HEAD"]
