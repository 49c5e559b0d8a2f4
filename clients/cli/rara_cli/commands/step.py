"""`rara step`: list, get and requeue steps, see their events, and why they do not run."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from rara_cli.options import Command, Group, filter_options, pass_session
from rara_cli.session import Session
from rara_cli.statewords import STEP_STATES

if TYPE_CHECKING:
    from rara_cli.bulk import Filter


@click.group(cls=Group)
def step() -> None:
    """List, get and requeue steps, see their events, and why they do not run.

    STEP is an id, the unique beginning of one, or RUN/NAME; with --latest the NAME alone.
    """


@step.command("list")
@click.argument("run_text", metavar="[RUN]", required=False)
@click.option("--latest", is_flag=True, help="Of the run that was created last.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(STEP_STATES), help="May be given more than once."
)
@click.option("--kind", default="", help="Only steps of this kind.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@pass_session
async def list_steps(
    session: Session, run_text: str | None, latest: bool, states: tuple[str, ...], kind: str, limit: int
) -> None:
    """List the steps of a run, or of all runs."""
    from rara_cli.lookup import find_run, take
    from rara_cli.steps import show_steps
    from rara_cli.words import step_state_number

    async with session.connect() as client:
        run_id = await find_run(client, run_text, latest=latest) if run_text or latest else ""
        steps = await take(
            client.list_step_runs(
                run_id,
                states=[step_state_number(state) for state in states],
                kind=kind,
                page_size=min(limit, 1000),
                timeout_s=session.timeout_s,
            ),
            limit,
        )
    if run_id:  # the newest first is for lists of all runs; within one the order of the definition says more
        steps.sort(key=lambda step: step.step_run_id)
    show_steps(session, steps)


@step.command()
@click.argument("step_text", metavar="STEP", required=False)
@click.option("--latest", is_flag=True, help="STEP is a name in the run that was created last.")
@pass_session
async def get(session: Session, step_text: str | None, latest: bool) -> None:
    """Show a step, its output and its attempts."""
    from rara_cli.lookup import find_step
    from rara_cli.steps import show_step

    async with session.connect() as client:
        found = await find_step(client, step_text, latest=latest)
        response = await client.get_step_run(found.step_run_id, timeout_s=session.timeout_s)
    show_step(session, response)


@step.command()
@click.argument("step_text", metavar="STEP", required=False)
@click.option("--latest", is_flag=True, help="STEP is a name in the run that was created last.")
@click.option("--attempt", type=click.IntRange(1), help="[default: the newest]")
@click.option("--after", type=click.IntRange(0), default=0, help="Only events after this sequence number.")
@click.option("-f", "--follow", is_flag=True, help="Go on until the attempt has ended.")
@pass_session
async def events(
    session: Session, step_text: str | None, latest: bool, attempt: int | None, after: int, follow: bool
) -> None:
    """Print the stored events of an attempt, in order."""
    from rara_cli.lookup import find_step
    from rara_cli.stepevents import print_events

    async with session.connect() as client:
        found = await find_step(client, step_text, latest=latest)
        await print_events(session, client, found.step_run_id, attempt or 0, after, is_endless=follow)


@click.command(cls=Command)
@click.argument("step_text", metavar="STEP", required=False)
@click.option("--latest", is_flag=True, help="STEP is a name in the run that was created last.")
@pass_session
async def why(session: Session, step_text: str | None, latest: bool) -> None:
    """Say what keeps a step from running or ending, the first in the way first."""
    from rara_cli.answers import show_one
    from rara_cli.jsonview import to_json
    from rara_cli.lookup import find_step
    from rara_cli.steps import explanation

    async with session.connect() as client:
        found = await find_step(client, step_text, latest=latest)
        response = await client.explain_step(found.step_run_id, timeout_s=session.timeout_s)
        names: dict[str, str] = {}
        if any(obstacle.step_run_ids for obstacle in response.obstacles):
            async for other in client.list_step_runs(response.step_run.workflow_run_id, page_size=1000):
                names[other.step_run_id] = other.step_name
    show_one(
        session,
        to_json(response),
        name=response.step_run.step_run_id,
        lines=lambda: explanation(response, names, datetime.now(UTC)),
    )


step.add_command(why, "why")


@step.command()
@filter_options(ended=False, states=())
@pass_session
async def requeue(session: Session, wanted: "Filter", preview_only: bool) -> int:
    """End the waits of steps that back off: of all for which every option that is given holds.

    Says how many, and asks. What they have spent stays spent.
    """
    from rara_cli.bulk import requeue_by_filter

    if not wanted.is_given:
        raise click.UsageError("give a filter, or --all")
    return await requeue_by_filter(session, wanted, preview_only=preview_only)
