"""The chaos runner against the compose file: a short run ends well, and leaves nothing behind."""

import json
import os
import sys
from pathlib import Path

import pytest
from rara_chaos.composefaults import KINDS
from rara_testing.processes import Processes
from support.compose import TAG, docker

pytestmark = [pytest.mark.needs("containers"), pytest.mark.soak]

CHAOS_S = 900.0  # a first build, and a machine that is busy


async def test_a_minute_of_chaos_of_the_compose_stack_breaks_no_promise(tmp_path: Path) -> None:
    engine = {name: value for name, value in os.environ.items() if name.startswith("DOCKER_")}
    async with Processes(tmp_path) as processes:
        command = [sys.executable, "-m", "rara_chaos", "--target", "compose", "--duration", "60"]
        env = engine | {"RARA_TAG": TAG}
        chaos = await processes.start("chaos", [*command, "--every", "4"], env=env)
        lines = await chaos.output(CHAOS_S)
    assert chaos.returncode == 0, "\n".join(lines)
    said = json.loads(lines[-1])
    assert (said["target"], said["violations"], said["lost"], said["stranded"]) == ("compose", 0, 0, 0)
    assert set(said["faults"]) <= set(KINDS)
    assert len(said["faults"]) > len(KINDS) / 3
    assert all(said["faults"].values())
    assert 0 < said["steps"] <= said["attempts"]
    assert said["blobs_verified"]
    figures = said["figures"]
    assert {"database-1", "scheduler-1", "python-executor-2"} <= set(figures["memory"])
    assert figures["tables"]["end"]["result"]["rows"] > 0
    assert sum(figures["speed"][when]["run"]["count"] for when in ("start", "end")) > 0
    left = await docker("ps", "-aq", "--filter", "label=com.docker.compose.project=" + project_of(lines))
    assert left.split() == []


def project_of(lines: list[str]) -> str:
    (line,) = [line for line in lines if line.startswith("project ")]
    return line.split()[1]
