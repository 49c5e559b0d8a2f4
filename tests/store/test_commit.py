"""What one transaction makes of reports about leases: states, results, history, and what follows from them."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio
from rara_scheduler.domain.attempt import Checkpoint, EventType, Guard, Report
from support.store_world import (
    LEASE_S,
    StoreWorld,
    accepted,
    cancelled,
    ending,
    failed,
    inline_artifact,
    new_id,
    progress,
    reports,
    running,
    store_world,
    stored_artifact,
    succeeded,
)


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


async def test_a_step_goes_from_pending_to_succeeded_and_closes_its_run(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    assert await world.steps(run_id) == {"a": ("pending", "")}
    grant = await world.lease_one()
    assert await world.state(grant.step_run_id) == "leased"
    assert await world.run_state(run_id) == "pending"
    await world.report(grant, accepted())
    assert await world.state(grant.step_run_id) == "leased"
    assert await world.run_state(run_id) == "running"
    await world.report(grant, running())
    assert await world.state(grant.step_run_id) == "running"
    result = await world.report(grant, progress(3), succeeded(4, b'{"n":1}'))
    assert result.decisions[grant.lease_token].last_sequence == 4
    assert result.changed_runs == {run_id}
    step = await world.step(grant.step_run_id)
    assert (step["state"], step["attempt"], step["failures"], step["output"]) == (
        "succeeded",
        1,
        0,
        b'{"n":1}',
    )
    assert await world.run_state(run_id) == "succeeded"
    assert await world.raw.fetchval("select count(*) from rara.step_event") == 4
    assert await world.raw.fetchval("select count(*) from rara.lease") == 0


async def test_success_releases_only_steps_whose_dependencies_have_all_succeeded(world: StoreWorld) -> None:
    await world.define("join", {"a": {}, "b": {}, "c": {"depends_on": ["a", "b"]}})
    run_id = await world.start("join")
    first, second = await world.lease()
    result = await world.run_to_success(first)
    assert not result.made_ready
    assert await world.lease() == []
    result = await world.run_to_success(second)
    assert result.made_ready
    (third,) = await world.lease()
    assert third.step_name == "c"
    await world.run_to_success(third)
    assert await world.run_state(run_id) == "succeeded"


async def test_two_committers_that_finish_the_last_two_steps_close_the_run_once(world: StoreWorld) -> None:
    await world.define("pair", {"a": {}, "b": {}, "c": {"depends_on": ["a", "b"]}})
    for _ in range(50):
        run_id = await world.start("pair")
        first, second = await world.lease()
        await asyncio.gather(world.run_to_success(first), world.run_to_success(second))
        (third,) = await world.lease()
        assert third.workflow_run_id == run_id
        await world.run_to_success(third)
        assert await world.run_state(run_id) == "succeeded"


async def test_a_superseded_attempt_changes_nothing(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    old = await world.lease_one()
    await world.report(old, accepted(), running())
    await world.expire(old)
    await world.say(old, ending("LEASE_EXPIRED", Guard.EXPIRED))
    await world.make_due()
    new = await world.lease_one()
    assert new.lease_token > old.lease_token
    assert new.attempt == 2
    await world.report(new, accepted(), running())
    late = await world.report(old, progress(3), succeeded(4, b'"old"'))
    assert late.decisions == {}
    assert late.late[old.lease_token].lost == (3, 4)
    assert await world.state(new.step_run_id) == "running"
    await world.report(new, succeeded(3, b'"new"'))
    assert (await world.step(new.step_run_id))["output"] == b'"new"'


async def test_another_executors_report_under_a_current_token_is_refused(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    result = await world.report(grant, accepted(), executor_id=new_id())
    assert result.late[grant.lease_token].lost == (1,)
    assert await world.raw.fetchval("select accepted_at from rara.lease") is None


async def test_a_resent_event_is_known_before_and_after_the_step_has_closed(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    again = await world.report(grant, accepted(), running())
    assert again.decisions[grant.lease_token].last_sequence == 2
    assert again.decisions[grant.lease_token].stored == []
    await world.report(grant, succeeded(3))
    late = await world.report(grant, accepted(), succeeded(3), progress(9))
    assert late.late[grant.lease_token].stored == (1, 3)
    assert late.late[grant.lease_token].lost == (9,)
    assert await world.raw.fetchval("select count(*) from rara.step_event") == 3


async def test_a_gap_is_named_once_and_never_waited_for(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(1), running(2))
    result = await world.report(grant, progress(5))
    assert result.decisions[grant.lease_token].missing == [3, 4]
    result = await world.report(grant, progress(4))
    assert result.decisions[grant.lease_token].missing == []
    assert (await world.step(grant.step_run_id))["gaps"] == 1
    await world.report(grant, succeeded(7))
    step = await world.step(grant.step_run_id)
    assert (step["state"], step["gaps"], step["last_sequence"]) == ("succeeded", 2, 7)


async def test_a_terminal_event_that_overtakes_running_is_applied_through_it(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, succeeded(3))
    step = await world.step(grant.step_run_id)
    assert step["state"] == "succeeded"
    assert step["started_at"] is not None
    assert step["accepted_at"] is not None


async def test_failures_wait_and_then_exhaust_the_budget(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    for attempt in (1, 2, 3):
        grant = await world.lease_one()
        assert grant.attempt == attempt
        await world.report(grant, accepted(), running(), failed(3))
        if attempt < 3:
            step = await world.step(grant.step_run_id)
            assert (step["state"], step["failures"]) == ("retryable_failed", attempt)
            assert await world.lease() == []
            await world.make_due()
    step = await world.step(grant.step_run_id)
    assert (step["state"], step["reason"], step["failures"]) == ("terminal_failed", "ATTEMPTS_EXHAUSTED", 3)
    assert '"HANDLER_FAILED"' in step["error"]
    run = await world.run(run_id)
    assert (run["state"], str(run["failed_step_run_id"])) == ("failed", grant.step_run_id)
    assert await world.raw.fetchval("select count(*) from rara.step_attempt") == 2


async def test_an_error_that_cannot_heal_closes_the_step_with_its_own_code(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running(), failed(3, "AUTH_INVALID", retryable=False))
    assert (await world.steps(run_id))["a"] == ("terminal_failed", "AUTH_INVALID")


@pytest.mark.parametrize("code", ["DISPATCH_LOST", "EXECUTOR_SHUTDOWN", "UNSUPPORTED_KIND", "NO_CAPACITY"])
async def test_a_lease_that_was_never_taken_up_comes_back_at_once_and_free(
    world: StoreWorld, code: str
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    first = await world.lease_one()
    await world.say(first, ending(code, Guard.NOT_RUNNING))
    step = await world.step(first.step_run_id)
    assert (step["state"], step["reason"], step["failures"]) == ("retryable_failed", code, 0)
    second = await world.lease_one()
    assert (second.attempt, second.failures) == (2, 0)


async def test_free_endings_are_capped(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    for _ in range(14):
        grant = await world.lease_one()
        await world.say(grant, ending("NO_CAPACITY"))
    assert (await world.steps(run_id))["a"] == ("terminal_failed", "ATTEMPTS_EXHAUSTED")
    assert await world.run_state(run_id) == "failed"


async def test_a_late_result_is_accepted_while_nobody_has_reclaimed(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.expire(grant)
    await world.report(grant, succeeded(3))
    assert await world.state(grant.step_run_id) == "succeeded"


async def test_a_sweep_that_read_an_old_lease_leaves_the_row_that_moved_on(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.expire(grant)
    found = await world.sweeps.reclaimable("00000000-0000-0000-0000-000000000000")
    assert [lease.lease_token for lease in found] == [grant.lease_token]
    await world.leases.renew([(grant.step_run_id, grant.lease_token, grant.executor_id)])
    await world.say(grant, ending("LEASE_EXPIRED", Guard.EXPIRED))
    assert await world.state(grant.step_run_id) == "running"
    await world.report(grant, succeeded(3))
    await world.say(grant, ending("LEASE_EXPIRED", Guard.EXPIRED))
    assert await world.state(grant.step_run_id) == "succeeded"


async def test_renewal_extends_exactly_the_leases_listed(world: StoreWorld) -> None:
    await world.define("pair", {"a": {}, "b": {}})
    await world.start("pair")
    first, second = await world.lease()
    await world.raw.execute(
        "update rara.lease set expires_at = now() + interval '1 second', granted_at = now() - interval '1 hour'"
    )
    renewed, lost, busy = await world.leases.renew(
        [
            (first.step_run_id, first.lease_token, first.executor_id),
            (second.step_run_id, 999_999, first.executor_id),
        ]
    )
    assert (set(renewed), set(lost), set(busy)) == ({first.lease_token}, {999_999}, set())
    left = {
        row["lease_token"]: row["left_s"]
        for row in await world.raw.fetch(
            "select lease_token, extract(epoch from expires_at - now())::float8 as left_s from rara.lease"
        )
    }
    assert LEASE_S - 2 < left[first.lease_token] <= LEASE_S
    assert left[second.lease_token] < 2


async def test_fail_fast_closes_what_waits_and_asks_the_rest_to_stop(world: StoreWorld) -> None:
    await world.define(
        "wide", {"a": {}, "b": {}, "c": {"depends_on": ["a"]}, "d": {}, "e": {"depends_on": ["b"]}}
    )
    run_id = await world.start("wide")
    a, b = await world.lease(2)
    await world.report(b, accepted(), running())
    result = await world.report(a, accepted(), running(), failed(3, retryable=False))
    assert [(o.lease_token, o.reason) for o in result.orders] == [(b.lease_token, "SIBLING_FAILED")]
    assert await world.steps(run_id) == {
        "a": ("terminal_failed", "HANDLER_FAILED"),
        "b": ("running", ""),
        "c": ("cancelled", "UPSTREAM_FAILED"),
        "d": ("cancelled", "SIBLING_FAILED"),
        "e": ("cancelled", "SIBLING_FAILED"),
    }
    assert await world.run_state(run_id) == "cancelling"
    await world.report(b, cancelled(3, "SIBLING_FAILED"))
    assert (await world.steps(run_id))["b"] == ("cancelled", "SIBLING_FAILED")
    run = await world.run(run_id)
    assert (run["state"], str(run["failed_step_run_id"])) == ("failed", a.step_run_id)


async def test_continue_lets_independent_branches_finish(world: StoreWorld) -> None:
    await world.define(
        "branches",
        {
            "a": {},
            "b": {"depends_on": ["a"]},
            "c": {"depends_on": ["b"]},
            "x": {},
            "y": {"depends_on": ["x"]},
        },
        on_failure="ON_FAILURE_CONTINUE",
    )
    run_id = await world.start("branches")
    a, x = await world.lease()
    await world.report(a, accepted(), running(), failed(3, retryable=False))
    assert (await world.steps(run_id))["c"] == ("cancelled", "UPSTREAM_FAILED")
    await world.run_to_success(x)
    (y,) = await world.lease()
    await world.run_to_success(y)
    assert (await world.steps(run_id))["y"] == ("succeeded", "")
    assert await world.run_state(run_id) == "failed"


async def test_cancel_closes_what_waits_at_once_and_the_rest_when_confirmed(world: StoreWorld) -> None:
    await world.define("three", {"a": {}, "b": {}, "c": {"depends_on": ["a"]}})
    run_id = await world.start("three")
    a = (await world.lease(1))[0]
    await world.report(a, accepted(), running(), failed(3))
    b = (await world.lease(1))[0]
    await world.report(b, accepted(), running())
    result = await world.cancel(run_id)
    assert [(o.lease_token, o.grace_s) for o in result.orders] == [(b.lease_token, 5.0)]
    assert await world.steps(run_id) == {
        "a": ("cancelled", "CANCELLED"),
        "b": ("running", ""),
        "c": ("cancelled", "CANCELLED"),
    }
    assert (await world.step(a.step_run_id))["attempt"] == 1
    assert await world.run_state(run_id) == "cancelling"
    assert (await world.cancel(run_id)).orders == []
    await world.report(b, failed(3))
    assert (await world.steps(run_id))["b"] == ("cancelled", "CANCELLED")
    assert await world.run_state(run_id) == "cancelled"
    assert await world.lease() == []


async def test_a_success_that_commits_before_the_cancel_is_confirmed_wins(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    await world.cancel(run_id)
    await world.report(grant, succeeded(3))
    assert await world.run_state(run_id) == "succeeded"


async def test_a_run_nobody_has_leased_is_cancelled_by_the_database_alone(world: StoreWorld) -> None:
    await world.define("chain", {"a": {}, "b": {"depends_on": ["a"]}})
    run_id = await world.start("chain")
    await world.cancel(run_id)
    assert await world.run_state(run_id) == "cancelled"
    assert set((await world.steps(run_id)).values()) == {("cancelled", "CANCELLED")}


async def test_cancel_and_completion_at_the_same_moment_leave_one_closed_run(world: StoreWorld) -> None:
    await world.define("pair", {"a": {}, "b": {"depends_on": ["a"]}})
    seen = set()
    for _ in range(40):
        run_id = await world.start("pair")
        grant = await world.lease_one()
        await world.report(grant, accepted(), running())
        await asyncio.gather(world.report(grant, succeeded(3)), world.cancel(run_id))
        run = await world.run(run_id)
        steps = await world.steps(run_id)
        assert steps["b"] == ("cancelled", "CANCELLED")
        assert run["state"] == "cancelled"
        seen.add(steps["a"])
        assert await world.lease() == []
    assert seen == {("succeeded", "")}


async def test_a_missing_blob_refuses_the_success_and_loses_nothing(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    big = inline_artifact("model", b"x" * 100)
    by_reference = type(big)(big.name, big.sha256, big.size_bytes, big.media_type, big.type)
    await world.report(grant, accepted(), running())
    result = await world.report(grant, succeeded(3, artifacts=[by_reference]))
    (refusal,) = result.decisions[grant.lease_token].refused
    assert (refusal.sequence, refusal.code, refusal.digests) == (3, "BLOBS_MISSING", ((big.sha256, 100),))
    assert await world.state(grant.step_run_id) == "running"
    await world.raw.execute("insert into rara.blob (sha256, size_bytes) values ($1, 99)", big.sha256)
    result = await world.report(grant, succeeded(3, artifacts=[by_reference]))
    assert result.decisions[grant.lease_token].refused[0].code == "ARTIFACT_MISMATCH"
    await world.raw.execute("update rara.blob set size_bytes = 100")
    await world.report(grant, succeeded(3, artifacts=[by_reference]))
    assert await world.state(grant.step_run_id) == "succeeded"
    row = await world.raw.fetchrow("select name, sha256, lease_token from rara.artifact")
    assert row is not None
    assert tuple(row) == ("model", big.sha256, grant.lease_token)


async def test_lineage_names_what_was_produced_and_what_was_handed_over(world: StoreWorld) -> None:
    await world.define(
        "flow",
        {
            "make": {},
            "use": {"input_artifacts": [{"name": "corpus", "from_step": "make", "from_name": "out"}]},
        },
    )
    await world.start("flow")
    made = inline_artifact("out", b"data")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running(), succeeded(3, artifacts=[made]))
    user = await world.lease_one()
    await world.report(user, accepted(), running(), succeeded(3, artifacts=[inline_artifact("index", b"i")]))
    rows = await world.raw.fetch(
        "select step_run_id::text, produced, declared, name, sha256 from rara.lineage order by step_run_id, produced"
    )
    assert [tuple(row)[:4] for row in rows] == [
        (grant.step_run_id, True, True, "out"),
        (user.step_run_id, False, True, "corpus"),
        (user.step_run_id, True, True, "index"),
    ]
    assert rows[1]["sha256"] == made.sha256


async def test_checkpoint_and_effects_reach_the_next_attempt(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    effect = Report(4, EventType.EFFECT, b"e", effect=("paid", b'"42"'))
    await world.report(
        grant, accepted(), running(), progress(3, b'{"at":1}'), effect, progress(5, b'{"at":2}')
    )
    await world.report(grant, failed(6))
    await world.make_due()
    again = await world.lease_one()
    spec = (await world.definitions.spec("one", 1)).steps["a"]
    materials = await world.leases.materials([(again, spec)])
    assert materials.checkpoints == {again.idempotency_key: Checkpoint(b'{"at":2}')}
    assert materials.effects == {again.idempotency_key: [("paid", b'"42"')]}


async def test_a_checkpoint_is_stored_once_its_blobs_are_there(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    grant = await world.lease_one()
    weights = stored_artifact("weights", b"x" * 100)
    saved = progress(3, b'{"epoch":1}', [weights])
    await world.report(grant, accepted(), running())
    (refusal,) = (await world.report(grant, saved)).decisions[grant.lease_token].refused
    assert (refusal.sequence, refusal.code, refusal.digests) == (3, "BLOBS_MISSING", ((weights.sha256, 100),))
    assert await world.raw.fetchval("select count(*) from rara.checkpoint") == 0
    await world.put_blobs(weights)
    assert (await world.report(grant, saved)).decisions[grant.lease_token].refused == []
    await world.report(grant, failed(4))
    await world.make_due()
    again = await world.lease_one()
    assert await world.checkpoint(again) == Checkpoint(b'{"epoch":1}', (weights,))


async def test_a_newer_checkpoint_replaces_the_artifacts_and_an_older_one_changes_nothing(
    world: StoreWorld,
) -> None:
    await world.define("one", {"a": {}})
    await world.start("one")
    first = await world.lease_one()
    one, two, three = (stored_artifact("weights", data) for data in (b"1", b"22", b"333"))
    other = stored_artifact("log", b"what was said")
    await world.put_blobs(one, two, three, other)
    await world.report(
        first, accepted(), running(), progress(3, b"1", [one, other]), progress(6, b"3", [two])
    )
    await world.report(first, progress(5, b"2", [three, other]))  # it was under way for longer
    assert await world.checkpoint(first) == Checkpoint(b"3", (two,))
    await world.report(first, failed(7))
    await world.make_due()
    second = await world.lease_one()
    assert await world.checkpoint(second) == Checkpoint(b"3", (two,))
    await world.report(second, accepted(), running(), progress(3, b"4", [three]))
    await world.report(first, progress(8, b"9", [one]))  # superseded: refused, and nothing changes
    assert await world.checkpoint(second) == Checkpoint(b"4", (three,))
    await world.report(second, progress(4, b"5"))  # goes on without artifacts
    assert await world.checkpoint(second) == Checkpoint(b"5")
    assert await world.raw.fetchval("select count(*) from rara.checkpoint_artifact") == 0


async def test_data_that_the_database_refuses_fails_its_own_job_alone(world: StoreWorld) -> None:
    await world.define("wide", {f"s{i}": {} for i in range(8)}, on_failure="ON_FAILURE_CONTINUE")
    run_id = await world.start("wide")
    grants = await world.lease()
    await world.raw.execute(
        """create function poison() returns trigger language plpgsql as $$
           begin if new.body = 'poison'::bytea then raise exception 'no' using errcode = '22000'; end if;
           return new; end $$;
           create trigger poison before insert on rara.step_event for each row execute function poison()"""
    )
    batch = []
    for index, grant in enumerate(grants):
        last = succeeded(3)
        if index == 3:
            last = type(last)(3, last.type, b"poison", outcome=last.outcome)
        batch.append(reports(grant, accepted(), running(), last, executor_id=grant.executor_id))
    result = await world.commits.commit(batch)
    steps = await world.steps(run_id)
    assert steps.pop(grants[3].step_name) == ("terminal_failed", "PAYLOAD_INVALID")
    assert set(steps.values()) == {("succeeded", "")}
    assert len(result.decisions) == 8


@pytest.mark.parametrize(
    "statement",
    [
        "update rara.result set state = 'cancelled', reason = 'CANCELLED'",
        "delete from rara.result",
        "update rara.workflow_run set state = 'running', ended_at = null",
        "update rara.step_run set step_name = 'x'",
        "delete from rara.step_run",
        "delete from rara.workflow_run",
        "update rara.step_event set body = ''",
        "insert into rara.result select * from rara.result",
    ],
)
async def test_the_database_refuses_to_leave_a_terminal_state(world: StoreWorld, statement: str) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    await world.run_to_success(await world.lease_one())
    with pytest.raises(asyncpg.IntegrityConstraintViolationError):
        await world.raw.execute(statement)
    assert await world.run_state(run_id) == "succeeded"
    assert await world.steps(run_id) == {"a": ("succeeded", "")}


async def test_the_runs_deadline_ends_leased_steps_as_failed_and_waiting_ones_as_cancelled(
    world: StoreWorld,
) -> None:
    await world.define("two", {"a": {}, "b": {}})
    run_id = await world.start("two", run_timeout_s=60.0)
    a = (await world.lease(1))[0]
    await world.report(a, accepted(), running())
    await world.raw.execute("update rara.workflow_run set deadline = now() - interval '1 second'")
    assert [run.workflow_run_id for run in await world.sweeps.overdue_runs()] == [run_id]
    await world.cancels.cancel_run(run_id, reason="DEADLINE_EXCEEDED", message="", grace_s=None)
    assert await world.sweeps.overdue_runs() == []
    assert (await world.steps(run_id))["b"] == ("cancelled", "DEADLINE_EXCEEDED")
    await world.report(a, cancelled(3, "DEADLINE_EXCEEDED"))
    assert (await world.steps(run_id))["a"] == ("terminal_failed", "DEADLINE_EXCEEDED")
    assert await world.run_state(run_id) == "failed"


async def test_a_waiting_step_past_its_deadline_is_closed_without_dispatch(world: StoreWorld) -> None:
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    await world.raw.execute("update rara.ready set deadline = now() - interval '1 second'")
    assert await world.lease() == []
    assert (await world.sweeps.look_around()).ready_overdue
    overdue = await world.sweeps.overdue_steps("00000000-0000-0000-0000-000000000000")
    await world.cancels.close_overdue(overdue)
    assert await world.steps(run_id) == {"a": ("cancelled", "DEADLINE_EXCEEDED")}
    run = await world.run(run_id)
    assert run["state"] == "failed"


async def test_attempt_timeout_spends_the_budget_and_ends_the_attempt_only(world: StoreWorld) -> None:
    await world.define("one", {"a": {"attempt_timeout": {"seconds": 10}}})
    run_id = await world.start("one")
    grant = await world.lease_one()
    await world.report(grant, accepted(), running())
    assert await world.sweeps.overdue_leases() == []
    await world.raw.execute("update rara.lease set attempt_deadline = now() - interval '1 second'")
    (late,) = await world.sweeps.overdue_leases()
    (order,) = await world.sweeps.mark_leases([(late, 3.0)])
    assert (order.reason, order.grace_s) == ("ATTEMPT_TIMEOUT", 3.0)
    await world.report(grant, cancelled(3, "ATTEMPT_TIMEOUT"))
    step = await world.step(grant.step_run_id)
    assert (step["state"], step["reason"], step["failures"]) == ("retryable_failed", "ATTEMPT_TIMEOUT", 1)
    assert await world.run_state(run_id) == "running"


async def test_a_retry_beside_the_failure_that_cancels_the_run_is_cancelled_too(world: StoreWorld) -> None:
    await world.define(
        "two", {"a": {"retry": {"max_attempts": 1}}, "b": {}, "c": {}, "d": {"depends_on": ["b"]}}
    )
    run_id = await world.start("two")
    grants = {grant.step_name: grant for grant in await world.lease()}
    for grant in grants.values():
        await world.report(grant, accepted(), running())
    endings = {"a": failed(3), "b": failed(3), "c": cancelled(3, "EXECUTOR_SHUTDOWN")}
    await world.commits.commit(
        [reports(grants[name], item, executor_id=grants[name].executor_id) for name, item in endings.items()]
    )
    assert await world.steps(run_id) == {
        "a": ("terminal_failed", "ATTEMPTS_EXHAUSTED"),
        "b": ("cancelled", "SIBLING_FAILED"),
        "c": ("cancelled", "SIBLING_FAILED"),
        "d": ("cancelled", "SIBLING_FAILED"),
    }
    assert await world.run_state(run_id) == "failed"
    assert (await world.step(grants["b"].step_run_id))["failures"] == 0


async def test_rows_that_contradict_each_other_hold_up_no_neighbour(database_url: str) -> None:
    """As a bug would leave them: a step that has ended is leased once more, and closes a run that is closed."""
    async with store_world(database_url, check_history=False) as world:
        await world.define("one", {"a": {}})
        ended, other = await world.start("one"), await world.start("one")
        kept = await world.raw.fetchrow("select * from rara.ready where workflow_run_id = $1::uuid", ended)
        assert kept is not None
        grants = {grant.workflow_run_id: grant for grant in await world.lease(2)}
        await world.run_to_success(grants[ended])
        columns = ", ".join(kept.keys())
        places = ", ".join(f"${n}" for n in range(1, len(kept) + 1))
        await world.raw.execute(f"insert into rara.ready ({columns}) values ({places})", *kept.values())
        poison = await world.lease_one()
        result = await world.commit(
            [
                reports(g, accepted(), running(), succeeded(3), executor_id=g.executor_id)
                for g in (poison, grants[other])
            ]
        )
        assert result.late[poison.lease_token].lost == (1, 2, 3)
        assert result.decisions[grants[other].lease_token].last_sequence == 3
        assert (await world.run_state(ended), await world.run_state(other)) == ("succeeded", "succeeded")
