"""docs/start.md does what it says: its files are written, its commands are run, and print what it shows."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support import transcripts

ROOT = Path(__file__).parents[2]
START = (ROOT / "docs" / "start.md").read_text()
COMMAND_S = 60.0


def block(language: str) -> str:
    """The only block of this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", START, re.DOTALL)
    return str(found)


def section(title: str) -> str:
    return START.partition(f"\n## {title}")[2].partition("\n## ")[0]


async def said(title: str, folder: Path, address: str) -> list[str]:
    """What the commands for the second terminal print. AssertionError where it is not what the section shows."""
    printed = []
    for one in transcripts.typed(section(title)):
        printed.append(await typed(one.command, folder, address))
        difference = transcripts.differences(one.shown, printed[-1])
        assert not difference, f"{one.command}\n{difference}"
    return printed


@asynccontextmanager
async def dev_up(folder: Path, *arguments: str) -> AsyncIterator[str]:
    """The address of a stack that runs in the folder."""
    path = os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH", "")]))
    with (folder / "up.stderr").open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rara_cli", "dev", "up", "--port", "0", *arguments),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(90):
            line = (await process.stdout.readline()).decode()
        match = re.fullmatch(r"rara is up at (\S+)\n", line)
        assert match, f"not up: {(folder / 'up.stderr').read_text()}"
        yield match[1]
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(COMMAND_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def typed(command: str, folder: Path, address: str) -> str:
    """Run a line as typed into a shell in the folder; what it printed. It has to succeed."""
    line = f"{shlex.quote(sys.executable)} -m rara_cli {command.removeprefix('rara ')}"
    process = await asyncio.create_subprocess_shell(
        line,
        cwd=folder,
        env={**os.environ, "RARA_SERVER": address},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(COMMAND_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{command}: {err.decode()}"
    return out.decode()


async def test_the_commands_of_the_running_stack_print_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    async with dev_up(tmp_path) as address:
        assert len(await said("3. ", tmp_path, address)) == 10
    assert (tmp_path / ".rara" / "postgres").is_dir()


async def test_the_step_of_the_page_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(block("python"))
    (tmp_path / "count-words.yaml").write_text(block("yaml"))
    (tmp_path / "README.md").write_text("to be or not to be\n")
    async with dev_up(tmp_path, "--module", "words") as address:
        *_, words = await said("4. ", tmp_path, address)
    assert words.split() == ["be", "not", "or", "to"]


def test_no_command_of_the_page_is_left_untried() -> None:
    tried = {one.command for title in ("3. ", "4. ") for one in transcripts.typed(section(title))}
    others = [line for line in transcripts.commands(START) if line not in tried]
    assert others == [
        "make demo",  # with what it prints, these three: tests/system/test_demo.py
        "make demo-crash",
        ".venv/bin/rara dev demo --corpus ~/notes",
        ". .venv/bin/activate",
        "rara dev up",  # `dev_up`, at a port of the test's own
        "PYTHONPATH=. rara dev up --module words",
    ]
