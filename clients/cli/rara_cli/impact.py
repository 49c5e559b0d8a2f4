"""What an artifact's change would mean: the steps to run again, in order, and what they made."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

from rara.v1 import common_pb2, workflow_pb2
from rara_client import Client

from rara_cli import words
from rara_cli.answers import print_document, width
from rara_cli.jsonview import Json, dumps
from rara_cli.lineage import MAX_DEPTH, Start, read_lineage
from rara_cli.session import Session
from rara_cli.tables import Column, render

_SHORT: Final = 12
Edge = workflow_pb2.LineageEdge


@dataclass(frozen=True, slots=True)
class StepToRebuild:
    """A step that used the artifact or something made from it. order: from 1; a step comes after those it needs."""

    order: int
    first: Edge
    used: Sequence[Edge]
    makes_stale: Sequence[Edge]

    def view(self) -> Json:
        return {
            "order": self.order,
            "step_run_id": self.first.step_run_id,
            "step_name": self.first.step_name,
            "kind": self.first.kind,
            "workflow_run_id": self.first.workflow_run_id,
            "definition": self.first.definition,
            "definition_version": self.first.definition_version,
            "depth": self.first.depth,
            "used": [_artifact_view(edge) for edge in self.used],
            "makes_stale": [_artifact_view(edge) for edge in self.makes_stale],
        }


@dataclass(frozen=True, slots=True)
class Impact:
    """is_complete: else only the nearest steps are here."""

    artifact: common_pb2.Digest
    steps: Sequence[StepToRebuild]
    is_complete: bool

    @property
    def runs(self) -> Mapping[str, str]:
        """The runs of the steps, each with its definition, in the order of their first steps."""
        return {
            step.first.workflow_run_id: f"{step.first.definition} v{step.first.definition_version}"
            for step in self.steps
        }

    @property
    def stale(self) -> Mapping[str, Edge]:
        """By digest, what was made from the artifact."""
        return {
            edge.artifact.sha256: edge
            for step in self.steps
            for edge in step.makes_stale
            if edge.artifact.sha256 != self.artifact.sha256
        }

    def view(self) -> Json:
        """As one JSON document."""
        return {
            "artifact": {"sha256": self.artifact.sha256, "size_bytes": self.artifact.size_bytes},
            "is_complete": self.is_complete,
            "steps": [step.view() for step in self.steps],
            "runs": [
                {"workflow_run_id": run, "definition": definition.rpartition(" v")[0]}
                | {"definition_version": int(definition.rpartition(" v")[2])}
                for run, definition in self.runs.items()
            ],
            "stale": [_artifact_view(edge) for edge in self.stale.values()],
        }


async def read_impact(client: Client, start: Start) -> Impact:
    """All that was made from an artifact. Raises CommandError where no step made or used it."""
    found = await read_lineage(client, start, ["downstream"], depth=MAX_DEPTH)
    edges = found.edges["downstream"]
    goes_on = any(edge.depth == MAX_DEPTH and edge.produced for edge in edges)
    artifact = found.artifact or common_pb2.Digest(sha256=start.sha256)
    return Impact(artifact, in_order(edges, artifact.sha256), found.is_complete and not goes_on)


def in_order(edges: Sequence[Edge], changed: str) -> list[StepToRebuild]:
    """Each step after those whose outputs it used; a circle is entered at its nearest step.

    changed: the digest that is there already, whoever made it too.
    """
    used: dict[str, list[Edge]] = defaultdict(list)
    made: dict[str, list[Edge]] = defaultdict(list)
    makers: dict[str, set[str]] = defaultdict(set)
    for edge in edges:
        (made if edge.produced else used)[edge.step_run_id].append(edge)
        if edge.produced and edge.artifact.sha256 != changed:
            makers[edge.artifact.sha256].add(edge.step_run_id)
    needs = {
        step: {maker for edge in each for maker in makers[edge.artifact.sha256]} - {step}
        for step, each in used.items()
    }
    nearest = {step: min(each, key=lambda edge: edge.depth) for step, each in used.items()}
    ordered = _topological(needs, sorted(needs, key=lambda step: (nearest[step].depth, step)))
    return [
        StepToRebuild(order, nearest[step], used[step], made[step]) for order, step in enumerate(ordered, 1)
    ]


def _topological(needs: Mapping[str, set[str]], preferred: Sequence[str]) -> list[str]:
    """All steps, each after those that it needs, else as preferred; circles are broken."""
    rank = {step: number for number, step in enumerate(preferred)}
    dependants: dict[str, list[str]] = defaultdict(list)
    for step in preferred:
        for need in needs[step]:
            dependants[need].append(step)
    missing = {step: len(needs[step]) for step in preferred}
    ordered: dict[str, None] = {}

    def go_on_from(due: list[int]) -> None:
        """due: a heap of ranks."""
        while due:
            step = preferred[heappop(due)]
            ordered[step] = None
            for dependant in dependants[step]:
                missing[dependant] -= 1
                if not missing[dependant] and dependant not in ordered:
                    heappush(due, rank[dependant])

    go_on_from([rank[step] for step in preferred if not missing[step]])
    for step in preferred:  # what is left waits for circles
        while step not in ordered:
            go_on_from([min(rank[each] for each in _circle(step, needs, ordered))])
    return list(ordered)


def _circle(step: str, needs: Mapping[str, set[str]], ordered: Mapping[str, None]) -> list[str]:
    """Steps that need each other in a circle, found from one that waits for it."""
    path: dict[str, int] = {}
    while step not in path:
        path[step] = len(path)
        step = min(need for need in needs[step] if need not in ordered)
    return list(path)[path[step] :]


async def show_impact(session: Session, client: Client, start: Start, *, rows: int) -> None:
    """Print the impact of an artifact in the format that was asked for."""
    impact = await read_impact(client, start)
    match session.output:
        case "json":
            print_document(impact.view())
        case "jsonl":
            for step in impact.steps:
                print(dumps(step.view()))
        case "name":
            for step in impact.steps:
                print(step.first.step_run_id)
        case _:
            for line in impact_lines(session, impact, rows=rows):
                print(line)
    if not impact.is_complete:
        session.note(
            "there is more: only the nearest steps were read; ask for the impact of a stale artifact"
        )


def impact_lines(session: Session, impact: Impact, *, rows: int) -> list[str]:
    """A sentence, the steps as a table, and what is stale beside the artifact itself."""
    is_wide = session.output == "wide"
    digest = impact.artifact.sha256
    if not impact.steps:
        return [f"no step used {_cut(digest, is_wide)}: nothing is to be rebuilt"]
    steps, runs = _count(len(impact.steps), "step"), _count(len(impact.runs), "run")
    lines = [
        f"{_cut(digest, is_wide)} was used, itself or what was made from it, by {steps} of {runs}",
        f"{_count(len(impact.stale), 'artifact')} would be stale",
        "",
    ]
    columns: list[Column[StepToRebuild]] = [
        Column("REBUILD", lambda step: str(step.order), is_number=True),
        Column("STEP", lambda step: step.first.step_name),
        Column("KIND", lambda step: step.first.kind),
        Column("DEFINITION", lambda step: f"{step.first.definition} v{step.first.definition_version}"),
        Column("RUN", lambda step: step.first.workflow_run_id, is_whole=True),
        Column("USED", lambda step: _names(step.used, is_wide)),
        Column("MAKES STALE", lambda step: _names(step.makes_stale, is_wide)),
    ]
    shown = impact.steps[:rows]
    lines.extend(render(shown, columns, width=width(session), in_color=session.in_color))
    if len(impact.steps) > rows:
        lines.append(f"… {len(impact.steps) - rows:,} more rows: --rows {len(impact.steps)}")
    return lines


def _names(edges: Sequence[Edge], is_wide: bool) -> str:
    return ", ".join(
        words.clean(f"{edge.artifact_name} {_cut(edge.artifact.sha256, is_wide)}".lstrip()) for edge in edges
    )


def _cut(sha256: str, is_wide: bool) -> str:
    return sha256 if is_wide else sha256[:_SHORT]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _artifact_view(edge: Edge) -> Json:
    return {
        "name": edge.artifact_name,
        "sha256": edge.artifact.sha256,
        "size_bytes": edge.artifact.size_bytes,
        "type": edge.artifact_type,
    }
