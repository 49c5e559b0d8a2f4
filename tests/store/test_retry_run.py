"""Retrying closed runs: what is reused, what goes on, what begins anew, and one live retry at a time."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.start_command import RunArtifact, StartCommand
from rara_scheduler.store.retry_run import RunRetrier
from support.store_world import StoreWorld, accepted, failed, new_id, running, store_world

CHAIN: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {"depends_on": ["a"]},
    "c": {"depends_on": ["b"]},
    "side": {"depends_on": ["a"]},
}


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


def retrier(world: StoreWorld, told: list[int] | None = None) -> RunRetrier:
    return RunRetrier(
        world.database, world.definitions, on_ready=lambda: None if told is None else told.append(1)
    )


async def play(world: StoreWorld, *failing: str) -> None:
    """Run everything that is leasable to its end; steps named fail for good."""
    while grants := await world.lease():
        for grant in grants:
            if grant.step_name in failing:
                await world.report(grant, accepted(1), running(2), failed(3, "BAD_DATA", retryable=False))
            else:
                await world.run_to_success(grant, f'{{"by":"{grant.step_name}"}}'.encode())


async def failed_run(world: StoreWorld, *failing: str, **fields: Any) -> str:
    await world.define("chain", CHAIN, on_failure="ON_FAILURE_CONTINUE", run_timeout={"seconds": 600})
    run_id = await world.start("chain", **fields)
    await play(world, *failing)
    assert await world.run_state(run_id) == "failed"
    return run_id


async def own_steps(world: StoreWorld, run_id: str) -> dict[str, asyncpg.Record]:
    rows = await world.raw.fetch("select * from rara.step_run where workflow_run_id = $1::uuid", run_id)
    return {row["step_name"]: row for row in rows}


async def reused(world: StoreWorld, run_id: str) -> set[str]:
    rows = await world.raw.fetch(
        "select s.step_name from rara.reused_step u join rara.step_run s using (step_run_id)"
        " where u.workflow_run_id = $1::uuid",
        run_id,
    )
    return {row["step_name"] for row in rows}


async def test_what_succeeded_is_reused_and_what_did_not_goes_on_under_its_key(world: StoreWorld) -> None:
    told: list[int] = []
    source = await failed_run(world, "b", input=b'{"n":1}', labels={"who": "me"})
    before = await own_steps(world, source)
    retry, already = await retrier(world, told).retry(source)
    assert (already, told) == (False, [1])
    run = await world.run(retry)
    assert (run["state"], run["steps_total"], run["steps_succeeded"]) == ("pending", 4, 2)
    assert (str(run["retry_of_workflow_run_id"]), run["input"], run["labels"]) == (
        source,
        b'{"n":1}',
        '{"who": "me"}',
    )
    assert run["deadline"] - run["created_at"] == timedelta(seconds=600)
    assert await reused(world, retry) == {"a", "side"}
    after = await own_steps(world, retry)
    assert set(after) == {"b", "c"}
    for name, step in after.items():
        assert step["step_run_id"] != before[name]["step_run_id"]
        assert step["idempotency_key"] == before[name]["idempotency_key"] == f"{source}/{name}"
        assert step["retry_of_step_run_id"] == before[name]["step_run_id"]
    edges = await world.raw.fetch(
        "select * from rara.step_dependency where step_run_id = any($1::uuid[])",
        [step["step_run_id"] for step in after.values()],
    )
    assert {(edge["step_run_id"], edge["depends_on_step_run_id"]) for edge in edges} == {
        (after["b"]["step_run_id"], before["a"]["step_run_id"]),
        (after["c"]["step_run_id"], after["b"]["step_run_id"]),
    }
    (grant,) = await world.lease()
    assert grant.step_name == "b"
    await world.run_to_success(grant)
    await play(world)
    assert await world.run_state(retry) == "succeeded"
    assert await world.run_state(source) == "failed"


async def test_a_named_step_and_all_behind_it_begin_anew_under_new_keys(world: StoreWorld) -> None:
    source = await failed_run(world, "c")
    retry, _ = await retrier(world).retry(source, ["a"])
    steps = await own_steps(world, retry)
    assert set(steps) == {"a", "b", "c", "side"}
    assert await reused(world, retry) == set()
    keys = {name: step["idempotency_key"] for name, step in steps.items()}
    assert keys == {
        "a": f"{retry}/a",
        "b": f"{retry}/b",
        "side": f"{retry}/side",
        "c": f"{source}/c",  # had not succeeded: it goes on
    }
    goes_on = {name: step["retry_of_step_run_id"] is not None for name, step in steps.items()}
    assert goes_on == {"a": False, "b": False, "side": False, "c": True}
    await play(world)
    assert await world.run_state(retry) == "succeeded"


async def test_naming_one_branch_leaves_the_other_reused_but_reruns_what_failed(world: StoreWorld) -> None:
    source = await failed_run(world, "c")
    retry, _ = await retrier(world).retry(source, ["side"])
    assert await reused(world, retry) == {"a", "b"}
    assert set(await own_steps(world, retry)) == {"c", "side"}
    assert {grant.step_name for grant in await world.lease()} == {"c", "side"}


async def test_a_retry_of_a_retry_reuses_from_both_and_keeps_the_first_key(world: StoreWorld) -> None:
    source = await failed_run(world, "b")
    second, _ = await retrier(world).retry(source)
    await play(world, "c")
    assert await world.run_state(second) == "failed"
    third, _ = await retrier(world).retry(second)
    assert await reused(world, third) == {"a", "b", "side"}
    (step,) = (await own_steps(world, third)).values()
    assert (step["step_name"], step["idempotency_key"]) == ("c", f"{source}/c")
    assert (await world.run(third))["steps_succeeded"] == 3
    await play(world)
    assert await world.run_state(third) == "succeeded"


async def test_a_cancelled_run_can_be_retried_and_its_artifacts_go_along(world: StoreWorld) -> None:
    await world.define("chain", CHAIN)
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    source = await world.start("chain", artifacts=(RunArtifact("x", empty, 0, inline=b""),))
    await world.cancel(source)
    assert await world.run_state(source) == "cancelled"
    retry, _ = await retrier(world).retry(source)
    assert set(await own_steps(world, retry)) == set(CHAIN)
    rows = await world.raw.fetch("select workflow_run_id, name, inline from rara.run_artifact")
    assert {(str(row["workflow_run_id"]), row["name"], row["inline"]) for row in rows} == {
        (source, "x", b""),
        (retry, "x", b""),
    }


async def test_only_a_failed_or_cancelled_run_can_be_retried(world: StoreWorld) -> None:
    await world.define("chain", CHAIN)
    run_id = await world.start("chain")
    for state in ("pending", "succeeded"):
        assert await world.run_state(run_id) == state
        with pytest.raises(Fault) as caught:
            await retrier(world).retry(run_id)
        assert caught.value.code is Code.RUN_NOT_RETRYABLE
        assert caught.value.metadata == {"workflow_run_id": run_id, "state": state}
        await play(world)
    with pytest.raises(Fault) as caught:
        await retrier(world).retry(new_id())
    assert caught.value.code is Code.RUN_NOT_FOUND
    assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 1


async def test_an_unknown_step_is_refused_by_its_place(world: StoreWorld) -> None:
    source = await failed_run(world, "b")
    with pytest.raises(Fault) as caught:
        await retrier(world).retry(source, ["b", "zz"])
    assert caught.value.code is Code.FIELD_INVALID
    assert [violation.field for violation in caught.value.fields] == ["step_names[1]"]
    assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 1
    await retrier(world).retry(source, ["b", "b"])


async def test_thirty_concurrent_retries_give_one_live_run(world: StoreWorld) -> None:
    source = await failed_run(world, "b")
    both = retrier(world), retrier(world)
    answers = await asyncio.gather(
        *(both[n % 2].retry(source, idempotency_key=f"key {n}" if n % 3 else None) for n in range(30))
    )
    assert len({run_id for run_id, _ in answers}) == 1
    assert sum(not already for _, already in answers) == 1
    assert await world.raw.fetchval("select count(*) from rara.workflow_run") == 2
    # Each key remembers the run that it got, whoever started it.
    assert await world.raw.fetchval("select count(distinct workflow_run_id) from rara.start_key") == 1
    assert await world.raw.fetchval("select count(*) from rara.start_key") == 20


async def test_after_a_retry_has_ended_another_may_begin_and_a_key_still_finds_its_own(
    world: StoreWorld,
) -> None:
    source = await failed_run(world, "b")
    first, _ = await retrier(world).retry(source, idempotency_key="k")
    assert await retrier(world).retry(source) == (first, True)
    await play(world, "b")
    second, already = await retrier(world).retry(source)
    assert second != first
    assert not already
    assert await retrier(world).retry(source, idempotency_key="k") == (first, True)


async def test_thirty_concurrent_retries_with_one_key_give_one_run(world: StoreWorld) -> None:
    source = await failed_run(world, "b")
    answers = await asyncio.gather(
        *(retrier(world).retry(source, ["c"], idempotency_key="k") for _ in range(30))
    )
    assert len({run_id for run_id, _ in answers}) == 1
    assert sum(not already for _, already in answers) == 1


async def test_a_key_names_one_call_with_one_content(world: StoreWorld) -> None:
    source = await failed_run(world, "b", idempotency_key="started")
    retry, _ = await retrier(world).retry(source, ["b", "c"], idempotency_key="retried")
    assert await retrier(world).retry(source, ["c", "b", "c"], idempotency_key="retried") == (retry, True)
    for key, names in (("retried", ["b"]), ("started", [])):
        with pytest.raises(Fault) as caught:
            await retrier(world).retry(source, names, idempotency_key=key)
        assert caught.value.code is Code.IDEMPOTENCY_CONFLICT
    with pytest.raises(Fault) as caught:
        await world.starter.start(StartCommand("chain", idempotency_key="retried"))
    assert caught.value.code is Code.IDEMPOTENCY_CONFLICT
    assert caught.value.metadata == {"workflow_run_id": retry}
