"""Lineage as a graph in Mermaid's or Graphviz' language: artifacts as boxes, steps as rounded ones in their runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from rara.v1 import common_pb2, workflow_pb2

from rara_cli import words

_SHORT: Final = 12
# What Mermaid draws unless its settings are changed.
MERMAID_EDGES: Final = 500


@dataclass(slots=True)
class _Graph:
    """Lines of labels, by digest and by step; of runs the label and the steps. arrows: from, to, is solid."""

    artifacts: dict[str, list[str]] = field(default_factory=dict)
    steps: dict[str, list[str]] = field(default_factory=dict)
    runs: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    arrows: list[tuple[str, str, bool]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of nodes: a0, s0, ...

    def name(self, kind: str, key: str) -> str:
        return self.names.setdefault(key, f"{kind}{len(self.names)}")


def _graph(edges: Iterable[workflow_pb2.LineageEdge]) -> _Graph:
    graph = _Graph()
    seen = set()
    for edge in edges:
        digest, step, run = edge.artifact.sha256, edge.step_run_id, edge.workflow_run_id
        key = digest, step, edge.produced, edge.artifact_name
        if key in seen:  # up and down
            continue
        seen.add(key)
        label = [edge.artifact_name, edge.artifact_type, digest[:_SHORT]]
        # What its maker calls it; else what a user does.
        if edge.produced or not graph.artifacts.get(digest, [""])[0]:
            graph.artifacts[digest] = label
        if step not in graph.steps:
            graph.steps[step] = [edge.step_name, edge.kind]
            title = f"{edge.definition} v{edge.definition_version}, run {run}"
            graph.runs.setdefault(run, (title, []))[1].append(step)
        artifact, at = graph.name("a", digest), graph.name("s", step)
        graph.arrows.append((at, artifact, True) if edge.produced else (artifact, at, edge.declared))
    return graph


def mermaid(edges: Sequence[workflow_pb2.LineageEdge], start: common_pb2.Digest | None) -> str:
    """A flowchart; of more edges than Mermaid draws only the nearest."""
    graph = _graph(sorted(edges, key=lambda edge: edge.depth)[:MERMAID_EDGES])
    lines = ["flowchart LR"]
    for digest, label in graph.artifacts.items():
        lines.append(f'  {graph.names[digest]}["{_mermaid_label(label)}"]')
    for number, (title, steps) in enumerate(graph.runs.values()):
        lines.append(f'  subgraph r{number}["{_mermaid_label([title])}"]')
        lines.extend(f'    {graph.names[step]}(["{_mermaid_label(graph.steps[step])}"])' for step in steps)
        lines.append("  end")
    for tail, head, is_solid in dict.fromkeys(graph.arrows):
        lines.append(f"  {tail} {'-->' if is_solid else '-.->'} {head}")
    if start is not None and start.sha256 in graph.names:
        lines.append(f"  style {graph.names[start.sha256]} stroke-width:4px")
    if len(edges) > MERMAID_EDGES:
        lines.append(f"  %% {len(edges) - MERMAID_EDGES:,} edges more")
    return "\n".join(lines)


def dot(edges: Sequence[workflow_pb2.LineageEdge], start: common_pb2.Digest | None) -> str:
    """A digraph."""
    graph = _graph(edges)
    lines = ["digraph lineage {", "  rankdir=LR;", '  node [fontname="sans-serif"];']
    for digest, label in graph.artifacts.items():
        bold = ", penwidth=3" if start is not None and start.sha256 == digest else ""
        lines.append(f'  {graph.names[digest]} [shape=box, label="{_dot_label(label)}"{bold}];')
    for number, (title, steps) in enumerate(graph.runs.values()):
        lines.append(f'  subgraph cluster_{number} {{ label="{_dot_label([title])}";')
        lines.extend(
            f'    {graph.names[step]} [shape=box, style=rounded, label="{_dot_label(graph.steps[step])}"];'
            for step in steps
        )
        lines.append("  }")
    for tail, head, is_solid in dict.fromkeys(graph.arrows):
        lines.append(f"  {tail} -> {head}{'' if is_solid else ' [style=dashed]'};")
    lines.append("}")
    return "\n".join(lines)


def _mermaid_label(parts: Sequence[str]) -> str:
    """Everything but letters, digits and a few harmless signs as a numeric entity: nothing can end the label."""
    return "<br/>".join(
        "".join(
            char if char.isalnum() or char in " .,:_-/@+" else f"#{ord(char)};" for char in words.clean(part)
        )
        for part in parts
        if part
    )


def _dot_label(parts: Sequence[str]) -> str:
    return "\\n".join(words.clean(part).replace("\\", "\\\\").replace('"', '\\"') for part in parts if part)
