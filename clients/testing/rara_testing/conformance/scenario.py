"""Scenarios as they stand in their files.

    rule: Nothing runs before `accepted` is acknowledged.
    scheduler: {acknowledge: false}
    steps:
      - jobs: [{token: 1, kind: probe.echo, input: {a: 1}}]
      - event: {token: 1, is: accepted, sequence: 1}
      - quiet: {token: 1, for_s: 0.5}
      - acknowledge: {token: 1, through: 1}
      - event: {token: 1, is: succeeded, output: {a: 1}}

Tokens are the scenario's own: each run of a scenario adds the same number to all of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import resources
from typing import Any, Final

import yaml


class Way(StrEnum):
    """How scheduler and executor meet."""

    SESSION = "session"  # the executor dials
    DIRECT = "direct"  # the scheduler dials


class ScenarioInvalid(Exception):
    """A scenario file says something that nobody understands."""


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do or to expect: a verb and what it is given."""

    verb: str
    given: Any


@dataclass(frozen=True, slots=True)
class Scenario:
    """One rule and how to see that it is kept.

    scheduler: what the scripted scheduler does otherwise than by default, see `script.Behaviour`.
    needs_process: signals are sent, or the end is watched, so an address alone is not enough.
    """

    name: str
    rule: str
    steps: Sequence[Step]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    ways: frozenset[Way] = frozenset(Way)
    needs_process: bool = False


_KEYS: Final = {"rule", "steps", "scheduler", "ways"}
_PROCESS_VERBS: Final = {"signal", "exit"}


def read(name: str, text: str) -> Scenario:
    """Raises ScenarioInvalid."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ScenarioInvalid(f"{name}: {error}") from None
    if not isinstance(document, dict) or not {"rule", "steps"} <= document.keys() <= _KEYS:
        raise ScenarioInvalid(f"{name}: must be a mapping of rule and steps, and perhaps scheduler and ways")
    steps = []
    for number, step in enumerate(document["steps"], 1):
        if not isinstance(step, dict) or len(step) != 1:
            raise ScenarioInvalid(f"{name}: step {number} must have one verb")
        [(verb, given)] = step.items()
        steps.append(Step(verb, {} if given is None else given))
    return Scenario(
        name=name,
        rule=" ".join(str(document["rule"]).split()),
        steps=tuple(steps),
        scheduler=document.get("scheduler") or {},
        ways=frozenset(Way(way) for way in document.get("ways", list(Way))),
        needs_process=any(step.verb in _PROCESS_VERBS for step in steps),
    )


def scenarios() -> list[Scenario]:
    """Every scenario, by name."""
    folder = resources.files(__package__) / "scenarios"
    found = [
        read(entry.name.removesuffix(".yaml"), entry.read_text(encoding="utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    ]
    return sorted(found, key=lambda scenario: scenario.name)
