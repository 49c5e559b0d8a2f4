"""`rara pause`: what is paused."""

import click

from rara_cli.options import Group, pass_session
from rara_cli.session import Session


@click.group(cls=Group)
def pause() -> None:
    """See what is paused. To pause: rara kind pause, rara definition pause."""


@pause.command("list")
@pass_session
async def list_pauses(session: Session) -> None:
    """List what is paused, by whom and why, and how many steps that holds back."""
    from rara_cli.pauses import show_pauses

    async with session.connect() as client:
        found = await client.list_pauses(timeout_s=session.timeout_s)
    show_pauses(session, found)
