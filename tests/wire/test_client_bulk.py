"""The client starts many runs: batches over the wire, bounded memory, faults that name the request."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_client import Client
from rara_client.bulk import start_all
from rara_client.errors import InvalidArgument, NotFound
from support.running_scheduler import RunningScheduler, running_scheduler

Request = workflow_pb2.StartRunRequest


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        await opened.define("one", {"a": {}})
        yield opened


async def started_by(
    client: Client, requests: Iterator[Request], **more: int
) -> list[workflow_pb2.StartedRun]:
    return [each async for each in client.start_runs(requests, **more)]


async def test_runs_start_in_batches_and_in_order_and_once_per_key(world: RunningScheduler) -> None:
    def requests() -> Iterator[Request]:
        return (Request(definition="one", idempotency_key=f"k{n}", labels={"n": str(n)}) for n in range(2500))

    async with Client.connect(world.address) as client:
        first = await started_by(client, requests(), batch_size=400, in_flight=3)
        again = await started_by(client, requests())
    assert {each.already_started for each in first} == {False}
    assert {each.already_started for each in again} == {True}
    ids = [each.workflow_run_id for each in first]
    assert ids == [each.workflow_run_id for each in again]
    rows = await world.raw.fetch(
        "select workflow_run_id::text as id, labels ->> 'n' as n from rara.workflow_run"
    )
    assert {row["id"]: int(row["n"]) for row in rows} == {run_id: n for n, run_id in enumerate(ids)}


async def test_a_batch_is_started_whole_or_not_at_all(world: RunningScheduler) -> None:
    async with Client.connect(world.address) as client:
        with pytest.raises(NotFound) as missing:
            await client.batch_start_runs([Request(definition="one"), Request(definition="none")])
        assert (missing.value.reason, missing.value.metadata["index"]) == ("DEFINITION_NOT_FOUND", "1")
        with pytest.raises(InvalidArgument) as invalid:
            await client.batch_start_runs([Request(definition="one", labels={"": "x"})])
        assert invalid.value.violations[0].field.startswith("requests[0].labels")
        for wrong in ([], [Request(definition="one")] * 1001):
            with pytest.raises(InvalidArgument) as refused:
                await client.batch_start_runs(wrong)
            assert refused.value.message == f"requests: must be 1 to 1000, not {len(wrong)}"
        assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 0
        answer = await client.batch_start_runs([Request(definition="one")] * 1000)
    assert len({each.workflow_run_id for each in answer.runs}) == 1000


async def test_a_fault_tells_which_request_of_all_it_is_about(world: RunningScheduler) -> None:
    def requests() -> Iterator[Request]:
        for n in range(1000):
            yield Request(definition="one" if n != 777 else "none")

    found: list[workflow_pb2.StartedRun] = []

    async def take() -> None:
        async with Client.connect(world.address) as client:
            async for each in client.start_runs(requests(), batch_size=100, in_flight=1):
                found.append(each)  # noqa: PERF401 - what came before the fault counts

    with pytest.raises(NotFound) as caught:
        await take()
    assert caught.value.metadata["index"] == "777"
    assert len(found) == 700 == await world.raw.fetchval("select count(*) from rara.workflow_run")


async def test_no_more_requests_are_taken_than_are_under_way() -> None:
    taken = 0
    gate = asyncio.Semaphore(0)
    arrived: asyncio.Queue[int] = asyncio.Queue()

    def requests() -> Iterator[Request]:
        nonlocal taken
        for _ in range(10_000):
            taken += 1
            yield Request(definition="one")

    async def start_batch(batch: list[Request]) -> workflow_pb2.BatchStartRunsResponse:
        arrived.put_nowait(len(batch))
        await gate.acquire()
        return workflow_pb2.BatchStartRunsResponse(runs=[workflow_pb2.StartedRun() for _ in batch])

    started = start_all(start_batch, requests(), batch_size=50, in_flight=3)
    first = asyncio.ensure_future(anext(started))
    for _ in range(3):
        assert await arrived.get() == 50
    assert arrived.empty()
    assert taken <= 4 * 50
    for _ in range(200):
        gate.release()
    await first
    assert 1 + len([each async for each in started]) == 10_000


async def test_large_requests_go_in_small_batches() -> None:
    sizes: list[int] = []

    async def start_batch(batch: list[Request]) -> workflow_pb2.BatchStartRunsResponse:
        sizes.append(sum(each.ByteSize() for each in batch))
        return workflow_pb2.BatchStartRunsResponse(runs=[workflow_pb2.StartedRun() for _ in batch])

    large = Request(definition="one")
    large.input.data = b'"' + b"x" * 300_000 + b'"'
    counted = [each async for each in start_all(start_batch, [large] * 10, batch_size=500, in_flight=2)]
    assert len(counted) == 10
    assert len(sizes) == 4
    assert max(sizes) <= 1024 * 1024


@pytest.mark.parametrize(("batch_size", "in_flight"), [(0, 1), (1001, 1), (1, 0)])
async def test_senseless_bounds_are_refused(batch_size: int, in_flight: int) -> None:
    async def start_batch(batch: list[Request]) -> workflow_pb2.BatchStartRunsResponse:
        raise AssertionError("never called")

    with pytest.raises(ValueError, match="must be"):
        async for _ in start_all(start_batch, [], batch_size=batch_size, in_flight=in_flight):
            pass
