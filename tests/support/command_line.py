"""The `rara` command within a test's own loop, so that it can talk to a server of that loop; and as a process."""

import asyncio
import inspect
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from rara_cli.__main__ import complete, parse, report
from rara_cli.exits import Exit
from rara_cli.session import Session

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str
    raw: bytes = b""

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


async def rara(
    *arguments: str, stdin: bytes = b"", server: str = "", env: Mapping[str, str] | None = None
) -> Ended:
    """Run a command line as the console script would, without a terminal."""
    out, err = io.BytesIO(), io.BytesIO()
    session = Session()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_COLOR", "CLICOLOR_FORCE", "RARA_SERVER", "RARA_TOKEN", "RARA_OUTPUT"):
            patch.delenv(name, raising=False)
        for name, value in {"RARA_SERVER": server, **(env or {})}.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8", write_through=True))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding="utf-8", write_through=True))
        try:
            outcome = parse(arguments, session)
            if inspect.iscoroutine(outcome):
                async with asyncio.timeout(LIMIT_S):
                    outcome = await complete(outcome)
            code = outcome if isinstance(outcome, int) else Exit.OK
        except Exception as error:
            code = report(error, session)
        return Ended(
            int(code), out.getvalue().decode("utf-8", "replace"), err.getvalue().decode(), out.getvalue()
        )


async def rara_process(*arguments: str, env: Mapping[str, str] | None = None) -> asyncio.subprocess.Process:
    """The command as a process of its own, its output in pipes."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rara_cli",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(env or {})},
    )


async def ended(process: asyncio.subprocess.Process) -> Ended:
    """Wait for a process."""
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    code = process.returncode
    assert code is not None
    return Ended(code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), out)
