"""Whether an executor keeps the contract: golden scenarios, one file each, played by a scripted scheduler.

`rara executor verify` is the command for it; docs/how-to/executor-in-another-language.md says what to offer.
"""

from rara_testing.conformance.run import Outcome, verify
from rara_testing.conformance.scenario import Scenario, ScenarioInvalid, Way, scenarios
from rara_testing.conformance.target import Target, TargetFailed

__all__ = [
    "Outcome",
    "Scenario",
    "ScenarioInvalid",
    "Target",
    "TargetFailed",
    "Way",
    "scenarios",
    "verify",
]
