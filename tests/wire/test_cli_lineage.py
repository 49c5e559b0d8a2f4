"""`rara artifact lineage` and `impact` against a real scheduler over planted history."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rara_cli.exits import Exit
from rara_cli.lineage import show_lineage
from rara_cli.session import Session
from support.command_line import rara
from support.planted_lineage import PlantedLineage, digest_of
from support.running_scheduler import RunningScheduler, running_scheduler


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened
        # Only what lineage needs was planted: it is no history of an engine that kept its promises.
        await opened.raw.execute("truncate rara.workflow_run cascade")


async def plant(world: RunningScheduler) -> tuple[PlantedLineage, str, str]:
    """Two runs, of which the second goes on with what the first made."""
    planted = PlantedLineage(world.raw)
    ingest, train = await planted.run(definition="ingest"), await planted.run(definition="train")
    await planted.step(ingest, "collect", makes=["raw"])
    await planted.step(ingest, "clean", uses=["raw"], makes=["corpus"])
    await planted.step(train, "adapt", uses=["corpus"], sees=["base"], makes=["model"])
    await planted.step(train, "judge", uses=["model", "corpus"], makes=["figures"])
    return planted, ingest, train


async def test_lineage_in_every_format(world: RunningScheduler) -> None:
    planted, ingest, train = await plant(world)
    words = {word: digest_of(word) for word in ("raw", "corpus", "base", "model", "figures")}
    short = {word: digest[:12] for word, digest in words.items()}
    shown = await rara("artifact", "lineage", words["model"], server=world.address)
    assert (shown.code, shown.err) == (Exit.OK, "")
    of_adapt = sorted([f"in-corpus  {short['corpus']}  6 B", f"{short['base']}  4 B  (read at run time)"])
    assert [line.strip(" └├─│") for line in shown.lines if "base" not in line][:2] == [
        f"out-model  {short['model']}  5 B",
        f"made by adapt (do.adapt)  train v1, run {train}",
    ]
    assert f"      └─ made by clean (do.clean)  ingest v1, run {ingest}" in shown.out.replace(
        "│  └─", "   └─"
    )
    assert all(line in shown.out for line in of_adapt)
    assert shown.lines[-3:] == [
        f"in-model  {short['model']}  5 B",
        f"└─ used by judge (do.judge)  train v1, run {train}",
        f"   └─ out-figures  {short['figures']}  7 B",
    ]
    assert (
        await rara("artifact", "lineage", words["model"], "-o", "text", server=world.address)
    ).out == shown.out
    wide = await rara(
        "artifact", "lineage", words["model"], "--downstream", "-o", "wide", server=world.address
    )
    assert wide.lines[0] == f"in-model  {words['model']}  5 B"

    document = (await rara("artifact", "lineage", words["model"], "-o", "json", server=world.address)).json
    assert list(document) == ["artifact", "depth", "is_complete", "upstream", "downstream"]
    assert document["artifact"] == {"sha256": words["model"], "size_bytes": 5}
    assert (document["depth"], document["is_complete"]) == (10, True)
    first = document["upstream"][0]
    assert first == {
        "artifact": {"sha256": words["model"], "size_bytes": 5},
        "artifact_name": "out-model",
        "workflow_run_id": train,
        "step_run_id": first["step_run_id"],
        "attempt": 1,
        "produced": True,
        "declared": True,
        "depth": 1,
        "step_name": "adapt",
        "definition": "train",
        "definition_version": 1,
        "kind": "do.adapt",
        "artifact_type": "",
        "derived_from": [],
    }
    assert len(document["upstream"]) == len(planted.expected(upstream=True, depth=10, word="model"))
    assert [edge["step_name"] for edge in document["downstream"]] == ["judge", "judge"]
    near = (
        await rara(
            "artifact",
            "lineage",
            words["model"],
            "--upstream",
            "--depth",
            "1",
            "-o",
            "json",
            server=world.address,
        )
    ).json
    assert (list(near)[-1], {edge["depth"] for edge in near["upstream"]}) == ("upstream", {1})

    lines = (
        await rara("artifact", "lineage", words["raw"], "--downstream", "-o", "jsonl", server=world.address)
    ).lines
    assert len(lines) == 7
    assert all(line.startswith('{"direction":"downstream","artifact":{"sha256":"') for line in lines)
    names = (
        await rara("artifact", "lineage", words["raw"], "--downstream", "-o", "name", server=world.address)
    ).lines
    assert names[0] == words["raw"]
    assert set(names) == {words[word] for word in ("raw", "corpus", "model", "figures")}

    flowchart = (
        await rara("artifact", "lineage", words["model"], "-o", "mermaid", server=world.address)
    ).lines
    assert flowchart[0] == "flowchart LR"
    assert sum(" --> " in line for line in flowchart) == 7
    assert sum(" -.-> " in line for line in flowchart) == 1  # base
    digraph = (await rara("artifact", "lineage", words["model"], "-o", "dot", server=world.address)).lines
    assert (digraph[0], digraph[-1]) == ("digraph lineage {", "}")
    assert sum(" -> " in line for line in digraph) == 8
    assert [line for line in digraph if "cluster" in line] == [
        f'  subgraph cluster_0 {{ label="train v1, run {train}";',
        f'  subgraph cluster_1 {{ label="ingest v1, run {ingest}";',
    ]
    refused = await rara("run", "list", "-o", "dot", server=world.address)
    assert refused.code == Exit.USAGE
    rows = await rara(
        "artifact", "lineage", words["raw"], "--downstream", "--rows", "2", server=world.address
    )
    assert rows.lines[2].startswith("… ")
    assert len(rows.lines) == 3


async def test_what_lineage_begins_with_is_found_as_people_name_it(world: RunningScheduler) -> None:
    _, ingest, train = await plant(world)
    corpus = digest_of("corpus")
    whole = (await rara("artifact", "lineage", corpus, server=world.address)).out
    for text in (corpus[:8], corpus[:20].upper(), f"sha256:{corpus}", f"sha256:{corpus[:9]}"):
        assert (await rara("artifact", "lineage", text, server=world.address)).out == whole, text
    of_run = await rara("artifact", "lineage", ingest, "--downstream", server=world.address)
    assert of_run.lines[:3] == [
        f"run {ingest}: what came of it",
        f"└─ step collect (do.collect)  ingest v1, run {ingest}",
        f"   └─ out-raw  {digest_of('raw')[:12]}  3 B",
    ]
    latest = await rara("artifact", "lineage", "--latest", "--upstream", server=world.address)
    assert latest.lines[0] == f"run {train}: what went into it"
    by_beginning = await rara("artifact", "lineage", train[:23], "--upstream", server=world.address)
    assert by_beginning.out == latest.out

    for arguments, code, said in (
        (["0" * 64], Exit.NOT_FOUND, f"ARTIFACT_NOT_FOUND: no step made or used {'0' * 64}"),
        (["0" * 12], Exit.NOT_FOUND, f"RUN_NOT_FOUND: no artifact and no run begins with '{'0' * 12}'"),
        (["nothing"], Exit.NOT_FOUND, "RUN_NOT_FOUND: no run begins with 'nothing'"),
        ([], Exit.USAGE, "USAGE: give a DIGEST, a RUN, or RUN and NAME"),
        ([ingest, "nothing"], Exit.NOT_FOUND, "ARTIFACT_NOT_FOUND"),
        ([corpus, "--depth", "33"], Exit.USAGE, "33 is not in the range 1<=x<=32"),
    ):
        ended = await rara("artifact", "lineage", *arguments, server=world.address)
        assert ended.code == code, arguments
        assert said in ended.err, arguments
    # An artifact that is there, but has nothing on the side that was asked for.
    end = await rara("artifact", "lineage", digest_of("figures"), "--downstream", server=world.address)
    assert (end.code, end.lines) == (Exit.OK, [f"{digest_of('figures')[:12]}  7 B  (used by no step yet)"])


async def test_impact_names_steps_in_the_order_of_their_rebuild(world: RunningScheduler) -> None:
    _, ingest, train = await plant(world)
    raw, figures = digest_of("raw"), digest_of("figures")
    shown = await rara("artifact", "impact", raw[:8], server=world.address)
    assert shown.lines[:3] == [
        f"{raw[:12]} was used, itself or what was made from it, by 3 steps of 2 runs",
        "3 artifacts would be stale",
        "",
    ]
    assert [line.split()[:2] for line in shown.lines[4:]] == [["1", "clean"], ["2", "adapt"], ["3", "judge"]]
    assert f"out-model {digest_of('model')[:12]}" in shown.lines[5]
    document = (await rara("artifact", "impact", raw, "-o", "json", server=world.address)).json
    assert list(document) == ["artifact", "is_complete", "steps", "runs", "stale"]
    assert [(step["order"], step["step_name"], step["workflow_run_id"]) for step in document["steps"]] == [
        (1, "clean", ingest), (2, "adapt", train), (3, "judge", train),
    ]  # fmt: skip
    assert document["runs"] == [
        {"workflow_run_id": ingest, "definition": "ingest", "definition_version": 1},
        {"workflow_run_id": train, "definition": "train", "definition_version": 1},
    ]
    assert [artifact["name"] for artifact in document["stale"]] == ["out-corpus", "out-model", "out-figures"]
    judge = document["steps"][2]
    assert sorted(used["name"] for used in judge["used"]) == ["in-corpus", "in-model"]
    assert judge["makes_stale"] == [{"name": "out-figures", "sha256": figures, "size_bytes": 7, "type": ""}]
    assert len((await rara("artifact", "impact", raw, "-o", "jsonl", server=world.address)).lines) == 3
    ids = (await rara("artifact", "impact", raw, "-o", "name", server=world.address)).lines
    assert ids == [step["step_run_id"] for step in document["steps"]]
    cut = await rara("artifact", "impact", raw, "--rows", "1", server=world.address)
    assert cut.lines[-1] == "… 2 more rows: --rows 3"

    nobody = await rara("artifact", "impact", figures, server=world.address)
    assert (nobody.code, nobody.lines) == (
        Exit.OK, [f"no step used {figures[:12]}: nothing is to be rebuilt"],
    )  # fmt: skip
    for arguments, code in (([train], Exit.USAGE), (["0" * 9], Exit.NOT_FOUND), (["--latest"], Exit.USAGE)):
        assert (await rara("artifact", "impact", *arguments, server=world.address)).code == code, arguments


async def test_lineage_beyond_the_bound_says_so(world: RunningScheduler) -> None:
    planted = PlantedLineage(world.raw)
    run = await planted.run()
    for number in range(34):
        await planted.step(run, f"s{number:02}", uses=[f"w{number}"], makes=[f"w{number + 1}"])
    ended = await rara("artifact", "impact", digest_of("w0"), server=world.address)
    assert "32 steps of 1 run" in ended.lines[0]
    assert ended.err.startswith("there is more: only the nearest steps")
    shown = await rara(
        "artifact", "lineage", digest_of("w0"), "--downstream", "--depth", "32", server=world.address
    )
    assert len([line for line in shown.lines if "used by" in line]) == 32
    assert shown.err == ""


async def test_the_demo_can_print_a_tree(world: RunningScheduler, capsys: pytest.CaptureFixture[str]) -> None:
    """What other commands call, with a session and a client of their own."""
    await plant(world)
    session = Session(server=world.address)
    async with asyncio.timeout(60), session.connect() as client:
        await show_lineage(session, client, digest_of("model"), depth=2, directions=["upstream"])
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"out-model  {digest_of('model')[:12]}  5 B"
    assert "made by clean" in out
