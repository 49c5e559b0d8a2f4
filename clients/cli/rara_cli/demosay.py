"""What the demo says while it runs: lines that stay, and on a terminal one line that moves."""

import shutil
import sys
import time
from typing import Final, TextIO

import click

from rara_cli import words
from rara_cli.session import Session

# Piped, progress becomes lines of its own: at most so often.
_STATUS_S: Final = 2.0


class Narrator:
    """Writes lines with the seconds since the start. Set-up and progress only: results have no clock."""

    def __init__(self, session: Session, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._began = time.monotonic()
        self._is_live = session.is_live
        self._in_color = session.in_color
        self._has_status = False
        self._status_said = float("-inf")

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        self._wipe()
        self._write(f"{self._clock()}  {words.clean(text)}\n")

    def status(self, text: str) -> None:
        """How far something is: replaced by the next line on a terminal, thinned out otherwise."""
        line = f"{self._clock()}  {words.clean(text)}"
        if self._is_live:
            self._wipe()
            self._write(line[: shutil.get_terminal_size().columns - 1])
            self._has_status = True
        elif time.monotonic() - self._status_said >= _STATUS_S:
            self._status_said = time.monotonic()
            self._write(line + "\n")

    def plain(self, text: str = "") -> None:
        self._wipe()
        self._write(text + "\n")

    def heading(self, text: str) -> None:
        self.plain()
        self.plain(click.style(text, bold=True) if self._in_color else text)

    def _clock(self) -> str:
        return f"{self.elapsed_s:6.1f} s"

    def _wipe(self) -> None:
        if self._has_status:
            self._write("\r\x1b[K")
            self._has_status = False

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
