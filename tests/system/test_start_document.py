"""docs/start.md does what it says: its files are written, its commands are run."""

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
START = (ROOT / "docs" / "start.md").read_text()
COMMAND_S = 60.0


def block(language: str) -> str:
    """The only block of this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", START, re.DOTALL)
    return str(found)


def commands(section: str) -> list[str]:
    """What a section tells the reader to type in the second terminal."""
    text = START.partition(f"\n## {section}")[2].partition("\n## ")[0]
    shell = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    return [line for line in shell.splitlines() if line.startswith("rara ") and " dev up" not in line]


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


async def test_the_commands_of_the_running_stack_work_as_written(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = commands("3. ")
    assert len(lines) == 10
    async with dev_up(tmp_path) as address:
        said = {
            line.split()[1] + " " + line.split()[2]: await typed(line, tmp_path, address)
            for line in lines[:-1]
        }
        said["ps"] = await typed(lines[-1], tmp_path, address)
    assert "knowledge-pipeline v1 created" in said["definition apply"]
    assert "succeeded" in said["run start"]
    assert "# Which settings find most" in said["artifact cat"]
    assert "knowledge-pipeline" in said["ps"]
    assert "used by evaluate" in said["artifact lineage"]
    assert said["run compare"].splitlines()[-1] == (
        '3 of 5 steps differ: index because of input /tokenizer none → "porter";'
        " evaluate and adapt follow from that."
    )
    assert (tmp_path / ".rara" / "postgres").is_dir()


async def test_the_step_of_the_page_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text(block("python"))
    (tmp_path / "count-words.yaml").write_text(block("yaml"))
    (tmp_path / "README.md").write_text("to be or not to be\n")
    apply, start, cat = commands("4. ")
    async with dev_up(tmp_path, "--module", "words") as address:
        assert "count-words v1 created" in await typed(apply, tmp_path, address)
        assert "succeeded" in await typed(start, tmp_path, address)
        assert (await typed(cat, tmp_path, address)).split() == ["be", "not", "or", "to"]
