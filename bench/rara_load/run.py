"""A load from its first call to its report."""

import asyncio
import os
import random
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from rara_client import RaraError

from rara_load import database
from rara_load.figures import Figures
from rara_load.machine import Machine, Use, use_of
from rara_load.pace import Pace
from rara_load.plan import Plan
from rara_load.preflight import prepare
from rara_load.report import Result
from rara_load.settle import Settling
from rara_load.targets import clients
from rara_load.turns import Caller

Say = Callable[[str], None]
_CHECK_S = 1800.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the load goes, and what else may be looked at there."""

    addresses: Sequence[str]
    connections: int = 4
    database_url: str = ""
    check_command: Sequence[str] = ()
    machine: Machine = field(default_factory=lambda: Machine({}))
    tolerated: frozenset[str] = frozenset()
    logs: Path | None = None


@dataclass(slots=True)
class Stops:
    """asked: begin no more turns, and finish. hurried: wait for nothing any more."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    hurried: asyncio.Event = field(default_factory=asyncio.Event)

    def signal(self) -> None:
        """Ctrl-C: the second time is in a hurry."""
        (self.hurried if self.asked.is_set() else self.asked).set()


async def put_load(setting: Setting, plan: Plan, stops: Stops, say: Say) -> Result:
    """Raises NotReady, RaraError and ValueError where it cannot begin."""
    load_id = uuid.uuid4().hex[:12]
    result = Result(load_id, setting.addresses, plan, Figures(), tolerated=setting.tolerated)
    async with clients(setting.addresses, setting.connections) as made:
        ready = await prepare(made[0], plan, load_id)
        result.figures.started += 1
        say(f"load {load_id}: {plan.warm_up_s:g} s of warm-up, then {_length(plan)}")
        draw = random.Random(f"{plan.seed} caller")
        caller = Caller(plan, load_id, result.figures, made, ready.versions, draw)
        caller.runs.append(ready.run_id)
        caller.steps.append(ready.step_id)
        before = await _look(setting, result)
        await _take_turns(Pace(plan, caller, stops.asked), result, stops, say)
        await _unless_hurried(
            _settle(Settling(made[0], load_id, ready.since, plan.settle_s), result, say), stops
        )
        _compare(result, before, await _look(setting, result))
    if setting.database_url or setting.check_command:
        say("checking the history")
    await _unless_hurried(_check(setting, result), stops)
    return result


def _length(plan: Plan) -> str:
    how = f"{plan.rate:g} turns/s" if plan.rate else f"{plan.callers} callers"
    return f"{how} for {plan.duration_s:g} s" if plan.duration_s else f"{how} until Ctrl-C"


async def _take_turns(pace: Pace, result: Result, stops: Stops, say: Say) -> None:
    """Begin turns for as long as planned, and finish them; in a hurry they are dropped."""
    telling = asyncio.create_task(_tell(pace, say), name="tell")
    try:
        await _unless_hurried(pace.run(), stops)
    finally:
        telling.cancel()
        await asyncio.wait([telling])
    result.window_s = max(0.0, pace.ended_s - pace.measured_s)
    if stops.asked.is_set():
        result.notes.append("stopped before its time" if pace.plan.duration_s else "stopped as asked")


async def _tell(pace: Pace, say: Say) -> None:
    """A line every few seconds, and a point for the picture."""
    caller, figures = pace.caller, pace.caller.figures
    while True:
        await asyncio.sleep(pace.plan.every_s)
        at_s = time.monotonic() - pace.began_s
        point = figures.point(at_s)
        say(
            f"{at_s:8.1f} s  {point.turns / point.span_s:7.1f} turns/s {point.runs / point.span_s:7.1f} runs/s"
            f"  start p50 {point.p50_ms:.1f} p99 {point.p99_ms:.1f} ms"
            f"  in flight {caller.in_flight}  errors {figures.errors.total()}"
        )


async def _settle(settling: Settling, result: Result, say: Say) -> None:
    say("waiting for the runs to end")
    result.settled = await settling.wait()
    say("counting the runs")
    try:
        result.tally = await settling.tally()
    except RaraError as fault:
        result.notes.append(f"counting the runs failed: {fault}")


async def _check(setting: Setting, result: Result) -> None:
    try:
        result.checked = await database.checked(setting.database_url, setting.check_command, _CHECK_S)
    except OSError as error:  # there is no such command
        result.checked = database.Checked(was_run=True, report=str(error))


@dataclass(frozen=True, slots=True)
class _Look:
    own: Use | None
    processes: Mapping[str, Use]
    sizes: database.Sizes | None


async def _look(setting: Setting, result: Result) -> _Look:
    """What is used now; what cannot be seen becomes a note, for the load is worth its figures without."""
    processes: Mapping[str, Use] = {}
    sizes = None
    try:
        processes = await setting.machine.use()
    except OSError as error:
        result.notes.append(str(error))
    if setting.database_url:
        try:
            sizes = await database.sizes(setting.database_url)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            result.notes.append(f"the sizes of tables could not be read: {error}")
    return _Look(use_of(os.getpid(), with_children=False), processes, sizes)


def _compare(result: Result, before: _Look, after: _Look) -> None:
    if before.own is not None and after.own is not None:
        result.own = before.own, after.own
    result.processes = before.processes, after.processes
    if before.sizes is not None and after.sizes is not None:
        result.database = before.sizes, after.sizes


async def _unless_hurried(work: Coroutine[None, None, None], stops: Stops) -> None:
    """Wait for the work, or drop it when somebody is in a hurry."""
    working = asyncio.create_task(work, name="work")
    hurried = asyncio.create_task(stops.hurried.wait(), name="hurried")
    try:
        await asyncio.wait([working, hurried], return_when=asyncio.FIRST_COMPLETED)
    finally:
        hurried.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait([working, hurried])
    if not working.cancelled():
        working.result()
