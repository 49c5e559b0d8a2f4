"""Rounds: every arm once, in turn, then again; what others disturbed is measured anew."""

import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rara_bench.arm import Arm, Bench, CannotMeasure, Sample
from rara_bench.machine import Watch

Measured: TypeAlias = tuple[list[Sample], dict[str, str]]


@dataclass(slots=True)
class _Spare:
    """Time for measuring again, of the whole run: on a busy machine it ends all the same."""

    left_s: float


async def run(bench: Bench, arms: Sequence[Arm]) -> Measured:
    """All samples, and of each arm that could not be measured the reason."""
    began = time.monotonic()
    samples: list[Sample] = []
    spare = _Spare(bench.options.retry_s)
    missing: dict[str, str] = {}
    failures: dict[str, str] = {}
    for number in range(1, bench.options.rounds + 1):
        for arm in arms:
            if arm.name in missing:
                continue
            try:
                sample = await _measure(bench, arm, number, began, spare)
            except CannotMeasure as problem:
                missing[arm.name] = str(problem)
                _say(f"round {number}  {arm.name:<24}cannot be measured: {problem}")
                continue
            except Exception as error:
                failures[arm.name] = f"{type(error).__name__}: {error}"
                _say(f"round {number}  {arm.name:<24}failed\n{traceback.format_exc()}")
                continue
            samples.append(sample)
            _say(f"round {number}  {arm.name:<24}{_shown(sample)}")
    measured = {sample.arm for sample in samples}
    missing |= {name: problem for name, problem in failures.items() if name not in measured}
    return samples, missing


async def _measure(bench: Bench, arm: Arm, number: int, began: float, spare: _Spare) -> Sample:
    """The least disturbed of a few tries; the first that was not disturbed ends them."""
    best: Sample | None = None
    for tries in range(1, bench.options.tries + 1):
        start, watch = time.monotonic(), Watch.begin()
        figures = await arm.measure(bench)
        busy, others = watch.shares()
        middle = (start + time.monotonic()) / 2 - began
        sample = Sample(arm.name, number, middle, figures, busy, others, tries)
        if best is None or sample.others < best.others:
            best = sample
        if tries > 1:
            spare.left_s -= time.monotonic() - start
        if others <= bench.options.others or spare.left_s <= 0:
            break
    assert best is not None
    return best


def _shown(sample: Sample) -> str:
    figures = "  ".join(f"{name}={_short(value)}" for name, value in sample.figures.items())
    return f"{figures}  (others {sample.others:.0%}, tries {sample.tries})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
