"""A backoff stays between nothing and its cap, however often a step has failed; what is stored is what was computed."""

import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest
import pytest_asyncio
from hypothesis import example, given
from hypothesis import strategies as st
from rara_scheduler.domain.definition import DefinitionSpec
from rara_scheduler.domain.errors import Code, StepError
from rara_scheduler.domain.retry import Ending, RetryPolicy, backoff_s, judge
from rara_scheduler.store.commit import CommitStore
from rara_scheduler.store.definitions import DefinitionStore
from support.store_world import (
    ACCEPT_S,
    GRACE_S,
    LEASE_S,
    StoreWorld,
    accepted,
    failed,
    reports,
    running,
    store_world,
)

POLICY = RetryPolicy(max_attempts=100_000, initial_backoff_s=2.0, max_backoff_s=600.0, backoff_multiplier=5.0)
FAILURES = (1, 16, 31, 64, 1000)
SPREAD = (*range(1, 70), 127, 128, 255, 256, 511, 512, 999, *range(1000, 10_001, 500))


class Patient:
    """Specs whose steps have a budget beyond what a definition may ask for."""

    def __init__(self, definitions: DefinitionStore) -> None:
        self._definitions = definitions

    async def spec(self, definition: str, version: int) -> DefinitionSpec:
        spec = await self._definitions.spec(definition, version)
        steps = {name: dataclasses.replace(step, retry=POLICY) for name, step in spec.steps.items()}
        return dataclasses.replace(spec, steps=steps)

    def cached(self, definition: str, version: int) -> DefinitionSpec | None:
        return None


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def fail_at(
    world: StoreWorld, failures: tuple[int, ...], jitter: Callable[[], float] = random.random
) -> list[tuple[int, timedelta]]:
    """A step fails for each count of failures, all in one commit: the count stored, and the wait stored with it."""
    commits = CommitStore(
        world.database,
        Patient(world.definitions),
        lease_s=LEASE_S,
        accept_timeout_s=ACCEPT_S,
        cancel_grace_s=GRACE_S,
        jitter=jitter,
    )
    await world.define("wide", {f"s{number}": {} for number in range(len(failures))})
    await world.start("wide")
    grants = await world.lease(len(failures))
    assert len(grants) == len(failures)
    for grant, count in zip(grants, failures, strict=True):
        await world.raw.execute(
            "update rara.lease set attempt = $2, failures = $3 where lease_token = $1",
            grant.lease_token,
            count + 1,
            count - 1,  # this failure is the one that counts up to it
        )
    result = await commits.commit(
        [reports(g, accepted(), running(), failed(3), executor_id=g.executor_id) for g in grants]
    )
    assert not any(decision.refused for decision in result.decisions.values())
    assert {await world.state(grant.step_run_id) for grant in grants} == {"retryable_failed"}
    rows = await world.raw.fetch(
        "select w.failures, w.available_at - a.ended_at as wait from rara.waiting w"
        " join rara.step_attempt a using (step_run_id, attempt) order by w.failures"
    )
    return [(row["failures"], row["wait"]) for row in rows]


@pytest.mark.case("RETRY-2")
async def test_however_many_failures_the_next_attempt_is_within_the_cap(world: StoreWorld) -> None:
    waits = await fail_at(world, FAILURES)
    assert [failures for failures, _ in waits] == list(FAILURES)
    assert all(timedelta(0) <= wait <= timedelta(seconds=600) for _, wait in waits)
    assert waits[0][1] <= timedelta(seconds=2)


@pytest.mark.case("RETRY-2")
@pytest.mark.parametrize("jitter", [0.0, 0.5, 0.999_999])
async def test_what_is_stored_is_what_was_computed_up_to_ten_thousand_failures(
    world: StoreWorld, jitter: float
) -> None:
    waits = await fail_at(world, SPREAD, lambda: jitter)
    assert [failures for failures, _ in waits] == list(SPREAD)
    for failures, wait in waits:
        expected_s = backoff_s(POLICY, failures=failures, jitter=jitter)
        assert wait.total_seconds() == pytest.approx(expected_s, abs=2e-6)
    ceilings = await world.raw.fetch(
        "select n, least(600, 2 * power(5::numeric, least(n - 1, 64))) as ceiling from unnest($1::int[]) n",
        list(SPREAD),
    )
    for row in ceilings:  # exact arithmetic comes to the same
        assert backoff_s(POLICY, failures=row["n"], jitter=1.0) == float(row["ceiling"])


@pytest.mark.case("RETRY-2")
@given(
    failures=st.integers(1, 10_000),
    multiplier=st.floats(1, 1e6),
    initial_s=st.floats(0, 1e9),
    cap_s=st.floats(0, 1e9),
    jitter=st.floats(0, 1, exclude_max=True),
)
@example(failures=10_000, multiplier=1e6, initial_s=1e9, cap_s=1e9, jitter=0.999)
@example(failures=10_000, multiplier=1.0000001, initial_s=5e-324, cap_s=1e9, jitter=0.999)
def test_no_count_and_no_policy_takes_a_retry_beyond_its_cap(
    failures: int, multiplier: float, initial_s: float, cap_s: float, jitter: float
) -> None:
    policy = RetryPolicy(
        max_attempts=20_000,
        initial_backoff_s=initial_s,
        max_backoff_s=cap_s,
        backoff_multiplier=multiplier,
    )
    verdict = judge(
        StepError(Code.HANDLER_FAILED, retryable=True),
        policy,
        failures=failures - 1,
        free_endings=0,
        cancel_reason=None,
        jitter=jitter,
    )
    assert (verdict.ending, verdict.failures) == (Ending.BACKOFF, failures)
    assert 0 <= verdict.delay_s <= cap_s
    timedelta(seconds=verdict.delay_s)  # still a duration


@pytest.mark.case("RETRY-2")
async def test_an_error_that_asks_for_ten_thousand_years_does_not_lose_the_job(world: StoreWorld) -> None:
    """The other way in which a wait can overflow; the edge clamps it, and the store does not depend on that."""
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    report = failed(3)
    error = StepError(Code.RATE_LIMITED, "later", retry_after_s=3.2e11)
    await world.report(grant, accepted(), running(), dataclasses.replace(report, error=error))
    assert await world.state(grant.step_run_id) in {"retryable_failed", "terminal_failed"}
    assert await world.raw.fetchval("select count(*) from rara.lease") == 0
