"""The suite can fail: an executor that breaks one rule is found by the scenario of that rule."""

import asyncio
import sys
from pathlib import Path

import pytest
from rara_testing.conformance import Target, scenarios, verify
from rara_testing.conformance.run import Verdict
from support.broken_executor import BREAKS

AT_ONCE = 4
PARTS = 4  # the first is run each time, the others by `make soak`
TESTS = Path(__file__).resolve().parents[1]


def test_there_is_a_break_for_every_scenario() -> None:
    assert sorted(BREAKS) == [scenario.name for scenario in scenarios()]


async def judged(name: str, folder: Path, slots: asyncio.Semaphore) -> tuple[str, Verdict, str]:
    command = f"{sys.executable} -m support.broken_executor {name} --module rara_testing.probes"
    target = Target(folder / name, command=command, env={"PYTHONPATH": str(TESTS)})
    async with slots:
        [outcome] = await verify(target, only=[name], patience_s=3.0)
    return name, outcome.verdict, outcome.detail


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, PARTS))]
)
async def test_every_break_is_found_by_its_scenario(part: int, tmp_path: Path) -> None:
    slots = asyncio.Semaphore(AT_ONCE)
    names = sorted(BREAKS)[part::PARTS]
    found = await asyncio.gather(*(judged(name, tmp_path, slots) for name in names))
    assert [name for name, verdict, _ in found if verdict is not Verdict.BROKEN] == []
