"""The global options: where the scheduler is, and how answers are shown."""

import sys
from dataclasses import dataclass
from os import environ
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rara_client import Client

FORMATS = ("table", "wide", "json", "jsonl", "name")


@dataclass(slots=True)
class Session:
    """Filled from flags, then `RARA_*`, then these defaults. `timeout_s`: None for a command's own default."""

    server: str = "127.0.0.1:7310"
    output: str = "table"
    color: str = "auto"
    time: str = ""  # empty: relative on a terminal, iso elsewhere
    timeout_s: float | None = None
    no_input: bool = False
    yes: bool = False
    verbose: bool = False
    # What Ctrl-C left behind, for the last line.
    farewell: str = ""
    farewell_next: str = ""

    def connect(self) -> "Client":
        """A client of the scheduler, to be used as an async context manager."""
        from rara_client import Client, Security

        from rara_cli.exits import CommandError, Exit

        try:
            security = Security.from_environment(environ)
            if security.exposes_token(self.server) and security.insecure:
                self.note("warning: RARA_INSECURE=1 sends the token in plain text")
            return Client.connect(self.server, security=security)
        except ValueError as error:
            raise CommandError(Exit.USAGE, "USAGE", str(error)) from error

    @property
    def on_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def is_dumb(self) -> bool:
        return environ.get("TERM", "") in ("dumb", "")

    @property
    def in_color(self) -> bool:
        """The flag, then NO_COLOR, then CLICOLOR_FORCE, then whether stdout is a terminal that can."""
        if self.color != "auto":
            return self.color == "always"
        if environ.get("NO_COLOR"):
            return False
        if environ.get("CLICOLOR_FORCE", "0") not in ("", "0"):
            return True
        return self.on_terminal and not self.is_dumb

    @property
    def is_live(self) -> bool:
        """Whether the screen may be drawn over."""
        return self.on_terminal and not self.is_dumb

    @property
    def may_ask(self) -> bool:
        return not self.no_input and sys.stdin.isatty() and sys.stderr.isatty()

    @property
    def time_style(self) -> str:
        return self.time or ("relative" if self.on_terminal else "iso")

    def note(self, line: str) -> None:
        """Say something that is not data."""
        print(line, file=sys.stderr, flush=True)
