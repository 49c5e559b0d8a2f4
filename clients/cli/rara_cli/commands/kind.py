"""`rara kind`: pause and resume kinds of steps."""

import click

from rara_cli.options import Group, pass_session, pause_options
from rara_cli.session import Session


@click.group(cls=Group)
def kind() -> None:
    """Pause and resume kinds of steps, of whichever definition."""


@kind.command()
@click.argument("name", metavar="KIND")
@pause_options
@pass_session
async def pause(session: Session, name: str, reason: str, even_if_unknown: bool) -> None:
    """Lease no more steps of KIND, until it is resumed. What runs goes on."""
    from rara_cli.pauses import pause_one

    await pause_one(session, kind=name, reason=reason, even_if_unknown=even_if_unknown)


@kind.command()
@click.argument("name", metavar="KIND")
@pass_session
async def resume(session: Session, name: str) -> None:
    """Lease steps of KIND again."""
    from rara_cli.pauses import resume_one

    await resume_one(session, kind=name)
