"""The example on a real stack: its figures, computed again from the index alone, and how it fails."""

import json
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from knowledge_pipeline import DEFINITION_FILE
from rara.v1 import common_pb2, workflow_pb2
from rara_cli.artifacts import content
from rara_cli.demoresult import Outcome, fetch_outcome
from rara_cli.stack import Stack, StackSettings
from rara_client import Client
from rara_client.definitions import load_definition
from support.text_folders import write_library_heads

RUN_S = 120.0


@pytest_asyncio.fixture(scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """Of a stack that serves the pipeline, its definition registered."""
    settings = StackSettings(directory=tmp_path_factory.mktemp("pipeline"), executor_name="pipeline")
    async with Stack(settings) as stack, Client.connect(stack.address) as connected:
        await connected.register_definition(load_definition(DEFINITION_FILE))
        yield connected


async def run_pipeline(client: Client, options: object) -> Outcome:
    started = await client.start_run("knowledge-pipeline", options)
    run = await client.wait_run(started.run.workflow_run_id, RUN_S)
    return await fetch_outcome(client, run.workflow_run_id)


def artifact_of(outcome: Outcome, step_name: str, name: str) -> common_pb2.Artifact:
    step = outcome.step(step_name)
    assert step is not None
    return next(artifact for artifact in step.step_run.manifest.artifacts if artifact.name == name)


async def bytes_of(client: Client, artifact: common_pb2.Artifact) -> bytes:
    return b"".join([data async for data in content(client, artifact)])


def recompute(index: Path) -> dict[str, Any]:
    """Recall and MRR from the index file, by other SQL and other code than the pipeline's.

    A document counts by the best of its passages; of equals, the one with fewer passages comes first, then
    the one whose name does.
    """
    reciprocals: list[float] = []
    first = ten = 0
    with closing(sqlite3.connect(index)) as database:
        settings = dict(database.execute("select name, value from setting").fetchall())
        assert settings == {"tokenizer": "unicode61", "heading_weight": 1.0, "depth": 1}
        documents = database.execute("select document_id, name, title, passages from document").fetchall()
        order = {document_id: (passages, name) for document_id, name, _, passages in documents}
        holders: dict[int, list[int]] = {}
        for document_id, passage_id in database.execute(
            "select document_id, passage_id from document_passage"
        ):
            holders.setdefault(passage_id, []).append(document_id)
        for wanted, _, title, _ in documents:
            terms = sorted({term for term in re.split(r"[\W_]+", title) if term})
            best: dict[int, float] = {}
            if terms:
                asked = " OR ".join('"' + term + '"' for term in terms)
                hits = database.execute(
                    "select rowid, rank from passage_text where passage_text match ?", (asked,)
                )
                for passage_id, rank in hits:  # FTS5's rank: bm25 with all weights 1, smaller is better
                    for holder in holders[passage_id]:
                        best[holder] = min(rank, best.get(holder, 0.0))
            if wanted in best:
                mine = (best[wanted], *order[wanted])
                place = 1 + sum((score, *order[other]) < mine for other, score in best.items())
                first += place == 1
                ten += place <= 10
                reciprocals.append(1 / place)
    return {
        "queries": len(documents),
        "recall_at_1": first / len(documents),
        "recall_at_10": ten / len(documents),
        "mrr": sum(reciprocals) / len(documents),
    }


async def assert_figures_hold(client: Client, outcome: Outcome, tmp_path: Path) -> dict[str, Any]:
    index = tmp_path / "index.sqlite"
    index.write_bytes(await bytes_of(client, artifact_of(outcome, "index", "index")))
    computed = recompute(index)
    reported = json.loads(await bytes_of(client, artifact_of(outcome, "evaluate", "metrics")))
    for name, value in computed.items():
        assert reported[name] == pytest.approx(value, abs=1e-9), name
        assert outcome.output("evaluate")[name] == reported[name]
    assert reported["index"] == artifact_of(outcome, "index", "index").digest.sha256
    return computed


async def test_the_figures_of_the_language_reference_can_be_computed_again_from_its_index(
    client: Client, tmp_path: Path
) -> None:
    outcome = await run_pipeline(client, {})
    assert outcome.run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
    figures = await assert_figures_hold(client, outcome, tmp_path)
    assert figures["queries"] == outcome.output("collect")["documents"] > 50
    assert 0.3 < figures["recall_at_1"] < figures["mrr"] < figures["recall_at_10"] < 0.99


async def test_a_folder_of_mixed_files_is_read_whole_and_its_figures_hold(
    client: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    expected = write_library_heads(folder, 300)
    outcome = await run_pipeline(client, {"corpus": str(folder)})
    assert outcome.run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
    collected = outcome.output("collect")
    assert collected["documents"] == expected
    assert collected["decoded_with_replacement"] >= 1
    assert collected["skipped"] == {"empty": 1, "other_suffix": 1, "symbolic_link": 1}
    figures = await assert_figures_hold(client, outcome, tmp_path)
    assert figures["queries"] == expected
    assert 0.0 < figures["mrr"] < 1.0
    steps = {step.step_run.step_name: step.step_run for step in outcome.steps}
    assert steps["evaluate"].progress.metrics["queries"] == expected
    assert steps["adapt"].progress.fraction == 1.0


async def test_the_same_texts_give_the_same_artifacts_and_lineage_knows_both_runs(client: Client) -> None:
    first, second = await run_pipeline(client, {}), await run_pipeline(client, {"corpus": None})
    digests = [
        [(made.made_by, made.artifact.name, made.artifact.digest.sha256) for made in outcome.made()]
        for outcome in (first, second)
    ]
    assert digests[0] == digests[1]
    assert len(digests[0]) == 7
    corpus = artifact_of(first, "collect", "corpus")
    makers = {
        edge.workflow_run_id for edge in second.edges if edge.produced and edge.artifact == corpus.digest
    }
    assert {first.run.workflow_run_id, second.run.workflow_run_id} <= makers


async def test_each_artifact_names_what_made_it_and_what_used_it(client: Client) -> None:
    outcome = await run_pipeline(client, {})
    lineage = {f"{made.made_by}/{made.artifact.name}": made.used_by for made in outcome.made()}
    assert lineage == {
        "collect/corpus": ["clean"],
        "clean/documents": ["index", "adapt"],
        "index/index": ["evaluate"],
        "evaluate/metrics": ["adapt as baseline"],
        "evaluate/report": [],
        "adapt/model": [],
        "adapt/report": [],
    }


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"corpus": "/nowhere/at/all"}, "CORPUS_NOT_FOUND"),
        ({"korpus": "/tmp"}, "INPUT_INVALID"),
        (None, "INPUT_INVALID"),  # the definition refers to the run's input
        ({"max_file_bytes": "many"}, "INPUT_INVALID"),
    ],
)
async def test_a_run_that_cannot_work_fails_at_its_first_step_at_once(
    client: Client, options: object, code: str
) -> None:
    outcome = await run_pipeline(client, options)
    assert outcome.run.state == workflow_pb2.WORKFLOW_RUN_STATE_FAILED
    assert outcome.run.error.code == code
    states = {step.step_run.step_name: step.step_run for step in outcome.steps}
    assert states["collect"].state == workflow_pb2.STEP_RUN_STATE_TERMINAL_FAILED
    assert states["collect"].attempt == 1
    assert {name: step.reason for name, step in states.items() if name != "collect"} == dict.fromkeys(
        ("clean", "index", "evaluate", "adapt"), "UPSTREAM_FAILED"
    )
    assert outcome.made() == []
