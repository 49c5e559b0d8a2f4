"""`rara completion`: the script that makes a shell complete our commands."""

import click
from click.shell_completion import get_completion_class

from rara_cli.options import Command


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell: str) -> None:
    """Print a completion script.

    \b
    bash: rara completion bash > ~/.local/share/bash-completion/completions/rara
    zsh:  rara completion zsh > "${fpath[1]}/_rara"
    fish: rara completion fish > ~/.config/fish/completions/rara.fish
    """
    from rara_cli.__main__ import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    print(kind(cli, {}, "rara", "_RARA_COMPLETE").source())
