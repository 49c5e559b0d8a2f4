"""`rara db`: bring the database to this version's schema, see where it stands, check and prune its history."""

from collections.abc import Callable
from typing import Any

import click

from rara_cli.options import Group, Seconds, blob_store_option, pass_session
from rara_cli.session import Session


def database_url_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--database-url, for commands that work on the database itself."""
    return click.option(
        "--database-url",
        envvar="RARA_DATABASE_URL",
        required=True,
        metavar="URL",
        help="postgresql://..., of PostgreSQL itself rather than a pooler.  [env: RARA_DATABASE_URL]",
    )(function)


@click.group(cls=Group)
def db() -> None:
    """Migrate, check or prune the database, or show where it stands."""


@db.command()
@database_url_option
@pass_session
async def migrate(session: Session, database_url: str) -> None:
    """Apply the migrations that are missing. Safe to run from several places at once."""
    from rara_cli.database import migrate_database

    await migrate_database(session, database_url)


@db.command()
@database_url_option
@pass_session
async def status(session: Session, database_url: str) -> None:
    """Show the migrations that are applied and missing. Changes nothing."""
    from rara_cli.database import show_status

    await show_status(session, database_url)


@db.command()
@database_url_option
@blob_store_option(required=False)
@click.option(
    "--blobs",
    type=click.Choice(("none", "size", "digest")),
    help="Look at stored blobs, too: that they are there with their size, or at every byte."
    "  [default: size, where a blob store is given]",
)
@click.option(
    "--overdue",
    "overdue_s",
    type=Seconds(),
    help="Also report leases, waits and deadlines that nobody served for so long.",
)
@click.option(
    "--max-attempts",
    envvar="RARA_RETRY_MAX_ATTEMPTS",
    type=click.IntRange(1),
    help="Of steps whose definition does not say; else they are left out.  [env: RARA_RETRY_MAX_ATTEMPTS]",
)
@click.option(
    "--limit", type=click.IntRange(1), default=20, help="Most violations listed of a rule.  [default: 20]"
)
@pass_session
async def check(
    session: Session,
    database_url: str,
    blob_store: str | None,
    blobs: str | None,
    overdue_s: float | None,
    max_attempts: int | None,
    limit: int,
) -> int:
    """Hold the stored history, and what lies in the blob store, against every promise.

    Reads one snapshot and changes nothing, so that it may be run beside schedulers at work. --timeout bounds each
    query. Exits with 7 when a promise is broken.
    """
    from rara_cli import database, dbcheck

    async with database.database_faults():
        return await dbcheck.check_history(
            session,
            database_url,
            blob_store=blob_store,
            blobs=blobs,
            overdue_s=overdue_s,
            max_attempts=max_attempts,
            limit=limit,
        )


@db.command()
@database_url_option
@click.option(
    "--keep-days",
    envvar="RARA_RETENTION_DAYS",
    required=True,
    type=click.IntRange(1, 36_500),
    metavar="DAYS",
    help="Keep what ended so many days ago, or less.  [env: RARA_RETENTION_DAYS]",
)
@click.option(
    "--days-ahead",
    envvar="RARA_HISTORY_PARTITIONS_AHEAD",
    type=click.IntRange(1, 30),
    default=3,
    help="Make the partitions of so many days to come.  [env: RARA_HISTORY_PARTITIONS_AHEAD; default: 3]",
)
@click.option("--dry-run", is_flag=True, help="Only say what is past retention.")
@pass_session
async def prune(session: Session, database_url: str, keep_days: int, days_ahead: int, dry_run: bool) -> int:
    """Remove runs, events and attempts that are past retention, now; schedulers do it once an hour by themselves.

    Whole days of history are dropped as partitions, runs go in small pieces, beside schedulers at work. A run stays
    while a retry of it does, or the idempotency key that started it is younger than a week. May be interrupted at any
    moment, and run from several places at once. Exits with 6 when something could not be removed now.
    """
    from rara_cli import database, prune

    async with database.database_faults():
        return await prune.prune(session, database_url, keep_days, days_ahead, dry_run)


@db.command()
@database_url_option
@pass_session
async def restored(session: Session, database_url: str) -> None:
    """Say that this database came back from a backup, before schedulers start on it.

    Lease tokens then go on above all that were granted since the backup, so that what attempts of that time wrote
    elsewhere, fenced by their tokens, is not in the way of their successors. May be repeated; harms nothing.
    """
    from rara_cli import database, restored

    async with database.database_faults():
        await restored.raise_lease_tokens(session, database_url)
