"""`rara-scheduler` as a process of its own, with the tests' short times."""

from collections.abc import Mapping
from pathlib import Path

from rara_testing.processes import Process, Processes
from support.running_scheduler import TEST_VALUES


async def start_scheduler(
    processes: Processes,
    database_url: str,
    folder: Path,
    *,
    name: str = "scheduler",
    env: Mapping[str, str] | None = None,
    **settings: object,
) -> tuple[Process, str]:
    """One that serves, and its address. settings: over the test values."""
    values = (
        TEST_VALUES | {"database_url": database_url, "blob_store": f"file://{folder / 'blobs'}"} | settings
    )
    process = await processes.start(
        name,
        ["rara-scheduler"],
        env={f"RARA_{key.upper()}": str(value) for key, value in values.items()} | dict(env or {}),
        ready="listening on",
    )
    match = await process.expect_line(r"listening on (?P<address>\S+)")
    return process, match["address"]
