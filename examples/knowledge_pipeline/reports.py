"""The figures as Markdown, for people."""

from knowledge_pipeline.adaptation import Comparison, Tried
from knowledge_pipeline.fulltext import Settings
from knowledge_pipeline.retrieval import MISSED, Scores


def evaluation_report(settings: Settings, scores: Scores, hardest: list[tuple[int, str]]) -> str:
    """hardest: rank and title of the documents that were found last or not at all."""
    asked = (
        f"Each of {scores.queries:,} documents was asked for once by its title, which is not in the index."
    )
    lines = [
        "# How well the index finds a document by its title",
        "",
        f"Index: {settings.label}. {asked}",
        "",
        "| | |",
        "| --- | --- |",
        f"| recall@1 | {scores.recall_at(1):.3f} |",
        f"| recall@10 | {scores.recall_at(10):.3f} |",
        f"| mean reciprocal rank | {scores.mrr:.3f} |",
        f"| not found at any rank | {scores.ranks.get(MISSED, 0):,} |",
    ]
    if hardest:
        lines += ["", "Hardest:", ""]
        lines += [f"- {_inline(title)}: {f'rank {rank}' if rank else 'not found'}" for rank, title in hardest]
    return "\n".join(lines) + "\n"


def adaptation_report(tried: list[Tried], chosen: Tried, held_out: Comparison, choosing_queries: int) -> str:
    gain = held_out.chosen.mrr - held_out.baseline.mrr
    compared = f"the best one was then compared with the defaults on {held_out.chosen.queries:,} other titles"
    lines = [
        "# Which settings find most",
        "",
        f"{len(tried)} settings were tried on {choosing_queries:,} titles; {compared}.",
        "",
        f"Chosen: {chosen.settings.label}",
        "",
        "| held-out half | recall@1 | recall@10 | MRR |",
        "| --- | --- | --- | --- |",
        _row("defaults", held_out.baseline),
        _row("chosen", held_out.chosen),
        "",
        f"MRR {gain:+.3f}: {held_out.better} documents moved up, {held_out.worse} down, {held_out.same} stayed.",
        "",
        "| tried | MRR on the choosing half |",
        "| --- | --- |",
    ]
    ranked = sorted(tried, key=lambda one: -one.mrr)
    lines += [f"| {one.settings.label} | {one.mrr:.4f} |" for one in ranked]
    return "\n".join(lines) + "\n"


def _row(name: str, scores: Scores) -> str:
    return f"| {name} | {scores.recall_at(1):.3f} | {scores.recall_at(10):.3f} | {scores.mrr:.3f} |"


def _inline(title: str) -> str:
    """A title comes from a file name: no mark-up in it may shape the report."""
    return "`" + " ".join(title.replace("`", "'").split()) + "`"
