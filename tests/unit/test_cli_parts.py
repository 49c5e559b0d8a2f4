"""A child process that is kept running, with small programs in the place of services."""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from rara_cli import part
from rara_cli.part import Part, PartFailed, PartSpec, PartState

SERVE = """
import signal, sys, time
print("noise", flush=True)
print("ready on 127.0.0.1:4711", flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(600)
"""


class Parts:
    """Makes parts, and stops them at the end of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._made: list[Part] = []

    def make(self, code: str, *, ready_within_s: float = 30.0, stop_within_s: float = 10.0) -> Part:
        spec = PartSpec(
            name="server",
            command=(sys.executable, "-c", code),
            env=dict(os.environ),
            ready=re.compile(r"ready on (?P<address>\S+)"),
            log=self.folder / "logs" / "server.log",
            ready_within_s=ready_within_s,
            stop_within_s=stop_within_s,
        )
        self._made.append(Part(spec, report=self.said.append))
        return self._made[-1]

    async def stop(self) -> None:
        for made in self._made:
            await made.stop()


@pytest.fixture
async def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Parts]:
    monkeypatch.setattr(part, "_BACKOFF_S", (0.01, 0.01, 0.01))
    made = Parts(tmp_path)
    yield made
    await made.stop()


async def test_start_returns_what_the_ready_line_says_and_stop_ends_the_process(parts: Parts) -> None:
    server = parts.make(SERVE)
    assert (await server.start())["address"] == "127.0.0.1:4711"
    pid = server.pid
    assert pid is not None
    states = [server.state]
    await server.stop()
    states.append(server.state)
    assert states == [PartState.READY, PartState.STOPPED]
    assert server.pid is None
    assert not psutil.pid_exists(pid)
    await server.stop()


async def test_a_part_that_was_killed_is_started_again_and_found_ready(parts: Parts) -> None:
    server = parts.make(SERVE)
    await server.start()
    killed = await server.kill()
    await server.ready()
    assert server.pid not in (None, killed)
    assert server.restarts == 1
    assert parts.said == ["server was ended by SIGKILL; starting it again in 0.01 s"]


async def test_a_part_killed_to_stay_down_comes_back_when_revived(parts: Parts) -> None:
    server = parts.make(SERVE)
    await server.start()
    await server.kill(restart=False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(server.ready(), 0.2)
    assert server.pid is None
    await server.revive()
    assert server.pid is not None


async def test_many_kills_on_purpose_are_no_sign_of_trouble(parts: Parts) -> None:
    server = parts.make(SERVE)
    await server.start()
    for _ in range(6):
        await server.kill()
        await server.ready()
    assert server.restarts == 6


async def test_a_part_that_ends_before_it_is_ready_fails_at_once_with_the_end_of_its_log(
    parts: Parts,
) -> None:
    server = parts.make("import sys; print('RARA_LEASE_S is wrong'); sys.exit(3)")
    with pytest.raises(PartFailed) as caught:
        await server.start()
    assert str(caught.value).startswith("server ended with exit code 3; its log ")
    assert str(caught.value).endswith("\n  RARA_LEASE_S is wrong")
    assert server.state is PartState.FAILED
    assert server.restarts == 0


async def test_a_part_that_keeps_dying_is_given_up(parts: Parts) -> None:
    server = parts.make("print('ready on x', flush=True); raise SystemExit(7)")

    async def live() -> None:
        await server.start()
        await server.ended()

    with pytest.raises(PartFailed, match="server ended with exit code 7 4 times"):
        await live()
    assert server.restarts == 3


async def test_a_part_that_is_never_ready_is_killed_and_reported(parts: Parts) -> None:
    server = parts.make("import time; time.sleep(600)", ready_within_s=0.3)
    with pytest.raises(PartFailed, match=r"was not ready within 0\.3 s"):
        await server.start()
    assert server.pid is None


async def test_a_part_that_ignores_the_request_is_killed_with_all_it_started(parts: Parts) -> None:
    server = parts.make(
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('ready on', child.pid, flush=True)\n"
        "print(f'ready on {child.pid}', flush=True)\n"
        "time.sleep(600)\n",
        stop_within_s=0.3,
    )
    child = int((await server.start())["address"])
    await server.stop()
    assert parts.said == ["server did not stop within 0.3 s: killed"]
    await gone(child)


async def test_stopping_during_the_start_leaves_nothing(parts: Parts) -> None:
    server = parts.make("import time; time.sleep(600)")
    starting = asyncio.create_task(server.start())
    async with asyncio.timeout(10):
        while server.pid is None:
            await asyncio.sleep(0.01)
    pid = server.pid
    await server.stop()
    with pytest.raises(PartFailed):
        await starting
    assert not psutil.pid_exists(pid)


async def test_a_part_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, re, sys\n"
        "from pathlib import Path\n"
        "from rara_cli.part import Part, PartSpec\n"
        "async def main():\n"
        "    spec = PartSpec('server', (sys.executable, '-c', sys.argv[2]), dict(os.environ),\n"
        "                    re.compile(r'ready on .*'), Path(sys.argv[1]) / 'server.log')\n"
        "    server = Part(spec, report=print)\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path), SERVE, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    pid = int(await asyncio.wait_for(owner.stdout.readline(), 30))
    assert psutil.pid_exists(pid)
    owner.send_signal(signal.SIGKILL)
    await owner.wait()
    await gone(pid)


async def gone(pid: int) -> None:
    """Wait until a process has ended; one that nobody reaps counts as ended."""
    async with asyncio.timeout(10):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)
