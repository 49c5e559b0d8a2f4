"""What a run of the chaos runner says at its end: lines for people, then one JSON object."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rara_chaos.figures import Figures
from rara_chaos.schedule import OF_EXECUTORS, PROCESS_KINDS, Kind
from rara_chaos.verdict import Recovery, Verdict

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Report:
    seed: int
    duration_s: float
    faults: Mapping[Kind, int]
    verdict: Verdict
    refusals: Mapping[str, int]
    figures: Figures
    missed: Sequence[str]  # faults that found no target
    executor_faults: Mapping[str, int]  # by the kind of the executor
    target: str = "local"
    dealt: Sequence[Kind] = PROCESS_KINDS  # by the schedule
    wants_blobs: bool = True

    @property
    def never(self) -> list[Kind]:
        """Kinds of fault that the schedule had and that were injected zero times."""
        return [kind for kind in self.dealt if not self.faults.get(kind)]

    @property
    def spared(self) -> list[str]:
        """Kinds of executor that ran nothing, or met no fault."""
        ran = self.verdict.attempts_by_kind
        has_faults = any(kind in OF_EXECUTORS for kind in self.dealt)
        return [
            kind
            for kind, hit in self.executor_faults.items()
            if not (ran.get(kind) and (hit or not has_faults))
        ]

    @property
    def is_good(self) -> bool:
        has_blobs = bool(self.verdict.blobs_verified) or not self.wants_blobs
        return (
            self.verdict.is_clean
            and bool(self.verdict.steps)
            and has_blobs
            and not self.never
            and not self.spared
        )

    def lines(self) -> list[str]:
        verdict = self.verdict
        lines = ["", f"faults injected: {sum(self.faults.values())}"]
        lines += [f"  {self.faults.get(kind, 0):5d}  {kind}" for kind in self.dealt]
        lines += [f"  missed: {missed}" for missed in self.missed]
        lines += [f"attempts: {verdict.attempts} of {verdict.steps} steps of {verdict.runs} runs, ended as"]
        lines += [f"  {count:5d}  {reason}" for reason, count in sorted(verdict.reasons.items())]
        lines += [
            f"{kind} executors: {verdict.attempts_by_kind.get(kind, 0)} attempts, {hit} faults of their own"
            for kind, hit in self.executor_faults.items()
        ]
        lines.append(f"steps that went on where another language had ended: {verdict.handovers}")
        lines.append(
            f"artifacts in manifests: {verdict.artifacts}, blobs verified: {verdict.blobs_verified},"
            f" removed by collections meanwhile: {verdict.removed}"
        )
        lines += [
            f"effects: {verdict.effects}; done again after a crash before the record: {verdict.effects_repeated}",
            f"calls repeated: {dict(self.refusals)}",
            _recovery(verdict.longest_recovery),
            *self.figures.lines(),
        ]
        for title, found in (
            ("violations", verdict.violations),
            ("lost", verdict.lost),
            ("stranded", verdict.stranded),
        ):
            lines.append(f"{title}: {len(found)}")
            lines += [f"  {what}" for what in found[:_SHOWN]]
        return lines

    def json(self) -> str:
        verdict = self.verdict
        return json.dumps(
            {
                "seed": self.seed,
                "duration_s": self.duration_s,
                "violations": len(verdict.violations),
                "lost": len(verdict.lost),
                "stranded": len(verdict.stranded),
                "faults": {str(kind): self.faults.get(kind, 0) for kind in self.dealt},
                "runs": verdict.runs,
                "steps": verdict.steps,
                "attempts": verdict.attempts,
                "attempts_by_kind": verdict.attempts_by_kind,
                "executor_faults": dict(self.executor_faults),
                "handovers": verdict.handovers,
                "effects": verdict.effects,
                "artifacts": verdict.artifacts,
                "blobs_verified": verdict.blobs_verified,
                "blobs_removed": verdict.removed,
                "longest_recovery_s": round(verdict.longest_recovery.seconds, 3),
                "target": self.target,
                "figures": self.figures.document(),
            }
        )


def _recovery(longest: Recovery) -> str:
    line = f"longest recovery after the kill of an executor: {longest.seconds:.2f} s"
    if not longest.step_run_id:
        return line
    killed = datetime.fromtimestamp(longest.killed_at, UTC)
    return f"{line} (step {longest.step_run_id}, {longest.executor} killed at {killed:%H:%M:%S.%f})"
