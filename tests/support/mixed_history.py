"""A history with a bit of everything: successes, retries, reclaims, refusals, failures, cancels, a retried run, and
runs that are still open in every way.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from rara_scheduler.domain.attempt import ArtifactFacts, EventType, Guard, Item, Report
from rara_scheduler.store.leases import Grant
from rara_scheduler.store.retry_run import RunRetrier
from support.store_world import (
    NIL,
    StoreWorld,
    accepted,
    ending,
    failed,
    inline_artifact,
    progress,
    reports,
    running,
    stored_artifact,
    succeeded,
)

BIG = b"the bytes of a blob"
PART = b"what a handler had in memory"


@dataclass(slots=True)
class MixedHistory:
    """ids: of runs by name, and of steps by `run.step`."""

    world: StoreWorld
    ids: dict[str, str] = field(default_factory=dict)

    async def start(self, name: str, definition: str) -> dict[str, Grant]:
        """Start a run, and lease what is ready of it."""
        await self.know(name, await self.world.start(definition))
        return await self.lease()

    async def know(self, name: str, run_id: str) -> None:
        self.ids[name] = run_id
        rows = await self.world.raw.fetch(
            "select step_run_id::text, step_name from rara.step_run where workflow_run_id = $1::uuid", run_id
        )
        self.ids |= {f"{name}.{row['step_name']}": row["step_run_id"] for row in rows}

    async def lease(self) -> dict[str, Grant]:
        return {grant.step_name: grant for grant in await self.world.lease()}

    async def do(self, grant: Grant, *more: Item) -> None:
        await self.world.report(grant, accepted(), running(), *more)


def _manifest() -> Iterator[ArtifactFacts]:
    yield inline_artifact("small", b"a few bytes")
    yield ArtifactFacts("big", hashlib.sha256(BIG).hexdigest(), len(BIG), "text/plain", "text")


async def mixed_history(world: StoreWorld) -> MixedHistory:
    history = MixedHistory(world)
    after_a = {"depends_on": ["a"]}
    twice = {"retry": {"max_attempts": 2}}
    given = {"depends_on": ["a"], "input_artifacts": [{"name": "big", "from_step": "a"}]}
    await world.define("chain", {"a": twice, "b": given, "c": {"depends_on": ["b"]}})
    await world.define("pair", {"a": {}, "b": {}})
    await world.define("branches", {"a": {}, "b": after_a, "x": after_a}, on_failure="ON_FAILURE_CONTINUE")
    wide = {"done": {}, "failed": {}, "ready": {}, "leased": {}, "running": {}, "waiting": twice}
    await world.define(
        "wide", wide | {"blocked": {"depends_on": ["running"]}}, on_failure="ON_FAILURE_CONTINUE"
    )
    await world.raw.execute(
        "insert into rara.blob (sha256, size_bytes) values ($1, $2)",
        hashlib.sha256(BIG).hexdigest(),
        len(BIG),
    )
    await _closed(history)
    await _retried(history)
    await _open(history)
    await world.raw.execute("select nextval('rara.lease_token_seq')")  # a number that no lease has
    return history


async def _closed(history: MixedHistory) -> None:
    world = history.world
    leases = await history.start("done", "chain")
    effect = Report(4, EventType.EFFECT, b"e", effect=("sent", b'"yes"'))
    await history.do(
        leases["a"], progress(3, b'{"at":1}'), effect, succeeded(5, artifacts=tuple(_manifest()))
    )
    await history.do((await history.lease())["b"], progress(3), succeeded(4))
    await history.do((await history.lease())["c"], succeeded(3))

    leases = await history.start("retried", "chain")
    await history.do(leases["a"], failed(3))
    await world.make_due()
    await history.do((await history.lease())["a"], succeeded(3, artifacts=tuple(_manifest())))
    grant = (await history.lease())["b"]
    await history.do(grant)
    await world.expire(grant)
    for found in await world.sweeps.reclaimable(NIL):
        await world.say(grant, ending("LEASE_EXPIRED", Guard.EXPIRED))
        assert found.lease_token == grant.lease_token
    await world.make_due()
    await world.report((await history.lease())["b"], ending("NO_CAPACITY", Guard.NOT_RUNNING))
    await history.do((await history.lease())["b"], succeeded(3))
    await history.do((await history.lease())["c"], progress(5), succeeded(7))  # with gaps

    leases = await history.start("failed", "pair")
    await history.do(leases["a"], failed(3, retryable=False))
    await world.report(leases["b"], Report(1, EventType.CANCELLED, b"c", reason="SIBLING_FAILED"))
    await history.know("cancelled", await world.start("pair"))
    await world.cancel(history.ids["cancelled"])
    leases = await history.start("upstream", "branches")
    await history.do(leases["a"], failed(3, retryable=False))
    leases = await history.start("together", "pair")
    await world.commits.commit(
        [
            reports(leases["a"], accepted(), failed(2), executor_id=leases["a"].executor_id),
            reports(leases["b"], accepted(), failed(2, retryable=False), executor_id=leases["b"].executor_id),
        ]
    )


async def _retried(history: MixedHistory) -> None:
    world = history.world
    leases = await history.start("first", "branches")
    await history.do(leases["a"], succeeded(3))
    leases = await history.lease()
    await history.do(leases["b"], succeeded(3))
    await history.do(leases["x"], failed(3, retryable=False))
    retrier = RunRetrier(world.database, world.definitions, on_ready=lambda: None)
    run_id, _ = await retrier.retry(history.ids["first"])
    await history.know("again", run_id)
    await history.do((await history.lease())["x"], succeeded(3))


async def _open(history: MixedHistory) -> None:
    world = history.world
    leases = await history.start("open", "wide")
    await history.do(leases["done"], succeeded(3))
    await history.do(leases["failed"], failed(3, retryable=False))
    weights = stored_artifact("weights", PART)
    await world.put_blobs(weights)
    await history.do(leases["running"], progress(3, b'{"at":3}', [weights]))
    await history.do(leases["waiting"], failed(3))
    leases = {"given back": leases["ready"]} | await history.start("cancelling", "pair")
    await history.do(leases["a"])
    await world.cancel(history.ids["cancelling"])
    await world.report(leases["given back"], ending("NO_CAPACITY", Guard.NOT_RUNNING))
    await history.know("fresh", await world.start("pair"))
