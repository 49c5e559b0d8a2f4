"""`rara dev demo`: from an empty folder to measured results, with every part a process of its own."""

import asyncio
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Final

from knowledge_pipeline import DEFINITION_FILE, GO_DEFINITION_FILE
from rara.v1 import workflow_pb2
from rara_client import Client
from rara_client.definitions import load_definition
from rara_scheduler.embedded import EmbeddedPostgresError

from rara_cli import words
from rara_cli.democrash import LEASES, Crashes, write_corpus
from rara_cli.demoending import CHANGED, Ending, fetch_ending
from rara_cli.demogo import NotBuilt, build_go_executor
from rara_cli.demoprint import print_outcome
from rara_cli.demoresult import Outcome, faults, fetch_outcome, seconds_between
from rara_cli.demosay import Narrator
from rara_cli.exits import CommandError, Exit
from rara_cli.jsonview import Json
from rara_cli.session import Session
from rara_cli.stack import PartFailed, Stack, StackSettings

# The one step that both languages offer, with the same result.
GO_STEP: Final = "clean"

Watcher = Callable[[workflow_pb2.StepRun], Awaitable[None]]


async def run_demo(
    *, corpus: Path | None, crash: bool, directory: Path | None, result_path: Path, keep: bool
) -> int:
    """Set everything up, run the example to its end, show the result; 0 only if all of it is there.

    directory: where data is kept; None: a new folder, which goes away after a success unless `keep`.

    Raises CommandError if the parts do not start or one of them is given up.
    """
    say = Narrator(Session())
    is_ours = directory is None
    home = (directory or Path(tempfile.mkdtemp(prefix="rara-demo-"))).absolute()
    code: int = Exit.UNEXPECTED
    try:
        code = await _Demo(say, home, corpus, crash=crash).run(result_path)
    except (PartFailed, EmbeddedPostgresError) as error:
        reason = error.code if isinstance(error, EmbeddedPostgresError) else "PART_FAILED"
        raise CommandError(Exit.UNEXPECTED, str(reason), str(error)) from error
    finally:
        if is_ours and not keep and code == Exit.OK:
            await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
        elif home.exists():
            say.plain(f"data and logs are kept in {home}")
    return code


class _Demo:
    """One demo in one folder."""

    def __init__(self, say: Narrator, home: Path, corpus: Path | None, *, crash: bool) -> None:
        self._say = say
        self._home = home
        self._corpus = corpus
        self._crash = crash
        self._key = f"demo-{uuid.uuid4()}"
        # A name of its own for each demo: a folder may see several.
        self._ledger = home / f"effects-{self._key}.jsonl"

    async def run(self, result_path: Path) -> int:
        say = self._say
        what = (
            "a pipeline of five steps, two crashes on the way" if self._crash else "a pipeline of five steps"
        )
        say.plain(f"Rara demo: {what}; PostgreSQL, scheduler and executor are processes of their own.")
        say.plain(f"All of it lives in {self._home}.")
        say.plain()
        await self._prepare_corpus()
        settings = StackSettings(
            directory=self._home, executor_name="demo", env=dict(LEASES) if self._crash else {}
        )
        async with (
            self._building() as building,
            Stack(settings, report=say.say) as stack,
            Client.connect(stack.address) as client,
        ):
            in_go = building is not None and await self._start_go_executor(stack, building)
            ready_s = say.elapsed_s
            crashes = Crashes(stack, client, say) if self._crash else None
            definition = await self._register(client, in_go=in_go)
            run_id = await self._start_run(client, definition)
            await _until_ended(self._follow(client, run_id, crashes.see if crashes else None), stack)
            outcome = await fetch_outcome(client, run_id)
            total_s = say.elapsed_s
            second = None
            if not self._crash and outcome.run.state == workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED:
                say.say("once more, with one parameter changed, to see what differs")
                second = await self._start_run(client, definition, CHANGED)
                await _until_ended(self._follow(client, second, None), stack)
            ending = await fetch_ending(client, outcome, second)
            say.say("stopping the executor, the scheduler, PostgreSQL")
        return self._conclude(outcome, ending, crashes, result_path, ready_s=ready_s, total_s=total_s)

    async def _prepare_corpus(self) -> None:
        if self._corpus is not None:
            self._say.say(f"texts: {self._corpus}")
        elif self._crash:
            self._home.mkdir(parents=True, exist_ok=True)
            self._corpus = self._home / "corpus"
            count = await asyncio.to_thread(write_corpus, self._corpus)
            self._say.say(
                f"texts: {count:,} sources of Python and of installed packages, enough to take a while"
            )
            shown = ", ".join(f"{name}={value}" for name, value in LEASES.items())
            self._say.say(f"leases are short, so that recovery is quick to see: {shown}")
        else:
            self._say.say("texts: the Python language reference that comes with this Python")

    @asynccontextmanager
    async def _building(self) -> AsyncIterator["asyncio.Task[Path] | None"]:
        """The build of the Go executor, which goes on while the rest starts. None: the crashes do without."""
        if self._crash:
            yield None
            return
        task = asyncio.create_task(build_go_executor(self._home / "rara-go-executor"), name="go build")
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _start_go_executor(self, stack: Stack, building: "asyncio.Task[Path]") -> bool:
        """Whether there is one now; says so."""
        if not building.done():
            self._say.say("waiting for the build of the Go executor")
        try:
            program = await building
        except NotBuilt as error:
            self._say.say(f"{GO_STEP} goes to the Python executor: {error}")
            return False
        await stack.start_go_executor(program)
        self._say.say(f"{GO_STEP} goes to the Go executor, the other steps to the Python one")
        return True

    async def _register(self, client: Client, *, in_go: bool) -> workflow_pb2.Definition:
        # Go's has a name of its own: whoever starts the pipeline in this folder later may have no Go.
        wanted = load_definition(GO_DEFINITION_FILE if in_go else DEFINITION_FILE)
        return (await client.register_definition(wanted)).definition

    async def _start_run(
        self, client: Client, definition: workflow_pb2.Definition, changed: Json | None = None
    ) -> str:
        """changed: options of a second run."""
        options: Json = {"ledger": str(self._ledger), **(changed or {})}
        if self._corpus is not None:
            options["corpus"] = str(self._corpus.absolute())
        started = await client.start_run(
            definition.definition,
            options,
            definition_version=definition.version,
            idempotency_key=f"{self._key}-changed" if changed else self._key,
            labels={"demo": "crash" if self._crash else "changed" if changed else "plain"},
        )
        run_id = started.run.workflow_run_id
        what = ", ".join(f"{name}={value}" for name, value in (changed or {}).items())
        with_what = f" with {what}" if what else ""
        self._say.say(
            f"run {run_id} of {definition.definition} version {definition.version} started{with_what}"
        )
        return run_id

    async def _follow(self, client: Client, run_id: str, watcher: Watcher | None) -> None:
        """Show the run until it has ended, which ends the watch; the watcher sees each step as it changes."""
        said: dict[str, tuple[int, int]] = {}
        async with aclosing(client.watch_run(run_id)) as updates:
            async for update in updates:
                if update.WhichOneof("update") != "step_run":
                    continue
                step = update.step_run
                self._show(step, said)
                if watcher is not None:
                    await watcher(step)

    def _show(self, step: workflow_pb2.StepRun, said: dict[str, tuple[int, int]]) -> None:
        state = words.step_state(step.state)
        if state in ("pending", "leased"):
            return
        line = f"{step.step_name:<9} {_news(step, state)}"
        is_news = said.get(step.step_run_id) != (step.state, step.attempt)
        said[step.step_run_id] = step.state, step.attempt
        if is_news and (state != "running" or step.attempt > 1):
            self._say.say(line)
        else:
            self._say.status(line)

    def _conclude(
        self,
        outcome: Outcome,
        ending: Ending | None,
        crashes: Crashes | None,
        result_path: Path,
        *,
        ready_s: float,
        total_s: float,
    ) -> int:
        print_outcome(self._say, outcome)
        found = faults(outcome)
        result: Json = {
            "python": platform.python_version(),
            "seconds": {"until_ready": round(ready_s, 3), "until_result": round(total_s, 3)},
            **outcome.to_json(),
        }
        if ending is not None:
            ending.print(self._say)
            found += ending.faults()
            result |= ending.to_json()
        if crashes is not None:
            crashes.print(outcome, self._ledger)
            found += crashes.faults(outcome, self._ledger)
            result["crash"] = crashes.to_json(self._ledger)
        result["faults"] = found
        _write(result_path, result)
        self._say.plain()
        self._say.plain(f"The whole result is in {result_path}.")
        for fault in found:
            self._say.plain(f"Not as it should be: {fault}")
        if not found:
            return Exit.OK
        has_failed = outcome.run.state == workflow_pb2.WORKFLOW_RUN_STATE_FAILED
        return Exit.RUN_FAILED if has_failed else Exit.UNEXPECTED


def _news(step: workflow_pb2.StepRun, state: str) -> str:
    """What there is to say of a step that is not waiting."""
    message = step.progress.message
    match state:
        case "running":
            again = f"attempt {step.attempt}, " if step.attempt > 1 else ""
            return f"{again}{message or 'started'}"
        case "succeeded":
            took_s = seconds_between(step.started_at, step.ended_at)
            return f"succeeded in {took_s:.2f} s: {message}"
        case _:
            why = step.error.message if step.error.code == step.reason else step.error.code
            return f"attempt {step.attempt}: {state}, {step.reason}{': ' if why else ''}{why}"


async def _until_ended(work: Awaitable[None], stack: Stack) -> None:
    """Wait for the work, or for a part that is given up. Raises PartFailed then."""
    tasks = [
        asyncio.ensure_future(work),
        asyncio.create_task(stack.wait(), name="wait for a failure"),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in done:
        task.result()


def _write(path: Path, result: Json) -> None:
    """Whole or not at all: a reader never sees half a result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    draft.replace(path)
