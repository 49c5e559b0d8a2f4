"""Following a run to its end: live, as lines, as JSON events, or silently."""

import asyncio
import time
from contextlib import aclosing
from datetime import UTC, datetime

from rara.v1 import workflow_pb2
from rara_client import Client, RaraError

from rara_cli import words
from rara_cli.answers import print_document
from rara_cli.exits import Exit
from rara_cli.jsonview import Json, dumps, to_json
from rara_cli.runlines import RunLines, ended_line
from rara_cli.runview import RunView, exit_of
from rara_cli.session import Session

_FRAME_S = 0.25


async def follow_run(session: Session, client: Client, run_id: str, *, is_silent: bool) -> int:
    """Watch, or only wait, until the run has ended or --timeout; say how it stands; the exit code.

    Ctrl-C detaches: the run goes on.
    """
    view = RunView(run_id)
    try:
        async with asyncio.timeout(session.timeout_s):
            await _watch(session, client, view, is_silent=is_silent)
    except TimeoutError:
        return await _conclude(session, client, view)
    except asyncio.CancelledError:
        session.farewell = f"detached from run {run_id}, which goes on"
        session.farewell_next = f"rara watch {run_id}"
        if session.output == "jsonl":
            print(dumps(_result(view, Exit.INTERRUPTED)), flush=True)
        raise
    return await _conclude(session, client, view)


async def _watch(session: Session, client: Client, view: RunView, *, is_silent: bool) -> None:
    wants_view = session.output in ("table", "wide") and not is_silent
    if wants_view and session.is_live:
        await _watch_live(session, client, view)
        return
    lines = RunLines(view)
    async with aclosing(client.watch_run(view.workflow_run_id)) as updates:
        async for update in updates:
            now_s = time.monotonic()
            view.apply(update, now_s)
            if wants_view:
                for line in lines.lines(update, now_s, datetime.now(UTC)):
                    print(line, flush=True)
            elif session.output == "jsonl" and not is_silent:
                print(dumps(_event(update)), flush=True)


async def _watch_live(session: Session, client: Client, view: RunView) -> None:
    from rich.console import Console
    from rich.live import Live

    from rara_cli.runlive import RunLive

    console = Console(no_color=not session.in_color, highlight=False, markup=False, emoji=False)
    picture = RunLive(view, console)

    async def redraw(live: Live) -> None:
        while True:
            await asyncio.sleep(_FRAME_S)
            live.refresh()

    # Drawn by this loop, not by rich's thread: what is drawn does not change under it.
    with Live(picture, console=console, auto_refresh=False, vertical_overflow="crop") as live:
        helpers = [
            asyncio.create_task(redraw(live), name="redraw"),
            asyncio.create_task(_learn(client, view), name="learn the definition"),
        ]
        try:
            async with aclosing(client.watch_run(view.workflow_run_id)) as updates:
                async for update in updates:
                    view.apply(update, time.monotonic())
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.wait(helpers)
        live.refresh()


async def _learn(client: Client, view: RunView) -> None:
    """Find out who waits for whom: a help to the eye, so without it the view is only poorer."""
    try:
        run = (await client.get_run(view.workflow_run_id)).run
        view.learn(await client.get_definition(run.definition, run.definition_version))
    except RaraError:
        return


async def _conclude(session: Session, client: Client, view: RunView) -> int:
    """Say how the run stands; the exit code."""
    response = await client.get_run(view.workflow_run_id, include_steps=True)
    run, steps = response.run, list(response.steps)
    failed = next((step for step in steps if step.step_run_id == run.failed_step_run_id), None)
    code = exit_of(run, failed)
    view.run = run
    match session.output:
        case "json":
            print_document(
                {"run": to_json(run), "steps": [to_json(step) for step in steps], "exit_code": int(code)}
            )
        case "jsonl":
            print(dumps(_result(view, code)), flush=True)
        case "name":
            print(run.workflow_run_id)
        case _:
            print(ended_line(run), flush=True)
    _explain(session, run, failed, code)
    return code


def _explain(
    session: Session, run: workflow_pb2.WorkflowRun, failed: workflow_pb2.StepRun | None, code: Exit
) -> None:
    run_id = run.workflow_run_id
    match code:
        case Exit.STILL_GOING:
            state = words.run_state(run.state)
            session.note(
                f"rara: STILL_GOING: the run is {state} after {session.timeout_s:g} s, and goes on"
                f" (next: rara watch {run_id})"
            )
        case Exit.RUN_FAILED | Exit.DEADLINE_EXCEEDED:
            step = f"step {words.clean(failed.step_name)}: " if failed is not None else ""
            code_text = run.error.code or (failed.reason if failed is not None else "") or "RUN_FAILED"
            message = f": {words.clean(run.error.message)[:300]}" if run.error.message else ""
            advice = (
                f"rara step get {run_id}/{failed.step_name}"
                if failed is not None
                else f"rara run get {run_id}"
            )
            session.note(f"rara: {step}{code_text}{message} (next: {advice})")
        case Exit.RUN_CANCELLED:
            session.note(f"rara: RUN_CANCELLED: the run was cancelled (next: rara run get {run_id})")


def _event(update: workflow_pb2.WatchRunResponse) -> Json:
    kind = update.WhichOneof("update") or "unknown"
    event: Json = {"type": kind, "revision": update.revision}
    if kind in ("run", "step_run"):
        event[kind] = to_json(getattr(update, kind))
    return event


def _result(view: RunView, code: Exit) -> Json:
    run = view.run
    return {
        "type": "result",
        "workflow_run_id": view.workflow_run_id,
        "state": view.state,
        "exit_code": int(code),
        "error": to_json(run.error) if run is not None and run.HasField("error") else None,
    }
