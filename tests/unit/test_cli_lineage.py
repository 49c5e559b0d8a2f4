"""Lineage as people see it: trees, graphs, and the order in which steps are to be rebuilt."""

import re
from collections.abc import Sequence

import pytest
from rara.v1 import common_pb2, workflow_pb2
from rara_cli.impact import in_order
from rara_cli.lineagegraph import MERMAID_EDGES, dot, mermaid
from rara_cli.lineagetree import LineageTree, cut, tree_lines
from support.lineage_edges import OTHER, RUN, digest, edges_of

Edges = Sequence[workflow_pb2.LineageEdge]


def sha(word: str) -> str:
    return digest(word).sha256[:12]


def tree(edges: Edges, start: str, *, upstream: bool, depth: int = 10, rows: int = 100) -> list[str]:
    """start: a word, or a run."""
    built = LineageTree(edges, upstream=upstream, depth=depth)
    artifact = None if start in (RUN, OTHER) else digest(start)
    return tree_lines(built, artifact, start, rows)


def test_upstream_shows_what_made_each_artifact_and_where_it_ends() -> None:
    edges = [
        *edges_of("adapt", 1, uses=["corpus", "base"], sees=["stop"], makes=["model"], run=OTHER),
        *edges_of("clean", 2, uses=["raw"], makes=["corpus"]),
        *edges_of("collect", 3, makes=["raw"]),
    ]
    assert tree(edges, "model", upstream=True) == [
        f"model  {sha('model')}  dataset  500 B",
        f"└─ made by adapt (do.adapt)  nightly v3, run {OTHER}",
        f"   ├─ {sha('stop')}  dataset  400 B  (read at run time)  (made by no known step)",
        f"   ├─ base  {sha('base')}  dataset  400 B  (made by no known step)",
        f"   └─ corpus  {sha('corpus')}  dataset  600 B",
        f"      └─ made by clean (do.clean)  nightly v3, run {RUN}",
        f"         └─ raw  {sha('raw')}  dataset  300 B",
        "            └─ made by collect (do.collect)",
    ]
    near = edges[:4]
    assert tree(near, "model", upstream=True, depth=1)[-1].endswith("600 B  (depth 1: not followed)")
    assert tree([], "model", upstream=True) == [f"{sha('model')}  500 B  (made by no known step)"]
    assert tree(edges, "model", upstream=True, rows=3) == [
        *tree(edges, "model", upstream=True)[:3],
        "… 5 more rows: --rows 8",
    ]


def test_an_artifact_is_opened_once_where_it_is_nearest() -> None:
    edges = [
        *edges_of("long", 1, uses=["a"], makes=["b"]),
        *edges_of("short", 1, uses=["a"], makes=["c"]),
        *edges_of("twice", 1, uses=["a"], makes=["c"]),
        *edges_of("on", 2, uses=["b"], makes=["c"]),
        *edges_of("end", 2, uses=["c"], makes=["a"]),
    ]
    lines = tree(edges, "a", upstream=False)
    text = "\n".join(lines)
    assert len([line for line in lines if "used by end" in line]) == 1
    assert len([line for line in lines if line.endswith(("(see above)", "(see below)"))]) == 3
    assert f"a  {sha('a')}  dataset  100 B  (see above)" in text  # the circle
    assert tree([], "a", upstream=False) == [f"{sha('a')}  100 B  (used by no step yet)"]


def test_an_output_stands_below_the_inputs_that_it_came_from_alone() -> None:
    edges = edges_of("split", 1, uses=["a", "b"], makes={"x": ["a"], "y": ["b"], "z": []})
    # As if both were reached: each shows only its own.
    up = tree(edges, "x", upstream=True)
    assert [line.strip(" └├─│").split()[0] for line in up] == ["x", "made", "a"]
    down = tree(edges, "b", upstream=False)
    assert [line.strip(" └├─│").split()[0] for line in down] == ["b", "used", "y", "z"]


def test_a_run_begins_with_the_steps_that_no_other_leads_to() -> None:
    edges = [
        *edges_of("index", 1, uses=["corpus"]),
        *edges_of("clean", 1, uses=["raw"]),
        *edges_of("clean", 2, makes=["corpus"]),
    ]
    assert tree(edges, RUN, upstream=True) == [
        f"run {RUN}: what went into it",
        f"└─ step index (do.index)  nightly v3, run {RUN}",
        f"   └─ corpus  {sha('corpus')}  dataset  600 B",
        "      └─ made by clean (do.clean)",
        f"         └─ raw  {sha('raw')}  dataset  300 B  (made by no known step)",
    ]
    circle = [
        *edges_of("one", 1, makes=["x"]), *edges_of("one", 2, uses=["y"]),
        *edges_of("two", 1, makes=["y"]), *edges_of("two", 2, uses=["x"]),
    ]  # fmt: skip
    lines = tree(circle, RUN, upstream=False)
    assert lines[0] == f"run {RUN}: what came of it"
    assert sum("step " in line for line in lines) >= 1
    assert {"x", "y"} <= {line.strip(" └├─│").split()[0] for line in lines}


def test_many_children_and_long_paths_stay_readable_and_end() -> None:
    hot = [edge for n in range(300) for edge in edges_of(f"u{n:03}", 1, uses=["hot"])]
    lines = tree(hot, "hot", upstream=False)
    assert len(lines) == 27
    assert lines[-1] == "└─ … 275 more"
    chain = [
        edge for n in range(1200) for edge in edges_of(f"s{n}", n + 1, uses=[f"w{n}"], makes=[f"w{n + 1}"])
    ]
    assert len(tree(chain, "w0", upstream=False, depth=9999, rows=10_000)) == 2401


@pytest.mark.parametrize(("width", "shown"), [(None, "├─ 文文文 abc"), (12, "├─ 文文文 a…"), (9, "├─ 文文…")])
def test_lines_are_cut_to_the_terminal(width: int | None, shown: str) -> None:
    assert cut("├─ 文文文 abc", width).replace(" …", "…") == shown


# ---------------------------------------------------------------- graphs

NASTY = 'a"b]; x --> y <br/> #35; `\\"\n%% "\u202e'


def nasty() -> list[workflow_pb2.LineageEdge]:
    edges = edges_of("s", 1, uses=["in"], sees=["seen"], makes=["out"])
    for edge in edges:
        edge.artifact_name = edge.artifact_name and NASTY
        edge.step_name = edge.kind = edge.definition = edge.artifact_type = NASTY
    return edges


_MERMAID = [
    r"flowchart LR",
    r'  a\d+\["(?:[\w .,:/@+#;-]|<br/>)*"\]',
    r'  subgraph r\d+\["(?:[\w .,:/@+#;-]|<br/>)*"\]',
    r'    s\d+\(\["(?:[\w .,:/@+#;-]|<br/>)*"\]\)',
    r"  end",
    r"  [as]\d+ (?:-->|-\.->) [as]\d+",
    r"  style a\d+ stroke-width:4px",
    r"  %% [\d,]+ edges more",
]


def test_mermaid_is_well_formed_whatever_names_hold() -> None:
    edges = nasty()
    lines = mermaid(edges, digest("out")).splitlines()
    assert all(any(re.fullmatch(form, line) for form in _MERMAID) for line in lines)
    arrows = [line.split() for line in lines if "->" in line]
    assert sorted(arrow[1] for arrow in arrows) == ["-->", "-->", "-.->"]
    declared = {line.split("[")[0].split("(")[0].strip() for line in lines if "[" in line}
    assert {name for arrow in arrows for name in (arrow[0], arrow[2])} <= declared
    assert "a#34;b#93;#59; x --#62; y" in lines[1]
    # Both directions give an edge twice; it is drawn once.
    assert mermaid([*edges, *edges], digest("out")) == mermaid(edges, digest("out"))
    many = [edge for n in range(MERMAID_EDGES + 7) for edge in edges_of(f"u{n}", 1, uses=["hot"])]
    lines = mermaid(many, digest("hot")).splitlines()
    assert lines[-1] == "  %% 7 edges more"
    assert sum("-->" in line for line in lines) == MERMAID_EDGES


_DOT = re.compile(r'\s*(?:(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>\w+)|(?P<sign>->|[{}\[\];,=]))')


def dot_tokens(text: str) -> list[str]:
    """Graphviz' tokens, as far as we write any."""
    tokens, at = [], 0
    while at < len(text.rstrip()):
        match = _DOT.match(text, at)
        assert match is not None, text[at : at + 40]
        tokens.append(match[match.lastgroup or 0])
        at = match.end()
    return tokens


def test_dot_is_well_formed_whatever_names_hold() -> None:
    tokens = dot_tokens(dot(nasty(), digest("out")).replace("sans-serif", "sans"))
    assert tokens[:3] == ["digraph", "lineage", "{"]
    assert (tokens.count("{"), tokens.count("["), tokens.count("->")) == (
        tokens.count("}"), tokens.count("]"), 3,
    )  # fmt: skip
    depth = 0
    for token in tokens:
        depth += {"{": 1, "}": -1}.get(token, 0)
        assert depth >= 0
    labels = [token for token in tokens if token.startswith('"') and "x --> y" in token]
    assert len(labels) == 5  # three artifacts, a step, a run
    assert all("\n" not in label for label in labels)
    assert {tokens[i - 1] for i, token in enumerate(tokens) if token == "->"} | {
        tokens[i + 1] for i, token in enumerate(tokens) if token == "->"
    } == {token for token in tokens if re.fullmatch(r"[as]\d+", token)}
    assert dot([], None).splitlines()[0] == "digraph lineage {"


# ---------------------------------------------------------------- impact


def order_of(edges: Edges, changed: str) -> list[str]:
    return [step.first.step_name for step in in_order(edges, digest(changed).sha256)]


def test_steps_are_rebuilt_after_those_whose_outputs_they_used() -> None:
    edges = [
        *edges_of("join", 1, uses=["a", "c"], makes=["end"]),  # near, but it needs the last of the others
        *edges_of("one", 1, uses=["a"], makes=["b"]),
        *edges_of("two", 2, uses=["b"], makes=["c"]),
        *edges_of("pass", 1, uses=["a"], makes=["a"]),
        *edges_of("pass-too", 1, uses=["a"], makes=["a"]),
    ]
    ordered = order_of(edges, "a")
    assert sorted(ordered) == ["join", "one", "pass", "pass-too", "two"]
    assert ordered.index("one") < ordered.index("two") < ordered.index("join")
    (first,) = [step for step in in_order(edges, digest("a").sha256) if step.first.step_name == "two"]
    assert [edge.artifact_name for edge in first.used] == ["b"]
    assert [edge.artifact_name for edge in first.makes_stale] == ["c"]


def test_circles_are_broken_where_they_are_nearest_and_hold_nobody_up() -> None:
    edges = [
        *edges_of("behind", 1, uses=["a", "y"], makes=["end"]),
        *edges_of("x", 1, uses=["a", "y"], makes=["x"]),
        *edges_of("y", 2, uses=["x"], makes=["y"]),
        *edges_of("free", 2, uses=["q"], makes=["r"]),
        *edges_of("other", 3, uses=["r", "s"], makes=["t"]),
        *edges_of("another", 3, uses=["t", "end"], makes=["s"]),
    ]
    ordered = order_of(edges, "a")
    assert sorted(ordered) == ["another", "behind", "free", "other", "x", "y"]
    assert ordered.index("x") < ordered.index("y") < ordered.index("behind")
    assert order_of([], "a") == []


def test_an_empty_digest_is_an_artifact_too() -> None:
    assert tree_lines(LineageTree([], upstream=True, depth=1), common_pb2.Digest(sha256="e" * 64), "", 5) == [
        f"{'e' * 12}  0 B  (made by no known step)"
    ]
