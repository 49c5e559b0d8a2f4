"""Requests and answers of the streams that wait for many runs."""

from collections.abc import AsyncIterator, Iterator
from typing import Final

from rara.v1 import workflow_pb2

from rara_scheduler.domain import ids
from rara_scheduler.domain.errors import Code, Fault, field_invalid
from rara_scheduler.run_ends import MAX_IDS, EndWatch, Told
from rara_scheduler.transport import convert

_MESSAGE_BYTES: Final = 1024 * 1024  # of runs in one answer; a single larger one goes alone


async def take(requests: AsyncIterator[workflow_pb2.WatchRunsRequest], watch: EndWatch) -> None:
    """Add what a caller adds; what is wrong with it is raised by the watch."""
    try:
        async for request in requests:
            run_ids, unknown = _named(request)
            watch.add(run_ids, unknown=unknown)
    except Exception as error:
        watch.close(error)
    else:
        watch.close()


def responses(told: Told) -> Iterator[workflow_pb2.WatchRunsResponse]:
    """One, or more where its runs are large."""
    if not told.runs and not told.missing:
        yield workflow_pb2.WatchRunsResponse(alive=workflow_pb2.Alive())
        return
    response = workflow_pb2.WatchRunsResponse(not_found=told.missing)
    used = 0
    for view in told.runs:
        run = convert.workflow_run(view, lean=True)
        if response.ended and used + run.ByteSize() > _MESSAGE_BYTES:
            yield response
            response, used = workflow_pb2.WatchRunsResponse(), 0
        response.ended.append(run)
        used += run.ByteSize()
    yield response


def _named(request: workflow_pb2.WatchRunsRequest) -> tuple[list[str], list[str]]:
    """Ids in canonical form, and names that cannot be ids. Raises FIELD_INVALID."""
    given = request.workflow_run_ids
    if len(given) > MAX_IDS:
        raise field_invalid("workflow_run_ids", f"must be at most {MAX_IDS} in a message, not {len(given)}")
    run_ids, unknown = [], []
    for index, text in enumerate(given):
        try:
            run_ids.append(ids.run_id(text))
        except Fault as fault:
            if fault.code is not Code.RUN_NOT_FOUND:
                said = fault.fields[0].description
                raise field_invalid(f"workflow_run_ids[{index}]", said) from None
            unknown.append(text)
    return run_ids, unknown
