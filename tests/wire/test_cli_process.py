"""The command as a process: what it loads, how Ctrl-C ends it, what a terminal shows."""

import asyncio
import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator
from importlib.metadata import version

import pytest
from rara.v1 import job_pb2, workflow_pb2
from support.command_line import ended, rara, rara_process
from support.scripted_workflow import ScriptedServer, scripted_server

RUN = "0198c2a0-0000-7000-8000-000000000001"


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted_server() as running:
        run = workflow_pb2.WorkflowRun(
            workflow_run_id=RUN,
            definition="nightly",
            definition_version=7,
            state=workflow_pb2.WORKFLOW_RUN_STATE_RUNNING,
        )
        running.workflow.put_run(run)
        running.workflow.put_step(
            workflow_pb2.StepRun(
                step_run_id=RUN[:-1] + "a",
                workflow_run_id=RUN,
                step_name="index",
                state=workflow_pb2.STEP_RUN_STATE_RUNNING,
                attempt=2,
                executor_name="exec-2",
                progress=job_pb2.JobProgress(fraction=0.57, message="41k rows/s"),
            )
        )
        yield running


def modules_after(*arguments: str) -> set[str]:
    """Top-level modules that a command line has loaded when it ends."""
    code = (
        "import sys\nfrom rara_cli.__main__ import run\n"
        f"run({list(arguments)!r})\n"
        "print('\\nMODULES', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.rpartition("MODULES ")[2].split())


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), ("run", "--help"), ("run", "start", "--help"), ("completion", "bash")],
)
def test_neither_grpc_nor_pydantic_nor_rich_is_loaded_before_it_is_needed(arguments: tuple[str, ...]) -> None:
    loaded = modules_after(*arguments)
    assert (
        loaded & {"grpc", "google", "pydantic", "rich", "asyncpg", "yaml", "rara_client", "asyncio"} == set()
    )
    assert "click" in loaded


def test_a_list_loads_neither_pydantic_nor_the_database_nor_yaml() -> None:
    loaded = modules_after("run", "list", "--server", "127.0.0.1:1", "--timeout", "0.1")
    assert loaded & {"pydantic", "asyncpg", "yaml", "structlog", "rara_scheduler", "rara_executor"} == set()


async def test_the_version_is_that_of_the_distribution() -> None:
    assert (await rara("--version")).out == f"rara {version('rara')}\n"


async def wait_for(reader: asyncio.StreamReader, text: bytes) -> bytes:
    """Read until the text has come."""
    seen = b""
    async with asyncio.timeout(30):
        while text not in seen:
            data = await reader.read(4096)
            assert data, f"{text!r} never came, but {seen!r}"
            seen += data
    return seen


@pytest.mark.parametrize("output", ["table", "jsonl"])
async def test_ctrl_c_detaches_from_a_watch_says_so_and_leaves_the_run_alone(
    server: ScriptedServer, output: str
) -> None:
    process = await rara_process("watch", RUN, "-o", output, "--server", server.address)
    assert process.stdout is not None
    await wait_for(process.stdout, b"index")
    process.send_signal(signal.SIGINT)
    result = await ended(process)
    assert result.code == 130
    assert result.err == (
        f"rara: INTERRUPTED: detached from run {RUN}, which goes on (next: rara watch {RUN})\n"
    )
    if output == "jsonl":
        assert '"type":"result"' in result.lines[-1]
        assert '"exit_code":130' in result.lines[-1]
    assert server.script.requests("CancelRun") == []


async def test_ctrl_c_ends_other_commands_on_one_line(server: ScriptedServer) -> None:
    process = await rara_process("run", "wait", RUN, "--server", server.address)
    async with asyncio.timeout(30):
        while not server.script.requests("WatchRun"):
            await asyncio.sleep(0.02)
    process.send_signal(signal.SIGINT)
    result = await ended(process)
    assert (result.code, result.err.count("\n"), "Traceback" in result.err) == (130, 1, False)


async def test_a_reader_that_has_enough_is_no_error(server: ScriptedServer) -> None:
    for number in range(200, 2200):
        server.workflow.runs[f"{number:036d}"] = workflow_pb2.WorkflowRun(
            workflow_run_id=f"{number:036d}", definition="nightly"
        )
    line = f"{sys.executable} -m rara_cli run list --limit 2000 --server {server.address} | head -1"
    process = await asyncio.create_subprocess_shell(
        f"set -o pipefail; {line}",
        executable="/bin/bash",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    result = await ended(process)
    assert (result.code, result.err, len(result.lines)) == (0, "", 1)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
async def test_completion_scripts_call_the_command_back(shell: str) -> None:
    script = (await rara("completion", shell)).out
    assert f"_RARA_COMPLETE={shell}_complete" in script
    process = await rara_process(
        env={
            "_RARA_COMPLETE": "bash_complete",
            "COMP_WORDS": "rara run st",
            "COMP_CWORD": "2",
        }
    )
    assert "start" in (await ended(process)).out


# A test runner sets some of them for its own output; each wins over what the terminal says.
_TERMINAL_SETTINGS = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *arguments: str, env: dict[str, str], columns: int = 100, rows: int = 24) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in _TERMINAL_SETTINGS}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rara_cli", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color", "PYTHONUTF8": "1", **env},
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.text = ""

    def write(self, text: str) -> None:
        os.write(self._master, text.encode())

    async def until(self, *wanted: str) -> None:
        """Read until all of the texts have been on the screen."""
        async with asyncio.timeout(30):
            while not all(text in self.text for text in wanted):
                with contextlib.suppress(BlockingIOError):
                    self.text += os.read(self._master, 65536).decode("utf-8", "replace")
                await asyncio.sleep(0.02)

    async def end(self) -> int:
        async with asyncio.timeout(30):
            while self.process.poll() is None:
                with contextlib.suppress(BlockingIOError, OSError):
                    self.text += os.read(self._master, 65536).decode("utf-8", "replace")
                await asyncio.sleep(0.02)
        with contextlib.suppress(OSError):
            while data := os.read(self._master, 65536):
                self.text += data.decode("utf-8", "replace")
        os.close(self._master)
        return self.process.returncode


async def test_a_terminal_gets_a_live_view_with_states_as_words(server: ScriptedServer) -> None:
    terminal = Terminal("watch", RUN, "--server", server.address, env={})
    await terminal.until(
        "nightly v7", "RUNNING", "▶ index", "running", "attempt 2", "[#########-------] 57%", "exec-2"
    )
    await terminal.until("detach with Ctrl-C", f"rara why {RUN}/index")
    step = server.workflow.steps[RUN[:-1] + "a"]
    step.state = workflow_pb2.STEP_RUN_STATE_SUCCEEDED
    server.workflow.put_step(step)
    run = server.workflow.runs[RUN]
    run.state = workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED
    server.workflow.put_run(run)
    assert await terminal.end() == 0
    assert "✓ index" in terminal.text
    assert f"run {RUN} succeeded" in terminal.text
    assert "\x1b[?25l" in terminal.text
    assert terminal.text.rstrip().endswith("succeeded")


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"NO_COLOR": "1"}], ids=["dumb", "no-color"])
async def test_a_dumb_terminal_gets_plain_lines_and_no_color_no_colours(
    server: ScriptedServer, env: dict[str, str]
) -> None:
    terminal = Terminal("watch", RUN, "--server", server.address, env=env)
    await terminal.until("index")
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.end() == 130
    assert re.search("\x1b\\[[0-9;]*3[0-9]m", terminal.text) is None
    if "TERM" in env:
        assert "\x1b" not in terminal.text


async def test_a_table_on_a_narrow_terminal_fits_and_keeps_ids_whole(server: ScriptedServer) -> None:
    terminal = Terminal("run", "list", "--server", server.address, env={"NO_COLOR": "1"}, columns=60)
    assert await terminal.end() == 0
    lines = terminal.text.splitlines()
    assert all(len(line) <= 60 for line in lines)
    assert lines[1].startswith(RUN)


async def test_a_person_is_asked_before_a_cancel(server: ScriptedServer) -> None:
    for answer, code, sent in (("n\n", 2, 0), ("y\n", 0, 1)):
        terminal = Terminal("run", "cancel", RUN, "--server", server.address, env={})
        await terminal.until(f"cancel run {RUN}? [y/N]")
        terminal.write(answer)
        assert await terminal.end() == code
        assert len(server.script.requests("CancelRun")) == sent
