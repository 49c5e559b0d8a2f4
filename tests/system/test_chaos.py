"""The chaos runner from end to end: its exit code, and the line that it ends with."""

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from rara_chaos import clock, disk
from rara_chaos.schedule import MACHINE_KINDS, PROCESS_KINDS, Kind
from rara_testing.processes import Processes

pytestmark = pytest.mark.soak


async def test_a_minute_of_chaos_breaks_no_promise(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        chaos = await processes.start("chaos", [sys.executable, "-m", "rara_chaos", "--duration", "60"])
        lines = await chaos.output(300)
        assert chaos.returncode == 0, "\n".join(lines)
        said = json.loads(lines[-1])
        assert lines[0].startswith(f"seed {said['seed']},")
        assert (said["violations"], said["lost"], said["stranded"]) == (0, 0, 0)
        here = {Kind.CLOCK_JUMPED: not clock.why_not(), Kind.DISK_FULL: not disk.why_not(tmp_path)}
        assert set(here) == set(MACHINE_KINDS)
        assert set(said["faults"]) == {*PROCESS_KINDS, *(kind for kind in MACHINE_KINDS if here[kind])}
        assert all(said["faults"].values())
        assert 0 < said["steps"] <= said["attempts"]
        assert said["artifacts"]
        assert said["blobs_verified"]
        kinds = {"go", "python"} if shutil.which("go") else {"python"}
        assert set(said["attempts_by_kind"]) == set(said["executor_faults"]) == kinds
        assert all(said["executor_faults"].values())
        assert bool(said["handovers"]) == (len(kinds) > 1)
        assert said["figures"]["tables"]["end"]["result"]["rows"] > 0
        assert {"scheduler-0", "executor-0"} <= set(said["figures"]["memory"])


async def test_ctrl_c_ends_it_with_all_its_processes(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        command = [sys.executable, "-m", "rara_chaos", "--duration", "60", "--seed", "1"]
        chaos = await processes.start("chaos", command)
        await chaos.expect_line(r"\d s  \w+, begun", 60)
        chaos.interrupt()
        assert await chaos.wait(60) == 128 + signal.SIGINT
        assert "stopped" in chaos.lines[-1]
        assert chaos.children() == []
