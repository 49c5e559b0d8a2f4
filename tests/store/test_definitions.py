"""Definitions in the database: versions, routes, concurrent registrations, the cache."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import workflow_pb2
from rara_scheduler.domain.definition import DefinitionLimits
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.retry import RetryPolicy
from rara_scheduler.domain.routing import Route
from rara_scheduler.store.definitions import DefinitionStore
from support.store_world import StoreWorld, store_world


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[StoreWorld]:
    async with store_world(database_url) as opened:
        yield opened


def message(
    name: str = "nightly", *kinds: str, template: bytes = b"", **labels: str
) -> workflow_pb2.Definition:
    made = workflow_pb2.Definition(definition=name, labels=labels)
    for n, kind in enumerate(kinds or ("k.one",)):
        made.steps.add(step_name=f"s{n}", kind=kind)
    if template:
        made.steps[0].input_template.data = template
    return made


async def test_versions_are_counted_by_name_from_one(world: StoreWorld) -> None:
    store = world.definitions
    first, existed = await store.register(message("a", "k.one"))
    assert (first.version, existed) == (1, False)
    assert len(first.content_sha256) == 64
    assert first.HasField("created_at")
    second, existed = await store.register(message("a", "k.two"))
    assert (second.version, existed) == (2, False)
    other, existed = await store.register(message("b", "k.one"))
    assert (other.version, existed) == (1, False)


async def test_equal_content_gives_the_existing_version(world: StoreWorld) -> None:
    store = world.definitions
    first, _ = await store.register(message("a", template=b'{"x":1,"y":2}'))
    await store.register(message("a", "k.two"))
    again = message("a", template=b'{ "y": 2, "x": 1 }')
    again.version = 77
    again.content_sha256 = "0" * 64
    same, existed = await store.register(again)
    assert (same.version, existed) == (1, True)
    assert same.content_sha256 == first.content_sha256
    assert same.created_at == first.created_at


async def test_fifty_registrations_of_one_content_give_one_version(world: StoreWorld) -> None:
    answers = await asyncio.gather(*(world.definitions.register(message("a", "k.one")) for _ in range(50)))
    assert {answer.version for answer, _ in answers} == {1}
    assert sum(not existed for _, existed in answers) == 1
    assert await world.raw.fetchval("select count(*) from rara.definition") == 1
    assert await world.raw.fetchval("select count(*) from rara.route") == 1


async def test_concurrent_registrations_of_different_contents_give_consecutive_versions(
    world: StoreWorld,
) -> None:
    answers = await asyncio.gather(
        *(world.definitions.register(message("a", f"k.{n % 7}", f"k.{n}")) for n in range(30))
    )
    assert sorted(answer.version for answer, _ in answers) == list(range(1, 31))


async def test_validation_alone_stores_nothing(world: StoreWorld) -> None:
    answer, existed = await world.definitions.register(message("a"), validate_only=True)
    assert (answer.version, existed, len(answer.content_sha256)) == (0, False, 64)
    assert await world.raw.fetchval("select count(*) from rara.definition") == 0
    assert await world.raw.fetchval("select count(*) from rara.route") == 0
    await world.definitions.register(message("a"))
    answer, existed = await world.definitions.register(message("a"), validate_only=True)
    assert (answer.version, existed) == (1, True)


async def test_a_definition_that_is_refused_leaves_nothing(world: StoreWorld) -> None:
    bad = message("a")
    bad.steps[0].depends_on.append("s0")
    with pytest.raises(Fault) as caught:
        await world.definitions.register(bad)
    assert caught.value.code is Code.DEFINITION_INVALID
    assert await world.raw.fetchval("select count(*) from rara.definition") == 0
    assert await world.raw.fetchval("select count(*) from rara.route") == 0


async def test_a_version_is_read_back_as_it_was_registered(world: StoreWorld, database_url: str) -> None:
    sent = message("a", "k.one", "k.two", template=b'{"price": 1.10}', team="search")
    registered, _ = await world.definitions.register(sent)
    fresh = DefinitionStore(world.database, RetryPolicy(max_attempts=9))
    found, spec = await fresh.get("a", 1)
    assert found == registered
    assert (spec.version, spec.content_sha256) == (1, registered.content_sha256)
    assert spec.steps["s0"].template_data == b'{"price": 1.10}'
    assert spec.steps["s0"].retry.max_attempts == 9
    assert await fresh.spec("a", 1) is spec


async def test_version_0_is_the_newest_also_after_another_scheduler_registered_one(world: StoreWorld) -> None:
    other = DefinitionStore(world.database, RetryPolicy())
    await world.definitions.register(message("a", "k.one"))
    assert (await world.definitions.load("a")).spec.version == 1
    await other.register(message("a", "k.two"))
    assert (await world.definitions.load("a")).spec.version == 2
    assert (await world.definitions.load("a", 1)).spec.version == 1


async def test_an_unknown_definition_is_named(world: StoreWorld) -> None:
    await world.definitions.register(message("a"))
    for name, version in (("none", 0), ("none", 1), ("a", 2), ("a", 2**31 - 1)):
        with pytest.raises(Fault) as caught:
            await world.definitions.get(name, version)
        assert caught.value.code is Code.DEFINITION_NOT_FOUND
        assert caught.value.metadata == {"definition": name} | ({"version": str(version)} if version else {})


async def test_routes_are_interned_once_and_followed_by_id(world: StoreWorld) -> None:
    gpu = message("a", "k.one", "k.one", "k.two")
    gpu.steps[1].required_labels.update({"gpu": "a100", "zone": "eu"})
    gpu.steps[2].kind_version = "1"
    gpu.steps[2].executor_kind = "go"
    await world.definitions.register(gpu)
    routes = await world.definitions.routes_after(0)
    assert {
        (r.executor_kind, r.kind, r.kind_version, tuple(sorted(r.required_labels.items()))) for r in routes
    } == {
        ("", "k.one", "", ()),
        ("", "k.one", "", (("gpu", "a100"), ("zone", "eu"))),
        ("go", "k.two", "1", ()),
    }
    last = routes[-1].route_id
    assert await world.definitions.routes_after(last) == []
    relabelled = message("b", "k.one", "k.new")
    relabelled.steps[0].required_labels.update({"zone": "eu", "gpu": "a100"})
    await world.definitions.register(relabelled)
    (new,) = await world.definitions.routes_after(last)
    assert new == Route(new.route_id, "", "k.new", "", {})
    registered = await world.definitions.load("b")
    by_labels = {tuple(sorted(r.required_labels)): r.route_id for r in routes if r.kind == "k.one"}
    assert registered.route_ids == {"s0": by_labels["gpu", "zone"], "s1": new.route_id}


async def test_route_ids_become_visible_in_their_order(world: StoreWorld, database_url: str) -> None:
    """Who follows the table by id must not miss one that commits after a larger one."""
    slow = await asyncpg.connect(database_url)
    try:
        async with slow.transaction():
            await slow.execute("select pg_advisory_xact_lock(hashtextextended('rara.route', 0))")
            await slow.execute(
                "insert into rara.route (executor_kind, kind, kind_version, required_labels)"
                " values ('', 'k.first', '', '{}')"
            )
            second = asyncio.create_task(world.definitions.register(message("a", "k.second")))
            await _until_waiting_for_a_lock(world)
            assert await world.definitions.routes_after(0) == []
        await second
    finally:
        await slow.close()
    assert [route.kind for route in await world.definitions.routes_after(0)] == ["k.first", "k.second"]


async def _until_waiting_for_a_lock(world: StoreWorld) -> None:
    async with asyncio.timeout(10):
        while not await world.raw.fetchval("select exists (select from pg_locks where not granted)"):
            await asyncio.sleep(0.01)


async def test_lists_go_by_name_and_by_version(world: StoreWorld) -> None:
    for name in ("c", "a", "b"):
        await world.definitions.register(message(name, "k.one"))
    for kind in ("k.two", "k.three"):
        await world.definitions.register(message("b", kind))
    newest = await world.definitions.newest(after="", limit=2)
    assert [(each.definition, each.version) for each in newest] == [("a", 1), ("b", 3)]
    newest = await world.definitions.newest(after="b", limit=2)
    assert [(each.definition, each.version) for each in newest] == [("c", 1)]
    versions = await world.definitions.versions("b", below=None, limit=2)
    assert [each.version for each in versions] == [3, 2]
    versions = await world.definitions.versions("b", below=2, limit=2)
    assert [each.version for each in versions] == [1]
    assert await world.definitions.versions("zz", below=None, limit=2) == []


async def test_the_cache_is_bounded_by_steps_and_keeps_the_last_used(world: StoreWorld) -> None:
    store = DefinitionStore(world.database, RetryPolicy(), cached_steps=4)
    for name in ("a", "b", "c"):
        await store.register(message(name, "k.one", "k.two"))
    first = await store.load("a", 1)
    await store.load("b", 1)
    assert await store.load("a", 1) is first
    await store.load("c", 1)  # b goes
    assert await store.load("a", 1) is first
    await store.register(message("large", *[f"k.{n}" for n in range(5)]))
    assert len((await store.load("large", 1)).spec.steps) == 5  # served, not kept
    assert await store.load("a", 1) is first


async def test_ten_thousand_steps_are_registered_and_loaded(world: StoreWorld) -> None:
    big = workflow_pb2.Definition(definition="big")
    for n in range(10_000):
        step = big.steps.add(step_name=f"s{n}", kind="k.one")
        if n:
            step.depends_on.append(f"s{n - 1}")
    registered, _ = await world.definitions.register(big)
    assert registered.version == 1
    loaded = await DefinitionStore(world.database, RetryPolicy()).load("big")
    assert len(loaded.route_ids) == 10_000
    with pytest.raises(Fault, match="over the limit of 9999"):
        await DefinitionStore(world.database, RetryPolicy(), DefinitionLimits(max_steps=9999)).register(big)
