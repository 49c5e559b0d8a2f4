"""Walks along lineage: what they reach, from where, and in pages that stay right while history grows."""

import json
import random
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pytest
import pytest_asyncio
from rara.v1 import common_pb2, job_pb2, workflow_pb2
from rara_scheduler.domain.attempt import ArtifactFacts, EventType, Outcome, Report
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.lineage import LineageEdge
from rara_scheduler.domain.start_command import RunArtifact
from rara_scheduler.store import lineage as module
from rara_scheduler.store.lineage import LineageReads, Position, Start
from rara_scheduler.store.queries import query
from rara_scheduler.store.retry_run import RunRetrier
from rara_scheduler.transport.events import PayloadLimits, read_event
from rara_scheduler.transport.lineage import lineage_page, position_of, query_of
from rara_scheduler.transport.paging import ANSWER_BYTES
from support.kept_promises import assert_promises_kept
from support.planted_lineage import Depths, PlantedLineage, digest_of
from support.store_world import (
    StoreWorld,
    accepted,
    failed,
    inline_artifact,
    new_id,
    running,
    store_world,
    succeeded,
)

ALL = 32


@dataclass
class LineageWorld:
    store: StoreWorld
    reads: LineageReads
    planted: PlantedLineage

    async def walk(
        self,
        kind: Literal["artifact", "step", "run"],
        what: str,
        *,
        upstream: bool,
        depth: int = ALL,
        size: int = 1000,
    ) -> list[LineageEdge]:
        """All edges of all pages."""
        found: list[LineageEdge] = []
        after: Position | None = None
        while True:
            page = await self.reads.page(
                Start(kind, what), upstream=upstream, depth=depth, after=after, size=size
            )
            found.extend(page.edges[:size])
            if len(page.edges) <= size:
                return found
            after = Position(page.snapshot, page.places[size - 1])

    async def up(self, word: str, **more: Any) -> set[str]:
        return steps_and_words(await self.walk("artifact", digest_of(word), upstream=True, **more))

    async def down(self, word: str, **more: Any) -> set[str]:
        return steps_and_words(await self.walk("artifact", digest_of(word), upstream=False, **more))


def steps_and_words(edges: list[LineageEdge]) -> set[str]:
    """`clean>out-corpus`, `clean<in-raw`: made, used."""
    return {f"{edge.step_name}{'>' if edge.produced else '<'}{edge.name}" for edge in edges}


def depths(edges: list[LineageEdge]) -> Depths:
    found = {(edge.sha256, edge.step_run_id, edge.produced, edge.name): edge.depth for edge in edges}
    assert len(found) == len(edges)  # each once
    return found


@pytest_asyncio.fixture
async def world(database_url: str) -> AsyncIterator[LineageWorld]:
    async with store_world(database_url) as store:
        yield LineageWorld(store, LineageReads(store.database), PlantedLineage(store.raw))


async def test_a_walk_crosses_runs_and_says_how_far_each_step_is(world: LineageWorld) -> None:
    plant = world.planted
    first, second = await plant.run(definition="ingest"), await plant.run(definition="train")
    await plant.step(first, "collect", makes=["raw"])
    await plant.step(first, "clean", uses=["raw"], makes=["corpus"])
    last = await plant.step(second, "adapt", uses=["corpus", "base"], sees=["stopwords"], makes=["model"])
    up = await world.walk("artifact", digest_of("model"), upstream=True)
    assert [
        (edge.depth, edge.step_name, edge.produced, edge.name, edge.declared, edge.definition) for edge in up
    ] == [
        (1, "adapt", True, "out-model", True, "train"),
        *sorted(
            [
                (1, "adapt", False, "in-base", True, "train"),
                (1, "adapt", False, "in-corpus", True, "train"),
                (1, "adapt", False, "", False, "train"),
            ],
            key=lambda edge: digest_of(edge[3].removeprefix("in-") or "stopwords"),
        ),
        (2, "clean", True, "out-corpus", True, "ingest"),
        (2, "clean", False, "in-raw", True, "ingest"),
        (3, "collect", True, "out-raw", True, "ingest"),
    ]
    (made,) = [edge for edge in up if edge.step_run_id == last and edge.produced]
    assert (made.kind, made.definition_version, made.workflow_run_id, made.size_bytes) == (
        "do.adapt", 1, second, 5,
    )  # fmt: skip
    assert await world.up("model", depth=1) == {
        "adapt>out-model", "adapt<in-base", "adapt<in-corpus", "adapt<",
    }  # fmt: skip
    assert await world.down("raw", depth=1) == {"clean<in-raw", "clean>out-corpus"}
    assert await world.down("stopwords") == {"adapt<", "adapt>out-model"}
    assert await world.down("raw") == {
        "clean<in-raw",
        "clean>out-corpus",
        "adapt<in-corpus",
        "adapt>out-model",
    }
    # Nobody made these, so that is where walks end.
    assert await world.up("base") == set()
    assert await world.down("model") == set()
    assert await world.up("never heard of") == set()


async def test_an_output_that_names_its_origins_comes_from_nothing_else(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    split = await plant.step(
        run, "split", uses=["a", "b"], makes={"from-a": ["a"], "from-both": [], "from-b": ["b"]}
    )
    await plant.step(run, "use", uses=["from-a"], makes=["end"])
    assert await world.up("end") == {
        "use>out-end", "use<in-from-a", "split>out-from-a", "split<in-a",
    }  # fmt: skip
    assert await world.up("from-both") == {"split>out-from-both", "split<in-a", "split<in-b"}
    assert await world.down("b") == {"split<in-b", "split>out-from-both", "split>out-from-b"}
    assert "use>out-end" in await world.down("a")
    # A step as a whole used and made all of it.
    up = await world.walk("step", split, upstream=True)
    assert steps_and_words(up) == {"split<in-a", "split<in-b"}
    down = await world.walk("step", split, upstream=False, depth=1)
    assert steps_and_words(down) == {"split>out-from-a", "split>out-from-both", "split>out-from-b"}
    (made,) = [edge for edge in down if edge.name == "out-from-a"]
    assert made.derived_from == ((digest_of("a"), 1),)


async def test_a_step_reached_twice_gives_what_each_way_leads_to(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    await plant.step(run, "one", uses=["a"], makes=["b"])
    await plant.step(run, "pair", uses=["a", "b"], makes={"x": ["a"], "y": ["b"]})
    found = await world.walk("artifact", digest_of("a"), upstream=False)
    by_name = {(edge.step_name, edge.name): edge.depth for edge in found}
    assert by_name == {
        ("one", "in-a"): 1, ("one", "out-b"): 1, ("pair", "in-a"): 1, ("pair", "out-x"): 1,
        ("pair", "in-b"): 2, ("pair", "out-y"): 2,
    }  # fmt: skip


async def test_cycles_diamonds_and_a_digest_made_twice_give_each_edge_once(world: LineageWorld) -> None:
    plant = world.planted
    run, again = await plant.run(), await plant.run()
    await plant.step(run, "top", makes=["a"])
    await plant.step(run, "left", uses=["a"], makes=["l"])
    await plant.step(run, "right", uses=["a"], makes=["r"])
    await plant.step(run, "long", uses=["l"], makes=["l2"])
    await plant.step(run, "join", uses=["l", "r", "l2"], makes=["j"])
    await plant.step(run, "pass", uses=["j"], makes=["j"])  # its input, unchanged
    await plant.step(again, "top-again", uses=["other"], makes=["a"])  # the same bytes
    await plant.step(again, "back", uses=["j"], makes=["a"])  # a cycle through all of it
    up = await world.walk("artifact", digest_of("j"), upstream=True)
    assert depths(up) == plant.expected(upstream=True, depth=ALL, word="j")
    assert {edge.step_name for edge in up if edge.name == "out-a"} == {"top", "top-again", "back"}
    assert {edge.depth for edge in up if edge.name == "in-l"} == {1, 2}  # of `join`, of `long`
    assert {edge.depth for edge in up if edge.step_name == "left"} == {2}  # not 3, through `long`
    down = await world.walk("artifact", digest_of("a"), upstream=False)
    assert depths(down) == plant.expected(upstream=False, depth=ALL, word="a")


@pytest.mark.parametrize(
    "seeds", [range(6), pytest.param(range(6, 300), marks=pytest.mark.soak)], ids=["few", "many"]
)
async def test_random_graphs_are_walked_as_the_model_says(
    world: LineageWorld, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small alphabets, so that digests repeat, meet and go in circles; pages of any size."""
    monkeypatch.setattr(module, "_ORIGINS_AT_ONCE", 3)
    for seed in seeds:
        rng = random.Random(seed)
        plant = PlantedLineage(world.store.raw)
        words = [f"{seed}-{letter}" for letter in "abcdefgh"[: rng.randint(2, 8)]]
        by_run: dict[str, list[str]] = {}
        for number in range(rng.randint(1, 9)):
            run = await plant.run() if not by_run or rng.random() < 0.3 else rng.choice(list(by_run))
            uses = rng.sample(words, rng.randint(0, min(3, len(words))))
            sees = [word for word in rng.sample(words, rng.randint(0, 1)) if word not in uses]
            makes = {
                word: rng.sample(uses + sees, rng.randint(0, len(uses + sees)))
                for word in rng.sample(words, rng.randint(0, min(3, len(words))))
            }
            step = await plant.step(run, f"s{number}", uses=uses, sees=sees, makes=makes)
            by_run.setdefault(run, []).append(step)
        for upstream in (True, False):
            depth, size = rng.choice((1, 2, 3, ALL)), rng.choice((3, 7, 1000))
            terms: dict[str, Any] = {"upstream": upstream, "depth": depth}
            word, run = rng.choice(words), rng.choice(list(by_run))
            where = f"seed {seed}, {terms}, pages of {size}"
            found = await world.walk("artifact", digest_of(word), size=size, **terms)
            assert depths(found) == plant.expected(word=word, **terms), where
            assert [edge.depth for edge in found] == sorted(edge.depth for edge in found), where
            found = await world.walk("run", run, size=size, **terms)
            assert depths(found) == plant.expected(steps=by_run[run], **terms), where
            step = rng.choice(by_run[run])
            found = await world.walk("step", step, size=size, **terms)
            assert depths(found) == plant.expected(steps=[step], **terms), where


async def test_pages_show_what_the_first_one_saw_while_history_grows(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    chain = ["start", "b", "c", "d", "e", "f"]
    for before, after in pairwise(chain):
        await plant.step(run, f"to-{after}", uses=[before], makes=[after])
    start = Start("artifact", digest_of("start"))
    seen = plant.expected(upstream=False, depth=ALL, word="start")
    found: list[LineageEdge] = []
    after_place: Position | None = None
    for number in range(100):
        page = await world.reads.page(start, upstream=False, depth=ALL, after=after_place, size=1)
        found.extend(page.edges[:1])
        if len(page.edges) <= 1:
            break
        after_place = Position(page.snapshot, page.places[0])
        # What comes now would bring the far end near, before the place where the pages are: edges would be missed.
        await plant.step(run, f"short-{number}", uses=["start", "b"], makes=["d", "e", f"new-{number}"])
    assert depths(found) == seen
    assert len(await world.walk("artifact", digest_of("start"), upstream=False)) > len(seen)


async def test_later_pages_walk_once_and_leave_out_what_was_removed_meanwhile(
    world: LineageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = world.planted
    kept, gone = await plant.run(), await plant.run()
    chain = ["start", "b", "c", "d", "e"]
    for before, after in pairwise(chain):
        await plant.step(gone if after == "e" else kept, f"to-{after}", uses=[before], makes=[after])
    start = Start("artifact", digest_of("start"))
    first = await world.reads.page(start, upstream=False, depth=ALL, after=None, size=2)
    second = await world.reads.page(
        start, upstream=False, depth=ALL, after=Position(first.snapshot, first.places[1]), size=2
    )
    await world.store.raw.execute("delete from rara.lineage where workflow_run_id = $1", gone)
    await world.store.raw.execute("set rara.removes_runs = 'on'")
    await world.store.raw.execute("delete from rara.step_run where workflow_run_id = $1", gone)
    rest = await world.reads.page(
        start, upstream=False, depth=ALL, after=Position(first.snapshot, second.places[1]), size=10
    )
    names = [edge.name for page in (first, second, rest) for edge in page.edges[:2]]
    assert names == ["in-start", "out-b", "in-b", "out-c", "in-c", "out-d"]
    assert rest.truncated is False
    # Of the walks that are kept, the oldest make room.
    monkeypatch.setattr(module, "_KEPT_EDGES", 5)
    again = Position(first.snapshot, first.places[0])
    await world.reads.page(start, upstream=False, depth=4, after=again, size=1)
    assert await world.reads.page(start, upstream=False, depth=4, after=again, size=1)


async def test_a_commit_under_way_belongs_to_no_page_of_a_walk_that_began_before_it(
    world: LineageWorld,
) -> None:
    plant = world.planted
    run = await plant.run()
    await plant.step(run, "one", uses=["a"], makes=["b"])
    late = world.store.raw.transaction()
    await late.start()
    await plant.step(run, "late", uses=["a"], makes=["c"])
    page = await world.reads.page(
        Start("artifact", digest_of("a")), upstream=False, depth=ALL, after=None, size=1
    )
    await late.commit()
    after = Position(page.snapshot, page.places[0])
    rest = await world.reads.page(
        Start("artifact", digest_of("a")), upstream=False, depth=ALL, after=after, size=10
    )
    assert [edge.step_name for edge in (*page.edges[:1], *rest.edges)] == ["one", "one"]
    assert await world.down("a") == {"one<in-a", "one>out-b", "late<in-a", "late>out-c"}


async def test_a_hot_digest_is_paged_without_reading_it_whole(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    for number in range(12):
        await plant.step(run, f"u{number}", uses=["hot"], makes=[f"o{number}"])
    reads = LineageReads(world.store.database, max_edges=5)
    start = Start("artifact", digest_of("hot"))
    page = await reads.page(start, upstream=False, depth=5, after=None, size=4)
    assert (len(page.edges), page.truncated) == (5, False)
    names: list[str] = []
    after: Position | None = None
    while True:
        page = await reads.page(start, upstream=False, depth=5, after=after, size=4)
        names.extend(edge.step_name for edge in page.edges[:4])
        if len(page.edges) <= 4:
            break
        after = Position(page.snapshot, page.places[3])
    assert sorted(names) == sorted(f"u{number}" for number in range(12))  # then it would look at too many
    assert page.truncated
    whole = await world.walk("artifact", digest_of("hot"), upstream=False, size=4)
    assert len(whole) == 24


async def test_a_walk_looks_at_so_many_edges_and_says_when_there_are_more(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    for number in range(10):
        await plant.step(run, f"s{number}", uses=[f"w{number}"], makes=[f"w{number + 1}"])
    for limit in (1, 2, 3, 7, 19, 20, 21):
        reads = LineageReads(world.store.database, max_edges=limit)
        page = await reads.page(
            Start("artifact", digest_of("w0")), upstream=False, depth=ALL, after=None, size=100
        )
        # One edge more where it is at hand: what cannot be looked at is what lies behind it.
        assert (len(page.edges), page.truncated) == (min(limit | 1, 20), limit < 20), limit
        page = await reads.page(Start("run", run), upstream=True, depth=1, after=None, size=100)
        assert (len(page.edges), page.truncated) == (min(limit, 10), limit < 10), limit


async def test_a_walk_looks_at_so_many_origins_and_says_when_there_are_more(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    await plant.step(run, "split", uses=["a", "b"], makes={f"o{n}": ["a", "b"] for n in range(4)})
    await plant.step(run, "one", uses=[f"o{n}" for n in range(4)], makes=["end"])
    for limit in (1, 2, 7, 8):
        reads = LineageReads(world.store.database, max_origins=limit)
        known = limit // 2  # outputs whose origins may be looked at
        down = await reads.page(
            Start("artifact", digest_of("a")), upstream=False, depth=1, after=None, size=100
        )
        assert (len(down.edges), down.truncated) == (1 + known, limit < 8)
        up = await reads.page(
            Start("artifact", digest_of("end")), upstream=True, depth=2, after=None, size=100
        )
        # `end`, its inputs and their makers; and behind these what is known of them.
        assert (len(up.edges), up.truncated) == (1 + 4 + 4 + (2 if known else 0), limit < 8)


async def test_outputs_of_thousands_of_origins_cost_little_memory(
    world: LineageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 outputs of 2,000 origins each are 600,000 digests: some 70 MB where they are all held."""
    monkeypatch.setattr(module, "STATEMENT_TIMEOUT_S", 60.0)  # tracing each allocation takes its time
    monkeypatch.setattr(module, "WALK_TIMEOUT_S", 120.0)
    plant = world.planted
    run = await plant.run()
    step = await plant.step(run, "wide", uses=["in"])
    await world.store.raw.execute(
        "with origins as materialized (select array_agg(encode(sha256(n::text::bytea), 'hex')) || $3::text as made"
        " from generate_series(1, 1999) n)"
        " insert into rara.lineage (sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared,"
        " name, derived_from) select encode(sha256(('o' || n)::bytea), 'hex'), 1, $1::text::uuid, $2::text::uuid, 1,"
        " true, true, 'o' || n, o.made from origins o, generate_series(1, 300) n",
        step,
        run,
        digest_of("in"),
    )
    request = workflow_pb2.QueryLineageRequest(direction=workflow_pb2.LINEAGE_DIRECTION_DOWNSTREAM, depth=ALL)
    request.artifact.sha256 = digest_of("in")
    asked = query_of(request)
    found: list[workflow_pb2.LineageEdge] = []
    tracemalloc.start()
    try:
        while True:
            page = await world.reads.page(
                asked.start, upstream=asked.upstream, depth=asked.depth, after=position_of(request), size=1000
            )
            edges, token = lineage_page(request, page, 1000)
            found.extend(edges)
            if not token:
                break
            assert sum(edge.ByteSize() for edge in edges) <= ANSWER_BYTES
            request.page_token = token
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 << 20
    assert page.truncated
    names = [edge.artifact_name for edge in found]
    assert (names[0], len(names), len(set(names))) == ("in-in", 101, 101)  # 200,000 origins
    assert {len(edge.derived_from) for edge in found[1:]} == {2000}
    assert {digest.size_bytes for edge in found[1:] for digest in edge.derived_from} == {0, 2}


async def test_walks_wait_for_their_turn_and_too_many_are_refused(
    world: LineageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 0)
    with pytest.raises(Fault) as refused:
        await world.walk("artifact", digest_of("a"), upstream=True)
    assert (refused.value.code, refused.value.metadata) == (Code.QUEUE_FULL, {"limit": "0"})


async def test_a_start_that_does_not_exist_is_refused(world: LineageWorld) -> None:
    for kind, code in (("step", Code.STEP_NOT_FOUND), ("run", Code.RUN_NOT_FOUND)):
        with pytest.raises(Fault) as refused:
            await world.walk(kind, new_id(), upstream=True)  # type: ignore[arg-type]  # both are starts
        assert refused.value.code is code


async def test_a_digest_is_found_by_how_it_begins(world: LineageWorld) -> None:
    run = await world.planted.run()
    await world.planted.step(run, "s", uses=["a"], makes=["b"])
    a = digest_of("a")
    assert await world.reads.digest_beginning(a[:8]) == (a, 1)
    assert await world.reads.digest_beginning(a) == (a, 1)
    assert (await world.reads.size_of(a), await world.reads.size_of("0" * 64)) == (1, 0)
    with pytest.raises(Fault) as refused:
        await world.reads.digest_beginning("0" * 63)
    assert refused.value.code is Code.ARTIFACT_NOT_FOUND
    near = a[:10] + "f" * 54
    await world.store.raw.execute("update rara.lineage set sha256 = $1 where sha256 <> $2", near, a)
    with pytest.raises(Fault) as refused:
        await world.reads.digest_beginning(a[:10])
    assert refused.value.code is Code.FIELD_INVALID
    assert near in refused.value.message
    assert await world.reads.digest_beginning(a[:12]) in ((a, 1), (near, 1))


# ---------------------------------------------------------------- what the engine itself writes


async def test_a_retried_run_has_the_lineage_of_the_steps_that_it_reuses(world: LineageWorld) -> None:
    store = world.store
    binding = [{"name": "in", "from_step": "a", "from_name": "out"}]
    await store.define(
        "flow", {"a": {"input_artifacts": [{"name": "given"}]}, "b": {"input_artifacts": binding}}
    )
    given = inline_artifact("given", b"given")
    inputs = (RunArtifact("given", given.sha256, given.size_bytes, "text/plain", "dataset", b"given", None),)
    run_id = await store.start("flow", artifacts=inputs)
    out = inline_artifact("out", b"made by a")
    first = await store.lease_one()
    await store.report(first, accepted(1), running(2), succeeded(3, b"{}", [out]))
    await store.report(await store.lease_one(), accepted(1), running(2), failed(3, retryable=False))
    assert await store.run_state(run_id) == "failed"
    retrier = RunRetrier(store.database, store.definitions, on_ready=lambda: None)
    retried, _ = await retrier.retry(run_id, (), idempotency_key=None)
    second = await store.lease_one()
    end = ArtifactFacts("end", digest_of("end"), 3, "a/b", "report", b"end", None, (out.sha256,))
    await store.report(
        second,
        accepted(1),
        running(2),
        Report(3, EventType.SUCCEEDED, b"s", outcome=Outcome(b"{}", (end,), ((out.sha256, out.size_bytes),))),
    )
    up = await world.walk("run", retried, upstream=True)
    assert [(edge.depth, edge.step_name, edge.produced, edge.name, edge.artifact_type) for edge in up] == [
        (1, "a", False, "given", "dataset"),
        (1, "b", False, "in", "blob"),
        (2, "a", True, "out", "blob"),
    ]
    assert [edge.workflow_run_id for edge in up] == [run_id, retried, run_id]
    down = await world.walk("artifact", given.sha256, upstream=False)
    assert [(edge.step_name, edge.name, edge.artifact_type) for edge in down] == [
        ("a", "given", "dataset"), ("a", "out", "blob"), ("b", "in", "blob"), ("b", "end", "report"),
    ]  # fmt: skip
    assert down[-1].derived_from == ((out.sha256, out.size_bytes),)


async def test_what_an_output_was_made_from_was_used_even_if_nobody_else_said_so(
    world: LineageWorld, database_url: str
) -> None:
    store = world.store
    await store.define("one", {"a": {}})
    await store.start("one")
    grant = await store.lease_one()
    event = job_pb2.ProgressEvent(sequence=3)
    made = event.succeeded.manifest.artifacts.add(name="out", inline=b"made")
    made.digest.MergeFrom(common_pb2.Digest(sha256=digest_of("made"), size_bytes=4))
    made.derived_from.add(sha256=digest_of("elsewhere"), size_bytes=9)
    report = read_event(event, PayloadLimits(max_payload_bytes=1000, max_inline_bytes=1000))
    assert isinstance(report, Report)
    await store.report(grant, accepted(1), running(2), report)
    up = await world.walk("artifact", digest_of("made"), upstream=True)
    assert [(edge.sha256, edge.size_bytes, edge.produced, edge.declared) for edge in up] == [
        (digest_of("made"), 4, True, True),
        (digest_of("elsewhere"), 9, False, False),
    ]
    assert up[0].derived_from == ((digest_of("elsewhere"), 9),)
    down = await world.walk("artifact", digest_of("elsewhere"), upstream=False)
    assert [(edge.produced, edge.name) for edge in down] == [(False, ""), (True, "out")]
    await assert_promises_kept(database_url)


async def test_what_is_left_of_removed_runs_is_walked_like_inputs_from_outside(world: LineageWorld) -> None:
    plant = world.planted
    old, new = await plant.run(), await plant.run()
    await plant.step(old, "make", uses=["a"], makes=["b"])
    await plant.step(new, "use", uses=["b"], makes=["c"])
    await world.store.raw.execute(
        "update rara.workflow_run set state = 'succeeded', ended_at = now() - interval '40 days',"
        " steps_succeeded = 1 where workflow_run_id = $1",
        old,
    )
    removed = await world.store.raw.fetchrow("select * from rara.remove_runs(array[$1::uuid], now())", old)
    assert removed is not None
    assert tuple(removed) == (1, 1)
    assert await world.up("c") == {"use>out-c", "use<in-b"}
    assert await world.down("a") == set()


async def test_walks_use_the_indexes(world: LineageWorld) -> None:
    plant = world.planted
    run = await plant.run()
    for number in range(60):
        await plant.step(run, f"s{number}", uses=["hot", f"w{number}"], makes=[f"w{number + 1}"])
    raw = world.store.raw
    await raw.execute("analyze rara.lineage")
    await raw.execute("set enable_seqscan = off")
    digests = sorted(digest_of(word) for word in ("hot", "w3"))
    at_digests = await raw.fetchval(
        f"explain (format json) {query('lineage_at_digests')}",
        digests, False, None, None, None, 51, None, 1,
    )  # fmt: skip
    at_steps = await raw.fetchval(
        f"explain (format json) {query('lineage_at_steps')}", [new_id()], True, 51, None, 1
    )
    assert "lineage_pkey" in json.dumps(json.loads(at_digests))
    assert "lineage_step" in json.dumps(json.loads(at_steps))
