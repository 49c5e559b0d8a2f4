"""The Go executors as processes: built once for the test process, and started with any of their settings."""

import functools
import subprocess
import tempfile
from pathlib import Path

from rara_testing.processes import Process, Processes

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def _folder() -> "tempfile.TemporaryDirectory[str]":
    """Kept until this process ends. Go's own cache makes a second build short."""
    folder = tempfile.TemporaryDirectory(prefix="rara-go-")
    subprocess.run(
        ["go", "build", "-o", folder.name + "/", "./cmd/..."],
        cwd=ROOT / "executors" / "go",
        check=True,
        timeout=600,
    )
    return folder


def program(name: str) -> Path:
    """`rara-go-executor` with the pipeline's operations, or `rara-go-probe`."""
    return Path(_folder().name) / name


async def spawn_go_executor(
    processes: Processes,
    address: str,
    folder: Path,
    *,
    name: str = "go",
    command: str = "rara-go-probe",
    env: dict[str, str] | None = None,
    ready: str = "connected to",
    **settings: object,
) -> Process:
    """A Go executor that has connected. settings: RARA_EXECUTOR_* without the prefix."""
    chosen = {"slots": 10, "dir": folder / name, "name": name} | settings
    return await processes.start(
        name,
        [str(program(command)), "--scheduler", address],
        env={f"RARA_EXECUTOR_{key.upper()}": str(value) for key, value in chosen.items()} | (env or {}),
        ready=ready,
    )
