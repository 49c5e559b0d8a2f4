"""`rara artifact`: what runs produced."""

from pathlib import Path

import click

from rara_cli.commands.db import database_url_option
from rara_cli.options import Command, Group, Seconds, blob_store_option, pass_session
from rara_cli.session import Session


@click.group(cls=Group)
def artifact() -> None:
    """List, get and print the artifacts of runs; reclaim the space of those that nobody needs.

    NAME is an artifact's name; STEP/NAME where several steps have one of that name.
    """


@artifact.command("list")
@click.argument("run_text", metavar="RUN", required=False)
@click.option("--latest", is_flag=True, help="Of the run that was created last.")
@pass_session
async def list_artifacts(session: Session, run_text: str | None, latest: bool) -> None:
    """List what a run was given and what its steps produced."""
    from rara_cli.artifacts import artifacts_of, show_artifacts
    from rara_cli.lookup import find_run

    async with session.connect() as client:
        run_id = await find_run(client, run_text, latest=latest)
        found = await artifacts_of(client, run_id)
    show_artifacts(session, found)


@artifact.command()
@click.argument("words", metavar="RUN NAME", nargs=-1)
@click.option("--latest", is_flag=True, help="Of the run that was created last; then give NAME alone.")
@click.option("--to", "destination", type=click.Path(path_type=Path), help="File to write.  [default: NAME]")
@pass_session
async def get(session: Session, words: tuple[str, ...], latest: bool, destination: Path | None) -> None:
    """Write an artifact to a file, checked by its digest."""
    from rara_cli.artifacts import find_artifact, save_artifact

    async with session.connect() as client:
        found = await find_artifact(client, words, latest=latest)
        await save_artifact(session, client, found, destination)


@artifact.command()
@click.argument("words", metavar="RUN NAME", nargs=-1)
@click.option("--latest", is_flag=True, help="Of the run that was created last; then give NAME alone.")
@pass_session
async def cat(session: Session, words: tuple[str, ...], latest: bool) -> None:
    """Print an artifact's bytes."""
    from rara_cli.artifacts import find_artifact, print_artifact

    async with session.connect() as client:
        found = await find_artifact(client, words, latest=latest)
        await print_artifact(client, found)


@artifact.command()
@database_url_option
@blob_store_option(required=True)
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option(
    "--older-than",
    "unused_s",
    type=Seconds(),
    default="24h",
    help="Spare what was uploaded or asked for more lately.  [default: 24h]",
)
@click.option(
    "--grace",
    "grace_s",
    type=Seconds(),
    default="60s",
    help="Wait so long between marking and removing.  [default: 60s]",
)
@click.option("--force", is_flag=True, help="Even if this database knows less than half of what is stored.")
@pass_session
async def gc(
    session: Session,
    database_url: str,
    blob_store: str,
    dry_run: bool,
    unused_s: float,
    grace_s: float,
    force: bool,
) -> int:
    """Remove stored bytes that nothing refers to.

    Kept is what a manifest, a run's input, a checkpoint, an effect or an open upload names. Works on the database and
    the blob store themselves, beside schedulers at work; may be interrupted at any moment, and run from several places
    at once. Exits with 6 when something could not be removed now.
    """
    from rara_cli import database, garbage

    async with database.database_faults():
        return await garbage.collect(session, database_url, blob_store, unused_s, grace_s, dry_run, force)


class GraphCommand(Command):
    """A command whose answer may also be drawn."""

    more_formats = ("text", "mermaid", "dot")


@artifact.command("lineage", cls=GraphCommand)
@click.argument("arguments", metavar="DIGEST|RUN [NAME]", nargs=-1)
@click.option("--latest", is_flag=True, help="Of the run that was created last, or its artifact NAME.")
@click.option("--upstream", is_flag=True, help="Only what it was made from.")
@click.option("--downstream", is_flag=True, help="Only what was made from it.")
@click.option(
    "--depth",
    type=click.IntRange(1, 32),
    default=10,
    show_default=True,
    help="How many steps far.",
)
@click.option(
    "--rows", type=click.IntRange(1), default=200, show_default=True, help="Longest tree, in each direction."
)
@pass_session
async def show_lineage(
    session: Session,
    arguments: tuple[str, ...],
    latest: bool,
    upstream: bool,
    downstream: bool,
    depth: int,
    rows: int,
) -> None:
    """Show what an artifact was made from, and what was made from it.

    DIGEST is a SHA-256 or its first eight digits or more. Of a RUN, all that its steps used and made. With -o
    mermaid or -o dot as a graph.
    """
    from rara_cli import lineage

    wanted: list[lineage.Direction] = []
    if upstream or not downstream:
        wanted.append("upstream")
    if downstream or not upstream:
        wanted.append("downstream")
    async with session.connect() as client:
        start = await lineage.find_start(client, arguments, latest=latest)
        await lineage.show_lineage(session, client, start, depth=depth, directions=wanted, rows=rows)


@artifact.command()
@click.argument("arguments", metavar="DIGEST|RUN NAME", nargs=-1)
@click.option("--latest", is_flag=True, help="Of the run that was created last; then give NAME alone.")
@click.option("--rows", type=click.IntRange(1), default=200, show_default=True, help="Longest table.")
@pass_session
async def impact(session: Session, arguments: tuple[str, ...], latest: bool, rows: int) -> None:
    """Show what must be rebuilt when an artifact changes.

    The steps that used it or what was made from it, in the order in which they have to run again, with their runs
    and the artifacts that are stale then.
    """
    from rara_cli.impact import show_impact
    from rara_cli.lineage import find_artifact_start

    async with session.connect() as client:
        start = await find_artifact_start(client, arguments, latest=latest)
        await show_impact(session, client, start, rows=rows)
