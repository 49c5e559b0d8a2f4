"""The demo's result for people: steps, figures, artifacts and where they came from."""

from rara.v1 import workflow_pb2

from rara_cli import words
from rara_cli.demoresult import Made, Outcome, seconds_between
from rara_cli.demosay import Narrator
from rara_cli.tables import Column, render


def print_outcome(say: Narrator, outcome: Outcome) -> None:
    run = outcome.run
    took = f" in {seconds_between(run.started_at, run.ended_at):.1f} s" if run.ended_at.seconds else ""
    say.heading(f"Run {run.workflow_run_id}: {words.run_state(run.state)}{took}")
    _indent(say, render(outcome.steps, _STEPS, width=None, in_color=False))
    for step in outcome.steps:
        if error := step.step_run.error.message:
            say.plain(f"  {step.step_run.step_name}: {step.step_run.error.code}: {words.clean(error)}")
    if outcome.figures:
        _print_figures(say, outcome)
    if made := outcome.made():
        say.heading("Artifacts, and what made and used them")
        _indent(say, render(made, _ARTIFACTS, width=None, in_color=False))


def _print_figures(say: Narrator, outcome: Outcome) -> None:
    figures = outcome.figures
    say.heading(f"How well {figures['queries']:,} documents are found by their titles (not in the index)")
    say.plain(
        f"  recall@1 {figures['recall_at_1']:.3f}   recall@10 {figures['recall_at_10']:.3f}"
        f"   mean reciprocal rank {figures['mrr']:.3f}"
    )
    if adapted := outcome.output("adapt"):
        chosen = adapted["settings"]
        say.plain(
            f"  best of {adapted['tried']} settings on one half: {chosen['tokenizer']},"
            f" heading x{chosen['heading_weight']:g}, depth {chosen['depth']}"
        )
        say.plain(
            f"  on the other {adapted['held_out_queries']:,} documents: mean reciprocal rank"
            f" {adapted['held_out_mrr']:.3f}, with the defaults {adapted['held_out_mrr_of_defaults']:.3f}"
        )


def _indent(say: Narrator, lines: list[str]) -> None:
    for line in lines:
        say.plain(f"  {line}")


def _lease_token(step: workflow_pb2.GetStepRunResponse) -> str:
    return str(step.attempts[-1].lease.lease_token) if step.attempts else ""


def _duration(step: workflow_pb2.StepRun) -> str:
    if not step.started_at.seconds or not step.ended_at.seconds:
        return ""
    return f"{seconds_between(step.started_at, step.ended_at):.2f} s"


_STEPS: list[Column[workflow_pb2.GetStepRunResponse]] = [
    Column("STEP", lambda step: step.step_run.step_name),
    Column("STATE", lambda step: words.step_state(step.step_run.state)),
    Column("ATTEMPT", lambda step: str(step.step_run.attempt), is_number=True),
    Column("LEASE TOKEN", _lease_token, is_number=True),
    Column("TOOK", lambda step: _duration(step.step_run), is_number=True),
    Column("EXECUTOR", lambda step: step.step_run.executor_name),
    Column("LAST WORD", lambda step: step.step_run.progress.message),
]
_ARTIFACTS: list[Column[Made]] = [
    Column("ARTIFACT", lambda made: made.artifact.name),
    Column("TYPE", lambda made: made.artifact.type),
    Column("SIZE", lambda made: words.size_text(made.artifact.digest.size_bytes), is_number=True),
    Column("SHA-256", lambda made: made.artifact.digest.sha256[:12]),
    Column("MADE BY", lambda made: made.made_by),
    Column("USED BY", lambda made: ", ".join(made.used_by) or "-"),
]
