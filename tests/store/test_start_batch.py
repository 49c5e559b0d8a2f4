"""Starting many runs at once: all or none, each once per key, whoever else starts the same ones."""

import asyncio
import hashlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.start_command import RunArtifact, StartCommand
from rara_scheduler.store.start import RunStarter, Started
from support.store_world import StoreWorld, store_world

HELLO = hashlib.sha256(b"hello").hexdigest()


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def refusal(world: StoreWorld, commands: list[StartCommand]) -> Fault:
    with pytest.raises(Fault) as caught:
        await world.starter.start_batch(commands)
    return caught.value


async def count(world: StoreWorld, table: str) -> int:
    return int(await world.raw.fetchval(f"select count(*) from rara.{table}"))


async def test_a_batch_stores_what_single_starts_store(world: StoreWorld) -> None:
    await world.define("chain", {"a": {"schedule_timeout": {"seconds": 5}}, "b": {"depends_on": ["a"]}})
    await world.define("timed", {"only": {"timeout": {"seconds": 60}}}, run_timeout={"seconds": 3600})
    artifact = RunArtifact("greeting", HELLO, 5, "text/plain", "dataset", b"hello", b'{"n": 1}')
    commands = [
        StartCommand("chain", input=b'{"n": 1.10}', labels={"who": "me"}, artifacts=(artifact,)),
        StartCommand("timed", idempotency_key="k", traceparent="00-t", tracestate="s"),
        StartCommand("chain"),
    ]
    started = await world.starter.start_batch(commands)
    assert [each.already for each in started] == [False, False, False]
    ids = [each.run_id for each in started]
    assert len(set(ids)) == 3
    assert [await world.starter.start(each) for each in commands[1:2]] == [Started(ids[1], already=True)]
    chain, timed, bare = [await world.run(run_id) for run_id in ids]
    assert (chain["definition"], chain["input"], chain["labels"]) == (
        "chain",
        b'{"n": 1.10}',
        '{"who": "me"}',
    )
    assert (chain["steps_total"], bare["steps_total"], timed["steps_total"]) == (2, 2, 1)
    assert (bare["input"], bare["labels"], bare["deadline"]) == (None, "{}", None)
    assert (timed["traceparent"], timed["tracestate"]) == ("00-t", "s")
    assert (timed["deadline"] - timed["created_at"]).total_seconds() == 3600
    steps = await world.raw.fetch(
        "select s.workflow_run_id::text as run, s.step_name, s.idempotency_key, r.deadline - r.available_at as time,"
        "       r.schedule_deadline - r.available_at as patience,"
        "       (select array_agg(u.step_name) from rara.step_dependency d"
        "          join rara.step_run u on u.step_run_id = d.depends_on_step_run_id"
        "         where d.step_run_id = s.step_run_id and u.workflow_run_id = s.workflow_run_id) as ups,"
        "       r.step_run_id is not null as is_ready"
        "  from rara.step_run s left join rara.ready r on r.step_run_id = s.step_run_id"
        "   and r.workflow_run_id = s.workflow_run_id"
        " order by s.step_run_id"
    )
    assert [(ids.index(row["run"]), row["step_name"], row["is_ready"], row["ups"]) for row in steps] == [
        (0, "a", True, None),
        (0, "b", False, ["a"]),
        (1, "only", True, None),
        (2, "a", True, None),
        (2, "b", False, ["a"]),
    ]
    assert all(row["idempotency_key"] == f"{row['run']}/{row['step_name']}" for row in steps)
    assert [row["time"] and row["time"].total_seconds() for row in steps] == [None, None, 60, None, None]
    assert [row["patience"] and row["patience"].total_seconds() for row in steps] == [5, None, None, 5, None]
    (kept,) = await world.raw.fetch("select * from rara.run_artifact")
    assert (str(kept["workflow_run_id"]), kept["name"], kept["inline"]) == (ids[0], "greeting", b"hello")


async def test_ids_rise_in_the_order_of_the_requests(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    started = await world.starter.start_batch([StartCommand("one") for _ in range(300)])
    ids = [each.run_id for each in started]
    assert ids == sorted(ids)
    assert len(set(ids)) == 300 == await count(world, "ready")


async def test_what_is_started_already_is_told_and_the_rest_is_started(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    told: list[int] = []
    starter = RunStarter(world.database, world.definitions, on_ready=lambda: told.append(1))
    earlier = (await starter.start(StartCommand("one", idempotency_key="k1"))).run_id
    commands = [StartCommand("one", idempotency_key=f"k{n}") for n in range(3)]
    first = await starter.start_batch(commands)
    assert [each.already for each in first] == [False, True, False]
    assert first[1] == Started(earlier, already=True)
    assert len(told) == 2
    again = await starter.start_batch(commands)
    assert again == [Started(each.run_id, already=True) for each in first]
    assert len(told) == 2
    assert await count(world, "workflow_run") == 3 == await count(world, "step_run")


@pytest.mark.parametrize(
    ("bad", "code", "field"),
    [
        (StartCommand("none"), Code.DEFINITION_NOT_FOUND, None),
        (StartCommand("one", idempotency_key="used", input=b"2"), Code.IDEMPOTENCY_CONFLICT, None),
        (
            StartCommand("one", input=b'{"key": "AKIAIOSFODNN7EXAMPLE"}'),
            Code.SECRET_IN_PAYLOAD,
            "requests[2].input#/key",
        ),
        (
            StartCommand("one", artifacts=(RunArtifact("x", HELLO, 4, inline=b"hell"),)),
            Code.ARTIFACT_MISMATCH,
            "requests[2].input_artifacts[0].digest",
        ),
        (StartCommand("one", artifacts=(RunArtifact("x", HELLO, 5),)), Code.ARTIFACT_NOT_FOUND, None),
        (
            StartCommand("one", idempotency_key="good-0"),
            Code.FIELD_INVALID,
            "requests[2].idempotency_key",
        ),
    ],
    ids=["definition", "conflict", "secret", "inline", "stored", "twice"],
)
async def test_one_bad_request_starts_none_and_is_named(
    world: StoreWorld, bad: StartCommand, code: Code, field: str | None
) -> None:
    await world.define("one", {"a": {}})
    await world.starter.start(StartCommand("one", idempotency_key="used", input=b"1"))
    good = [StartCommand("one", idempotency_key=f"good-{n}") for n in range(2)]
    fault = await refusal(world, [*good, bad, StartCommand("one")])
    assert fault.code is code
    assert "requests[2]" in fault.message
    if code is not Code.FIELD_INVALID:
        assert fault.metadata["index"] == "2"
    assert [each.field for each in fault.fields] == ([field] if field else [])
    assert await count(world, "workflow_run") == await count(world, "start_key") == 1


async def test_too_many_steps_together_are_refused(world: StoreWorld) -> None:
    await world.define("wide", {f"s{n}": {} for n in range(1001)})
    fault = await refusal(world, [StartCommand("wide")] * 10)
    assert (fault.code, fault.message) == (
        Code.FIELD_INVALID,
        "requests: have more than 10000 steps together",
    )
    assert await count(world, "workflow_run") == 0
    assert len(await world.starter.start_batch([StartCommand("wide")] * 9)) == 9


async def test_batches_with_the_same_keys_in_opposite_orders_start_each_run_once(world: StoreWorld) -> None:
    """Whoever waits for a key holds only keys that come before it: nobody waits for each other."""
    await world.define("one", {"a": {}})
    before = await world.raw.fetchval(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    for turn in range(5):
        up = [StartCommand("one", idempotency_key=f"{turn}/{n:02}") for n in range(40)]
        found = await asyncio.gather(
            *(world.starter.start_batch(batch) for batch in (up, up[::-1], up[10:30], up[::-1][5:25]))
        )
        by_key: dict[str | None, set[str]] = {}
        for batch, started in zip((up, up[::-1], up[10:30], up[::-1][5:25]), found, strict=True):
            for command, each in zip(batch, started, strict=True):
                by_key.setdefault(command.idempotency_key, set()).add(each.run_id)
        assert {len(ids) for ids in by_key.values()} == {1}
        assert sum(not each.already for started in found for each in started) == 40
    assert await count(world, "workflow_run") == 200 == await count(world, "ready")
    await asyncio.sleep(1.1)  # counters arrive late
    assert before == await world.raw.fetchval(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )


async def test_stored_blobs_of_a_batch_are_held_and_checked_together(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.raw.execute("insert into rara.blob (sha256, size_bytes) values ($1, 5)", HELLO)
    held = [StartCommand("one", artifacts=(RunArtifact("x", HELLO, 5),)) for _ in range(3)]
    assert len(await world.starter.start_batch(held)) == 3
    wrong = StartCommand("one", artifacts=(RunArtifact("x", HELLO, 6),))
    fault = await refusal(world, [*held, wrong])
    assert (fault.code, fault.metadata["index"]) == (Code.ARTIFACT_MISMATCH, "3")
    assert await count(world, "run_artifact") == 3 == await count(world, "workflow_run")
