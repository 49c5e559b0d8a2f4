"""Our executors keep every rule of the contract, whichever side dials."""

import asyncio
import sys
from pathlib import Path

import pytest
from rara_testing.conformance import Target, Way, scenarios, verify
from rara_testing.conformance.run import Verdict
from support.go_executor import program

PYTHON = f"{sys.executable} -m rara_executor --module rara_testing.probes"
AT_ONCE = 4  # executors that are verified side by side: most scenarios wait


async def keeps_every_rule(command: str, way: Way, folder: Path) -> None:
    names = [scenario.name for scenario in scenarios() if way in scenario.ways]
    parts = await asyncio.gather(
        *(
            verify(Target(folder / str(part), command=command, way=way), only=names[part::AT_ONCE])
            for part in range(AT_ONCE)
        )
    )
    outcomes = [outcome for part in parts for outcome in part]
    assert [(o.scenario.name, o.detail) for o in outcomes if o.verdict is not Verdict.KEPT] == []
    assert sorted(outcome.scenario.name for outcome in outcomes) == names


@pytest.mark.parametrize("way", Way)
async def test_the_python_executor_keeps_every_rule(way: Way, tmp_path: Path) -> None:
    await keeps_every_rule(PYTHON, way, tmp_path)


@pytest.mark.needs("go")
@pytest.mark.parametrize("way", Way)
async def test_the_go_executor_keeps_every_rule(way: Way, tmp_path: Path) -> None:
    await keeps_every_rule(str(program("rara-go-probe")), way, tmp_path)
