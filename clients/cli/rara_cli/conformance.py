"""`rara executor verify` on the screen: a line for each rule as it is judged, and the sum at the end."""

import json
import shlex
import tempfile
from pathlib import Path

import click
from rara_testing.conformance import Outcome, Scenario, Target, TargetFailed, Way, scenarios, verify
from rara_testing.conformance.run import Verdict

from rara_cli.exits import CommandError, Exit
from rara_cli.session import Session

_SIGNS = {Verdict.KEPT: "ok", Verdict.BROKEN: "BROKEN", Verdict.LEFT_OUT: "left out"}


def show_rules(session: Session) -> None:
    """List the scenarios without playing any."""
    found = scenarios()
    if session.output == "json":
        click.echo(json.dumps([_described(scenario) for scenario in found]))
        return
    for scenario in found:
        click.echo(f"{scenario.name}\n    {scenario.rule}")


async def verify_executor(
    session: Session, *, command: str, address: str, direct: bool, only: tuple[str, ...]
) -> None:
    """Play the scenarios. Raises CommandError when a rule is broken or the executor is not met."""
    unknown = set(only) - {scenario.name for scenario in scenarios()}
    if unknown:
        raise CommandError(
            Exit.USAGE, "SCENARIO_UNKNOWN", f"no scenario {sorted(unknown)[0]}", "rara executor verify --list"
        )
    if command and not shlex.split(command):
        raise CommandError(Exit.USAGE, "COMMAND_EMPTY", "--command names nothing to start")
    on_screen = session.output != "json"
    with tempfile.TemporaryDirectory(prefix="rara-verify-") as folder:
        target = Target(
            Path(folder),
            command=command,
            address=address,
            way=Way.DIRECT if direct or address else Way.SESSION,
        )
        try:
            outcomes = await verify(target, only=only, on_outcome=_say if on_screen else lambda _: None)
        except TargetFailed as error:
            raise CommandError(Exit.UNREACHABLE, "EXECUTOR_NOT_MET", str(error)) from None
    if not on_screen:
        click.echo(json.dumps([_judged(outcome) for outcome in outcomes]))
    broken = [outcome for outcome in outcomes if outcome.verdict is Verdict.BROKEN]
    kept = sum(outcome.verdict is Verdict.KEPT for outcome in outcomes)
    if on_screen:
        left_out = len(outcomes) - kept - len(broken)
        click.echo(f"{kept} kept, {len(broken)} broken, {left_out} left out, {target.way}")
    if broken:
        raise CommandError(
            Exit.PROMISE_BROKEN, "CONTRACT_BROKEN", f"{len(broken)} of {len(outcomes)} rules are broken"
        )


def _say(outcome: Outcome) -> None:
    click.echo(f"{_SIGNS[outcome.verdict]:8} {outcome.took_s:5.1f} s  {outcome.scenario.name}")
    if outcome.verdict is not Verdict.KEPT:
        click.echo(f"    {outcome.detail}")
    if outcome.verdict is Verdict.BROKEN:
        click.echo(f"    rule: {outcome.scenario.rule}")


def _described(scenario: Scenario) -> dict[str, object]:
    return {"name": scenario.name, "rule": scenario.rule, "ways": sorted(scenario.ways)}


def _judged(outcome: Outcome) -> dict[str, object]:
    return {
        "scenario": outcome.scenario.name,
        "rule": outcome.scenario.rule,
        "way": str(outcome.way),
        "verdict": str(outcome.verdict),
        "detail": outcome.detail,
        "took_s": round(outcome.took_s, 3),
    }
