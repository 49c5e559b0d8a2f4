"""Asking before what cannot be undone."""

import click

from rara_cli.exits import CommandError, Exit
from rara_cli.session import Session


def confirm(session: Session, what: str) -> None:
    """Return if the person agrees, or has said --yes. Raises CommandError where nobody can be asked."""
    if session.yes:
        return
    if not session.may_ask:
        raise CommandError(
            Exit.USAGE, "CONFIRMATION_NEEDED", f"{what}: nobody is here to ask", "the same with --yes"
        )
    if not click.confirm(f"{what}?", err=True):
        raise CommandError(Exit.USAGE, "NOT_CONFIRMED", "nothing was done")
