"""The demo's crashes: SIGKILL to the executor in the middle of a step, then to the scheduler in another."""

import json
import shutil
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rara.v1 import workflow_pb2
from rara_client import Client

from rara_cli.demoresult import Outcome
from rara_cli.demosay import Narrator
from rara_cli.jsonview import Json
from rara_cli.stack import Stack

# Shorter than the defaults (30, 5, 15 s), so that nobody has to wait for the recovery.
LEASES: Final[Mapping[str, str]] = {
    "RARA_LEASE_S": "10",
    "RARA_HEARTBEAT_S": "1",
    "RARA_SILENCE_S": "3",
}
EXECUTOR_DIES_IN: Final = "evaluate"
SCHEDULER_DIES_IN: Final = "adapt"
# Progress that counts as the middle: something was done, and enough is left to be cut off.
_MIDDLE: Final = (0.15, 0.75)
_SOURCES: Final = 2_000
# Not every Python comes with its tests, and a title such as "test io" asks for half of the corpus.
_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib"})


def write_corpus(folder: Path) -> int:
    """Copy sources of Python's standard library and installed packages as text files; how many there are."""
    count = 0
    for origin in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(origin))
        sources = _sources(root)
        wanted = max(_SOURCES - count, 0)
        for source in sources[:: max(1, -(-len(sources) // max(wanted, 1)))][:wanted]:
            target = (folder / origin / source.relative_to(root)).with_suffix(".txt")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            count += 1
    return count


def _sources(root: Path) -> list[Path]:
    found = (path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    return sorted(path for path in found if path.is_file())


@dataclass(slots=True)
class Crash:
    """One kill and what followed. Seconds are from the kill, by this process's clock.

    killed, then: the step before the kill, and when it was seen to have moved on after it.
    """

    victim: str
    killed: workflow_pb2.StepRun
    killed_at: float
    last_sequence: int = 0
    back_after_s: float | None = None
    recovered_after_s: float | None = None
    then: workflow_pb2.StepRun | None = None

    def to_json(self) -> Json:
        return {
            "victim": self.victim,
            "signal": "SIGKILL",
            "step_name": self.killed.step_name,
            "attempt_at_kill": self.killed.attempt,
            "progress_at_kill": self.killed.progress.message,
            "process_back_after_s": _rounded(self.back_after_s),
            "attempt_after": self.then.attempt if self.then is not None else None,
            "progress_after": self.then.progress.message if self.then is not None else None,
            "step_moving_again_after_s": _rounded(self.recovered_after_s),
        }


class Crashes:
    """Watches for the moments to kill, and for the recoveries."""

    def __init__(self, stack: Stack, client: Client, say: Narrator) -> None:
        self._stack = stack
        self._client = client
        self._say = say
        self.executor: Crash | None = None
        self.scheduler: Crash | None = None

    async def see(self, step: workflow_pb2.StepRun) -> None:
        """Take in a step as the watch showed it."""
        if self.executor is None and _is_in_the_middle(step, EXECUTOR_DIES_IN):
            self.executor = await self._kill_executor(step)
        elif self.scheduler is None and _is_in_the_middle(step, SCHEDULER_DIES_IN):
            self.scheduler = await self._kill_scheduler(step)
        for crash in (self.executor, self.scheduler):
            if crash is not None and crash.then is None and _has_moved_on(step, crash):
                self._recovered(crash, step)

    async def _kill_executor(self, step: workflow_pb2.StepRun) -> Crash:
        self._say.say(f"SIGKILL to the executor, process {self._stack.executor.pid}, {_where(step)}")
        crash = Crash("executor", _copy(step), time.monotonic())
        await self._stack.kill_executor(restart=False)
        await self._stack.restart_executor()
        crash.back_after_s = time.monotonic() - crash.killed_at
        self._say.say(
            f"a new executor has connected after {crash.back_after_s:.1f} s; the lease runs out first"
        )
        return crash

    async def _kill_scheduler(self, step: workflow_pb2.StepRun) -> Crash:
        self._say.say(f"SIGKILL to the scheduler, process {self._stack.scheduler.pid}, {_where(step)}")
        crash = Crash("scheduler", _copy(step), time.monotonic())
        await self._stack.kill_scheduler(restart=False)
        await self._stack.restart_scheduler()
        crash.back_after_s = time.monotonic() - crash.killed_at
        # What the dead scheduler had stored is no sign of life of the new one.
        crash.last_sequence = (await self._client.get_step_run(step.step_run_id)).step_run.last_sequence
        self._say.say(f"the scheduler serves again after {crash.back_after_s:.1f} s; the executor worked on")
        return crash

    def _recovered(self, crash: Crash, step: workflow_pb2.StepRun) -> None:
        crash.then = _copy(step)
        crash.recovered_after_s = time.monotonic() - crash.killed_at
        self._say.say(
            f"{step.step_name} moves again {crash.recovered_after_s:.1f} s after the kill of the"
            f" {crash.victim}: attempt {step.attempt}, {step.progress.message}"
        )

    def print(self, outcome: Outcome, ledger: Path) -> None:
        self._say.heading(f"Recovery, with a lease of {LEASES['RARA_LEASE_S']} s (the default is 30 s)")
        for crash in (self.executor, self.scheduler):
            if crash is not None:
                for line in _lines(crash, outcome):
                    self._say.plain(f"  {line}")
        results = [_results(step) for step in outcome.steps]
        self._say.plain(f"  results    {sum(results)} for {len(results)} steps")
        asked, effects = _effects(ledger)
        self._say.plain(
            f"  effects    {', '.join(sorted(effects))}: asked for {asked} times, done {len(effects)}"
        )

    def faults(self, outcome: Outcome, ledger: Path) -> list[str]:
        """Which promises did not show; empty: all did."""
        found = []
        for crash, name in ((self.executor, "executor"), (self.scheduler, "scheduler")):
            if crash is None:
                found.append(
                    f"no step was slow enough to kill the {name} in its middle: take a larger corpus"
                )
            elif crash.then is None:
                found.append(
                    f"step {crash.killed.step_name} was not seen to go on after the kill of the {name}"
                )
        found += self._attempt_faults(outcome)
        found += [
            f"step {step.step_run.step_name} has {_results(step)} results"
            for step in outcome.steps
            if _results(step) != 1
        ]
        _, effects = _effects(ledger)
        found += [f"effect {name} was done {times} times" for name, times in effects.items() if times != 1]
        expected = {"open-evaluation", "open-experiment", "publish-settings"}
        found += [f"effect {name} was never done" for name in sorted(expected - set(effects))]
        return found

    def _attempt_faults(self, outcome: Outcome) -> list[str]:
        found = []
        if self.executor is not None and (step := outcome.step(EXECUTOR_DIES_IN)) is not None:
            tokens = [attempt.lease.lease_token for attempt in step.attempts]
            if [attempt.reason for attempt in step.attempts] != ["LEASE_EXPIRED", ""]:
                found.append(f"{EXECUTOR_DIES_IN} ended otherwise than by one expired lease and a success")
            if tokens != sorted(set(tokens)):
                found.append(f"lease tokens of {EXECUTOR_DIES_IN} do not rise: {tokens}")
        step = outcome.step(SCHEDULER_DIES_IN)
        if self.scheduler is not None and step is not None and len(step.attempts) != 1:
            found.append(
                f"{SCHEDULER_DIES_IN} took {len(step.attempts)} attempts, the crash should cost none"
            )
        return found

    def to_json(self, ledger: Path) -> Json:
        asked, effects = _effects(ledger)
        return {
            "lease_s": float(LEASES["RARA_LEASE_S"]),
            "crashes": [crash.to_json() for crash in (self.executor, self.scheduler) if crash is not None],
            "effects": {"asked": asked, "done": effects},
        }


def _is_in_the_middle(step: workflow_pb2.StepRun, name: str) -> bool:
    low, high = _MIDDLE
    is_running = step.state == workflow_pb2.STEP_RUN_STATE_RUNNING
    return step.step_name == name and is_running and low <= step.progress.fraction <= high


def _has_moved_on(step: workflow_pb2.StepRun, crash: Crash) -> bool:
    if step.step_run_id != crash.killed.step_run_id:
        return False
    if crash.victim == "executor":
        return step.attempt > crash.killed.attempt and step.progress.fraction > crash.killed.progress.fraction
    return step.last_sequence > crash.last_sequence


def _lines(crash: Crash, outcome: Outcome) -> list[str]:
    step = outcome.step(crash.killed.step_name)
    tokens = {attempt.lease.attempt: attempt.lease.lease_token for attempt in step.attempts} if step else {}
    before, after = crash.killed, crash.then
    lines = [
        f"{crash.victim:<9}  killed {_where(before)}, lease token {tokens.get(before.attempt)}",
        f"{'':<9}  process back after {crash.back_after_s or 0.0:.1f} s",
    ]
    if after is not None and crash.recovered_after_s is not None:
        same = "the same " if after.attempt == before.attempt else ""
        lines.append(
            f"{'':<9}  step moving again after {crash.recovered_after_s:.1f} s: {same}attempt {after.attempt},"
            f" {same}lease token {tokens.get(after.attempt)}, went on at: {after.progress.message}"
        )
    return lines


def _where(step: workflow_pb2.StepRun) -> str:
    return f"in the middle of {step.step_name}: attempt {step.attempt}, {step.progress.message}"


def _results(step: workflow_pb2.GetStepRunResponse) -> int:
    """Attempts that ended well: an attempt has a reason unless it succeeded."""
    return sum(attempt.HasField("ended_at") and not attempt.reason for attempt in step.attempts)


def _effects(ledger: Path) -> tuple[int, dict[str, int]]:
    """How many calls reached the ledger, and how often each effect was done."""
    if not ledger.exists():
        return 0, {}
    lines: list[dict[str, Any]] = [json.loads(line) for line in ledger.read_bytes().splitlines()]
    done: dict[str, int] = {}
    for line in lines:
        done[line["effect"]] = done.get(line["effect"], 0) + bool(line["applied"])
    return len(lines), done


def _copy(step: workflow_pb2.StepRun) -> workflow_pb2.StepRun:
    kept = workflow_pb2.StepRun()
    kept.CopyFrom(step)
    return kept


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
