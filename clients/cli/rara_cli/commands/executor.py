"""`rara executor`: who is there to run steps."""

from datetime import timedelta

import click

from rara_cli.options import Group, Seconds, pass_session
from rara_cli.session import Session
from rara_cli.statewords import EXECUTOR_STATES


@click.group(cls=Group)
def executor() -> None:
    """See the executors, and take one out."""


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


@executor.command()
@click.argument("executor_texts", metavar="EXECUTOR...", nargs=-1, required=True)
@click.option(
    "--within", type=Seconds(), help="After that, what still runs is handed back.  [default: no limit]"
)
@pass_session
async def drain(session: Session, executor_texts: tuple[str, ...], within: float | None) -> None:
    """Give executors no new job; each finishes what it runs, and ends. EXECUTOR is an id or a name."""
    from rara_cli.ask import confirm
    from rara_cli.executors import show_executors
    from rara_cli.lookup import find_executor

    async with session.connect() as client:
        ids = [await find_executor(client, text) for text in executor_texts]
        confirm(session, f"drain executor {ids[0]}" if len(ids) == 1 else f"drain {len(ids)} executors")
        finish_within = None if within is None else timedelta(seconds=within)
        drained = [
            await client.drain_executor(executor_id, finish_within=finish_within, timeout_s=session.timeout_s)
            for executor_id in ids
        ]
    show_executors(session, drained)


@executor.command("verify")
@click.option(
    "--command", "command", default="", metavar="'CMD ...'", help="Start this executor; it gets RARA_*."
)
@click.option(
    "--address", default="", metavar="HOST:PORT", help="Dial one that serves ExecutorService already."
)
@click.option("--direct", is_flag=True, help="With --command: dial it instead of being dialled.")
@click.option("--scenario", "only", multiple=True, help="Play this one alone; may be given more than once.")
@click.option("--list", "only_list", is_flag=True, help="Say what the rules are, and play none.")
@pass_session
async def verify_command(
    session: Session, command: str, address: str, direct: bool, only: tuple[str, ...], only_list: bool
) -> None:
    """Play the contract's scenarios against an executor that offers the probe operations."""
    from rara_cli.conformance import show_rules, verify_executor

    if only_list:
        show_rules(session)
        return
    if bool(command) == bool(address):
        raise click.UsageError("give either --command or --address")
    await verify_executor(session, command=command, address=address, direct=direct, only=only)
