"""The README's example does what the README says."""

import os
import re
import shlex
import sys
from pathlib import Path

from rara_testing.processes import Processes
from support.documents import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """The only block of this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)


async def test_the_example_runs_as_shown(tmp_path: Path) -> None:
    (tmp_path / "wordcount.py").write_text(block("python"))
    (tmp_path / "wordcount.yaml").write_text(block("yaml"))
    up = re.search(r"`PYTHONPATH=\. (rara dev up [^`]+)`", README)
    assert up is not None
    commands = [line[2:] for line in block("console").splitlines() if line.startswith("$ ")]
    shown = [line for line in block("console").splitlines() if not line.startswith("$ ")]

    path = os.pathsep.join(filter(None, [".", os.environ.get("PYTHONPATH", "")]))
    async with Processes(tmp_path / "logs") as processes:
        rara = [sys.executable, "-m", "rara_cli"]
        stack = await processes.start(
            "up",
            [*rara, *shlex.split(up[1])[1:], "--port", "0"],
            env={"PYTHONPATH": path},
            cwd=tmp_path,
        )
        address = (await stack.expect_line(r"^rara is up at (\S+)$", timeout_s=90))[1]
        lines: list[str] = []
        for command in commands:
            typed = await processes.start(
                "typed",
                [*rara, *shlex.split(command)[1:]],
                env={"PYTHONPATH": path, "RARA_SERVER": address},
                cwd=tmp_path,
            )
            lines = await typed.output(60)
            assert typed.returncode == 0, typed.report()
        stack.interrupt()
        assert await stack.wait(60) == 0, stack.report()
    assert lines == shown
