"""From what a person types to one run or step: whole ids, unique beginnings, RUN/NAME, --latest."""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from rara.v1 import workflow_pb2
from rara_client import Client

from rara_cli.exits import CommandError, Exit

T = TypeVar("T")

# A beginning is looked for among so many of the newest; a whole id always works.
_LOOK_AT = 2000
_PAGE = 1000
_WHOLE_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


async def take(items: AsyncGenerator[T, None], limit: int) -> list[T]:
    """The first items of a paged list."""
    taken: list[T] = []
    async with aclosing(items):
        async for item in items:
            taken.append(item)
            if len(taken) >= limit:
                break
    return taken


async def find_run(client: Client, text: str | None, *, latest: bool = False) -> str:
    """The id of a run."""
    if (text is None) != latest:
        raise CommandError(Exit.USAGE, "USAGE", "name one RUN, or --latest", "rara run list")
    if latest:
        newest = await take(client.list_runs(page_size=1), 1)
        if not newest:
            raise CommandError(Exit.NOT_FOUND, "RUN_NOT_FOUND", "there is no run yet", "rara run start NAME")
        return newest[0].workflow_run_id
    wanted = (text or "").strip().lower()
    if _WHOLE_ID.fullmatch(wanted):
        return wanted
    runs = await take(client.list_runs(page_size=_PAGE), _LOOK_AT)
    run = _only(wanted, runs, lambda item: item.workflow_run_id, "run", "rara run list")
    return run.workflow_run_id


async def find_runs(client: Client, texts: Sequence[str], *, latest: bool) -> list[str]:
    """The ids of several runs, each once; `-` stands for whole ids on standard input, one a line."""
    if latest:
        raise CommandError(Exit.USAGE, "USAGE", "name RUNs, or --latest", "rara run list")
    found: dict[str, None] = {}
    for text in texts:
        if text == "-":
            lines = (await asyncio.to_thread(sys.stdin.read)).split()
            if wrong := [line for line in lines if not _WHOLE_ID.fullmatch(line.lower())]:
                raise CommandError(
                    Exit.USAGE, "USAGE", f"{wrong[0][:40]!r} is no whole id", "rara run list -o name"
                )
            found.update(dict.fromkeys(line.lower() for line in lines))
        else:
            found[await find_run(client, text)] = None
    return list(found)


async def find_pair(client: Client, texts: Sequence[str], *, latest: bool) -> tuple[str, str]:
    """The ids of two runs: A B, A --latest, or --latest alone, which is the newest and its predecessor."""
    if len(texts) > 2 - latest or (len(texts) < 2 and not latest):
        raise CommandError(
            Exit.USAGE, "USAGE", "name two runs A B, A and --latest, or --latest alone", "rara run list"
        )
    if not latest:
        return await find_run(client, texts[0]), await find_run(client, texts[1])
    newest = await find_run(client, None, latest=True)
    if texts:
        return await find_run(client, texts[0]), newest
    definition = (await client.get_run(newest)).run.definition
    runs = [
        run.workflow_run_id for run in await take(client.list_runs(definition=definition, page_size=3), 3)
    ]
    before = runs[runs.index(newest) + 1 :] if newest in runs else runs
    if not before:
        raise CommandError(
            Exit.NOT_FOUND, "RUN_NOT_FOUND", f"{definition} has no run before {newest}", "rara run list"
        )
    return before[0], newest


async def find_step(client: Client, text: str | None, *, latest: bool = False) -> workflow_pb2.StepRun:
    """A step by id, beginning of an id, RUN/NAME, or NAME of the latest run. Payloads may be left out."""
    if not text:
        raise CommandError(Exit.USAGE, "USAGE", "name a STEP: its id, or RUN/NAME", "rara step list RUN")
    run_text, slash, name = text.rpartition("/")
    if latest or slash:
        run_id = await find_run(client, None if latest else run_text, latest=latest)
        return await step_named(client, run_id, name)
    wanted = text.strip().lower()
    if _WHOLE_ID.fullmatch(wanted):
        return (await client.get_step_run(wanted)).step_run
    steps = await take(client.list_step_runs(page_size=_PAGE), _LOOK_AT)
    return _only(wanted, steps, lambda item: item.step_run_id, "step", "rara step list RUN")


async def step_named(client: Client, run_id: str, name: str) -> workflow_pb2.StepRun:
    """The step of a run with this name."""
    async with aclosing(client.list_step_runs(run_id, page_size=_PAGE)) as steps:
        async for step in steps:
            if step.step_name == name:
                return step
    raise CommandError(
        Exit.NOT_FOUND, "STEP_NOT_FOUND", f"run {run_id} has no step {name!r}", f"rara step list {run_id}"
    )


async def find_executor(client: Client, text: str) -> str:
    """The id of an executor: whole, by a unique beginning, or by the name of one that is not gone."""
    wanted = text.strip()
    if _WHOLE_ID.fullmatch(wanted.lower()):
        return wanted.lower()
    executors = await take(client.list_executors(page_size=_PAGE), _LOOK_AT)
    gone = workflow_pb2.EXECUTOR_STATE_LOST
    named = [one for one in executors if one.executor_name == wanted and one.state != gone]
    if len(named) == 1:
        return named[0].executor_id
    if named:
        ids = ", ".join(one.executor_id for one in named[:3])
        raise CommandError(
            Exit.USAGE,
            "AMBIGUOUS_NAME",
            f"{len(named)} executors are called {wanted!r}: {ids}",
            "name one by its id",
        )
    found = _only(
        wanted.lower(), executors, lambda item: item.executor_id, "executor", "rara executor list -o wide"
    )
    return found.executor_id


def _only(beginning: str, items: list[T], id_of: Callable[[T], str], noun: str, advice: str) -> T:
    found = [item for item in items if id_of(item).startswith(beginning)] if beginning else []
    if not found:
        among = f" among the newest {_LOOK_AT:,}" if len(items) >= _LOOK_AT else ""
        code = f"{noun.upper()}_NOT_FOUND"
        raise CommandError(Exit.NOT_FOUND, code, f"no {noun} begins with {beginning!r}{among}", advice)
    if len(found) > 1:
        some = ", ".join(id_of(item) for item in found[:3])
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise CommandError(
            Exit.USAGE,
            "AMBIGUOUS_ID",
            f"{len(found)} begin with {beginning!r}: {some}{more}",
            "type more of it",
        )
    return found[0]
