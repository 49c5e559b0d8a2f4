"""The operations one by one, and as the definition chains them: artifacts, figures, resumption, effects."""

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from knowledge_pipeline import DEFINITION_FILE, GO_DEFINITION_FILE, ledger, operations, records
from knowledge_pipeline.fulltext import Builder, Index, Settings
from rara_client.definitions import load_definition
from rara_executor import BlockingJob, Terminal
from rara_executor.registry import DEFAULT
from support.local_job import Killed, LocalStep, StoredArtifact, as_input

WORDS = ["red", "green", "blue", "amber", "violet", "black", "white", "grey", "brown", "pink", "teal", "gold"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty texts with a word of their own each, their name, that half of them do not mention."""
    root = tmp_path / "texts"
    root.mkdir()
    for number in range(40):
        subject = f"{WORDS[number % 12]}{WORDS[(number * 5) % 12]}{number}"
        says = f"All about {subject} is here. " if number % 2 else ""
        (root / f"{subject}.md").write_text(
            f"# Chapter {number}\n\n{says}It goes with {WORDS[number % 7]}.\n\nA line that all of them share.\n"
        )
    return root


def chain(tmp_path: Path, options: dict[str, object] | None) -> dict[str, tuple[Any, LocalStep]]:
    """Output and step of each operation, in the order and with the bindings of the definition."""
    done: dict[str, tuple[Any, LocalStep]] = {}

    def run(
        name: str, handler: Callable[[BlockingJob], Any], input_: object, **inputs: StoredArtifact
    ) -> dict[str, Any]:
        bound = {bound_name: as_input(stored, bound_name) for bound_name, stored in inputs.items()}
        step = LocalStep(tmp_path / name, input_, bound)
        done[name] = step.run(handler), step
        output: dict[str, Any] = done[name][0]
        return output

    def made(step: str, name: str) -> StoredArtifact:
        return done[step][1].outputs[name]

    out = run("collect", operations.collect, {"options": options})
    out = run("clean", operations.clean, {"documents": out["documents"]}, corpus=made("collect", "corpus"))
    counts = {"documents": out["documents"], "passages": out["passages"], "options": options}
    out = run("index", operations.index, counts, documents=made("clean", "documents"))
    asked = {"documents": out["documents"], "options": options}
    run("evaluate", operations.evaluate, asked, index=made("index", "index"))
    run(
        "adapt",
        operations.adapt,
        {"options": options},
        documents=made("clean", "documents"),
        baseline=made("evaluate", "metrics"),
    )
    return done


def test_the_whole_chain_measures_what_an_index_of_the_language_reference_finds(tmp_path: Path) -> None:
    done = chain(tmp_path, None)
    collected, cleaned, figures = done["collect"][0], done["clean"][0], done["evaluate"][0]
    assert collected["documents"] == cleaned["documents"] == figures["queries"] > 50
    assert cleaned["duplicate_passages"] > 0
    assert 0.3 < figures["recall_at_1"] < figures["recall_at_10"] < 0.99  # neither broken nor given away
    assert figures["recall_at_1"] < figures["mrr"] < figures["recall_at_10"]
    adapted = done["adapt"][0]
    assert adapted["tried"] == 12
    assert adapted["choosing_queries"] + adapted["held_out_queries"] == figures["queries"]
    assert adapted["choosing_mrr"] >= adapted["held_out_mrr_of_defaults"] * 0.5
    types = {
        f"{name}/{artifact}": stored.info.type
        for name, (_, step) in done.items()
        for artifact, stored in step.outputs.items()
    }
    assert types == {
        "collect/corpus": "dataset",
        "clean/documents": "dataset",
        "index/index": "index",
        "evaluate/metrics": "metrics",
        "evaluate/report": "report",
        "adapt/model": "model",
        "adapt/report": "report",
    }


def test_each_step_reports_its_last_count_and_gives_its_artifact_metadata(
    tmp_path: Path, folder: Path
) -> None:
    done = chain(tmp_path, {"corpus": str(folder)})
    last = {name: step.progress[-1] for name, (_, step) in done.items()}
    assert {name: progress.fraction for name, progress in last.items()} == dict.fromkeys(done, 1.0)
    assert last["collect"].message == "40 of 40 documents read"
    assert last["evaluate"].message == "40 of 40 titles asked for"
    assert last["adapt"].metrics["tried"] == 12
    assert done["collect"][1].outputs["corpus"].metadata == {
        "documents": 40,
        "bytes": sum(path.stat().st_size for path in folder.iterdir()),
        "decoded_with_replacement": 0,
        "skipped": {},
        "source": str(folder),
    }
    assert done["index"][1].outputs["index"].metadata["passages"] == done["clean"][0]["passages"]


def test_all_documents_stay_findable_though_they_share_a_passage(tmp_path: Path, folder: Path) -> None:
    done = chain(tmp_path, {"corpus": str(folder)})
    assert done["clean"][0]["duplicate_passages"] > 0
    with Index(done["index"][1].outputs["index"].path) as built:
        assert len(built.search("share")) == 40


def test_the_tokenizer_is_the_index_s_alone(tmp_path: Path, folder: Path) -> None:
    plain = chain(tmp_path / "plain", {"corpus": str(folder)})
    stemmed = chain(tmp_path / "stemmed", {"corpus": str(folder), "tokenizer": "porter"})
    assert stemmed["index"][0]["settings"] == {"tokenizer": "porter", "heading_weight": 1.0, "depth": 1}
    made = {
        (step, name): (stored.path.read_bytes(), stemmed[step][1].outputs[name].path.read_bytes())
        for step in ("collect", "clean", "index")
        for name, stored in plain[step][1].outputs.items()
    }
    assert {where: one == other for where, (one, other) in made.items()} == {
        ("collect", "corpus"): True,
        ("clean", "documents"): True,
        ("index", "index"): False,
    }


def test_an_identical_copy_costs_no_passage_and_is_found_too(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    for name in ("one", "two", "three"):
        (root / f"{name}.txt").write_text("the very same words\n")
    done = chain(tmp_path, {"corpus": str(root)})
    assert done["clean"][0] == {
        "documents": 3,
        "documents_without_text": 0,
        "passages": 1,
        "duplicate_passages": 2,
    }
    with Index(done["index"][1].outputs["index"].path) as built:
        assert built.search("same") == ["one.txt", "three.txt", "two.txt"]


def test_running_a_step_again_gives_the_same_bytes(tmp_path: Path, folder: Path) -> None:
    digests = []
    for name in ("first", "second"):
        done = chain(tmp_path / name, {"corpus": str(folder)})
        digests.append(
            {
                f"{step_name}/{artifact}": stored.info.sha256
                for step_name, (_, step) in done.items()
                for artifact, stored in step.outputs.items()
            }
        )
    assert digests[0] == digests[1]


def test_a_killed_evaluation_goes_on_where_its_checkpoint_was(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations.Pace, "is_due", lambda _self: True)
    done = chain(tmp_path, {"corpus": str(folder)})
    whole, step = done["evaluate"]
    again = LocalStep(tmp_path / "again", step.input, step.inputs)
    with pytest.raises(Killed):
        again.run(operations.evaluate, kill_after=15)
    assert json.loads(again.checkpoint or b"")["ranks"] != {}
    asked: list[str] = []
    search = Index.search

    def note_and_search(self: Index, text: str) -> list[str]:
        asked.append(text)
        return search(self, text)

    monkeypatch.setattr(Index, "search", note_and_search)
    assert again.run(operations.evaluate) == whole
    assert len(asked) == 40 - 15
    assert again.outputs["report"].info.sha256 == step.outputs["report"].info.sha256
    assert again.outputs["metrics"].info.sha256 == step.outputs["metrics"].info.sha256


def test_a_checkpoint_of_another_index_is_not_taken_up(tmp_path: Path, folder: Path) -> None:
    whole, step = chain(tmp_path, {"corpus": str(folder)})["evaluate"]
    stale = json.dumps({"index": "0" * 64, "ranks": {"1": 39}, "hardest": []}).encode()
    again = LocalStep(tmp_path / "again", step.input, step.inputs, checkpoint=stale)
    assert again.run(operations.evaluate) == whole


def test_a_killed_adaptation_repeats_no_effect_and_no_setting(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, object] = {"corpus": str(folder), "ledger": str(tmp_path / "ledger.jsonl")}
    whole, step = chain(tmp_path, options)["adapt"]
    path = tmp_path / "second-ledger.jsonl"
    again = LocalStep(tmp_path / "again", {"options": {**options, "ledger": str(path)}}, step.inputs)
    with pytest.raises(Killed):
        again.run(operations.adapt, kill_after=7)
    assert [entry["effect"] for entry in ledger.entries(path)] == ["open-experiment"]
    before = len(again.progress)
    assert again.run(operations.adapt) == whole
    assert [(entry["effect"], entry["lease_token"]) for entry in ledger.entries(path)] == [
        ("open-experiment", 101),
        ("publish-settings", 102),
    ]
    tried = [progress for progress in again.progress[before:] if progress.message.endswith("settings tried")]
    assert len(tried) == 12 - 6  # one of the seven reports was about the index


def test_without_a_ledger_there_are_no_effects(tmp_path: Path, folder: Path) -> None:
    done = chain(tmp_path, {"corpus": str(folder)})
    assert all(step.effects == {} for _, step in done.values())


def test_an_effect_is_recorded_under_its_name(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    done = chain(tmp_path, {"corpus": str(folder), "ledger": str(path)})
    assert json.loads(done["evaluate"][1].effects["open-evaluation"]) == {
        "number": 1,
        "effect": "open-evaluation",
    }
    assert set(done["adapt"][1].effects) == {"open-experiment", "publish-settings"}


@pytest.mark.parametrize(
    ("name", "code"),
    [("missing", "CORPUS_NOT_FOUND"), ("blank", "CORPUS_EMPTY"), ("pictures", "CORPUS_EMPTY")],
)
def test_a_folder_without_documents_ends_the_run_at_its_first_step(
    tmp_path: Path, name: str, code: str
) -> None:
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "a.txt").write_text("\n\n")
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"png")
    step = LocalStep(tmp_path / "step", {"options": {"corpus": str(tmp_path / name)}})
    with pytest.raises(Terminal) as caught:
        step.run(operations.collect)
    assert (caught.value.code, caught.value.retryable) == (code, False)
    assert step.outputs == {}


def test_documents_of_markup_alone_leave_nothing_to_index(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    (root / "a.md").write_text("# Only a heading\n")
    collect = LocalStep(tmp_path / "collect", {"options": {"corpus": str(root)}})
    collect.run(operations.collect)
    clean = LocalStep(tmp_path / "clean", {"documents": 1}, collect.outputs)
    with pytest.raises(Terminal, match="none of 1 documents holds text"):
        clean.run(operations.clean)


def test_an_index_that_lacks_documents_is_not_evaluated(tmp_path: Path, folder: Path) -> None:
    _, step = chain(tmp_path, {"corpus": str(folder)})["evaluate"]
    wrong = LocalStep(tmp_path / "wrong", {"documents": 41, "options": None}, step.inputs)
    with pytest.raises(Terminal) as caught:
        wrong.run(operations.evaluate)
    assert caught.value.code == "INDEX_INCOMPLETE"


def test_a_python_without_fts5_is_told_so(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = chain(tmp_path, {"corpus": str(folder)})
    step = done["index"][1]

    def no_fts5(_self: object, _path: Path, _settings: Settings) -> None:
        raise sqlite3.OperationalError("no such module: fts5")

    monkeypatch.setattr(Builder, "__init__", no_fts5)
    with pytest.raises(Terminal) as caught:
        LocalStep(tmp_path / "again", step.input, step.inputs).run(operations.index)
    assert caught.value.code == "FULLTEXT_UNAVAILABLE"


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (None, True),
        ({}, True),
        ({"corpus": None, "ledger": None}, True),
        ({"corpus": "/texts", "max_file_bytes": 1}, True),
        ({"corpus": ""}, False),
        ({"corpus": ["/texts"]}, False),
        ({"folder": "/texts"}, False),
        ({"max_file_bytes": 0}, False),
        ({"tokenizer": "porter"}, True),
        ({"tokenizer": "trigram"}, False),
        ("/texts", False),
    ],
)
def test_the_first_step_refuses_input_that_no_step_understands(options: object, fits: bool) -> None:
    schema = DEFAULT.get("corpus.collect", "1.0.0")
    assert schema is not None
    assert jsonschema_rs.is_valid(dict(schema.input_schema or {}), {"options": options}) is fits


def test_the_pipeline_in_both_languages_differs_in_the_language_of_one_step_alone() -> None:
    expected = load_definition(DEFINITION_FILE)
    expected.definition += "-go"
    (clean,) = (step for step in expected.steps if step.step_name == "clean")
    clean.executor_kind = "go"
    assert load_definition(GO_DEFINITION_FILE) == expected


def test_the_definition_names_the_operations_that_exist_and_binds_what_they_open() -> None:
    definition = load_definition(DEFINITION_FILE)
    offered = {
        operation.kind: operation
        for operation in DEFAULT.all()
        if operation.kind.startswith(("corpus.", "index."))
    }
    assert {step.kind for step in definition.steps} == offered.keys()
    assert [step.step_name for step in definition.steps] == ["collect", "clean", "index", "evaluate", "adapt"]
    bound = {
        step.step_name: [(b.name, b.from_step, b.from_name or b.name) for b in step.input_artifacts]
        for step in definition.steps
    }
    assert bound == {
        "collect": [],
        "clean": [("corpus", "collect", "corpus")],
        "index": [("documents", "clean", "documents")],
        "evaluate": [("index", "index", "index")],
        "adapt": [("documents", "clean", "documents"), ("baseline", "evaluate", "metrics")],
    }
    for step in definition.steps:
        operation = offered[step.kind]
        assert operation.version.split(".")[: len(step.kind_version.split("."))] == step.kind_version.split(
            "."
        )
        schema = operation.input_schema or {}
        assert set(json.loads(step.input_template.data)) == set(schema["required"])  # type: ignore[call-overload]  # a schema is plain JSON


def test_records_keep_lines_apart_whatever_is_in_them(tmp_path: Path) -> None:
    root = tmp_path / "texts"
    root.mkdir()
    (root / "odd\u2028name.txt").write_text("line\u2028separator \u0085 and \r\n \v \x1c more")
    collect = LocalStep(tmp_path / "collect", {"options": {"corpus": str(root)}})
    assert collect.run(operations.collect)["documents"] == 1
    (document,) = records.read_corpus(collect.outputs["corpus"].path)
    assert document.name == "odd\u2028name.txt"
    assert document.text == "line\u2028separator \u0085 and \r\n \v \x1c more"
