"""`rara-executor` as a process of its own, with any module and any of its settings."""

from pathlib import Path
from typing import Any

from rara_testing.processes import Process, Processes
from support.running_executor import TESTS


async def spawn_executor(
    processes: Processes,
    address: str,
    folder: Path,
    *,
    module: str,
    name: str = "executor",
    env: dict[str, str] | None = None,
    **settings: Any,
) -> Process:
    """An executor that has connected. settings: RARA_EXECUTOR_* without the prefix."""
    chosen = {"slots": 10, "prestart": 2, "modules": module, "dir": folder / name, "name": name} | settings
    return await processes.start(
        name,
        ["rara-executor", "--scheduler", address],
        env={"PYTHONPATH": str(TESTS), "RARA_LOG_FORMAT": "json"}
        | {f"RARA_EXECUTOR_{key.upper()}": str(value) for key, value in chosen.items()}
        | (env or {}),
        ready="connected to",
    )
