"""`rara run`: start, list, get, compare, watch, wait, cancel and retry runs."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from rara_cli.options import Command, Group, Seconds, filter_options, pass_session
from rara_cli.session import Session
from rara_cli.statewords import RUN_STATES

if TYPE_CHECKING:
    from rara_cli.bulk import Filter


@click.group(cls=Group)
def run() -> None:
    """Start, list, get, compare, watch, wait for, cancel and retry runs."""


@run.command()
@click.argument("name")
@click.option(
    "--input",
    "input_texts",
    multiple=True,
    metavar="@FILE|@-|JSON|KEY=VALUE",
    help="The run's input; KEY=VALUE may be given more than once, and a VALUE that is JSON is that value.",
)
@click.option(
    "--version", "version", type=click.IntRange(1), help="Of the definition.  [default: the newest]"
)
@click.option("--key", help="Idempotency key: the same key and content give the same run.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="May be given more than once.")
@click.option(
    "--artifact",
    "artifacts",
    multiple=True,
    metavar="NAME=PATH",
    help="Upload a file as an input artifact; may be given more than once.",
)
@click.option("--run-timeout", type=Seconds(), help="The run's deadline.  [default: the definition's]")
@click.option("--watch", is_flag=True, help="Show the run until it has ended.")
@click.option("--wait", is_flag=True, help="Wait until the run has ended.")
@pass_session
async def start(
    session: Session,
    name: str,
    input_texts: tuple[str, ...],
    version: int | None,
    key: str | None,
    labels: tuple[str, ...],
    artifacts: tuple[str, ...],
    run_timeout: float | None,
    watch: bool,
    wait: bool,
) -> int:
    """Start a run of the definition NAME."""
    from rara_cli import inputs
    from rara_cli.runs import after_start

    payload = inputs.read_input(input_texts)
    tags = inputs.read_labels(labels)
    files = inputs.read_artifacts(artifacts)
    async with session.connect() as client:
        response = await client.start_run(
            name,
            payload,
            # Without a key of the caller's an own one, so that a retry after a lost answer starts no second run.
            idempotency_key=key or f"cli-{uuid.uuid4()}",
            definition_version=version or 0,
            input_artifacts=await inputs.upload(client, files),
            run_timeout=timedelta(seconds=run_timeout) if run_timeout is not None else None,
            labels=tags,
            timeout_s=None if watch or wait else session.timeout_s,
        )
        verb = "was started before" if response.already_started else "started"
        return await after_start(session, client, response.run, verb, watch=watch, wait=wait)


@click.command(cls=Command)
@click.option("--definition", default="", help="Only runs of this definition.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(RUN_STATES), help="May be given more than once."
)
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="All that are given must hold.")
@click.option("--since", type=Seconds(), help="Only runs created within this time: 30m, 24h, 7d.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=50, show_default=True)
@pass_session
async def list_runs(
    session: Session,
    definition: str,
    states: tuple[str, ...],
    labels: tuple[str, ...],
    since: float | None,
    limit: int,
) -> None:
    """List runs, newest first."""
    from rara_cli.inputs import read_labels
    from rara_cli.lookup import take
    from rara_cli.runs import show_runs
    from rara_cli.words import run_state_number

    tags = read_labels(labels)
    async with session.connect() as client:
        runs = await take(
            client.list_runs(
                definition=definition,
                states=[run_state_number(state) for state in states],
                labels=tags,
                created_from=datetime.now(UTC) - timedelta(seconds=since) if since is not None else None,
                page_size=min(limit, 1000),
                timeout_s=session.timeout_s,
            ),
            limit,
        )
    show_runs(session, runs)


run.add_command(list_runs, "list")


@run.command()
@click.argument("run_text", metavar="RUN", required=False)
@click.option("--latest", is_flag=True, help="The run that was created last.")
@pass_session
async def get(session: Session, run_text: str | None, latest: bool) -> None:
    """Show a run and its steps."""
    from rara_cli.lookup import find_run
    from rara_cli.runs import show_run

    async with session.connect() as client:
        run_id = await find_run(client, run_text, latest=latest)
        response = await client.get_run(run_id, include_steps=True, timeout_s=session.timeout_s)
    show_run(session, response)


@run.command()
@click.argument("run_texts", metavar="A B", nargs=-1)
@click.option(
    "--latest",
    is_flag=True,
    help="B is the run that was created last; without A, A is the one of its definition before it.",
)
@click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="Steps that the table shows."
)
@click.option(
    "--exit-code",
    "tell_by_exit",
    is_flag=True,
    help="End with 9 if the results differ, 8 if not all has ended and what has is the same.",
)
@pass_session
async def compare(
    session: Session, run_texts: tuple[str, ...], latest: bool, limit: int, tell_by_exit: bool
) -> int:
    """Tell which steps of two runs differ, and because of which input, definition or code.

    Steps are matched by name. A cause is a step that differs by something of its own; a consequence differs through
    what the steps before it gave.
    """
    from rara_cli.compare import compare as compared
    from rara_cli.compareload import load_pair
    from rara_cli.lookup import find_pair
    from rara_cli.runcompare import exit_of, show_comparison

    async with session.connect() as client:
        a, b = await find_pair(client, run_texts, latest=latest)
        comparison = compared(*await load_pair(client, a, b, timeout_s=session.timeout_s))
    show_comparison(session, comparison, limit=limit)
    return exit_of(comparison) if tell_by_exit else 0


@click.command(cls=Command)
@click.argument("run_text", metavar="RUN", required=False)
@click.option("--latest", is_flag=True, help="The run that was created last.")
@pass_session
async def watch(session: Session, run_text: str | None, latest: bool) -> int:
    """Show a run until it has ended; Ctrl-C detaches and leaves it alone.

    The exit code is the run's: 0 succeeded, 10 failed, 11 cancelled, 12 deadline exceeded, 8 still going when
    --timeout ended.
    """
    from rara_cli.follow import follow_run
    from rara_cli.lookup import find_run

    async with session.connect() as client:
        run_id = await find_run(client, run_text, latest=latest)
        return await follow_run(session, client, run_id, is_silent=False)


run.add_command(watch, "watch")


@run.command()
@click.argument("run_texts", metavar="RUN...", nargs=-1)
@click.option("--latest", is_flag=True, help="The run that was created last.")
@pass_session
async def wait(session: Session, run_texts: tuple[str, ...], latest: bool) -> int:
    """Wait until a run has ended, or several have; the exit code is as with watch.

    Of several it is that of the first named that did not succeed. - reads whole ids from standard input, one a line.
    """
    from rara_cli.follow import follow_run
    from rara_cli.lookup import find_run, find_runs
    from rara_cli.waiting import wait_for_runs

    async with session.connect() as client:
        if len(run_texts) < 2 and run_texts != ("-",):
            run_id = await find_run(client, run_texts[0] if run_texts else None, latest=latest)
            return await follow_run(session, client, run_id, is_silent=True)
        return await wait_for_runs(session, client, await find_runs(client, run_texts, latest=latest))


@run.command()
@click.argument("run_texts", metavar="RUN...", nargs=-1)
@click.option("--latest", is_flag=True, help="The run that was created last.")
@click.option("--message", default="", help="Why, for those who look at the run later.")
@click.option(
    "--grace", type=Seconds(), help="Between asking the handlers and the kill.  [default: each step's]"
)
@filter_options(ended=False, states=("pending", "running"))
@pass_session
async def cancel(
    session: Session,
    run_texts: tuple[str, ...],
    latest: bool,
    message: str,
    grace: float | None,
    wanted: "Filter",
    preview_only: bool,
) -> int:
    """Cancel runs. A run that has ended stays as it is.

    Without RUN, by filter: all open runs for which every option that is given holds. Says how many, and asks.
    """
    from rara_cli.ask import confirm
    from rara_cli.bulk import cancel_by_filter, check_filter
    from rara_cli.lookup import find_run
    from rara_cli.runs import show_runs

    check_filter(wanted, run_texts, latest=latest, preview_only=preview_only)
    if wanted.is_given:
        return await cancel_by_filter(
            session, wanted, message=message, grace=grace, preview_only=preview_only
        )
    async with session.connect() as client:
        run_ids = [await find_run(client, text) for text in run_texts]
        if latest or not run_ids:
            run_ids.append(await find_run(client, None, latest=latest))
        what = f"cancel run {run_ids[0]}" if len(run_ids) == 1 else f"cancel {len(run_ids)} runs"
        confirm(session, what)
        runs = [
            await client.cancel_run(
                run_id,
                message,
                grace=timedelta(seconds=grace) if grace is not None else None,
                timeout_s=session.timeout_s,
            )
            for run_id in run_ids
        ]
    show_runs(session, runs)
    return 0


@run.command()
@click.argument("run_text", metavar="RUN", required=False)
@click.option("--latest", is_flag=True, help="The run that was created last.")
@click.option(
    "--step",
    "steps",
    multiple=True,
    metavar="NAME",
    help="This step and all behind it; may be given more than once.  [default: all that did not succeed]",
)
@click.option("--key", help="Idempotency key: the same key gives the same new run.")
@click.option("--watch", is_flag=True, help="Show the new run until it has ended.")
@click.option("--wait", is_flag=True, help="Wait until the new run has ended.")
@filter_options(ended=True, states=("failed", "cancelled"))
@pass_session
async def retry(
    session: Session,
    run_text: str | None,
    latest: bool,
    steps: tuple[str, ...],
    key: str | None,
    watch: bool,
    wait: bool,
    wanted: "Filter",
    preview_only: bool,
) -> int:
    """Start a new run that repeats what did not succeed in RUN.

    Without RUN, by filter: for all failed runs for which every option that is given holds, and which were never
    retried; cancelled ones with --state cancelled. Says how many, and asks. To do it again retries none again.
    """
    from rara_cli.bulk import check_filter, retry_by_filter
    from rara_cli.lookup import find_run
    from rara_cli.runs import after_start

    check_filter(wanted, (run_text,) if run_text else (), latest=latest, preview_only=preview_only)
    if wanted.is_given:
        if steps or key or watch or wait:
            raise click.UsageError("--step, --key, --watch and --wait are for one run, not for a filter")
        return await retry_by_filter(session, wanted, preview_only=preview_only)
    async with session.connect() as client:
        run_id = await find_run(client, run_text, latest=latest)
        response = await client.retry_run(
            run_id,
            idempotency_key=key or f"cli-{uuid.uuid4()}",
            step_names=steps,
            timeout_s=None if watch or wait else session.timeout_s,
        )
        verb = "was started before" if response.already_started else "started"
        return await after_start(session, client, response.run, verb, watch=watch, wait=wait)
