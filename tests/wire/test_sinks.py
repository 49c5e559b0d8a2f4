"""Sinks outside keep the write of the newest attempt, whoever comes last: real stores, both languages."""

import asyncio
import contextlib
import fcntl
import functools
import json
import os
import random
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
import obstore
import pytest
import pytest_asyncio
from obstore.store import LocalStore, MemoryStore, S3Store
from rara_executor import JobFailure, Retryable, sinks
from rara_testing.processes import Processes
from support.go_executor import ROOT
from support.s3_server import S3Server, s3_server

WRITERS = 8
ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Attempt:
    """All that a sink looks at of a job."""

    lease_token: int


def of(token: int) -> Attempt:
    return Attempt(token)


@pytest_asyncio.fixture
async def raw(empty_database_url: str) -> AsyncIterator["asyncpg.Connection[asyncpg.Record]"]:
    connection = await asyncpg.connect(empty_database_url, timeout=30)
    yield connection
    await connection.close(timeout=10)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def s3(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[S3Server]:
    async with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


async def bucket_of(s3: S3Server) -> tuple[str, S3Store]:
    name = await s3.new_bucket()
    given = s3.environment()
    return name, S3Store(
        name,
        endpoint=given["AWS_ENDPOINT_URL"],
        region=given["AWS_REGION"],
        access_key_id=given["AWS_ACCESS_KEY_ID"],
        secret_access_key=given["AWS_SECRET_ACCESS_KEY"],
        client_options={"allow_http": True},
    )


async def contend(write: Callable[[int], Awaitable[object]]) -> int:
    """Writers at once, each under a token of its own; the largest."""
    tokens = random.sample(range(100, 10_000), WRITERS)

    async def one(token: int) -> None:
        with contextlib.suppress(sinks.Superseded):
            await write(token)

    await asyncio.gather(*(one(token) for token in tokens))
    return max(tokens)


# ---------------------------------------------------------------- PostgreSQL

ODD = """odd 's "schema.scores%s"; drop table x; --"""
QUOTED = """ "odd 's ""schema"."scores%s""; drop table x; --" """
SCHEMA = f"""
create schema "odd 's ""schema";
create table {QUOTED} (
    "mo%del" text, part int, score float8, note text, lease_token bigint, primary key ("mo%del", part))
"""


async def test_a_row_keeps_the_largest_token(empty_database_url: str, raw: Any) -> None:
    await raw.execute(SCHEMA)

    async def write(token: int, score: float, connection: Any = raw) -> None:
        values = {"score": score, "note": f"{score:g}"}
        await sinks.upsert(connection, of(token), table=ODD, key={"mo%del": "m", "part": 1}, values=values)

    async def stored() -> tuple[Any, ...]:
        (row,) = await raw.fetch(f"select score, note, lease_token from {QUOTED}")
        return tuple(row)

    await write(5, 0.5)
    await write(5, 0.6)  # the same attempt again
    assert await stored() == (0.6, "0.6", 5)
    await write(7, 0.7)
    with pytest.raises(sinks.Superseded) as caught:
        await write(5, 0.9)
    assert (caught.value.code, caught.value.retryable) == ("WRITE_SUPERSEDED", None)
    assert await stored() == (0.7, "0.7", 7)
    pool = await asyncpg.create_pool(empty_database_url, min_size=WRITERS, max_size=WRITERS, timeout=30)
    async with pool:
        for _ in range(ATTEMPTS):
            largest = await contend(lambda token: write(token, float(token), pool))
            assert await stored() == (float(largest), f"{largest:g}", largest)
            await raw.execute(f"update {QUOTED} set lease_token = null")
    await write(1, 0.1)  # a row from before there was a fence
    assert await stored() == (0.1, "0.1", 1)


async def test_an_upsert_waits_for_the_transaction_of_another_attempt(
    empty_database_url: str, raw: Any
) -> None:
    await raw.execute("create table t (id int primary key, value text, lease_token bigint not null)")
    other = await asyncpg.connect(empty_database_url, timeout=30)

    async def write(connection: Any, token: int) -> None:
        await sinks.upsert(connection, of(token), table="t", key={"id": 1}, values={"value": str(token)})

    try:
        async with raw.transaction():
            await write(raw, 7)
            late = asyncio.create_task(write(other, 6))
            await _until_waiting(raw)
        with pytest.raises(sinks.Superseded):
            await late
        assert await raw.fetchval("select value from t") == "7"
    finally:
        await other.close(timeout=10)


async def _until_waiting(raw: Any) -> None:
    async with asyncio.timeout(30):
        while not await raw.fetchval(
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        ):
            await asyncio.sleep(0.02)


def test_the_statement_is_there_for_other_drivers() -> None:
    query, arguments = sinks.upsert_statement(
        7, table="a.b", key={"id": 1}, values={"100%": 2}, placeholder="%s", fence_column="fence"
    )
    assert query == (
        'insert into "a"."b" as held ("id", "100%%", "fence") values (%s, %s, %s) on conflict ("id") do update set'
        ' "100%%" = excluded."100%%", "fence" = excluded."fence"'
        ' where held."fence" is null or held."fence" <= excluded."fence" returning 1'
    )
    assert arguments == [1, 2, 7]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"key": {}}, "at least one column"),
        ({"values": {"lease_token": 1}}, "there twice"),
        ({"values": {"id": 1}}, "there twice"),
        ({"table": "a..b"}, "is no name"),
        ({"table": "x" * 64}, "is no name"),
        ({"table": "a\0b"}, "is no name"),
        ({"placeholder": "?"}, "must be"),
    ],
)
def test_a_bad_statement_is_named(changes: dict[str, Any], problem: str) -> None:
    given: dict[str, Any] = {"table": "t", "key": {"id": 1}, "values": {"value": 2}} | changes
    with pytest.raises(ValueError, match=problem):
        sinks.upsert_statement(1, **given)


# ---------------------------------------------------------------- objects


@pytest.mark.asyncio(loop_scope="module")
async def test_an_object_keeps_the_largest_token(s3: S3Server, tmp_path: Path) -> None:
    _, store = await bucket_of(s3)
    await sinks.check_store(store, "probe")
    await sinks.put_object(store, of(5), "model", b"five")
    await sinks.put_object(store, of(5), "model", b"five again")
    assert await sinks.get_object(store, "model") == b"five again"
    path = tmp_path / "model"
    path.write_bytes(b"x" * 100_000)
    await sinks.put_object(store, of(7), "model", path)
    pointer = await sinks.put_object(store, of(8), "model", path)  # the same bytes
    for token in (5, 7):
        with pytest.raises(sinks.Superseded):
            await sinks.put_object(store, of(token), "model", path)
    assert await sinks.read_pointer(store, "model") == pointer
    assert (pointer.lease_token, pointer.size_bytes) == (8, 100_000)
    assert await sinks.get_object(store, "model") == path.read_bytes()
    assert await sinks.read_pointer(store, "none") is None
    with pytest.raises(FileNotFoundError):
        await sinks.get_object(store, "none")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_superseded_put_that_was_under_way_loses(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked before the newer attempt came, and writes after it."""
    _, store = await bucket_of(s3)
    await sinks.put_object(store, of(5), "model", b"five")
    put = obstore.put
    newer: list[object] = []

    def overtaken(*given: Any, **more: Any) -> Any:
        if more.get("mode") and not newer:
            newer.append(1)
            # Even with the same bytes.
            newer.append(asyncio.run(sinks.put_object(store, of(7), "model", b"five")))
        return put(*given, **more)

    monkeypatch.setattr(obstore, "put", overtaken)
    with pytest.raises(sinks.Superseded):
        await sinks.put_object(store, of(6), "model", b"six")
    assert await sinks.read_pointer(store, "model") == newer[1]
    assert await sinks.get_object(store, "model") == b"five"


@pytest.mark.asyncio(loop_scope="module")
async def test_of_writers_of_an_object_at_once_the_largest_token_stays(s3: S3Server) -> None:
    _, store = await bucket_of(s3)
    for number in range(ATTEMPTS):
        path = f"contended-{number}"

        async def write(token: int, path: str = path) -> None:
            await sinks.put_object(store, of(token), path, str(token).encode())

        largest = await contend(write)
        assert await sinks.get_object(store, path) == str(largest).encode()
        pointer = await sinks.read_pointer(store, path)
        assert pointer is not None
        assert pointer.lease_token == largest


@pytest.mark.asyncio(loop_scope="module")
async def test_what_cannot_be_fenced_is_refused(s3: S3Server, tmp_path: Path) -> None:
    _, store = await bucket_of(s3)
    await obstore.put_async(store, "foreign", b"no pointer")
    with pytest.raises(JobFailure, match="POINTER_INVALID"):
        await sinks.put_object(store, of(5), "foreign", b"x")
    assert bytes(await (await obstore.get_async(store, "foreign")).bytes_async()) == b"no pointer"
    files = LocalStore(tmp_path)
    await sinks.put_object(files, of(5), "model", b"x")  # it can create
    with pytest.raises(JobFailure, match="STORE_NOT_CONDITIONAL"):
        await sinks.put_object(files, of(6), "model", b"y")
    with pytest.raises(JobFailure, match="STORE_NOT_CONDITIONAL"):
        await sinks.check_store(files, "probe")
    assert not (tmp_path / "probe").exists()
    await sinks.check_store(MemoryStore(), "probe")


# ---------------------------------------------------------------- files

WRITE = """
import sys
from types import SimpleNamespace
from rara_executor import sinks
job = SimpleNamespace(lease_token=int(sys.argv[2]))
n = 0
while True:  # until it is killed
    sinks.write_file(job, sys.argv[1], bytes([97 + n % 26]) * (4 << 20))
    n += 1
    print("written", n, flush=True)
"""


async def test_a_file_keeps_the_largest_token(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("unfenced")
    sinks.write_file(of(5), path, b"five")
    sinks.write_file(of(5), path, b"five again")
    with sinks.open_file(of(7), path) as file:
        file.write(b"se")
        assert path.read_bytes() == b"five again"
        file.write(b"ven")
    with pytest.raises(sinks.Superseded):
        sinks.write_file(of(5), path, b"late")
    with pytest.raises(ZeroDivisionError), sinks.open_file(of(8), path) as file:
        file.write(b"eight" * (1 // 0))
    assert path.read_bytes() == b"seven"
    sinks.write_file(of(7), path, b"seven again")  # nothing was fenced by what did not end well
    for _ in range(ATTEMPTS):
        largest = await contend(
            lambda token: asyncio.to_thread(
                sinks.write_file, of(token + 10_000), path, f"{token}\n".encode() * 10_000
            )
        )
        assert path.read_bytes() == f"{largest}\n".encode() * 10_000
        (tmp_path / ".report.json.fence").unlink()  # the next round begins anew
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


async def test_a_killed_writer_leaves_a_whole_file_and_its_fence(tmp_path: Path) -> None:
    path = tmp_path / "big"
    async with Processes(tmp_path / "logs") as processes:
        for number in range(ATTEMPTS):
            writer = await processes.python(f"writer-{number}", WRITE, str(path), "5", ready="written 1")
            await asyncio.sleep(random.uniform(0, 0.03))  # a moment of a write, whichever
            await writer.kill_and_wait()
            data = path.read_bytes()
            assert (len(data), data.count(data[:1])) == (4 << 20, 4 << 20)
            with pytest.raises(sinks.Superseded):
                sinks.write_file(of(4), path, b"older")
    sinks.write_file(of(6), path, b"newer")
    assert path.read_bytes() == b"newer"
    assert not list(tmp_path.glob(".big.*.part"))


async def test_a_frozen_writer_loses_when_it_goes_on_and_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "big"
    async with Processes(tmp_path / "logs") as processes:
        writer = await processes.python("frozen", WRITE, str(path), "5", ready="written 1")
        writer.freeze()  # perhaps while it holds the lock
        newer = functools.partial(sinks.write_file, of(6), path, b"newer")
        try:
            newer(lock_s=0.2)
        except Retryable:  # it holds it
            writer.thaw()
            newer()
        writer.thaw()
        assert await writer.wait(60) == 1
        assert "Superseded" in writer.stderr.read_text()
    assert path.read_bytes() == b"newer"
    assert not list(tmp_path.glob(".big.*.part"))


def test_a_locked_file_is_waited_for_with_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "held"
    with (tmp_path / ".held.fence").open("wb") as fence:
        fcntl.flock(fence, fcntl.LOCK_EX)
        with pytest.raises(Retryable, match="WRITE_BLOCKED"):
            sinks.write_file(of(1), path, b"x", lock_s=0.05)
        assert not path.exists()
    sinks.write_file(of(1), path, b"x")


# ---------------------------------------------------------------- both languages


@pytest.mark.needs("go")
@pytest.mark.asyncio(loop_scope="module")
async def test_the_go_sdk_does_the_same_and_the_two_fence_each_other(
    s3: S3Server, empty_database_url: str, tmp_path: Path
) -> None:
    name, store = await bucket_of(s3)
    path = tmp_path / "shared.txt"
    raw = await asyncpg.connect(empty_database_url, timeout=30)
    await raw.execute("create table shared (id text primary key, value text, lease_token bigint not null)")

    async def write(token: int) -> None:
        row: dict[str, Any] = {"table": "shared", "key": {"id": "x"}, "values": {"value": "python"}}
        await sinks.upsert(raw, of(token), **row)
        sinks.write_file(of(token), path, b"python")
        await sinks.put_object(store, of(token), "shared", b"python")

    await write(5)
    ran = await asyncio.to_thread(_go_test, empty_database_url, s3, name, path)
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, "".join(line.get("Output", "") for line in results) + ran.stderr
    assert not [line for line in results if line["Action"] == "skip" and "Test" in line]
    for late in (sinks.upsert(raw, of(5), table="shared", key={"id": "x"}, values={}),
                 sinks.put_object(store, of(5), "shared", b"late")):  # fmt: skip
        with pytest.raises(sinks.Superseded):
            await late
    with pytest.raises(sinks.Superseded):
        sinks.write_file(of(5), path, b"late")
    (row,) = await raw.fetch("select value, lease_token from shared")
    assert tuple(row) == ("go", 6)
    assert path.read_bytes() == b"go"
    assert await sinks.get_object(store, "shared") == b"go"
    await write(7)
    await raw.close(timeout=10)


def _go_test(database: str, s3: S3Server, bucket: str, path: Path) -> "subprocess.CompletedProcess[str]":
    race = ["-race"] if shutil.which("cc") else []  # as in scripts/test.sh: the two share what is built
    return subprocess.run(
        ["go", "test", *race, "-count=1", "-json", "./rara/sinks/..."],
        cwd=ROOT / "executors" / "go",
        env=os.environ
        | {
            "RARA_TEST_DATABASE": database,
            "RARA_TEST_S3": s3.address,
            "RARA_TEST_BUCKET": bucket,
            "RARA_TEST_FILE": str(path),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
