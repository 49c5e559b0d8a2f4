"""`rara executor`: who is there to run steps."""

import click

from rara_cli.options import Group, pass_session
from rara_cli.session import Session
from rara_cli.statewords import EXECUTOR_STATES


@click.group(cls=Group)
def executor() -> None:
    """See the executors."""


@executor.command("list")
@click.option("--kind", default="", help="Only those that offer this kind.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(EXECUTOR_STATES),
    help="May be given more than once.",
)
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@pass_session
async def list_executors(session: Session, kind: str, states: tuple[str, ...], limit: int) -> None:
    """List executors, what they offer and how busy they are."""
    from rara_cli.executors import show_executors
    from rara_cli.lookup import take
    from rara_cli.words import executor_state_number

    async with session.connect() as client:
        found = await take(
            client.list_executors(
                kind=kind,
                states=[executor_state_number(state) for state in states],
                page_size=min(limit, 1000),
                timeout_s=session.timeout_s,
            ),
            limit,
        )
    show_executors(session, found)
