"""Starting runs: all of a run in one transaction, once per key, and what is refused leaves nothing behind."""

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.start_command import RunArtifact, StartCommand
from rara_scheduler.store.definitions import Registered
from rara_scheduler.store.reads import Reads
from rara_scheduler.store.start import RunStarter, Started
from support.store_world import StoreWorld, store_world

HELLO = hashlib.sha256(b"hello").hexdigest()
DIAMOND: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"depends_on": ["a"]},
    "c": {"depends_on": ["a"]},
    "d": {"depends_on": ["b", "c"]},
}


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def count(world: StoreWorld, table: str) -> int:
    return int(await world.raw.fetchval(f"select count(*) from rara.{table}"))


async def nothing_was_stored(world: StoreWorld) -> bool:
    tables = ("workflow_run", "step_run", "step_dependency", "ready", "run_artifact", "start_key")
    return not any([await count(world, table) for table in tables])


async def refusal(world: StoreWorld, command: StartCommand) -> Fault:
    with pytest.raises(Fault) as caught:
        await world.starter.start(command)
    return caught.value


async def test_a_start_stores_run_steps_edges_and_what_is_ready(world: StoreWorld) -> None:
    await world.define("diamond", DIAMOND, labels={"team": "x"})
    started = await world.starter.start(
        StartCommand(
            "diamond", input=b'{"n": 1.10}', labels={"who": "me"}, traceparent="00-t", tracestate="s"
        )
    )
    assert not started.already
    run_id = started.run_id
    reads = Reads(world.database, world.definitions, silent_after_s=10.0)
    assert started.view == await reads.get_run(run_id)  # it is told without being read
    run = await world.run(run_id)
    assert (run["definition"], run["definition_version"], run["state"]) == ("diamond", 1, "pending")
    assert (run["steps_total"], run["steps_succeeded"], run["revision"]) == (4, 0, 1)
    assert (run["input"], run["labels"], run["on_failure"]) == (b'{"n": 1.10}', '{"who": "me"}', "fail_fast")
    assert (run["traceparent"], run["tracestate"], run["deadline"]) == ("00-t", "s", None)
    steps = await world.raw.fetch("select * from rara.step_run order by step_run_id")
    assert [step["step_name"] for step in steps] == ["a", "b", "c", "d"]
    assert [step["idempotency_key"] for step in steps] == [f"{run_id}/{name}" for name in "abcd"]
    names = {step["step_run_id"]: step["step_name"] for step in steps}
    edges = await world.raw.fetch("select * from rara.step_dependency")
    assert {(names[e["step_run_id"]], names[e["depends_on_step_run_id"]]) for e in edges} == {
        ("b", "a"),
        ("c", "a"),
        ("d", "b"),
        ("d", "c"),
    }
    (ready,) = await world.raw.fetch("select * from rara.ready")
    assert names[ready["step_run_id"]] == "a"
    assert ready["available_at"] == ready["released_at"] == run["created_at"]
    assert (ready["attempt"], ready["failures"], ready["deadline"], ready["schedule_deadline"]) == (
        0,
        0,
        None,
        None,
    )


async def test_ids_are_version_7_and_rise_with_time_and_in_the_definitions_order(world: StoreWorld) -> None:
    await world.define("wide", {f"s{n:03}": {} for n in range(100)})
    run_ids = [await world.start("wide") for _ in range(3)]
    assert run_ids == sorted(run_ids)
    assert {uuid.UUID(run_id).version for run_id in run_ids} == {7}
    rows = await world.raw.fetch(
        "select step_name from rara.step_run where workflow_run_id = $1::uuid order by step_run_id",
        run_ids[0],
    )
    assert [row["step_name"] for row in rows] == [f"s{n:03}" for n in range(100)]


async def test_deadlines_count_from_the_start_by_the_databases_clock(world: StoreWorld) -> None:
    step = {"timeout": {"seconds": 60}, "schedule_timeout": {"seconds": 5}}
    await world.define("timed", {"a": step, "b": step | {"depends_on": ["a"]}}, run_timeout={"seconds": 3600})
    run_id = await world.start("timed")
    run = await world.run(run_id)
    assert run["deadline"] - run["created_at"] == timedelta(hours=1)
    (ready,) = await world.raw.fetch("select * from rara.ready")
    assert ready["deadline"] - run["created_at"] == timedelta(seconds=60)
    assert ready["schedule_deadline"] - run["created_at"] == timedelta(seconds=5)
    waits = await world.raw.fetch("select schedule_timeout from rara.step_run")
    assert [row["schedule_timeout"] for row in waits] == [timedelta(seconds=5)] * 2
    shorter = await world.run(await world.start("timed", run_timeout_s=0.5))
    assert shorter["deadline"] - shorter["created_at"] == timedelta(seconds=0.5)


async def test_version_0_takes_the_newest_and_a_number_takes_that_one(world: StoreWorld) -> None:
    await world.define("d", {"a": {}})
    await world.define("d", {"a": {}, "b": {}})
    assert (await world.run(await world.start("d")))["definition_version"] == 2
    assert (await world.run(await world.start("d", version=1)))["definition_version"] == 1
    fault = await refusal(world, StartCommand("d", version=3))
    assert fault.code is Code.DEFINITION_NOT_FOUND


@pytest.mark.parametrize("key", [None, "k"])
async def test_version_0_takes_one_that_became_the_newest_since_the_last_start(
    world: StoreWorld, key: str | None
) -> None:
    await world.define("d", {"a": {}})
    assert (await world.run(await world.start("d")))["definition_version"] == 1
    await world.define("d", {"a": {}, "b": {}}, labels={"rara.allow_secrets": "true"})
    run_id = await world.start("d", idempotency_key=key, input=b'{"password": "only version 2 takes it"}')
    assert (await world.run(run_id))["definition_version"] == 2
    assert len(await world.steps(run_id)) == 2
    assert await count(world, "workflow_run") == 2


async def test_a_used_key_is_a_conflict_also_after_a_newer_version(
    world: StoreWorld,
) -> None:
    await world.define("d", {"a": {}})
    first = await world.start("d", idempotency_key="k")
    await world.define("d", {"a": {}, "b": {}})
    with pytest.raises(Fault) as caught:
        await world.start("d", idempotency_key="k", input=b"1")
    assert caught.value.code is Code.IDEMPOTENCY_CONFLICT
    assert caught.value.metadata == {"workflow_run_id": first}
    assert await count(world, "workflow_run") == 1


async def test_a_known_version_is_started_without_a_look_first(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.define("d", {"a": {}})
    await world.start("d")

    async def load(definition: str, version: int = 0) -> Registered:
        raise AssertionError(f"{definition} {version} was looked up")

    monkeypatch.setattr(world.definitions, "load", load)
    assert (await world.run(await world.start("d")))["definition_version"] == 1


async def test_the_dispatcher_is_told_after_the_commit_and_only_of_new_runs(world: StoreWorld) -> None:
    seen: list[int] = []
    starter = RunStarter(world.database, world.definitions, on_ready=lambda: seen.append(1))
    await world.define("d", {"a": {}})
    await starter.start(StartCommand("d", idempotency_key="k"))
    await starter.start(StartCommand("d", idempotency_key="k"))
    with pytest.raises(Fault):
        await starter.start(StartCommand("none"))
    assert seen == [1]


# ---------------------------------------------------------------- idempotency


async def test_fifty_clients_with_one_key_and_content_start_one_run(world: StoreWorld) -> None:
    await world.define("d", DIAMOND)
    spellings = [
        b'{"a": 1, "b": [2.50, "x"]}',
        b'{"b":[2.50,"x"],"a":1}',
        b'{ "b" : [2.50, "\\u0078"],\n"a":1 }',
    ]
    answers = await asyncio.gather(
        *(
            world.starter.start(StartCommand("d", input=spellings[n % 3], idempotency_key="one"))
            for n in range(50)
        )
    )
    assert len({each.run_id for each in answers}) == 1
    assert sum(not each.already for each in answers) == 1
    assert (await count(world, "workflow_run"), await count(world, "step_run")) == (1, 4)
    assert (await count(world, "ready"), await count(world, "start_key")) == (1, 1)


async def test_a_repeat_gets_its_run_also_after_a_newer_version_and_with_another_trace(
    world: StoreWorld,
) -> None:
    await world.define("d", {"a": {}})
    run_id = await world.start("d", idempotency_key="k", traceparent="one")
    await world.define("d", {"a": {}, "b": {}})
    again = await world.starter.start(StartCommand("d", idempotency_key="k", traceparent="two"))
    assert again == Started(run_id, already=True)


OTHER_CONTENT: list[dict[str, Any]] = [
    {"input": b'{"n": 2}'},
    {"input": b'{"n": 1.0}'},
    {"input": None},
    {"labels": {"a": "b"}},
    {"run_timeout_s": 5.0},
    {"version": 1},
    {"definition": "e"},
    {"artifacts": (RunArtifact("x", HELLO, 5, inline=b"hello"),)},
]


async def test_other_content_under_a_used_key_is_a_conflict_that_names_the_run(world: StoreWorld) -> None:
    for name in ("d", "e"):
        await world.define(name, {"a": {}})
    fields: dict[str, Any] = {"definition": "d", "input": b'{"n": 1}', "idempotency_key": "k"}
    run_id = (await world.starter.start(StartCommand(**fields))).run_id
    for changes in OTHER_CONTENT:
        fault = await refusal(world, StartCommand(**(fields | changes)))
        assert fault.code is Code.IDEMPOTENCY_CONFLICT
        assert fault.metadata == {"workflow_run_id": run_id}
    assert await count(world, "workflow_run") == 1
    for n, changes in enumerate(OTHER_CONTENT):
        command = StartCommand(**(fields | changes | {"idempotency_key": f"other {n}"}))
        assert (await world.starter.start(command)).already is False


async def test_without_a_key_each_call_starts_a_run(world: StoreWorld) -> None:
    await world.define("d", {"a": {}})
    assert len({await world.start("d") for _ in range(5)}) == 5
    assert await count(world, "start_key") == 0


# ---------------------------------------------------------------- secrets and artifacts


RAW_SECRETS: list[tuple[dict[str, Any], str]] = [
    ({"input": b'{"db": {"password": "hunter2-hush"}}'}, "input#/db/password"),
    ({"input": b'["https://u:hunter2-hush@host/"]'}, "input#/0"),
    ({"labels": {"token": "hunter2-hush"}}, "labels#/token"),
    (
        {"artifacts": (RunArtifact("x", HELLO, 5, inline=b"hello", metadata=b'{"secret":"hunter2-hush"}'),)},
        "input_artifacts[0].metadata#/secret",
    ),
]


async def test_a_raw_secret_is_refused_unless_the_definition_opts_out(world: StoreWorld) -> None:
    await world.define("d", {"a": {}})
    await world.define("open", {"a": {}}, labels={"rara.allow_secrets": "true"})
    for fields, path in RAW_SECRETS:
        fault = await refusal(world, StartCommand("d", **fields))
        assert fault.code is Code.SECRET_IN_PAYLOAD
        assert [violation.field for violation in fault.fields] == [path]
        assert "hunter2-hush" not in f"{fault.message} {fault.fields}"
    assert await nothing_was_stored(world)
    for fields, _ in RAW_SECRETS:
        await world.starter.start(StartCommand("open", **fields))
    assert await count(world, "workflow_run") == len(RAW_SECRETS)


async def test_inline_artifacts_are_verified_and_stored(world: StoreWorld) -> None:
    await world.define("d", {"a": {"input_artifacts": [{"name": "corpus", "from_name": "raw"}]}})
    good = RunArtifact("raw", HELLO, 5, "text/plain", "dataset", inline=b"hello", metadata=b'{"n":1}')
    run_id = await world.start("d", artifacts=(good,))
    row = await world.raw.fetchrow("select * from rara.run_artifact")
    assert row is not None
    assert (str(row["workflow_run_id"]), row["name"], row["sha256"], row["size_bytes"]) == (
        run_id,
        "raw",
        HELLO,
        5,
    )
    assert (row["media_type"], row["type"], row["inline"], row["metadata"]) == (
        "text/plain", "dataset", b"hello", b'{"n":1}',
    )  # fmt: skip


BAD_ARTIFACTS: list[tuple[RunArtifact, Code, str | None]] = [
    (RunArtifact("raw", HELLO, 5, inline=b"hellO"), Code.ARTIFACT_MISMATCH, "input_artifacts[0].digest"),
    (RunArtifact("raw", HELLO, 6, inline=b"hello"), Code.ARTIFACT_MISMATCH, "input_artifacts[0].digest"),
    (
        RunArtifact("raw", hashlib.sha256(b"x" * 16385).hexdigest(), 16385, inline=b"x" * 16385),
        Code.PAYLOAD_TOO_LARGE,
        "input_artifacts[0].inline",
    ),
    (RunArtifact("other", HELLO, 5, inline=b"hello"), Code.FIELD_INVALID, "input_artifacts"),
    (RunArtifact("raw", HELLO, 5), Code.ARTIFACT_NOT_FOUND, None),
]


async def test_artifacts_that_do_not_fit_are_refused_and_leave_nothing(world: StoreWorld) -> None:
    await world.define("d", {"a": {"input_artifacts": [{"name": "corpus", "from_name": "raw"}]}})
    for artifact, code, field in BAD_ARTIFACTS:
        fault = await refusal(world, StartCommand("d", artifacts=(artifact,), idempotency_key="k"))
        assert fault.code is code
        assert [violation.field for violation in fault.fields] == ([] if field is None else [field])
        assert await nothing_was_stored(world)
    limit = RunArtifact("raw", hashlib.sha256(b"x" * 16384).hexdigest(), 16384, inline=b"x" * 16384)
    await world.starter.start(StartCommand("d", artifacts=(limit,), idempotency_key="k"))


async def test_stored_artifacts_must_be_there_whole_and_unmarked(world: StoreWorld) -> None:
    await world.define("d", {"a": {}})
    artifact = RunArtifact("raw", HELLO, 5)
    await world.raw.execute(
        "insert into rara.blob (sha256, size_bytes, marked_at) values ($1, 5, now())", HELLO
    )
    fault = await refusal(world, StartCommand("d", artifacts=(artifact,)))
    assert (fault.code, fault.metadata) == (Code.ARTIFACT_NOT_FOUND, {"name": "raw", "sha256": HELLO})
    await world.raw.execute("update rara.blob set marked_at = null")
    fault = await refusal(world, StartCommand("d", artifacts=(RunArtifact("raw", HELLO, 6),)))
    assert fault.code is Code.ARTIFACT_MISMATCH
    assert await nothing_was_stored(world)
    await world.start("d", artifacts=(artifact,))
    assert await count(world, "run_artifact") == 1


async def test_a_start_waits_for_a_mark_that_has_not_committed_and_then_sees_it(
    world: StoreWorld, database_url: str
) -> None:
    await world.define("d", {"a": {}})
    await world.raw.execute("insert into rara.blob (sha256, size_bytes) values ($1, 5)", HELLO)
    collector = await asyncpg.connect(database_url)
    try:
        async with collector.transaction():
            await collector.execute("update rara.blob set marked_at = now()")
            start = asyncio.create_task(
                world.starter.start(StartCommand("d", artifacts=(RunArtifact("x", HELLO, 5),)))
            )
            async with asyncio.timeout(10):
                while not await world.raw.fetchval("select exists (select from pg_locks where not granted)"):
                    await asyncio.sleep(0.01)
            assert not start.done()
        with pytest.raises(Fault) as caught:
            await start
    finally:
        await collector.close()
    assert caught.value.code is Code.ARTIFACT_NOT_FOUND
    assert await nothing_was_stored(world)


async def test_ten_thousand_steps_start_in_one_transaction(world: StoreWorld) -> None:
    await world.define("big", {f"s{n}": {"depends_on": [f"s{n - 1}"] if n else []} for n in range(10_000)})
    run_id = await world.start("big")
    assert (await world.run(run_id))["steps_total"] == 10_000
    assert (await count(world, "step_run"), await count(world, "step_dependency")) == (10_000, 9_999)
    assert await count(world, "ready") == 1
