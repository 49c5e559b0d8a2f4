"""One run of chaos against a target that is up: a load, faults by the seed, quiet, then the verdict."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine

import asyncpg

from rara_chaos import figures
from rara_chaos.figures import Figures, MemoryWatch
from rara_chaos.injector import Injector
from rara_chaos.load import Load
from rara_chaos.report import Report
from rara_chaos.schedule import Fault, schedule
from rara_chaos.target import Target
from rara_chaos.verdict import OURS

_LOOK_S = 0.5
_CALLERS = 8
_AWAY = (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError)


async def run(seed: int, duration_s: float, every_s: float, target: Target) -> Report:
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {line}", flush=True)

    load = Load(
        seed, target.ledger, target.addresses, target.shapes, security=target.security, numbers=target.numbers
    )
    injector, watch = Injector(target.faults, say), MemoryWatch()
    faults = deal(seed, duration_s, every_s, target)
    found = Figures(memory=watch.seen)
    if target.database_url:
        found.tables_at_start = await figures.tables(target.database_url, counted=target.is_ours)
    broken: list[str] = []
    looking = _background(watch.run(target.memory, target.look_s), broken)
    async with looking, _background(target.beside(), broken):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run(_CALLERS), name="load")
            try:
                await injector.run(faults)
                await asyncio.sleep(max(0.0, began + duration_s - time.monotonic()))
            finally:
                load.stopping.set()
            ended = time.monotonic()
            say("no more faults")
            try:
                await target.faults.heal()
            except (OSError, TimeoutError) as error:
                broken.append(f"not all could be healed: {error!r}")
        say("the load has ended")
        await _quiet(target)
        say("quiet")
        watch.note(await target.memory())
    found.speed_at_start, found.speed_at_end = await figures.speeds(load, began, ended, target.database_url)
    if target.database_url:
        found.tables_at_end = await figures.tables(target.database_url, counted=target.is_ours)
    verdict = await target.judge(load.confirmed)
    verdict.violations += load.violations + broken
    return Report(
        seed,
        duration_s,
        injector.done,
        verdict,
        load.refusals,
        found,
        injector.failed,
        {kind: injector.hit[kind] for kind in target.executor_kinds},
        target.name,
        sorted({fault.kind for fault in faults}, key=[*target.kinds, *target.also].index),
        target.wants_blobs,
    )


def deal(seed: int, duration_s: float, every_s: float, target: Target) -> list[Fault]:
    """The target's faults; where it does not insist on all kinds, so many as there is time for."""
    at_most = None if target.deals_all else max(1, round(duration_s / every_s))
    return (
        schedule(seed, duration_s, every_s, target.kinds, target.also, at_most=at_most)
        if target.kinds
        else []
    )


async def _quiet(target: Target) -> None:
    """Wait until every run has ended, or for as long as that may take."""
    if not target.database_url:
        return  # the load has waited for its own
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(target.quiet_s):
            while not await _is_quiet(target.database_url):
                await asyncio.sleep(_LOOK_S)


async def _is_quiet(database_url: str) -> bool:
    try:
        connection = await asyncpg.connect(database_url)
        try:
            return not await connection.fetchval(
                f"select exists (select from rara.workflow_run where ended_at is null and {OURS})"  # noqa: S608
                f" or exists (select from rara.lease join rara.workflow_run using (workflow_run_id) where {OURS})"
            )
        finally:
            connection.terminate()
    except _AWAY:
        return False


@contextlib.asynccontextmanager
async def _background(work: Coroutine[None, None, None], broken: list[str]) -> AsyncIterator[None]:
    """broken: where it is said if the work failed."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            broken.append(f"what goes on beside the load failed: {ended!r}")
