"""docs/how-to/run-with-compose.md from its first command to its last, as they are typed."""

import re
import uuid
from pathlib import Path

import pytest
from support.compose import ROOT, docker, typed
from support.transcripts import commands, differences
from support.transcripts import typed as shown_in

pytestmark = [pytest.mark.needs("containers"), pytest.mark.soak]

WHOLE_PAGE = (ROOT / "docs" / "how-to" / "run-with-compose.md").read_text()
# A system of its own: test_compose_tls.py.
PAGE = re.sub(r"\n## With TLS and tokens.*?(?=\n## )", "", WHOLE_PAGE, flags=re.DOTALL)
SHOWN = {one.command: one.shown for one in shown_in(PAGE)}
COMPOSE = "docker compose -f deploy/docker-compose.yml "


def block(text: str, language: str) -> str:
    """The only block of this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(found)


def own_steps(folder: Path) -> Path:
    """The page's `mine.yml`, for the step of the README."""
    steps = folder / "steps"
    steps.mkdir()
    (steps / "wordcount.py").write_text(block((ROOT / "README.md").read_text(), "python"))
    for path, mode in ((folder, 0o755), (steps, 0o755), (steps / "wordcount.py", 0o644)):
        path.chmod(mode)  # the containers' user is not ours
    mine = folder / "mine.yml"
    mine.write_text(block(PAGE, "yaml").replace("/path/to/your/folder", str(steps)))
    return mine


def as_typed(command: str, mine: Path) -> str:
    """The line with what the reader has to put in, and without what only a registry can give."""
    command = command.replace("-f mine.yml", f"-f {mine}").replace("STEP", "clean")
    return command.replace("observability up", "observability config --quiet")


async def test_every_command_of_the_page_works_and_prints_what_it_shows(tmp_path: Path) -> None:
    name = f"rara-test-{uuid.uuid4().hex[:8]}"
    mine = own_steps(tmp_path)
    try:
        for command in sorted(commands(PAGE), key=lambda line: line.endswith(" down")):
            printed = await typed(as_typed(command, mine), name)
            difference = differences(SHOWN.get(command, ()), printed)
            assert not difference, f"{command}\n{difference}"
            if "mine.yml" in command:
                offered = await typed(f"{COMPOSE} run --rm cli rara executor list", name)
                assert "words.count 1.0.0" in offered
            if "--scale" in command:
                assert len((await typed(f"{COMPOSE} ps -q scheduler", name)).split()) == 2
        left = await docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={name}")
        assert left == ""
    finally:
        await typed(f"{COMPOSE} down -v --timeout 1", name)
