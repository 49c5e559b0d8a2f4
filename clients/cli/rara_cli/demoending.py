"""How the demo ends: the lineage of its index, and what one changed parameter makes of a second run."""

from dataclasses import dataclass
from typing import Final

from rara_client import Client

from rara_cli.compare import Comparison, Verdict, compare
from rara_cli.compareload import load_pair
from rara_cli.demoresult import Outcome
from rara_cli.demosay import Narrator
from rara_cli.jsonview import Json
from rara_cli.lineage import Lineage, Start, lineage_lines, read_lineage
from rara_cli.lineagetree import cut
from rara_cli.runcompare import document, text_lines

# Of the second run. Only the index is built by it, so that the texts before it come out byte for byte again.
CHANGED: Final[Json] = {"tokenizer": "porter"}
UNTOUCHED: Final = ("collect", "clean")
# adapt tries both tokenizers anyway, so that few texts may leave it with the same model.
_EXPECTED: Final = {
    "collect": (Verdict.SAME_RESULT,),
    "clean": (Verdict.SAME,),
    "index": (Verdict.CAUSE,),
    "evaluate": (Verdict.CONSEQUENCE,),
    "adapt": (Verdict.CONSEQUENCE, Verdict.SAME_RESULT),
}
_COLUMNS: Final = 118
_DEPTH: Final = 10


@dataclass(frozen=True, slots=True)
class Ending:
    """lineage: of the index, in both directions. comparison: None where there was no second run."""

    lineage: Lineage
    comparison: Comparison | None

    def print(self, say: Narrator) -> None:
        say.heading("Where the index comes from, and what was made from it (rara artifact lineage RUN index)")
        for line in lineage_lines(self.lineage):
            say.plain(f"  {cut(line, _COLUMNS)}")
        if self.comparison is None:
            return
        changed = ", ".join(f"{name}={value}" for name, value in CHANGED.items())
        say.heading(f"The same pipeline with {changed} (rara run compare A B)")
        for line in text_lines(self.comparison, columns=_COLUMNS):
            say.plain(f"  {line}".rstrip())
        artifacts = [
            f"{name} {blob.sha256[:12]}"
            for step in UNTOUCHED
            for name, blob in self.comparison.b.artifacts.get(step, {}).items()
        ]
        say.plain(f"  {' and '.join(UNTOUCHED)} made the same bytes again: {', '.join(artifacts)}.")

    def faults(self) -> list[str]:
        """What of the comparison is not as it should be."""
        if self.comparison is None:
            return []
        found = {step.step_name: step.verdict for step in self.comparison.steps}
        return [
            f"step {name} compares as {found.get(name, 'missing')}"
            for name, verdicts in _EXPECTED.items()
            if found.get(name) not in verdicts
        ]

    def to_json(self) -> Json:
        return {
            "index_lineage": self.lineage.view(),
            "comparison": document(self.comparison) if self.comparison is not None else None,
        }


async def fetch_ending(client: Client, outcome: Outcome, second_run_id: str | None) -> Ending | None:
    """None where the run made no index."""
    digests = [made.artifact.digest.sha256 for made in outcome.made() if made.artifact.type == "index"]
    if not digests:
        return None
    lineage = await read_lineage(
        client, Start(sha256=digests[0]), ("upstream", "downstream"), depth=_DEPTH, limit=1000
    )
    comparison = None
    if second_run_id is not None:
        comparison = compare(*await load_pair(client, outcome.run.workflow_run_id, second_run_id))
    return Ending(lineage, comparison)
