"""Waiting for several runs, and telling how each ended."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from rara.v1 import workflow_pb2
from rara_client import Client

from rara_cli.answers import print_document
from rara_cli.exits import Exit
from rara_cli.jsonview import Json, dumps, to_json
from rara_cli.runlines import ended_line
from rara_cli.runview import exit_of
from rara_cli.session import Session


async def wait_for_runs(session: Session, client: Client, run_ids: Sequence[str]) -> int:
    """Tell each when it has ended, until all have or --timeout; the exit code of the first that did not succeed."""
    ended: dict[str, workflow_pb2.WorkflowRun | None] = {}
    try:
        async with asyncio.timeout(session.timeout_s), aclosing(client.watch_runs(run_ids)) as ends:
            async for end in ends:
                ended[end.workflow_run_id] = end.run
                if session.output != "json":
                    print(_told(session, end.workflow_run_id, end.run), flush=True)
    except TimeoutError:
        left = next(run_id for run_id in run_ids if run_id not in ended)
        session.note(
            f"rara: STILL_GOING: {len(run_ids) - len(ended)} of {len(run_ids)} runs have not ended after"
            f" {session.timeout_s:g} s, and go on (next: rara watch {left})"
        )
    codes = {run_id: _code(ended[run_id]) if run_id in ended else Exit.STILL_GOING for run_id in run_ids}
    code = next((each for each in codes.values() if each), Exit.OK)
    if session.output == "json":
        runs = [_document(run_id, ended.get(run_id), each) for run_id, each in codes.items()]
        print_document({"runs": runs, "exit_code": int(code)})
    return code


def _told(session: Session, run_id: str, run: workflow_pb2.WorkflowRun | None) -> str:
    match session.output:
        case "jsonl":
            return dumps(_document(run_id, run, _code(run)))
        case "name":
            return run_id
        case _:
            return f"run {run_id} does not exist" if run is None else ended_line(run)


def _document(run_id: str, run: workflow_pb2.WorkflowRun | None, code: Exit) -> Json:
    shown = None if run is None else to_json(run)
    return {"workflow_run_id": run_id, "run": shown, "exit_code": int(code)}


def _code(run: workflow_pb2.WorkflowRun | None) -> Exit:
    return Exit.NOT_FOUND if run is None else exit_of(run, None)
