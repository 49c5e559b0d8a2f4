"""`rara db`: bring the database to this version's schema, and see where it stands."""

from collections.abc import Callable
from typing import Any

import click

from rara_cli.options import Group, pass_session
from rara_cli.session import Session


def _database_url(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--database-url",
        envvar="RARA_DATABASE_URL",
        required=True,
        metavar="URL",
        help="postgresql://..., of PostgreSQL itself rather than a pooler.  [env: RARA_DATABASE_URL]",
    )(function)


@click.group(cls=Group)
def db() -> None:
    """Migrate the database, or show where it stands."""


@db.command()
@_database_url
@pass_session
async def migrate(session: Session, database_url: str) -> None:
    """Apply the migrations that are missing. Safe to run from several places at once."""
    from rara_cli.database import migrate_database

    await migrate_database(session, database_url)


@db.command()
@_database_url
@pass_session
async def status(session: Session, database_url: str) -> None:
    """Show the migrations that are applied and missing. Changes nothing."""
    from rara_cli.database import show_status

    await show_status(session, database_url)
