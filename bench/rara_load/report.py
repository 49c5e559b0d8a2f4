"""What a load came to: a document for programs, a table for people, and what was wrong."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rara_load.database import Checked, Sizes
from rara_load.figures import STAGES, Figures, Latencies
from rara_load.machine import Use, compared
from rara_load.plan import Plan
from rara_load.settle import Tally

_MIB: Final = 1024 * 1024
_COLUMNS: Final = ("p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms")
_LATE_MS: Final = 100.0
BROKEN: Final = 7  # as of `rara db check`
FAULTY: Final = 1


@dataclass(slots=True)
class Result:
    """Everything that is known at the end. window_s: without the warm-up.

    tally None: it was given up. tolerated: codes of errors that count as planned.
    """

    load_id: str
    addresses: Sequence[str]
    plan: Plan
    figures: Figures
    window_s: float = 0.0
    tolerated: frozenset[str] = frozenset()
    tally: Tally | None = None
    settled: bool = False
    own: tuple[Use, Use] | None = None
    processes: tuple[Mapping[str, Use], Mapping[str, Use]] = field(default_factory=lambda: ({}, {}))
    database: tuple[Sizes, Sizes] | None = None
    checked: Checked = field(default_factory=lambda: Checked(was_run=False))
    notes: list[str] = field(default_factory=list)

    @property
    def broken(self) -> list[str]:
        """Promises that were broken."""
        found = []
        if self.checked.violations:
            found.append(f"the history checker found {self.checked.violations} violations")
        if (tally := self.tally) is not None:
            missing = self.figures.started - tally.found
            if missing > 0:
                found.append(f"{missing} runs whose start was answered are not there")
            if -missing > self.figures.unknown:
                found.append(f"{-missing} runs are there that nobody started")
        return found

    @property
    def faults(self) -> list[str]:
        """What else should not have been."""
        found = [
            f"{count} calls ended with {code}"
            for code, count in sorted(self.figures.errors.items())
            if code not in self.tolerated
        ]
        if self.checked.was_run and self.checked.violations is None:
            found.append(f"the history checker could not say: {self.checked.report}")
        if (tally := self.tally) is None:
            found.append("the runs were not counted")
        elif tally.unplanned:
            found.append(f"{tally.unplanned} runs did not end as planned")
        if not self.settled:
            left = tally.by_state["open"] if tally else "some"
            found.append(f"{left} runs were still open {self.plan.settle_s:g} s after the load")
        return found

    @property
    def exit_code(self) -> int:
        return BROKEN if self.broken else FAULTY if self.faults else 0

    def as_json(self) -> dict[str, Any]:
        figures = self.figures
        return {
            "load": self.load_id,
            "command": " ".join(sys.argv),
            "servers": list(self.addresses),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "plan": asdict(self.plan),
            "window_s": round(self.window_s, 3),
            "throughput": self._throughput(),
            "stages": {name: latencies.summary() for name, latencies in self.stages().items()},
            "operations": {
                kind: {
                    "turns": sent.turns,
                    "per_s": self._per_s(sent.turns),
                    "latency": sent.latencies.summary(),
                    "errors": dict(sent.errors),
                }
                for kind, sent in figures.operations.items()
                if kind in self.plan.mix
            },
            "errors": dict(figures.errors),
            "tolerated": sorted(self.tolerated),
            "runs": self._runs(),
            "generator": self._generator(),
            "processes": compared(*self.processes),
            "database": self._database(),
            "check": self.checked.as_json(),
            "series": figures.series(),
            "notes": self.notes,
            "problems": [*self.broken, *self.faults],
            "is_good": not self.exit_code,
        }

    def stages(self) -> dict[str, Latencies]:
        found = {name: self.figures.stages[name] for name in STAGES}
        if self.tally is not None:
            found["created_to_ended"] = self.tally.created_to_ended
        return found

    def _per_s(self, count: float) -> float:
        return round(count / self.window_s, 3) if self.window_s else 0.0

    def _throughput(self) -> dict[str, float]:
        turns = sum(sent.turns for sent in self.figures.operations.values())
        runs, steps = self.tally.finished_per_s() if self.tally else (0.0, 0.0)
        return {
            "turns_per_s": self._per_s(turns),
            "runs_started_per_s": self._per_s(self.figures.started_measured),
            "runs_finished_per_s": round(runs, 3),
            "steps_finished_per_s": round(steps, 3),
        }

    def _runs(self) -> dict[str, Any]:
        """started: as answered; found: as stored, which may be more by what was not answered."""
        found: dict[str, Any] = {"started": self.figures.started, "start_unknown": self.figures.unknown}
        if self.tally is not None:
            states = ("succeeded", "failed", "cancelled", "open")
            found |= {"found": self.tally.found, **{state: self.tally.by_state[state] for state in states}}
            found |= {"unplanned": self.tally.unplanned, "examples": self.tally.examples}
        return found

    def _generator(self) -> dict[str, Any]:
        """Its own part in what was measured."""
        found: dict[str, Any] = {
            "send_lag": self.figures.send_lag.summary(),
            "not_begun": self.figures.not_begun,
        }
        if self.own is not None:
            before, after = self.own
            found |= {"cpu_s": round(after.cpu_s - before.cpu_s, 3)}
            found |= {"memory_bytes": {"start": before.memory_bytes, "end": after.memory_bytes}}
        return found

    def _database(self) -> dict[str, Any] | None:
        if self.database is None:
            return None
        before, after = self.database
        return {
            "start": before.as_json(),
            "end": after.as_json(),
            "wal_bytes": after.wal_bytes - before.wal_bytes,
        }

    # For people

    def lines(self) -> list[str]:
        found = ["", *self._head(), "", *self._latency_lines(), ""]
        found += self._use_lines()
        found += [f"note: {note}" for note in self._all_notes()]
        check = self.checked
        if not check.was_run:
            found.append(f"history check: left out: {check.report}")
        elif check.violations is not None:
            found.append(f"history check: {check.violations} violations")
        found += [f"BROKEN: {line}" for line in self.broken]
        found += [f"WRONG: {line}" for line in self.faults]
        if self.tally:
            found += [f"  {line}" for line in self.tally.examples]
        return found

    def _head(self) -> list[str]:
        flow, runs = self._throughput(), self._runs()
        return [
            (
                f"{self.window_s:.1f} s measured: {flow['turns_per_s']:.1f} turns/s,"
                f" {flow['runs_started_per_s']:.1f} runs/s started, {flow['runs_finished_per_s']:.1f} finished,"
                f" {flow['steps_finished_per_s']:.1f} steps/s"
            ),
            "runs, warm-up included: " + ", ".join(f"{n} {k}" for k, n in runs.items() if k != "examples"),
            f"errors: {dict(self.figures.errors) or 'none'}",
        ]

    def _latency_lines(self) -> list[str]:
        head = f"{'latency, ms':<26}{'count':>9}" + "".join(f"{name[:-3]:>10}" for name in _COLUMNS)
        rows = {**self.stages(), "sent late by": self.figures.send_lag}
        rows |= {f"call: {kind}": self.figures.operations[kind].latencies for kind in self.plan.mix}
        return [head] + [_row(name, latencies) for name, latencies in rows.items() if latencies.count]

    def _use_lines(self) -> list[str]:
        before, after = self.processes
        found = []
        if after:
            found.append(f"{'process':<26}{'MiB, start':>12}{'MiB, end':>12}{'CPU, s':>10}")
        for name, use in compared(before, after).items():
            first, last, cpu_s = (_member(use, key) for key in ("start", "end", "cpu_s"))
            mib = [f"{one['memory_bytes'] / _MIB:.0f}" if one else "-" for one in (first, last)]
            found.append(f"{name:<26}{mib[0]:>12}{mib[1]:>12}{'-' if cpu_s is None else f'{cpu_s:.1f}':>10}")
        if self.database is not None:
            found += _table_lines(*self.database)
        return [*found, ""] if found else []

    def _all_notes(self) -> list[str]:
        late_ms = self.figures.send_lag.at_ms(99)
        not_begun = self.figures.not_begun
        if late_ms <= _LATE_MS and not not_begun:
            return self.notes
        return [
            *self.notes,
            (
                f"turns began up to {late_ms:.0f} ms late (p99), {not_begun} not at all: the load was more than the"
                " generator, or --max-in-flight, allows; latencies count from when they were due"
            ),
        ]


def _member(use: object, key: str) -> Any:
    return use[key] if isinstance(use, dict) else None


def _row(name: str, latencies: Latencies) -> str:
    summary = latencies.summary()
    return f"{name:<26}{latencies.count:>9}" + "".join(f"{summary[column]:>10.1f}" for column in _COLUMNS)


def _table_lines(before: Sizes, after: Sizes) -> list[str]:
    """The largest tables."""
    grown = (after.size_bytes - before.size_bytes) / _MIB
    found = [
        (
            f"database: {after.size_bytes / _MIB:.0f} MiB, {grown:+.0f};"
            f" WAL written: {(after.wal_bytes - before.wal_bytes) / _MIB:.0f} MiB"
        ),
        f"{'table':<26}{'MiB':>10}{'index MiB':>12}{'live':>12}{'dead':>10}",
    ]
    for name, table in list(after.tables.items())[:8]:
        found.append(
            f"{name:<26}{table['table_bytes'] / _MIB:>10.1f}{table['index_bytes'] / _MIB:>12.1f}"
            f"{table['live_tuples']:>12}{table['dead_tuples']:>10}"
        )
    return found
