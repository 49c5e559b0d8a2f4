"""`python -m rara_chaos`: a stack of its own, a load, faults by the seed, then the verdict."""

import asyncio
import contextlib
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path

import asyncpg
import click
from rara_testing.processes import resident_bytes

from rara_chaos import golang
from rara_chaos.faults import Injector
from rara_chaos.load import Load
from rara_chaos.report import Memory, Report
from rara_chaos.schedule import schedule
from rara_chaos.shapes import MIXED_SHAPES, SHAPES
from rara_chaos.stack import Stack
from rara_chaos.verdict import judge

_QUIET_S = 60.0
_LOOK_S = 0.5
_CALLERS = 8


async def run(seed: int, duration_s: float, every_s: float, stack: Stack) -> Report:
    """The whole of it; the stack is started and stopped by the caller."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    shapes = MIXED_SHAPES if stack.go else SHAPES
    load = Load(seed, stack.ledger, [link.address for link in stack.client_links], shapes)
    injector = Injector(stack, say)
    memory: dict[str, Memory] = {}
    async with _background(_watch_memory(stack, memory)), _background(stack.collecting.run()):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(_CALLERS), name="load")
            try:
                await injector.run(schedule(seed, duration_s, every_s))
                await asyncio.sleep(max(0.0, began + duration_s - time.monotonic()))
            finally:
                load.stopping.set()
            say("no more faults")
            await injector.heal()
        say("the load has ended")
        await _quiet(stack)
        say("quiet")
    await stack.collecting.once("--older-than", "0s", "--grace", "0s", "--force")
    verdict = await judge(
        stack.postgres.dsn, stack.ledger, stack.blob_folder, load.confirmed, stack.executors
    )
    verdict.removed = stack.collecting.removed
    verdict.violations += load.violations + stack.collecting.violations
    verdict.violations += [f"{crash.name} ended with {crash.code}: {crash.report}" for crash in stack.crashes]
    hit = {
        kind: injector.hit[kind] for kind in sorted({one.command.executor_kind for one in stack.executors})
    }
    return Report(seed, duration_s, injector.done, verdict, load.refusals, memory, injector.failed, hit)


async def _quiet(stack: Stack) -> None:
    """Wait until every run has ended, or for as long as that may take."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_QUIET_S):
            connection = await asyncpg.connect(stack.postgres.dsn)
            try:
                while await connection.fetchval(
                    "select exists (select from rara.workflow_run where ended_at is null)"
                    " or exists (select from rara.lease)"
                ):
                    await asyncio.sleep(_LOOK_S)
            finally:
                await connection.close()


async def _watch_memory(stack: Stack, memory: dict[str, Memory]) -> None:
    while True:
        for service in stack.services:
            if service.is_up and (now := resident_bytes(service.process.pid)):
                name = service.command.name
                known = memory.get(name, Memory(now, now, now))
                memory[name] = Memory(known.first_bytes, now, max(known.peak_bytes, now))
        await asyncio.sleep(1.0)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _main(seed: int, duration_s: float, every_s: float, folder: Path, with_go: bool) -> bool:
    if (this := asyncio.current_task()) is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    go = await golang.build(folder) if with_go else None
    async with Stack(folder, go=go) as stack:
        report = await run(seed, duration_s, every_s, stack)
    print("\n".join(report.lines()))
    if report.never:
        print("never injected: " + ", ".join(report.never))
    if report.spared:
        print("without work or without a fault: " + ", ".join(report.spared))
    if not report.is_good:
        print(f"logs: {folder}")
        options = (
            f"--seed {seed} --duration {duration_s:g} --every {every_s:g} {'--go' if with_go else '--no-go'}"
        )
        print(f"again: {sys.executable} -m rara_chaos {options}")
    print(report.json(), flush=True)
    return report.is_good


@click.command()
@click.option("--seed", type=int, help="Of schedule and load; drawn when not given.")
@click.option(
    "--duration", "duration_s", type=float, default=60.0, show_default=True, help="Seconds of faults."
)
@click.option(
    "--every", "every_s", type=float, default=3.0, show_default=True, help="Seconds between faults."
)
@click.option(
    "--go/--no-go",
    "with_go",
    default=None,
    help="Every second executor is one in Go, and steps of both languages take turns; by default where there is a go.",
)
@click.option("--keep", is_flag=True, help="Keep the folder with database, logs and ledger.")
def main(seed: int | None, duration_s: float, every_s: float, with_go: bool | None, keep: bool) -> None:
    """Put a stack under faults, and judge what it did by its promises."""
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    print(f"seed {seed}, {duration_s:g} s", flush=True)
    if with_go is None:
        without = golang.why_not()
        with_go = not without
        if without:
            print(f"no executors in Go, and no runs of both languages: {without}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="rara-chaos-"))
    folder.chmod(0o711)  # as root, PostgreSQL runs as another account
    is_good = False
    try:
        is_good = asyncio.run(_main(seed, duration_s, every_s, folder, with_go))
    except asyncio.CancelledError:
        print(f"stopped; logs: {folder}")
        sys.exit(130)
    except BaseException:
        print(f"logs: {folder}", flush=True)
        raise
    if is_good and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
