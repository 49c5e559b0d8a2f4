"""The lineage of an artifact or run: found by what a person types, read, and shown as tree, JSON or graph."""

import re
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final, Literal

from rara.v1 import common_pb2, workflow_pb2
from rara_client import Client
from rara_client.errors import NotFound

from rara_cli.answers import print_document, width
from rara_cli.artifacts import find_artifact
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json, dumps, to_json
from rara_cli.lineagegraph import dot, mermaid
from rara_cli.lineagetree import LineageTree, cut, tree_lines
from rara_cli.lookup import find_run
from rara_cli.session import Session

Direction = Literal["upstream", "downstream"]

DEFAULT_DEPTH: Final = 10
MAX_DEPTH: Final = 32
DEFAULT_ROWS: Final = 200
_PAGE: Final = 1000
# Of a tree, whose rows are few; JSON and graphs get all that the scheduler gives.
_TREE_EDGES: Final = 5000
_DIRECTIONS: Final[Mapping[Direction, workflow_pb2.LineageDirection.ValueType]] = {
    "upstream": workflow_pb2.LINEAGE_DIRECTION_UPSTREAM,
    "downstream": workflow_pb2.LINEAGE_DIRECTION_DOWNSTREAM,
}
_DIGEST: Final = re.compile(r"[0-9a-f]{8,64}")
_WHOLE: Final = 64


@dataclass(frozen=True, slots=True)
class Start:
    """Where lineage begins: one of an artifact's digest, its beginning, and a run."""

    sha256: str = ""
    prefix: str = ""
    workflow_run_id: str = ""

    def request(self, direction: Direction, depth: int, page_size: int) -> workflow_pb2.QueryLineageRequest:
        request = workflow_pb2.QueryLineageRequest(
            direction=_DIRECTIONS[direction], depth=depth, page_size=page_size
        )
        if self.workflow_run_id:
            request.workflow_run_id = self.workflow_run_id
        elif self.prefix:
            request.artifact_prefix = self.prefix
        else:
            request.artifact.sha256 = self.sha256
        return request


@dataclass(frozen=True, slots=True)
class Lineage:
    """What was read. artifact: None for a run. is_complete: within `depth`; else only the nearest edges are here."""

    artifact: common_pb2.Digest | None
    workflow_run_id: str
    depth: int
    edges: Mapping[Direction, Sequence[workflow_pb2.LineageEdge]]
    is_complete: bool

    def view(self) -> Json:
        """As one JSON document."""
        start: Json = (
            {"workflow_run_id": self.workflow_run_id}
            if self.artifact is None
            else {"artifact": to_json(self.artifact)}
        )
        return {
            **start,
            "depth": self.depth,
            "is_complete": self.is_complete,
            **{direction: [to_json(edge) for edge in edges] for direction, edges in self.edges.items()},
        }


async def find_start(client: Client, arguments: Sequence[str], *, latest: bool) -> Start:
    """From DIGEST or its beginning, RUN, RUN NAME, or --latest with or without NAME."""
    if len(arguments) == (1 if latest else 2):
        return await find_artifact_start(client, arguments, latest=latest)
    if len(arguments) != (0 if latest else 1):
        raise CommandError(
            Exit.USAGE, "USAGE", "give a DIGEST, a RUN, or RUN and NAME", "rara artifact list RUN -o wide"
        )
    start = None if latest else await _from_digest(client, arguments[0])
    if start is not None:
        return start
    try:
        return Start(
            workflow_run_id=await find_run(client, arguments[0] if arguments else None, latest=latest)
        )
    except CommandError as error:
        if error.code == "RUN_NOT_FOUND" and _is_digest(arguments[0] if arguments else ""):
            error.message = f"no artifact and {error.message}"
        raise


async def find_artifact_start(client: Client, arguments: Sequence[str], *, latest: bool) -> Start:
    """From DIGEST or its beginning, RUN NAME, or --latest NAME."""
    if len(arguments) == (1 if latest else 2):
        found = await find_artifact(client, arguments, latest=latest)
        return Start(sha256=found.artifact.digest.sha256)
    if latest or len(arguments) != 1 or not _is_digest(arguments[0]):
        raise CommandError(
            Exit.USAGE,
            "USAGE",
            "give a DIGEST, at least 8 digits of it, or RUN and NAME",
            "rara artifact list RUN -o wide",
        )
    start = await _from_digest(client, arguments[0])
    if start is None:
        raise _not_found(arguments[0])
    return start


def _digits(text: str) -> str:
    return text.strip().lower().removeprefix("sha256:")


def _is_digest(text: str) -> bool:
    return _DIGEST.fullmatch(_digits(text)) is not None


async def _from_digest(client: Client, text: str) -> Start | None:
    """None: it is none, or no artifact begins so; the beginning of a run's id may look the same."""
    digits = _digits(text)
    if not _is_digest(text):
        return None
    if len(digits) == _WHOLE:
        return Start(sha256=digits)
    try:
        first = await _first_page(client, Start(prefix=digits), "upstream")
    except NotFound:
        return None
    return Start(sha256=first.artifact.sha256)


async def read_lineage(
    client: Client,
    start: Start,
    directions: Sequence[Direction],
    *,
    depth: int,
    limit: int | None = None,
) -> Lineage:
    """limit: of edges in each direction; None: all. Raises CommandError where no step made or used the artifact."""
    found: dict[Direction, list[workflow_pb2.LineageEdge]] = {}
    artifact: common_pb2.Digest | None = None
    is_complete = True
    for direction in directions:
        edges = found[direction] = []
        async with aclosing(client.lineage_pages(start.request(direction, depth, _PAGE))) as pages:
            async for page in pages:
                edges.extend(page.edges)
                artifact = page.artifact if page.HasField("artifact") else None
                is_complete = is_complete and not page.truncated
                if limit is not None and len(edges) >= limit and page.next_page_token:
                    is_complete = False
                    break
    if artifact is not None and not artifact.size_bytes and not any(found.values()):
        await _require_known(client, start)
    return Lineage(artifact, start.workflow_run_id, depth, found, is_complete)


async def _require_known(client: Client, start: Start) -> None:
    for direction in _DIRECTIONS:
        if (await _first_page(client, start, direction)).edges:
            return
    raise _not_found(start.sha256)


def _not_found(digest: str) -> CommandError:
    return CommandError(
        Exit.NOT_FOUND,
        "ARTIFACT_NOT_FOUND",
        f"no step made or used {digest}",
        "rara artifact list RUN -o wide",
    )


async def _first_page(
    client: Client, start: Start, direction: Direction
) -> workflow_pb2.QueryLineageResponse:
    return await client.call(client.workflow.QueryLineage, start.request(direction, 1, 1), is_repeatable=True)


async def show_lineage(
    session: Session,
    client: Client,
    start: Start | str,
    *,
    depth: int = DEFAULT_DEPTH,
    directions: Sequence[Direction] = ("upstream", "downstream"),
    rows: int = DEFAULT_ROWS,
) -> None:
    """Print lineage in the format that was asked for. start: a whole digest, or what `find_start` gave."""
    if isinstance(start, str):
        start = Start(sha256=start)
    is_tree = session.output in ("table", "text", "wide")
    found = await read_lineage(
        client, start, directions, depth=depth, limit=max(_TREE_EDGES, rows) if is_tree else None
    )
    edges = [(direction, edge) for direction, each in found.edges.items() for edge in each]
    match session.output:
        case "json":
            print_document(found.view())
        case "jsonl":
            for direction, edge in edges:
                print(dumps({"direction": direction, **to_json(edge)}))
        case "name":
            for digest in dict.fromkeys(edge.artifact.sha256 for _, edge in edges):
                print(digest)
        case "mermaid":
            print(mermaid([edge for _, edge in edges], found.artifact))
        case "dot":
            print(dot([edge for _, edge in edges], found.artifact))
        case _:
            for line in lineage_lines(found, rows=rows, is_wide=session.output == "wide"):
                print(cut(line, width(session)))
    if not found.is_complete:
        session.note("there is more: only the nearest edges were read; ask for less --depth, or from nearer")


def lineage_lines(found: Lineage, *, rows: int = DEFAULT_ROWS, is_wide: bool = False) -> list[str]:
    """A tree for each direction, of at most so many rows."""
    lines: list[str] = []
    for direction, edges in found.edges.items():
        tree = LineageTree(edges, upstream=direction == "upstream", depth=found.depth, is_wide=is_wide)
        lines.extend(tree_lines(tree, found.artifact, found.workflow_run_id, rows))
    return lines
