"""Our executors keep every rule of the contract, whichever side dials."""

import sys
from pathlib import Path

import pytest
from rara_testing.conformance import Target, Way, verify
from rara_testing.conformance.run import Verdict
from support.go_executor import program

PYTHON = f"{sys.executable} -m rara_executor --module rara_testing.probes"


@pytest.mark.parametrize("way", Way)
async def test_the_python_executor_keeps_every_rule(way: Way, tmp_path: Path) -> None:
    outcomes = await verify(Target(tmp_path, command=PYTHON, way=way))
    assert [(o.scenario.name, o.detail) for o in outcomes if o.verdict is Verdict.BROKEN] == []
    kept = sum(outcome.verdict is Verdict.KEPT for outcome in outcomes)
    assert kept == len([o for o in outcomes if way in o.scenario.ways])


@pytest.mark.needs("go")
@pytest.mark.parametrize("way", Way)
async def test_the_go_executor_keeps_every_rule(way: Way, tmp_path: Path) -> None:
    outcomes = await verify(Target(tmp_path, command=str(program("rara-go-probe")), way=way))
    assert [(o.scenario.name, o.detail) for o in outcomes if o.verdict is Verdict.BROKEN] == []
    kept = sum(outcome.verdict is Verdict.KEPT for outcome in outcomes)
    assert kept == len([o for o in outcomes if way in o.scenario.ways])
