"""`rara token`: make, list and revoke the bearer tokens of the API, in the database itself."""

import click

from rara_cli.commands.db import database_url_option
from rara_cli.options import Group, Seconds, pass_session
from rara_cli.session import Session


@click.group(cls=Group)
def token() -> None:
    """Make, list and revoke bearer tokens, directly in the database."""


@token.command()
@click.argument("name")
@database_url_option
@click.option("--role", required=True, type=click.Choice(("client", "executor", "operator")))
@click.option(
    "--kind",
    "kinds",
    multiple=True,
    help="What an executor may offer: a kind, PREFIX.* or '*'; may be given more than once.",
)
@click.option("--executor-kind", help="The only executor_kind that an executor may claim.")
@click.option("--expires", "expires_s", type=Seconds(), help="From now: 12h, 90d.  [default: never]")
@pass_session
async def create(
    session: Session,
    name: str,
    database_url: str,
    role: str,
    kinds: tuple[str, ...],
    executor_kind: str | None,
    expires_s: float | None,
) -> None:
    """Make a token for NAME, and print it: this once, for only its hash is kept.

    Tokens of one name stand for the same bearer: to change one, make a second, hand it over, revoke the first.
    """
    from rara_cli import database, tokens

    async with database.database_faults():
        await tokens.create_token(
            session,
            database_url,
            name=name,
            role=role,
            kinds=kinds,
            executor_kind=executor_kind,
            expires_s=expires_s,
        )


@token.command("list")
@database_url_option
@click.option("--all", "with_ended", is_flag=True, help="Also revoked and expired ones.")
@pass_session
async def list_tokens(session: Session, database_url: str, with_ended: bool) -> None:
    """List tokens, never their text."""
    from rara_cli import database, tokens

    async with database.database_faults():
        await tokens.show_tokens(session, database_url, with_ended=with_ended)


@token.command()
@click.argument("tokens", nargs=-1, required=True, metavar="ID|NAME...")
@database_url_option
@pass_session
async def revoke(session: Session, tokens: tuple[str, ...], database_url: str) -> None:
    """End tokens by id, or all of a name. Calls stop within RARA_TOKEN_RECHECK_S, streams too."""
    from rara_cli import database
    from rara_cli import tokens as commands

    async with database.database_faults():
        await commands.revoke_tokens(session, database_url, tokens)
