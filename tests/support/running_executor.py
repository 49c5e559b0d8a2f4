"""An executor in this process, with real runner processes, and the same as a process of its own."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from rara_executor.app import Executor
from rara_executor.settings import load

TESTS = Path(__file__).resolve().parent.parent
WAIT_S = 15.0


@contextlib.asynccontextmanager
async def running(
    address: str,
    folder: Path,
    *,
    modules: str = "support.handlers",
    stop_s: float = 5.0,
    security: Mapping[str, object] | None = None,
    **settings: Any,
) -> AsyncIterator[Executor]:
    """An executor that dials the address until the block ends; then it drains. security: settings of that."""
    given: dict[str, object] = {
        "scheduler": address,
        "executor_modules": modules,
        "executor_name": "test",
        "executor_dir": folder / "executor",
        "executor_prestart": 1,
        "executor_stop_s": stop_s,
        **{f"executor_{key}": value for key, value in settings.items()},
        **(security or {}),
    }
    executor = Executor(load(given), sys_path=[entry for entry in sys.path if entry])
    task = asyncio.create_task(executor.run(), name="executor")
    try:
        yield executor
    finally:
        executor.stop()
        async with asyncio.timeout(stop_s + WAIT_S):
            await task


async def until(ask: Any, *, bound_s: float = WAIT_S) -> Any:
    """Wait for something outside of this process: a file, an exit. What ask gives, once it gives something."""
    async with asyncio.timeout(bound_s):
        while not (answer := ask()):
            await asyncio.sleep(0.01)
    return answer
