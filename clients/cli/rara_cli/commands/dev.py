"""`rara dev`: all of Rara on this machine, for trying out."""

from pathlib import Path

import click

from rara_cli.options import Group, pass_session
from rara_cli.session import Session

DEFAULT_DIRECTORY = Path(".rara")
DEFAULT_PORT = 7310
DEFAULT_MODULE = "knowledge_pipeline.operations"


@click.group(cls=Group)
def dev() -> None:
    """All of Rara on this machine: database, scheduler and an executor."""


@dev.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=True,
    help="Where all data is kept.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one."
)
@click.option(
    "--module",
    "modules",
    multiple=True,
    default=(DEFAULT_MODULE,),
    show_default=True,
    help="Python module with your operations; may be given more than once.",
)
@click.option("--slots", type=click.IntRange(1, 1000), default=4, show_default=True, help="Jobs at once.")
@pass_session
async def up(session: Session, directory: Path, port: int, modules: tuple[str, ...], slots: int) -> int:
    """Start everything, and stop it with Ctrl-C.

    Each part writes its log to DIR/logs, with -v also to the terminal. A part that dies is started again; one
    that keeps dying ends everything.
    """
    from rara_cli.devup import stay_up
    from rara_cli.stack import StackSettings

    settings = StackSettings(directory=directory, port=port, modules=modules, slots=slots)
    return await stay_up(session, settings)


@dev.command()
@click.option(
    "--corpus",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of text or Markdown files.  [default: the Python language reference]",
)
@click.option(
    "--crash", is_flag=True, help="Kill the executor and the scheduler on the way, and show the recovery."
)
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where all data is kept.  [default: a new folder]",
)
@click.option(
    "--result",
    "result_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("demo-result.json"),
    show_default=True,
    help="File for the result as JSON.",
)
@click.option("--keep/--no-keep", default=False, show_default=True, help="Keep the folder afterwards.")
@pass_session
async def demo(
    session: Session,  # noqa: ARG001 - global options are taken, and mean nothing here
    corpus: Path | None,
    crash: bool,
    directory: Path | None,
    result_path: Path,
    keep: bool,
) -> int:
    """Run the example pipeline on real text, from an empty folder to the result."""
    from rara_cli.demo import run_demo

    return await run_demo(corpus=corpus, crash=crash, directory=directory, result_path=result_path, keep=keep)


@dev.command()
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    default=DEFAULT_DIRECTORY,
    show_default=True,
)
@pass_session
def reset(session: Session, directory: Path) -> None:
    """Delete what `dev up` keeps in DIR: database, artifacts and logs."""
    from rara_cli.devup import reset_folder

    reset_folder(session, directory)
