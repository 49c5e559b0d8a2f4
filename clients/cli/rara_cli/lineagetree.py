"""Lineage as a tree of lines: artifacts, and below each the steps that made or used it, in turn."""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rara.v1 import common_pb2, workflow_pb2
from rich.cells import cell_len, set_cell_size

from rara_cli import words

_SHORT: Final = 12
_CHILDREN: Final = 25  # of one node


@dataclass(frozen=True, slots=True)
class _Node:
    """An artifact that `edge` led to (None: where the tree begins), or a step with its edge to what is above."""

    is_step: bool
    what: str
    edge: workflow_pb2.LineageEdge | None
    above: tuple[str, str] = ("", "")  # of an artifact: the step, and the artifact above that


class LineageTree:
    """Each artifact's steps are shown once, below where the artifact is nearest; elsewhere a word points there."""

    def __init__(
        self, edges: Sequence[workflow_pb2.LineageEdge], *, upstream: bool, depth: int, is_wide: bool = False
    ) -> None:
        self._upstream = upstream
        self._depth = depth
        self._is_wide = is_wide
        # How a walk leaves an artifact, and how it leaves a step.
        self._to_steps: dict[str, list[workflow_pb2.LineageEdge]] = defaultdict(list)
        self._from_steps: dict[str, list[workflow_pb2.LineageEdge]] = defaultdict(list)
        for edge in sorted(edges, key=lambda edge: (edge.step_run_id, edge.artifact_name)):
            if edge.produced == upstream:
                self._to_steps[edge.artifact.sha256].append(edge)
            else:
                self._from_steps[edge.step_run_id].append(edge)
        self._place: dict[str, tuple[str, str]] = {}  # of artifacts: below which step, below which artifact
        self._opened: set[str] = set()

    def of_artifact(self, digest: common_pb2.Digest) -> Iterator[tuple[str, str]]:
        """Pairs of indentation and text; the first is the artifact itself."""
        edges = self._to_steps.get(digest.sha256, [])
        self._place[digest.sha256] = ("", "")
        self._opened.add(digest.sha256)
        self._lay_out([_Node(False, digest.sha256, None)])
        if not edges:
            nobody = "made by no known step" if self._upstream else "used by no step yet"
            yield "", f"{self._artifact_text('', digest, '')}  ({nobody})"
            return
        yield "", self._artifact_text(edges[0].artifact_name, digest, edges[0].artifact_type)
        yield from self._below([_Node(True, edge.step_run_id, edge) for edge in edges])

    def of_run(self, workflow_run_id: str) -> Iterator[tuple[str, str]]:
        """The same of a run: below it those of its steps that none of its others leads to."""
        own = [step for step, edges in self._from_steps.items() if any(edge.depth == 1 for edge in edges)]
        led_to = {edge.step_run_id for edges in self._to_steps.values() for edge in edges}
        roots = [_Node(True, step, None) for step in own if step not in led_to]
        reached = self._lay_out(roots)
        for step in own:  # circles, which nothing leads to
            if step not in reached:
                roots.append(_Node(True, step, None))
                reached |= self._lay_out(roots[-1:])
        yield "", f"run {workflow_run_id}: what {'went into' if self._upstream else 'came of'} it"
        yield from self._below(roots)

    def _lay_out(self, roots: Sequence[_Node]) -> set[str]:
        """Give each artifact its nearest place, breadth first. Returns the steps that are reached."""
        queue = deque(roots)
        steps: set[str] = set()
        while queue:
            node = queue.popleft()
            if node.is_step:
                steps.add(node.what)
            for child in self._children(node):
                if child.is_step:
                    queue.append(child)
                elif child.what not in self._place:
                    self._place[child.what] = child.above
                    queue.append(child)
        return steps

    def _children(self, node: _Node) -> list[_Node]:
        if not node.is_step:
            return [_Node(True, edge.step_run_id, edge) for edge in self._to_steps.get(node.what, ())]
        above = node.what, node.edge.artifact.sha256 if node.edge is not None else ""
        return [
            _Node(False, edge.artifact.sha256, edge, above)
            for edge in self._from_steps.get(node.what, ())
            if node.edge is None or self._leads_on(node.edge, edge)
        ]

    def _leads_on(self, to_step: workflow_pb2.LineageEdge, from_step: workflow_pb2.LineageEdge) -> bool:
        made, used = (to_step, from_step) if self._upstream else (from_step, to_step)
        origins = {digest.sha256 for digest in made.derived_from}
        return not origins or used.artifact.sha256 in origins

    def _below(self, roots: Sequence[_Node]) -> Iterator[tuple[str, str]]:
        """Depth first, without recursion: paths may be long."""
        stack: list[tuple[str, _Node | int, bool, str]] = []
        self._push(stack, roots, "", "")
        while stack:
            indent, node, is_last, run = stack.pop()
            here = indent + ("└─ " if is_last else "├─ ")
            if isinstance(node, int):
                yield here, f"… {node:,} more"
                continue
            children = self._children(node)
            if node.is_step:
                edge = node.edge or self._from_steps[node.what][0]
                yield here, self._step_text(edge, is_root=node.edge is None, run=run)
                run = edge.workflow_run_id
            else:
                text, is_open = self._leaf_or_branch(node, bool(children))
                yield here, text
                if not is_open:
                    continue
            self._push(stack, children, indent + ("   " if is_last else "│  "), run)

    def _push(
        self,
        stack: list[tuple[str, _Node | int, bool, str]],
        nodes: Sequence[_Node],
        indent: str,
        run: str,
    ) -> None:
        shown: list[_Node | int] = list(nodes[:_CHILDREN])
        if len(nodes) > _CHILDREN:
            shown.append(len(nodes) - _CHILDREN)
        last = len(shown) - 1
        stack.extend((indent, shown[index], index == last, run) for index in range(last, -1, -1))

    def _leaf_or_branch(self, node: _Node, has_steps: bool) -> tuple[str, bool]:
        """The line of an artifact, and whether its steps follow."""
        edge = node.edge
        assert edge is not None  # noqa: S101 - only what a tree begins with has none
        text = self._artifact_text(edge.artifact_name, edge.artifact, edge.artifact_type)
        if not edge.declared:
            text += "  (read at run time)"
        if not has_steps:
            if edge.depth >= self._depth:
                return f"{text}  (depth {self._depth}: not followed)", False
            return (f"{text}  (made by no known step)" if self._upstream else text), False
        if node.what in self._opened:
            return f"{text}  (see above)", False
        if self._place.get(node.what) != node.above:
            return f"{text}  (see below)", False
        self._opened.add(node.what)
        return text, True

    def _artifact_text(self, name: str, digest: common_pb2.Digest, kind: str) -> str:
        sha256 = digest.sha256 if self._is_wide else digest.sha256[:_SHORT]
        parts = (name, sha256, kind, words.size_text(digest.size_bytes))
        return "  ".join(words.clean(part) for part in parts if part)

    def _step_text(self, edge: workflow_pb2.LineageEdge, *, is_root: bool, run: str) -> str:
        verb = (
            "step" if is_root else "made by" if self._upstream else "used by" if edge.declared else "read by"
        )
        text = f"{verb} {edge.step_name} ({edge.kind})"
        if edge.workflow_run_id != run:
            text += f"  {edge.definition} v{edge.definition_version}, run {edge.workflow_run_id}"
        return words.clean(text)


def tree_lines(
    tree: LineageTree, artifact: common_pb2.Digest | None, workflow_run_id: str, rows: int
) -> list[str]:
    """At most `rows` lines, and one that says how many there would be."""
    pairs = tree.of_artifact(artifact) if artifact is not None else tree.of_run(workflow_run_id)
    lines: list[str] = []
    more = 0
    for indent, text in pairs:
        if len(lines) < rows:
            lines.append(indent + text)
        else:
            more += 1
    if more:
        lines.append(f"… {more:,} more rows: --rows {len(lines) + more}")
    return lines


def cut(line: str, width: int | None) -> str:
    """As much of a line as a terminal shows."""
    if width is None or cell_len(line) <= width:
        return line
    return set_cell_size(line, width - 1) + "…"
