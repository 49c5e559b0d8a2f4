"""`rara definition`: apply, list, get, validate, pause and resume workflow definitions."""

from pathlib import Path

import click

from rara_cli.options import Group, pass_session, pause_options
from rara_cli.session import Session

_FILES = click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)


@click.group(cls=Group)
def definition() -> None:
    """Apply, list, get and validate workflow definitions in YAML or JSON; pause and resume them."""


@definition.command()
@_FILES
@pass_session
async def apply(session: Session, files: tuple[Path, ...]) -> None:
    """Store definitions; the same content again changes nothing."""
    from rara_cli.definitions import register

    await register(session, files, validate_only=False)


@definition.command()
@_FILES
@click.option("--offline", is_flag=True, help="Check only what can be checked without a scheduler.")
@pass_session
async def validate(session: Session, files: tuple[Path, ...], offline: bool) -> None:
    """Check definitions and store nothing."""
    from rara_cli.definitions import register, show_checked

    if offline:
        show_checked(session, files)
    else:
        await register(session, files, validate_only=True)


@definition.command("list")
@click.argument("name", required=False, default="")
@click.option("--limit", type=click.IntRange(1, 100_000), default=1000, show_default=True)
@pass_session
async def list_definitions(session: Session, name: str, limit: int) -> None:
    """List the newest version of each definition, or all versions of NAME."""
    from rara_cli.definitions import show_definitions
    from rara_cli.lookup import take

    async with session.connect() as client:
        page = min(limit, 1000)
        found = await take(client.list_definitions(name, page_size=page, timeout_s=session.timeout_s), limit)
    show_definitions(session, found)


@definition.command()
@click.argument("name")
@click.option("--version", type=click.IntRange(1), help="[default: the newest]")
@pass_session
async def get(session: Session, name: str, version: int | None) -> None:
    """Show a definition."""
    from rara_cli.definitions import show_definition

    async with session.connect() as client:
        found = await client.get_definition(name, version or 0, timeout_s=session.timeout_s)
    show_definition(session, found)


@definition.command()
@click.argument("name")
@pause_options
@pass_session
async def pause(session: Session, name: str, reason: str, even_if_unknown: bool) -> None:
    """Lease no more steps of NAME's runs, until it is resumed. What runs goes on; runs can be started, and wait."""
    from rara_cli.pauses import pause_one

    await pause_one(session, definition=name, reason=reason, even_if_unknown=even_if_unknown)


@definition.command()
@click.argument("name")
@pass_session
async def resume(session: Session, name: str) -> None:
    """Lease steps of NAME's runs again."""
    from rara_cli.pauses import resume_one

    await resume_one(session, definition=name)
