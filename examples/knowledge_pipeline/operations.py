"""The five operations: each reads artifacts, reports how far it is, and leaves artifacts."""

import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rara_executor import BlockingJob, Retryable, Terminal, operation

from knowledge_pipeline import adaptation, corpus, ledger, records, reports
from knowledge_pipeline.fulltext import TOKENIZERS, Builder, CleanDocument, CleanPassage, Index, Settings
from knowledge_pipeline.passages import split
from knowledge_pipeline.retrieval import HARDEST_KEPT, MISSED, Scores, halves, rank_of

REPORT_EVERY_S: Final = 0.25

# What a run's input may hold.
OPTIONS: Final[Mapping[str, object]] = {
    "type": ["object", "null"],
    "additionalProperties": False,
    "properties": {
        # A folder that the executor can read; without it, Python's language reference.
        "corpus": {"type": ["string", "null"], "minLength": 1},
        "max_file_bytes": {"type": "integer", "minimum": 1, "maximum": 256 * 1024 * 1024},
        # A file in which effects are written down; without it, there are none.
        "ledger": {"type": ["string", "null"], "minLength": 1},
        # How the index takes words apart; without it, as the settings' defaults say.
        "tokenizer": {"type": ["string", "null"], "enum": [*TOKENIZERS, None]},
    },
}


def _input(**properties: object) -> dict[str, object]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": sorted(properties),
        "properties": properties,
    }


COUNT: Final = {"type": "integer", "minimum": 0}


class Pace:
    """Lets a report through once in a while, so that a loop may offer one at each turn."""

    def __init__(self, every_s: float = REPORT_EVERY_S) -> None:
        self._every_s = every_s
        self._began = self._last = time.monotonic()

    def is_due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self._every_s:
            return False
        self._last = now
        return True

    def per_second(self, count: int) -> float:
        return count / max(time.monotonic() - self._began, 1e-6)


@operation("corpus.collect", version="1.0.0", input_schema=_input(options=OPTIONS))
def collect(job: BlockingJob) -> dict[str, object]:
    """Read all documents into one artifact, `corpus`, as they are."""
    options = job.input["options"] or {}
    folder = options.get("corpus")
    tally = corpus.Tally()
    pace = Pace()
    if folder is None:
        source, expected = corpus.LANGUAGE_REFERENCE, 0
        documents = corpus.read_language_reference(tally)
    else:
        source = folder
        files = _find_files(Path(folder), tally)
        expected = len(files)
        limit = options.get("max_file_bytes", corpus.MAX_FILE_BYTES)
        documents = corpus.read_files(Path(folder), files, limit, tally)

    path = job.scratch / "corpus.jsonl"
    with path.open("wb") as file:
        for document in documents:
            file.write(records.document_line(document))
            if pace.is_due():
                _report(job, tally.documents, expected, "documents read", bytes=tally.size_bytes)
    if tally.documents == 0:
        raise Terminal("CORPUS_EMPTY", f"no document in {source}", details={"skipped": tally.skipped})

    summary = {
        "documents": tally.documents,
        "bytes": tally.size_bytes,
        "decoded_with_replacement": tally.decoded_with_replacement,
        "skipped": tally.skipped,
        "source": source,
    }
    job.artifacts.put_file("corpus", path, type="dataset", media_type=records.MEDIA_TYPE, metadata=summary)
    _report(job, tally.documents, tally.documents, "documents read", bytes=tally.size_bytes)
    return summary


@operation("corpus.clean", version="1.0.0", input_schema=_input(documents=COUNT))
def clean(job: BlockingJob) -> dict[str, object]:
    """Cut the documents into clean passages, each text once, as the artifact `documents`."""
    expected = job.input["documents"]
    source = job.artifacts.open("corpus")
    pace = Pace()
    seen: set[str] = set()
    documents = passages = without_text = 0
    path = job.scratch / "documents.jsonl"
    with path.open("wb") as file:
        for document in records.read_corpus(source.path):
            parts = list(split(document.text, is_markdown=document.is_markdown))
            if parts:
                new = {part.sha256: part for part in parts if part.sha256 not in seen}
                seen.update(new)
                kept = tuple(CleanPassage(sha256, part.heading, part.text) for sha256, part in new.items())
                hashes = tuple(part.sha256 for part in parts)
                file.write(records.clean_line(CleanDocument(document.name, document.title, hashes, kept)))
                documents += 1
                passages += len(parts)
            else:
                without_text += 1
            if pace.is_due():
                _report(job, documents, expected, "documents cleaned", passages=len(seen))
    if documents == 0:
        raise Terminal("CORPUS_EMPTY", f"none of {expected} documents holds text")

    summary: dict[str, object] = {
        "documents": documents,
        "documents_without_text": without_text,
        "passages": len(seen),
        "duplicate_passages": passages - len(seen),
    }
    job.artifacts.put_file("documents", path, type="dataset", media_type=records.MEDIA_TYPE, metadata=summary)
    _report(job, documents, documents, "documents cleaned", passages=len(seen))
    return summary


@operation(
    "index.build", version="1.1.0", input_schema=_input(documents=COUNT, passages=COUNT, options=OPTIONS)
)
def index(job: BlockingJob) -> dict[str, object]:
    """Build the full-text index with the tokenizer that was asked for, as the artifact `index`."""
    expected = job.input["documents"]
    tokenizer = (job.input["options"] or {}).get("tokenizer")
    settings = Settings() if tokenizer is None else Settings(tokenizer)
    path = job.scratch / "index.sqlite"
    documents, passages = _build(job, job.artifacts.open("documents").path, path, settings, expected)
    if (documents, passages) != (expected, job.input["passages"]):
        raise Terminal("DOCUMENTS_INCOMPLETE", f"{documents} documents instead of {expected}")

    summary = {"documents": documents, "passages": passages, "settings": asdict(settings)}
    kept = job.artifacts.put_file(
        "index", path, type="index", media_type="application/vnd.sqlite3", metadata=summary
    )
    _report(job, documents, documents, "documents indexed", passages=passages, bytes=kept.size_bytes)
    return {**summary, "index": kept.digest}


@operation("index.evaluate", version="1.0.0", input_schema=_input(documents=COUNT, options=OPTIONS))
def evaluate(job: BlockingJob) -> dict[str, object]:
    """Ask for every document by its title; the figures are the artifacts `metrics` and `report`."""
    artifact = job.artifacts.open("index")
    _effect(job, "open-evaluation", {"index": artifact.digest})
    with Index(artifact.path) as built:
        titles = built.titles()
        if len(titles) != job.input["documents"]:
            raise Terminal("INDEX_INCOMPLETE", f"{len(titles)} documents in the index")
        scores, hardest = _ask_for_all(job, built, titles, artifact.digest)
        settings = built.settings

    figures: dict[str, object] = {
        "queries": scores.queries,
        "recall_at_1": scores.recall_at(1),
        "recall_at_10": scores.recall_at(10),
        "mrr": scores.mrr,
    }
    metrics = {**figures, "ranks": scores.as_json(), "settings": asdict(settings), "index": artifact.digest}
    job.artifacts.put_bytes(
        "metrics", _json(metrics), type="metrics", media_type="application/json", metadata=figures
    )
    report = reports.evaluation_report(settings, scores, hardest)
    job.artifacts.put_bytes("report", report.encode(), type="report", media_type="text/markdown")
    return figures


def _ask_for_all(
    job: BlockingJob, built: Index, titles: list[tuple[str, str]], digest: str
) -> tuple[Scores, list[tuple[int, str]]]:
    """The scores, and rank and title of the hardest. An earlier attempt's checkpoint says where to go on."""
    scores, hardest = Scores(), list[tuple[int, str]]()
    if job.checkpoint is not None and job.checkpoint["index"] == digest:
        scores = Scores.from_json(job.checkpoint["ranks"])
        hardest = [(rank, title) for rank, title in job.checkpoint["hardest"]]
        job.log.info("evaluation.resumed", queries=scores.queries)
    pace = Pace()
    for name, title in titles[scores.queries :]:
        rank = rank_of(name, built.search(title))
        scores.add(rank)
        if rank != 1:
            hardest = sorted([*hardest, (rank, title)], key=_hardness)[:HARDEST_KEPT]
        if pace.is_due() or scores.queries == len(titles):
            job.progress(
                scores.queries / len(titles),
                f"{scores.queries:,} of {len(titles):,} titles asked for",
                metrics={"queries": scores.queries, "mrr": scores.mrr, "recall_at_1": scores.recall_at(1)},
                checkpoint={"index": digest, "ranks": scores.as_json(), "hardest": hardest},
            )
    return scores, hardest


@operation("index.adapt", version="1.0.0", input_schema=_input(options=OPTIONS))
def adapt(job: BlockingJob) -> dict[str, object]:
    """Try all index settings and keep the best: the artifacts `model`, the settings, and `report`."""
    documents = job.artifacts.open("documents")
    defaults = Settings(**json.loads(job.artifacts.open("baseline").read_bytes())["settings"])
    _effect(job, "open-experiment", {"documents": documents.digest})
    with _Indexes(job, documents.path) as indexes:
        choosing, judging = halves(indexes.get(defaults).titles())
        choosing, judging = choosing[: adaptation.MAX_QUERIES], judging[: adaptation.MAX_QUERIES]
        tried = _try_all(job, indexes, choosing, documents.digest)
        chosen = adaptation.best(tried)
        held_out = adaptation.compare(
            judging, (indexes.get(defaults), defaults), (indexes.get(chosen.settings), chosen.settings)
        )

    summary: dict[str, object] = {
        "settings": asdict(chosen.settings),
        "tried": len(tried),
        "choosing_queries": len(choosing),
        "choosing_mrr": chosen.mrr,
        "held_out_queries": held_out.chosen.queries,
        "held_out_mrr": held_out.chosen.mrr,
        "held_out_recall_at_1": held_out.chosen.recall_at(1),
        "held_out_mrr_of_defaults": held_out.baseline.mrr,
    }
    job.artifacts.put_bytes("model", _json(summary), type="model", media_type="application/json")
    report = reports.adaptation_report(tried, chosen, held_out, len(choosing))
    job.artifacts.put_bytes("report", report.encode(), type="report", media_type="text/markdown")
    _effect(job, "publish-settings", summary)
    return summary


def _try_all(
    job: BlockingJob, indexes: "_Indexes", titles: list[tuple[str, str]], digest: str
) -> list[adaptation.Tried]:
    tried: list[adaptation.Tried] = []
    if job.checkpoint is not None and job.checkpoint["documents"] == digest:
        known = job.checkpoint["tried"]
        tried = [adaptation.Tried(Settings(**one["settings"]), one["mrr"]) for one in known]
        job.log.info("adaptation.resumed", tried=len(tried))
    settings_grid = adaptation.grid()
    for settings in settings_grid[len(tried) :]:
        scores = adaptation.score(indexes.get(settings), settings, titles)
        tried.append(adaptation.Tried(settings, scores.mrr))
        job.progress(
            len(tried) / len(settings_grid),
            f"{len(tried)} of {len(settings_grid)} settings tried",
            metrics={"tried": len(tried), "mrr": scores.mrr, "best_mrr": adaptation.best(tried).mrr},
            checkpoint={"documents": digest, "tried": [asdict(one) for one in tried]},
        )
    return tried


class _Indexes:
    """One index for each tokenizer, built when it is first asked for."""

    def __init__(self, job: BlockingJob, documents: Path) -> None:
        self._job = job
        self._documents = documents
        self._built: dict[str, Index] = {}

    def __enter__(self) -> "_Indexes":
        return self

    def __exit__(self, *_: object) -> None:
        for built in self._built.values():
            built.close()

    def get(self, settings: Settings) -> Index:
        if settings.tokenizer not in self._built:
            path = self._job.scratch / f"{settings.tokenizer}.sqlite"
            self._job.progress(message=f"building an index with {settings.tokenizer}")
            _build(self._job, self._documents, path, settings, expected=0)
            self._built[settings.tokenizer] = Index(path)
        return self._built[settings.tokenizer]


def _build(
    job: BlockingJob, documents: Path, path: Path, settings: Settings, expected: int
) -> tuple[int, int]:
    """Documents and passages that were indexed. expected: 0 where the step is about something else."""
    pace = Pace()
    count = 0
    with _sqlite_faults(), Builder(path, settings) as builder:
        for document in records.read_clean(documents):
            builder.add(document)
            count += 1
            if expected and pace.is_due():
                speed = pace.per_second(count)
                _report(job, count, expected, "documents indexed", documents_per_s=speed)
        builder.finish()
        return count, builder.passages


@contextmanager
def _sqlite_faults() -> Iterator[None]:
    try:
        yield
    except sqlite3.OperationalError as error:
        if "fts5" in str(error):
            raise Terminal("FULLTEXT_UNAVAILABLE", "this Python's SQLite has no FTS5") from error
        raise Retryable("INDEX_NOT_WRITTEN", str(error)) from error  # a full disk, for instance


def _find_files(folder: Path, tally: corpus.Tally) -> list[Path]:
    try:
        return corpus.find_files(folder, corpus.SUFFIXES, tally)
    except corpus.CorpusNotFound as error:
        raise Terminal("CORPUS_NOT_FOUND", str(error)) from error
    except corpus.CorpusTooLarge as error:
        raise Terminal("CORPUS_TOO_LARGE", str(error)) from error


def _effect(job: BlockingJob, name: str, values: dict[str, object]) -> None:
    """Write it into the ledger, if the run names one: once for the step, however many attempts it takes."""
    path = (job.input["options"] or {}).get("ledger")
    if path is None:
        return

    def write() -> dict[str, object]:
        return ledger.record(
            Path(path),
            idempotency_key=job.idempotency_key,
            effect=name,
            lease_token=job.lease_token,
            values=values,
        )

    try:
        job.once(name, write)
    except ledger.Superseded as error:
        raise Retryable("LEDGER_REFUSED", str(error)) from error
    except OSError as error:
        raise Retryable("LEDGER_UNREACHABLE", f"{path}: {error.strerror}") from error


def _hardness(found: tuple[int, str]) -> tuple[bool, int, str]:
    rank, title = found
    return rank != MISSED, -rank, title


def _report(job: BlockingJob, done: int, expected: int, what: str, **metrics: float) -> None:
    of = f" of {expected:,}" if expected else ""
    job.progress(
        min(1.0, done / expected) if expected else None,
        f"{done:,}{of} {what}",
        metrics={"documents": done, **metrics},
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
