"""Lineage queries as messages: what is asked for, and pages whose tokens hold a place and a snapshot."""

import re
from dataclasses import dataclass

from rara.v1 import workflow_pb2

from rara_scheduler.domain import ids, names
from rara_scheduler.domain.errors import Fault, field_invalid
from rara_scheduler.domain.lineage import MAX_DEPTH, MIN_PREFIX, Half, Place
from rara_scheduler.store.lineage import LineagePage, Position, Start
from rara_scheduler.transport import convert
from rara_scheduler.transport.page_token import decode_token, invalid_token
from rara_scheduler.transport.paging import page

_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},64}}")
_SNAPSHOT = re.compile(r"[0-9]{1,19}:[0-9]{1,19}:[0-9,]{0,1000}")
_NO_NAME = re.compile("[\\0\ud800-\udfff]")
_DEPTH = re.compile(r"[1-9][0-9]?")


@dataclass(frozen=True, slots=True)
class LineageQuery:
    start: Start
    upstream: bool
    depth: int


def query_of(request: workflow_pb2.QueryLineageRequest) -> LineageQuery:
    """Raises FIELD_INVALID. A start by prefix holds the prefix."""
    if not 0 <= request.depth <= MAX_DEPTH:
        raise field_invalid("depth", f"must be 0 to {MAX_DEPTH}; 0 is 1")
    upstream = request.direction == workflow_pb2.LINEAGE_DIRECTION_UPSTREAM
    if not upstream and request.direction != workflow_pb2.LINEAGE_DIRECTION_DOWNSTREAM:
        raise field_invalid("direction", "must be upstream or downstream")
    return LineageQuery(_start(request), upstream, request.depth or 1)


def _start(request: workflow_pb2.QueryLineageRequest) -> Start:
    match request.WhichOneof("start"):
        case "artifact":
            said = names.SHA256.refuses(request.artifact.sha256)
            if said is not None:
                raise field_invalid("artifact.sha256", said)
            return Start("artifact", request.artifact.sha256)
        case "artifact_prefix":
            if not _PREFIX.fullmatch(request.artifact_prefix):
                raise field_invalid(
                    "artifact_prefix", f"must be {MIN_PREFIX} to 64 lower-case hexadecimal digits"
                )
            return Start("artifact", request.artifact_prefix)
        case "step_run_id":
            return Start("step", ids.step_id(request.step_run_id))
        case "workflow_run_id":
            return Start("run", ids.run_id(request.workflow_run_id))
        case _:
            raise field_invalid("start", "must name an artifact, a run or a step")


def position_of(request: workflow_pb2.QueryLineageRequest) -> Position | None:
    """What a page begins behind; None: the first page. Raises PAGE_TOKEN_INVALID."""
    held = decode_token(request, request.page_token, 6)
    if held is None:
        return None
    snapshot, depth, half, sha256, step_run_id, name = held
    if (
        not _SNAPSHOT.fullmatch(snapshot)
        or not _DEPTH.fullmatch(depth)
        or half not in ("0", "1")
        or names.SHA256.refuses(sha256) is not None
        or _NO_NAME.search(name)
    ):
        raise invalid_token()
    try:
        step_run_id = ids.step_id(step_run_id)
    except Fault:
        raise invalid_token() from None
    first, second = (sha256, step_run_id) if half == "0" else (step_run_id, sha256)
    return Position(snapshot, Place(int(depth), Half(int(half)), first, second, name))


def lineage_page(
    request: workflow_pb2.QueryLineageRequest, found: LineagePage, size: int
) -> tuple[list[workflow_pb2.LineageEdge], str]:
    """The edges of a page, and the token of the next one."""

    def position(index: int) -> tuple[str, ...]:
        place = found.places[index]
        return (
            found.snapshot,
            str(place.depth),
            str(int(place.half)),
            place.sha256,
            place.step_run_id,
            place.name,
        )

    return page(
        request,
        range(len(found.edges)),
        size,
        lambda index: convert.lineage_edge(found.edges[index]),
        position,
    )
