"""The Go executor of the demo, built from a checkout's sources where Go is there."""

import asyncio
import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Final

PACKAGE: Final = "./cmd/rara-go-executor"
SOURCES: Final = Path(__file__).resolve().parents[3] / "executors" / "go"
# With empty caches two idle cores take about half of it; then the caches make it a second.
BUILD_WITHIN_S: Final = 75.0
_REASON_CHARS: Final = 200


class NotBuilt(Exception):
    """There is no Go executor to be had here. The text says why, in one line."""


async def build_go_executor(
    target: Path, *, sources: Path = SOURCES, within_s: float = BUILD_WITHIN_S
) -> Path:
    """Build the program as `target`, which is returned. Raises NotBuilt."""
    go = shutil.which("go")
    if go is None:
        raise NotBuilt("there is no `go` on the PATH")
    if not (sources / "go.mod").is_file():
        raise NotBuilt("this installation comes without the Go sources")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        async with asyncio.timeout(within_s):
            code, output = await _run(
                go, "build", "-buildvcs=false", "-o", str(target), PACKAGE, folder=sources
            )
    except TimeoutError:
        raise NotBuilt(f"`go build` took more than {within_s:g} s; the next one goes on from there") from None
    except OSError as error:
        raise NotBuilt(f"`go` does not start: {error.strerror}") from error
    if code != 0:
        raise NotBuilt(f"`go build` failed: {_reason(output)}")
    return target


async def _run(*command: str, folder: Path) -> tuple[int, str]:
    """Exit code and standard error. When cancelled, the command ends with all that it has started."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        # An older Go would download a newer one first, which takes long and is not ours to decide.
        env={**os.environ, "GOTOOLCHAIN": "local"},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, output = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    return await process.wait(), output.decode("utf-8", "replace")


def _reason(output: str) -> str:
    """The first line that is about the failure; `# PACKAGE` only heads what follows."""
    lines = (line.strip() for line in output.splitlines())
    told = (line for line in lines if line and not line.startswith(("go: downloading ", "# ")))
    return next(told, "it does not say why")[:_REASON_CHARS]
