"""Processes of a test are started, signalled and cleaned up by pid."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from rara_testing.processes import Processes

_LOOP = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid)
print("ready", os.getpid())
sys.stderr.write("hello from stderr\\n")
sys.stderr.flush()
time.sleep(600)
"""


def _is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_process_is_ready_when_its_line_came_and_dies_by_the_signal_sent(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        process = await processes.python("loop", _LOOP, ready="^ready")
        assert (await process.expect_line(r"ready (\d+)")).group(1) == str(process.pid)
        await process.kill_and_wait()
        assert process.returncode == -signal.SIGKILL


async def test_a_frozen_process_and_its_children_are_gone_at_the_end(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        process = await processes.python("loop", _LOOP, ready="^ready")
        child = int((await process.expect_line(r"child (\d+)")).group(1))
        process.freeze()
        async with asyncio.timeout(5):
            while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                await asyncio.sleep(0.01)
        assert not _is_gone(child)
    assert _is_gone(process.pid)
    assert _is_gone(child)


async def test_a_process_that_ends_early_shows_what_it_said(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        with pytest.raises(AssertionError, match=r"(?s)ended without 'ready'.*exit.*boom"):
            await processes.python("bad", "raise SystemExit('boom')", ready="ready")


async def test_the_caller_s_settings_do_not_leak_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RARA_LEASE_S", "1")
    async with Processes(tmp_path) as processes:
        process = await processes.python("env", "import os; print('got', os.environ.get('RARA_LEASE_S'))")
        assert (await process.expect_line("got (.*)")).group(1) == "None"
        assert await process.output() == ["got None"]
        assert process.returncode == 0
    assert os.environ["RARA_LEASE_S"] == "1"


async def test_memory_is_seen_and_limited(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(0.5); x = bytearray(1 << 30)"
    async with Processes(tmp_path) as processes:
        process = await processes.python("hog", code, ready="ready")
        assert process.resident_bytes() > 1 << 20
        process.limit_memory(200 << 20)
        assert await process.wait() == 1
        assert "MemoryError" in process.report()
        assert process.resident_bytes() == 0


async def test_children_are_found(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        process = await processes.python("loop", _LOOP, ready="^ready")
        child = int((await process.expect_line(r"child (\d+)")).group(1))
        assert process.children() == [child]
        await process.kill_and_wait()
        assert process.children() == []
